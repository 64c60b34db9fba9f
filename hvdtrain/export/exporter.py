"""The export of one model: in several formats, in one precision, each file checked before it appears."""

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError, ExportError
from hvdtrain.config.model import OutputKind
from hvdtrain.data.preprocessing import Preprocessing
from hvdtrain.export import tensors
from hvdtrain.export.formats import Contents, Format, checked
from hvdtrain.export.quantize import FLOAT32, quantize
from hvdtrain.export.runtimes import median_ms
from hvdtrain.export.serving import Serving, readable, serving_of
from hvdtrain.export.verify import DIFFERENCES, OF_INTEGERS, Samples, difference, last_line, run
from hvdtrain.optim.precision import computing_in_float32

POINTS = 0.01
"""Largest loss of accuracy."""


@dataclass(frozen=True)
class Subject:
    """A trained model, and what is known of its data."""

    model: keras.Model
    signature: Any
    """Nest of {"dtype": …, "shape": …} of one prepared input."""
    samples: Samples
    """To verify with."""
    outputs: OutputKind = "values"
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    generate: tf.Module | None = None
    """See `Contents`."""


@dataclass(frozen=True)
class Quantization:
    """Which weights get fewer bits, and by what."""

    mode: str = FLOAT32
    layers: str | None = None
    """Expression that is searched for in the paths of layers; None: all."""
    calibration: Any = None
    """Nest of prepared inputs [samples, …], of which ranges are taken; None: the samples to verify with."""


@dataclass(frozen=True)
class Exported:
    """A model in a file, or the model itself, and what its own runtime made of the samples."""

    name: str
    """The format; `model` for the model itself."""
    precision: str
    takes: str
    """Names, dtypes and shapes of the inputs."""
    path: Path | None = None
    """None for the model itself, and where it could not be written."""
    bytes: int = 0
    ms: float | None = None
    """Median time of one sample on one thread, in milliseconds."""
    accuracy: float | None = None
    difference: float | None = None
    """Largest difference from the outputs of the same weights in Keras, as a share of the largest output."""
    fault: str = ""
    """Why it is not what was trained; "": it is."""


def export(
    subject: Subject,
    targets: dict[str, Path],
    quantization: Quantization = Quantization(),
    *,
    points: float = POINTS,
) -> tuple[list[Exported], list[str]]:
    """Write a model in several formats; where Keras quantizes, it changes the model.

    Args:
        subject: the model.
        targets: new files or folders by format.
        quantization: what gets fewer bits.
        points: the largest loss of accuracy.

    Returns:
        The model and each file, with what is wrong (a file that its runtime does not run is not kept); and sentences on
        what a user would not expect.

    Raises:
        ConfigError: a format that does not exist, hold the precision, or lacks its package; a file that exists; a
            folder that cannot be written; Keras cannot quantize the model. Nothing was written then, but in the last
            case by formats that convert weights themselves.
    """
    mode = quantization.mode
    formats = {name: checked(name, mode) for name in targets}
    if quantization.layers and not any(each.quantized_by_keras(mode) for each in formats.values()):
        raise ConfigError("--quantize-layers is for --quantize by Keras: these formats convert the whole model.")
    for path in targets.values():
        if path.exists():
            raise ConfigError(f"{path} exists, and nothing is overwritten. Remove it, or name another folder by --to.")
    rounded = next(filter(tensors.is_rounded, flatten_layers(subject.model)), None)
    if rounded is not None:
        raise ConfigError(
            f"The layer {rounded.path!r} has a rounded kernel: call hvdtrain.finish_fake_quantize(model) before."
        )
    with computing_in_float32(subject.model) as policy:
        found, remarks = _exported(subject, targets, formats, quantization=quantization, points=points)
    if policy:
        remarks.append(f"The model was trained in {policy}; here it computes in float32, as its weights are stored")
    return found, remarks


def _exported(
    subject: Subject,
    targets: Mapping[str, Path],
    formats: dict[str, Format],
    *,
    quantization: Quantization,
    points: float,
) -> tuple[list[Exported], list[str]]:
    mode = quantization.mode
    # Of a quantized model Keras makes another config.
    config = tensors.config_of(subject.model) if "safetensors" in formats else ""
    exporting = _Exporting(subject, quantization, points=points, config=config)
    results, remarks = [exporting.itself(FLOAT32)], list(exporting.remarks(formats))
    done: dict[str, Exported] = {}
    # Those that convert the trained weights come first: Keras quantizes them in place.
    for name in sorted(formats, key=lambda name: formats[name].quantized_by_keras(mode)):
        if formats[name].quantized_by_keras(mode) and exporting.quantized is None:
            exporting.quantize()
            results.append(exporting.itself(mode))
            remarks += filter(None, [exporting.quantized])
        done[name] = written = exporting.written(name, formats[name], targets[name])
        if mode != FLOAT32 and written.path and written.bytes >= results[0].bytes:
            remarks.append(f"{name}: in {mode} no smaller than in float32, since the format stores these weights wider")
    return [*results, *(done[name] for name in targets)], remarks


