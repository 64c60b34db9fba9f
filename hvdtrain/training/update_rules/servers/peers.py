"""Workers with parameters of their own, which meet one another: gossip and elastic averaging.

Each rank's server owns a copy x of all variables, to which its worker's gradients are applied. After some updates it
meets another copy y: it sends x, the other side moves y by a (x - y) and answers with the y of before, and it moves x
by -a (x - y). Whatever else has changed x and y meanwhile stays, and nothing waits, so there is no deadlock. What both
sides have together stays the same.

- `gossip`, AD-PSGD (Lian et al. 2017, arXiv:1710.06952): y is the copy of a neighbour, a = 1/2. Neighbours in turn are
  those before and after on a ring, or 1, 2, 4 … further on an exponential graph. With `push_sum`, stochastic gradient
  push (Assran et al. 2019, arXiv:1811.10792, algorithm 1, overlapped), in terms of its z: a copy z has a weight w, 1 at
  first. It goes to the neighbour with half of its weight, which takes the mean of the two by their weights; no copy
  comes back. Updates are those of z, at the whole learning rate: the paper's, of w z, would be larger by 1 / w, and w
  falls where a rank sends more often than it is sent to.
- `easgd`, elastic averaging (Zhang et al. 2014, arXiv:1412.6651, algorithm 1): y is a center, of which each rank owns
  some variables.
"""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.runtime.compiled import run_once
from hvdtrain.runtime.messages import Messages, Pause
from hvdtrain.state.variables import unwrap
from hvdtrain.training.update_rules.servers.layout import HEADER, MEET, MET, Entry, ServerLayout, owners_of
from hvdtrain.training.update_rules.servers.masters import barrier, share_out
from hvdtrain.training.update_rules.servers.record import Event
from hvdtrain.training.update_rules.servers.rule import AsyncUpdate
from hvdtrain.training.update_rules.servers.server import PARTS, TO_SERVER, Push, Server

ELASTICITY = 0.9
"""Of `easgd`, over all ranks together: beta of Zhang et al., section 5."""


class Meeting(NamedTuple):
    """A copy to meet: another rank's, or the part of the center that it owns."""

    rank: int
    entries: Sequence[Entry]


