"""Encoded images, decoded to bytes of pixels."""

from typing import Any

import tensorflow as tf


def decoded(encoded: tf.Tensor, spec: tf.TensorSpec, *, resize: int, name: str) -> tf.Tensor:
    """Return an encoded JPEG or PNG image as bytes of pixels [height, width, channels].

    Args:
        encoded: the file's bytes, a scalar string.
        spec: what it is to be.
        resize: height and width to bring it to, cutting out the middle square first; 0: it must have them.
        name: what it is called where it has other ones.
    """
    image = tf.io.decode_image(encoded, spec.shape[2], expand_animations=False)
    if resize:
        return resized(image, resize)
    shape = list(spec.shape)
    told = f"{name} is not {shape} in size, as the first one is: bring all to one with --data-args image_size"
    with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(image), shape, told)]):
        return tf.ensure_shape(tf.identity(image), shape)


def all_decoded(encoded: tf.Tensor, spec: tf.TensorSpec, *, resize: int, name: str) -> tf.Tensor:
    """Do what `decoded` does for encoded images [n]; a batch is decoded by one thread, several batches by several."""

    # Not converted: an error then begins with what is wrong, and not with a traceback of TensorFlow's own.
    @tf.autograph.experimental.do_not_convert
    def one(image: tf.Tensor) -> tf.Tensor:
        return decoded(image, spec, resize=resize, name=name)

    return tf.map_fn(one, encoded, fn_output_signature=spec)


def resized(image: tf.Tensor, size: int) -> tf.Tensor:
    """Cut the middle square out of an image [height, width, channels] and bring it to [size, size, channels]."""
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    side = tf.minimum(height, width)
    middle = tf.image.crop_to_bounding_box(image, (height - side) // 2, (width - side) // 2, side, side)
    pixels = tf.image.resize(middle, [size, size], antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(pixels), 0.0, 255.0), tf.uint8)


def to_unit(inputs: Any, *rest: Any) -> tuple[Any, ...]:
    """Turn those of the inputs that are bytes of pixels into numbers in [0, 1]."""

    def turned(tensor: tf.Tensor) -> tf.Tensor:
        return tf.cast(tensor, tf.float32) * (1.0 / 255.0) if tensor.dtype == tf.uint8 else tensor

    return tf.nest.map_structure(turned, inputs), *rest
