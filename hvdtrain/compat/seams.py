"""Names of Keras, TensorFlow and models that are replaced while a step is traced: a table, with the reason of each.

A seam is entered for a while, in one thread: the user's objects are what they were before and after, and threads that
have nothing to do with the step see no difference.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Seam:
    """A function, method or property that something else takes the place of while a step is traced."""

    owner: str
    """The object, class or module that has it, in words."""
    name: str
    """The attribute."""
    why: str

    @contextmanager
    def replaced(self, owner: Any, by: Any) -> Iterator[None]:
        """Let `by` take its place in `owner` (an object, class or module) inside the context, in this thread.

        Bypasses Keras' attribute tracking. Contexts nest: `active` is what `by` may call.
        """
        thread = threading.get_ident()
        change, remove = (setattr, delattr) if isinstance(owner, type) else (object.__setattr__, object.__delattr__)
        with _Dispatch.changing:
            dispatch = vars(owner).get(self.name)
            if not isinstance(dispatch, _Dispatch):
                dispatch = _Dispatch(getattr(owner, self.name, None), held=self.name in vars(owner))
                change(owner, self.name, dispatch)
            dispatch.replacements.setdefault(thread, []).append(by)
        try:
            yield
        finally:
            with _Dispatch.changing:
                dispatch.replacements[thread].pop()
                if not dispatch.replacements[thread]:
                    del dispatch.replacements[thread]
                if not dispatch.replacements and dispatch.held:
                    change(owner, self.name, dispatch.original)
                elif not dispatch.replacements:
                    remove(owner, self.name)

    def active(self, owner: Any) -> Any:
        """Return what this thread would call now: inside other replacements, the innermost."""
        function = getattr(owner, self.name)
        return function.active() if isinstance(function, _Dispatch) else function

    def is_taken(self, owner: Any) -> bool:
        """Return whether `owner` itself, rather than its class, has something of this name in this thread."""
        own = vars(owner).get(self.name)
        return own is not None and (not isinstance(own, _Dispatch) or own.held or own.is_replaced)


class _Dispatch:
    """A function or method patched by some threads."""

    changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, original: Callable[..., Any] | None, *, held: bool) -> None:
        self.original = original
        """None where there is no such attribute outside of replacements."""
        self.held = held
        """Whether the object or class itself holds it, rather than its class or base."""
        self.replacements: dict[int, list[Callable[..., Any]]] = {}
        """By thread; the last one is active."""

    @property
    def is_replaced(self) -> bool:
        """Whether this thread sees something else."""
        return threading.get_ident() in self.replacements

    def active(self) -> Any:
        replacements = self.replacements.get(threading.get_ident())
        return replacements[-1] if replacements else self.original

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.active()(*args, **options)

    def __get__(self, instance: Any, owner: type) -> Any:
        """Bind what is active, as a method of a class."""
        method = self.active()
        if method is None:
            raise AttributeError(f"{owner.__name__} has it in other threads only")
        return method.__get__(instance, owner)


# The forward pass

MODEL_CALL = Seam("the model", "call", "activations are computed again, outputs stay sharded")
LAYER = Seam("keras.layers.Layer", "__call__", "a unit, such as a normalization, takes and gives rows of the batch")
LAYER_CALL = Seam("a layer", "call", "a fused operation")
LAYER_REPLICAS = Seam("a synchronized layer", "replicas", "its inputs are the whole batch already")
SEEDS = Seam("keras.random.SeedGenerator", "next", "replicas draw other numbers for other samples")
ROWS = Seam("keras.Variable", "sparse_read", "rows are looked up in a table that is not read as a whole")
VARIABLE = Seam("a variable", "assign", "what is no sum, or is kept elsewhere, is not assigned to")

# Losses and metrics

LOSS = Seam("keras.losses.Loss", "__call__", "outputs that are shards meet the targets that belong to them")
LOSS_CALL = Seam("a class of losses, or what `compile` makes of several", "call", "a form for shards, or a faster one")
LOSS_FUNCTION = Seam("a loss made of a function", "fn", "a faster form")
REDUCED_LOSS = Seam("the module of Keras' losses", "reduce_weighted_values", "divisors of all replicas")
SCALED_LOSS = Seam("the module of Keras' losses", "scale_loss_for_distribution", "gradients weigh samples already")
UNSCALED_LOSS = Seam("the module of Keras' losses", "unscale_loss_for_distribution", "gradients weigh samples already")
METRIC = Seam("a metric", "update_state", "each batch or sample counts once over all replicas")
METRIC_RESULT = Seam("a metric", "result", "what a step returns is found among them")

# Gradients and their update

GRADIENT = Seam("tf.GradientTape", "gradient", "by what is read in place of variables, of sums over replicas")
TAPE = Seam("tf.GradientTape", "__enter__", "a tape records the conversions that it needs")
APPLY = Seam("an optimizer, or all of them", "apply", "gradients are exchanged, and an update rule applies them")
RATE = Seam("an optimizer", "_get_current_learning_rate", "a step reads it after `apply` as after the update")
UPDATE = Seam("an optimizer", "update_step", "a fused operation, and shards that are freed after their update")

# The graph of a step that sees the whole batch

FUNCTION = Seam("the class of tf.function", "__call__", "a graph from before holds the originals: it is traced anew")
OPERATION = Seam("the class of a function's graph", "_create_op_internal", "an operation is made by its rule")
CAPTURE = Seam("the class of a function's graph", "capture", "branches and loops take whole tensors")
SHAPE = Seam("tf.Tensor", "shape", "the user's code reads the number of samples of the whole batch")
GET_SHAPE = Seam("tf.Tensor", "get_shape", "the user's code reads the number of samples of the whole batch")
BRANCH = Seam("the module of tf.cond", "cond", "an assertion is checked without a branch, on rows")
