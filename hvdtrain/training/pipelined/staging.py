"""Replace the trainer's model by this rank's pipeline stages."""

import itertools
import json
from typing import Any

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.layers.exchanging import exchanging_layers
from hvdtrain.layers.experts import expert_layers
from hvdtrain.layers.sync_batch_norm import sync_layers
from hvdtrain.optim.averaging import innermost
from hvdtrain.parallel.pipeline.cut import changing_variables, cut_model, shared_variables
from hvdtrain.parallel.pipeline.schedule import schedule_of
from hvdtrain.parallel.pipeline.stage import PipelineStage, assign_stages, stage_assignment_of
from hvdtrain.state.initial_values import materialize
from hvdtrain.state.named_tensors import placed_tensor
from hvdtrain.state.variables import unwrap
from hvdtrain.training.options import StepOptions
from hvdtrain.training.pipelined.tied import gather_stages, share_tied_weights
from hvdtrain.training.step.batches import has_own_train_step

AXIS = "pp"


def staged(model: Any, backend: Backend, options: StepOptions, *, own: bool = False) -> Any:
    """Return this rank's stages, or `model` without a pp axis. Collective.

    With `own`, nothing else uses the model, and the weights of other stages are freed. Raises ConfigError for a model
    that cannot be split, incompatible options, or ranks that would split it differently.
    """
    ranks = backend.axes.get(AXIS, 1)
    if ranks == 1:
        return model
    _check_options(options, ranks)
    split = backend.axes.get("tp", 1) > 1
    cut = cut_model(model, ranks * options.virtual_stages, options.pipeline_stages, split=split)
    _check_model(model)
    stage = PipelineStage(model, cut, backend.along(AXIS).index, ranks)
    materialize(stage.variables)
    _refuse_shared_state(stage)
    _refuse_rounding_by_stage(stage, options)
    _agree(stage, backend)
    gather_stages(stage, backend.along(AXIS))
    share_tied_weights(stage, backend.along(AXIS))
    if own:
        stage.free_other_stages()
    else:
        assign_stages(model, stage)
    return stage


def _check_options(options: StepOptions, ranks: int) -> None:
    """Reject options that pipelines do not support."""
    options.refuse_with(
        f"{opt('parallel')} pp=…",
        {
            opt("jit"): options.jit,
            opt("sync_batch_norm"): options.sync_batch_norm,
            opt("local_steps"): options.local_steps is not None,
            opt("zero", options.zero): options.zero > 2,
            opt("reduce_op", "adasum"): options.reduce_op == "adasum",
        },
    )
    schedule_of(
        options.pipeline_schedule, rank=0, ranks=ranks, microbatches=options.accumulate, chunks=options.virtual_stages
    )


def _check_model(model: Any) -> None:
    experts = expert_layers(model)
    divided = next((layer for layer in exchanging_layers(model) if layer.divided and layer not in experts), None)
    if divided is not None:
        raise ConfigError(
            f"{type(divided).__name__} {divided.name!r} is divided among the ranks along ep, which does not go with "
            f"{opt('parallel')} pp=…: layers of experts alone do. Leave pp out, or let each rank hold the whole table."
        )
    synchronized = sync_layers(model)
    if synchronized:
        raise ConfigError(
            f"SyncBatchNormalization {synchronized[0].name!r} does not go with {opt('parallel')} pp=…: microbatches "
            "pass a "
            "stage at different times on each rank. Use BatchNormalization."
        )
    if has_own_train_step(model):
        raise ConfigError(
            f"{type(model).__name__} {model.name!r} has a train_step of its own, which calls the whole model: it does "
            f"not go with {opt('parallel')} pp=…."
        )


def _refuse_shared_state(stage: PipelineStage) -> None:
    """Reject a stateful layer that several stages call."""
    shared = shared_variables(stage.whole.cut)
    changing = changing_variables(stage.whole.model)
    for variable in stage.whole.model.variables:
        if id(unwrap(variable)) in changing and id(variable) in shared:
            stages = " and ".join(map(str, shared[id(variable)]))
            raise ConfigError(
                f"{variable.path!r} changes whenever its layer is called, and several stages of the pipeline would "
                f"each change a copy. Received: a layer that stages {stages} call. Use a layer for each call, or cut "
                f"the model elsewhere with {opt('pipeline_stages')}."
            )


def _refuse_rounding_by_stage(stage: PipelineStage, options: StepOptions) -> None:
    """Reject fp16 with tied weights: its scale depends on the message, so stages would diverge."""
    tied = next((path for path, weight in stage.tied.items() if weight.trainable), None)
    if tied is not None and options.compression == "fp16":
        raise ConfigError(
            f"{opt('compression', 'fp16')} does not go with a weight that several stages of a pipeline use. Received: "
            f"{tied!r}. "
            "Its scale is that of each stage's message, and the stages would drift apart: use "
            f"{opt('compression', 'bf16')}."
        )


def check_optimizer(model: Any, optimizer: Any) -> None:
    """Reject global-norm clipping by the optimizer, wrong per stage (ConfigError)."""
    inner = innermost(optimizer)
    if isinstance(model, PipelineStage) and inner.global_clipnorm is not None:
        raise ConfigError(
            f"{type(inner).__name__}(global_clipnorm=…) would clip each stage of a pipeline by its own norm: use "
            f"{opt('clip_norm', inner.global_clipnorm)}, which takes the norm over all stages."
        )


def _agree(stage: PipelineStage, backend: Backend) -> None:
    """Verify that ranks split the same model at the same layers: others would deadlock. Collective."""
    cut = stage.whole.cut
    weights = {path: [str(v.dtype), *placed_tensor(v).global_shape] for path, v in _weights(stage).items()}
    division = stage_assignment_of(stage.whole.model)
    mine = json.dumps([cut.bounds, weights, division and [*division.places.values()]])
    everyone = gather(backend, mine)
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        raise ConfigError(
            "Every rank cuts the same model at the same places. Received: rank "
            f"{other} has {_words(everyone[other])}, rank 0 {_words(everyone[0])}."
        )


def _weights(stage: PipelineStage) -> dict[str, Any]:
    return {stage.structure.path(variable): variable for variable in stage.whole.model.weights}


def _words(text: str) -> str:
    bounds, weights, division = json.loads(text)
    calls = ", ".join(str(end - begin) for begin, end in itertools.pairwise(bounds))
    model = "a model that another trainer has cut" if division else "a model"
    return f"{model} with {len(weights)} weights, and stages of {calls} calls"
