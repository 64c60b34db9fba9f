"""A language model of characters whose matrices (tp) and layers (pp) are divided among the ranks.

    horovodrun -np 2 python examples/language_model.py --tp 2
    horovodrun -np 4 python examples/language_model.py --tp 2 --pp 2 --text book.txt

Shows the loss of the next character, nearly 5 at first, 2.3 after two epochs. All layouts and one rank train alike.
"""

import argparse
from pathlib import Path

import hvdtrain

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1, help="ranks that divide each matrix")
parser.add_argument("--pp", type=int, default=1, help="ranks that divide the layers")
parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="default: a file of Python's library")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--width", type=int, default=128)
args = parser.parse_args()

hvdtrain.init(mesh={"tp": args.tp, "pp": args.pp})

import keras
import numpy as np
from keras import layers, ops

LENGTH, HEADS, BLOCKS = 64, 4, 4


def build(words: int) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    places = ops.cumsum(ops.ones_like(tokens), axis=1) - 1  # 0, 1, 2 …, whatever part of a sequence a rank has
    x = layers.Embedding(words, args.width, name="words")(tokens)
    x = x + layers.Embedding(LENGTH, args.width, name="places")(places)
    for block in range(BLOCKS):
        y = layers.LayerNormalization(name=f"norm{block}a")(x)
        y = layers.MultiHeadAttention(HEADS, args.width // HEADS, name=f"attention{block}")(y, y, use_causal_mask=True)
        x = x + y
        y = layers.LayerNormalization(name=f"norm{block}b")(x)
        y = layers.Dense(4 * args.width, activation="gelu", name=f"up{block}")(y)
        x = x + layers.Dense(args.width, name=f"down{block}")(y)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(words, name="logits")(x))


rules = {  # dims of the kernels that are divided along tp
    r"attention\d/(query|key|value)/kernel": (None, "tp", None),  # by heads
    r"attention\d/attention_output/kernel": ("tp", None, None),
    r"up\d/kernel": (None, "tp"),  # by columns
    r"down\d/kernel": ("tp", None),  # by rows
    r"logits/kernel": (None, "tp"),  # by words
}
text = args.text.read_text(encoding="utf-8")
words = sorted(set(text))
numbers = np.searchsorted(words, list(text)).astype("int32")
rows = (len(numbers) - 1) // LENGTH
x, y = (numbers[first : first + rows * LENGTH].reshape(rows, LENGTH) for first in (0, 1))

model = hvdtrain.parallelize(lambda: build(len(words)), rules) if args.tp > 1 else lambda: build(len(words))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accumulate = 4 if args.pp > 1 else 1  # microbatches follow one another through the stages
trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(1e-3), loss, accumulate=accumulate, clip_norm=1.0)
trainer.fit(x, y, batch=32, epochs=args.epochs, shuffle=False)
