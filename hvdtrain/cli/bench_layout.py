"""`bench layout`: one launch of one layout of ranks, as `bench --parallel` starts it."""

import argparse
import json
import resource
from contextlib import nullcontext
from pathlib import Path

from hvdtrain.runtime.launchers import detect_environment

_USAGE = """\
usage: python -m hvdtrain bench layout [RECIPE] --run-dir DIR [--cores CORES] [--option value ...]

Trains as "python -m hvdtrain train" does, on the first CORES cores, and prints the time of a step, the parameters and
the bytes that this machine sends to itself in a step as JSON; each rank adds its peak of memory to DIR. The reports of
bench --parallel, which starts it, show the whole command.
"""


def main(argv: list[str]) -> int:
    """Train, print the figures and return the exit code."""
    from hvdtrain.bench.loopback import LoopbackCounter
    from hvdtrain.bench.parallel import PEAKS
    from hvdtrain.bench.timing import limit_cores, say
    from hvdtrain.cli.train import main as train

    rank = detect_environment().rank
    if "--run-dir" not in argv[:-1] or {"-h", "--help"} & set(argv):
        if rank == 0:
            print(_USAGE, end="")
        return 0 if {"-h", "--help"} & set(argv) else 2
    own = argparse.ArgumentParser(usage=_USAGE.removeprefix("usage: "), add_help=False, allow_abbrev=False)
    own.add_argument("--cores", type=int)
    words, argv = own.parse_known_args(argv)
    if words.cores is not None:
        limit_cores(words.cores)
    folder = Path(argv[argv.index("--run-dir") + 1])
    with LoopbackCounter(folder / "metrics.jsonl") if rank == 0 else nullcontext() as counter:
        code = train(argv)
    if code == 0:
        with (folder / PEAKS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024) + "\n")
    if code == 0 and counter is not None:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        figures = {"step_ms": summary["step_ms"]["median"], "parameters": summary["parameters"]}
        say({**figures, "sent_bytes": counter.bytes_per_step()})
    return code
