"""A built model that was cut into stages: its layers of other ranks' stages stay on this rank, and are not trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.pipeline.graph import variables_of
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.state.variables import unwrap

_DIVISION = "_hvdtrain_division"
_INSTEAD = {
    **dict.fromkeys(("call", "predict", "predict_on_batch"), "Trainer.predict"),
    **dict.fromkeys(("evaluate", "test_on_batch"), "Trainer.evaluate"),
    **dict.fromkeys(("fit", "train_on_batch"), "Trainer.fit"),
    **dict.fromkeys(("save", "save_weights", "export"), "Trainer.save, and then python -m hvdtrain checkpoint export"),
    "get_weights": "Trainer.model.get_weights() for those of this rank's stage",
}
"""What takes the place of the methods that need all weights."""


@dataclass(frozen=True)
class Division:
    """Which ranks of a pipeline train the weights of a model."""

    places: Mapping[str, int]
    """The first rank that holds each weight, by its path."""
    tied: tuple[str, ...]
    """Paths of the weights that several ranks hold."""


def division_of(model: Any) -> Division | None:
    """Return how `model` was divided among the ranks of an earlier trainer; None if it is whole on every rank."""
    division: Division | None = vars(model).get(_DIVISION)
    return division


def divide(model: Any, stage: PipelineStage) -> None:
    """Note which ranks train the weights of `model`, and let its methods that need all of them refuse.

    Args:
        model: the user's, of which every rank still has all layers.
        stage: what this rank trains of it.
    """
    vars(model)[_DIVISION] = Division(_places(stage), tuple(stage.tied))
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
