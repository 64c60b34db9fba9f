"""Save, restore and resume a trainer; checkpoints of `fit`."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.checkpoint import index
from hvdtrain.checkpoint.agreement import on_every_rank
from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.commit import discard
from hvdtrain.checkpoint.lock import locked
from hvdtrain.checkpoint.naming import checkpoints_at, complete
from hvdtrain.checkpoint.restore import contents, extras, restore
from hvdtrain.checkpoint.selection import located, newest_good
from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.observability.wording import plural
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.optimizers import NoOptimizer
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.session import current
from hvdtrain.state.optimizers import AVERAGES, MAIN
from hvdtrain.state.scalars import Scalars
from hvdtrain.state.train_state import EXTRA, LAYERS, MODEL, RULE
from hvdtrain.training.agreement import agree_on_call, check_same_data, described
from hvdtrain.training.core import TrainerCore
from hvdtrain.training.plan import Plan

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Backup:
    """A folder of checkpoints that `fit` resumes from, and removes when finished."""

    folder: str
    every: int | None
    """Steps between checkpoints; None: at the end of every epoch."""
    keep: int
    removed: bool
    """Whether to remove it at the end (`delete_checkpoint`)."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint policy of `fit`."""
        return Checkpoint(self.folder, self.every, self.keep)

    def refuse_foreign(self) -> None:
        """Reject a folder saved by Keras' own `fit`; rank 0 only. Raises CheckpointError naming the file."""
        found = Path(self.folder) / "latest.weights.h5"
        if found.exists():
            raise CheckpointError(
                f"BackupAndRestore resumes from hvdtrain's checkpoints. Received: {found}, by Keras' own fit(). Load "
                "it with model.load_weights() and name another backup_dir, or remove it."
            )

    def finish(self) -> None:
        """Remove the checkpoints if requested; rank 0 only. Other files stay."""
        if self.removed:
            for path in complete(Path(self.folder)):
                discard(path)
            with suppress(OSError):  # it is not empty
                Path(self.folder).rmdir()


def without_backup(callbacks: Sequence[Any]) -> tuple[list[Any], Backup | None]:
    """Separate one BackupAndRestore from the other callbacks. Raises ConfigError if it never saves."""
    flat = tf.nest.flatten(list(callbacks))
    backups = [_backup(each) for each in flat if isinstance(each, keras.callbacks.BackupAndRestore)]
    if len(backups) > 1:
        raise ConfigError(f"fit takes one BackupAndRestore. Received: {len(backups)} of them.")
    others = [each for each in flat if not isinstance(each, keras.callbacks.BackupAndRestore)]
    return others, backups[0] if backups else None


def agreed_backup(backup: Backup | None, backend: Backend) -> Backup | None:
    """Return rank 0's backup on every rank; others may have the same one or none. Collective.

    Raises ConfigError if a rank has a different one.
    """
    mine = None if backup is None else asdict(backup)
    everyone = gather(backend, mine)
    first = json.dumps(everyone[0]) if everyone[0] else "none"
    for rank, other in enumerate(everyone):
        if other not in (None, everyone[0]):
            raise ConfigError(
                "BackupAndRestore must be on rank 0, and with the same arguments wherever else it is. Received: "
                f"{json.dumps(other)} on rank {rank} and {first} on rank 0."
            )
    return Backup(**everyone[0]) if everyone[0] else None


def _backup(callback: Any) -> Backup:
    freq = callback.save_freq
    if freq != "epoch" and (isinstance(freq, bool) or freq < 1):
        raise ConfigError(
            f'BackupAndRestore(save_freq=…) is "epoch" or a number of steps, at least 1. Received: {freq!r}.'
        )
    every = None if freq == "epoch" else int(freq)
    keep = 2 if callback.double_checkpoint else 1
    return Backup(str(callback.backup_dir), every, keep, removed=bool(callback.delete_checkpoint))


