import copy
import dataclasses
import typing

import pytest

from hvdtrain.cli.train import Files
from hvdtrain.config.checkpoint import CheckpointConfig
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, on_command_line
from hvdtrain.config.files import apply_values, digest, read_values, to_yaml
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.observability import ObservabilityConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.parallel import PipelineConfig
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import ElasticConfig, RuntimeConfig
from hvdtrain.config.training import BadStepConfig, DesyncConfig, ExchangeConfig, TrainingConfig, UpdateConfig
from hvdtrain.config.tuning import TuningConfig

BASE = Config("digits")
ARGUMENTS = {"flag": True, "count": 3, "tiny": 1e-7, "whole": 2.0, "text": "größe: #1", "digits": "12", "word": "yes"}
OTHER = Config(
    "another",
    ModelConfig(
        "resnet",
        ARGUMENTS,
        loss="mse",
        metrics=("mae", "package.module:Metric"),
        embedding_sharding="row",
        sequence_parallel=True,
    ),
    DataConfig(
        "synthetic_images",
        {"size": 8},
        batch=48,
        eval_batch=100,
        shuffle=False,
        tail="drop",
        shard_by="files",
        augment=("flip", "crop"),
        cache="memory",
        data_threads=2,
        data_memory_mb=64,
    ),
    OptimConfig(
        "sgd",
        {"momentum": 0.9},
        learning_rate=0.25,
        lr_scaling="sqrt",
        base_batch=16,
        schedule="polynomial",
        warmup_steps=7,
        final_rate=0.1,
        decay_power=2.0,
        weight_decay=1e-4,
        ema=0.9,
        clip_norm=1.0,
    ),
    TrainingConfig(
        epochs=3,
        max_steps=11,
        steps_per_epoch=7,
        validation_steps=2,
        seed=5,
        accumulate=2,
        precision="mixed_bfloat16",
        recompute=True,
    ),
    ExchangeConfig("sum", "bf16", "dense", gradient_groups=3, predivide=2.0),
    UpdateConfig(),
    TuningConfig(),
    PipelineConfig(pipeline_schedule="interleaved", virtual_stages=2, pipeline_stages=("first", "second")),
    BadStepConfig(on_bad_step="skip", spike_threshold=9.0, max_bad_steps=4),
    DesyncConfig(desync_every=5),
    CheckpointConfig(4, 1, "val_accuracy", "max", keep_every_hours=2.5, grace_seconds=9.0),
    ObservabilityConfig(
        log_every=2,
        tensorboard=False,
        tracker="mlflow",
        plots=False,
        timeline="t.json",
        profile="2:3",
        profile_ranks=(1,),
        metrics_port=9400,
        metrics_host="0.0.0.0",
        rank_logs=False,
    ),
    RuntimeConfig(
        backend="horovod",
        threads=2,
        pin=False,
        start_timeout=9.5,
        load_timeout=99.5,
        hang_timeout=33.0,
        link_timeout=44.0,
        deterministic=True,
        hierarchical_allreduce="never",
        parallel="ep=2,tp=2",
        malloc="system",
    ),
)
# Options that go with none of those of OTHER.
OTHERS = [
    OTHER,
    Config(
        "digits",
        data=DataConfig(on_bad_record="skip:3"),
        optim=OptimConfig(schedule="step", decay_at=(0.25, 0.5), decay_factor=0.5, clip_value=2.0),
        training=TrainingConfig(sync_batch_norm=True, whole_batch=False, explain_step=True),
        update=UpdateConfig(zero=3, zero_prefetch=1),
    ),
    Config(
        "digits",
        training=TrainingConfig(jit=True, steps_per_execution=3),
        update=UpdateConfig(local_steps=3, average_slots=True),
    ),
    Config(
        "digits",
        update=UpdateConfig(
            local_steps=3,
            local_after=7,
            outer_optimizer="slowmo",
            outer_learning_rate=0.5,
            outer_momentum=0.25,
        ),
    ),
    Config(
        "digits",
        update=UpdateConfig(
            update="async",
            max_staleness=4,
            compensation="adaptive",
            dc_strength=0.5,
            pull_ahead=True,
            record="order.json",
            replay="before.json",
        ),
    ),
    Config("digits", update=UpdateConfig(update="async", servers=1)),
    Config("digits", update=UpdateConfig(update="hybrid", server_variables=("table.*", "other"), pull_ahead=True)),
    Config(
        "digits",
        update=UpdateConfig(local_steps=8, average_fragments=4, average_delay=2, average_blend=0.25, average_bits=8),
    ),
    Config("digits", update=UpdateConfig(update="gossip", gossip_graph="exponential", push_sum=True)),
    Config("digits", update=UpdateConfig(update="easgd", elasticity=0.25)),
    Config("digits", runtime=RuntimeConfig(backend="mirrored", replicas=3)),
    Config("digits", runtime=RuntimeConfig(backend="multi_worker_mirrored", communication="ring")),
    Config("digits", runtime=RuntimeConfig(backend="parameter_server", parameter_servers=2)),
    Config(
        "digits",
        tuning=TuningConfig(
            weights="/runs/first",
            prune=0.75,
            prune_pattern="2:4",
            prune_layers="conv",
            prune_epochs=2,
            fake_quantize="int4",
            teacher="/runs/large",
            distill_temperature=2.0,
            distill_weight=0.5,
        ),
    ),
    Config("digits", tuning=TuningConfig(lora=8, lora_layers="query", lora_alpha=16.0)),
    Config("digits", elastic=ElasticConfig(elastic=True, commit_every=3)),
]


