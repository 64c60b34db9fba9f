"""A pipeline rank's layers as a Keras model.

The layers of other ranks' stages stay in the original model and are not trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import (
    clear_losses,
    flatten_layers,
    functional_of,
    losses_of,
    mask_of,
    output_nest,
    set_mask,
    standardized_inputs,
)
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.layers.experts import MixtureOfExperts, expert_layers
from hvdtrain.parallel.outputs import marked_outputs, whole_outputs
from hvdtrain.parallel.pipeline.cut import Cut, shared_variables
from hvdtrain.parallel.pipeline.graph import run, variables_of
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.initial_values import uninitialize
from hvdtrain.state.named_tensors import elements, placed_tensor
from hvdtrain.state.structure import Structure, seed_states, structure_of
from hvdtrain.state.variables import unwrap


@dataclass(frozen=True, kw_only=True)
class TiedWeight:
    """A weight shared by stages on several ranks, such as tied embeddings."""

    places: tuple[int, ...]
    """Pipeline indices of the ranks that share it, ascending."""
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    expert_parallel: bool = False
    """Whether replicas hold different shards (expert parallel)."""


@dataclass(frozen=True)
class WholeModel:
    """The original model, wrapped to hide its layers from Keras' tracking."""

    model: Any
    cut: Cut
    structure: Structure
    generators: tuple[str, ...]
    """Paths of all random generators of the model."""


