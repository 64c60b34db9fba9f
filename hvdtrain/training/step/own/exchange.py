"""Gradients are exchanged where a model's own step applies them: in `apply` of its optimizers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

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
from hvdtrain.training.step.own.replaced import replaced, replaced_in_this_thread


class OptimizerExchange:
    """Exchanges the gradients that a model's step hands to its optimizers.

    Inside `exchanging`, `apply` of each of them takes this replica's gradients and applies those of all replicas, and
    every other optimizer refuses to be used by the thread that traces the step.

    Args:
        model: the model.
        optimizers: its optimizers, by path.
        distribute: wraps an optimizer in one that exchanges gradients.

    Raises:
        ConfigError: an optimizer that exchanges gradients itself, or per microbatch.
    """

    def __init__(
        self, model: Any, optimizers: Mapping[str, Any], distribute: Callable[[Any], DistributedOptimizer]
    ) -> None:
        self.optimizers = dict(optimizers)
        self.used: list[str] = []
        """Paths of the optimizers that the step has applied gradients with, in the order of their first use."""
        self._model = model
        self._distributed = {path: distribute(optimizer) for path, optimizer in optimizers.items()}
        # Variables, since a step may apply gradients in a loop, a condition or a tf.function of its own: a tensor of
        # one graph cannot be read in another.
        self._weight = tf.Variable(0.0, trainable=False, name="local_weight")
        self._norms = {path: tf.Variable(0.0, trainable=False, name="gradient_norm") for path in optimizers}
        self._measure = False
        self._applying = False
        self._calls: dict[str, int] = {}

    @property
    def main(self) -> Any:
        """The optimizer whose learning rate is reported: `model.optimizer`, or the first one where it is not used."""
        path = MAIN if MAIN in self.used or not self.used else self.used[0]
        return self.optimizers.get(path, next(iter(self.optimizers.values())))

    @contextmanager
    def exchanging(self, weight: tf.Tensor, *, measure: bool) -> Iterator[None]:
        """Exchange what is applied inside the context, which a step is traced in.

        Args:
            weight: what this replica's gradients count, such as its samples.
            measure: whether `norm` will be asked for, which costs a pass.
        """
        self._weight.assign(weight)
        self._measure, self._calls = measure, {}
        with ExitStack() as stack:
            stack.enter_context(replaced_in_this_thread(keras.optimizers.Optimizer, "apply", self._elsewhere()))
            for path, optimizer in self.optimizers.items():
                stack.enter_context(replaced(optimizer, "apply", partial(self._apply, path)))
            yield

    def norm(self) -> tf.Tensor:
        """Return the L2 norm of the reduced gradients before clipping: of all optimizers, each one's last."""
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
        """Build an optimizer as Keras does: `model.optimizer` for all that is trained, others for what they get."""
        if not optimizer.built:
            with tf.init_scope():
                everything = optimizer is getattr(self._model, MAIN, None)
                optimizer.build(self._model.trainable_variables if everything else variables)

    def _role(self, path: str) -> str:
        """Return a name for this exchange: two of one step must not be taken for each other."""
        count = self._calls.get(path, 0)
        self._calls[path] = count + 1
        role = "gradient" if path == MAIN else f"gradient/{path}"
        return f"{role}/{count}" if count else role

    def _check_owner(self, path: str, variables: Sequence[Any]) -> None:
        """Refuse variables that are not the model's: nobody broadcasts, compares or saves them."""
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
