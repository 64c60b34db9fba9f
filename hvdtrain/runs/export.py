"""Export of a run's or a script's model: as one file for Keras or NumPy, or in formats of other programs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.checkpoint.selection import located
from hvdtrain.checkpoint.tensor_files import SliceReader
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import CheckpointError, ConfigError, DataError
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import load_function
from hvdtrain.data.source import DataSplits
from hvdtrain.export.continuation import Continuation
from hvdtrain.export.exporter import Subject
from hvdtrain.export.single import subject_of_model
from hvdtrain.export.verify import Samples
from hvdtrain.observability.summary import draft_of
from hvdtrain.runs import folder
from hvdtrain.runs.description import read_description
from hvdtrain.runs.folder import RunFolder, opened, run_of
from hvdtrain.runs.run_data import evaluation_of, loaded_splits
from hvdtrain.runs.trainers import trained_model
from hvdtrain.runtime.placement import whole_box
from hvdtrain.runtime.session import Session
from hvdtrain.state.layer_states import layers_with_states, restore_states
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import LAYERS, MODEL

ARRAYS = ".npz"
_OWN = "hvdtrain>"
"""Before the names under which Keras knows classes of this package."""
WRITERS: dict[str, Callable[[Any, Path], object]] = {
    ".keras": lambda model, file: model.save(file),
    ".weights.h5": lambda model, file: model.save_weights(file),
    ARRAYS: lambda model, file: _save_arrays(_arrays_of(model), file),
}
"""Writers of a model by file suffix."""


@dataclass(frozen=True)
class Written:
    """A file that was written."""

    file: Path
    layers: list[str]
    """Classes of this package that must be imported before Keras loads the file."""


def export(session: Session, folder: Path, which: str, file: Path | None, builder: str | None) -> Written:
    """Write the model of a checkpoint, as it is evaluated.

    Args:
        session: of this one process.
        folder: a run, a folder of checkpoints, or a single checkpoint.
        which: `newest`, `best`, or the number of a step.
        file: new; its end says what is written. None: a name in `folder`.
        builder: `MODULE:FUNCTION` that builds the model of checkpoints that are no run's.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it is of another model.
        ConfigError: a file that exists, or whose end says nothing; a builder that is missing, or not needed.
    """
    run = run_of(folder)
    path = located(folder, which)
    file = file or folder / f"{path.name}{ARRAYS if run is None and builder is None else '.keras'}"
    suffix = _suffix(file)
    if run is not None:
        if builder:
            raise ConfigError(f"{folder} is a run, whose model is known: leave out --model.")
        model = _model_of_run(session, run, path)
    elif builder:
        model = nullcontext(_model_of_script(path, load_function("--model", builder)))
    elif suffix == ARRAYS:
        _written(file, lambda draft: _save_arrays(_stored_arrays(path), draft))
        return Written(file, [])
    else:
        raise ConfigError(
            f"Checkpoints of a script hold no model, only its weights. Received: --to {file}. Name the function that "
            f"builds the model by --model MODULE:FUNCTION, or a file that ends with {ARRAYS}."
        )
    with model as built:
        if run is not None:
            built.compiled = False  # its optimizer may have a schedule of ours, without which Keras loads nothing
        _written(file, lambda draft: WRITERS[suffix](built, draft))
        names = {keras.saving.get_registered_name(type(layer)) for layer in flatten_layers(built)}
    own = sorted(name.removeprefix(_OWN) for name in names if name.startswith(_OWN))
    return Written(file, own if suffix == ".keras" else [])


def _suffix(file: Path) -> str:
    suffix = next((end for end in WRITERS if file.name.endswith(end)), None)
    if suffix is None:
        raise ConfigError(f"--to must end with {', '.join(WRITERS)}. Received: {file}.")
    if file.exists():
        raise ConfigError(f"--to must name a new file. Received: {file}, which exists.")
    return suffix


def _written(file: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a name beside `file`, which then appears whole."""
    try:
        with draft_of(file) as draft:
            write(draft)
    except OSError as error:
        raise ConfigError(f"--to {file} cannot be written: {error}") from error


def _model_of_run(session: Session, run: RunFolder, path: Path) -> Any:
    """Return a context that gives the model of a run's checkpoint, with the averages of its weights if it has any."""
    _, config = opened(run.path, "checkpoint export")
    description = read_description(run, "checkpoint export")
    config = folder.located(config, folder.start_folder(run))
    return trained_model(config, description, path, "newest", backend_for(session))


