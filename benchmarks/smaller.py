"""What smaller models of the digits lose: fewer bits, pruned, distilled. Prints the table of docs/export.md.

    python benchmarks/smaller.py --ranks 2 --seeds 0 1 2

A small CNN is trained on all ranks, for each seed. Then its weights are rounded by `export`, which checks each file;
copies of it are trained for three more epochs, as they are and pruned; and a student with a fortieth of its weights is
trained from nothing, by itself and by `keras.distillation.Distiller` with that CNN as its teacher. Reported are the
accuracies on the 297 images that no training sees, the sizes of safetensors files, and of these packed by gzip: means
over the seeds.
"""

import gzip
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, started

FIGURES = ("accuracy", "bytes", "packed")
TRAINED, EPOCHS, MORE, STUDENTS, BATCH = 1500, 6, 3, 18, 60
STEPS = TRAINED // BATCH
PRUNED: dict[str, dict[str, Any]] = {
    "50 % zeros": {"sparsity": 0.5},
    "80 % zeros": {"sparsity": 0.8},
    "90 % zeros": {"sparsity": 0.9},
    "2 of 4 zeros": {"pattern": "2:4"},
}


def measure(seeds: list[int]) -> dict[str, Any]:
    """Return accuracy and sizes of each model by its name, a number for each seed."""
    found: dict[str, dict[str, list[float]]] = {key: defaultdict(list) for key in FIGURES}
    backend, _, _ = started()
    for seed in seeds:
        for name, figures in _models(backend, seed):
            for key, value in figures.items():
                found[key][name].append(value)
    return found


def _models(backend: Any, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    import keras

    import hvdtrain
    from hvdtrain.config.model import ModelConfig
    from hvdtrain.data.digits import load_digits
    from hvdtrain.export.exporter import Quantization, Subject, export
    from hvdtrain.export.verify import Samples
    from hvdtrain.models.registry import build_model

    images, labels = load_digits()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    held = Samples(images[TRAINED:].astype(np.float32), labels[TRAINED:])

    def cnn(weights: Any = None, **arguments: Any) -> Any:
        model = build_model(ModelConfig("small_cnn", arguments), (8, 8, 1), 10, seed)
        if weights is not None:
            model.set_weights(weights)
        return model

    def trained(model: Any, epochs: int) -> Any:
        model.compile(keras.optimizers.Adam(2e-3), loss)
        trainer = hvdtrain.Trainer(model, seed=seed, backend=backend)
        trainer.fit(images[:TRAINED], labels[:TRAINED], batch=BATCH, epochs=epochs, verbose=0)
        return model

    def figures(model: Any, mode: str = "float32") -> dict[str, Any]:
        """Return those of a file; every rank calls, the first one writes."""
        if not backend.primary:
            return {}
        subject = Subject(model, {"dtype": "float32", "shape": [8, 8, 1]}, held, "logits")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.safetensors"
            (*_, written), _ = export(subject, {"safetensors": file}, Quantization(mode), points=1.0)
            assert not written.fault, written
            packed = len(gzip.compress(file.read_bytes()))
        return {"accuracy": written.accuracy, "bytes": written.bytes, "packed": packed}

    teacher = trained(cnn(), EPOCHS)
    weights = teacher.get_weights()
    for mode in ("float32", "float16", "int8", "int4"):
        yield mode, figures(cnn(weights), mode)
    yield "3 more epochs", figures(trained(cnn(weights), MORE))
    for name, options in PRUNED.items():
        model = cnn(weights)
        hvdtrain.prune(model, **options, layers="conv2|hidden", steps=2 * STEPS, every=5)
        trained(model, MORE)
        hvdtrain.finish_pruning(model)
        yield name, figures(model)
    yield "student", figures(trained(cnn(width=4, hidden=16), STUDENTS))
    student, losses = (
        cnn(width=4, hidden=16),
        keras.distillation.LogitsDistillation(4.0, loss=keras.losses.KLDivergence()),
    )
    trained(keras.distillation.Distiller(cnn(weights), student, losses, student_loss_weight=0.1), STUDENTS)
    yield "student, distilled", figures(student)


def table(accuracy: dict[str, list[float]], size: dict[str, list[float]], packed: dict[str, list[float]]) -> str:
    """Return the means over the seeds as a Markdown table, accuracies with those of the seeds."""
    lines = ["| | accuracy | of each seed | kB | packed |", "|---|---|---|---|---|"]
    for name, found in accuracy.items():
        each, kb, less = (
            ", ".join(f"{one:.3f}" for one in found),
            np.mean(size[name]) / 1e3,
            np.mean(packed[name]) / 1e3,
        )
        lines.append(f"| {name} | {np.mean(found):.4f} | {each} | {kb:.0f} | {less:.0f} |")
    return "\n".join(lines)


def main() -> int:
    script = Script(__doc__, measure)
    script.add_argument("--ranks", type=int, default=2)
    script.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = script.parsed()
    job = script.job("digits", measure, controller="mpirun", ranks=options.ranks, seeds=options.seeds)
    for run in script.measure([job]):
        print(table(*(run.figure(key)[0] for key in FIGURES)))
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
