"""As examples/keras/keras_imagenet_resnet50.py: a model from a changed configuration, rates by epoch, resumed."""

import argparse
import os

import horovod.keras as hvd
from tensorflow import keras
from tensorflow.keras.preprocessing import image

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--train-dir", default=os.path.expanduser("~/imagenet/train"))
parser.add_argument("--val-dir", default=os.path.expanduser("~/imagenet/validation"))
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.h5")
parser.add_argument("--fp16-allreduce", action="store_true", default=False, help="compress gradients")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--base-lr", type=float, default=0.0125, help="learning rate of one worker")
parser.add_argument("--warmup-epochs", type=float, default=5)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005, help="weight decay")
args = parser.parse_args()

hvd.init()

# Only rank 0 needs to find the files.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch")

verbose = 1 if hvd.rank() == 0 else 0

train_gen = image.ImageDataGenerator(width_shift_range=0.33, horizontal_flip=True, rescale=1 / 255)
train_iter = train_gen.flow_from_directory(args.train_dir, batch_size=args.batch_size, target_size=(8, 8))
test_gen = image.ImageDataGenerator(rescale=1 / 255)
test_iter = test_gen.flow_from_directory(args.val_dir, batch_size=args.batch_size, target_size=(8, 8))

inputs = keras.layers.Input((8, 8, 3))
x = keras.layers.Conv2D(8, 3, use_bias=False)(inputs)
x = keras.layers.BatchNormalization()(x)
x = keras.layers.ReLU()(x)
x = keras.layers.GlobalAveragePooling2D()(x)
outputs = keras.layers.Dense(2, activation="softmax")(x)
model = keras.models.Model(inputs, outputs)

compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
initial_lr = args.base_lr * hvd.size()

# Rank 0 alone restores, and the callback below sends what it has.
if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(args.checkpoint_format.format(epoch=resume_from_epoch), compression=compression)
else:
    model_config = model.get_config()
    for layer, layer_config in zip(model.layers, model_config["layers"]):
        if hasattr(layer, "kernel_regularizer"):
            regularizer = keras.regularizers.l2(args.wd)
            layer_config["config"]["kernel_regularizer"] = {
                "class_name": regularizer.__class__.__name__,
                "config": regularizer.get_config(),
            }
        if type(layer) is keras.layers.BatchNormalization:
            layer_config["config"]["momentum"] = 0.9
            layer_config["config"]["epsilon"] = 1e-5
    model = keras.models.Model.from_config(model_config)

    opt = keras.optimizers.SGD(learning_rate=initial_lr, momentum=args.momentum)
    opt = hvd.DistributedOptimizer(opt, compression=compression)
    model.compile(
        loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy", "top_k_categorical_accuracy"]
    )

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=args.warmup_epochs, initial_lr=initial_lr, verbose=verbose),
    hvd.callbacks.LearningRateScheduleCallback(
        start_epoch=args.warmup_epochs, end_epoch=30, multiplier=1.0, initial_lr=initial_lr
    ),
    hvd.callbacks.LearningRateScheduleCallback(start_epoch=30, end_epoch=60, multiplier=1e-1, initial_lr=initial_lr),
    hvd.callbacks.LearningRateScheduleCallback(start_epoch=60, end_epoch=80, multiplier=1e-2, initial_lr=initial_lr),
    hvd.callbacks.LearningRateScheduleCallback(start_epoch=80, multiplier=1e-3, initial_lr=initial_lr),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))

history = model.fit(
    train_iter,
    steps_per_epoch=len(train_iter) // hvd.size(),
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=verbose,
    initial_epoch=resume_from_epoch,
    validation_data=test_iter,
    validation_steps=len(test_iter) // hvd.size(),
)

score = hvd.allreduce(model.evaluate(test_iter, verbose=0))
if verbose:
    print("Test loss:", score[0])
    print("Test accuracy:", score[1])
