"""`evaluate` on every rank: evaluate a run's checkpoint, on its validation data or on other data."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, world_size
from hvdtrain.backends.select import backend_for
from hvdtrain.config.errors import DataError
from hvdtrain.config.run import Config
from hvdtrain.data.batch import Batch
from hvdtrain.data.preprocessing import label_mapping
from hvdtrain.data.registry import load_like
from hvdtrain.data.shapes import check_shapes
from hvdtrain.data.source import DataSplits
from hvdtrain.data.sources.images import finish_of
from hvdtrain.models.registry import model_family
from hvdtrain.observability.summary import write_json
from hvdtrain.recipes import run_name
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.run_data import check_loaded, evaluation_of, left_out, loaded_splits
from hvdtrain.runs.trainers import restoring_trainer
from hvdtrain.runtime.session import Session

SplitName = Literal["validation", "train", "all"]


def evaluate(
    session: Session,
    config: Config,
    folder: RunFolder,
    description: RunDescription,
    *,
    checkpoint: str = "newest",
    other_data: bool = False,
    split: SplitName | None = None,
) -> tuple[dict[str, Any], Path]:
    """Evaluate a checkpoint on the data of `config`, and return the figures and the file that holds them. Collective.

    Args:
        session: this rank's part in the job.
        config: that of the run, with the data to evaluate.
        folder: of the run.
        description: of the run.
        checkpoint: `newest`, `best`, or the number of a step.
        other_data: whether `config` names other data than the run's.
        split: the samples; None: the validation samples, or all of other data that have none of their own.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not fit the configuration.
        DataError: the data do not fit the model, or have classes that it does not know.
    """
    backend = backend_for(session)
    splits = _splits(config, description, backend, other_data=other_data)
    chosen = split or ("all" if other_data and splits.held_out else "validation")
    sources = {"validation": [splits.validation], "train": [splits.train], "all": [splits.train, splits.validation]}
    steps, sizes = config.training.validation_steps, [source.size for source in sources[chosen]]
    batches = Batches([evaluation_of(each, config.data, splits, backend, steps=steps) for each in sources[chosen]])
    trainer = restoring_trainer(config, description, splits.classes, backend)
    check_shapes(trainer.model, splits, model_family(config.model).loss())
    trainer.build_on(next(iter(batches)))
    trainer.restore(folder.checkpoints, checkpoint)
    outcome = trainer.evaluate_on(batches)
    figures = {
        "recipe": run_name(config),
        "step": trainer.state.scalars.step,
        "world_size": world_size(backend),
        "checkpoint": checkpoint,
        "data": config.data.data,
        "data_args": config.data.data_args,
        "split": chosen,
        "samples": None if None in sizes else sum(sizes),
        **{f"val_{name}": value for name, value in outcome.as_dict().items()},
        "parameter_hash": trainer.state.agreed_hash(backend),
    }
    if config.data.tolerated:
        figures |= {"bad_records": len(batches.bad), "left_out": batches.bad}
    file = _file(folder, figures, other_data=other_data, split=split)
    if backend.primary:
        write_json(file, figures)
    return figures, file


class Batches:
    """The evaluation batches of several sources, one after another."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Batch]:
        """Yield this replica's batches of each source in turn."""
        for part in self._parts:
            yield from part

    @property
    def bad(self) -> list[str]:
        """Descriptions of the skipped samples."""
        return [text for part in self._parts for _, text in sorted(left_out(part).items())]


def _splits(config: Config, description: RunDescription, backend: Backend, *, other_data: bool) -> DataSplits:
    """Load the data of `config`, prepared as the run's were; every rank calls it."""
    splits = None
    if config.data.data == description.data:
        splits = load_like(config.data, description.preprocessing, description.classes, config.training.seed)
    splits = loaded_splits(config, backend) if splits is None else check_loaded(config.data, splits, backend)
    return _as_trained(splits, description) if other_data else splits


def _as_trained(splits: DataSplits, description: RunDescription) -> DataSplits:
    """Return other data with the labels of the run, and with its mean and std."""
    mine, theirs = description.preprocessing, splits.preprocessing
    finish = splits.finish
    if finish is not None and mine.image is not None and theirs.image is not None:
        finish = finish_of(mine.image)
    labels = label_mapping(theirs.class_names, mine.class_names, lambda: splits.validation.name)
    if labels is not None:
        finish = _with_labels(finish, labels)
    elif None not in (splits.classes, description.classes) and splits.classes > description.classes:  # type: ignore[operator]
        raise DataError(
            f"{splits.validation.name} has labels of {splits.classes} classes; the run was trained on "
            f"{description.classes}. See --data-args."
        )
    preprocessing = replace(theirs, class_names=mine.class_names)
    return replace(splits, finish=finish, classes=description.classes, preprocessing=preprocessing)


def _with_labels(finish: Any, labels: Sequence[int]) -> Any:
    """Return `finish` with labels replaced by those of the run."""

    def renumbered(inputs: Any, targets: Any, *rest: Any) -> tuple[Any, ...]:
        elements = (inputs, targets, *rest) if finish is None else finish(inputs, targets, *rest)
        return elements[0], tf.cast(tf.gather(tf.constant(labels), elements[1]), elements[1].dtype), *elements[2:]

    return renumbered


def _file(folder: RunFolder, figures: dict[str, Any], *, other_data: bool, split: SplitName | None) -> Path:
    """Return the file for the figures: `evaluation.json`, or one named after what else was evaluated."""
    checkpoint = figures["checkpoint"]
    words = [] if checkpoint == "newest" else [f"step-{checkpoint}".replace("step-best", "best")]
    if other_data:
        path = str(figures["data_args"].get("path", ""))
        words.append(Path(path).name.split(".")[0] or figures["data"])
    if split is not None:
        words.append(split)
    if not words:
        return folder.evaluation
    stem = re.sub(r"[^\w.-]+", "-", "-".join(["evaluation", *words]))
    names = (f"{stem}{number}.json" for number in ("", *(f"-{count}" for count in range(2, 1000))))
    return next(folder.path / name for name in names if _is_of(folder.path / name, figures))


def _is_of(file: Path, figures: dict[str, Any]) -> bool:
    """Whether a file is new, or holds an earlier evaluation of the same data: that one is replaced."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return not file.exists()
    return all(content.get(name) == figures[name] for name in ("data", "data_args", "split"))
