"""What it costs that a step of the user's own sees the whole batch: five models, three sides in turn in one launch.

    python benchmarks/whole_batch.py --models gan simclr --controllers mpirun --rounds 5

    whole    hvdtrain's step as it is: the numbers of one process
    own      `whole_batch=False`: each rank computes with its own samples, and gradients are averaged
    alone    half of the batch (with two ranks) in plain Keras' `fit`, each rank by itself, without any exchange

A window is a `fit` of a few steps; its time is that of the slowest rank. Reported are medians over the rounds, the
ratios to `alone` in the same round, and the bytes that a rank sends for a step of `whole`, beside its gradients.
Nothing else may run on the machine meanwhile.
"""

import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

from hvdtrain.bench.script import Script, print_times, started

SIDES = ("whole", "own", "alone")
NAMES = ("gan", "vae", "diffusion", "simclr", "language")


def in_turn(model: str, batch: int, width: int, steps: int, windows: int) -> dict[str, Any]:
    """Return the windows of each side, in milliseconds a step, and the bytes that a step fetches."""
    backend, _, gather = started()
    from own_step_models import built, samples

    import hvdtrain

    x = samples(model, batch * steps)
    fetched: list[int] = []
    fits: dict[str, Callable[[], Any]] = {}
    for side, options in (("whole", {}), ("own", {"whole_batch": False})):
        trainer = hvdtrain.Trainer(built(model, width), backend=backend, **options)
        fits[side] = _fit(trainer.fit, x, batch=batch)
    plain = built(model, width)
    fits["alone"] = _fit(plain.fit, x[: batch // backend.size * steps], batch_size=batch // backend.size)
    with _fetches(fetched, batch):
        for fit in fits.values():  # traces
            fit()
    times: dict[str, list[float]] = {f"{side}_ms": [] for side in SIDES}
    for _ in range(windows):
        for side, fit in fits.items():
            gather(0.0)
            begin = time.perf_counter()
            fit()
            own = 1000.0 * (time.perf_counter() - begin) / steps
            times[f"{side}_ms"].append(max(gather(own)))
    return {**times, "fetched_bytes": sum(fetched[:1])}


def _fit(fit: Callable[..., Any], x: Any, **batch: int) -> Callable[[], Any]:
    return lambda: fit(x, epochs=1, shuffle=False, verbose=0, **batch)


def _fetches(found: list[int], batch: int) -> Any:
    """Return a context in which steps that are traced note the bytes that they fetch."""
    from hvdtrain.training.step.fetch_notes import FetchNotes, bytes_of

    def note(notes: Any, partition: Any, of: Any) -> None:
        share = batch // partition.collectives.size
        found.append(sum(bytes_of(each) * (share if each.gathers else 1) for each in partition.fetches))

    return mock.patch.object(FetchNotes, "note", note)


def main() -> int:
    script = Script(__doc__, in_turn, rounds=3, ranks=2)
    script.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    script.add_argument("--batch", type=int, default=64)
    script.add_argument("--width", type=int, default=32, help="channels of the first layer (32)")
    script.add_argument("--steps", type=int, default=20, help="of a window (20)")
    script.add_argument("--windows", type=int, default=5, help="of each side in a launch (5)")
    options = script.parsed()
    given = {name: getattr(options, name) for name in ("batch", "width", "steps", "windows")}
    for model, controller in product(options.models, options.controllers):
        job = script.job("in turn", in_turn, controller=controller, ranks=options.ranks, model=model, **given)
        for run in script.measure([job], options.rounds):
            fetched = int(run.medians("fetched_bytes")[0])
            notes = {"whole": f"fetches {fetched / 1000:.3g} KB a step"}
            print_times(
                f"{model:9} {controller:6}", {side: run.medians(f"{side}_ms") for side in SIDES}, "alone", notes
            )
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