def _model_of_script(path: Path, build: Callable[[], Any]) -> Any:
    """Return the model that `build` returns, with the weights of the checkpoint at `path`."""
    model = build()
    if not isinstance(model, keras.Model) or not model.built:
        raise ConfigError(
            f"--model must return a Keras model with variables: give it a keras.Input. Received: {model}."
        )
    arrays = _stored_arrays(path)
    for name, weight in structure_of(model).by_path(model.weights).items():
        found = arrays.pop(name, None)
        if found is None or found.shape != tuple(weight.shape):
            kind = "nothing" if found is None else list(found.shape)
            raise CheckpointError(
                f"The checkpoint {path} is of another model: {name}: saved {kind}, needed {list(weight.shape)}."
            )
        weight.assign(found)
    if arrays:
        raise CheckpointError(f"The checkpoint {path} is of another model: {next(iter(arrays))} is not in it.")
    restore_states(layers_with_states(model), _stored_arrays(path, LAYERS))
    return model


def _stored_arrays(path: Path, kind: str = MODEL) -> dict[str, np.ndarray]:
    """Return the weights of the model, or what its layers hold besides, by their place in it."""
    reader = SliceReader(path)
    found = {name: tensor.global_shape for name, tensor in reader.tensors.items() if name.startswith(kind)}
    return {name.removeprefix(kind): reader.read(name, shape, whole_box(shape)) for name, shape in found.items()}


def _arrays_of(model: Any) -> dict[str, np.ndarray]:
    return {path: weight.numpy() for path, weight in structure_of(model).by_path(model.weights).items()}


def _save_arrays(arrays: dict[str, np.ndarray], file: Path) -> None:
    """Write arrays that NumPy alone can read: it has no bfloat16."""
    known: dict[str, Any] = {
        name: value.astype("float32") if value.dtype.kind == "V" else value for name, value in arrays.items()
    }
    np.savez(file, **known)


# -- formats of other programs --


@contextmanager
def subject_of(
    session: Session, place: Path, which: str, builder: str | None, *, samples: int, calibration: int
) -> Iterator[tuple[Subject, Any]]:
    """Yield a model to export with samples to verify it, and prepared inputs to calibrate with, None without data.

    Args:
        session: of this one process.
        place: a run, a checkpoint or a folder of checkpoints, or a `.keras` file.
        which: the checkpoint: `newest`, `best`, or the number of a step.
        builder: `MODULE:FUNCTION` that builds the model of checkpoints that are no run's.
        samples: of the run's validation data; drawn at random where there are no data.
        calibration: samples of the run's training data.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it is of another model.
        ConfigError: neither a run nor a model; a builder that is missing, or not needed.
        DataError: the run's data are not there.
    """
    run = None if place.is_file() else run_of(place)
    if run is None:
        yield subject_of_model(_model_in(place, which, builder), count=samples), None
        return
    if builder:
        raise ConfigError(f"{place} is a run, whose model is known: leave out --model.")
    path = located(place, which)
    _, config = opened(run.path, "export")
    description = read_description(run, "export")
    config = folder.located(config, folder.start_folder(run))
    backend, text = backend_for(session), description.preprocessing.text
    splits = loaded_splits(config, backend)
    held = _first(splits.validation, samples, config=config, splits=splits, backend=backend)
    trained = _first(splits.train, calibration, config=config, splits=splits, backend=backend)
    with trained_model(config, description, path, "newest", backend) as model:
        model.compiled, model.optimizer = False, None
        logits = description.outputs == "logits"
        speaks = text is not None and not text.masked and description.outputs in ("logits", "probabilities")
        yield (
            Subject(
                model=model,
                signature=description.inputs,
                samples=held,
                outputs=description.outputs,
                preprocessing=description.preprocessing,
                generate=Continuation(model, text, logits=logits) if speaks and text is not None else None,
            ),
            trained.inputs,
        )


def _first(source: Any, count: int, *, config: Config, splits: DataSplits, backend: Backend) -> Samples:
    """Return the first samples of a source, prepared for the model."""
    steps = config.training.validation_steps or count
    batches: list[Any] = []
    for batch in evaluation_of(source, config.data, splits, backend, steps=steps):
        batches.append((batch.inputs, batch.targets, batch.sample_weight))
        if sum(len(keras.tree.flatten(inputs)[0]) for inputs, *_ in batches) >= count:
            break
    if not batches:
        raise DataError(f"There are no samples in {source.name} to check or calibrate an exported model with.")

    def joined(*parts: Any) -> Any:
        return None if parts[0] is None else np.concatenate([np.asarray(part) for part in parts])[:count]

    inputs, targets, weights = keras.tree.map_structure(joined, *batches)
    return Samples(inputs, targets if isinstance(targets, np.ndarray) else None, weights)


def _model_in(place: Path, which: str, builder: str | None) -> Any:
    if place.is_file():
        try:
            return keras.saving.load_model(place, compile=False)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"Keras cannot load {place}: {str(error).splitlines()[0]}") from error
    if builder is None:
        raise ConfigError(
            f"{place} holds no run: give --model MODULE:FUNCTION, which builds its model, or name a .keras file."
        )
    return _model_of_script(located(place, which), load_function("--model", builder))
