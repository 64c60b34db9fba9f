"""Build models and optimizers from a user's objects, names or functions."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import keras

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.compat.keras_variables import trained_variables
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.facts import Facts
from hvdtrain.config.registry import suggestion
from hvdtrain.export.pruning import pruned_layers
from hvdtrain.export.tensors import is_rounded
from hvdtrain.gradients.distributed_optimizer import refuse_exchange_of_microbatches
from hvdtrain.layers.convert import with_sync_batch_norm
from hvdtrain.layers.exchanging import exchanging_layers
from hvdtrain.layers.experts import expert_layers
from hvdtrain.layers.recompute import Recompute
from hvdtrain.layers.sync_batch_norm import sync_layers
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.optimizers import known_optimizers, whole_update
from hvdtrain.optim.precision import precision, set_precision
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.initial_values import build_lazily
from hvdtrain.state.layer_states import copy_states
from hvdtrain.state.optimizers import optimizers_of
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.batches import has_own_train_step
from hvdtrain.training.update_rules.select import builds_sharded
from hvdtrain.training.update_rules.zero.building import build_with_shards


def model_for(backend: Backend, model: Any, options: StepOptions) -> Any:
    """Build the model without ever materializing more than this rank's shard. Raises ConfigError as `built_model`."""
    if not isinstance(model, keras.Model):
        if backend.axes.get("pp", 1) > 1:
            return build_lazily(lambda: built_model(model, options))
        if builds_sharded(options, backend):
            return build_with_shards(lambda: built_model(model, options), backend)
    return built_model(model, options)


def built_model(model: Any, options: StepOptions) -> Any:
    """Return or build `model` under the dtype policy of `options`. Raises ConfigError if impossible."""
    if options.precision is None:
        return _built(model, keras.Model)
    if isinstance(model, keras.Model):
        if model.dtype_policy.name != options.precision:
            set_precision(model, options.precision)
        return model
    with precision(options.precision):
        built = _built(model, keras.Model)
    if built.dtype_policy.name != options.precision:
        raise ConfigError(
            f"The function builds a model of the dtype policy {built.dtype_policy.name}, and precision="
            f"{options.precision!r} was asked for: leave out one of them."
        )
    return built


def refuse_instances(backend: str, model: Any, optimizer: Any) -> None:
    """Reject models and optimizers built outside a tf.distribute backend's scope."""
    kinds = {"model": (model, keras.Model), "optimizer": (optimizer, keras.optimizers.Optimizer)}
    for name, (given, kind) in kinds.items():
        if isinstance(given, kind):
            raise ConfigError(
                f"{opt('backend', backend)} makes variables for its replicas itself: give Trainer a function that "
                f"builds the {name}, such as lambda: {type(given).__name__}(...). Received: the {name} {given.name!r}."
            )


def converted(model: Any, options: StepOptions) -> Any:
    """Return `model`, or a copy with layers converted as in `options`."""
    if not options.sync_batch_norm:
        return model
    rounded = next(filter(is_rounded, flatten_layers(model)), None)
    if rounded is not None:
        raise ConfigError(
            f"{opt('sync_batch_norm', True)} makes a copy of the model, in which {rounded.path!r} is not rounded: "
            "use hvdtrain.SyncBatchNormalization in the model's code, or fake_quantize the copy, trainer.model."
        )
    copy = with_sync_batch_norm(model)
    copy_states(model, copy)
    return copy


def job_facts(backend: Backend, controller: str | None = None, *, deterministic: bool = False) -> Facts:
    """Return what `backend` says about a job; `controller` is Horovod's, `deterministic` the processes' option."""
    return Facts.on_mesh(
        backend.axes,
        backend=backend.name,
        size=backend.size,
        processes=backend.processes,
        controller=controller if backend.size > 1 else None,
        deterministic=(deterministic and backend.size > 1) or None,
    )


