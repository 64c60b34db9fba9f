"""Steps with memory that stays with the process (`--malloc keep`) and with glibc's own settings (`system`), in turn.

    python benchmarks/malloc.py --models resnet20 lm --sides horovod-mpi:keep horovod-mpi:system mirrored:keep

For each side the time of a step, page faults of a step on all ranks, the kernel's share of the processor time and the
largest process; times and memory also as fractions of the first side's, formed round by round.
`TF_ENABLE_ONEDNN_OPTS=0` in the environment shows processors without VNNI, AMX or 16-bit arithmetic: on others
TensorFlow's oneDNN has an allocator of its own, which keeps memory whatever glibc does.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from harness import write

from hvdtrain.bench.catalog import MODELS, bench_model
from hvdtrain.bench.launching import LaunchFailed, ask
from hvdtrain.bench.plan import Point
from hvdtrain.bench.suite import Launching, command_of
from hvdtrain.bench.timing import WORD

SIDES = ["horovod-mpi:keep", "horovod-mpi:system", "plain-mpi:keep", "plain-gloo:keep", "mirrored:keep"]
SIDES += ["multi_worker_mirrored:keep"]


def launched(side: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what one launch of a side answers, with the median of its windows."""
    name, _, malloc = side.partition(":")
    batch = bench_model(model).config.data.batch
    point = Point(name, model, arguments.ranks, batch, "float32", 1)
    sizes = {"windows": arguments.windows, "warm_up": 1, "steps": arguments.steps}
    command = command_of(point, Launching(**sizes, breakdown=False, malloc=malloc or "keep"))
    answer = ask(command, WORD, limit_s=arguments.limit)
    found = {name: answer.value[name] for name in ("cpu_s", "kernel_share", "page_faults")}
    found |= {"step_ms": statistics.median(answer.value["windows_ms"]), "peak_mib": max(answer.value["peak_rss_mib"])}
    return {**found, "foreign_cores": answer.foreign_cores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["resnet20", "lm", "mlp", "digits"])
    parser.add_argument("--sides", nargs="+", metavar="SIDE:MALLOC", default=SIDES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps of a window; by default the model's own")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a launch may take")
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    arguments = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for model in arguments.models:
        rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in arguments.sides}
        for number in range(arguments.rounds):
            for side in arguments.sides[:: 1 if number % 2 == 0 else -1]:
                try:
                    rounds[side].append(launched(side, model, arguments))
                except LaunchFailed as error:
                    print(f"{model:9} {side:27} {error}")
        results[model] = rounds
        for side in (side for side in arguments.sides if len(rounds[side]) == arguments.rounds):
            print(line(model, side, rounds[side], rounds[arguments.sides[0]]), flush=True)
    write(arguments, results)


def line(model: str, side: str, rounds: list[dict[str, Any]], first: list[dict[str, Any]]) -> str:
    """Return the medians of a side."""
    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    time, peak = (
        statistics.median(one[name] / other[name] for one, other in zip(rounds, first, strict=True))
        for name in ("step_ms", "peak_mib")
    )
    return (
        f"{model:9} {side:27} {median['step_ms']:8.1f} ms ({time:.2f})  {median['page_faults']:9,.0f} faults a step  "
        f"{median['kernel_share']:4.0%} in the kernel  CPU {median['cpu_s']:.3f} s  "
        f"{median['peak_mib']:6.0f} MiB ({peak:.2f})  {median['foreign_cores']:.2f} cores busy elsewhere"
    )


if __name__ == "__main__":
    main()
