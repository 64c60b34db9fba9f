"""Pre-norm transformer, as GPT-2 (Radford et al. 2019, section 2.3).

Uses only Keras' own layers, so that a saved model loads without this package.
"""

import math
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.layers.slices import reinitialize
from hvdtrain.models.registry import Rules, classifier, path_seed

STDDEV = 0.02
"""Standard deviation of initial kernels and embeddings, as in GPT-2."""
RESIDUAL_ENDS = ("attention_output/kernel", "mlp_out/kernel")
Mlp = Callable[[Any, int, int], Any]
"""(x [batch, length, width], width, block number) -> residual branch after the attention."""


def build(
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    *,
    depth: int = 6,
    width: int = 320,
    heads: int = 5,
    dropout: float = 0.0,
    causal: bool = True,
) -> keras.Model:
    """Return a (causal) language model, tokens [length] to logits [length, vocabulary].

    With vocabulary V and length L it has 2 V width + V + L width + 2 width + depth (12 width^2 + 13 width) parameters:
    12.7 million at the defaults, 8192 tokens and a length of 128.

    Args:
        shape: (length,) of one sequence of token numbers.
        classes: size of the vocabulary.
        seed: seeds the initial value of each variable, together with its path.
        depth: number of blocks of attention and MLP.
        width: size of a token's representation.
        heads: number of attention heads; must divide the width.
        dropout: dropout rate of the embeddings and of each block's output.
        causal: mask attention to later positions; False attends to all.

    Raises:
        ConfigError: sizes that are not positive or do not divide, or a dropout outside [0, 1).
    """
    sizes: dict[str, Any] = {"depth": depth, "width": width, "heads": heads, "dropout": dropout}
    return language_model(shape, classes, seed, mlp=dense_mlp, name="transformer", causal=causal, **sizes)


def language_model(
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    *,
    mlp: Mlp,
    name: str,
    depth: int,
    width: int,
    heads: int,
    dropout: float,
    causal: bool = True,
) -> keras.Model:
    """Return a model whose blocks apply `mlp` after attention; other arguments as for `build`."""
    if min(depth, width, heads) < 1 or width % heads:
        raise ConfigError(
            "transformer needs a positive depth, width and heads, and heads that divide the width. "
            f"Received: depth={depth}, width={width}, heads={heads}."
        )
    if not 0 <= dropout < 1:
        raise ConfigError(f"transformer needs a dropout in [0, 1). Received: dropout={dropout}.")
    tokens = keras.Input(shape, dtype="int32", name="tokens")
    x = _dropped(_embedded(tokens, shape[0], classes, width), dropout, seed, "embedding")
    for number in range(depth):
        x = _block(x, width=width, heads=heads, dropout=dropout, seed=seed, number=number, causal=causal, mlp=mlp)
    x = keras.layers.LayerNormalization(epsilon=1e-5, name="final_norm")(x)
    logits = keras.layers.Dense(classes, dtype="float32", name="logits")(x)
    model = keras.Model(tokens, logits, name=name)
    _draw(model, seed, depth)
    return model


def _embedded(tokens: Any, length: int, vocabulary: int, width: int) -> Any:
    """Return the sum of token and position embeddings of tokens [batch, length]."""
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    of_tokens = keras.layers.Embedding(vocabulary, width, name="tokens_embedding")(tokens)
    of_positions = keras.layers.Embedding(length, width, name="positions_embedding")(positions)
    return of_tokens + of_positions


def _block(x: Any, width: int, heads: int, dropout: float, seed: int, number: int, causal: bool, mlp: Mlp) -> Any:
    layers, name = keras.layers, f"block{number}"
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_attention_norm")(x)
    attention = layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")
    y = attention(y, y, use_causal_mask=causal)
    x = layers.Add(name=f"{name}_attention_add")([x, _dropped(y, dropout, seed, f"{name}_attention")])
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_mlp_norm")(x)
    y = _dropped(mlp(y, width, number), dropout, seed, f"{name}_mlp")
    return layers.Add(name=f"{name}_mlp_add")([x, y])


def dense_mlp(x: Any, width: int, number: int) -> Any:
    """Apply two dense layers, the hidden one four times as wide."""
    x = keras.layers.Dense(4 * width, activation="gelu", name=f"block{number}_mlp_in")(x)
    return keras.layers.Dense(width, name=f"block{number}_mlp_out")(x)


def _dropped(x: Any, rate: float, seed: int, name: str) -> Any:
    name = f"{name}_dropout"
    return keras.layers.Dropout(rate, seed=path_seed(seed, name), name=name)(x) if rate else x


def _draw(model: keras.Model, seed: int, depth: int) -> None:
    """Initialize each matrix separately: with one seed, Keras' attention starts with query equal to key.

    The last matrix of a residual branch is scaled by 1 / sqrt(2 depth), which bounds the sum of all branches.
    """
    for variable in model.trainable_variables:
        if variable.path.endswith(("kernel", "embeddings")):
            scale = 1 / math.sqrt(2 * depth) if variable.path.endswith(RESIDUAL_ENDS) else 1.0
            draw = keras.initializers.RandomNormal(stddev=STDDEV * scale, seed=path_seed(seed, variable.path))
            reinitialize(variable, draw)


def rules(classes: int, ranks: int, **arguments: Any) -> Rules:
    """Return tp layouts: attention by heads, the MLP by width, embeddings by vocabulary."""
    del classes, ranks, arguments
    return {
        r"_attention/(query|key|value)/kernel$": (None, "tp", None),
        r"_attention/attention_output/kernel$": ("tp", None, None),
        r"_mlp_in/kernel$": (None, "tp"),
        r"_mlp_out/kernel$": ("tp", None),
        r"(^|/)(tokens|positions)_embedding/output$": (None, "tp", None),
        r"(^|/)tokens_embedding/embeddings$": ("tp", None),
        r"(^|/)logits/kernel$": (None, "tp"),
    }


FAMILY = classifier(build, "length", rules=rules)