class ResumableTrainer(TrainerCore):
    """Adds checkpoints to the trainer; base of `Trainer`."""

    _pending: Path | None = None
    """Checkpoint to load once the model has variables."""
    _resuming = False
    """Whether the next `fit` continues the restored training."""
    _asked_for: frozenset[Path] = frozenset()
    """Folders that the script has resumed from, or tried to."""

    def save(self, folder: Folder) -> Path:
        """Write the full training state to `folder/step-N` and return its path. Collective.

        Weights, optimizer, steps, epochs: everything for `restore` and `resume`. Earlier checkpoints stay. The model
        alone is saved by `model.save("model.keras")` on rank 0.

        Raises:
            CheckpointError: the folder is not writable.
            ConfigError: the model has no variables yet, or ranks pass different folders.
        """
        agree_on_call(self.backend, "save", {"folder": os.fspath(folder)})
        if not (self.model.built or self.model.weights):  # Keras builds no model without a `call`
            raise ConfigError("The model has no variables to save yet: call fit, evaluate or predict before save.")
        self.consolidate()
        path = Checkpointer(Path(folder), keep=None, backend=self.backend).save_state(self.state)
        self.rule.give_back(whole=self._compiled_by_user)
        return path

    def restore(self, folder: Folder, which: str = "newest") -> Path:
        """Load a checkpoint and return its path. Collective; only rank 0 needs to see the folder.

        The next `fit` starts a new training from this state. The weights are those that a `fit` would have left that
        ended there: with `use_ema=True` the averages. A trainer without an optimizer takes the weights alone, of a run
        with any. If the model has no variables yet, the checkpoint is loaded by the next `fit`, `evaluate` or
        `predict`.

        Args:
            folder: of checkpoints, or of a run; or a single checkpoint.
            which: `"newest"` undamaged one, `"best"` (by the metric that selected it), or a step number.

        Raises:
            CheckpointError: missing, damaged, or saved from another model or optimizer.
        """
        agree_on_call(self.backend, "restore", {"folder": os.fspath(folder), "which": which})
        path = self._on_primary(lambda: located(Path(folder), str(which)))
        assert path is not None, "found or raised"
        self._resuming = False
        self._load(path)
        return path

    def resume(self, folder: Folder) -> Path | None:
        """Load the newest checkpoint in `folder`, if any, for the next `fit`. Collective.

        The next `fit` then trains the rest of its `epochs`, from the next sample, on any number of ranks, with the
        callbacks' state restored. It needs the same data and global batch as before.

        Damaged checkpoints are reported, renamed to `step-N.damaged`, and the newest good one is used.

        Returns:
            The checkpoint; None if there is none, and `fit` starts from the beginning.

        Raises:
            CheckpointError: it was saved from another model or optimizer, or all checkpoints are damaged.
        """
        agree_on_call(self.backend, "resume", {"folder": os.fspath(folder)})
        self._asked_for |= {Path(folder)}
        return self._resume(Path(folder))

    def _resume(self, folder: Path) -> Path | None:
        path = self._on_primary(lambda: _to_go_on_from(folder))
        if path is not None:
            self.go_on_from(path)
        return path

    def go_on_from(self, checkpoint: Path) -> None:
        """Load a checkpoint to continue its training: weights stay those of training beside their averages. Collective.

        Raises CheckpointError: it was saved from another model or optimizer.
        """
        self._resuming = True
        self._load(checkpoint)

    def _on_primary(self, find: Callable[[], Path | None]) -> Path | None:
        """Return rank 0's result of `find` on every rank. Collective."""

        def look() -> str | None:
            path = find() if self.backend.primary else None
            return None if path is None else str(path)

        found = on_every_rank(self.backend, look)[0]
        return None if found is None else Path(found)

    def _load(self, path: Path) -> None:
        self._pending = path
        if self.factory.has_variables:
            self._load_pending()
        elif self.backend.primary:
            LOGGER.info(f"the model has no variables yet: fit, evaluate or predict will load {path}")

    def _load_pending(self) -> None:
        """Load the pending checkpoint, if any."""
        if self._pending is None:
            return
        path, self._pending = self._pending, None
        state = self.state
        scalars = restore(path, state.named_tensors(), self.backend) if self._trains else self._load_weights(path)
        state.restore(scalars)
        state.held_weights = extras(path, self.backend, EXTRA)
        state.restore_layers(extras(path, self.backend, LAYERS))
        self.rule.load_extras(extras(path, self.backend, RULE))
        self.rule.on_state_loaded()
        if not self._resuming:
            self.rule.finalize()

    @property
    def _trains(self) -> bool:
        """Whether there is an optimizer; else the model evaluates and predicts."""
        return not isinstance(innermost(self.optimizer), NoOptimizer)

    def _load_weights(self, path: Path) -> dict[str, Any]:
        """Load the weights of a checkpoint alone, or their averages if it has these; return its scalars. Collective."""
        names, scalars = contents(path, self.backend)
        saved = [name for name in names if name.startswith(f"{MAIN}/") and AVERAGES in name]
        averages = {name.partition(AVERAGES)[2]: name for name in saved if scalars["step"]}  # before it they are zeros
        sources = {f"{MODEL}{path}": averages[path] for path in self.state.trainable if path in averages}
        tensors = {name: each for name, each in self.state.named_tensors().items() if name.startswith(MODEL)}
        needed = {sources.get(name, name): each for name, each in tensors.items()}
        return restore(path, needed, self.backend, partly=True)

    def _build_variables(self, batch: Batch, *, training: bool) -> None:
        """Also build the optimizers if a checkpoint is pending."""
        pending = self._pending is not None and self._trains
        try:
            super()._build_variables(batch, training=training or pending)
        except Exception as error:
            if not training and pending:
                error.add_note(
                    f"{type(self.model).__name__} was built for training on a batch of evaluation, to load "
                    f"{self._pending} into its optimizers."
                )
            raise

    def build_on(self, batch: Batch, *, training: bool = False) -> None:
        """Build, then load a pending checkpoint."""
        super().build_on(batch, training=training)
        self._load_pending()

    def _begin_fit(
        self, data: TrainingData, initial_epoch: int, backup: Backup | None, *, described_data: bool
    ) -> bool:
        """Begin training, or continue the resumed one; return whether it continues."""
        restored = None
        if backup is not None:
            on_every_rank(self.backend, lambda: backup.refuse_foreign() if self.backend.primary else None)
            restored = self._resume(Path(backup.folder))
        if restored is None:  # rank 0 may be the only one that loaded weights: the plan is made from its state
            self.broadcast_state()
        scalars = self.state.scalars
        goes_on, self._resuming = self._resuming, False
        now = described(data, self._seed, self.backend) if described_data or goes_on else None
        if goes_on:
            on_every_rank(self.backend, lambda: check_same_data(scalars.data, now) if self.backend.primary else None)
        else:
            scalars.begin_training(initial_epoch)
            self.state.held_weights = {}
        scalars.data = now
        return goes_on

    @contextmanager
    def _saving(self, checkpoint: Checkpoint | None) -> Iterator[BackgroundSaver | None]:
        """Yield the checkpoint writer of a `fit`, or None."""
        if checkpoint is None:
            yield None
            return
        folder, hours = Path(checkpoint.folder), checkpoint.keep_every_hours
        with locked(folder, self.backend, job=current().link.job) as lock:
            kept = int(checkpoint.keep)
            files = Checkpointer(folder, kept, self.backend, keep_every_hours=hours, before=lock.renew)
            saver = BackgroundSaver(files, current().control)
            try:
                yield saver
            finally:
                saver.close()


