"""Transformer with a mixture of experts in every other block.

As in GShard (Lepikhin et al. 2020, arXiv:2006.16668) and Switch (Fedus et al. 2021, arXiv:2101.03961); the rest is
`transformer`.
"""

import math
from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.models.registry import Rules, classifier, path_seed
from hvdtrain.models.transformer import dense_mlp, language_model
from hvdtrain.models.transformer import rules as transformer_rules


def build(
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    *,
    depth: int = 4,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.0,
    experts: int = 8,
    top_k: int = 2,
    every: int = 2,
    capacity_factor: float = 1.25,
    balance_weight: float = 0.01,
    z_weight: float = 0.001,
) -> keras.Model:
    """Return a causal language model, tokens [length] to logits [length, vocabulary].

    Each token uses `top_k` of a block's experts, each an MLP with 4 width hidden units: many parameters, few active per
    token.

    Args:
        shape: (length,) of one sequence of token numbers.
        classes: size of the vocabulary.
        seed: seeds the initial value of each variable, together with its path.
        depth: number of blocks of attention and MLP.
        width: size of a token's representation.
        heads: number of attention heads; must divide the width.
        dropout: dropout rate of the embeddings and of each block's output.
        experts: number of experts per block.
        top_k: experts per token, 1 or 2.
        every: every how many blocks one has experts.
        capacity_factor: an expert's capacity in training, as a multiple of a balanced load; 0: unlimited.
        balance_weight: factor of the load-balance loss.
        z_weight: factor of the router z-loss.

    Raises:
        ConfigError: sizes that are not positive or do not divide, a dropout outside [0, 1), or no block with experts.
    """
    if not 1 <= every <= depth:
        raise ConfigError(
            "moe_transformer needs a block with experts: every must lie between 1 and the depth. "
            f"Received: every={every}, depth={depth}."
        )
    scale = 1 / math.sqrt(2 * depth)

    def mlp(x: Any, width: int, number: int) -> Any:
        if (number + 1) % every:
            return dense_mlp(x, width, number)
        name = f"block{number}_experts"
        return MixtureOfExperts(
            experts,
            4 * width,
            top_k=top_k,
            capacity_factor=capacity_factor or None,
            balance_weight=balance_weight,
            z_weight=z_weight,
            output_scale=scale,
            seed=path_seed(seed, name),
            name=name,
        )(x)

    sizes: dict[str, Any] = {"depth": depth, "width": width, "heads": heads, "dropout": dropout}
    return language_model(shape, classes, seed, mlp=mlp, name="moe_transformer", **sizes)


def rules(classes: int, ranks: int, *, depth: int = 4, every: int = 2, **arguments: Any) -> Rules:
    """Return the tp layouts of `transformer`; experts shard themselves."""
    layouts = transformer_rules(classes, ranks, **arguments)
    dense = any((number + 1) % every for number in range(depth))
    return layouts if dense else {path: layout for path, layout in layouts.items() if "_mlp_" not in path}


FAMILY = classifier(build, "length", rules=rules)