class PeerServer(Server):
    """Owns one copy of all variables, and meets others.

    Args:
        entries: all variables, as they travel between copies.
        theirs: by path, what others meet here: the same copy, or this rank's part of the center.
        meetings: whom to meet each time, one after the other.
        strength: a.
        every: updates between two meetings.
        options: as for `Server`.
    """

    def __init__(
        self,
        *args: Any,
        entries: Sequence[Entry],
        theirs: Mapping[str, Any],
        meetings: Sequence[Sequence[Meeting]],
        strength: float,
        every: int,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._updates_per_step = 1
        self._theirs = theirs
        self._met_here = [entry for entry in entries if entry.path in theirs]
        self._meetings = itertools.cycle(meetings)
        self._strength = strength
        self._every = every
        self._under_way: dict[int, deque[tuple[Sequence[Entry], list[np.ndarray]]]]
        self._under_way = {rank: deque() for rank in range(self._workers)}
        self._actions |= {MEET: self._meet, MET: self._come_back}

    @property
    def quiet(self) -> bool:
        """Whether no answer is awaited."""
        return not any(self._under_way.values())

    def _update(self, push: Push) -> None:
        if not push.weight:
            return
        self._run(push.step, push.arrays, factor=push.share * self._workers)
        if self.version % self._every == 0:
            for rank, entries in next(self._meetings, ()):
                sent = self._values_of(self._parameters, entries)
                if rank == self._messages.rank:
                    self._move(self._parameters, entries, self._moved(sent, self._let_meet(sent)))
                    continue
                self._under_way[rank].append((entries, sent))
                self._send(rank, MEET, sent)

    def _received(self, kind: int, worker: int, header: np.ndarray) -> Any:
        if kind not in (MEET, MET):
            return super()._received(kind, worker, header)
        entries = self._met_here if kind == MEET else self._under_way[worker][0][0]
        arrays = ServerLayout.flat_buffers(entries)
        for array in arrays:
            self._messages.receive(worker, PARTS, array)
        return arrays

    def _meet(self, worker: int, came: Any) -> None:
        """Let another rank's copy meet what is here."""
        self._send(worker, MET, self._let_meet(came))

    def _let_meet(self, came: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Move what is met here towards a copy, and return its values of before."""
        before = self._values_of(self._theirs, self._met_here)
        self._move(self._theirs, self._met_here, self._moved(before, came))
        return before

    def _moved(self, here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the way from `here` towards `there`."""
        return [self._strength * (y - x) for x, y in zip(here, there, strict=True)]

    def _come_back(self, worker: int, came: list[np.ndarray]) -> None:
        """Move the own copy, which has met what came back."""
        entries, sent = self._under_way[worker].popleft()
        self._move(self._parameters, entries, self._moved(sent, came))

    def _values_of(self, variables: Mapping[str, Any], entries: Sequence[Entry]) -> list[np.ndarray]:
        values = {e.path: unwrap(variables[e.path]).read_value() for e in entries}
        return [flat.numpy() for flat in ServerLayout.flat(entries, values)]

    def _move(self, variables: Mapping[str, Any], entries: Sequence[Entry], flats: Sequence[np.ndarray]) -> None:
        for path, by in ServerLayout.apart(entries, flats).items():
            unwrap(variables[path]).assign_add(by)

    def _send(self, rank: int, kind: int, arrays: Sequence[np.ndarray], *, weight: float = 0.0) -> None:
        self._messages.send(rank, TO_SERVER, np.array([(kind, 0, self.version, 0.0, weight)], HEADER))
        self._messages.send(rank, PARTS, *arrays)


class PushingServer(PeerServer):
    """Sends its copy with half of the copy's weight, and takes in what comes."""

    weight = 1.0
    """Of the copy; over all ranks together, with what is under way, their number."""

    def _send(self, rank: int, kind: int, arrays: Sequence[np.ndarray], *, weight: float = 0.0) -> None:
        if kind == MEET:
            weight = self.weight = self.weight / 2
        super()._send(rank, kind, arrays, weight=weight)

    def _received(self, kind: int, worker: int, header: np.ndarray) -> Any:
        if kind == MET:
            return []
        came = super()._received(kind, worker, header)
        return (came, float(header["weight"])) if kind == MEET else came

    def _meet(self, worker: int, came: Any) -> None:
        arrays, weight = came
        if weight:  # of many that were sent one after the other, it may be too small for a number
            self.weight += weight
            share, here = weight / self.weight, self._values_of(self._parameters, self._met_here)
            self._move(self._parameters, self._met_here, [share * (y - x) for x, y in zip(here, arrays, strict=True)])
        self._send(worker, MET, [])

    def _come_back(self, worker: int, came: list[np.ndarray]) -> None:
        self._under_way[worker].popleft()


class GossipUpdate(AsyncUpdate):
    """Each rank trains a copy of its own, and averages it with a neighbour's."""

    name = "gossip"
    gradients_alone_change = False
    _divides = False

    def _owners_of(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return dict.fromkeys(sizes, self._backend.index)

    def _make_server(self, messages: Messages, replay: Sequence[Event]) -> Server:
        masters = self._masters.by_path
        kind = PushingServer if self._options.push_sum else PeerServer
        return kind(
            messages,
            masters,
            self.optimizer,
            self._options,
            workers=self._workers,
            fail=self._backend.session.link.fail,
            replay=replay,
            entries=self._whole(),
            theirs=masters,
            meetings=[[Meeting(rank, self._whole())] for rank in self._neighbours()],
            strength=0.5,
            every=self._options.local_steps or 1,
        )

    def _neighbours(self) -> list[int]:
        """Return the ranks to average with, in turn."""
        size, index = self._backend.size, self._backend.index
        distances = [1, -1] if self._options.gossip_graph == "ring" else [2**k for k in range((size - 1).bit_length())]
        return list(dict.fromkeys((index + distance) % size for distance in distances))

    def _whole(self) -> list[Entry]:
        """Return all variables, as they travel between copies."""
        variables = self._by_path()
        return [
            Entry(path, tuple(v.shape), np.dtype(v.dtype.as_numpy_dtype), sparse=False, by_rows=False)
            for path, v in variables.items()
        ]

    def _drain(self) -> None:
        super()._drain()
        pause = Pause()
        while isinstance(self._server, PeerServer) and not self._server.quiet:
            self._check()
            pause.sleep()

    def _agree_on(self, masters: Mapping[str, tf.Variable]) -> None:
        if isinstance(self._server, PushingServer):
            run_once(lambda: self._backend.run(lambda: barrier(self._backend, "nothing_under_way")))
            for master in masters.values():
                master.assign(master * tf.constant(self._server.weight, master.dtype))
            self._server.weight = 1.0  # before any rank can go on, as the mean is taken of all
        self._average(masters)

    def _share_slots(self) -> None:
        slots = {path: slot.variable for path, slot in self._masters.slots().items() if slot.owner is not None}
        self._average(slots)

    def _average(self, variables: Mapping[str, tf.Variable]) -> None:
        """Replace `variables`, by path, by their mean over the ranks. Collective."""

        def average() -> None:
            with tf.control_dependencies([barrier(self._backend, "averaged")]):
                for path, variable in variables.items():
                    mean = self._backend.all_reduce(variable.read_value(), name=f"async/mean/{path}", op="average")
                    variable.assign(mean)

        run_once(lambda: self._backend.run(average))


class ElasticUpdate(GossipUpdate):
    """Each rank trains a copy of its own, which a center attracts and follows; the center is the result."""

    name = "easgd"

    def _make_server(self, messages: Messages, replay: Sequence[Event]) -> Server:
        owners = owners_of({e.path: e.size * e.dtype.itemsize for e in self._whole()}, self._backend.size)
        self._center = {path: tf.Variable(master) for path, master in self._masters.held.items()}
        self._center_owners = owners
        parts = [
            Meeting(rank, [e for e in self._whole() if owners[e.path] == rank]) for rank in range(self._backend.size)
        ]
        strength = self._options.elasticity
        return PeerServer(
            messages,
            self._masters.by_path,
            self.optimizer,
            self._options,
            workers=self._workers,
            fail=self._backend.session.link.fail,
            replay=replay,
            entries=self._whole(),
            theirs={path: v for path, v in self._center.items() if owners[path] == self._backend.index},
            meetings=[[part for part in parts if part.entries]],
            strength=ELASTICITY / self._backend.size if strength is None else strength,
            every=self._options.local_steps or 1,
        )

    def _agree_on(self, masters: Mapping[str, tf.Variable]) -> None:
        share_out(self._backend, self._center, self._center_owners)
        for path, master in masters.items():
            master.assign(self._center[path])

    def _copy_to_masters(self) -> None:
        super()._copy_to_masters()
        if self._server is not None:
            for path, master in self._masters.held.items():
                self._center[path].assign(master)
