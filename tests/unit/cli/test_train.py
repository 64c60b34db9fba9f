import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.cli import inference, train
from hvdtrain.cli.main import VERBS, main
from hvdtrain.cli.train import Files, parse
from hvdtrain.config.errors import CheckpointError, UserError, on_command_line
from hvdtrain.config.files import to_yaml
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.recipes import RECIPES, recipe
from hvdtrain.runs.description import RunDescription, write_description
from hvdtrain.runs.folder import RunFolder

DIGITS = recipe("digits")


def changed(section, **options):
    return replace(DIGITS, **{section: replace(getattr(DIGITS, section), **options)})


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run of three epochs."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(changed("training", epochs=3, seed=4)), encoding="utf-8")
    description = RunDescription("digits", {"dtype": "float32", "shape": [8, 8, 1]}, 10, "logits")
    write_description(RunFolder(folder), description)
    return folder


def said(*argv):
    """The message that refuses a command line, in one line."""
    with pytest.raises(UserError) as raised:
        parse([str(word) for word in argv])
    return " ".join(on_command_line(raised.value.message).split())


# -- train: recipe < --config < flags --


def test_flags_go_over_the_recipe():
    request = parse(["digits", "--epochs", "3", "--batch=32", "--pin", "False", "--schedule", "constant"])
    expected = replace(
        DIGITS,
        training=replace(DIGITS.training, epochs=3),
        data=replace(DIGITS.data, batch=32),
        runtime=replace(DIGITS.runtime, pin=False),
        optim=replace(DIGITS.optim, schedule="constant"),
    )
    assert request.config == expected


def test_a_file_goes_over_the_recipe_and_flags_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("training: {epochs: 3, seed: 7}\ndata: {batch: 32}\n", encoding="utf-8")
    config = parse(["--epochs", "5", "--config", str(file), "--eval-batch", "9"]).config
    assert (config.training.epochs, config.training.seed) == (5, 7)  # the flag; the file
    assert (config.data.batch, config.data.eval_batch) == (32, 9)
    assert config.optim == DIGITS.optim  # the recipe


def test_arguments_are_pairs_whose_types_are_read_off():
    config = parse(
        ["--optimizer-args", "beta_1", "0.8", "amsgrad", "True", "name", "x", "--model-args", "width", "8"]
    ).config
    assert config.optim.optimizer_args == {"beta_1": 0.8, "amsgrad": True, "name": "x"}
    assert config.model.model_args == {"width": 8}
    assert type(config.model.model_args["width"]) is int


def test_another_model_data_source_or_optimizer_does_not_get_the_recipes_arguments(tmp_path):
    base = recipe("resnet_synthetic")
    config = parse(["resnet_synthetic", "--model", "mlp", "--optimizer", "adam"]).config
    assert (config.model.model_args, config.optim.optimizer_args) == ({}, {})
    assert parse(["resnet_synthetic", "--model-args", "depth", "14"]).config.model.model_args == {"depth": 14}
    assert parse(["resnet_synthetic"]).config == base
    assert config.data == base.data
    config = parse(["resnet_synthetic", "--model", "other:build", "--model-args", "depth", "8"]).config
    assert config.model.model_args == {"depth": 8}, "given for it, though the recipe has the same"
    file = tmp_path / "run.yaml"
    file.write_text("recipe: resnet_synthetic\ndata: {data: digits}\n", encoding="utf-8")
    assert parse(["--config", str(file)]).config.data.data_args == {}
    assert parse(["--config", str(file), "--batch", "32"]).config.model == base.model


