"""Asynchronous training with parameter servers, against one process that applies the same updates."""

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import (
    BATCH,
    CROSS_ENTROPY,
    EPOCHS,
    MODELS,
    OPTIMIZERS,
    SAMPLES,
    batches_of,
    optimizers_of_keras,
    per_sample,
)
from world import World, computing_in, exact_arrays, flat_bytes, plain_training, refused, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import split_bounds
from hvdtrain.training.update_rules.servers.layout import MEET, MET, PULL, PUSH, TICKET, owners_of

FIT = {"batch": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": False}
STEPS = -(-SAMPLES // BATCH)
SLICES = EPOCHS * STEPS
"""Of each rank."""
Weights = dict[str, np.ndarray]
Update = Callable[[str, np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]
"""Returns new values for a path, a gradient, the present values, those it was computed at, and a learning rate."""


def trained(world: World, kind: str, optimizer: Any, **options: Any) -> Any:
    build, data = MODELS[kind]
    model, options = build("float64", world.rank), {"update": "async", **options}
    trainer = hvdtrain.Trainer(model, optimizer, CROSS_ENTROPY, backend=world.backend, **options)
    trainer.fit(data("float64"), **FIT)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    return trainer


@worlds("mpirun-2", "mpirun-4", extended=True)
@exact_arrays()
def check_servers_without_staleness_are_an_all_reduce(world: World) -> None:
    for kind, name in (("wide", "sgd"), ("wide", "adam"), ("table", "sgd"), ("table", "plain sgd")):
        trainer = trained(world, kind, OPTIMIZERS[name](), max_staleness=0)
        build, data = MODELS[kind]
        expected = plain_training(build("float64", 0), OPTIMIZERS[name](), per_sample, batches_of(*data("float64")))
        error = relative_error(trainer.model.get_weights(), expected)
        assert error <= 1e-12, f"{kind} {name}: {error:.2e}"


class Keras:
    """Keras' own optimizer for each variable of a server, with corrected gradients."""

    def __init__(self, make: Callable[[], Any], correct: Callable[..., np.ndarray] | None = None) -> None:
        self._make = make
        self._correct = correct
        self._kept: dict[str, tuple[Any, Any]] = {}

    def __call__(self, path: str, gradient: np.ndarray, now: np.ndarray, before: np.ndarray, rate: float) -> np.ndarray:
        if path not in self._kept:
            self._kept[path] = self._make(), keras.Variable(now, dtype="float64")
        optimizer, variable = self._kept[path]
        if self._correct is not None:
            gradient = self._correct(path, gradient, now - before)
        variable.assign(now)
        optimizer.learning_rate.assign(rate)
        optimizer.apply([tf.constant(gradient)], [variable])
        return np.array(variable)


def dc_asgd(path: str, gradient: np.ndarray, stale: np.ndarray) -> np.ndarray:
    return gradient + 0.3 * gradient**2 * stale


class Adaptive:
    """DC-ASGD with lambda_0 = 2; mean squares of a table are those of the rows that have a gradient."""

    def __init__(self) -> None:
        self._squares: Weights = {}

    def __call__(self, path: str, gradient: np.ndarray, stale: np.ndarray) -> np.ndarray:
        before = self._squares.get(path, np.zeros_like(gradient))
        mean = 0.95 * before + 0.05 * gradient**2
        self._squares[path] = np.where(gradient.any(-1, keepdims=True), mean, before) if gradient.ndim == 2 else mean
        return gradient + 2.0 / np.sqrt(self._squares[path] + 1e-7) * gradient**2 * stale


class Simulation:
    """One process that does what servers and workers have done, in the servers' recorded order.

    Args:
        events: of each server, what it did.
        ahead: whether parameters were pulled during the step before.
        by_staleness: whether learning rates are divided by the staleness.
        shared: whether a worker that was free took the next slice.
        together: whether epochs end with the same parameters everywhere.
        servers: the last ranks, which only serve.
        lost: the event of server 0 whose update is left out.
        doubled: the one whose update is applied twice.
    """

    def __init__(
        self,
        kind: str,
        events: list[list[tuple[int, int]]],
        rate: float | Callable[[int], float],
        update: Callable[[], Update],
        *,
        ahead: bool = False,
        by_staleness: bool = False,
        shared: bool = True,
        together: bool = False,
        servers: int = 0,
        lost: int | None = None,
        doubled: int | None = None,
    ) -> None:
        build, data = MODELS[kind]
        self._model, (self._x, self._y) = build("float64", 0), data("float64")
        self._ranks, self._rate, self._ahead, self._by_staleness = len(events), rate, ahead, by_staleness
        self._size = self._ranks - servers
        self._together, self._times = together, {lost: 0, doubled: 2}
        self._variables = {str(place): v for place, v in enumerate(self._model.trainable_variables)}
        sizes = {name: v.numpy().nbytes for name, v in self._variables.items()}
        first = self._size if servers else 0
        self._owners = {name: first + owner for name, owner in owners_of(sizes, servers or self._size).items()}
        self._updates = [update() for _ in events]
        self._now: Weights = {name: v.numpy() for name, v in self._variables.items()}
        # A rank that only serves pushes nothing, once.
        self._events = [
            deque((kind, worker) for kind, worker in each if kind != TICKET and worker < self._size) for each in events
        ]
        tickets: dict[int, list[int]] = defaultdict(list)
        if shared:
            for number, worker in enumerate([*range(self._size), *(w for kind, w in events[0] if kind == TICKET)]):
                tickets[worker].append(number)  # of the first step each takes its own
        else:
            tickets |= {worker: list(range(worker, SLICES * self._size, self._size)) for worker in range(self._size)}
        self._tickets = {w: deque(t for t in found if t < SLICES * self._size) for w, found in tickets.items()}
        self._compiled = tf.function(self._gradients_of, autograph=False, reduce_retracing=True)

    def run(self) -> Weights:
        size = self._size
        held = [dict(self._now) for _ in range(size)]
        versions = [[0] * self._ranks for _ in range(size)]  # [worker][server]
        computed: list[Any] = [None] * size
        # [worker][server]: pushes that a server has taken; one that owns nothing is sent none.
        pushed = [dict.fromkeys(self._owners.values(), 0) for _ in range(size)]
        epochs, version, done = [0] * size, [0] * self._ranks, [0] * self._ranks
        ends: dict[int, Weights] = defaultdict(dict)  # parameters at the end of an epoch
        awaited = [[0] * self._ranks for _ in range(size)]  # pulls that a worker still waits for
        taken, begun = (
            [0] * size,
            [0] * size,
        )  # gradients that a worker has computed, in all and before its last meeting
        pulls: list[list[tuple[Weights, dict[int, int]]]] = [[] for _ in range(size)]  # with the servers' versions

        def ready(worker: int, server: int) -> bool:
            """Return whether the worker's next gradient for the server can be computed; it is, for all servers."""
            if computed[worker] is not None:
                return pushed[worker][server] == min(pushed[worker].values())  # the server has not taken it yet
            if any(awaited[worker]) and not self._ahead:
                return False
            ticket = self._tickets[worker][0]
            epoch = ticket // size // STEPS
            if self._ahead:
                # Where the first step or an epoch ends, a worker waits for its last pull.
                part = epoch + (ticket >= size)
                begun[worker] = taken[worker] if part > epochs[worker] else begun[worker]
                epochs[worker] = part
                place = max(begun[worker] - 1, taken[worker] - 2)
                if place >= len(pulls[worker]):
                    return False
                if place >= 0:
                    values, seen = pulls[worker][place]
                    if len(seen) < len(pushed[worker]):
                        return False
                    held[worker].update(values)
                    versions[worker] = [seen.get(server, 0) for server in range(self._ranks)]
            if self._together and epoch > epochs[worker]:
                if any(done[each] < epoch * STEPS * size for each in pushed[worker]):
                    return False
                held[worker], epochs[worker] = dict(ends[epoch]), epoch
                versions[worker] = [epoch * STEPS * size] * self._ranks
            taken[worker] += 1
            computed[worker] = (
                ticket,
                self._gradients(held[worker], ticket),
                dict(held[worker]),
                list(versions[worker]),
            )
            return True

        lengths = list(map(len, self._events))
        while any(self._events):
            moved_on = False
            for server, events in enumerate(self._events):
                if not events:
                    continue
                kind, worker = events[0]
                if kind == PUSH:
                    if not ready(worker, server):
                        continue
                    ticket, gradients, before, seen = computed[worker]
                    place = lengths[server] - len(events)
                    for _ in range(self._times.get(place, 1) if server == 0 else 1):
                        self._apply(server, ticket, gradients, before, version[server] - seen[server])
                    version[server] += 1
                    done[server] += 1
                    if done[server] % (STEPS * size) == 0:
                        mine = {path: self._now[path] for path in self._now if self._owners[path] == server}
                        ends[done[server] // (STEPS * size)].update(mine)
                    pushed[worker][server] += 1
                    awaited[worker][server] += 1
                    if len(set(pushed[worker].values())) == 1:
                        self._tickets[worker].popleft()
                        computed[worker] = None
                else:
                    mine = {path: self._now[path] for path in self._variables if self._owners[path] == server}
                    if self._ahead:
                        if all(server in seen for _, seen in pulls[worker]):
                            pulls[worker].append(({}, {}))
                        values, seen = next(each for each in pulls[worker] if server not in each[1])
                        values.update(mine)
                        seen[server] = version[server]
                    else:
                        held[worker].update(mine)
                        versions[worker][server] = version[server]
                    awaited[worker][server] -= 1
                events.popleft()
                moved_on = True
            assert moved_on, "the recorded order has a circle"
        return self._now

    def _apply(self, server: int, ticket: int, gradients: Weights, before: Weights, staleness: int) -> None:
        begin, end = self._rows(ticket)
        samples = min(BATCH, SAMPLES - ticket // self._size % STEPS * BATCH)
        share = (end - begin) / samples
        factor = share * self._size / max(1, staleness) if self._by_staleness else share
        for path in self._variables:
            if self._owners[path] == server:
                rate = self._rate(ticket // self._size) if callable(self._rate) else self._rate
                now = self._now[path]
                self._now[path] = self._updates[server](path, gradients[path], now, before[path], rate * factor)

    def _rows(self, ticket: int) -> tuple[int, int]:
        step, index = divmod(ticket, self._size)
        first = step % STEPS * BATCH
        begin, end = split_bounds(min(BATCH, SAMPLES - first), index, self._size)
        return first + begin, first + end

    def _gradients(self, weights: Mapping[str, np.ndarray], ticket: int) -> Weights:
        for path, variable in self._variables.items():
            variable.assign(weights[path])
        begin, end = self._rows(ticket)
        found = self._compiled(tf.constant(self._x[begin:end]), tf.constant(self._y[begin:end]))
        return {path: np.array(each) for path, each in zip(self._variables, found, strict=True)}

    def _gradients_of(self, x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(per_sample(y, self._model(x, training=True)))
        gradients = tape.gradient(mean, [v.value for v in self._variables.values()])
        return [tf.convert_to_tensor(each) for each in gradients]


def recorded(path: Path) -> list[list[tuple[int, int]]]:
    return [[(kind, worker) for kind, worker in events] for events in json.loads(path.read_text())]


RATE = 0.1


def scaled_sgd() -> Any:
    return keras.optimizers.SGD(RATE, momentum=0.9, loss_scale_factor=64.0)


class Copies(Simulation):
    """Workers with copies of their own, which meet others in the recorded order.

    Args:
        meetings: of a rank, whom it meets in turn, each time some: (rank, paths), of all variables without paths.
        strength: share of the distance by which both sides move.
        every: updates between two meetings.
        center: whether what is met is a center, which is then the result.
        pushes: whether a copy goes to the other with half of its weight, and nothing comes back.
    """

    def __init__(
        self,
        kind: str,
        events: list[list[tuple[int, int]]],
        update: Callable[[], Update],
        *,
        meetings: Callable[[int], list[list[tuple[int, list[str]]]]],
        strength: float,
        every: int,
        center: bool,
        pushes: bool = False,
    ) -> None:
        super().__init__(kind, events, RATE, update)
        self._pushes = pushes
        self._meetings = [cycle(meetings(rank)) for rank in range(self._size)]
        self._strength, self._every, self._center = strength, every, center

    def run(self) -> Weights:
        size, strength = self._size, self._strength
        copies = [dict(self._now) for _ in range(size)]
        met = dict(self._now)
        held, counts = [dict(self._now) for _ in range(size)], [0] * size
        sent: dict[tuple[int, int], deque[Weights]] = defaultdict(deque)
        answers: dict[tuple[int, int], deque[tuple[Weights, Weights]]] = defaultdict(deque)
        weights = [1.0] * size

        def act(server: int, kind: int, worker: int) -> bool:
            mine = copies[server]
            if kind == PUSH:
                ticket = self._tickets[server].popleft()
                begin, end = self._rows(ticket)
                samples = min(BATCH, SAMPLES - ticket // size % STEPS * BATCH)
                gradients = self._gradients(held[server], ticket)
                for path, value in mine.items():
                    rate = RATE * (end - begin) / samples * size
                    mine[path] = self._updates[server](path, gradients[path], value, value, rate)
                counts[server] += 1
                if counts[server] % self._every == 0:
                    for other, paths in next(self._meetings[server]):
                        if self._pushes:
                            weights[server] /= 2
                            sent[server, other].append({**mine, "weight": np.array(weights[server])})
                            continue
                        sent[server, other].append({path: mine[path] for path in paths or mine})
                        if other == server:  # at once
                            act(server, MEET, server)
                            act(server, MET, server)
            elif kind == PULL:
                held[server] = dict(mine)
            elif kind == MEET and self._pushes:
                if not sent[worker, server]:
                    return False
                came = sent[worker, server].popleft()
                arrived, here = float(came.pop("weight")), weights[server]
                weights[server] = here + arrived
                mine.update({p: (here * mine[p] + arrived * value) / weights[server] for p, value in came.items()})
            elif kind == MET and self._pushes:
                pass
            elif kind == MEET:
                if not sent[worker, server]:
                    return False
                came, theirs = sent[worker, server].popleft(), met if self._center else mine
                before = {path: theirs[path] for path in came}
                theirs.update({path: before[path] + strength * (came[path] - before[path]) for path in came})
                answers[server, worker].append((came, before))
            else:
                if not answers[worker, server]:
                    return False
                came, before = answers[worker, server].popleft()
                mine.update({path: mine[path] - strength * (came[path] - before[path]) for path in came})
            return True

        while any(self._events):
            moved_on = False
            for server, events in enumerate(self._events):
                while events and act(server, *events[0]):
                    events.popleft()
                    moved_on = True
            assert moved_on, "the recorded order has a circle"
        if self._center:
            return met
        return {p: sum(w * each[p] for w, each in zip(weights, copies, strict=True)) / size for p in met}


@worlds("mpirun-2")
@worlds("mpirun-4", extended=True)
@exact_arrays()
def check_copies_meet_as_in_a_simulation(world: World) -> None:
    """Gossip on both graphs, and elastic averaging; and what they come to is near what all-reduce comes to."""
    file, momentum, size = world.folder / "order.json", OPTIMIZERS["sgd"], world.size
    sizes = {str(i): v.value.numpy().nbytes for i, v in enumerate(MODELS["wide"][0]("float64", 0).trainable_variables)}
    owned = [[name for name, owner in owners_of(sizes, size).items() if owner == rank] for rank in range(size)]
    parts = [(rank, paths) for rank, paths in enumerate(owned) if paths]
    exponents = [2**k for k in range(size) if 2**k < size]

    def neighbours(distances: list[int]) -> Callable[[int], list[list[tuple[int, list[str]]]]]:
        return lambda rank: [[(other, [])] for other in dict.fromkeys((rank + each) % size for each in distances)]

    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"update": "gossip"}, {"meetings": neighbours([1, -1]), "strength": 0.5, "every": 1, "center": False}),
        (
            {"update": "gossip", "gossip_graph": "exponential", "local_steps": 2},
            {"meetings": neighbours(exponents), "strength": 0.5, "every": 2, "center": False},
        ),
        (
            {"update": "easgd", "local_steps": 2},
            {"meetings": lambda rank: [parts], "strength": 0.9 / size, "every": 2, "center": True},
        ),
        (
            {"update": "easgd", "elasticity": 0.3},
            {"meetings": lambda rank: [parts], "strength": 0.3, "every": 1, "center": True},
        ),
        (
            {"update": "gossip", "push_sum": True, "gossip_graph": "exponential"},
            {"meetings": neighbours(exponents), "strength": 0.5, "every": 1, "center": False, "pushes": True},
        ),
        ({"update": "gossip"}, {"meetings": neighbours([1, -1]), "strength": 0.5, "every": 1, "center": False}),
    ]
    for number, (options, more) in enumerate(cases):
        # The last one has a table, of which its optimizer changes some rows, and a meeting all.
        last = number == len(cases) - 1
        kind, make = ("table", OPTIMIZERS["plain sgd"]) if last else ("wide", momentum)
        trainer = trained(world, kind, make(), record=str(file), **options)
        world.gather(b"")
        update = partial(Keras, make)
        expected = Copies(kind, recorded(file), update, **more).run()
        error = relative_error(trainer.model.get_weights(), list(expected.values()))
        assert error <= 1e-9, f"{options}: {error:.2e}"
        start = hvdtrain.Trainer(MODELS[kind][0]("float64", 0), "sgd", CROSS_ENTROPY, backend=world.backend)
        data = MODELS[kind][1]("float64")
        # In these few steps a center follows its copies by as much as the order of their meetings has it.
        bound = 1.0 if last or more["center"] else 0.8
        assert (
            trainer.evaluate(data, return_dict=True)["loss"] < bound * start.evaluate(data, return_dict=True)["loss"]
        ), options


@worlds("mpirun-2")
@worlds("mpirun-4", extended=True)
@exact_arrays()
def check_asynchronous_updates_are_those_of_a_simulation(world: World) -> None:
    momentum, plain = OPTIMIZERS["sgd"], OPTIMIZERS["plain sgd"]
    cases: list[tuple[str, Any, dict[str, Any], float, Callable[[], Update], dict[str, Any]]] = [
        ("wide", momentum, {}, RATE, lambda: Keras(momentum), {}),
        ("wide", OPTIMIZERS["adam"], {}, 0.01, lambda: Keras(OPTIMIZERS["adam"]), {}),
        ("table", plain, {}, RATE, lambda: Keras(plain), {}),
        ("table", momentum, {"compensation": "adaptive"}, RATE, lambda: Keras(momentum, Adaptive()), {}),
        ("wide", plain, {"compensation": "rate"}, RATE, lambda: Keras(plain), {"by_staleness": True}),
        (
            "wide",
            momentum,
            {"compensation": "dc_asgd", "dc_strength": 0.3},
            RATE,
            lambda: Keras(momentum, dc_asgd),
            {},
        ),
        ("wide", momentum, {"max_staleness": 2}, RATE, lambda: Keras(momentum), {"shared": False}),
        (
            "wide",
            scaled_sgd,  # its gradients arrive scaled
            {"compensation": "dc_asgd", "dc_strength": 0.3, "pull_ahead": True},
            RATE,
            lambda: Keras(momentum, dc_asgd),
            {"ahead": True},
        ),
        (
            "wide",
            plain,
            {"compensation": "rate", "pull_ahead": True},
            RATE,
            lambda: Keras(plain),
            {"ahead": True, "by_staleness": True},
        ),
        ("wide", momentum, {"servers": 1}, RATE, lambda: Keras(momentum), {"servers": 1}),
        (
            "table",
            momentum,
            {"servers": world.size - 1, "compensation": "dc_asgd", "dc_strength": 0.3},
            RATE,
            lambda: Keras(momentum, dc_asgd),
            {"servers": world.size - 1},
        ),
    ]
    for number, (kind, optimizer, options, rate, update, more) in enumerate(cases):
        file = world.folder / f"order-{number}.json"
        trainer = trained(world, kind, optimizer(), record=str(file), **options)
        world.gather(b"")  # the file is there
        found = trainer.model.get_weights()
        expected = Simulation(kind, recorded(file), rate, update, **more).run()
        error = relative_error(found, list(expected.values()))
        assert error <= 1e-9, f"{number}: {kind} {options}: {error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_copies_wait_where_they_have_no_samples(world: World) -> None:
    """Of a step's two slices one is empty: copies that never meet have trained on the others alone, or not at all."""
    build, data = MODELS["wide"]
    x, y = (each[:1] for each in data("float64"))

    def decaying(rate: float, *, averages: bool) -> Any:
        return keras.optimizers.AdamW(rate, weight_decay=0.1, use_ema=averages, ema_momentum=0.5)

    def copy_of(taken: int, *, averages: bool) -> list[np.ndarray]:
        model = build("float64", 0)
        if taken:
            # A slice of 1 sample, where the step's have 1 / 2 on average.
            rule = decaying(0.01 * world.size, averages=averages)
            plain_training(model, rule, per_sample, [(x, y)] * taken)
            rule.finalize_variable_values(model.trainable_variables)
        return model.get_weights()

    for epochs, averages in ((6, False), (1, True)):
        trainer = hvdtrain.Trainer(
            build("float64", 0),
            decaying(0.01, averages=averages),
            CROSS_ENTROPY,
            backend=world.backend,
            update="gossip",
            local_steps=1000,
        )
        slices = trainer.fit((x, y), batch=2, epochs=epochs, shuffle=False, verbose=False).slices
        assert sum(slices) == epochs, slices
        copies = [copy_of(taken, averages=averages) for taken in slices]
        expected = [np.mean(weights, axis=0) for weights in zip(*copies, strict=True)]
        error = relative_error(trainer.model.get_weights(), expected)
        assert error <= 1e-9, f"{slices}: {error:.2e}"


@worlds("mpirun-2", "mpirun-4", extended=True)
@exact_arrays()
def check_a_recorded_order_is_repeated_bit_by_bit(world: World) -> None:
    file, again = world.folder / "order.json", world.folder / "again.json"
    for options in (
        {},
        {"pull_ahead": True},
        {"max_staleness": 1},
        {"servers": 1},
        {"update": "gossip"},
        {"update": "gossip", "push_sum": True},
        {"update": "easgd"},
    ):
        trainer = trained(world, "table", OPTIMIZERS["adam"](), record=str(file), **options)
        world.gather(b"")
        second = trained(world, "table", OPTIMIZERS["adam"](), replay=str(file), record=str(again), **options)
        assert flat_bytes(trainer.model.get_weights()) == flat_bytes(second.model.get_weights()), options
        world.gather(b"")
        assert recorded(file) == recorded(again), options


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_another_order_gives_other_weights(world: World) -> None:
    """So the comparison with the simulation would show an update that was lost, doubled, or applied out of turn."""
    file, sgd = world.folder / "order.json", OPTIMIZERS["sgd"]
    trainer = trained(world, "wide", sgd(), record=str(file), max_staleness=3)
    world.gather(b"")
    events, found = recorded(file), trainer.model.get_weights()
    # Two neighbours of different workers, one of them an update: another worker sees it, or not.
    pairs = list(pairwise(enumerate(events[0])))
    (first, (kind, _)), _ = next(
        pair
        for pair in pairs[len(pairs) // 4 :]
        if pair[0][1][1] != pair[1][1][1] and PUSH in (pair[0][1][0], pair[1][1][0])
    )
    swapped = list(events[0])
    swapped[first : first + 2] = reversed(swapped[first : first + 2])
    push = first if kind == PUSH else first + 1

    def error_of(changed: list[tuple[int, int]], **more: Any) -> float:
        simulation = Simulation("wide", [changed, *events[1:]], 0.1, lambda: Keras(sgd), shared=False, **more)
        return relative_error(found, list(simulation.run().values()))

    assert error_of(events[0]) <= 1e-9
    assert error_of(swapped) > 1e-6, "two updates in another order"
    assert error_of(events[0], lost=push) > 1e-6, "a lost update"
    assert error_of(events[0], doubled=push) > 1e-6, "a doubled update"


class Averaging(keras.callbacks.Callback):
    """Halves the learning rate after an epoch, and changes a weight, as callbacks may."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.05
        bias = self.model.layers[-1].bias
        bias.assign(bias + 1.0)


@worlds("mpirun-2", "mpirun-4", extended=True)
@exact_arrays()
def check_servers_follow_callbacks_and_schedules(world: World) -> None:
    """What callbacks change is trained on; a schedule gives the rate of the step, not of the update."""
    for options in ({"max_staleness": 0}, {}, {"update": "gossip"}, {"update": "easgd", "elasticity": 0.5}):
        build, data = MODELS["wide"]
        seen: dict[str, Any] = {}
        for made in ("callbacks", "schedule"):
            model = build("float64", world.rank)
            rate = keras.optimizers.schedules.PiecewiseConstantDecay([STEPS - 1], [0.1, 0.05])
            sgd = keras.optimizers.SGD(rate if made == "schedule" else 0.1)
            given = {"update": "async", **options}
            trainer = hvdtrain.Trainer(model, sgd, CROSS_ENTROPY, backend=world.backend, **given)
            callbacks = [Averaging()] if made == "callbacks" else []
            result = trainer.fit(data("float64"), **FIT, callbacks=callbacks, validation_data=data("float64"))
            assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
            assert int(sgd.iterations) == SLICES, int(sgd.iterations)
            seen[made] = float(np.array(trainer.model.layers[-1].bias).mean())
            assert sum(result.slices) == SLICES * world.size
            assert len(result.evaluations) == EPOCHS
        assert abs(seen["callbacks"] - seen["schedule"] - EPOCHS) < 0.2, (options, seen)


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_scheduled_updates_are_those_of_a_simulation(world: World) -> None:
    """Epochs end with the same parameters everywhere, and the second one has another rate."""
    file = world.folder / "order.json"
    rates = [float(np.float32(rate)) for rate in (0.1, 0.02)]  # as schedules give them
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([STEPS - 1], rates)
    build, data = MODELS["wide"]
    sgd = keras.optimizers.SGD(schedule, momentum=0.9)
    trainer = hvdtrain.Trainer(
        build("float64", world.rank), sgd, CROSS_ENTROPY, backend=world.backend, update="async", record=str(file)
    )
    trainer.fit(data("float64"), **FIT, validation_data=data("float64"))
    world.gather(b"")
    simulation = Simulation(
        "wide", recorded(file), lambda step: rates[step >= STEPS], lambda: Keras(OPTIMIZERS["sgd"]), together=True
    )
    error = relative_error(trainer.model.get_weights(), list(simulation.run().values()))
    assert error <= 1e-9, f"{error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_asynchronous_training_goes_on_from_checkpoints(world: World) -> None:
    """Without staleness, whose runs are repeatable: as one that was never stopped, also where the rule changes."""
    data, build = MODELS["wide"][1]("float64"), MODELS["wide"][0]
    fit = {"batch": BATCH, "shuffle": False, "verbose": False}

    def trainer_of(seed: int, **options: Any) -> Any:
        adam = keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.75)
        return hvdtrain.Trainer(build("float64", seed), adam, CROSS_ENTROPY, backend=world.backend, **options)

    synchronous = {"update": "async", "max_staleness": 0}
    whole = trainer_of(0)
    whole.fit(data, epochs=4, **fit)
    for name, before, after in (
        ("servers", synchronous, synchronous),
        ("from servers", synchronous, {}),
        ("to servers", {}, synchronous),
    ):
        folder = world.folder / name
        trainer_of(0, **before).fit(data, epochs=2, checkpoint=folder, **fit)
        second = trainer_of(7 + world.rank, **after)
        second.resume(folder)
        second.fit(data, epochs=4, checkpoint=folder, **fit)
        assert world.same_everywhere(flat_bytes(second.model.get_weights()))
        error = relative_error(second.model.get_weights(), whole.model.get_weights())
        assert error <= 1e-9, f"{name}: {error:.2e}"
    for rule in ("async", "gossip", "easgd"):
        folder = world.folder / rule
        first = trainer_of(0, update=rule)
        first.fit(data, epochs=2, checkpoint=folder, **fit)
        second = trainer_of(7 + world.rank, update=rule)
        second.resume(folder)
        result = second.fit(data, epochs=4, checkpoint=folder, **fit)
        assert result.steps == 4 * STEPS
        assert sum(result.slices) == 2 * STEPS * world.size


@worlds("mpirun-2", extended=True)
@exact_arrays()
@computing_in("float64")
def check_slots_lie_on_their_servers(world: World) -> None:
    """Of every optimizer of Keras, each once, and a checkpoint of them goes on under an all-reduce; of some, back."""
    inputs = np.random.default_rng(3).standard_normal((16, 6))
    data, fit = (inputs, inputs[:, :1] ** 2), {"batch": 8, "shuffle": False, "verbose": False}

    def trainer_of(kind: Any, **options: Any) -> Any:
        keras.utils.set_random_seed(5)
        dense = keras.layers.Dense
        layers = [dense(5, "tanh"), dense(4, "tanh"), keras.layers.PReLU(), dense(1)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        return hvdtrain.Trainer(model, kind(0.02), "mse", backend=world.backend, **options)

    in_step: dict[str, Any] = {"update": "async", "max_staleness": 0}
    one_worker = {"update": "async", "servers": world.size - 1}
    onwards, back, apart = (in_step, {}), ({}, in_step), (one_worker, one_worker)
    for name, kind in optimizers_of_keras().items():
        few = name not in ("Adafactor", "Adam", "Muon", "SGD")
        for uninterrupted, *changes in (({}, onwards),) if few else (({}, onwards, back), (one_worker, apart)):
            whole = trainer_of(kind, **uninterrupted)
            whole.fit(data, epochs=2, **fit)
            for number, (before, after) in enumerate(changes):
                folder = world.folder / f"{name}-{len(changes)}-{number}"
                first, second = trainer_of(kind, **before), trainer_of(kind, **after)
                first.fit(data, epochs=1, checkpoint=folder, **fit)
                second.resume(folder)
                second.fit(data, epochs=2, **fit)
                error = relative_error(second.model.get_weights(), whole.model.get_weights())
                assert error <= 1e-12, f"{name}, {before} and {after}: {error:.2e}"
            plain, served = kind(0.02), first if before else second
            plain.build(served.model.trainable_variables)
            mine = sum(np.size(tensor.value) for tensor in served.rule.named_tensors().values())
            held = [int(text) for text in world.gather(str(mine).encode())]
            of_one = sum(np.size(v) for v in plain.variables)
            assert sum(held) <= of_one + world.size * len(plain.variables), f"{name}: {held}"


class SlowInTraining(keras.layers.Layer):
    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs

        def wait(values: np.ndarray) -> np.ndarray:
            time.sleep(self.seconds)
            return values

        waited = tf.numpy_function(wait, [tf.stop_gradient(inputs)], inputs.dtype)
        return inputs + tf.stop_gradient(tf.ensure_shape(waited, inputs.shape) - inputs)


@worlds("mpirun-2", extended=True)
def check_a_slow_worker_takes_fewer_slices(world: World) -> None:
    """Of arrays; of a Dataset, or with a bound on the staleness, each worker takes its own."""
    x, y = MODELS["dense"][1]("float32")
    slow = world.size - 1
    cases: list[tuple[str, dict[str, Any]]] = [("arrays", {}), ("dataset", {}), ("bound", {"max_staleness": 4})]
    for case, options in cases:
        batched = case == "dataset"
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((6,)), SlowInTraining(0.15 if world.rank == slow else 0.0), keras.layers.Dense(3)]
        )
        trainer = hvdtrain.Trainer(model, "sgd", CROSS_ENTROPY, backend=world.backend, update="async", **options)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat() if batched else (x, y)
        more = {"steps_per_epoch": STEPS} if batched else {"batch": BATCH}
        result = trainer.fit(data, epochs=EPOCHS, verbose=False, **more)
        assert sum(result.slices) == SLICES * world.size, case
        if case == "arrays":
            assert result.slices[slow] < 0.75 * SLICES, result.slices
        else:
            assert result.slices == [SLICES] * world.size, (case, result.slices)
        if case == "bound":
            assert max(result.staleness) <= (world.size - 1) * 2 * 5, result.staleness


@worlds("mpirun-4", extended=True)
def check_a_stopped_worker_holds_nobody_up(world: World) -> None:
    """Where other ranks serve: the others take its slices; when it goes on, it trains on present parameters."""
    x, y = MODELS["dense"][1]("float32")
    keras.utils.set_random_seed(0)
    calls, begun = itertools.count(), threading.Event()

    class Begins(keras.callbacks.Callback):
        """The model is called before training, too, to look at its outputs."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            begun.set()

    class Stops(keras.layers.Layer):
        def call(self, inputs: Any, training: bool = False) -> Any:
            if not training or world.rank != 1:
                return inputs

            def stop(values: np.ndarray) -> np.ndarray:
                if begun.is_set() and next(calls) == 3:
                    go_on = f"sleep 6; kill -CONT {os.getpid()}"
                    subprocess.Popen(["sh", "-c", go_on], start_new_session=True)
                    os.kill(os.getpid(), signal.SIGSTOP)
                return values

            stopped = tf.numpy_function(stop, [tf.stop_gradient(inputs)], inputs.dtype)
            return inputs + tf.stop_gradient(tf.ensure_shape(stopped, inputs.shape) - inputs)

    model = keras.Sequential(
        [keras.Input((6,)), Stops(), SlowInTraining(0.02 * (world.rank < 3)), keras.layers.Dense(3)]
    )
    trainer = hvdtrain.Trainer(model, "sgd", CROSS_ENTROPY, backend=world.backend, update="async", servers=1)
    many = np.tile(x, (EPOCHS, 1)), np.tile(y, EPOCHS)  # one epoch, whose end waits for all
    result = trainer.fit(many, batch=BATCH, verbose=False, log_every=1000, callbacks=[Begins()])
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    assert sum(result.slices) == result.steps * 3, result.slices
    assert result.slices[1] <= 5, result.slices  # one may be read, and one computed, before it stops
    assert result.slices[3] == 0, result.slices


@worlds("mpirun-2", extended=True)
def check_ranks_that_only_serve_have_no_statistics(world: World) -> None:
    """Nor samples in the metrics: with one worker all is as in one process; with streams they are refused."""
    x, y = MODELS["dense"][1]("float32")

    def model_of() -> Any:
        keras.utils.set_random_seed(0)
        norm = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), CROSS_ENTROPY, metrics=["accuracy"])
        return model

    alone, model = model_of(), model_of()
    history = alone.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    trainer = hvdtrain.Trainer(model, backend=world.backend, update="async", servers=1)
    result = trainer.fit((x, y), **FIT)
    assert result.slices == [SLICES, 0], result.slices
    error = relative_error(trainer.model.get_weights(), alone.get_weights())
    assert error <= 1e-5, f"{error:.2e}"
    assert abs(result.history["accuracy"][-1] - history["accuracy"][-1]) <= 1e-6, result.history
    assert abs(result.history["loss"][-1] - history["loss"][-1]) <= 1e-5, result.history
    stream = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    with refused("servers=1 needs samples that workers can read by their numbers", ConfigError):
        trainer.fit(stream, epochs=1, steps_per_epoch=2, verbose=False)
    with refused("servers=2 does not go with 2 replicas: a rank must be left to train", ConfigError):
        hvdtrain.Trainer(model_of(), backend=world.backend, update="async", servers=2)


class OwnStep(keras.Model):
    def __init__(self, inner: Any) -> None:
        super().__init__(dtype="float64")
        self.inner = inner

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.inner(inputs, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_servers_take_own_steps_microbatches_and_bounds(world: World) -> None:
    """Without staleness: a model's own step, accumulation, and clipping of each worker's gradient, as of Keras."""
    x, y = MODELS["wide"][1]("float64")
    batches = batches_of(x, y)

    def expected(clip: float | None) -> list[np.ndarray]:
        model, sgd = MODELS["wide"][0]("float64", 0), OPTIMIZERS["sgd"]()
        sgd.build(model.trainable_variables)
        for inputs, targets in batches:
            total = None
            for index in range(world.size):
                begin, end = split_bounds(len(inputs), index, world.size)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(per_sample(targets[begin:end], model(inputs[begin:end])))
                found = tape.gradient(loss, [v.value for v in model.trainable_variables])
                found = found if clip is None else tf.clip_by_global_norm(found, clip)[0]
                part = [each * (end - begin) / len(inputs) for each in found]
                total = part if total is None else [a + b for a, b in zip(total, part, strict=True)]
            sgd.apply(total, model.trainable_variables)
        return list(map(np.array, model.get_weights()))

    cases: list[tuple[str, dict[str, Any]]] = [
        ("own step", {"whole_batch": False}),
        ("accumulated", {"accumulate": 2}),
        ("clipped", {"clip_norm": 0.2}),
    ]
    for case, options in cases:
        inner = MODELS["wide"][0]("float64", world.rank)
        model = OwnStep(inner) if case == "own step" else inner
        trainer = hvdtrain.Trainer(
            model, OPTIMIZERS["sgd"](), CROSS_ENTROPY, backend=world.backend, update="async", max_staleness=0, **options
        )
        trainer.fit((x, y), **FIT)
        error = relative_error(inner.get_weights(), expected(options.get("clip_norm")))
        assert error <= 1e-9, f"{case}: {error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_steps_go_on_where_epochs_have_another_length(world: World) -> None:
    """A second `fit` with larger batches: its steps are numbered on, for schedules, servers and checkpoints."""
    build, data = MODELS["wide"]
    found = []
    for options in ({}, {"max_staleness": 0}, {"max_staleness": 1}, {}, {"servers": 1}, {"update": "gossip"}):
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([2 * STEPS, 2 * STEPS + 1], [0.1, 0.05, 0.01])
        adam = keras.optimizers.Adam(rate)
        rule = {"update": "async", **options} if options or found else {}
        trainer = hvdtrain.Trainer(build("float64", 0), adam, CROSS_ENTROPY, backend=world.backend, **rule)
        trainer.fit(data("float64"), **FIT | {"epochs": 2})
        result = trainer.fit(data("float64"), **FIT | {"epochs": 1, "batch": 2 * BATCH})
        steps = 2 * STEPS + -(-SAMPLES // (2 * BATCH))
        assert int(adam.iterations) == steps == result.steps, (options, int(adam.iterations), result.steps)
        found.append(trainer.model.get_weights())
    error = relative_error(found[1], found[0])
    assert error <= 1e-9, f"{error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_one_worker_trains_on_all_microbatches(world: World) -> None:
    """With a rank that only serves, a slice is the whole batch."""
    build, data = MODELS["wide"]
    trainer = trained(world, "wide", OPTIMIZERS["sgd"](), servers=1, accumulate=2)
    expected = plain_training(build("float64", 0), OPTIMIZERS["sgd"](), per_sample, batches_of(*data("float64")))
    error = relative_error(trainer.model.get_weights(), expected)
    assert error <= 1e-9, f"{error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_a_constraint_changes_rows_without_a_gradient(world: World) -> None:
    """Workers see them, as Keras' own step does: of an embedding whose rows may not be negative."""
    for options in ({"update": "async", "max_staleness": 0}, {"update": "hybrid", "server_variables": ("embedding",)}):
        found = []
        for rule in (options, {}):
            model = MODELS["table"][0]("float64", 0)
            table = next(layer for layer in model.layers if isinstance(layer, keras.layers.Embedding))
            table.embeddings.constraint = keras.constraints.MinMaxNorm(0.2, 0.5, rate=0.5, axis=1)
            sgd = OPTIMIZERS["plain sgd"]()
            trainer = hvdtrain.Trainer(model, sgd, CROSS_ENTROPY, backend=world.backend, **rule)
            trainer.fit(MODELS["table"][1]("float64"), **FIT)
            found.append(trainer.model.get_weights())
        error = relative_error(*found)
        assert error <= 1e-9, f"{options}: {error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_averages_are_restored(world: World) -> None:
    """`restore` gives a model the averages of its weights, as a finished `fit` does, under each rule."""
    data, build = MODELS["wide"][1]("float64"), MODELS["wide"][0]
    for rule in ({"update": "async"}, {"update": "gossip"}, {"update": "easgd"}, {}):
        folder = world.folder / f"averages-{rule.get('update')}"

        def trainer_of(seed: int, rule: Any = rule) -> Any:
            sgd = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
            return hvdtrain.Trainer(build("float64", seed), sgd, CROSS_ENTROPY, backend=world.backend, **rule)

        first = trainer_of(0)
        first.fit(data, **FIT, checkpoint=folder)
        second = trainer_of(5)
        second.evaluate(data)
        second.restore(folder)
        error = relative_error(second.model.get_weights(), first.model.get_weights())
        assert error <= 1e-12, f"{rule}: {error:.2e}"


class Clips(keras.callbacks.Callback):
    """Sets a weight after each batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        bias = self.model.layers[-1].bias
        bias.assign(0.0 * bias)


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_what_callers_set_between_steps_is_refused(world: World) -> None:
    """Servers would not hear of it; and a batch of one call has a part for each rank."""
    build, data = MODELS["wide"]
    for options in ({}, {"update": "gossip"}, {"update": "hybrid", "server_variables": ("kernel",)}):
        given = {"update": "async", **options}
        trainer = hvdtrain.Trainer(
            build("float64", 0), keras.optimizers.SGD(0.1), CROSS_ENTROPY, backend=world.backend, **given
        )
        with refused("a callback that sets", ConfigError):
            trainer.fit(data("float64"), **FIT, callbacks=[Clips()])
        world.gather(b"")
    x, y = data("float64")
    adam = keras.optimizers.Adam(0.01)
    trainer = hvdtrain.Trainer(build("float64", 0), adam, CROSS_ENTROPY, backend=world.backend, update="async")
    for _ in range(3):
        trainer.train_on_batch(x[:BATCH], y[:BATCH])
    assert int(adam.iterations) == 3
    assert trainer.fit((x, y), **FIT | {"epochs": 1}).steps == 3 + STEPS
    assert int(adam.iterations) == 3 + STEPS
    for options in ({"update": "async"}, {"update": "async", "max_staleness": 0}, {"zero": 3}):
        ours = hvdtrain.Trainer(build("float64", 0), "sgd", CROSS_ENTROPY, backend=world.backend, **options)
        theirs = build("float64", 0)
        theirs.compile("sgd", CROSS_ENTROPY)
        for trainer, model in ((ours, ours.model), (theirs, theirs)):
            for _ in range(2):  # a script sets weights between two calls
                trainer.train_on_batch(x[:BATCH], y[:BATCH])
                model.set_weights([0.5 * each for each in model.get_weights()])
        error = relative_error(ours.model.get_weights(), theirs.get_weights())
        assert error <= 1e-9, f"{options}: {error:.2e}"
    serving = hvdtrain.Trainer(
        build("float64", 0), "sgd", CROSS_ENTROPY, backend=world.backend, update="async", servers=1
    )
    with refused("train_on_batch does not go with servers=1", ConfigError):
        serving.train_on_batch(x[:BATCH], y[:BATCH])
    for update in ("gossip", "easgd"):  # copies meet now and then
        copies = hvdtrain.Trainer(build("float64", 0), "sgd", CROSS_ENTROPY, backend=world.backend, update=update)
        with refused(f"train_on_batch does not go with update='{update}'", ConfigError):
            copies.train_on_batch(x[:BATCH], y[:BATCH])


@worlds("mpirun-2", extended=True)
def check_layers_of_several_dtypes(world: World) -> None:
    """And a norm beyond the range of float16 clips to the bound, and not to zero."""
    x, y = MODELS["dense"][1]("float32")
    for rule in ("async", "gossip"):
        for dtype in ("float64", "float16"):
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Dense(4, dtype=dtype), keras.layers.Dense(3, dtype="float32")]
            model = keras.Sequential([keras.Input((6,)), *layers])
            before = [np.array(w) for w in model.get_weights()]
            options = {"update": rule, "clip_norm": 1.0}
            trainer = hvdtrain.Trainer(model, "sgd", CROSS_ENTROPY, backend=world.backend, **options)
            trainer.fit((500 * x, y), **FIT)
            moved = [
                float(np.abs(np.array(a, "f8") - b).max()) for a, b in zip(model.get_weights(), before, strict=True)
            ]
            assert all(0 < each < 10 for each in moved), (rule, dtype, moved)


@worlds("gloo-2")
def check_servers_need_mpi(world: World) -> None:
    for rule in ("async", "gossip", "easgd", "hybrid"):
        with refused(f"update='{rule}' needs MPI: start with mpirun, or horovodrun --mpi", ConfigError):
            hvdtrain.Trainer(MODELS["dense"][0]("float32", 0), "sgd", "mse", backend=world.backend, update=rule)


@worlds("mpirun-2", extended=True)
def check_another_job_cannot_be_replayed(world: World) -> None:
    other = world.folder / "other.json"
    if world.rank == 0:
        other.write_text("[[], [], []]")
    world.gather(b"")
    for options, said in (
        ({"replay": str(other)}, "was recorded on 3 ranks. Received: 2 ranks"),
        ({"replay": str(world.folder / "none.json")}, "none.json' cannot be read (No such file or directory)"),
        ({"record": str(world.folder / "no" / "order.json")}, "order.json' cannot be written (No such file or"),
    ):
        model = MODELS["dense"][0]("float32", 0)
        trainer = hvdtrain.Trainer(model, "sgd", CROSS_ENTROPY, backend=world.backend, update="async", **options)
        with refused(said, ConfigError):
            trainer.fit(MODELS["dense"][1]("float32"), **FIT)
