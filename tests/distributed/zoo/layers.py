"""A model around each of Keras' layers: a layer before it learns, too, and one after it mixes its outputs."""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from zoo.cases import ACCUMULATE, ALWAYS, RANKS, SAMPLES, SERVED, SYNC, Case

RNG = np.random.default_rng(0)
DRAWS = "each rank draws its own random numbers, unless the step has code of one's own: those of one process then"
TARGETS = RNG.standard_normal((SAMPLES, 2))
WORDS = np.array(list(string.ascii_lowercase[:10]))
VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (5, 4), (6, 6, 4), (4, 4, 4, 2)


@dataclass(frozen=True)
class Layer:
    """How a layer is made, and on what it is called."""

    make: Callable[[], Any]
    shapes: tuple[tuple[int, ...], ...]
    kind: str = "values"
    mask: bool = False
    call: Callable[[Any, list[Any]], Any] = lambda layer, inputs: layer(inputs[0] if len(inputs) == 1 else inputs)
    dtype: str = "float64"
    unequal: Mapping[str, str] | None = None
    refused: Mapping[str, str] | None = None

    def case(self) -> Case:
        x = [values_of(self.kind, shape, self.mask) for shape in self.shapes]
        return Case(
            self.model,
            x[0] if len(x) == 1 else x,
            TARGETS,
            dtype=self.dtype,
            unequal=self.unequal or {},
            refused=self.refused or {},
        )

    def model(self) -> keras.Model:
        dtype = {"words": "string", "numbers": "int32"}.get(self.kind)
        inputs = [keras.Input(shape, dtype=dtype) for shape in self.shapes]
        hidden = [layers.Masking(-9.0)(each) for each in inputs] if self.mask else inputs
        if self.kind == "values":
            hidden = [layers.Dense(each.shape[-1], name=f"before_{i}")(each) for i, each in enumerate(hidden)]
        outputs = keras.tree.flatten(self.call(self.make(), hidden))
        scale = layers.Rescaling(1e-3 if self.kind == "pixels" else 0.1)
        flat = [layers.Flatten()(scale(each)) if len(each.shape) > 2 else each for each in outputs]
        joined = layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
        return keras.Model(inputs if len(inputs) > 1 else inputs[0], layers.Dense(2)(layers.Rescaling(0.5)(joined)))


def values_of(kind: str, shape: tuple[int, ...], mask: bool) -> np.ndarray:
    """Return samples of a kind, the same each time; those of a mask end early in two of three samples."""
    rng = np.random.default_rng(0)
    shape = (SAMPLES, *shape)
    if kind == "numbers":
        return rng.integers(1, 10, shape).astype("int32")
    if kind == "words":
        return tf.constant(WORDS[rng.integers(0, 10, shape)])
    if kind == "pixels":
        return rng.integers(0, 256, shape).astype("float64")
    values = rng.standard_normal(shape)
    if mask:
        for number in range(SAMPLES):
            values[number, shape[1] - number % 3 :] = -9.0
    return values


def of(make: Callable[[], Any], *shapes: tuple[int, ...], **more: Any) -> Layer:
    return Layer(make, shapes, **more)


def drawn(make: Callable[[], Any], *shapes: tuple[int, ...], **more: Any) -> Layer:
    return Layer(make, shapes, unequal={ALWAYS: DRAWS}, **more)


def adapted(layer: Any, values: Any) -> Any:
    layer.adapt(values)
    return layer


def sequences(make: Callable[[], Any], *shapes: tuple[int, ...]) -> Layer:
    return Layer(make, shapes, mask=True)


def both_ways(layer: Any, inputs: list[Any]) -> Any:
    return layer(layers.Dense(3)(layer(inputs[0])), reverse=True)


