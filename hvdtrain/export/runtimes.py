"""Runs an exported model in its own runtime, in a process of its own, without the program that exported it.

    python -m hvdtrain.export.runtimes FORMAT PATH SAMPLES.npz OUTPUTS.npz [MODULE ...]

SAMPLES has the inputs `0`, `1`, …, and in `structure` the nest of these numbers that the model takes. OUTPUTS has the
outputs likewise, and `ms`: the median of the time of one call with one sample on one thread. Where Keras builds the
model, the MODULEs that define its layers are imported before.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

OF_KERAS = ("keras", "safetensors")
WARM, CALLS, MOST_S = 5, 100, 3.0
"""Calls before the clock starts, calls that are measured, and the seconds after which no other one begins."""
BATCH = 32
Call = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


def main(argv: Sequence[str]) -> None:
    """Run the model at a path on samples, and write its outputs."""
    kind, path, given, out, *modules = argv
    for module in modules if kind in OF_KERAS else ():
        importlib.import_module(module)
    with np.load(given) as loaded:
        structure = json.loads(str(loaded["structure"]))
        inputs = [loaded[str(place)] for place in range(len(loaded.files) - 1)]
    call = RUNTIMES[kind](Path(path), structure)
    count = len(inputs[0])
    parts = [call([array[begin : begin + BATCH] for array in inputs]) for begin in range(0, count, BATCH)]
    outputs: dict[str, Any] = {
        str(place): np.concatenate(arrays) for place, arrays in enumerate(zip(*parts, strict=True))
    }
    outputs["ms"] = median_ms(lambda: call([array[:1] for array in inputs]))
    np.savez(out, **outputs)


def median_ms(call: Callable[[], object]) -> float:
    """Return the median time of a call in milliseconds."""
    for _ in range(WARM):
        call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < CALLS and time.perf_counter() - begin < MOST_S:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return float(np.median(times)) * 1e3


def nested(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return `structure` with the leaf of that number in the place of each number."""
    if isinstance(structure, int):
        return leaves[structure]
    if isinstance(structure, list):
        return [nested(part, leaves) for part in structure]
    return {name: nested(part, leaves) for name, part in structure.items()}


def in_32_bits(output: Any) -> np.ndarray:
    """Return an output as an array, whose 16-bit numbers, which files of NumPy do not keep, have 32."""
    array = np.asarray(output)
    return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array


def _on_one_thread() -> Any:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.set_visible_devices([], "GPU")
    return tf


def _saved_model(path: Path, structure: Any) -> Call:
    tf = _on_one_thread()
    loaded = tf.saved_model.load(str(path))
    # Not `loaded.serve` alone: the variables are those of `loaded`, which would go.
    return _of_tensorflow(tf, lambda inputs: loaded.serve(inputs), structure)


def _of_tensorflow(tf: Any, function: Callable[[Any], Any], structure: Any) -> Call:
    def call(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        outputs = function(nested(structure, [tf.constant(array) for array in inputs]))
        return [in_32_bits(output) for output in tf.nest.flatten(outputs)]

    return call


def _keras(path: Path, structure: Any) -> Call:
    tf = _on_one_thread()
    import keras

    return _of_model(tf, keras.saving.load_model(path, compile=False), structure)


def _safetensors(path: Path, structure: Any) -> Call:
    tf = _on_one_thread()
    from hvdtrain.export.tensors import load

    return _of_model(tf, load(path), structure)


def _of_model(tf: Any, model: Any, structure: Any) -> Call:
    return _of_tensorflow(tf, tf.function(lambda inputs: model(inputs, training=False), autograph=False), structure)


def _onnx(path: Path, structure: Any) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]
    order = _order(names, structure)
    return lambda inputs: session.run(None, {name: inputs[place] for name, place in zip(names, order, strict=True)})


def _openvino(path: Path, structure: Any) -> Call:
    import openvino

    # On processors with bfloat16 it is the default, which is another arithmetic than that of the model.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    model = openvino.Core().compile_model(str(path), "CPU", settings)
    order = _order([part.get_any_name() for part in model.inputs], structure)
    return lambda inputs: list(model([inputs[place] for place in order]).values())


def _litert(path: Path, structure: Any) -> Call:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=1)
    runner = interpreter.get_signature_runner("serving_default")
    names = sorted(runner.get_input_details(), key=lambda name: (len(name), name))
    order = _order(names, structure)

    def call(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        outputs = runner(**{name: inputs[place] for name, place in zip(names, order, strict=True)})
        return [outputs[name] for name in sorted(outputs, key=lambda name: (len(name), name))]

    return call


def _order(names: Sequence[str], structure: Any) -> list[int]:
    """Return the number of the input that each name is given: by the names in a dict, else in their order."""
    if isinstance(structure, dict):
        found = [next((place for own, place in structure.items() if own in name), -1) for name in names]
        if sorted(found) == list(range(len(names))):
            return found
    return list(range(len(names)))


RUNTIMES: dict[str, Callable[[Path, Any], Call]] = {
    "savedmodel": _saved_model,
    "keras": _keras,
    "safetensors": _safetensors,
    "onnx": _onnx,
    "openvino": _openvino,
    "litert": _litert,
}
"""What loads a model and returns a function of its inputs, by the format's name."""

if __name__ == "__main__":
    main(sys.argv[1:])
