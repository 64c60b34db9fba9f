"""The longest sequences on which a transformer trains in a given memory, with 1, 2, … ranks along `cp`.

    python benchmarks/sequences.py --budget 600 --ranks 1 2 4

Of each number of ranks the longest multiple of `--step` tokens is sought, doubling the length and then bisecting, each
length in launches of its own. What counts is what the rank that needs most grows by in a few training steps, over what
it was with the model built: activations, gradients, and the buffers of the exchange. Positions are exchanged for heads,
so that a rank computes attention over the whole sequence for some of the heads: n ranks halve, and quarter, what grows
with the square of the length as well. What is freed goes back to the system at once, as in `memory.py`: a training
keeps some of it, and takes more.
"""

import os
import sys
from typing import Any

from memory import FREEING

from hvdtrain.bench.script import Script, started
from hvdtrain.bench.timing import peak_rss_mib

VOCABULARY, SAMPLES, STEPS = 256, 2, 2


def measure(length: int) -> dict[str, Any]:
    """Return the megabytes by which the largest rank grew."""
    import hvdtrain

    *_, gather = started(parallel="cp=-1")
    import keras
    import numpy as np

    from hvdtrain.models import transformer as transformer

    model = hvdtrain.parallelize(lambda: transformer.build((length,), VOCABULARY, 1, depth=2, width=128, heads=4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    before = peak_rss_mib()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (SAMPLES * STEPS, length + 1)).astype("int32")
    trainer = hvdtrain.Trainer(model, "adam", loss)
    trainer.fit((tokens[:, :-1], tokens[:, 1:]), batch=SAMPLES, epochs=1, verbose=False)
    return {"grown_mib": max(gather(peak_rss_mib() - before))}


def longest(script: Script, ranks: int, begin: int, options: Any) -> int:
    """Return the longest sequence that fits, a multiple of the step, from `begin` tokens on, which are known to."""

    def fits(steps: int) -> bool:
        length = steps * options.step
        controller = options.controller if ranks > 1 else "none"
        job = script.job("sequence", measure, controller=controller, ranks=ranks, before=FREEING, length=length)
        for run in script.measure([job], limit_s=600):
            return run.figure("grown_mib")[0] <= options.budget
        sys.exit(f"cp={ranks}: {length} tokens could not be measured")

    low = max(1, begin // options.step)
    if not fits(low):
        sys.exit(f"cp={ranks}: {low * options.step} tokens take more than the budget")
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * options.step


def main() -> int:
    script = Script(__doc__, measure)
    script.add_argument("--budget", type=float, default=600.0, help="MiB that a rank may grow by")
    script.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    script.add_argument("--step", type=int, default=256, help="lengths are multiples of it")
    script.add_argument("--controller", choices=("mpirun", "gloo"), default="mpirun")
    options = script.parsed()
    print(f"{os.cpu_count()} cores, {SAMPLES} samples, a budget of {options.budget:.0f} MiB")
    found: dict[int, int] = {}
    for ranks in sorted(options.ranks):
        found[ranks] = longest(script, ranks, max(found.values(), default=0), options)
    first = min(found)
    for ranks, tokens in found.items():
        print(f"cp={ranks}   longest {tokens} tokens   {tokens / found[first]:.2f} times that of cp={first}")
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
