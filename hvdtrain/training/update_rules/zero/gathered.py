"""Parameters of stage 3: all-gathered only while a layer uses them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras_variables import VariableState, set_state, state_of
from hvdtrain.compat.tensorflow import is_vectorized
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.partition.gradients import slice_of_gradient
from hvdtrain.partition.partition import unseen
from hvdtrain.runtime.compiled import numbered, outermost_graph
from hvdtrain.state.variables import unwrap
from hvdtrain.training.step.contract import Collected, Parameters, Pass, serves_others
from hvdtrain.training.step.finite import poison_of, zero_if_finite
from hvdtrain.training.step.placeholder import counted
from hvdtrain.training.update_rules.zero.reducer import scattered
from hvdtrain.training.update_rules.zero.regather import Burst, Gather, Scattered, gather_again
from hvdtrain.training.update_rules.zero.shards import Shard


class GatheredParameters(Parameters):
    """Sharded parameters, all-gathered `prefetch` layers ahead of a read; gradients are reduce-scattered.

    `guarded` checks this replica's own gradients for finiteness.
    """

    exchanges_backward = True

    def __init__(
        self,
        trainable: Mapping[str, tf.Variable],
        backend: Backend,
        shards: Mapping[str, Shard],
        *,
        prefetch: int,
        guarded: bool,
    ) -> None:
        super().__init__(trainable)
        self._backend = backend
        self._shards = shards
        self._prefetch = prefetch
        self._guarded = guarded

    def sources(self) -> list[tf.Variable]:
        """Return the shards of sharded variables, and the other variables."""
        whole = self._trainable.items()
        return [unwrap(self._shards[path].master) if path in self._shards else variable for path, variable in whole]

    @contextmanager
    def passes(self, has_samples: tf.Tensor | float) -> Iterator[Pass]:
        """Make the model's variables read as gathered tensors.

        Raises ConfigError if something reads a variable by other means, and would see it empty; or a layer assigns to
        one.
        """
        if tf.executing_eagerly():
            raise ConfigError(
                f"{opt('zero', 3)} gathers parameters within compiled functions. Received: a step that runs eagerly. "
                f"Leave out tf.config.run_functions_eagerly(True), or use {opt('zero', 2)}."
            )
        microbatch = _Microbatch(has_samples, self.sources(), list(self._trainable), self._guarded)
        gathers = GatheringPass(self._backend, self._shards, microbatch, self._prefetch)
        with gathered_reads([shard.whole for shard in self._shards.values()], gathers.read):
            yield gathers


class _Microbatch(NamedTuple):
    has_samples: tf.Tensor | float
    sources: list[tf.Variable]
    paths: list[str]
    """Paths of all trainable variables."""
    guarded: bool


class GatheringPass(Pass):
    """Both passes of a microbatch, in the graph under construction."""

    def __init__(self, backend: Backend, shards: Mapping[str, Shard], microbatch: _Microbatch, prefetch: int) -> None:
        super().__init__(microbatch.has_samples, microbatch.sources)
        self._backend = backend
        self._by_path = shards
        self._shards = {id(shard.whole): shard for shard in shards.values()}
        self._microbatch = microbatch
        self._prefetch = prefetch
        self._graph = tf.compat.v1.get_default_graph()
        self._bursts: list[Burst] = []
        self._scattered: list[Scattered] = []
        self._poison: dict[str, list[tf.Tensor]] = {}

    def read(self, variable: Any) -> tf.Tensor:
        """Return a sharded variable, all-gathered. Collective."""
        with unseen():
            return self._read(variable)

    def _read(self, variable: Any) -> tf.Tensor:
        shard = self._shards[id(variable)]
        if not self._bursts or self._bursts[-1].end is not None or self._bursts[-1].readers():
            self._end_burst()
            self._bursts.append(Burst())
        gathers = self._bursts[-1].gathers
        if id(variable) not in gathers:
            if is_vectorized(self._graph):
                raise ConfigError(
                    f"{opt('zero', 3)} gathers parameters where layers read them. Received: {shard.path}, read within "
                    "tf.vectorized_map (keras.ops.vectorized_map, keras.layers.TimeDistributed), which copies the "
                    f"exchange without its gradient. Use {opt('zero', 2)}, or call the layer on the whole batch."
                )
            # A loop or branch within a layer has its own graph, which ranks may run a different number of times.
            with self._graph.as_default(), tf.control_dependencies(self._readers_before()):
                whole = self._differentiable(shard)
            gathers[id(variable)] = Gather(whole, partial(self._gathered, shard, "backward"))
        return gathers[id(variable)].whole

    def end_forward(self) -> None:
        """Mark the start of the backward pass."""
        self._end_burst()

    def collected(self, gradients: Sequence[Gradient]) -> Collected:
        """Return accumulable gradients; those of shards are already global sums (else ConfigError)."""
        for path, source, gradient in zip(self._microbatch.paths, self._sources, gradients, strict=True):
            if path in self._by_path and gradient is not None:
                _check_of_slice(gradient, source, path)
        readers = self._complete()
        own = [
            None
            if gradient is None
            else self._when_read(gradient, readers.get(id(self._by_path[path].whole), []))
            if path in self._by_path
            else self._counted(gradient, source)
            for path, source, gradient in zip(self._microbatch.paths, self._sources, gradients, strict=True)
        ]
        return Collected(own, self._poison_of(own) if self._microbatch.guarded else None)

    def _complete(self) -> dict[int, list[Any]]:
        """Finish the graph of both passes; return by variable the readers of its shard.

        These must run before the shard is updated. Raises ConfigError as `GatheredParameters.passes`.
        """
        readers = gather_again(self._graph, self._bursts, self._scattered, self._prefetch)
        refuse_other_reads(self._by_path)
        return readers

    def _when_read(self, gradient: tf.Tensor, readers: Sequence[Any]) -> tf.Tensor:
        """Return a shard's gradient after `readers`, which delays its update.

        It waits for no others: with several microbatches it is accumulated and freed immediately.
        """
        with tf.control_dependencies(readers):
            return tf.identity(gradient)

    def _end_burst(self) -> None:
        if self._bursts and self._bursts[-1].end is None:
            self._bursts[-1].end = len(self._graph.get_operations())

    def _readers_before(self) -> list[Any]:
        """Return the operations that the newest burst's gathers wait for."""
        place = len(self._bursts) - 2 - self._prefetch
        return self._bursts[place].readers() if place >= 0 else []

    def _differentiable(self, shard: Shard) -> tf.Tensor:
        """Return the full variable, whose gradient reduce-scatters to this shard."""

        @tf.custom_gradient
        def gathered(mine: tf.Tensor) -> tuple[tf.Tensor, Callable[[Gradient], tf.Tensor]]:
            def back(upstream: Gradient) -> tf.Tensor:
                return slice_of_gradient(upstream, partial(self._slice_of_gradient, shard))

            return self._gathered(shard, "forward", mine), back

        return gathered(shard.master.value)

    def _gathered(self, shard: Shard, direction: str, mine: tf.Tensor | None = None) -> tf.Tensor:
        mine = shard.master.value.read_value() if mine is None else tf.convert_to_tensor(mine)
        name = numbered(f"zero_{direction}/{shard.path}")
        return tf.reshape(shard.exchange.all_gather(mine, name=name), shard.whole.shape)

    def _slice_of_gradient(self, shard: Shard, upstream: Gradient) -> tf.Tensor:
        # A gradient may come from inside a loop's graph; this one runs on all ranks.
        gradient = self._counted(tf.convert_to_tensor(upstream), shard.whole)
        if self._microbatch.guarded:
            self._poison.setdefault(shard.path, []).append(zero_if_finite([gradient]))
        mine = scattered(gradient, shard, numbered(f"gradient/{shard.path}"))
        self._scattered.append(Scattered(gradient.op, mine.op))
        return mine

    def _counted(self, gradient: Gradient, variable: Any) -> Gradient:
        """Return a gradient, or a placeholder's zeros unless others use the variable."""
        return gradient if serves_others(variable) else counted(gradient, self._has_samples)

    def _poison_of(self, gradients: Sequence[Gradient]) -> tf.Tensor:
        of_wholes = [
            self._poison.get(path, []) if path in self._by_path else [poison_of(gradient)]
            for path, gradient in zip(self._microbatch.paths, gradients, strict=True)
        ]
        return tf.stack([tf.add_n(each) if each else tf.constant(0.0) for each in of_wholes])


