"""Decoding of images to uint8 pixels."""

from typing import Any

import tensorflow as tf


def decoded(encoded: tf.Tensor, spec: tf.TensorSpec, *, resize: int, name: str) -> tf.Tensor:
    """Decode a JPEG or PNG image to uint8 pixels [height, width, channels].

    Args:
        encoded: the file's bytes, a scalar string.
        spec: the expected shape and dtype.
        resize: height and width to resize its centre square to; 0: it must have the size of `spec`.
        name: its name in the error if it has another size.
    """
    image = tf.io.decode_image(encoded, spec.shape[2], expand_animations=False)
    if resize:
        return resized(image, resize)
    shape = list(spec.shape)
    message = f"{name} is not {shape} in size, as the first one is: bring all to one with --data-args image_size"
    with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(image), shape, message)]):
        return tf.ensure_shape(tf.identity(image), shape)


def all_decoded(encoded: tf.Tensor, spec: tf.TensorSpec, *, resize: int, name: str) -> tf.Tensor:
    """Decode images [n]; see `decoded`. A batch is decoded by one thread, since batches are decoded in parallel."""

    # Not converted by AutoGraph: an error then begins with its cause, not with TensorFlow's traceback.
    @tf.autograph.experimental.do_not_convert
    def one(image: tf.Tensor) -> tf.Tensor:
        return decoded(image, spec, resize=resize, name=name)

    return tf.map_fn(one, encoded, fn_output_signature=spec)


def resized(image: tf.Tensor, size: int) -> tf.Tensor:
    """Resize the centre square of an image [height, width, channels] to [size, size, channels]."""
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    side = tf.minimum(height, width)
    middle = tf.image.crop_to_bounding_box(image, (height - side) // 2, (width - side) // 2, side, side)
    pixels = tf.image.resize(middle, [size, size], antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(pixels), 0.0, 255.0), tf.uint8)


def to_unit(inputs: Any, *rest: Any) -> tuple[Any, ...]:
    """Scale uint8 inputs to float32 in [0, 1]."""

    def turned(tensor: tf.Tensor) -> tf.Tensor:
        return tf.cast(tensor, tf.float32) * (1.0 / 255.0) if tensor.dtype == tf.uint8 else tensor

    return tf.nest.map_structure(turned, inputs), *rest
