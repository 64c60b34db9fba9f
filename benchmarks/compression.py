"""Time of the gradient exchange in 16 bits against that in 32, by size.

    python benchmarks/compression.py --controllers mpirun gloo --ranks 2 --out results.json

One launch for each controller. In it `none`, `fp16` and `bf16` take turns, one exchange of a float32 gradient each, so
that they see the same machine; the first round compiles and is not counted. An exchange's time is that of the slowest
rank. Reported are the medians over the rounds and their ratios to `none`: above 1 compression slows training.
Nothing else may run on the machine meanwhile.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import launcher, printed, write

KIB = 1024
SIZES = {"64 KB": 64 * KIB, "1 MB": KIB**2, "16 MB": 16 * KIB**2, "64 MB": 64 * KIB**2}
KINDS = ("none", "fp16", "bf16")
LIMIT_S = 600


def exchanges(backend: Any, count: int) -> dict[str, Any]:
    """Return a compiled exchange of `count` float32 values for each kind of compression."""
    import tensorflow as tf

    from hvdtrain.gradients.reduction import GradientReducer, ReductionOptions

    values = tf.Variable(tf.random.stateless_normal([count], [1, backend.index]))

    def compiled(kind: Any) -> Any:
        reducer = GradientReducer(backend, ReductionOptions("sum", kind))
        return tf.function(
            lambda: reducer.reduce([values.read_value()], ["values"], role=f"benchmark/{count}/{kind}")[0],
            autograph=False,
        )

    return {kind: compiled(kind) for kind in KINDS}


def milliseconds(exchange: Any) -> float:
    begin = time.perf_counter()
    exchange()[:1].numpy()
    return 1000.0 * (time.perf_counter() - begin)


def measure(rounds: int) -> None:
    """Run on every rank of a launch; rank 0 prints each size's and kind's times, those of the slowest rank."""
    import hvdtrain

    hvdtrain.init()
    from hvdtrain.backends.select import backend_for
    from hvdtrain.runtime.session import current

    backend = backend_for(current())
    times: dict[str, dict[str, list[float]]] = {}
    for name, size in SIZES.items():
        compiled = exchanges(backend, size // 4)
        taken = [[milliseconds(compiled[kind]) for kind in KINDS] for _ in range(rounds + 1)][1:]
        by_rank = [json.loads(text) for text in backend.gather_bytes(json.dumps(taken).encode(), timeout=LIMIT_S)]
        slowest = np.max(by_rank, axis=0)
        times[name] = {kind: slowest[:, column].tolist() for column, kind in enumerate(KINDS)}
    if backend.primary:
        print("TIMES " + json.dumps(times), flush=True)


def launch(controller: str, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds of each round, by size and kind."""
    command = [*launcher(controller, arguments.ranks), sys.executable, __file__, "--rank"]
    return dict(printed([*command, "--rounds", str(arguments.rounds)], "TIMES", limit_s=LIMIT_S))


def report(controller: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure one controller and print a line for each size."""
    rows: list[dict[str, object]] = []
    for size, times in launch(controller, arguments).items():
        medians = {kind: float(np.median(values)) for kind, values in times.items()}
        ratios = {kind: medians[kind] / medians["none"] for kind in KINDS}
        print(
            f"{controller:6} {arguments.ranks} ranks {size:>6}  none {medians['none']:8.2f} ms"
            + "".join(f"   {kind} {medians[kind]:8.2f} ms ({ratios[kind]:.2f}x)" for kind in KINDS[1:]),
            flush=True,
        )
        rows.append(
            {"controller": controller, "size": size, "medians_ms": medians, "ratios": ratios, "times_ms": times}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--controllers", nargs="+", choices=("mpirun", "gloo"), default=["mpirun", "gloo"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.rounds)
        return
    results = [row for controller in arguments.controllers for row in report(controller, arguments)]
    write(arguments, results)


if __name__ == "__main__":
    main()
