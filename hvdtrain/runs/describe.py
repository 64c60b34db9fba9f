"""Describes a trained model for its later use; see `description.py`."""

from typing import Any

import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.data.source import batch_spec
from hvdtrain.data.splits import DataSplits
from hvdtrain.models.objective import output_kind
from hvdtrain.runs.description import RunDescription


def describe_run(config: DataConfig, splits: DataSplits, model: Any, loss: Any) -> RunDescription:
    """Return the description of a model for the samples of `splits`.

    Args:
        config: options of the data.
        splits: the samples that it is trained on.
        model: a built Keras model.
        loss: its loss, or a dict or list of losses.
    """
    kind = output_kind(model, loss, splits.classes)
    return RunDescription(
        data=config.data,
        inputs=_signature(splits),
        classes=splits.classes,
        outputs=kind,
        preprocessing=splits.preprocessing,
    )


def _signature(splits: DataSplits) -> Any:
    """Return dtype and shape of the inputs as the model gets them."""
    specs = splits.train.spec
    if splits.finish is not None:
        # Traced, not computed: nothing is read.
        finish = tf.function(splits.finish, autograph=False)
        specs = finish.get_concrete_function(*batch_spec(splits.train)).structured_outputs
        specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape[1:], tensor.dtype), specs)
    return _plain(specs[0])


def _plain(spec: Any) -> Any:
    if isinstance(spec, dict):
        return {name: _plain(part) for name, part in spec.items()}
    if isinstance(spec, tuple | list):
        return [_plain(part) for part in spec]
    return {"dtype": spec.dtype.name, "shape": spec.shape.as_list()}
