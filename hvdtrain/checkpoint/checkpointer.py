"""Checkpoints in numbered folders that appear whole or not at all."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.checkpoint.agreement import TIMEOUT_S, is_split, on_every_rank, on_primary
from hvdtrain.checkpoint.naming import complete, name_of, step_of
from hvdtrain.checkpoint.pending import PendingCheckpoint
from hvdtrain.checkpoint.selection import Retention, find_checkpoint, newest_good
from hvdtrain.checkpoint.tensor_files import Owned
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import bounds_of, box_shape
from hvdtrain.state.named_tensors import NamedTensor, elements, spec_of
from hvdtrain.state.train_state import TrainState


class Checkpointer:
    """Writes the training state to `folder/step-N`, and keeps the newest ones and the best. Collective.

    Each rank writes the tensors that it owns to a safetensors file in a hidden folder. When all have reported theirs to
    be on disk, the primary writes the index of all files and renames the folder: a writer that is killed leaves nothing
    that could be taken for a checkpoint. Where no tensor is sharded, only the primary needs to see the folder.

    Args:
        folder: where the checkpoints are; created when the first is saved.
        keep: how many of the newest stay; None: all.
        backend: the ranks that hold the state; None: this process alone.
        keep_every_hours: one checkpoint of every so many hours stays as well; None: none does.
        before: called on the primary before each checkpoint; if it raises OSError or CheckpointError, the checkpoint
            fails.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = 3,
        backend: Backend | None = None,
        *,
        keep_every_hours: float | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._folder = folder
        self._before = before
        self._retention = Retention(keep, keep_every_hours)
        self.ranks: Any = backend if backend is not None else NoOpCollectives()

    def save(self, step: int, tensors: Mapping[str, NamedTensor], scalars: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps and return its folder. Collective.

        Args:
            step: finished steps.
            tensors: the state, by path.
            scalars: the rest of it. If they name a `best` epoch, the checkpoint of its `step` stays at any age.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written.
        """
        pending = self._begin(step, scalars)
        try:
            pending.owned = owned(tensors, self.ranks)
            written = self._together(pending, pending.write)
            self._together(pending, lambda: pending.commit(written) if pending.primary else None)
        except BaseException:
            pending.give_up()
            raise
        return pending.final

    def copy(self, step: int, tensors: Mapping[str, NamedTensor], scalars: Mapping[str, Any]) -> PendingCheckpoint:
        """Copy the state after `step` steps to host memory, as a checkpoint to be written. Collective.

        Args:
            step: finished steps.
            tensors: the state, by path.
            scalars: as in `save`; nobody may change them later.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        pending = self._begin(step, scalars)
        try:
            mine = owned(tensors, self.ranks)
            pending.owned = [Owned(each.spec, np.array(each.array(), order="C")) for each in mine]
        except BaseException:
            pending.give_up()
            raise
        return pending

    def save_state(self, state: TrainState) -> Path:
        """Write all of a training state; see `save`. Collective."""
        return self.save(state.scalars.step, state.saved_tensors(), asdict(state.scalars))

    def prepare(self, step: int, tensors: Mapping[str, NamedTensor], *, again: bool = False) -> None:
        """Check that a training from `step` on can save here, before its first step. Collective.

        Args:
            step: finished steps.
            tensors: the state, by path.
            again: whether this training has saved here before, and may have come further.

        Raises:
            CheckpointError: the folder cannot be written, holds checkpoints of later steps, or must be shared by all
                ranks and is not.
        """
        pending = self._pending(step, {})

        def attempt() -> str:
            try:
                pending.create()
                (pending.path / "writable").write_bytes(b" ")
            except OSError as error:
                raise CheckpointError(f"Checkpoints cannot be written to {self._folder}: {error}") from error
            return str(pending.path)

        try:
            pending.path = Path(on_primary(self.ranks, attempt))
            shared = not _is_whole(tensors, self.ranks)
            on_every_rank(self.ranks, lambda: pending.refuse_unshared() if shared else None)
        finally:
            pending.give_up()
        if not again:
            on_primary(self.ranks, lambda: self._refuse_later(step))

    def _refuse_later(self, step: int) -> None:
        later = [step_of(path) for path in complete(self._folder) if step_of(path) > step]
        if later:
            raise CheckpointError(
                f"A training saves to a folder of its own. Received: {self._folder}, which holds the checkpoint of "
                f"step {later[-1]}, in a training that begins at step {step}. Go on from it, by "
                f"trainer.resume({str(self._folder)!r}) before fit, or name another folder."
            )

    def find(self, which: str = "newest") -> Path:
        """Return an undamaged checkpoint that the primary sees in the folder; see `find_checkpoint`. Collective.

        Raises:
            CheckpointError: there is none.
        """
        return Path(on_primary(self.ranks, lambda: str(find_checkpoint(self._folder, which))))

    def find_to_go_on(self) -> Path | None:
        """Return the newest undamaged checkpoint, or None; damaged ones are set aside. Collective.

        Raises CheckpointError: there are only damaged ones.
        """

        def look() -> str | None:
            found = newest_good(self._folder, set_aside=True)
            return None if found is None else str(found)

        found = on_primary(self.ranks, look)
        return None if found is None else Path(found)

    def _together(self, pending: PendingCheckpoint, act: Callable[[], Any]) -> list[Any]:
        """Call `act` on every rank; an error names the checkpoint."""

        def attempt() -> Any:
            with pending.naming_failures():
                return act()

        return on_every_rank(self.ranks, attempt)

    def _pending(self, step: int, scalars: Mapping[str, Any]) -> PendingCheckpoint:
        final = self._folder / name_of(step)
        return PendingCheckpoint(final=final, rank=self.ranks.rank, scalars=scalars, retention=self._retention)

    def _begin(self, step: int, scalars: Mapping[str, Any]) -> PendingCheckpoint:
        """Make the folder that all ranks write into."""
        pending = self._pending(step, scalars)

        def create() -> str | None:
            if not self.ranks.primary:
                return None
            self._before()
            pending.create()
            return str(pending.path)

        pending.path = Path(self._together(pending, create)[0])
        return pending


def owned(tensors: Mapping[str, NamedTensor], ranks: Backend) -> list[Owned]:
    """Return the slices this rank writes. The lowest rank writes a slice that several hold. Collective.

    Args:
        tensors: the state, by path.
        ranks: those that write.
    """
    if _is_whole(tensors, ranks):
        return [Owned(spec_of(path, tensor), tensor.value) for path, tensor in tensors.items()] if ranks.primary else []
    specs = [spec_of(path, tensor) for path, tensor in tensors.items()]
    mine = [json.dumps([spec.path, *bounds_of(spec.slice)]) for spec in specs]
    everyone = ranks.gather_bytes(json.dumps(mine).encode(), timeout=TIMEOUT_S)
    taken = {held for text in everyone[: ranks.rank] for held in json.loads(text)}
    return [
        Owned(spec, tensors[spec.path].value)
        for spec, held in zip(specs, mine, strict=True)
        if held not in taken and (spec.whole or elements(box_shape(spec.slice)))
    ]


def _is_whole(tensors: Mapping[str, NamedTensor], ranks: Backend) -> bool:
    """Return whether every rank holds all of the state."""
    return not is_split(ranks) and all(tensor.replicated for tensor in tensors.values())