def leaves(config):
    """Every option with its section, name, type and value; the recipe's name is a section's by itself."""
    for part in dataclasses.fields(config):
        value = getattr(config, part.name)
        if dataclasses.is_dataclass(value):
            types = typing.get_type_hints(type(value))
            for option in dataclasses.fields(value):
                yield part.name, option.name, types[option.name], getattr(value, option.name)
        else:
            yield "", part.name, part.type, value


def values_of(section, option, value):
    return {section: {option: value}} if section else {option: value}


# -- YAML in and out --


def changed_option(section, option):
    """The option's value in the configuration of this file that changes it."""
    base, *others = [getattr(getattr(c, section) if section else c, option) for c in (BASE, *OTHERS)]
    return next((other for other in others if other != base), base)


def changed(config, section, option, value):
    """A copy with one option changed, unchecked: some options need another beside them."""
    whole = copy.copy(config)
    part = copy.copy(getattr(config, section)) if section else whole
    object.__setattr__(part, option, value)
    if section:
        object.__setattr__(whole, section, part)
    return whole


def test_this_files_other_configurations_change_every_option():
    same = [option for section, option, _, value in leaves(BASE) if changed_option(section, option) == value]
    assert same == []


@pytest.mark.parametrize("config", [BASE, *OTHERS])
@pytest.mark.parametrize("base", [BASE, OTHER], ids=["over defaults", "over other"])
def test_what_is_written_is_read_back(tmp_path, config, base):
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    again = apply_values(base, read_values(file), "file")
    assert again == config
    for (_, name, _, value), (_, _, _, expected) in zip(leaves(again), leaves(config), strict=True):
        assert repr(value) == repr(expected), name  # 2.0 is not 2, "12" is not 12


def test_yaml_is_read_by_people():
    text = to_yaml(OTHER)
    assert text.startswith("recipe: another\nmodel:\n  model: resnet\n")
    assert "größe" in text


def test_equal_configurations_have_equal_digests():
    assert digest(OTHER) == digest(dataclasses.replace(OTHER))