def _check_of_slice(gradient: Gradient, source: tf.Variable, path: str) -> None:
    """Reject a full gradient, which bypassed the gathered parameter."""
    if not source.shape.is_compatible_with(gradient.shape):
        raise ConfigError(
            f"{opt('zero', 3)} takes the gradients of slices through the parameters that are gathered. Received: a "
            f"gradient of shape {tuple(gradient.shape)} for {path}, as from a tf.custom_gradient function that returns "
            f"gradients of the variables that it reads. Use {opt('zero', 2)}, or let the function take the parameter "
            "as an argument."
        )


class _ForwardPass(GatheringPass):
    """A forward pass alone, as in evaluation: gathered parameters are freed after use."""

    def _differentiable(self, shard: Shard) -> tf.Tensor:
        return self._gathered(shard, "evaluation")


@contextmanager
def gathered_forward(backend: Backend, shards: Mapping[str, Shard], prefetch: int) -> Iterator[None]:
    """Make a compiled function without gradients read parameters as gathered tensors. Collective.

    Raises ConfigError as `GatheredParameters.passes`.
    """
    forward = _ForwardPass(backend, shards, _Microbatch(1.0, [], [], guarded=False), prefetch)
    with gathered_reads([shard.whole for shard in shards.values()], forward.read):
        yield
    refuse_other_reads(shards)


@contextmanager
def gathered_reads(variables: Sequence[Any], read: Callable[[Any], tf.Tensor]) -> Iterator[None]:
    """Make Keras variables read as the result of `read` inside the context."""
    before = [state_of(variable) for variable in variables]
    for variable in variables:
        set_state(variable, _Gathered(read))
    try:
        yield
    finally:
        for variable, state in zip(variables, before, strict=True):
            set_state(variable, state)


class _Gathered(VariableState):
    """State of a variable that is gathered where layers read it."""

    def __init__(self, read: Callable[[Any], tf.Tensor]) -> None:
        self._read = read

    def read(self, variable: Any) -> tf.Tensor:
        """Return the gathered tensor."""
        return self._read(variable)

    def write(self, variable: Any, value: Any) -> None:
        """Refuse. Raises ConfigError."""
        raise ConfigError(
            f"{opt('zero', 3)} keeps slices of the parameters, which layers can read but not assign to. Received: an "
            f"assignment to {variable.path} in the forward pass. Use {opt('zero', 2)}."
        )


def refuse_other_reads(shards: Mapping[str, Shard]) -> None:
    """Reject a graph that reads the freed memory of full variables. Raises ConfigError naming the variable."""
    captured = {id(tensor) for tensor in outermost_graph().external_captures}
    for path, shard in shards.items():
        if id(shard.variable.handle) in captured:
            raise ConfigError(
                f"{opt('zero', 3)} gathers the parameters that layers read as Keras variables while their call is "
                f"traced. Received: {path}, whose memory is read directly, as by a tf.function that was traced before, "
                f"or by variable.value.handle. Use {opt('zero', 2)}, or call the function without tf.function."
            )
