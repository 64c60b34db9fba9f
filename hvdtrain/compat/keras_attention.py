"""Private names of Keras 3's attention layers."""

from collections.abc import Callable
from typing import Any

from hvdtrain.compat import unlike
from hvdtrain.compat.keras import kernel_of


def replace_attention(
    layer: Any, *, attention: Callable[..., Any], mask: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Replace an attention layer's two functions, and return the originals.

    Args:
        layer: a MultiHeadAttention or GroupQueryAttention.
        attention: takes query, key and value by heads, [batch, positions, heads, features], the attention mask and
            further Keras arguments; returns outputs and scores.
        mask: takes query and value, [batch, positions, …], and masks; returns the attention mask.

    Assumes `call` uses the layer's `_compute_attention` and `_compute_attention_mask`.

    Raises:
        CompatibilityError: on call, if it does not: each rank would attend to its own positions alone.
    """
    own, whole_call = (layer._compute_attention, layer._compute_attention_mask), layer.call
    asked: list[bool] = []

    def asked_attention(*args: Any, **options: Any) -> Any:
        asked.append(True)
        return attention(*args, **options)

    def call(*args: Any, **options: Any) -> Any:
        asked.clear()
        outputs = whole_call(*args, **options)
        if not asked:
            raise unlike("keras", replace_attention, f"{type(layer).__name__}.call attends by _compute_attention")
        return outputs

    vars(layer).update(_compute_attention=asked_attention, _compute_attention_mask=mask, call=call)
    return own


def query_kernel(layer: Any) -> Any:
    """Return the query projection's kernel, [features, heads, head features]. Assumes `_query_dense`."""
    return kernel_of(layer._query_dense)


def attention_axes(layer: Any) -> tuple[int, ...]:
    """Return the dims an attention layer attends along; empty if only known on call.

    Assumes `_attention_axes`, which GroupQueryAttention lacks.
    """
    return tuple(getattr(layer, "_attention_axes", None) or ())


def attention_projections(layer: Any) -> list[tuple[Any, int]]:
    """Return an attention layer's projections and their kernels' head dims.

    Assumes `_query_dense`, `_key_dense`, `_value_dense`, `_output_dense` and, for gates, `_gate_dense`.
    """
    gate = getattr(layer, "_gate_dense", None)
    inputs = [layer._query_dense, layer._key_dense, layer._value_dense, *([] if gate is None else [gate])]
    return [*((each, 1) for each in inputs), (layer._output_dense, 0)]
