"""Build models and optimizers from a user's objects, names or functions."""

from collections.abc import Mapping
from typing import Any

import keras

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.compat.keras_variables import trained_variables
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.registry import suggestion
from hvdtrain.gradients.distributed_optimizer import refuse_exchange_of_microbatches
from hvdtrain.layers.convert import with_sync_batch_norm
from hvdtrain.layers.exchanging import exchanging_layers
from hvdtrain.layers.recompute import Recompute
from hvdtrain.layers.sync_batch_norm import sync_layers
from hvdtrain.optim.optimizers import check_updates_slices, known_optimizers
from hvdtrain.optim.precision import precision, set_precision
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.initial_values import build_lazily
from hvdtrain.state.layer_states import copy_states
from hvdtrain.state.optimizers import optimizers_of
from hvdtrain.training.options import StepOptions
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
    if splits_sequences(model) or any(placement_of(variable) is not None for variable in model.variables):
        raise ConfigError(
            f"{opt('sync_batch_norm')} copies the model, and {model.name!r} is split among ranks: use "
            "hvdtrain.SyncBatchNormalization in its code, and leave the option out."
        )
    copy = with_sync_batch_norm(model)
    copy_states(model, copy)
    return copy


def check_layers(model: Any, options: StepOptions) -> None:
    """Reject options incompatible with layers of `model` (ConfigError naming both)."""
    if options.jit and any(isinstance(layer, Recompute) for layer in flatten_layers(model)):
        raise ConfigError(
            f"XLA merges the second forward pass of hvdtrain.Recompute with the first: leave out {opt('jit')}."
        )
    synchronized = sync_layers(model)
    exchanging = [layer for layer in exchanging_layers(model) if layer.exchanges]
    compiled: list[Any] = [*exchanging, *synchronized] if options.jit else []
    for layer in compiled:
        raise ConfigError(
            f"XLA cannot hold the exchange of {type(layer).__name__} {layer.name!r}: leave out {opt('jit')}."
        )
    if synchronized and options.reduce_op == "adasum":
        raise ConfigError(
            "Adasum combines gradients of one rank each, and SyncBatchNormalization "
            f"{synchronized[0].name!r} gives every rank a part of the others': leave out {opt('reduce_op', 'adasum')}."
        )


def refuse_carried_states(model: Any) -> None:
    """Reject recurrent layers that carry states from batch to batch, by the place of a sample in it (ConfigError)."""
    for layer in flatten_layers(model):
        if getattr(layer, "stateful", False):
            raise ConfigError(
                f"{type(layer).__name__} {layer.name!r} is stateful: it carries the state of each sample of a batch to "
                "the next batch, and a rank has a slice of the batch. Train it in one process, or use stateful=False."
            )


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


def check_expert_parallel(model: Any, options: StepOptions) -> None:
    """Reject options that do not support expert-parallel variables. Raises ConfigError naming the option."""
    held = next((v for v in model.trainable_variables if (p := placement_of(v)) is not None and p.held_by), None)
    unfit = {
        opt("local_steps", options.local_steps): options.local_steps is not None,
        opt("reduce_op", "adasum"): options.reduce_op == "adasum",
    }
    for option, used in unfit.items():
        if held is not None and used:
            raise ConfigError(
                f"{option} exchanges every variable with all ranks, and those along ep hold different slices of "
                f"{held.path}: leave out {option}, or ep in {opt('parallel')}."
            )


def check_slices(model: Any, optimizer: Any, options: StepOptions) -> None:
    """Reject an optimizer or options that need full variables. Raises ConfigError naming them."""
    placements = [placement_of(variable) for variable in model.variables]
    axes = {axis for placement in placements if placement is not None for axis in placement.axes}
    if not axes:
        return
    check_updates_slices(optimizer, f"{opt('parallel')} {','.join(sorted(axes))}=N")
    if options.jit:
        raise ConfigError(
            f"XLA cannot hold the exchanges of a model that is split among ranks: leave out {opt('jit')}."
        )
    if options.reduce_op == "adasum":
        raise ConfigError(
            "Adasum combines whole gradients, and ranks of a model that is split hold slices: leave out "
            f"{opt('reduce_op', 'adasum')}."
        )


def splits_sequences(model: Any) -> bool:
    """Return whether the sequences of `model` are sharded along cp."""
    return "cp" in getattr(model, "split_along", ())


def check_sequences(model: Any, options: StepOptions) -> None:
    """Reject options that do not support sequences sharded along cp. Raises ConfigError naming the option."""
    unfit = {
        opt("jit"): options.jit,
        opt("reduce_op", "adasum"): options.reduce_op == "adasum",
        opt("local_steps", options.local_steps): options.local_steps is not None,
    }
    for option, used in unfit.items():
        if used and splits_sequences(model):
            raise ConfigError(
                f"Ranks along cp compute one gradient together, and exchange positions within each step: leave out "
                f"{option}, or cp in {opt('parallel')}."
            )


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
