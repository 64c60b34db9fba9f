"""A training that begins with another run: its weights, zeros among them, adapters beside them, or it as a teacher."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras

from hvdtrain.backends.protocol import Backend
from hvdtrain.checkpoint.agreement import on_primary
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.config.files import FilesRead, decoded
from hvdtrain.config.run import Config
from hvdtrain.config.tuning import TuningConfig
from hvdtrain.data.preprocessing import TextInputs
from hvdtrain.data.source import DataSplits
from hvdtrain.export.adapters import adapted_layers, lora, merge_lora
from hvdtrain.export.channels import take_out_channels
from hvdtrain.export.fake_quantization import fake_quantize, finish_fake_quantize
from hvdtrain.export.pruning import CHANNELS, finish_pruning, prune, pruned_layers
from hvdtrain.runs.description import RunDescription, read_description
from hvdtrain.runs.folder import RunFolder, located, opened, run_of, start_folder
from hvdtrain.state.layer_states import copy_states
from hvdtrain.state.structure import Structure, structure_of

CHOICES = 10
"""Times that weights are chosen to be zero, while sparsity grows."""
STUDENT = "student/"
"""The place of the student in Keras' Distiller."""


@dataclass(frozen=True)
class Begun:
    """What a training begins with."""

    base: keras.Model | None = None
    """Has the weights to begin with."""
    teacher: keras.Model | None = None
    named: str = ""
    """Where they are from, for messages."""
    zeros: Any = None
    """Inputs of one sample."""


@dataclass(frozen=True)
class Earlier:
    """A run that this one begins with."""

    option: str
    """`--weights` or `--teacher`."""
    place: Path
    """The run, or one of its checkpoints."""
    config: Config
    description: RunDescription

    @property
    def named(self) -> str:
        """The option and its value, for messages."""
        return f"{self.option} {self.place}"


def earlier_run(option: str, place: Path, backend: Backend) -> Earlier:
    """Return the run that `option` names, as the primary sees it. Collective.

    Raises:
        CheckpointError: there is none at `place`.
    """

    def look() -> list[str]:
        run = run_of(place)
        if run is None:
            raise CheckpointError(f"{option} {place}: there is no run (no config.yaml in it).")
        files = FilesRead()
        opened(run.path, option, files)
        read_description(run, option, files)
        start_folder(run, files)
        return [str(run.path), files.encode().decode()]

    folder, content = on_primary(backend, look)
    run, files = RunFolder(Path(folder)), FilesRead(decoded(content.encode()))
    _, config = opened(run.path, option, files)
    config = located(config, start_folder(run, files))
    description = read_description(run, option, files)
    return Earlier(option=option, place=place, config=config, description=description)


def check_prepared_alike(run: Earlier, splits: DataSplits) -> None:
    """Refuse a run whose tokens or columns mean something else than those of `splits`. Raises ConfigError."""
    mine, theirs = splits.preprocessing, run.description.preprocessing
    for kind in ("text", "table"):
        if _meaning(getattr(mine, kind)) != _meaning(getattr(theirs, kind)):
            raise ConfigError(
                f"{run.named} was trained on another {kind}, whose {'tokens' if kind == 'text' else 'columns'} mean "
                "something else: train on its data, or begin without it."
            )


def _meaning(preparation: Any) -> Any:
    """Return how inputs are prepared, of texts without their length and where a tokenizer's file lies."""
    if not isinstance(preparation, TextInputs):
        return preparation
    file = preparation.model
    return replace(preparation, length=0, model=""), Path(file).read_bytes() if file else b""


