"""Checkpoints in numbered folders that appear whole or not at all."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.checkpoint.agreement import is_split, on_every_rank
from hvdtrain.checkpoint.commit import commit
from hvdtrain.checkpoint.drafts import Draft
from hvdtrain.checkpoint.manifest import merged
from hvdtrain.checkpoint.naming import complete, name_of, step_of
from hvdtrain.checkpoint.retention import Retention, remove_old
from hvdtrain.checkpoint.selection import find_checkpoint, newest_good, put_aside
from hvdtrain.checkpoint.snapshot import Owned, on_host, owned
from hvdtrain.checkpoint.write import refuse_unshared, take_list, write_list, write_tensors
from hvdtrain.config.errors import CheckpointError, LaunchError
from hvdtrain.runtime.consequences import reason
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
        keep_every_hours: one checkpoint of every so many hours stays as well; None: none does.
        before: called on the primary before each checkpoint; what it raises, OSError or CheckpointError, is the
            checkpoint's failure.
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
        """Write the state after `step` steps and return its folder.

        Args:
            step: finished steps.
            tensors: the state, by path.
            scalars: the rest of it. Of `best`, if there is one, the checkpoint of its `step` stays, whatever its age.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written.
        """
        unwritten = self._begin(step, scalars)
        try:
            unwritten.owned = owned(tensors, self.ranks)
            written = self._together(unwritten, unwritten.write)
            self._together(unwritten, lambda: unwritten.commit(written) if unwritten.primary else None)
        except BaseException:
            unwritten.give_up()
            raise
        return unwritten.final

    def copy(self, step: int, tensors: Mapping[str, NamedTensor], scalars: Mapping[str, Any]) -> "Unwritten":
        """Return a copy of the state after `step` steps in the host's memory, and the folder that it goes to.

        Args:
            step: finished steps.
            tensors: the state, by path.
            scalars: as in `save`; nobody changes them any more.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        unwritten = self._begin(step, scalars)
        try:
            unwritten.owned = [on_host(tensor) for tensor in owned(tensors, self.ranks)]
        except BaseException:
            unwritten.give_up()
            raise
        return unwritten

    def save_state(self, state: TrainState) -> Path:
        """Do `save` for all of a training state."""
        return self.save(state.scalars.step, state.saved_tensors(), asdict(state.scalars))

    def prepare(self, step: int, tensors: Mapping[str, NamedTensor], *, again: bool = False) -> None:
        """Check that a training from `step` on can save here; called on every rank before the first step.

        Args:
            step: finished steps.
            tensors: the state, by path.
            again: whether this training has saved here before, and may have come further.

        Raises:
            CheckpointError: the folder cannot be written, holds checkpoints of later steps, or is not one that all
                ranks share where they have to.
        """

        def attempt() -> str | None:
            try:
                if not self.ranks.primary:
                    return None
                drafts.append(Draft(self._folder, name_of(step)))
                (drafts[0].path / "writable").write_bytes(b" ")
                return str(drafts[0].path)
            except OSError as error:
                raise CheckpointError(f"Checkpoints cannot be written to {self._folder}: {error}") from error

        drafts: list[Draft] = []
        try:
            path = Path(on_every_rank(self.ranks, attempt)[0])
            shared = not is_split(self.ranks) and all(tensor.replicated for tensor in tensors.values())
            on_every_rank(self.ranks, lambda: None if shared else refuse_unshared(path))
        finally:
            for draft in drafts:
                draft.give_up()
        if not again:
            on_every_rank(self.ranks, lambda: self._refuse_later(step) if self.ranks.primary else None)

    def _refuse_later(self, step: int) -> None:
        later = [step_of(path) for path in complete(self._folder) if step_of(path) > step]
        if later:
            raise CheckpointError(
                f"A training saves to a folder of its own. Received: {self._folder}, which holds the checkpoint of "
                f"step {later[-1]}, in a training that begins at step {step}. Go on from it, by "
                f"trainer.resume({str(self._folder)!r}) before fit, or name another folder."
            )

    def find(self, which: str = "newest") -> Path:
        """Return a checkpoint that the primary sees in the folder, and finds undamaged; see `find_checkpoint`.

        Raises:
            CheckpointError: there is none.
        """

        def look() -> str | None:
            return str(find_checkpoint(self._folder, which)) if self.ranks.primary else None

        return Path(on_every_rank(self.ranks, look)[0])

    def find_to_go_on(self) -> Path | None:
        """Return the newest checkpoint that is not damaged, None if there is none; those that are, are set aside."""

        def look() -> str | None:
            found = newest_good(self._folder, put_aside) if self.ranks.primary else None
            return None if found is None else str(found)

        found = on_every_rank(self.ranks, look)[0]
        return None if found is None else Path(found)

    def _together(self, unwritten: "Unwritten", act: Callable[[], Any]) -> list[Any]:
        """Call `act` on every rank; what fails is told as the checkpoint's failure."""

        def attempt() -> Any:
            with unwritten.told_as_its_failure():
                return act()

        return on_every_rank(self.ranks, attempt)

    def _begin(self, step: int, scalars: Mapping[str, Any]) -> "Unwritten":
        """Make the folder that all write into, on the primary."""
        file = f"tensors-{self.ranks.rank:05d}.bin"
        unwritten = Unwritten(final=self._folder / name_of(step), file=file, scalars=scalars, retention=self._retention)

        def make() -> str | None:
            if not self.ranks.primary:
                return None
            self._before()
            unwritten.draft = Draft(self._folder, unwritten.final.name)
            return str(unwritten.draft.path)

        unwritten.path = Path(self._together(unwritten, make)[0])
        return unwritten


