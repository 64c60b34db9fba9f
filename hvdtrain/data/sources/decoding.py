"""Decoding of images to uint8 pixels."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.data.preprocessing import ImageInputs


def decoded(encoded: tf.Tensor, spec: tf.TensorSpec, *, resize: bool, name: str) -> tf.Tensor:
    """Decode a JPEG or PNG image to uint8 pixels [height, width, channels].

    Args:
        encoded: the file's bytes, a scalar string.
        spec: the expected shape and dtype.
        resize: resize its centre to the size of `spec`; False: it must have that size.
        name: its name in the error if it has another size.
    """
    image = tf.io.decode_image(encoded, spec.shape[2], expand_animations=False)
    if resize:
        return resized(image, *spec.shape[:2])
    shape = list(spec.shape)
    message = f"{name} is not {shape} in size, as the first one is: bring all to one with --data-args image_size"
    with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(image), shape, message)]):
        return tf.ensure_shape(tf.identity(image), shape)


def all_decoded(encoded: tf.Tensor, spec: tf.TensorSpec, *, resize: bool, name: str) -> tf.Tensor:
    """Decode images [n]; see `decoded`. A batch is decoded by one thread, since batches are decoded in parallel."""

    # Not converted by AutoGraph: an error then begins with its cause, not with TensorFlow's traceback.
    @tf.autograph.experimental.do_not_convert
    def one(image: tf.Tensor) -> tf.Tensor:
        return decoded(image, spec, resize=resize, name=name)

    return tf.map_fn(one, encoded, fn_output_signature=spec)


def resized(image: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Resize the largest centre of an image [_, _, channels] with the wanted proportions to [height, width, channels].

    Bilinear, with antialiasing.
    """
    whole = tf.shape(image)
    rows = tf.maximum(tf.minimum(whole[0], whole[1] * height // width), 1)
    columns = tf.maximum(tf.minimum(whole[1], whole[0] * width // height), 1)
    middle = tf.image.crop_to_bounding_box(image, (whole[0] - rows) // 2, (whole[1] - columns) // 2, rows, columns)
    pixels = tf.image.resize(middle, [height, width], antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(pixels), 0.0, 255.0), tf.uint8)


def to_unit(inputs: Any, *rest: Any) -> tuple[Any, ...]:
    """Scale uint8 inputs to float32 in [0, 1]."""

    def turned(tensor: tf.Tensor) -> tf.Tensor:
        return scaled(tensor) if tensor.dtype == tf.uint8 else tensor

    return tf.nest.map_structure(turned, inputs), *rest


def scaled(pixels: tf.Tensor, image: ImageInputs | None = None, *, white: float = 255.0) -> tf.Tensor:
    """Scale pixels to float32 in [0, 1], then apply the mean and std of `image`.

    Args:
        pixels: [..., channels], of any dtype.
        image: whose mean and std; None: none.
        white: the value that becomes 1.
    """
    inputs = tf.cast(pixels, tf.float32) * (1.0 / white)
    if image is not None and image.mean:
        inputs = inputs - tf.constant(image.mean, tf.float32)
    if image is not None and image.std:
        inputs = inputs / tf.constant(image.std, tf.float32)
    return inputs


def finish_of(image: ImageInputs) -> Callable[..., tuple[Any, ...]]:
    """Return the last transformation of batches of decoded images, see `DataSplits.finish`."""

    def finish(inputs: Any, *rest: Any) -> tuple[Any, ...]:
        return scaled(inputs, image), *rest

    return finish
