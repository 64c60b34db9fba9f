"""The formats of exported models: what each needs and holds, and how it is written, by Keras where Keras has it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.registry import optional_package, suggestion
from hvdtrain.export import tensors
from hvdtrain.export.quantize import CALIBRATED, FLOAT16, FLOAT32
from hvdtrain.export.serving import Serving


@dataclass(frozen=True)
class Contents:
    """What is written into a file."""

    serving: Serving
    trained: keras.Model
    """The model alone, which takes prepared inputs."""
    mode: str
    """How weights are stored: `float32`, `float16`, or one of `quantize.OF_KERAS`."""
    samples: Any
    """A nest of arrays [samples, …] like the inputs of `serving`, by which ranges are calibrated."""
    config: str
    """The model's config, before it was quantized."""
    generate: tf.Module | None = None
    """Continues a text, for formats that have loops."""


@dataclass(frozen=True)
class Format:
    """A format of exported models."""

    suffix: str
    """End of the file's name; none: a folder."""
    write: Callable[[Contents, Path], object]
    modes: Sequence[str]
    """Precisions that it holds."""
    packages: Sequence[str] = ()
    """Modules that write and run it, in the extra of the format's name."""
    serves: bool = True
    """Whether it takes data as users have them; else the inputs of the trained model."""
    strings: bool = False
    own_modes: Sequence[str] = field(default=())
    """Precisions in which the format itself stores a float32 model."""

    def quantized_by_keras(self, mode: str) -> bool:
        """Whether Keras quantizes the model before it is written."""
        return mode not in (FLOAT32, *self.own_modes)


def checked(name: str, mode: str) -> Format:
    """Return the format `name`, if its packages are there and it holds the precision `mode`.

    Raises:
        ConfigError: it does not exist or hold it, or a package is missing, whose extra is named.
    """
    if name not in FORMATS:
        raise ConfigError(f"There is no format {name!r}.{suggestion(name, dict.fromkeys(FORMATS, ''))}")
    chosen = FORMATS[name]
    if mode not in chosen.modes:
        holding = ", ".join(each for each, other in FORMATS.items() if mode in other.modes) or "none of the formats"
        mine = ", ".join(chosen.modes)
        raise ConfigError(f"--format {name} does not hold {mode}: it holds {mine}. What holds {mode}: {holding}.")
    for package in chosen.packages:
        optional_package(package, name, f"--format {name}")
    return chosen


# -- of Keras --


def _saved_model(contents: Contents, path: Path) -> None:
    serving, archive = contents.serving, keras.export.ExportArchive()
    # Not the model itself, for its tables of texts: of layers Keras would write each weight twice.
    assets = tf.Module()
    assets.model = serving.model
    archive.track(assets)
    archive.add_endpoint("serve", serving.model.call, [serving.inputs])
    generate = contents.generate
    if generate is not None:
        archive.track(generate)
        archive.add_endpoint("generate", generate.continued, generate.signature)
    archive.write_out(str(path), verbose=False)


def _exported(kind: str) -> Callable[[Contents, Path], None]:
    """Return what writes by `keras.Model.export`."""

    def write(contents: Contents, path: Path) -> None:
        serving = contents.serving
        serving.model.export(str(path), format=kind, verbose=False, input_signature=[serving.inputs])

    return write


def _onnx(contents: Contents, path: Path) -> None:
    _know_erfc()
    _exported("onnx")(contents, path)


def _know_erfc() -> None:
    """Teach tf2onnx the operation of the exact GELU, which ONNX lacks: 1 - erf(x)."""
    from tf2onnx.handler import tf_op

    @tf_op("Erfc")
    class Erfc:
        @classmethod
        def version_9(cls, graph: Any, node: Any, **_: Any) -> None:
            """Write a node of ONNX's opset 9 and later in the place of TensorFlow's."""
            result, dtype, shape = node.output[0], graph.get_dtype(node.output[0]), graph.get_shape(node.output[0])
            error_function = graph.make_node("Erf", node.input)
            graph.remove_node(node.name)
            one = graph.make_const(f"{node.name}/one", np.ones([], np.float32))
            parts = [one.output[0], error_function.output[0]]
            graph.make_node("Sub", parts, name=node.name, outputs=[result], dtypes=[dtype], shapes=[shape])


# -- by the formats' own packages --


def _openvino(contents: Contents, path: Path) -> None:
    """Write what OpenVINO reads from ONNX.

    From TensorFlow's graph, as by Keras, it takes products of 8-bit integers wrongly, and returns numbers from within
    attention as outputs (2026.4). Its converter would make weights of integers float32, which the reader leaves.
    """
    import openvino

    between = path.with_name("between.onnx")
    _onnx(contents, between)
    model = openvino.Core().read_model(between)
    if contents.mode == FLOAT16:
        openvino.save_model(model, path, compress_to_fp16=True)
    else:
        openvino.serialize(model, path)
    between.unlink()


def _litert(contents: Contents, path: Path) -> None:
    options: dict[str, Any] = {}
    if contents.mode == FLOAT16:
        options = {"optimizations": [tf.lite.Optimize.DEFAULT], "target_spec": {"supported_types": [tf.float16]}}
    if contents.mode == "int8":
        options = {"optimizations": [tf.lite.Optimize.DEFAULT], "representative_dataset": lambda: _one_by_one(contents)}
    contents.serving.model.export(
        str(path), format="litert", verbose=False, input_signature=[contents.serving.inputs], **options
    )


def _one_by_one(contents: Contents) -> Iterator[Any]:
    flat = tf.nest.flatten(contents.samples)
    names = [spec.name for spec in tf.nest.flatten(contents.serving.inputs)]
    for place in range(len(flat[0])):
        yield {name: array[place : place + 1] for name, array in zip(names, flat, strict=True)}


FORMATS = {
    "savedmodel": Format("", _saved_model, (FLOAT32, "int8", "int4", "float8", *CALIBRATED), strings=True),
    "keras": Format(
        ".keras", lambda contents, path: contents.trained.save(path), (FLOAT32, "int8", "int4", "float8"), serves=False
    ),
    "safetensors": Format(
        ".safetensors",
        lambda contents, path: tensors.write(contents.trained, path, contents.config, half=contents.mode == FLOAT16),
        (FLOAT32, FLOAT16, "int8", "int4", "float8"),
        serves=False,
        own_modes=(FLOAT16,),
    ),
    "onnx": Format(".onnx", _onnx, (FLOAT32, "int8", "int4", *CALIBRATED), ("onnx", "tf2onnx", "onnxruntime")),
    "openvino": Format(
        ".xml",
        _openvino,
        (FLOAT32, FLOAT16, "int8", "int4", *CALIBRATED),
        ("openvino", "onnx", "tf2onnx"),
        own_modes=(FLOAT16,),
    ),
    "litert": Format(
        ".tflite",
        _litert,
        (FLOAT32, FLOAT16, "int8", "int4", *CALIBRATED),
        ("ai_edge_litert",),
        own_modes=(FLOAT16, "int8"),
    ),
}
"""Formats by name."""
