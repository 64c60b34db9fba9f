"""Peak memory of a rank by the length of its sequences, alone and with others along `cp`.

Usage: python benchmarks/sequences.py LENGTH
       horovodrun -np 2 python benchmarks/sequences.py LENGTH

Each rank prints what its memory grew by in two training steps, over what it was with the model built.
"""

import resource
import sys

import keras
import numpy as np

import hvdtrain
from hvdtrain.models.transformer import model as transformer

VOCABULARY, SAMPLES, STEPS = 256, 2, 2


def peak_mb() -> float:
    """Return the largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(length: int) -> None:
    """Train on sequences of `length` tokens."""
    hvdtrain.init(parallel="cp=-1")
    model = hvdtrain.parallelize(lambda: transformer.build((length,), VOCABULARY, 1, depth=2, width=128, heads=4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    before = peak_mb()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (SAMPLES * STEPS, length + 1)).astype("int32")
    trainer = hvdtrain.Trainer(model, "adam", loss)
    trainer.fit((tokens[:, :-1], tokens[:, 1:]), batch=SAMPLES, epochs=1, verbose=False)
    print(f"length {length}, cp {hvdtrain.size()}, rank {hvdtrain.rank()}: {peak_mb() - before:.0f} MB", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