# -- train: what is refused --


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["digit"], ["Unknown recipe 'digit'. Perhaps you meant: digits."]),
        (["zzz"], ["Unknown recipe 'zzz'. Available: bert_mini, ", ", digits, "]),
        (["--epoch", "3"], ["There is no option '--epoch'. Perhaps you meant: --epochs INT"]),
        (["--learning-rat=3"], ["There is no option '--learning-rat'. Perhaps you meant: --learning-rate FLOAT"]),
        (["digits", "extra"], ["unrecognized arguments: extra"]),
        (["--epochs", "three"], ["argument --epochs: takes INT. Received: 'three'."]),
        (["--epochs", "2.5"], ["argument --epochs: takes INT. Received: '2.5'."]),
        (["--epochs"], ["argument --epochs: expected one argument"]),
        (["--run-dir"], ["argument --run-dir: expected one argument"]),
        (["--pin", "maybe"], ["argument --pin: must be one of True, False. Received: 'maybe'."]),
        (["--backend", "singel"], ["argument --backend: must be one of auto, horovod, ", ". Received: 'singel'."]),
        (["--zero", "4"], ["argument --zero: must be one of 0, 1, 2, 3. Received: '4'."]),
        (["--model-args"], ["argument --model-args: expected at least one argument"]),
        (["--model-args", "width"], ["--model-args takes NAME VALUE pairs. Received: 'width'."]),
        (["--epochs", "0"], ["--epochs must be at least 1. Received: 0."]),
        (["--learning-rate", "nan"], ["--learning-rate must be above 0. Received: nan."]),
        (["--recipe", "other"], ["The recipe is the first word: python -m hvdtrain other."]),
        (["--config", "no.yaml"], ["The configuration no.yaml cannot be read: No such file or directory."]),
    ],
)
def test_a_mistake_on_the_command_line_is_explained(argv, parts):
    text = said(*argv)
    for part in parts:
        assert part in text


def test_an_unknown_key_in_the_file_is_named_with_its_path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optim: {learning_rat: 1}\n", encoding="utf-8")
    assert said("--config", file) == (
        f"--config {file} does not fit: optim.learning_rat: there is no such option. "
        "Perhaps you meant: optim.learning_rate."
    )


