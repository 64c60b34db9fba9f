"""Split a model along the axes of the mesh; start here."""

from typing import Any

import keras

from hvdtrain.backends.select import current_exchange
from hvdtrain.config.facts import Facts
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.options import check
from hvdtrain.parallel.context.split import AXIS as CONTEXT
from hvdtrain.parallel.context.split import agree_on_model, separated, split_sequences
from hvdtrain.parallel.tensor.flow.trace import built, input_specs
from hvdtrain.parallel.tensor.parallelize import Parallelization, check_model
from hvdtrain.parallel.tensor.rules import AXIS as TENSOR
from hvdtrain.parallel.tensor.rules import DECODERS, KERAS_HUB, Rules


def parallelize(
    model: Any, rules: Rules | str | None = None, *, inputs: Any = None, sequence_parallel: bool = False
) -> keras.Model:
    """Return an equivalent model, split along `tp` and `cp`. Collective.

    Along `tp` each rank holds shards of the layers: rules map regular expressions of variable paths to layouts, as in
    Keras' `LayoutMap`, with one entry per dim, None or `"tp"`. A kernel sharded along its output makes a layer
    column-parallel, along its input row-parallel; biases follow. Use `hvdtrain.FusedHeads` instead of `"tp"` for a
    fused query-key-value kernel. Without a `tp` axis, layers stay full, but the rules are still checked.

    Along `cp` each rank holds the full model and computes a shard of the positions of every sequence, without rules:
    sequences are sharded at their Embedding lookup. A rule such as `{"patches/output": (None, "cp", None)}` shards them
    after another layer.

    See docs/parallel.md.

    Args:
        model: a built Keras model, which is split in place, or a function without arguments that builds one: then no
            process ever materializes more than one full variable.
        rules: layouts by regular expression, or "keras_hub" for those of KerasHub's decoders.
        inputs: for a model class of the user's own: a batch, or anything with its shapes and dtypes.
        sequence_parallel: keep activations between blocks sharded along the sequence, over `tp`.

    Raises:
        ConfigError: rules that match nothing or do not divide; a layer that cannot be split, or that receives an
            activation it cannot use; it is named.
        LaunchError: `hvdtrain.init` was not called.

    Example::

        def build():
            hidden = keras.layers.Dense(64, activation="relu", name="up")(inputs := keras.Input((16,)))
            return keras.Model(inputs, keras.layers.Dense(8, name="down")(hidden))

        model = hvdtrain.parallelize(build, {"up/kernel": (None, "tp"), "down/kernel": ("tp", None)})
    """
    backend = current_exchange()
    along = backend.along(CONTEXT)
    check(ModelConfig(sequence_parallel=sequence_parallel), facts=Facts(cp=along.size))
    of_many = rules == KERAS_HUB
    of_layers, of_sequences = separated(DECODERS if of_many else rules)
    if of_layers or "tp" in backend.axes:
        along_tensor = backend.along(TENSOR)
        split = Parallelization(along_tensor, of_layers, backend, sequence=sequence_parallel, of_many=of_many)(
            model, inputs
        )
    else:
        split = built(model, inputs)
        check_model(split)
    if along.size > 1:
        agree_on_model(backend, split, input_specs(split, inputs))
        split_sequences(split, along, of_sequences, inputs)
    return split
