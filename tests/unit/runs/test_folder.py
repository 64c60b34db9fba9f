import re
from types import SimpleNamespace

import pytest

from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.config.files import to_yaml
from hvdtrain.config.run import Config
from hvdtrain.recipes import recipe
from hvdtrain.runs import run_files
from hvdtrain.runs.folder import RUNS, RunFolder, create, default_path, opened


def test_a_new_folder_is_made_with_those_above_it(tmp_path):
    path = tmp_path / "a" / "b"
    create(path)
    assert path.is_dir()
    assert list(path.iterdir()) == []
    create(path)  # an empty folder is taken


@pytest.mark.parametrize("name", ["notes.txt", ".hidden"])
def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError) as raised:
        create(tmp_path)
    assert f"--run-dir {tmp_path} is not empty: nothing in it is overwritten" in str(raised.value)
    assert f"--resume {tmp_path}" in str(raised.value)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize("more", [None, "metrics.jsonl", "checkpoints/step-3", "notes.txt"])
def test_a_run_that_trained_nothing_may_start_again(tmp_path, more):
    """As one whose options were refused once its model was built."""
    for name in ("config.yaml", "env.json", "metrics.jsonl", "logs/rank-0.log", "tensorboard/events"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    if more is not None:
        (tmp_path / more).write_text("{}")
        with pytest.raises(ConfigError, match="is not empty"):
            create(tmp_path)
    else:
        create(tmp_path)


@pytest.mark.parametrize("below", ["", "run", "deep/run"])
def test_a_file_in_the_folders_place_is_named(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    path = file / below if below else file
    with pytest.raises(
        ConfigError, match=rf"--run-dir {re.escape(str(path))} cannot be created: .*{re.escape(str(file))}"
    ):
        create(path)
    assert file.read_text() == "mine"


def test_a_run_gets_a_name_that_no_run_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20300102-030405")
    names = []
    for _ in range(3):
        path = default_path("digits")
        create(path)
        names.append(path)
    stem = "digits-20300102-030405"
    assert names == [RUNS / stem, RUNS / f"{stem}-2", RUNS / f"{stem}-3"]


def test_a_run_is_opened_with_its_configuration(tmp_path):
    config = recipe("digits")
    folder = RunFolder(tmp_path / "run")
    create(folder.path)
    folder.config.write_text(to_yaml(config), encoding="utf-8")
    again, found = opened(folder.path, "--resume")
    assert (again.path, found) == (folder.path, config)


@pytest.mark.parametrize("kind", ["nothing", "file", "empty folder", "a folder named config.yaml"])
def test_what_is_no_run_is_refused_by_the_option_that_named_it(tmp_path, kind):
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("mine")
    elif kind == "empty folder":
        path.mkdir()
    elif kind != "nothing":
        (path / "config.yaml").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=rf"^evaluate {re.escape(str(path))}: there is no run"):
        opened(path, "evaluate")


def test_a_run_of_another_version_is_told_by_the_option_it_does_not_know(tmp_path):
    folder = RunFolder(tmp_path / "run")
    create(folder.path)
    folder.config.write_text("recipe: digits\ntraining: {epoch: 3}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        opened(folder.path, "--resume")
    assert str(folder.config) in str(raised.value)
    assert "training.epoch: there is no such option" in str(raised.value)


def test_a_run_that_went_on_split_keeps_no_model_of_fewer_steps(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.model.write_bytes(b"of an earlier end, in one process")
    monkeypatch.setattr(run_files, "is_split", lambda model: True)
    run_files._write_end(folder, Config("digits"), SimpleNamespace(model=None), {"steps": 2})
    assert not folder.model.exists()
    assert folder.summary.exists()