def test_a_file_of_another_recipe_is_refused(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("recipe: zzz\n", encoding="utf-8")
    assert said("digits", "--config", file) == f"--config {file} is of the recipe 'zzz', not of 'digits'."
    assert said("--config", file).startswith("Unknown recipe 'zzz'. Available: ")


# -- train: going on with a run --


def test_resume_takes_the_runs_own_options(run_dir):
    request = parse(["--resume", str(run_dir)])
    assert request.config == changed("training", epochs=3, seed=4)
    assert request.files == Files(resume=run_dir)


@pytest.mark.parametrize(
    "flags",
    [
        ["--epochs", "9"],
        ["--max-steps", "7"],
        ["--keep", "1", "--checkpoint-every", "5"],
        ["--log-every", "1", "--plots", "False"],
        ["--threads", "1", "--backend", "single"],
        ["--on-bad-record", "skip:2", "--data-threads", "3", "--data-memory-mb", "64"],
        ["--cache", "memory"],
        ["--data-args", "path", "elsewhere"],
        ["--zero", "3", "--zero-prefetch", "1"],
        ["--parallel", "pp=2", "--pipeline-schedule", "interleaved", "--virtual-stages", "2", "--accumulate", "8"],
        ["--parallel", "tp=2", "--sequence-parallel"],
        ["--embedding-sharding", "row"],
        ["--recompute"],
    ],
)
def test_resume_may_change_how_long_how_it_is_watched_and_what_is_read_and_held_how(run_dir, flags):
    request = parse(["--resume", str(run_dir), *flags])
    assert request.config != changed("training", epochs=3, seed=4)
    assert request.config.training.seed == 4


@pytest.mark.parametrize(
    "flags",
    [
        ["--batch", "32"],
        ["--seed", "5"],
        ["--learning-rate", "1"],
        ["--model-args", "width", "8"],
        ["--epochs", "9", "--shuffle", "False"],
        ["--data-args", "validation", "7"],
        ["--data", "keras"],
        ["--tail", "drop"],
        ["--shard-by", "files"],
        ["--augment", "flip"],
    ],
)
def test_resume_refuses_what_would_make_it_another_run(run_dir, flags):
    message = said("--resume", run_dir, *flags)
    assert f"--resume {run_dir} goes on with the run as it was. Received: --" in message
    (changed,) = re.findall(r"Received: (.*?)\. Only", message)
    name = next(flag for flag in reversed(flags) if flag.startswith("--"))
    assert changed.startswith(f"{name} ")
    assert changed.count("it was") == 1


def test_a_run_that_was_split_goes_on_in_one_process(run_dir):
    before = changed("model", sequence_parallel=True)
    before = replace(before, runtime=replace(before.runtime, parallel="tp=2"))
    (run_dir / "config.yaml").write_text(to_yaml(before), encoding="utf-8")
    after = parse(["--resume", str(run_dir), "--parallel", "dp=-1", "--sequence-parallel", "False"]).config
    assert not after.model.sequence_parallel
    assert after.runtime.parallel == "dp=-1"


def test_resume_keeps_the_other_arguments_of_data_that_were_moved(run_dir):
    there = changed("data", data="arrays", data_args={"path": "here", "validation": 500})
    (run_dir / "config.yaml").write_text(to_yaml(there), encoding="utf-8")
    moved = parse(["--resume", str(run_dir), "--data-args", "path", "there"]).config
    assert moved.data.data_args == {"path": "there", "validation": 500}
    refusal = said("--resume", run_dir, "--data-args", "path", "there", "validation", "5")
    assert "--sequence-parallel, --teacher, where its data are (--data-args path)" in refusal


@pytest.mark.parametrize("more", [["--run-dir", "x"], ["--config", "x.yaml"]])
def test_resume_excludes_another_start(run_dir, more):
    assert "--resume goes on with a run as it was" in said("--resume", run_dir, *more)


def test_a_run_that_is_pruned_or_adapted_from_now_on_is_a_new_one(run_dir):
    (run_dir / "config.yaml").write_text(to_yaml(changed("training", max_steps=5)), encoding="utf-8")
    new = ["--epochs", "3", "--learning-rate", "1e-4", "--run-dir", "other"]
    for options in (["--prune", "0.8", "--prune-pattern", "2:4"], ["--lora", "8", "--lora-layers", "query|value"]):
        request = parse(["--resume", str(run_dir), *options, *new])
        assert (request.files.resume, request.files.run_dir) == (None, Path("other"))
        assert (request.config.tuning.weights, request.config.training.epochs) == (str(run_dir), 3)
        assert request.config.training.max_steps is None  # the one before ended there
        # What it writes is resumed like any other run.
        (run_dir / "config.yaml").write_text(to_yaml(request.config), encoding="utf-8")
        again = parse(["--resume", str(run_dir), *options])
        assert (again.files.resume, again.config) == (run_dir, request.config)
        (run_dir / "config.yaml").write_text(to_yaml(DIGITS), encoding="utf-8")


def test_options_of_what_is_left_out_are_left_out_with_it(run_dir):
    for before, after in (
        (["--lora", "4", "--lora-layers", "hidden"], ["--lora", "None", "--prune", "0.5"]),
        (["--prune", "0.5", "--prune-layers", "hidden"], ["--prune", "None", "--lora", "4"]),
        (["--teacher", "large", "--distill-weight", "0.5"], ["--teacher", "None"]),
    ):
        (run_dir / "config.yaml").write_text(to_yaml(parse(["digits", *before]).config), encoding="utf-8")
        request = parse(["--resume", str(run_dir), *after])
        assert request.files.resume is None
        assert request.config == parse(["digits", *after, "--weights", str(run_dir)]).config
        kept = parse(["--resume", str(run_dir), "--epochs", "30"])
        assert kept.files.resume == run_dir
    assert "it takes no --weights" in said("--resume", run_dir, "--weights", "other")


def test_a_teacher_may_have_been_moved(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir)
    taught = parse(["digits", "--teacher", "large", "--distill-temperature", "2"]).config
    assert taught.tuning.teacher == str(run_dir / "large")
    (run_dir / "config.yaml").write_text(to_yaml(taught), encoding="utf-8")
    moved = parse(["--resume", ".", "--teacher", "there"])
    assert (moved.files.resume, moved.config.tuning.teacher) == (Path(), str(run_dir / "there"))


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--prune 1", "--prune must be in (0, 1). Received: 1.0."),
        ("--prune 0.5 --lora 4", "--prune 0.5 does not go with --lora 4: adapters freeze what would be trained."),
        ("--prune-layers (", "'(' is no regular expression: missing )"),
        ("--prune-layers x", "--prune-layers x has no effect without --prune or --prune-pattern: leave it out."),
        ("--lora-alpha 8", "--lora-alpha 8.0 has no effect without --lora"),
        ("--distill-weight 0.5", "--distill-weight 0.5 has no effect without --teacher"),
        ("--lora 4 --parallel tp=2,dp=-1", "a rank must hold each layer whole"),
        ("--teacher run --local-steps 4", "a checkpoint would hold more than the student's weights"),
        ("--fake-quantize int8 --sync-batch-norm", "it makes a copy of the model, which has none of it"),
        ("--teacher run --on-bad-record skip:3", "Keras' Distiller takes no weights of samples"),
    ],
)
def test_options_that_do_not_go_with_tuning_are_refused(argv, problem):
    assert problem in said("digits", *argv.split())


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"--resume .*: there is no run \(no config\.yaml in it\)"):
        parse(["--resume", str(tmp_path)])


