"""Keras variables whose full value is not in memory."""

from typing import Any

from hvdtrain.compat.keras_variables import is_inferring_shapes
from hvdtrain.config.errors import ConfigError, opt


def out_of_reach(kind: type) -> type:
    """Return a Keras variable subclass that refuses reads and assignments."""

    def refuse(variable: Any, *arguments: Any, **named: Any) -> Any:
        raise ConfigError(
            f"Before the first step and between two steps {opt('zero', 3)} keeps slices of the parameters. Received: a "
            f"look at, or an assignment to, all of {variable.path}, as after a training that ended with an error. Call "
            "trainer.consolidate() on every rank before."
        )

    def value(variable: Any) -> Any:
        return kind.value.fget(variable) if is_inferring_shapes() else refuse(variable)  # type: ignore[attr-defined]

    members = {"__array__": refuse, "numpy": refuse, "assign": refuse, "value": property(value)}
    return type(kind.__name__, (kind,), members)
