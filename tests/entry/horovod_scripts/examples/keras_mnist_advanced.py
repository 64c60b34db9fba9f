"""As examples/keras/keras_mnist_advanced.py: augmented images, warm-up, and a rate that falls on a plateau."""

import argparse

import horovod.keras as hvd
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import backend as K
from tensorflow.keras.datasets import mnist
from tensorflow.keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from tensorflow.keras.models import Sequential
from tensorflow.keras.preprocessing.image import ImageDataGenerator

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=24)
parser.add_argument("--lr", type=float, default=1.0)
args = parser.parse_args()

hvd.init()

config = tf.compat.v1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
tf.compat.v1.keras.backend.set_session(tf.compat.v1.Session(config=config))

batch_size = args.batch_size
num_classes = 10
epochs = args.epochs

(x_train, y_train), (x_test, y_test) = mnist.load_data()
train_batches = len(x_train) // batch_size
test_batches = len(x_test) // batch_size

assert K.image_data_format() == "channels_last"
x_train = x_train.reshape(-1, 28, 28, 1).astype("float32") / 255
x_test = x_test.reshape(-1, 28, 28, 1).astype("float32") / 255
y_train = keras.utils.to_categorical(y_train, num_classes)
y_test = keras.utils.to_categorical(y_test, num_classes)

model = Sequential()
model.add(Conv2D(8, kernel_size=(3, 3), activation="relu", input_shape=(28, 28, 1)))
model.add(MaxPooling2D(pool_size=(2, 2)))
model.add(Dropout(0.25))
model.add(Flatten())
model.add(Dense(num_classes, activation="softmax"))

scaled_lr = args.lr * hvd.size()
opt = keras.optimizers.Adadelta(learning_rate=scaled_lr)
opt = hvd.DistributedOptimizer(opt)

model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=5, initial_lr=scaled_lr, verbose=1),
    # After the average, so that all workers lower their rates at once.
    keras.callbacks.ReduceLROnPlateau(patience=10, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))

train_gen = ImageDataGenerator(
    rotation_range=8, width_shift_range=0.08, shear_range=0.3, height_shift_range=0.08, zoom_range=0.08
)
test_gen = ImageDataGenerator()

history = model.fit_generator(
    train_gen.flow(x_train, y_train, batch_size=batch_size),
    steps_per_epoch=train_batches // hvd.size(),
    callbacks=callbacks,
    epochs=epochs,
    verbose=1,
    validation_data=test_gen.flow(x_test, y_test, batch_size=batch_size),
    validation_steps=min(3 * test_batches // hvd.size(), test_batches),
)

score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])
