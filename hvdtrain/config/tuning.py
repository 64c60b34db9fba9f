"""Options of a training that begins with a trained model: pruning, adapters, a teacher."""

import re
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.options import applies_to, excludes, flag, section
from hvdtrain.config.runtime import STRATEGIES

FakeMode = Literal["int8", "int4"]

_WHOLE = excludes(
    *("pp", "cp", "tp"),
    why="a rank must hold each layer whole",
    instead=f"divide the model's state by {opt('zero', 3)}",
)
_IN_PLACE = excludes("sync_batch_norm", why="it makes a copy of the model, which has none of it")
_FROZEN = excludes("lora", why="adapters freeze what would be trained")


def _is_expression(text: str | None) -> None:
    try:
        re.compile(text or "")
    except re.error as error:
        raise ConfigError(f"{text!r} is no regular expression: {error}.") from None


@section
class TuningConfig:
    """The weights that a training begins with, and what becomes of them."""

    weights: str | None = flag(None, excludes("pp", why="a stage has no place for the other layers"))
    """Begin with the weights of the run, or of the checkpoint, in this folder."""
    lora: int | None = flag(None, "[1, inf)", _WHOLE, _IN_PLACE)
    """Train adapters of this rank, two small matrices beside each chosen kernel, and freeze all else."""
    lora_layers: str = flag("query|value", applies_to("lora"), valid=_is_expression)
    """Layers that have one: those in whose path this regular expression is found."""
    lora_alpha: float | None = flag(None, "(0, inf)", applies_to("lora"))
    """What an adapter adds counts alpha / rank; None: once."""
    teacher: str | None = flag(
        None,
        _WHOLE,
        excludes("on_bad_record", why="Keras' Distiller takes no weights of samples"),
        excludes("local_steps", "update", why="a checkpoint would hold more than the student's weights"),
        excludes(STRATEGIES, instead=f"use {opt('backend', 'horovod')}, or {opt('backend', 'single')}"),
    )
    """Learn of the model of the run in this folder as well, whose outputs are compared with the model's."""
    distill_temperature: float = flag(4.0, "(0, inf)", applies_to("teacher"))
    """Divides the logits of both: above 1 unlikely classes count more."""
    distill_weight: float = flag(0.9, "(0, 1]", applies_to("teacher"))
    """Share of the teacher in the loss; the data have the rest."""
    prune: float | None = flag(None, "(0, 1)", _WHOLE, _IN_PLACE, _FROZEN)
    """Make this share of each kernel zero, its smallest weights."""
    prune_pattern: Literal["2:4", "channels"] | None = flag(None, _WHOLE, _IN_PLACE, _FROZEN)
    """Zeros in two of four neighbours along a kernel's inputs, or more by --prune: GPUs compute these faster. Or whole
    channels, which are taken out at the end.
    """
    prune_layers: str | None = flag(None, applies_to("prune", "prune_pattern"), valid=_is_expression)
    """Only layers in whose path this regular expression is found."""
    prune_epochs: int = flag(1, "[0, inf)", applies_to("prune", "prune_pattern"))
    """Epochs in which the zeros become so many; 0: from the first step."""
    fake_quantize: FakeMode | None = flag(None, _WHOLE, _IN_PLACE, _FROZEN)
    """Train kernels as they will be with fewer bits, for an export with --quantize of the same mode."""
