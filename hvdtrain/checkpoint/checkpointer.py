"""Checkpoints in numbered folders that appear whole or not at all."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdtrain.backends.no_op import NoOpCollectives
from hvdtrain.backends.protocol import Backend
from hvdtrain.checkpoint.agreement import on_every_rank
from hvdtrain.checkpoint.commit import commit, remove_old
from hvdtrain.checkpoint.drafts import Draft
from hvdtrain.checkpoint.manifest import merged
from hvdtrain.checkpoint.naming import complete, name_of, step_of
from hvdtrain.checkpoint.selection import find_checkpoint
from hvdtrain.checkpoint.snapshot import owned
from hvdtrain.checkpoint.write import refuse_unshared, take_list, write_list, write_tensors
from hvdtrain.config.errors import CheckpointError
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.train_state import TrainState


class Checkpointer:
    """Writes the training state to `folder/step-N` and keeps the newest ones and the best; every rank calls it.

    Each rank writes the tensors that it owns, and the list of them, into a hidden folder. When all have reported theirs
    to be on disk, the primary makes one manifest of the lists and renames the folder: a writer that is killed leaves
    nothing that could be taken for a checkpoint. Where no tensor is sharded, only the primary needs to see the folder.

    Args:
        folder: where the checkpoints are; created when the first is saved.
        keep: how many of the newest stay; None: all.
        backend: the ranks that hold the state; None: this process alone.
    """

    def __init__(self, folder: Path, keep: int | None = 3, backend: Backend | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._ranks: Any = backend if backend is not None else NoOpCollectives()

    def save(self, step: int, tensors: Mapping[str, NamedTensor], scalars: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps and return its folder.

        Args:
            step: finished steps.
            tensors: the state, by path.
            scalars: the rest of it. Of `best`, if there is one, the checkpoint of its `step` stays, whatever its age.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written.
        """
        final = self._folder / name_of(step)
        drafts: list[Draft] = []
        try:
            path = Path(self._together(final, lambda: self._begin(final, drafts))[0])
            written = self._together(final, lambda: self._write(path, tensors))
            self._together(final, lambda: self._commit(path, final, written, scalars) if drafts else None)
        except BaseException:
            for draft in drafts:
                draft.give_up()
            raise
        for draft in drafts:
            draft.close()
            best = scalars.get("best")
            spared = {final} | ({self._folder / name_of(best["step"])} if best else set())
            remove_old(self._folder, spared, self._keep)
        return final

    def save_state(self, state: TrainState) -> Path:
        """Do `save` for all of a training state."""
        return self.save(state.scalars.step, state.saved_tensors(), asdict(state.scalars))

    def prepare(self, step: int, tensors: Mapping[str, NamedTensor]) -> None:
        """Check that a training from `step` on can save here; called on every rank before the first step.

        Raises:
            CheckpointError: the folder cannot be written, holds checkpoints of later steps, or is not one that all
                ranks share where they have to.
        """

        def attempt() -> str | None:
            try:
                if not self._ranks.primary:
                    return None
                drafts.append(Draft(self._folder, name_of(step)))
                (drafts[0].path / "writable").write_bytes(b" ")
                return str(drafts[0].path)
            except OSError as error:
                raise CheckpointError(f"Checkpoints cannot be written to {self._folder}: {error}") from error

        drafts: list[Draft] = []
        try:
            path = Path(on_every_rank(self._ranks, attempt)[0])
            shared = all(tensor.replicated for tensor in tensors.values())
            on_every_rank(self._ranks, lambda: None if shared else refuse_unshared(path))
        finally:
            for draft in drafts:
                draft.give_up()
        on_every_rank(self._ranks, lambda: self._refuse_later(step) if self._ranks.primary else None)

    def _refuse_later(self, step: int) -> None:
        later = [step_of(path) for path in complete(self._folder) if step_of(path) > step]
        if later:
            raise CheckpointError(
                f"A training saves to a folder of its own. Received: {self._folder}, which holds the checkpoint of "
                f"step {later[-1]}, in a training that begins at step {step}. Go on from it, by "
                f"trainer.resume({str(self._folder)!r}) before fit, or name another folder."
            )

    def find(self, which: str = "newest") -> Path:
        """Return a checkpoint that the primary sees in the folder; see `find_checkpoint`.

        Raises:
            CheckpointError: there is none.
        """

        def look() -> str | None:
            return str(find_checkpoint(self._folder, which)) if self._ranks.primary else None

        return Path(on_every_rank(self._ranks, look)[0])

    def _together(self, final: Path, act: Any) -> list[Any]:
        """Call `act` on every rank; what fails is told as the checkpoint's failure."""

        def attempt() -> Any:
            try:
                return act()
            except (OSError, CheckpointError, tf.errors.OpError) as error:
                raise CheckpointError(f"The checkpoint {final} cannot be written: {error}") from error

        return on_every_rank(self._ranks, attempt)

    def _begin(self, final: Path, drafts: list[Draft]) -> str | None:
        """Make the folder that all write into, on the primary."""
        if not self._ranks.primary:
            return None
        drafts.append(Draft(self._folder, final.name))
        return str(drafts[0].path)

    def _write(self, draft: Path, tensors: Mapping[str, NamedTensor]) -> str | None:
        """Write what this rank owns, and return the name of its file; None if it owns nothing."""
        mine = owned(tensors, index=self._ranks.index, primary=self._ranks.primary)
        file = draft / f"tensors-{self._ranks.process:05d}.bin"
        entries, size = write_tensors(file, mine)
        if not entries:
            return None
        write_list(file, entries, size)
        return file.name

    def _commit(self, draft: Path, final: Path, written: list[str | None], scalars: Mapping[str, Any]) -> None:
        lists = {name: take_list(draft / name) for name in written if name is not None}
        tensors = merged([entries for entries, _ in lists.values()])
        commit(draft, final, tensors, {name: size for name, (_, size) in lists.items()}, scalars)