class Scale(layers.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", regularizer="l2")

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale


BATCH_STATISTICS = "normalizes each rank's slice by itself; sync_batch_norm=True (synchronized=True is refused)"
CORE = {
    "Activation": of(lambda: layers.Activation("tanh"), VECTOR),
    "ActivityRegularization": of(lambda: layers.ActivityRegularization(l1=0.01, l2=0.02), VECTOR),
    "Add": of(layers.Add, VECTOR, VECTOR),
    "Average": of(layers.Average, VECTOR, VECTOR, VECTOR),
    "BatchNormalization": of(
        lambda: layers.BatchNormalization(momentum=0.9, epsilon=0.01, scale=False),
        SEQUENCE,
        unequal={RANKS: BATCH_STATISTICS, ACCUMULATE: "normalizes each micro-batch by itself", SYNC: ""},
    ),
    "Concatenate": of(lambda: layers.Concatenate(axis=1), (4, 3), (2, 3)),
    "Dense": of(
        lambda: layers.Dense(3, "tanh", kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2"),
        VECTOR,
    ),
    "Dot": of(lambda: layers.Dot(axes=1, normalize=True), (4, 3), (4, 2)),
    "ELU": of(lambda: layers.ELU(alpha=0.5), VECTOR),
    "EinsumDense": of(lambda: layers.EinsumDense("abc,cd->abd", output_shape=(5, 3), bias_axes="d"), SEQUENCE),
    "Embedding": of(lambda: layers.Embedding(10, 3, embeddings_regularizer="l2"), (5,), kind="numbers"),
    "Flatten": of(lambda: layers.Flatten("channels_first"), SEQUENCE),
    "GroupNormalization": of(lambda: layers.GroupNormalization(groups=2, epsilon=0.01), SEQUENCE),
    "Identity": of(layers.Identity, VECTOR),
    "InputLayer": of(lambda: layers.InputLayer((6,)), VECTOR, call=lambda layer, inputs: inputs[0]),
    "Lambda": of(lambda: layers.Lambda(lambda x: x * x, output_shape=(6,)), VECTOR),
    "Layer": of(Scale, VECTOR),
    "LayerNormalization": of(lambda: layers.LayerNormalization(axis=[1, 2], center=False, epsilon=0.01), SEQUENCE),
    "LeakyReLU": of(lambda: layers.LeakyReLU(negative_slope=0.2), VECTOR),
    "Masking": sequences(lambda: layers.Masking(0.0), SEQUENCE),
    "Maximum": of(layers.Maximum, VECTOR, VECTOR),
    "Minimum": of(layers.Minimum, VECTOR, VECTOR),
    "Multiply": of(layers.Multiply, VECTOR, VECTOR),
    "PReLU": of(lambda: layers.PReLU(alpha_initializer="ones", shared_axes=[1]), SEQUENCE),
    "Permute": of(lambda: layers.Permute((2, 1)), SEQUENCE),
    "RMSNormalization": of(lambda: layers.RMSNormalization(epsilon=0.01), SEQUENCE),
    "ReLU": of(lambda: layers.ReLU(max_value=1.0, negative_slope=0.1, threshold=0.1), VECTOR),
    "RepeatVector": of(lambda: layers.RepeatVector(3), VECTOR),
    "Reshape": of(lambda: layers.Reshape((2, -1)), VECTOR),
    "ReversibleEmbedding": of(
        lambda: layers.ReversibleEmbedding(10, 3, tie_weights=False, logit_soft_cap=2.0),
        (5,),
        kind="numbers",
        call=both_ways,
    ),
    "Softmax": of(lambda: layers.Softmax(axis=1), SEQUENCE),
    "SpectralNormalization": of(
        lambda: layers.SpectralNormalization(layers.Dense(3), power_iterations=2),
        VECTOR,
        refused={  # it assigns to its kernel in each pass
            ACCUMULATE: "every rank must hold the same weights",
            SERVED: "a layer that assigns to its own",
        },
    ),
    "Subtract": of(layers.Subtract, VECTOR, VECTOR),
    "UnitNormalization": of(lambda: layers.UnitNormalization(axis=1), SEQUENCE),
    "Wrapper": of(lambda: Doubled(layers.Dense(3)), VECTOR),
}


class Doubled(layers.Wrapper):
    def call(self, inputs: Any) -> Any:
        return 2 * self.layer(inputs)


DRAWING = {
    "AlphaDropout": drawn(lambda: layers.AlphaDropout(0.3, noise_shape=(None, 1, 4)), SEQUENCE),
    "Dropout": drawn(lambda: layers.Dropout(0.3, noise_shape=(None, 1, 4)), SEQUENCE),
    "GaussianDropout": drawn(lambda: layers.GaussianDropout(0.3), VECTOR),
    "GaussianNoise": drawn(lambda: layers.GaussianNoise(0.3), VECTOR),
    "SpatialDropout1D": drawn(lambda: layers.SpatialDropout1D(0.3), SEQUENCE),
    "SpatialDropout2D": drawn(lambda: layers.SpatialDropout2D(0.3), IMAGE),
    "SpatialDropout3D": drawn(lambda: layers.SpatialDropout3D(0.3), VOLUME),
}


def attended(layer: Any, inputs: list[Any]) -> Any:
    return layer(inputs[0], inputs[1])


RECURRENT = {
    "AdditiveAttention": sequences(lambda: layers.AdditiveAttention(use_scale=False), SEQUENCE, SEQUENCE),
    "Attention": sequences(lambda: layers.Attention(use_scale=True, score_mode="concat"), SEQUENCE, SEQUENCE),
    "Bidirectional": sequences(
        lambda: layers.Bidirectional(layers.LSTM(3), merge_mode="sum", backward_layer=layers.GRU(3, go_backwards=True)),
        SEQUENCE,
    ),
    "ConvLSTM1D": of(lambda: layers.ConvLSTM1D(2, 2, padding="same", return_sequences=True), (3, 4, 2)),
    "ConvLSTM2D": of(lambda: layers.ConvLSTM2D(2, 2, strides=2, unit_forget_bias=False), (3, 4, 4, 2)),
    "ConvLSTM3D": of(lambda: layers.ConvLSTM3D(2, 2, go_backwards=True), (2, 3, 3, 3, 2)),
    "GRU": sequences(lambda: layers.GRU(3, reset_after=False, return_sequences=True), SEQUENCE),
    "GRUCell": sequences(lambda: layers.RNN(layers.GRUCell(3, use_bias=False)), SEQUENCE),
    "GroupQueryAttention": Layer(
        lambda: layers.GroupQueryAttention(head_dim=2, num_query_heads=4, num_key_value_heads=2, use_bias=False),
        (SEQUENCE, SEQUENCE),
        mask=True,
        call=attended,
    ),
    "LSTM": sequences(lambda: layers.LSTM(3, go_backwards=True, kernel_regularizer="l2"), SEQUENCE),
    "LSTMCell": sequences(lambda: layers.RNN(layers.LSTMCell(3), return_sequences=True), SEQUENCE),
    "MultiHeadAttention": Layer(
        lambda: layers.MultiHeadAttention(2, 3, value_dim=2, use_bias=False),
        (SEQUENCE, SEQUENCE),
        mask=True,
        call=attended,
    ),
    "RNN": sequences(lambda: layers.RNN(layers.SimpleRNNCell(3), unroll=True, go_backwards=True), SEQUENCE),
    "SimpleRNN": sequences(lambda: layers.SimpleRNN(3, activation="relu", return_sequences=True), SEQUENCE),
    "SimpleRNNCell": sequences(lambda: layers.RNN(layers.SimpleRNNCell(3, use_bias=False)), SEQUENCE),
    "StackedRNNCells": sequences(
        lambda: layers.RNN(layers.StackedRNNCells([layers.GRUCell(3), layers.LSTMCell(2)])), SEQUENCE
    ),
    "TimeDistributed": sequences(lambda: layers.TimeDistributed(layers.Dense(3)), SEQUENCE),
}
CONVOLUTIONS = {
    "Conv1D": of(lambda: layers.Conv1D(4, 2, padding="causal", dilation_rate=2, groups=2), SEQUENCE),
    "Conv1DTranspose": of(lambda: layers.Conv1DTranspose(3, 2, strides=2, padding="same"), SEQUENCE),
    "Conv2D": of(lambda: layers.Conv2D(3, (2, 3), strides=(2, 1), use_bias=False), IMAGE),
    "Conv2DTranspose": of(lambda: layers.Conv2DTranspose(3, 3, strides=2, output_padding=1), IMAGE),
    "Conv3D": of(lambda: layers.Conv3D(3, 2, kernel_regularizer="l2"), VOLUME),
    "Conv3DTranspose": of(lambda: layers.Conv3DTranspose(3, 2, strides=2), (3, 3, 3, 2)),
    "Cropping1D": of(lambda: layers.Cropping1D((1, 2)), SEQUENCE),
    "Cropping2D": of(lambda: layers.Cropping2D(((1, 0), (0, 2))), IMAGE),
    "Cropping3D": of(lambda: layers.Cropping3D((1, 1, 0)), VOLUME),
    "DepthwiseConv1D": of(lambda: layers.DepthwiseConv1D(2, depth_multiplier=2), SEQUENCE),
    "DepthwiseConv2D": of(lambda: layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2), IMAGE),
    "SeparableConv1D": of(lambda: layers.SeparableConv1D(3, 2, depth_multiplier=2), SEQUENCE),
    "SeparableConv2D": of(lambda: layers.SeparableConv2D(3, 2, dilation_rate=2), IMAGE),
    "UpSampling1D": of(lambda: layers.UpSampling1D(3), SEQUENCE),
    "UpSampling2D": of(lambda: layers.UpSampling2D((2, 3), interpolation="bilinear"), IMAGE),
    "UpSampling3D": of(lambda: layers.UpSampling3D((1, 2, 2)), VOLUME),
    "ZeroPadding1D": of(lambda: layers.ZeroPadding1D((1, 2)), SEQUENCE),
    "ZeroPadding2D": of(lambda: layers.ZeroPadding2D(((1, 0), (0, 2))), IMAGE),
    "ZeroPadding3D": of(lambda: layers.ZeroPadding3D((1, 1, 0)), VOLUME),
}
PLACES = ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))
POOLING = {
    **{
        name: of(partial(getattr(layers, name), 2), shape, dtype="float32" if n == 3 else "float64")
        for n, shape in PLACES
        for name in (f"AdaptiveAveragePooling{n}D", f"AdaptiveMaxPooling{n}D")
    },
    **{
        name: of(
            partial(getattr(layers, name), 2, strides=1, padding="same"),
            shape,
            dtype="float32" if n == 3 else "float64",
        )
        for n, shape in PLACES
        for name in (f"AveragePooling{n}D", f"MaxPooling{n}D")
    },
    **{
        name: of(partial(getattr(layers, name), keepdims=True), shape, mask=n == 1)
        for n, shape in PLACES
        for name in (f"GlobalAveragePooling{n}D", f"GlobalMaxPooling{n}D")
    },
}
PICTURES = (8, 8, 3)


