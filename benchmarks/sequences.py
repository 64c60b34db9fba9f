"""The longest sequences on which a transformer trains in a given memory, with 1, 2, … ranks along `cp`.

    python benchmarks/sequences.py --budget 600 --ranks 1 2 4

Of each number of ranks the longest multiple of `--step` tokens is sought, doubling the length and then bisecting, each
length in launches of its own. What counts is what the rank that needs most grows by in a few training steps, over what
it was with the model built: activations, gradients, and the buffers of the exchange. Positions are exchanged for heads,
so that a rank computes attention over the whole sequence for some of the heads: n ranks halve, and quarter, what grows
with the square of the length as well. What is freed goes back to the system at once, as in `memory.py`: a training
keeps some of it, and takes more.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import FREEING, launcher, printed, write

LIMIT_S = 600
VOCABULARY, SAMPLES, STEPS = 256, 2, 2


def measure(length: int) -> None:
    """Run on every rank of a launch; rank 0 prints the megabytes by which the largest rank grew."""
    import hvdtrain

    hvdtrain.init(parallel="cp=-1")
    import keras
    import numpy as np

    from hvdtrain.bench.timing import peak_rss_mib
    from hvdtrain.models import transformer as transformer

    model = hvdtrain.parallelize(lambda: transformer.build((length,), VOCABULARY, 1, depth=2, width=128, heads=4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    before = peak_rss_mib()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (SAMPLES * STEPS, length + 1)).astype("int32")
    trainer = hvdtrain.Trainer(model, "adam", loss)
    trainer.fit((tokens[:, :-1], tokens[:, 1:]), batch=SAMPLES, epochs=1, verbose=False)
    everyone = trainer.backend.gather_bytes(str(peak_rss_mib() - before).encode(), timeout=LIMIT_S)
    if trainer.backend.primary:
        print("GROWTH " + json.dumps([max(map(float, everyone))]), flush=True)


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits."""

    ranks: int
    tokens: int
    mib: float
    """By which the rank that needs most grew."""


def longest(ranks: int, begin: int, arguments: argparse.Namespace) -> Longest:
    """Seek among the multiples of the step, from `begin` tokens on, which are known to fit."""
    grown: dict[int, float] = {}

    def fits(steps: int) -> bool:
        length = steps * arguments.step
        prefix = launcher(arguments.controller if ranks > 1 else "none", ranks)
        command = [*prefix, *FREEING, sys.executable, __file__, "--length", str(length)]
        (grown[steps],) = printed(command, "GROWTH", limit_s=LIMIT_S)
        print(f"cp={ranks}   {length:6} tokens   {grown[steps]:6.0f} MiB", flush=True)
        return grown[steps] <= arguments.budget

    low = max(1, begin // arguments.step)
    if not fits(low):
        sys.exit(f"cp={ranks}: {low * arguments.step} tokens take more than the budget")
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Longest(ranks, low * arguments.step, grown[low])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=600.0, help="MiB that a rank may grow by")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--step", type=int, default=256, help="lengths are multiples of it")
    parser.add_argument("--controller", choices=("mpirun", "gloo"), default="mpirun")
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.length is not None:
        measure(arguments.length)
        return
    print(f"{os.cpu_count()} cores, {SAMPLES} samples, a budget of {arguments.budget:.0f} MiB")
    found: list[Longest] = []
    for ranks in sorted(arguments.ranks):
        found.append(longest(ranks, found[-1].tokens if found else 0, arguments))
    first = found[0]
    for each in found:
        times = each.tokens / first.tokens
        print(f"cp={each.ranks}   longest {each.tokens} tokens   {times:.2f} times that of cp={first.ranks}")
    write(arguments, [asdict(each) for each in found])


if __name__ == "__main__":
    main()