# -- evaluate --


def test_evaluate_reads_the_run_but_not_where_it_was_trained(run_dir):
    config = replace(DIGITS, runtime=RuntimeConfig(backend="horovod", threads=7, pin=False))
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    request = inference.parse_evaluate([str(run_dir), "--backend", "single"])
    assert request.config == replace(DIGITS, runtime=RuntimeConfig(backend="single"))
    assert request.arguments.run_dir == run_dir


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "the following arguments are required: RUN"),
        (["no/such/run"], "evaluate no/such/run: there is no run"),
        (["run", "--backend", "mpi"], "invalid choice: 'mpi'"),
        (["run", "--epochs", "3"], "There is no option '--epochs'."),
    ],
)
def test_evaluate_explains_mistakes(argv, part):
    with pytest.raises(UserError) as raised:
        inference.parse_evaluate(argv)
    assert part in on_command_line(raised.value.message)


# -- verbs --


@pytest.fixture
def called(monkeypatch):
    """What each verb was called with, instead of doing it."""
    calls = []
    for verb, target in VERBS.items():
        monkeypatch.setattr(target.replace(":", "."), lambda argv, verb=verb: calls.append((verb, argv)) or 7)
    return calls


@pytest.mark.parametrize(
    ("argv", "call"),
    [
        ([], ("train", [])),
        (["train"], ("train", [])),
        (["digits"], ("train", ["digits"])),
        (["train", "digits", "--epochs", "3"], ("train", ["digits", "--epochs", "3"])),
        (["train", "nonsense"], ("train", ["nonsense"])),  # the verb refuses it
        (["--epochs", "3"], ("train", ["--epochs", "3"])),
        (["digits", "--help"], ("train", ["digits", "--help"])),
        (["evaluate", "runs/1"], ("evaluate", ["runs/1"])),
        (["env", "--json"], ("env", ["--json"])),
        (["doctor"], ("doctor", [])),
        (["recipes", "--help"], ("recipes", ["--help"])),
    ],
)
def test_the_first_word_decides(called, argv, call):
    assert main(argv) == 7  # the verb's exit code is the program's
    assert called == [call]


@pytest.mark.parametrize(
    ("word", "hint"),
    [("trian", "Perhaps you meant: train."), ("digts", "Perhaps you meant: digits."), ("zz", "Available: ")],
)
def test_a_word_that_is_neither_verb_nor_recipe_is_refused(called, capsys, word, hint):
    assert main([word]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"hvdtrain: error: There is no verb or recipe {word!r}. {hint}")
    assert (output.out, called) == ("", [])


def test_a_script_is_told_how_it_is_started(capsys):
    assert main(["train.py", "--epochs", "3"]) == 2
    assert "horovodrun -np 2 python train.py --epochs 3" in capsys.readouterr().err


@pytest.fixture
def second_rank(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "1")
    for name in ("SIZE", "LOCAL_SIZE"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "2")


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["--help"], 0), (["trian"], 2), (["recipes"], 0), (["train", "--help"], 0), (["evaluate", "--help"], 0)],
)
def test_what_every_rank_would_say_alike_is_said_by_the_first(second_rank, capsys, argv, code):
    assert main(argv) == code
    assert capsys.readouterr() == ("", "")


def test_every_rank_trains(second_rank, called):
    main(["train"])
    main(["evaluate", "x"])
    main(["doctor"])
    assert [verb for verb, _ in called] == ["train", "evaluate"]