def refuse_both(checkpoint: Checkpoint | None, backup: Backup) -> None:
    """Reject two ways of saving. Raises ConfigError naming them."""
    if checkpoint is not None:
        raise ConfigError(
            f"fit saves by BackupAndRestore({backup.folder!r}) or by checkpoint={checkpoint}. Received: both. Leave "
            "out one of them."
        )


def nothing_left(scalars: Scalars) -> str:
    """Return the warning that the training is already complete."""
    how = "a callback stopped it" if scalars.stopped else "all of its epochs are trained"
    return (
        f"warning: there is nothing left to train: {how} ({plural(scalars.epoch_of_training, 'epoch')}). "
        "More epochs=N extend it; trainer.restore(folder) in place of resume begins a new training from there."
    )


def with_checkpoints(plan: Plan, checkpoint: Checkpoint | None) -> Plan:
    """Return `plan` with the save points of `checkpoint`."""
    if checkpoint is None:
        return plan
    every = None if checkpoint.every is None else int(checkpoint.every)
    return replace(plan, checkpoint_every=every, best=checkpoint.metric)


def _to_go_on_from(folder: Path) -> Path | None:
    """Return the newest good checkpoint in or at `folder`, or None if there is none, good or damaged."""
    if (folder / index.NAME).is_file():
        return located(folder, "newest")
    return newest_good(checkpoints_at(folder), set_aside=True)
