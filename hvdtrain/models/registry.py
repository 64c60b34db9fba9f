"""Models by name: built-in families, or a user's function."""

from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.registry import check_arguments, resolve
from hvdtrain.config.user_code import is_user_code
from hvdtrain.models.family import ModelFamily, Rules
from hvdtrain.models.objective import check_probabilities, named_loss, named_metrics, on_logits
from hvdtrain.models.user_model import user_family

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
    family = user_family(config) if own else _known_family(config)
    if config.embedding_sharding != "none" and family.build_sharded is None:
        raise ConfigError(
            "--embedding-sharding divides the tables of --model dlrm among ranks. Received: "
            f"--embedding-sharding {config.embedding_sharding}, --model {config.model}. Leave it out, or "
            "give a model of your own hvdtrain.ShardedEmbedding layers."
        )
    loss = _loss(config, family) if own else on_logits(_loss(config, family))
    metrics = config.metrics
    if metrics is not None:
        named_metrics(metrics)  # a wrong name is refused before anything is built
    return ModelFamily(
        build=family.build,
        loss=lambda: loss,
        metrics=family.metrics if metrics is None else lambda: named_metrics(metrics),
        build_sharded=family.build_sharded,
        sample_dims=family.sample_dims,
        rules=family.rules,
    )


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
    if config.embedding_sharding == "none":
        return family.build(shape, classes, seed, **config.model_args)
    assert family.build_sharded is not None, "model_family refuses others"
    return family.build_sharded(shape, classes, seed, config.embedding_sharding, **config.model_args)


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


def _known_family(config: ModelConfig) -> ModelFamily:
    family: ModelFamily = resolve("model", config.model, MODELS)
    check_arguments("model", config.model, family.build, config.model_args)
    return family


def _loss(config: ModelConfig, family: ModelFamily) -> Any:
    return family.loss() if config.loss is None else named_loss(config.loss)


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