def check_teacher(run: Earlier, splits: DataSplits) -> None:
    """Refuse a teacher that computes no logits of classes for samples of `splits`. Raises ConfigError."""
    described, preprocessing = run.description, splits.preprocessing
    masked = preprocessing.text is not None and preprocessing.text.masked
    if len(splits.train.spec) > 2 or masked:
        raise ConfigError(f"{run.named}: Keras' Distiller takes no weights of samples, and the data have some.")
    if described.outputs != "logits":
        raise ConfigError(f"{run.named} must return logits of classes. Received: a model of {described.outputs}.")
    check_prepared_alike(run, splits)
    theirs = (described.sample_shape, described.classes, described.preprocessing.image)
    mine = (splits.sample_shape, splits.classes, preprocessing.image)
    names = ("shape", "classes", "preparation of images")
    other = next((name for name, here, there in zip(names, mine, theirs, strict=True) if here != there), None)
    if other is not None:
        raise ConfigError(f"{run.named} was trained on samples of another kind: their {other} is not that of the data.")


def begin_with(model: keras.Model, trained: keras.Model, named: str) -> None:
    """Give a built model the weights, and the layers' states, of another one with the same layers.

    Raises:
        ConfigError: it has others; the first is named.
    """
    mine, theirs = (structure_of(each).by_path(each.weights) for each in (model, trained))
    for path in {**mine, **theirs}:
        shapes = [None if path not in each else list(each[path].shape) for each in (theirs, mine)]
        if shapes[0] != shapes[1]:
            there, needed = ("nothing" if shape is None else shape for shape in shapes)
            raise ConfigError(f"{named} is of another model: {path}: it has {there}, needed {needed}.")
    for path, weight in mine.items():
        weight.assign(theirs[path])
    copy_states(trained, model)


def tune(model: keras.Model, tuning: TuningConfig, seed: int, steps_per_epoch: int) -> None:
    """Prune a model, round it, or give it adapters with first values of `seed`, as the options ask.

    Raises:
        ConfigError: as `prune`, `fake_quantize` and `lora`.
    """
    if tuning.prune_pattern == CHANNELS:
        take_out_channels(model)  # what cannot be copied in the end is refused now
    if tuning.prune is not None or tuning.prune_pattern is not None:
        model.whole_parameters = model.count_params()  # without masks
        steps = tuning.prune_epochs * steps_per_epoch
        prune(
            model,
            tuning.prune,
            pattern=tuning.prune_pattern,
            layers=tuning.prune_layers,
            steps=steps,
            every=max(1, steps // CHOICES),
        )
    if tuning.fake_quantize is not None:
        fake_quantize(model, tuning.fake_quantize)
    if tuning.lora is not None:
        keras.utils.set_random_seed(seed)
        lora(model, tuning.lora, layers=tuning.lora_layers, alpha=tuning.lora_alpha)


def tuned_model(model: keras.Model, *, narrows: bool = True) -> keras.Model:
    """Return a trained model as it is used: no masks, nothing rounded, adapters in its weights, without its teacher.

    Where channels were pruned it is another model without them, if it `narrows`.
    """
    model = student_of(model)
    by_channel = any(layer.kernel.constraint.pattern == CHANNELS for layer in pruned_layers(model))
    finish_pruning(model)
    if adapted_layers(model):
        merge_lora(model)
    finish_fake_quantize(model)
    if by_channel and narrows:
        model = take_out_channels(model)
    return model


def taught(student: keras.Model, teacher: keras.Model, tuning: TuningConfig) -> keras.Model:
    """Return Keras' Distiller, whose student's weights have the places that they have in the student alone.

    Raises:
        ConfigError: the teacher's inputs or outputs are not the student's.
    """
    loss = keras.distillation.LogitsDistillation(tuning.distill_temperature, loss=keras.losses.KLDivergence())
    try:
        distiller = keras.distillation.Distiller(
            teacher, student, loss, student_loss_weight=1 - tuning.distill_weight, name=student.name
        )
    except ValueError as error:
        raise ConfigError(f"--teacher {tuning.teacher}: {' '.join(str(error).split())}") from error
    distiller.whole_parameters = getattr(student, "whole_parameters", student.count_params())
    whole = structure_of(distiller)
    paths = {of: path.removeprefix(STUDENT) for of, path in whole.paths.items()}
    distiller.structure = Structure(paths, whole.statistics)
    return distiller


def student_of(model: keras.Model) -> keras.Model:
    """Return the model that learns, where it has a teacher; else `model`."""
    return model.student if isinstance(model, keras.distillation.Distiller) else model
