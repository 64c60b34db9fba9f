"""Models by name: built-in families, or a user's function."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.registry import check_arguments, resolve
from hvdtrain.config.user_code import arguments_for, is_user_code, load_function
from hvdtrain.models.objective import check_probabilities, named_loss, named_metrics, on_logits

Rules: TypeAlias = Mapping[str, Sequence[str | None]]
"""Layout rules by regular expression of variable paths, as for `hvdtrain.parallelize`."""


@dataclass(frozen=True)
class ModelFamily:
    """A model builder with its default loss and metrics."""

    build: Callable[..., keras.Model]
    """(input shape, classes, seed, **arguments) -> a built model."""
    loss: Callable[[], Any]
    """Returns the loss for `Trainer`."""
    metrics: Callable[[], Any]
    """Returns the metrics for `Trainer`, new objects on each call."""
    shards_tables: bool = False
    """Whether `build` takes the sharding of its embedding tables as a fourth argument."""
    sample_dims: tuple[str, ...] | dict[str, tuple[str, ...]] | None = None
    """Names of a sample's dims, by input if there are several; None: one input of any shape."""
    rules: Callable[..., Rules] | None = None
    """(classes, ranks, **arguments) -> layout rules for tp; None if unsupported."""


def classifier(
    build: Callable[..., keras.Model], *sample_dims: str, rules: Callable[..., Rules] | None = None
) -> ModelFamily:
    """Return a classifier family: cross-entropy of logits, and accuracy."""
    return ModelFamily(
        build=build,
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        sample_dims=sample_dims or None,
        rules=rules,
    )


def dense(x: Any, units: int, seed: int, name: str, **options: Any) -> Any:
    """Apply a dense layer whose initial kernel depends on (seed, name)."""
    # He et al. 2015, "Delving Deep into Rectifiers": keeps the size of activations over any number of layers.
    initializer = keras.initializers.HeNormal(seed=path_seed(seed, name))
    return keras.layers.Dense(units, kernel_initializer=initializer, name=name, **options)(x)


def path_seed(seed: int, path: str) -> int:
    """Derive a variable's seed from the run's seed and the variable's path."""
    return zlib.crc32(f"{seed}/{path}".encode()) & 0x7FFFFFFF


MODELS = {
    "small_cnn": "hvdtrain.models.small_cnn:FAMILY",
    "resnet": "hvdtrain.models.resnet:FAMILY",
    "resnet_imagenet": "hvdtrain.models.resnet:IMAGENET_FAMILY",
    "mlp": "hvdtrain.models.mlp:FAMILY",
    "transformer": "hvdtrain.models.transformer:FAMILY",
    "moe_transformer": "hvdtrain.models.moe_transformer:FAMILY",
    "bert": "hvdtrain.models.bert:FAMILY",
    "dlrm": "hvdtrain.models.dlrm:FAMILY",
}


def model_family(config: ModelConfig) -> ModelFamily:
    """Return the family of `config.model` with `config.loss` and `config.metrics` applied.

    Raises ConfigError for an unknown model, argument, loss or metric, an invalid user model, or embedding sharding
    without tables.
    """
    own = is_user_code(config.model)
    family: ModelFamily = _user_family(config) if own else resolve("model", config.model, MODELS)
    if not own:
        check_arguments("model", config.model, family.build, config.model_args)
    if config.embedding_sharding != "none" and not family.shards_tables:
        raise ConfigError(
            "--embedding-sharding divides the tables of --model dlrm among ranks. Received: "
            f"--embedding-sharding {config.embedding_sharding}, --model {config.model}. Leave it out, or "
            "give a model of your own hvdtrain.ShardedEmbedding layers."
        )
    loss = family.loss() if config.loss is None else named_loss(config.loss)
    loss = loss if own else on_logits(loss)
    metrics = config.metrics
    if metrics is not None:
        named_metrics(metrics)  # a wrong name is refused before anything is built
    metrics_of = family.metrics if metrics is None else lambda: named_metrics(metrics)
    return replace(family, loss=lambda: loss, metrics=metrics_of)


def build_model(config: ModelConfig, shape: Any, classes: int | None, seed: int) -> keras.Model:
    """Build the model specified by `config`.

    Args:
        config: model and arguments.
        shape: shape of one sample, or a nest of shapes like the inputs.
        classes: number of labels; None if the targets are not labels.
        seed: seeds the initial values.

    Raises:
        ConfigError: as `model_family`; or the family does not accept such samples.
    """
    family = model_family(config)
    if is_user_code(config.model):
        model = family.build(shape, classes, seed, **config.model_args)
        check_probabilities(model, family.loss())
        return model
    _check_samples(config.model, family, shape)
    if classes is None:
        raise ConfigError(
            f"The model {config.model!r} needs the number of classes, which the data do not tell: their targets are no "
            "integer labels, or are streamed. Give --model a function of your own, or let --data return labels, name "
            "them (FUNCTION.classes = [...]) or hold them with --cache memory."
        )
    sharding = [config.embedding_sharding] if family.shards_tables else []
    return family.build(shape, classes, seed, *sharding, **config.model_args)