class PipelineStage(keras.Model):
    """The layers held by one rank of a pipeline: one stage, or several if interleaved.

    `Trainer.model` on each rank. Variables keep their paths in the full model.

    Args:
        model: a built Functional or Sequential model.
    """

    def __init__(self, model: Any, cut: Cut, rank: int, ranks: int) -> None:
        super().__init__(name=model.name, dtype=model.dtype_policy, autocast=False)
        self.supports_masking = True
        mine = range(rank, cut.stages, ranks)
        nodes = [node for stage in mine for node in cut.nodes(stage)]
        layers = {id(node.operation): node.operation for node in nodes if isinstance(node.operation, keras.Layer)}
        self.held_layers = list(layers.values())
        structure = structure_of(model)
        paths = tuple(structure.by_path(seed_states(model)))
        self.whole = WholeModel(model, cut, structure, paths)
        self.place, self.ranks = rank, ranks
        self.output_names = getattr(model, "output_names", None)  # for `compile`
        self.tied = _tied_weights(self.whole, ranks)
        """Tied weights by path."""
        self.stages = tuple(mine)
        """This rank's stages, ascending."""
        self.whole_parameters = sum(elements(placed_tensor(weight).global_shape) for weight in model.weights)
        """Number of scalars in the full model's weights."""
        self.split_along = _axes_of(model)
        """Mesh axes along which the model is split, possibly on other stages."""
        self.built = True

    @property
    def structure(self) -> Structure:
        """Structure of the full model."""
        return self.whole.structure

    @property
    def generator_paths(self) -> tuple[str, ...]:
        """Paths of the full model's random generators, in order."""
        return self.whole.generators

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.place == self.ranks - 1

    def counts(self, variable: Any) -> bool:
        """Return whether this rank counts a variable in sums over the model; tied: the first rank."""
        tied = self.tied.get(self.structure.path(variable))
        return tied is None or tied.places[0] == self.place

    def model_inputs(self, inputs: Any) -> dict[int, Any]:
        """Return a batch by the id of symbolic inputs, in their dtypes."""
        functional = functional_of(self.whole.model)
        flat = standardized_inputs(functional, inputs)
        return dict(zip(map(id, self.whole.cut.graph.inputs), flat, strict=True))

    def run_stage(
        self, stage: int, inputs: Mapping[int, Any], received: Sequence[Any], *, training: bool
    ) -> list[tf.Tensor]:
        """Return the tensors for the next stage, or the model's outputs.

        `inputs` come from `model_inputs`; `received` are tensors and masks from the previous stage.
        """
        outputs: list[tf.Tensor] = self([list(received), list(inputs.values())], stage=stage, training=training)
        return outputs

    def call(self, tensors: Any, stage: int | None = None, training: bool | None = None) -> Any:
        """Call one of the stages; no rank holds the full model."""
        if stage is None:
            raise ConfigError(
                f"The layers of {self.whole.model.name!r} are on {self.ranks} ranks, and none of them can call the "
                "model alone: use Trainer.predict or Trainer.evaluate, which every rank calls."
            )
        received, inputs = tensors
        cut = self.whole.cut
        known = dict(zip(map(id, cut.graph.inputs), inputs, strict=True)) | arrived(cut, stage, received)
        outputs = run(cut.nodes(stage), known, cut.outgoing(stage), training=training)
        self._refuse_losses()
        return outputs

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Set no mask: the stage's layers have set theirs."""

    def outputs_of(self, tensors: Sequence[Any]) -> Any:
        """Pack the last stage's outputs, with shards along tp and cp marked."""
        return marked_outputs(self.whole.model, self.packed(tensors))

    def whole_outputs(self, outputs: Any) -> Any:
        """All-gather the last stage's outputs. Collective over the ranks of the last stage."""
        return whole_outputs(self.whole.model, outputs)

    def packed(self, tensors: Sequence[Any]) -> Any:
        """Pack tensors into the structure of the model's outputs."""
        functional = functional_of(self.whole.model)
        packed = keras.tree.pack_sequence_as(output_nest(functional), list(tensors))
        return packed

    def free_other_stages(self) -> None:
        """Free the original model's variables that this rank does not hold; they become unusable."""
        held = {id(unwrap(variable)) for variable in self.variables}
        uninitialize(v for v in self.whole.model.variables if id(unwrap(v)) not in held)
        structure = self.whole.structure
        paths = {key: path for key, path in structure.paths.items() if key in held}
        self.whole = replace(self.whole, structure=Structure(paths, structure.statistics & held))

    def pop_losses(self) -> tf.Tensor:
        """Pop and sum the expert layers' last losses, in float64."""
        losses = [tf.cast(loss, tf.float64) for _, loss in losses_of(expert_layers(self))]
        clear_losses(self)
        return tf.add_n([tf.zeros([], tf.float64), *losses])

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to write a partial model; also as `save_weights` and `export`."""
        raise ConfigError(
            f"Each rank of a pipeline holds a part of {self.whole.model.name!r}, and none can write the whole. Use "
            "Trainer.save, and then python -m hvdtrain checkpoint export."
        )

    save_weights = save
    export = save

    def _refuse_losses(self) -> None:
        for layer, _ in losses_of(flatten_layers(self, include_self=False)):
            if not isinstance(layer, MixtureOfExperts):
                raise ConfigError(
                    f"{type(layer).__name__} {layer.name!r} adds a loss of its activations (by add_loss or "
                    "activity_regularizer), which a pipeline counts of layers of experts only: train without "
                    f"{opt('parallel')} pp=…, or leave that loss out."
                )


def arrived(cut: Cut, stage: int, received: Sequence[Any]) -> dict[int, Any]:
    """Return received tensors, with masks, by the id of their symbols."""
    symbols = cut.incoming(stage)
    values = dict(zip(map(id, symbols), received, strict=False))
    if stage:
        for symbol, mask in zip(cut.masked(stage - 1), received[len(symbols) :], strict=True):
            set_mask(values[id(symbol)], mask)
    return values


def with_masks(cut: Cut, stage: int, tensors: Sequence[Any]) -> list[Any]:
    """Append the masks of outgoing tensors to the outputs of `stage`."""
    made = dict(zip(map(id, cut.outgoing(stage)), tensors, strict=True))
    return [*tensors, *(mask_of(made[id(symbol)]) for symbol in cut.masked(stage))]


def _axes_of(model: Any) -> tuple[str, ...]:
    axes = {"pp", *getattr(model, "split_along", ())}
    for variable in model.variables:
        placement = placement_of(variable)
        axes.update(() if placement is None else placement.axes)
    return tuple(sorted(axes))


def _tied_weights(whole: WholeModel, ranks: int) -> dict[str, TiedWeight]:
    by_id = {id(variable): variable for variable in variables_of(whole.cut.graph.nodes)}
    tied = {}
    for key, stages in shared_variables(whole.cut).items():
        variable, places = by_id[key], sorted({number % ranks for number in stages})
        if len(places) > 1:
            shape = tuple(int(n) for n in variable.shape)
            placement = placement_of(variable)
            expert_parallel = placement is not None and bool(placement.held_by)
            tied[whole.structure.path(variable)] = TiedWeight(
                places=tuple(places),
                shape=shape,
                dtype=str(variable.dtype),
                trainable=bool(variable.trainable),
                expert_parallel=expert_parallel,
            )
    return dict(sorted(tied.items()))


_DIVISION = "_hvdtrain_division"
_INSTEAD = {
    **dict.fromkeys(("call", "predict", "predict_on_batch"), "Trainer.predict"),
    **dict.fromkeys(("evaluate", "test_on_batch"), "Trainer.evaluate"),
    **dict.fromkeys(("fit", "train_on_batch"), "Trainer.fit"),
    **dict.fromkeys(("save", "save_weights", "export"), "Trainer.save, and then python -m hvdtrain checkpoint export"),
    "get_weights": "Trainer.model.get_weights() for those of this rank's stage",
}
"""Replacements for methods that need all weights."""


@dataclass(frozen=True)
class StageAssignment:
    """Assignment of a model's weights to pipeline ranks."""

    places: Mapping[str, int]
    """First rank that holds each weight, by path."""
    tied: tuple[str, ...]
    """Paths of weights on several ranks."""


def stage_assignment_of(model: Any) -> StageAssignment | None:
    """Return a model's assignment by an earlier trainer; None if not split into stages."""
    division: StageAssignment | None = vars(model).get(_DIVISION)
    return division


def assign_stages(model: Any, stage: PipelineStage) -> None:
    """Record which ranks train a model's weights; make methods that need all of them raise."""
    vars(model)[_DIVISION] = StageAssignment(_places(stage), tuple(stage.tied))
    for method, instead in _INSTEAD.items():
        vars(model)[method] = _refusal(model.name, method, instead)


def _places(stage: PipelineStage) -> dict[str, int]:
    cut, places = stage.whole.cut, {}
    for number in reversed(range(cut.stages)):
        places.update({id(unwrap(variable)): number % stage.ranks for variable in variables_of(cut.nodes(number))})
    weights = stage.whole.model.weights
    return {stage.structure.path(weight): places.get(id(unwrap(weight)), 0) for weight in weights}


def _refusal(name: str, method: str, instead: str) -> Any:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConfigError(
            f"{opt('parallel')} pp=… has cut {name!r} into stages, and each rank trains the layers of its own: "
            f"model.{method}() would use those of other ranks as they were before the training. Use {instead}."
        )

    return refuse
