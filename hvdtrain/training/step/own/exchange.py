"""Patches inside a model's own step: optimizers reduce gradients, and replicas use different random numbers."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvdtrain.compat.keras_variables import trained_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.clipping import ordered_sum
from hvdtrain.state.optimizers import MAIN
from hvdtrain.state.structure import structure_of
from hvdtrain.state.variables import as_written, path_of, unwrap


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the context, bypassing Keras' attribute tracking."""
    before = {name: vars(thing)[name]} if name in vars(thing) else {}
    object.__setattr__(thing, name, value)
    try:
        yield
    finally:
        object.__delattr__(thing, name)
        for each, original in before.items():
            object.__setattr__(thing, each, original)


@contextmanager
def replaced_in_this_thread(kind: type, name: str, value: Any) -> Iterator[None]:
    """Patch a class' method inside the context, for this thread only."""
    thread = threading.get_ident()
    with _ByThread.changing:
        method = vars(kind).get(name)
        if not isinstance(method, _ByThread):
            method = _ByThread(getattr(kind, name), inherited=method is None)
            setattr(kind, name, method)
        method.replacements.setdefault(thread, []).append(value)
    try:
        yield
    finally:
        with _ByThread.changing:
            method.replacements[thread].pop()
            if not method.replacements[thread]:
                del method.replacements[thread]
            if not method.replacements and method.inherited:
                delattr(kind, name)
            elif not method.replacements:
                setattr(kind, name, method.original)


class _ByThread:
    """A method patched by some threads."""

    changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, original: Any, *, inherited: bool) -> None:
        self.original = original
        self.inherited = inherited
        self.replacements: dict[int, list[Any]] = {}
        """By thread; the last one is active."""

    def __get__(self, instance: Any, owner: type) -> Any:
        replacements = self.replacements.get(threading.get_ident())
        method = replacements[-1] if replacements else self.original
        return method.__get__(instance, owner)


_APART = 7919
"""Distance between the seeds of two replicas."""


@contextmanager
def offset_seeds(replica: int) -> Iterator[None]:
    """Offset TensorFlow's and Keras' seeds by the replica, in this thread.

    The seeds are the same on every rank, which would give all of them the same noise for different samples. A model's
    own `keras.random.SeedGenerator`s are set in `TrainState.seed_generators`.
    """
    graph = tf.compat.v1.get_default_graph()
    seed, following = graph.seed, keras.random.SeedGenerator.next

    def offset(generator: Any, ordered: bool = True) -> Any:
        drawn = following(generator, ordered)
        # Keras requests unordered seeds for random ops without their own.
        return drawn if ordered else drawn + tf.cast(replica * _APART, drawn.dtype)

    graph.seed = None if seed is None else seed + replica * _APART
    try:
        with replaced_in_this_thread(keras.random.SeedGenerator, "next", offset):
            yield
    finally:
        graph.seed = seed


class OptimizerExchange:
    """Reduces the gradients that a model's step passes to its optimizers.

    Inside `exchanging`, `apply` of each optimizer takes this replica's gradients and applies the reduced ones, and any
    other optimizer raises when used by the tracing thread. Raises ConfigError for an optimizer that reduces gradients
    itself, or per microbatch.
    """

    def __init__(
        self, model: Any, optimizers: Mapping[str, Any], distribute: Callable[[Any], DistributedOptimizer]
    ) -> None:
        self.optimizers = dict(optimizers)
        self.used: list[str] = []
        """Paths of the optimizers used by the step, in the order of first use."""
        self._model = model
        self._distributed = {path: distribute(optimizer) for path, optimizer in optimizers.items()}
        # Variables, since a step may apply gradients in its own loop, condition or tf.function, which cannot read
        # another graph's tensors.
        self._weight = tf.Variable(0.0, trainable=False, name="local_weight")
        self._norms = {path: tf.Variable(0.0, trainable=False, name="gradient_norm") for path in optimizers}
        self._measure = False
        self._applying = False
        self._calls: dict[str, int] = {}

    @property
    def main(self) -> Any:
        """The optimizer with the reported learning rate: `model.optimizer`, or the first one used."""
        path = MAIN if MAIN in self.used or not self.used else self.used[0]
        return self.optimizers.get(path, next(iter(self.optimizers.values())))

    @contextmanager
    def exchanging(self, weight: tf.Tensor, *, measure: bool) -> Iterator[None]:
        """Reduce gradients applied inside the context, weighted by `weight` (such as samples).

        `measure` says whether `norm` will be used, which costs a pass.
        """
        self._weight.assign(weight)
        self._measure, self._calls = measure, {}
        with ExitStack() as stack:
            stack.enter_context(replaced_in_this_thread(keras.optimizers.Optimizer, "apply", self._elsewhere()))
            for path, optimizer in self.optimizers.items():
                stack.enter_context(replaced(optimizer, "apply", partial(self._apply, path)))
            yield

    def norm(self) -> tf.Tensor:
        """Return the L2 norm of the last reduced gradients, before clipping."""
        return tf.sqrt(ordered_sum([tf.square(self._norms[path].read_value()) for path in self.used]))

    @as_written
    def _apply(self, path: str, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        optimizer = self.optimizers[path]
        if self._applying:
            type(optimizer).apply(optimizer, grads, trainable_variables)
            return
        known = trained_variables(innermost(optimizer))
        variables = list(known if trainable_variables is None else trainable_variables)
        if not variables:
            return
        self._check_owner(path, variables)
        self._build(optimizer, variables)
        distributed = self._distributed[path]
        distributed.local_weight, distributed.role = self._weight, self._role(path)
        self._applying = True
        try:
            distributed.apply(list(grads), variables)
        finally:
            self._applying = False
        if self._measure:
            self._norms[path].assign(tf.cast(distributed.norm, tf.float32))
        if path not in self.used:
            self.used.append(path)

    def _build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build an optimizer as Keras does: `model.optimizer` for all trained variables, others for their own."""
        if not optimizer.built:
            with tf.init_scope():
                everything = optimizer is getattr(self._model, MAIN, None)
                optimizer.build(self._model.trainable_variables if everything else variables)

    def _role(self, path: str) -> str:
        """Return a unique name for this reduction within the step."""
        count = self._calls.get(path, 0)
        self._calls[path] = count + 1
        role = "gradient" if path == MAIN else f"gradient/{path}"
        return f"{role}/{count}" if count else role

    def _check_owner(self, path: str, variables: Sequence[Any]) -> None:
        """Reject variables outside the model: they would not be broadcast, compared or saved."""
        own = structure_of(self._model).paths
        for variable in variables:
            if id(unwrap(variable)) not in own:
                raise ConfigError(
                    f"self.{path.replace('/', '.')} of {type(self._model).__name__} trains a variable that is not the "
                    f"model's: every rank would begin with its own value. Received: {path_of(variable)!r}. Make it a "
                    "weight of the model, with add_weight(), or of a layer that is an attribute of the model."
                )

    def _elsewhere(self) -> Callable[..., Any]:
        """Return an `apply` for all other optimizers."""
        original = keras.optimizers.Optimizer.apply

        @as_written
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._applying:
                return original(optimizer, grads, trainable_variables)
            known = ", ".join(f"self.{path.replace('/', '.')}" for path in self.optimizers)
            raise ConfigError(
                f"train_step of {type(self._model).__name__} applies gradients with an optimizer that is no attribute "
                "of the model, so that they would not be exchanged and the ranks would drift apart. Received: "
                f"{type(optimizer).__name__} {optimizer.name!r}; the model holds {known}. Keep it in an attribute, set "
                "in __init__() or compile()."
            )

        return apply