def model_facts(job: Facts, model: Any, optimizer: Any = None) -> Facts:
    """Return `job` with what is known of the model's layers and variables, and of its optimizer."""
    layers = flatten_layers(model)
    exchanging = exchanging_layers(model)
    experts = expert_layers(model)
    divided = [layer for layer in exchanging if layer.divided]
    placed = [(v, placement) for v in model.variables if (placement := placement_of(v)) is not None]
    tied = model.tied.items() if isinstance(model, PipelineStage) else ()
    inner = None if optimizer is None else innermost(optimizer)
    return replace(
        job,
        own_step=_named(model) if has_own_train_step(model) else "",
        sync_layer=_first(sync_layers(model)),
        stateful_layer=_first(layer for layer in layers if getattr(layer, "stateful", False)),
        averages=f"{type(inner).__name__}(use_ema=True)" if inner is not None and inner.use_ema else "",
        pruned_layer=_first(pruned_layers(model)),
        recompute_layer=_first(layer for layer in layers if isinstance(layer, Recompute)),
        exchanging_layer=_first(layer for layer in exchanging if layer.exchanges),
        divided_layer=_first(divided),
        sharded_table=_first(layer for layer in divided if layer not in experts),
        experts=next((v.path for v, placement in placed if placement.held_by and v.trainable), ""),
        split=_named(model) if any(placement.axes for _, placement in placed) else "",
        tied_weight=next((path for path, weight in tied if weight.trainable), ""),
        loss_scale=type(optimizer).__name__ if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else "",
        several_optimizers=type(inner).__name__ if getattr(inner, "optimizers", ()) else "",
        whole_optimizer="" if inner is None else whole_update(inner),
        global_clipnorm=f"{type(inner).__name__}(global_clipnorm=…)" if getattr(inner, "global_clipnorm", None) else "",
    )


def _first(layers: Iterable[Any]) -> str:
    return next(map(_named, layers), "")


def _named(layer: Any) -> str:
    return f"{type(layer).__name__} {layer.name!r}"


def check_split(model: Any, axes: Mapping[str, int]) -> None:
    """Reject mesh axes along which `model` is not split: their ranks would duplicate work.

    Splits without sharded variables are recorded in the model's `split_along`. Raises ConfigError naming the axis.
    """
    used = {"dp", *getattr(model, "split_along", ())}
    for variable in model.variables:
        placement = placement_of(variable)
        used.update(() if placement is None else placement.axes)
    for axis, size in axes.items():
        if axis not in used:
            raise ConfigError(
                f"{opt('parallel')} names an axis along which nothing of the model {model.name!r} is split: its {size} "
                f"ranks would all do the same work. Received: {axis}={size}. Leave the axis out; docs/parallel.md has "
                "what splits a model."
            )


def splits_sequences(model: Any) -> bool:
    """Return whether the sequences of `model` are sharded along cp."""
    return "cp" in getattr(model, "split_along", ())


def built_optimizer(optimizer: Any, model: Any) -> Any:
    """Return `optimizer`, or the one that it names or builds.

    Raises ConfigError for one that reduces gradients itself or per microbatch, or has the state of other variables than
    those of `model`.
    """
    if isinstance(optimizer, str):
        known = known_optimizers()
        if optimizer.lower() not in known:
            raise ConfigError(
                f"Unknown optimizer {optimizer!r}.{suggestion(optimizer.lower(), dict.fromkeys(known, ''))}"
            )
        optimizer = known[optimizer.lower()]
    built = _built(optimizer, keras.optimizers.Optimizer)
    refuse_exchange_of_microbatches(built, "Trainer")
    # Of a model that holds several each may train a part.
    held = any(built is each for each in optimizers_of(model).values())
    if built.built and not held and not _ids(model.trainable_variables) <= _ids(trained_variables(built)):
        raise ConfigError(
            f"The optimizer {built.name!r} was built for other variables than those of the model {model.name!r}, which "
            "may be a copy (sync_batch_norm=True makes one): give a new optimizer."
        )
    return built


def _ids(variables: Any) -> set[int]:
    return {id(variable) for variable in variables}


def _built(thing: Any, kind: type) -> Any:
    if not isinstance(thing, kind) and callable(thing):
        thing = thing()
    if not isinstance(thing, kind):
        raise ConfigError(f"A Keras {kind.__name__} or a function that builds one is needed. Received: {thing!r}.")
    return thing