class _Exporting:
    def __init__(self, subject: Subject, quantization: Quantization, *, points: float, config: str) -> None:
        self._subject, self._quantization, self._points, self._config = subject, quantization, points, config
        self.quantized: str | None = None
        """What stays as it is; None: nothing is quantized by Keras yet."""
        self._expected: dict[bool, Any] = {}
        self._accuracy: float | None = None

    def _serving(self, *, serves: bool = True, strings: bool = False) -> Serving:
        subject = self._subject
        preprocessing = subject.preprocessing if serves else Preprocessing()
        outputs: OutputKind = subject.outputs if serves else "values"
        return serving_of(subject.model, subject.signature, outputs, preprocessing, strings=strings)

    def remarks(self, formats: dict[str, Format]) -> Sequence[str]:
        table = self._subject.preprocessing.table
        without = [name for name, each in formats.items() if each.serves and not each.strings]
        if table is None or not without or all(column.vocabulary is None for column in table.columns):
            return []
        return [
            f"{', '.join(without)}: takes encoded rows, since the format has no strings; "
            "hvdtrain.load_run(…).preprocess makes them of columns"
        ]

    def itself(self, precision: str) -> Exported:
        """Return the figures of the model in this process, as it is now."""
        subject, serving = self._subject, self._serving()
        inputs = serving.raw_of(subject.samples.inputs)
        outputs = serving.call(inputs)
        self._expected = {True: outputs}
        accuracy = subject.samples.accuracy(outputs, subject.outputs)
        self._accuracy = accuracy if self._accuracy is None else self._accuracy
        one = tf.nest.map_structure(lambda array: tf.constant(array[:1]), inputs)
        call = serving.compiled
        return Exported(
            name="model",
            precision=precision,
            bytes=sum(np.asarray(weight).nbytes for weight in subject.model.weights),
            ms=median_ms(lambda: tf.nest.map_structure(np.asarray, call(one))),
            accuracy=accuracy,
            takes=_takes(serving),
        )

    @property
    def _calibration(self) -> Any:
        given = self._quantization.calibration
        return self._subject.samples.inputs if given is None else given

    def quantize(self) -> None:
        wanted = self._quantization
        self.quantized = quantize(self._subject.model, wanted.mode, wanted.layers, samples=self._calibration)

    def written(self, name: str, chosen: Format, path: Path) -> Exported:
        """Write a file, check it, and give it its name."""
        subject, wanted = self._subject, self._quantization
        serving = self._serving(serves=chosen.serves, strings=chosen.strings)
        inputs = serving.raw_of(subject.samples.inputs)
        contents = Contents(
            serving=serving,
            trained=subject.model,
            mode=wanted.mode,
            samples=serving.raw_of(self._calibration),
            config=self._config,
            generate=subject.generate,
        )
        if chosen.serves not in self._expected:
            self._expected[chosen.serves] = serving.call(inputs)
        expected = self._expected[chosen.serves]
        try:
            with _room(path) as folder:
                _write(name, chosen, contents, folder / path.name)
                ran = run(name, folder / path.name, inputs, model=subject.model)
                distance = difference(ran.outputs, expected)
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                for file in folder.iterdir():
                    if (path.parent / file.name).exists():
                        raise ConfigError(f"{path.parent / file.name} exists, and nothing is overwritten.")
                    file.rename(path.parent / file.name)
        except ExportError as error:
            return Exported(name, wanted.mode, takes=_takes(serving), fault=error.message)
        outputs = tf.nest.pack_sequence_as(expected, ran.outputs)
        if not chosen.serves and isinstance(outputs, np.ndarray):
            outputs = np.asarray(readable(tf.constant(outputs), subject.outputs))
        accuracy = subject.samples.accuracy(outputs, subject.outputs)
        return Exported(
            name=name,
            precision=wanted.mode,
            path=path,
            bytes=size,
            ms=ran.ms,
            accuracy=accuracy,
            difference=distance,
            takes=_takes(serving),
            fault=self._fault(chosen, accuracy, distance),
        )

    def _fault(self, chosen: Format, accuracy: float | None, distance: float) -> str:
        mode, before = self._quantization.mode, self._accuracy
        kinds = {mode, *(layer.compute_dtype for layer in flatten_layers(self._subject.model))}
        bound = max([DIFFERENCES.get(mode, OF_INTEGERS), *(DIFFERENCES.get(kind, 0.0) for kind in kinds)])
        converted = mode in chosen.own_modes and accuracy is not None  # what the format rounds shows in the accuracy
        if not distance <= (math.inf if converted and math.isfinite(distance) else bound):
            same = f"{distance:.1e} of the largest from those of the same weights (at most {bound:g})"
            return f"its outputs differ by {same}"
        if accuracy is not None and before is not None and before - accuracy > self._points:
            return f"accuracy {accuracy:.4f} is {before - accuracy:.4f} below the model's (at most {self._points:g})"
        return ""


def _write(name: str, chosen: Format, contents: Contents, draft: Path) -> None:
    """Write a file, and keep what exporters print.

    Raises:
        ExportError: the format cannot hold the model; names the layer where the exporter does.
    """
    with _kept_output():
        try:
            chosen.write(contents, draft)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # converters raise what they like
            words = f"{type(error).__name__}: {error}"
            at = [layer.name for layer in flatten_layers(contents.trained) if f"/{layer.name}" in words]
            where = f" at the layer {max(at, key=len)!r}" if at else ""
            raise ExportError(
                f"--format {name} cannot hold this model in {contents.mode}{where}. {last_line(words)}"
            ) from error


@contextmanager
def _kept_output() -> Iterator[None]:
    """Keep what Python and C++ print on standard output and standard error."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as kept:
        try:
            os.dup2(kept.fileno(), 1)
            os.dup2(kept.fileno(), 2)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for place, file in enumerate(before, 1):
                os.dup2(file, place)
                os.close(file)


@contextmanager
def _room(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`, and remove what is left in it.

    Raises:
        ConfigError: files cannot be written there.
    """
    folder: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=".export-", dir=path.parent)
        yield Path(folder)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _takes(serving: Serving) -> str:
    """Return names, dtypes and shapes of the inputs of a served model."""
    specs = tf.nest.flatten(serving.inputs)
    return ", ".join(
        f"{spec.name} {spec.dtype} [{', '.join('n' if size is None else str(size) for size in spec.shape)}]"
        for spec in specs
    )