@dataclass(kw_only=True)
class Unwritten:
    """A checkpoint on its way to the disk, as one rank sees it."""

    final: Path
    """Its folder, once it is there."""
    file: str
    """The name of this rank's file."""
    scalars: Mapping[str, Any]
    retention: Retention
    path: Path = Path()
    """The hidden folder that all ranks write into."""
    draft: Draft | None = None
    """This, where it was made: on the primary."""
    owned: Iterable[Owned] = ()
    """What this rank writes."""

    @property
    def primary(self) -> bool:
        """Whether this rank commits the checkpoint."""
        return self.draft is not None

    @property
    def token(self) -> str:
        """Tells it from all others, on every rank."""
        return self.path.name

    def write(self) -> str | None:
        """Write what this rank owns, and return the name of its file; None if it owns nothing."""
        file = self.path / self.file
        entries, size = write_tensors(file, self.owned)
        self.owned = ()
        if not entries:
            return None
        write_list(file, entries, size)
        return file.name

    def commit(self, written: Sequence[str | None]) -> None:
        """Give the checkpoint its name, once the files in `written` are there, and remove those that are not kept."""
        assert self.draft is not None, "the primary commits"
        lists = {name: take_list(self.path / name) for name in written if name is not None}
        tensors = merged([entries for entries, _ in lists.values()])
        commit(
            self.path,
            final=self.final,
            tensors=tensors,
            files={name: size for name, (_, size) in lists.items()},
            scalars=self.scalars,
        )
        self.draft.close()
        self.draft = None
        best, folder = self.scalars.get("best"), self.final.parent
        remove_old(folder, {self.final} | ({folder / name_of(best["step"])} if best else set()), self.retention)

    def give_up(self) -> None:
        """Remove what was written."""
        if self.draft is not None:
            self.draft.give_up()
            self.draft = None

    @contextmanager
    def told_as_its_failure(self) -> Iterator[None]:
        """Let what fails in this context name the checkpoint."""
        try:
            yield
        except (OSError, CheckpointError, LaunchError, tf.errors.OpError) as error:
            raise CheckpointError(f"The checkpoint {self.final} cannot be written: {reason(error)}") from error
