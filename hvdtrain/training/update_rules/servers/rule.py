"""Asynchronous SGD with parameter servers: pull, compute, push, and no waiting for other workers.

Downpour SGD (Dean et al. 2012) and, with a bound on how far the fastest worker may be ahead of the slowest, the
stale-synchronous protocol (Ho et al. 2013). Each rank is a worker and the server of a share of the variables, which its
thread updates by the user's optimizer; or, with `options.servers`, the last ranks only serve. An update moves the
parameters by the learning rate times its share of the step's samples, so that N workers move them in N updates about as
far as one synchronous step does.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.keras_variables import is_decayed
from hvdtrain.compat.seams import VARIABLE
from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.gradients.reduction import Gradient, scaled
from hvdtrain.optim.averaging import has_averages, innermost, replaced_weights
from hvdtrain.optim.clipping import global_norm
from hvdtrain.runtime.compiled import run_once
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.messages import Messages
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.optimizers import rate_at
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.variables import unwrap
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.contract import CompiledStep, LocalGradients, Measured, Parameters, Pass
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.update_rules.base import UpdateRule
from hvdtrain.training.update_rules.local_sgd import LocalTotals, unique_rows
from hvdtrain.training.update_rules.rows_alone import changes_rows_alone
from hvdtrain.training.update_rules.servers.layout import Entry, Outgoing, ServerLayout, owners_of
from hvdtrain.training.update_rules.servers.masters import Masters, barrier
from hvdtrain.training.update_rules.servers.record import Event, check_writable, described, recorded
from hvdtrain.training.update_rules.servers.server import Server
from hvdtrain.training.update_rules.servers.worker import (
    Connection,
    PacedData,
    PacedStep,
    Pulled,
    Slice,
    shares_slices,
)
from hvdtrain.training.update_rules.zero.stage1 import refuse_frozen, refuse_slots


class AsyncUpdate(UpdateRule):
    """Pushes this replica's gradients to servers and pulls parameters.

    The optimizer updates copies of the variables, `masters`. Each rank has those that its server owns, and their slots,
    and placeholders for the others. Clipping acts on each replica's own gradient. Raises ConfigError for an optimizer
    that has slots already.
    """

    weights_agree = False
    acts_between_steps = True
    waits_when_measured = True
    name = "async"
    """As in `--update`."""
    gradients_alone_change = True
    """Whether servers change parameters by gradients only."""
    _divides = True
    """Whether a rank has the masters and slots of its own variables alone, from the beginning."""

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        refuse_slots(optimizer, opt("update", self.name))
        self._options = options or StepOptions()
        self._bound = self._options.max_staleness
        self.divisors = "exchanged" if self._bound == 0 else "own"
        self._workers = backend.size - self._options.servers
        self.trainers = self._workers
        self._backend = backend
        keys = structure_of(model).by_path(model.trainable_variables)
        variables = dict(zip(keys, model.trainable_variables, strict=True))
        self._owners = self._owners_of({path: int(np.prod(v.shape)) * v.dtype.size for path, v in keys.items()})
        self._masters = Masters(backend, variables, self._owners if self._divides else {}, opt("update", self.name))
        super().__init__(backend, model, optimizer, options)
        self._layouts: list[ServerLayout] = []
        self._outbox: list[Outgoing] = []
        self._share = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="share")
        self._weight = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="weight")
        self._norm = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="norm")
        self._messages: Messages | None = None
        self._connection: Connection | None = None
        self._server: Server | None = None
        self._step = 0
        self._consolidated = True
        self._averages: list[tuple[Any, tf.Tensor]] = []
        self._unread = LocalTotals(backend)
        self._figures_of_all = tf.function(lambda: backend.run(self._measured), autograph=False)

    def _owners_of(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the server of each variable, whose size in bytes is given."""
        servers = self._options.servers
        owners = owners_of(sizes, servers or self._backend.size)
        return {path: owner + (self._workers if servers else 0) for path, owner in owners.items()}

    # -- a step --

    def parameters(self, trainable: Mapping[str, tf.Variable]) -> Parameters:
        """Return parameters that layers may not assign to."""
        return _Served(trainable, {id(v): v.path for v in self._variables}, opt("update", self.name))

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Keep this replica's mean gradient, to be pushed at the end of the step."""
        weight, expected = tf.cast(local.totals[1], tf.float64), tf.cast(local.expected_weight, tf.float64)
        factor = tf.math.divide_no_nan(expected, weight)
        own = [scaled(unique_rows(gradient), factor) for gradient in local.gradients]
        own, norm = self._clipped(own, global_norm(own))
        assert norm is not None, "it was given"
        self._share.assign(tf.math.divide_no_nan(weight, expected))
        self._weight.assign(weight)
        self._norm.assign(norm)
        gradients = {path: each for path, each in zip(self._paths, own, strict=True) if each is not None}
        with eager_variables():
            self._lay_out(gradients)
        for layout, outgoing in zip(self._layouts, self._outbox, strict=True):
            outgoing.keep(layout, gradients)
        totals = local.totals
        if self.divisors == "exchanged" and not local.uniform:  # the loss is divided by the weights of all
            totals = self._backend.all_reduce(totals, name="async//totals")
        return totals, norm if measure else None

    def _lay_out(self, gradients: Mapping[str, Gradient]) -> None:
        """Decide, at the first trace, how gradients and parameters travel."""
        sparse = {path for path, each in gradients.items() if isinstance(each, tf.IndexedSlices)}
        if self._layouts:
            known = {e.path: e.sparse for layout in self._layouts for e in layout.entries}
            if known != {path: path in sparse for path in gradients}:
                raise ConfigError(
                    f"{opt('update', self.name)} needs the same kind of gradients in every step: one of "
                    f"{type(self.model).__name__} is missing, or sparse, with some batches only."
                )
            return
        by_rows = set(self._moved_by_rows(sparse)) if self.gradients_alone_change else set()
        variables = self._by_path()
        for server in range(self._backend.size):
            entries = [
                Entry(
                    path,
                    tuple(variables[path].shape),
                    np.dtype(variables[path].dtype.as_numpy_dtype),
                    sparse=path in sparse,
                    by_rows=path in by_rows,
                )
                for path in gradients
                if self._owners[path] == server
            ]
            self._layouts.append(ServerLayout(entries))
            self._outbox.append(Outgoing(self._layouts[-1]))
        self._compile()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Push the gradients of the step, and pull the parameters of the next."""
        yield
        connection, server = self._connected()
        if not server.ready:
            self._prepare(connection, server)
        computed_at = list(connection.versions)
        late = connection.pulled() if connection.asked else None
        (share, weight), *gradients = self._read_out()
        ahead = self._options.pull_ahead
        arrays = [
            outgoing.arrays(given) if weight else [] for outgoing, given in zip(self._outbox, gradients, strict=True)
        ]
        connection.push(self._step, float(share), float(weight), arrays, versions=computed_at)
        # A server that adds up a step's gradients answers for the step after: it cannot be asked for a later one.
        connection.ask(self._step + 1 + (ahead and self._bound != 0))
        pulled = late if ahead else connection.pulled()
        if pulled is not None:
            self._take_up(pulled)
        self._step += 1
        self._note_step()
        self._consolidated = False

    def _note_step(self) -> None:
        """Advance the optimizer's count of steps; servers have one of updates."""
        innermost(self.optimizer).iterations.assign(self._step)

    def _take_up(self, pulled: Sequence[Pulled]) -> None:
        """Set the model's variables to what was pulled."""
        self._take_in([(flats, rows) for flats, rows in pulled])

    def _moved_by_rows(self, tables: Iterable[str]) -> list[str]:
        """Return those of the `tables`, by path, of which an update changes no row without a gradient."""
        masters, inner = self._masters.by_path, innermost(self.optimizer)
        # A constraint changes others, too.
        decayed = {path: is_decayed(inner, masters[path]) for path in tables if path not in self._constrained()}
        alone = {each: changes_rows_alone(inner, decayed=each) for each in set(decayed.values())}
        return [path for path, each in decayed.items() if alone[each]]

    def _compile(self) -> None:
        """Compile what goes out of a step, and what comes in, for the layouts."""
        variables = self._by_path()

        def read_out() -> list[Any]:
            return [[self._share.read_value(), self._weight.read_value()], *(each.read() for each in self._outbox)]

        def take_in(pulled: list[Any]) -> None:
            for layout, (flats, rows) in zip(self._layouts, pulled, strict=True):
                for path, value in layout.apart(layout.whole, flats).items():
                    variables[path].assign(value)
                for entry, (indices, values) in zip(layout.tables, rows, strict=True):
                    variables[entry.path].scatter_update(tf.IndexedSlices(values, indices))

        self._read_out = tf.function(read_out, autograph=False)
        self._take_in = tf.function(take_in, autograph=False, reduce_retracing=True)

    def _constrained(self) -> set[str]:
        return {path for path, v in zip(self._paths, self._variables, strict=True) if v.constraint is not None}

    def _by_path(self) -> dict[str, tf.Variable]:
        return dict(zip(self._paths, map(unwrap, self._variables), strict=True))

    # -- a training --

    def paced(self, step: CompiledStep, data: TrainingData, state: TrainState) -> tuple[Any, Any]:
        """Let each worker go on at its own pace. Collective."""
        if self._server is not None:  # of a training that was interrupted
            self._drain()
            self._disconnect()
        connection, _ = self._connected()
        iterations = innermost(self.optimizer).iterations
        before = self._step - state.scalars.step  # of the optimizer, as in a training by Keras alone

        def begin(piece: Slice) -> None:
            self._step = piece.step + before
            state.counter.assign(piece.draws)

        def end(number: int) -> None:
            self._consolidated = False
            state.counter.assign(number)
            iterations.assign(number + before)

        take = connection.take_slice if self._bound is None else None
        if self._options.servers and not shares_slices(data):
            raise ConfigError(
                f"{opt('servers', self._options.servers)} needs samples that workers can read by their numbers, of "
                "arrays or files, with shard_by='samples' and without on_bad_record: of this data every rank would "
                "have to train on its own share. Leave it out, so that all ranks train."
            )
        survivors = self._backend.session.link.survivors

        def meet() -> None:
            self._drain()
            survivors.gather_again()

        paced = PacedStep(
            step,
            begin=begin,
            end=end,
            part=survivors.part,
            meet=meet,
            measure=self._measure,
            total=self._unread.add,
        )
        ahead = state.scalars.step - state.scalars.place_in_data(data.steps_per_epoch)
        return paced, PacedData(data, self._backend.index, self._workers, take, ahead=ahead)

    def finalize(self) -> None:
        """Stop serving, and tell how stale gradients were. Collective."""
        super().finalize()
        self._disconnect()

    def _connected(self) -> tuple[Connection, Server]:
        """Return the connection and this rank's server; the first call is collective."""
        if self._connection is None or self._server is None:
            replay = recorded(self._options.replay, self._backend) if self._options.replay else ()
            if self._options.record:
                check_writable(self._options.record, self._backend)
            session = self._backend.session
            self._messages = Messages(session, session.config.load_timeout)
            self._server = self._make_server(self._messages, replay)
            self._step = int(innermost(self.optimizer).iterations)
            self._connection = Connection(self._messages)
            session.link.threads.append(self._server.stop)
            self._messages.check = self._check
            self._copy_to_masters()
            if not self._step:
                self._masters.begin_averages()
            if self._layouts:
                self._prepare(self._connection, self._server)
            self._server.begin(self._step)
        return self._connection, self._server

    def _check(self) -> None:
        """Raise if the server of this rank has failed, or a rank is lost."""
        if self._server is not None:
            self._server.check()
        self._backend.session.link.survivors.check()

    def _make_server(self, messages: Messages, replay: Sequence[Event]) -> Server:
        return Server(
            messages,
            self._masters.by_path,
            self.optimizer,
            self._options,
            workers=self._workers,
            fail=self._backend.session.link.fail,
            bound=self._bound,
            replay=replay,
        )

    def _prepare(self, connection: Connection, server: Server) -> None:
        """Let the connection and this rank's server know the layouts."""
        connection.layouts = self._layouts
        server.prepare(self._layouts[self._backend.index])

    def _disconnect(self) -> None:
        """End the server, once all ranks are done. Collective."""
        if self._server is None or self._messages is None:
            return
        server = self._server
        everyone = gather(self._backend, [list(server.staleness.items()), server.events, server.slices])
        self._server.stop()
        self._backend.session.link.threads.remove(self._server.stop)
        self._messages.close()
        self._messages = self._connection = self._server = None
        staleness: Counter[int] = Counter()
        for counts, *_ in everyone:
            staleness.update({int(updates): count for updates, count in counts})
        slices = np.max([counts for *_, counts in everyone], 0).tolist()
        self.figures = {"staleness": dict(sorted(staleness.items())), "slices": slices}
        if not self._backend.primary or not self.waits_when_measured:  # in step, nothing is stale unless asked for
            return
        stale = f"staleness, in updates: {described(staleness)}. " if staleness else ""
        LOGGER.info(f"{stale}slices by rank: {slices}")
        if self._options.record:
            Path(self._options.record).write_text(json.dumps([events for _, events, _ in everyone]))

    def _measure(self) -> Measured:
        """Measure a step that all ranks have ended. Collective."""
        self._drain()
        bad, norm = self._figures_of_all()
        inner = innermost(self.optimizer)
        rate = rate_at(inner, inner.iterations - 1)
        return Measured(learning_rate=rate, grad_norm=norm, loss_scale=None, finite=tf.math.is_finite(bad))

    def _measured(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return zero if all parameters are finite, and the mean norm of the workers' last gradients. Collective."""
        mine = [v.read_value() for path, v in self._masters.held.items() if self._owners[path] == self._backend.index]
        bad = self._backend.all_reduce(zero_if_finite([*mine, tf.zeros([])]), name="async//finite")
        return bad, self._backend.all_reduce(self._norm.read_value(), name="async//norm") / self._workers

    def _drain(self) -> None:
        """Wait for the answer to this worker's last question: then all that it pushed was applied."""
        if self._connection is not None and self._connection.asked:
            self._take_up(self._connection.pulled())

    # -- its state --

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return the optimizer state, of each variable on its server."""
        self._masters.take_back(self.model)
        return self._masters.named_tensors()

    def follow_model(self, *, training: bool = True) -> None:
        """Reject training after layers were (un)frozen. Raises ConfigError if the trained variables have changed."""
        if training:
            refuse_frozen(self._variables, self.model, opt("update", self.name))
            self._masters.take_back(self.model)

    def give_back(self, *, whole: bool) -> None:
        """Let the optimizer be the model's, if `whole` with the slots of those that have them. Collective."""
        self._masters.give_back(self.model, whole=whole)

    def gather_weights(self) -> None:
        """Let workers meet, for code that may set weights. Collective."""
        self.consolidate()

    @contextmanager
    def shown_weights(self) -> Iterator[None]:
        """Context of callbacks between two steps: unless workers have met, what they set would be lost."""
        if self._consolidated:
            with super().shown_weights():
                yield
            return
        rule = opt("update", self.name)
        with refusing_assignments(
            {id(v): v.path for v in self._variables},
            lambda path: (
                f"{rule} keeps the parameters on servers. Received: a callback that sets {path} between two "
                "steps, which would be lost. Set it in on_epoch_begin or on_epoch_end."
            ),
        ):
            yield

    def sync_from_model(self) -> None:
        """Let the servers go on from weights that user code changed, on all ranks alike. Collective in a training."""
        if not self._consolidated:
            return
        self._copy_to_masters()
        if self._server is not None:
            self._server.note_sync()
            run_once(lambda: self._backend.run(lambda: barrier(self._backend, "synced")))  # before anybody pushes

    def _copy_to_masters(self) -> None:
        self._masters.take()

    def on_state_loaded(self, own: Mapping[str, np.ndarray] | None = None) -> None:
        """Begin at the model's weights."""
        self._consolidated = True
        self._step = int(innermost(self.optimizer).iterations)
        self._averages = self._masters.averages() if has_averages(self.optimizer) else []
        self.sync_from_model()

    def consolidate(self) -> None:
        """Give all ranks the servers' parameters, and averages if any. Collective."""
        if self._consolidated or self._server is None or self._connection is None:
            return
        self._drain()
        self._agree_on(self._masters.held)
        self._masters.give()
        self._connection.versions = gather(self._backend, self._server.version)
        self._server.note_sync()
        self._consolidated = True
        if has_averages(self.optimizer):
            self._share_slots()
            self._averages = self._masters.averages()

    def _agree_on(self, masters: Mapping[str, tf.Variable]) -> None:
        """Make masters, by path, the same on all ranks, where these hold them all. Collective."""

    def prepare_to_save(self) -> None:
        """Give all ranks the servers' parameters, and the slots that no server has alone. Collective."""
        self.consolidate()
        if self._server is not None:
            self._share_slots()

    def _share_slots(self) -> None:
        """Make slots that several ranks hold the same on all of them. Collective."""
        self._masters.share_slots()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Swap in the averages of the last `consolidate`."""
        with replaced_weights(self._averages):
            yield

    def _build_optimizer(self) -> None:
        self._masters.build(self.optimizer)


class _Served(Parameters):
    """Parameters that servers own: what a layer assigned to them would be lost. Raises ConfigError if one does."""

    def __init__(self, trainable: Mapping[str, tf.Variable], paths: Mapping[int, str], rule: str) -> None:
        super().__init__(trainable)
        self._paths = paths
        self._rule = rule

    @contextmanager
    def passes(self, has_samples: tf.Tensor | float) -> Iterator[Pass]:
        def message(path: str) -> str:
            return (
                f"{self._rule} keeps the parameters on servers. Received: a layer that assigns to its own, {path}, as "
                "SpectralNormalization does. Use an all-reduce."
            )

        with refusing_assignments(self._paths, message), super().passes(has_samples) as inner:
            yield inner


@contextmanager
def refusing_assignments(paths: Mapping[int, str], message: Callable[[str], str]) -> Iterator[None]:
    """Raise ConfigError, with the `message` for its path, where this thread assigns to a variable of these ids."""
    original = VARIABLE.active(keras.Variable)

    def assign(variable: Any, value: Any) -> Any:
        if id(variable) in paths:
            raise ConfigError(message(paths[id(variable)]))
        return original(variable, value)

    with VARIABLE.replaced(keras.Variable, assign):
        yield
