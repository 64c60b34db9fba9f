"""Steps with memory that stays with the process (`--malloc keep`) and with glibc's own settings (`system`), in turn.

    python benchmarks/malloc.py --models resnet20 lm --sides horovod-mpi:keep horovod-mpi:system mirrored:keep

For each side the time of a step, page faults of a step on all ranks, the kernel's share of the processor time and the
largest process; times and memory also as fractions of the first side's, formed round by round.
`TF_ENABLE_ONEDNN_OPTS=0` in the environment shows processors without VNNI, AMX or 16-bit arithmetic: on others
TensorFlow's oneDNN has an allocator of its own, which keeps memory whatever glibc does.
"""

import sys
from dataclasses import replace

import numpy as np

from hvdtrain.bench.engine import Job
from hvdtrain.bench.script import Script, print_times
from hvdtrain.bench.suite import MODELS, Launching, Point, bench_model, job_of

SIDES = ["horovod-mpi:keep", "horovod-mpi:system", "plain-mpi:keep", "plain-gloo:keep", "mirrored:keep"]
SIDES += ["multi_worker_mirrored:keep"]


def main() -> int:
    script = Script(__doc__, rounds=3)
    script.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["resnet20", "lm", "mlp", "digits"])
    script.add_argument("--sides", nargs="+", metavar="SIDE:MALLOC", default=SIDES)
    script.add_argument("--ranks", type=int, default=2)
    script.add_argument("--windows", type=int, default=5)
    script.add_argument("--steps", type=int, help="steps of a window; by default the model's own")
    script.add_argument("--limit", type=float, default=300, help="seconds that a launch may take")
    options = script.parsed()

    def job(words: str, model: str) -> Job:
        name, _, malloc = words.partition(":")
        how = Launching(windows=options.windows, warm_up=1, steps=options.steps, breakdown=False)
        point = Point(name, model, options.ranks, bench_model(model).batch)
        return replace(job_of(point, replace(how, malloc=malloc or "keep")), name=words)

    for model in options.models:
        runs = script.measure([job(side, model) for side in options.sides], options.rounds, limit_s=options.limit)
        peaks = {run.name: [max(values) for values in run.figure("peak_rss_mib")] for run in runs}
        first, notes = peaks.get(options.sides[0]), {}
        for run in runs:
            faults, kernel, cpu_s = (np.median(run.figure(name)) for name in ("page_faults", "kernel_share", "cpu_s"))
            mine = np.array(peaks[run.name])
            notes[run.name] = (
                f"{faults:9,.0f} faults a step  {kernel:4.0%} in the kernel  CPU {cpu_s:.3f} s  {np.median(mine):6.0f} "
                f"MiB" + (f" ({np.median(mine / np.array(first)):.2f})" if first else "")
            )
        print_times(f"{model:9}", {run.name: run.medians("windows_ms") for run in runs}, options.sides[0], notes)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