def pixels(make: Callable[[], Any], **more: Any) -> Layer:
    return Layer(make, (PICTURES,), kind="pixels", dtype="float32", **more)


def drawn_pixels(make: Callable[[], Any]) -> Layer:
    return Layer(make, (PICTURES,), kind="pixels", dtype="float32", unequal={ALWAYS: DRAWS})


PREPROCESSING = {
    "CategoryEncoding": of(lambda: layers.CategoryEncoding(10, output_mode="count"), (5,), kind="numbers"),
    "Discretization": of(
        lambda: adapted(layers.Discretization(num_bins=4, output_mode="one_hot"), np.linspace(-2, 2, 50)[:, None]), (1,)
    ),
    "HashedCrossing": Layer(
        lambda: layers.HashedCrossing(7, output_mode="one_hot"),
        ((1,), (1,)),
        kind="words",
        call=lambda layer, inputs: layer(tuple(inputs)),
    ),
    "Hashing": of(lambda: layers.Hashing(7, salt=3, output_mode="multi_hot"), (5,), kind="words"),
    "IntegerLookup": of(
        lambda: adapted(layers.IntegerLookup(num_oov_indices=2, output_mode="tf_idf"), np.arange(1, 7)[:, None]),
        (5,),
        kind="numbers",
    ),
    "MelSpectrogram": of(
        lambda: layers.MelSpectrogram(
            fft_length=16, sequence_stride=8, num_mel_bins=4, min_freq=0.0, power_to_db=False
        ),
        (32,),
        dtype="float32",
    ),
    "Normalization": of(
        lambda: adapted(layers.Normalization(axis=-1), 3 + 2 * np.random.default_rng(1).standard_normal((50, 6))),
        VECTOR,
    ),
    "Rescaling": of(lambda: layers.Rescaling(0.5, offset=-1.0), VECTOR),
    "STFTSpectrogram": of(lambda: layers.STFTSpectrogram("real", 8, 4, fft_length=8, window="hamming"), (32, 1)),
    "StringLookup": of(
        lambda: layers.StringLookup(vocabulary=list(WORDS[:6]), num_oov_indices=2, output_mode="count"),
        (5,),
        kind="words",
    ),
    "TextVectorization": Layer(
        lambda: adapted(layers.TextVectorization(standardize=None, output_mode="multi_hot"), WORDS[:6]),
        ((1,),),
        kind="words",
    ),
    # Images
    "AugMix": drawn_pixels(lambda: layers.AugMix(num_chains=2, chain_depth=1)),
    "AutoContrast": pixels(layers.AutoContrast),
    "CenterCrop": pixels(lambda: layers.CenterCrop(4, 6)),
    "ContrastLimitedAdaptiveHistogramEqualization": pixels(
        lambda: layers.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2))
    ),
    "CutMix": drawn_pixels(lambda: layers.CutMix(factor=0.8)),
    "Equalization": pixels(lambda: layers.Equalization(bins=64)),
    "MaxNumBoundingBoxes": pixels(lambda: layers.MaxNumBoundingBoxes(3)),
    "MixUp": drawn_pixels(lambda: layers.MixUp(alpha=0.4)),
    "Pipeline": pixels(lambda: layers.Pipeline([layers.Rescaling(0.1), layers.CenterCrop(4, 4)])),
    "RandAugment": drawn_pixels(lambda: layers.RandAugment(num_ops=1)),
    "RandomBrightness": drawn_pixels(lambda: layers.RandomBrightness(0.3)),
    "RandomColorDegeneration": drawn_pixels(lambda: layers.RandomColorDegeneration(0.5)),
    "RandomColorJitter": drawn_pixels(lambda: layers.RandomColorJitter(brightness_factor=0.3, contrast_factor=0.3)),
    "RandomContrast": drawn_pixels(lambda: layers.RandomContrast(0.3)),
    "RandomCrop": Layer(
        lambda: layers.RandomCrop(4, 6),
        (PICTURES,),
        kind="pixels",
        dtype="float32",
        call=lambda layer, inputs: layers.GlobalAveragePooling2D()(layer(inputs[0])),  # it crops in training alone
        unequal={ALWAYS: DRAWS},
    ),
    "RandomElasticTransform": drawn_pixels(lambda: layers.RandomElasticTransform(0.9, 0.5)),
    "RandomErasing": drawn_pixels(lambda: layers.RandomErasing(0.9)),
    "RandomFlip": drawn_pixels(lambda: layers.RandomFlip("horizontal")),
    "RandomGaussianBlur": drawn_pixels(lambda: layers.RandomGaussianBlur(0.9, kernel_size=3)),
    "RandomGrayscale": drawn_pixels(lambda: layers.RandomGrayscale(0.5)),
    "RandomHue": drawn_pixels(lambda: layers.RandomHue(0.3)),
    "RandomInvert": drawn_pixels(lambda: layers.RandomInvert(0.5)),
    "RandomPerspective": drawn_pixels(lambda: layers.RandomPerspective(0.9, 0.5)),
    "RandomPosterization": drawn_pixels(lambda: layers.RandomPosterization(4)),
    "RandomRotation": drawn_pixels(lambda: layers.RandomRotation(0.2, fill_mode="constant")),
    "RandomSaturation": drawn_pixels(lambda: layers.RandomSaturation(0.3)),
    "RandomSharpness": drawn_pixels(lambda: layers.RandomSharpness(0.5)),
    "RandomShear": drawn_pixels(lambda: layers.RandomShear(0.2, 0.2)),
    "RandomTranslation": drawn_pixels(lambda: layers.RandomTranslation(0.2, 0.2)),
    "RandomZoom": drawn_pixels(lambda: layers.RandomZoom(0.2)),
    "Resizing": pixels(lambda: layers.Resizing(5, 4, interpolation="nearest")),
    "Solarization": drawn_pixels(lambda: layers.Solarization(0.1, threshold_factor=0.4)),
}
WITH_STATE = (
    *("Discretization", "IntegerLookup", "Normalization", "StringLookup", "TextVectorization"),
    *("CutMix", "Pipeline", "RandomFlip", "RandomZoom"),
)
"""What is adapted to data, and some of those that draw, all of which keep a seed."""
OTHER_IN_OWN_STEPS = {"RandomElasticTransform"}
"""Draws for one image where Keras does not know how many there are."""
WITHOUT_CASE = {
    "FlaxLayer": "needs JAX",
    "JaxLayer": "needs JAX",
    "TFSMLayer": "reads a SavedModel; its variables are TensorFlow's",
    "TorchModuleWrapper": "needs PyTorch",
}
GROUPS: Sequence[Mapping[str, Layer]] = (CORE, DRAWING, RECURRENT, CONVOLUTIONS, POOLING, PREPROCESSING)


def learns(layer: Layer) -> bool:
    """Return whether a layer has variables or a loss, beside those of the model around it."""
    model = layer.model()
    around = [each for each in model.layers if each.name.startswith("before_")] + [model.layers[-1]]
    held = sum(len(each.variables) for each in around)
    return len(model.variables) > held or any(getattr(each, "activity_regularizer", None) for each in model.layers)


def learning(group: Mapping[str, Layer]) -> list[str]:
    return [name for name, layer in group.items() if learns(layer)]


def cases() -> dict[str, Case]:
    return {name: layer.case() for group in GROUPS for name, layer in group.items()}