@pytest.mark.parametrize(("section", "option"), [(section, option) for section, option, _, _ in leaves(BASE)])
def test_every_option_changes_the_digest(section, option):
    value = changed_option(section, option)
    assert digest(changed(BASE, section, option, value)) != digest(BASE)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"training: {epochs: 3", "is not valid YAML"),
        (b"\xff\xfe\x00training", "is not valid YAML"),
        (b"\ttraining: 3", "is not valid YAML"),
        (b"!!python/object/apply:os.getcwd []", "is not valid YAML"),
        (b"- epochs", "must hold options as"),
        (b"epochs", "must hold options as"),
        (b"", "must hold options as"),
        (b"# nothing\n", "must hold options as"),
    ],
)
def test_a_file_that_holds_no_options_is_refused_by_name(tmp_path, content, cause):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_values(file)
    assert on_command_line(raised.value.message).startswith(f"The configuration {file} ")
    assert cause in on_command_line(raised.value.message)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read: No such file"):
        read_values(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_values(tmp_path)


# -- what goes before what --


def test_a_file_changes_what_it_names_and_nothing_else():
    merged = apply_values(OTHER, {"training": {"epochs": 99}, "model": {"model": "small_cnn"}}, "file")
    expected = dataclasses.replace(
        OTHER,
        training=dataclasses.replace(OTHER.training, epochs=99),
        model=dataclasses.replace(OTHER.model, model="small_cnn"),
    )
    assert merged == expected


def test_a_file_can_set_an_option_back_to_none():
    assert apply_values(OTHER, {"training": {"max_steps": None}}, "file").training.max_steps is None


@pytest.mark.parametrize("section", ["model", "data", "optim"])
def test_arguments_replace_one_another_as_a_set(section):
    # What another model, source or optimizer would not take must not stay behind.
    name = {"model": "model_args", "data": "data_args", "optim": "optimizer_args"}[section]
    merged = apply_values(OTHER, {section: {name: {"new": 1}}}, "file")
    assert getattr(getattr(merged, section), name) == {"new": 1}
    assert getattr(getattr(apply_values(OTHER, {section: {name: {}}}, "file"), section), name) == {}


def test_the_base_stays_as_it_was():
    before = to_yaml(OTHER)
    apply_values(OTHER, {"model": {"model_args": {"new": 1}}, "data": {"batch": 1}}, "file")
    assert to_yaml(OTHER) == before


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optim: {learning_rate: 1e-3}\n", encoding="utf-8")  # YAML 1.1 wants 1.0e-3
    assert apply_values(BASE, read_values(file), "file").optim.learning_rate == 1e-3


# -- what is refused --


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"optim": {"learning_rat": 1}},
            "optim.learning_rat: there is no such option. Perhaps you meant: optim.learning_rate.",
        ),
        ({"optimizer": {"learning_rate": 1}}, "optimizer: there is no such option"),
        (
            {"epochs": 3},
            "epochs: there is no such option. Perhaps you meant: training.epochs.",
        ),  # an option outside of its section
        ({"data": {"epochs": 3}}, "data.epochs: there is no such option. Perhaps you meant: training.epochs."),
        ({"batc": 64}, "batc: there is no such option. Perhaps you meant: data.batch."),
        ({"training": {"xyzzyx": 64}}, "training.xyzzyx: there is no such option."),
        ({1: 2}, "1: Keys should be strings. Received: 1."),
        ({"training": {1: 2}}, "training.1: Keys should be strings. Received: 1."),
        ({"training": None}, "training: "),
        ({"training": 3}, "training: "),
        ({"training": [3]}, "training: "),
        ({"training": {"epochs": "three"}}, "training.epochs: "),
        ({"training": {"epochs": 2.5}}, "training.epochs: "),
        ({"training": {"epochs": None}}, "training.epochs: "),
        ({"training": {"epochs": [3]}}, "training.epochs: "),
        ({"training": {"epochs": {"a": 1}}}, "training.epochs: "),
        ({"data": {"shuffle": "maybe"}}, "data.shuffle: "),
        ({"data": {"shuffle": 2}}, "data.shuffle: "),
        ({"data": {"data": 3}}, "data.data: "),
        ({"data": {"data_args": None}}, "data.data_args: "),
        ({"data": {"data_args": [1]}}, "data.data_args: "),
        ({"model": {"model_args": {"width": [1]}}}, "model.model_args.width."),
        ({"model": {"model_args": {1: 2}}}, "model.model_args.1."),
        ({"optim": {"learning_rate": "fast"}}, "optim.learning_rate: "),
        ({"optim": {"schedule": "linear"}}, "optim.schedule: "),
        ({"runtime": {"backend": "mpi"}}, "runtime.backend: "),
        ({"recipe": 3}, "recipe: "),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(values, line):
    with pytest.raises(ConfigError) as raised:
        apply_values(BASE, values, "--config run.yaml")
    head, *lines = on_command_line(raised.value.message).splitlines()
    assert head == "--config run.yaml does not fit:"
    assert lines[0].startswith(f"  {line}")


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as raised:
        apply_values(BASE, {"training": {"epochs": 0}, "optim": {"x": 1}, "y": 2}, "file")
    text = on_command_line(raised.value.message)
    assert "optim.x: there is no such option" in text
    assert "y: there is no such option" in text
    assert "--epochs must be at least 1. Received: 0." in text
    assert text.count("Received: 0") == 1


def test_an_evaluation_takes_as_many_samples_at_once_as_training_unless_told():
    """A language model that trains on 8 sequences has no room for the logits of 256."""
    assert DataConfig(batch=8).samples_evaluated == 8
    assert DataConfig(batch=8, eval_batch=100).samples_evaluated == 100
    assert DataConfig(batch=4096).samples_evaluated == 256, "a batch of many microbatches"


def test_limits_hold_for_configurations_made_in_python():
    with pytest.raises(ConfigError, match="batch must be at least 1"):
        DataConfig(batch=0)


# -- the shape of the whole --


def test_leaf_names_are_unique_so_that_flags_are_flat():
    names = [name for _, name, _, _ in leaves(BASE)] + [field.name for field in dataclasses.fields(Files)]
    assert sorted(names) == sorted(set(names))


def test_sections_cannot_be_changed_in_place():
    for part in (BASE, BASE.model, BASE.training):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.seed = 3


def test_two_configurations_share_no_arguments():
    assert ModelConfig().model_args is not ModelConfig().model_args
