"""Images of a folder with a class in each subfolder; a training that is stopped goes on where it was.

    horovodrun -np 2 python examples/image_folder.py --folder images --epochs 20

Stop it by Ctrl-C or SIGTERM (a scheduler's pre-emption): it saves after the current step (docs/reliability.md). The
same command goes on from there, on any number of ranks, with the batch that came next. Without such a folder
it writes one, of handwritten digits.
"""

import argparse
from pathlib import Path

import hvdtrain

hvdtrain.init()

import keras
from keras import layers

from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("images"))
parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=64, help="images of a step, over all ranks")
parser.add_argument("--size", type=int, default=16, help="pixels of a side")
args = parser.parse_args()


@hvdtrain.rank_zero_only
def write_digits(folder):
    for number, (image, label) in enumerate(zip(*load_digits(), strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(folder / str(label) / f"{number}.png", image)


if not args.folder.exists():
    write_digits(args.folder)
hvdtrain.barrier()

shape = (args.size, args.size)
train, validation = keras.utils.image_dataset_from_directory(
    args.folder, validation_split=0.2, subset="both", seed=1, batch_size=args.batch, image_size=shape, verbose=False
)
model = keras.Sequential(
    [
        keras.Input((*shape, 3)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(len(train.class_names)),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
trainer.resume(args.checkpoints)  # no effect without a checkpoint
saves = hvdtrain.Checkpoint(args.checkpoints, keep=2, best="val_accuracy")  # after each epoch
trainer.fit(train, epochs=args.epochs, validation_data=validation, checkpoint=saves)