def test_recipes_are_listed_in_a_line_each(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert lines[0].split(maxsplit=1)[1].startswith("Small CNN")


def test_nothing_before_the_start_imports_tensorflow(run_dir):
    """Neither help nor a mistake may cost seconds, and the ranks agree before TensorFlow is there."""
    code = f"""
import sys
from hvdtrain.cli.main import main
from hvdtrain.cli import inference, train
codes = [main(argv) for argv in (["--help"], ["train", "--help"], ["evaluate", "--help"], ["recipes"], ["trian"])]
train.parse(["--resume", {str(run_dir)!r}])
inference.parse_evaluate([{str(run_dir)!r}])
codes.append(main(["--epochs", "0"]))
loaded = [name for name in ("tensorflow", "keras", "horovod", "mpi4py", "sklearn", "matplotlib") if name in sys.modules]
print("result:", codes, loaded)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=run_dir)
    assert done.stdout.splitlines()[-1] == "result: [0, 0, 0, 0, 2, 2] []", done.stderr
    assert done.stderr.count("--epochs must be at least 1. Received: 0.") == 1
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(run_dir)) == ["config.yaml", "preprocessing.json"]  # a mistake leaves no folder behind


def test_what_must_agree_among_the_ranks(run_dir):
    """Each rank may have its own --config file, but not another configuration or run folder."""
    _, facts = train._describe(parse(["--run-dir", "a", "--seed", "4", "--epochs", "3"]))
    _, same = train._describe(parse(["--run-dir", "a", "--config", str(run_dir / "config.yaml")]))
    _, other = train._describe(parse(["--run-dir", "a", "--seed", "5"]))
    _, elsewhere = train._describe(parse(["--run-dir", "b", "--seed", "4", "--epochs", "3"]))
    assert facts == same
    assert {name for name in facts if facts[name] != other[name]} == {"the configuration"}
    assert {name for name in facts if facts[name] != elsewhere[name]} == {"run_dir"}


def test_a_schedule_that_a_resumed_run_stretches_is_said(run_dir):
    from hvdtrain.runs.resume import stretched_schedule

    before = changed("training", epochs=3, seed=4)
    more = parse(["--resume", str(run_dir), "--epochs", "5"]).config
    assert "the cosine schedule spans 5 epochs now and spanned 3 before" in stretched_schedule(more, before)
    assert stretched_schedule(before, before) is None
    constant = replace(more, optim=replace(more.optim, schedule="constant"))
    assert stretched_schedule(constant, replace(before, optim=constant.optim)) is None


def test_arguments_may_be_given_in_several_options():
    words = ["--model-args", "depth", "2", "--batch", "16", "--model-args", "width", "32", "depth", "4", "--jit"]
    config = parse(["gpt_char", *words]).config
    assert config.model.model_args == {"depth": 4, "width": 32}
    assert (config.data.batch, config.training.jit) == (16, True)


# -- --resume auto --


def test_resume_auto_goes_on_or_starts(tmp_path, run_dir):
    from hvdtrain.cli.train import _folder

    def folder(*argv):
        return _folder(parse([str(word) for word in argv]))

    words = ("digits", "--epochs", "3", "--seed", "4", "--resume", "auto")
    assert folder(*words, "--run-dir", run_dir) == (str(run_dir), "auto")
    assert folder(*words, "--run-dir", tmp_path / "new") == (str(tmp_path / "new"), "no")
    assert folder(*words, "--run-dir", run_dir, "--epochs", "5", "--keep", "1") == (str(run_dir), "auto")
    with pytest.raises(UserError, match="goes on with the run as it was"):
        folder("digits", "--batch", "32", "--resume", "auto", "--run-dir", run_dir)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    with pytest.raises(UserError, match="is not empty: nothing in it is overwritten"):
        folder(*words, "--run-dir", tmp_path / "other")
    assert "--resume auto needs --run-dir" in said(*words)


def test_options_may_be_unset_and_lists_emptied(tmp_path):
    config = parse(["resnet_synthetic", "--max-steps", "None", "--clip-norm", "None", "--metrics", "None"]).config
    assert (config.training.max_steps, config.optim.clip_norm, config.model.metrics) == (None, None, None)
    assert parse(["--augment", "flip", "crop"]).config.data.augment == ("flip", "crop")
    assert parse(["--augment", "flip", "--augment"]).config.data.augment == ()
    assert parse(["--zero", "2"]).config.update.zero == 2
