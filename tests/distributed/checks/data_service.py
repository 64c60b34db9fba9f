"""Training with samples that other processes decode is training."""

import keras
import tensorflow as tf
from builders import BATCH, dense_data, dense_model, per_sample
from world import World, flat_bytes
from worlds import worlds

import hvdtrain


@worlds("mpirun-2", extended=True)
def check_training_by_a_data_service_is_the_same(world: World) -> None:
    """One service for the ranks of this host; bit by bit what the ranks read by themselves."""
    x, y = dense_data("float64")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda row, label: (2 * row, label))
    weights = []
    for service in (None, "local"):
        trainer = hvdtrain.Trainer(
            dense_model("float64", world.rank), keras.optimizers.SGD(0.1), per_sample, backend=world.backend
        )
        for _ in range(2):  # the second training uses the same processes
            trainer.fit(dataset, batch=BATCH, epochs=1, verbose=0, data_service=service)
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
        weights.append(flat_bytes(trainer.model.get_weights()))
    assert weights[0] == weights[1]
