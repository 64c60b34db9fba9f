"""Split a model among ranks along the axes of the mesh; start here."""

from typing import Any

import keras

from hvdtrain.backends.select import current_exchange
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.context.split import AXIS as CONTEXT
from hvdtrain.parallel.context.split import agree_on_model, separated, split_sequences
from hvdtrain.parallel.tensor.flow.trace import built, input_specs
from hvdtrain.parallel.tensor.parallelize import Parallelization, check_model
from hvdtrain.parallel.tensor.rules import AXIS as TENSOR
from hvdtrain.parallel.tensor.rules import Rules


def parallelize(
    model: Any, rules: Rules | None = None, *, inputs: Any = None, sequence_parallel: bool = False
) -> keras.Model:
    """Return a model that is split among the ranks along `tp` and `cp`, and computes what the whole one does.

    Along `tp` each rank holds slices of the layers: rules map regular expressions of variable paths to layouts, as in
    Keras' `LayoutMap`, one entry for each dim, None or `"tp"`. A kernel that is cut along its output makes a layer
    column parallel, one that is cut along its input row parallel; biases follow. `hvdtrain.FusedHeads` in place of
    `"tp"` is for a kernel of query, key and value. Without a `tp` axis the layers stay whole, and the rules are checked
    nevertheless.

    Along `cp` each rank holds the whole model and computes a slice of the positions of every sequence, which needs no
    rules: sequences are cut where an Embedding looks them up. A rule such as `{"patches/output": (None, "cp", None)}`
    cuts them behind another layer.

    Every rank calls it. See docs/parallel.md.

    Args:
        model: a built Keras model, which is split in place, or a function without arguments that builds one: then no
            process ever holds the whole of more than one variable.
        rules: layouts by regular expression.
        inputs: a batch, or anything with the shapes and dtypes of one, for a model of the user's own class: it tells
            how the model is called.
        sequence_parallel: keep activations between the blocks as slices of the sequence, along `tp`.

    Raises:
        ConfigError: rules that match nothing or do not divide; a layer that cannot be split, or that is given an
            activation which it cannot take; it is named.
        LaunchError: `hvdtrain.init` was not called.
    """
    backend = current_exchange()
    along = backend.along(CONTEXT)
    if along.size > 1 and sequence_parallel:
        raise ConfigError(
            f"{opt('sequence_parallel')} cuts sequences along tp, and cp={along.size} cuts them too: leave out one of "
            "the two."
        )
    of_layers, of_sequences = separated(rules)
    if of_layers or "tp" in backend.axes:
        split = Parallelization(backend.along(TENSOR), of_layers, backend, sequence=sequence_parallel)(model, inputs)
    else:
        split = built(model, inputs)
        check_model(split)
    if along.size > 1:
        agree_on_model(backend, split, input_specs(split, inputs))
        split_sequences(split, along, of_sequences, inputs)
    return split
