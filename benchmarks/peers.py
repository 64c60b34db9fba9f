"""Draw docs/peers.png from the newest report of `bench` in benchmarks/results: step times beside other ways to train.

Run in the repository: python benchmarks/peers.py
"""

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.bench.plots import Bars, bars
from hvdtrain.bench.results import Comparison, Refused, Run, ratio, read_results

ROOT = Path(__file__).parents[1]
OURS = "horovod-mpi"
SIDES = {
    "horovod-mpi": "hvdtrain, MPI",
    "horovod-gloo": "hvdtrain, Gloo",
    "plain-mpi": "Horovod, MPI",
    "plain-gloo": "Horovod, Gloo",
    "mirrored": "MirroredStrategy",
    "multi_worker_mirrored": "MultiWorkerMirrored",
}
MODELS = {"resnet20": "ResNet-20", "lm": "transformer, 12.7 M parameters", "mlp": "wide MLP, 58.6 M parameters"}


def newest() -> tuple[Path, Comparison]:
    """Return the newest folder with a comparison of backends, and that comparison."""
    for file in sorted((ROOT / "benchmarks" / "results").glob("*/results.json"), reverse=True):
        comparisons = read_results(file).comparisons
        if "suite" in comparisons:
            return file.parent, comparisons["suite"]
    raise SystemExit("benchmarks/results has no comparison of backends: run `python -m hvdtrain bench` first.")


def panel_of(model: str, runs: Sequence[Run]) -> Bars:
    """Return each side's step time as a multiple of ours, formed round by round on two ranks."""
    of_two = {run.name: run.medians("windows_ms") for run in runs if _is_of_two(run, model)}
    found = {label: ratio(of_two.get(side, []), of_two[OURS]) for side, label in SIDES.items()}
    values = {label: value for label, value in found.items() if not isinstance(value, Refused)}
    last = model == list(MODELS)[-1]
    return Bars(
        MODELS[model], values, mark=1.0, xlabel="step time, as a multiple of hvdtrain's over MPI" if last else ""
    )


def _is_of_two(run: Run, model: str) -> bool:
    setting = run.setting
    return (setting["model"], setting["ranks"], setting["precision"], setting["accumulate"]) == (model, 2, "float32", 1)


if __name__ == "__main__":
    folder, suite = newest()
    panels = [panel_of(model, suite.runs) for model in MODELS]
    (ROOT / "docs" / "peers.png").write_bytes(bars(panels))
    print(f"docs/peers.png: step times as multiples of {SIDES[OURS]}'s, from {folder.relative_to(ROOT)}")
