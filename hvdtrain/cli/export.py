"""`export`: write the model of a run in formats of other programs, and check each file in its own runtime."""

import argparse
import re
from pathlib import Path

from hvdtrain.cli.parser import Parser, positive, shows_help
from hvdtrain.cli.running import run_alone
from hvdtrain.config.errors import ConfigError, on_command_line
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.session import Session

NAMES = {"savedmodel": "saved_model"}
"""Names of files that are not `model` with the format's suffix."""
_EPILOG = """\
Formats, their precisions, and what must be installed besides:
  savedmodel   float32 int8 int4 float8 gptq awq    nothing: TensorFlow, without Keras
  keras        float32 int8 int4 float8             nothing
  safetensors  float32 float16 int8 int4 float8     nothing; hvdtrain.export.tensors.load builds the model
  onnx         float32 int8 int4 gptq awq           pip install 'hvdtrain[onnx]'
  openvino     float32 float16 int8 int4 gptq awq   pip install 'hvdtrain[openvino]'
  litert       float32 float16 int8 int4 gptq awq   pip install 'hvdtrain[litert]'

A file takes pixels, and columns of rows by name where the format has strings; of classes it returns probabilities. Each
one runs in its own runtime, in a new process, on samples of the validation data. The exit code is 1 if one of them is
less accurate than the model by more than --points, or differs from the same weights in Keras.

  python -m hvdtrain export runs/digits --format savedmodel onnx litert --quantize int8
"""


def main(argv: list[str]) -> int:
    """Export a model and return the exit code: 1 if a file is not what was trained, 2 for a mistake."""
    if shows_help(_parser(), argv):
        return 0
    faults: list[str] = []
    # One thread: the model is timed beside runtimes that have one.
    code = run_alone(
        "export",
        lambda files: _parser().parse_args(argv),
        lambda session, arguments: faults.extend(_export(session, arguments)),
        runtime=RuntimeConfig(backend="single", threads=1),
    )
    return code or int(bool(faults))


def _parser() -> Parser:
    text = "Write the model of a run in formats of other programs, and check each file in its own runtime."
    parser = Parser("export", text, epilog=_EPILOG)
    add = parser.add_argument
    add("place", type=Path, metavar="RUN", help="a run, a checkpoint, a folder of them, or a .keras file")
    add("--format", nargs="+", default=["savedmodel"], metavar="NAME", help="formats (default: savedmodel)")
    add("--quantize", default="float32", metavar="PRECISION", help="fewer bits for each weight (default: float32)")
    add("--quantize-layers", metavar="EXPRESSION", help="only layers whose path it is found in (default: all)")
    add("--calibrate", type=positive, default=128, metavar="N", help="training samples that set ranges (default: 128)")
    add("--samples", type=positive, default=256, metavar="N", help="validation samples to check with (default: 256)")
    add("--points", type=float, default=0.01, metavar="X", help="largest loss of accuracy (default: 0.01)")
    add("--to", type=Path, metavar="DIR", help="folder for the files (default: export in RUN, or beside the file)")
    add("--checkpoint", default="newest", metavar="WHICH", help="newest (default), best, or the number of a step")
    add("--model", metavar="MODULE:FUNCTION", help="builds the model of a script's checkpoints")
    return parser


def _export(session: Session, arguments: argparse.Namespace) -> list[str]:
    """Export, print the table, and return what is wrong with files."""
    from hvdtrain.export.exporter import Quantization, export
    from hvdtrain.export.formats import checked
    from hvdtrain.export.report import note, rows_of, table
    from hvdtrain.runs.export import subject_of

    mode, place = arguments.quantize, arguments.place
    try:
        re.compile(arguments.quantize_layers or "")
    except re.error as error:
        raise ConfigError(f"--quantize-layers is no regular expression: {error}.") from None
    suffixes = {name: checked(name, mode).suffix for name in arguments.format}  # before the model is built
    folder = arguments.to or (place.parent if place.is_file() else place) / "export"
    end = "" if mode == "float32" else f"-{mode}"
    targets = {name: folder / f"{NAMES.get(name, 'model')}{end}{suffix}" for name, suffix in suffixes.items()}
    existing = next((path for path in targets.values() if path.exists()), None)
    if existing is not None:
        raise ConfigError(f"{existing} exists, and nothing is overwritten. Remove it, or name another folder by --to.")
    counts = {"samples": arguments.samples, "calibration": arguments.calibrate}
    with subject_of(session, place, arguments.checkpoint, arguments.model, **counts) as (subject, calibration):
        quantization = Quantization(mode, arguments.quantize_layers, calibration)
        found, remarks = export(subject, targets, quantization, points=arguments.points)
    note(folder, found)
    print(table(rows_of(found)))
    print("\n".join([*remarks, str(folder)]))
    faults = [f"{each.path or each.name}: {each.fault}" for each in found if each.fault]
    for fault in faults:
        print(f"not what was trained: {on_command_line(fault)}")
    return faults