def layout_rules(config: ModelConfig, classes: int | None, ranks: int) -> Rules | None:
    """Return the model's layout rules for tp, or None. Raises ConfigError if `ranks` need missing ones."""
    rules = model_family(config).rules
    if rules is not None and (ranks > 1 or is_user_code(config.model)):
        return rules(classes, ranks, **config.model_args)
    if ranks == 1:
        return None
    if is_user_code(config.model):
        last = config.model.rpartition(":")[2]
        raise ConfigError(
            f"--parallel tp={ranks} splits the layers of the model, and --model {config.model} says nothing of how: "
            f'write {last}.rules = {{"REGULAR EXPRESSION": (None, "tp")}} below the function (docs/tensor_parallel.md).'
        )
    known = [name for name in MODELS if resolve("model", name, MODELS).rules is not None]
    raise ConfigError(
        f"--parallel tp={ranks} splits the layers of the model, and there are no rules for {config.model!r}. "
        f"Models with rules: {', '.join(known)}."
    )


def _check_samples(name: str, family: ModelFamily, shape: Any) -> None:
    wanted = family.sample_dims
    if isinstance(wanted, dict):
        alike = isinstance(shape, dict) and shape.keys() == wanted.keys()
        fits = alike and all(_has_dims(shape[part], dims) for part, dims in wanted.items())
        takes = ", ".join(f"{part} {_listed(dims)}" for part, dims in wanted.items())
    else:
        fits, takes = _has_dims(shape, wanted), _listed(wanted)
    if not fits:
        raise ConfigError(
            f"The model {name!r} takes samples {takes}; the data's are of shape {shape}. See --model, --data."
        )


def _has_dims(shape: Any, dims: tuple[str, ...] | None) -> bool:
    """Return whether `shape` is that of one array with these dims; None: any number of dims."""
    plain = isinstance(shape, tuple) and all(isinstance(dim, int) for dim in shape)
    return plain and (dims is None or len(dims) == len(shape))


def _listed(dims: tuple[str, ...] | None) -> str:
    return "of one array" if dims is None else f"[{', '.join(dims)}]"


def _user_family(config: ModelConfig) -> ModelFamily:
    """Wrap the user's function `config.model` as a model family.

    The function is called with `config.model_args`, and with `sample_shape`, `classes` and `seed` if it has such
    parameters. Python's, NumPy's and Keras' generators are seeded, so that Keras layers start identically on every rank
    and in every run. Its attributes `loss` and `metrics`, if any, are defaults as for `keras.Model.compile`;
    `config.loss` and `config.metrics` override them. Its attribute `rules`, if any, holds layout rules as for
    `hvdtrain.parallelize`.

    Raises:
        ConfigError: no such function, or no loss.
    """
    function = load_function("--model", config.model)
    if isinstance(function, keras.Model):
        raise ConfigError(f"--model {config.model} is a model: name a function that returns it. Received: {function}.")
    said = getattr(function, "__dict__", {})
    if said.get("loss") is None and config.loss is None:
        last = config.model.rpartition(":")[2]
        raise ConfigError(
            f"--model {config.model} says nothing of its loss: give --loss NAME, such as --loss "
            f'sparse_categorical_crossentropy, or write {last}.loss = "NAME" below the function.'
        )

    def build(shape: Any, classes: int | None, seed: int, /, **arguments: Any) -> keras.Model:
        offered = {"sample_shape": shape, "classes": classes, "seed": seed}
        values = arguments_for("--model", name=config.model, function=function, offered=offered, given=arguments)
        keras.utils.set_random_seed(seed)
        model = function(**values)
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"--model {config.model} must return a keras.Model. Received: {model!r}, of type "
                f"{type(model).__module__}.{type(model).__qualname__}."
            )
        if model.compiled:
            raise ConfigError(
                f"--model {config.model} returns a compiled model, and what it was compiled with would have no effect: "
                "leave out compile(), and give --loss, --metrics and --optimizer."
            )
        return model

    rules = said.get("rules")
    return ModelFamily(
        build,
        loss=lambda: said.get("loss"),
        metrics=lambda: said.get("metrics") or [],
        rules=None if rules is None else lambda classes, ranks, **arguments: rules,
    )
