"""Relative paths of a run's configuration, used from another folder."""

import json
import sys
from dataclasses import replace

import pytest

from hvdtrain.cli import train
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.files import to_yaml
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import load_attribute
from hvdtrain.runs.folder import RunFolder, check_located, given_here, located, start_folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder in which a run was started; the test runs in another one."""
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        (folder / "photos").mkdir(parents=True)
    (home / "only_there").mkdir()
    (home / "part-1.tfrecord").write_text("")
    (here / "only_here").mkdir()
    (home / "code_of_the_run.py").write_text("answer = 42\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("HVDTRAIN_DATA", raising=False)
    return home


def config(data="class_folders", **arguments):
    return Config("digits", data=DataConfig(data, arguments))


@pytest.mark.parametrize(
    ("data", "name", "value", "found"),
    [
        ("class_folders", "path", "photos", "home/photos"),
        ("csv", "validation_path", "only_there", "home/only_there"),
        ("tfrecord", "path", "part-*", "home/part-*"),
        ("class_folders", "path", "only_here", "only_here"),
        ("csv", "target", "photos", "photos"),
        ("own:build", "image_dir", "photos", "home/photos"),
        ("own:build", "mode", "photos", "photos"),
        ("own:build", "path", 3, 3),
        ("text", "path", "", ""),
    ],
)
def test_paths_begin_where_the_run_was_started(home, data, name, value, found):
    arguments = located(config(data, **{name: value}), home).data.data_args
    expected = str(home.parent / found) if str(found).startswith("home/") else found
    assert arguments == {name: expected}


def test_absolute_paths_and_those_of_a_file_alone_stay_as_they_are(home):
    here = config(path=str(home / "photos"))
    assert located(here, home) == here
    assert located(config(path="photos"), None) == config(path="photos")


def test_data_that_are_nowhere_are_looked_up_in_both_places(home):
    with pytest.raises(DataError) as raised:
        check_located(located(config(path="lost"), home), home)
    assert "here/lost" in str(raised.value)
    assert f"Nor is it in {home}, where the run was started." in str(raised.value)
    # What can be found is not looked at; a user's own function knows best.
    check_located(located(config(path="photos"), home), home)
    check_located(located(config("own:build", path="lost"), home), home)


def test_what_is_given_now_begins_here(home):
    base = located(config(path="only_there", features="only_here"), home)
    changed = replace(base, data=replace(base.data, data_args={**base.data.data_args, "path": "only_here"}))
    assert given_here(base, changed).data.data_args["path"] == str(home.parent / "here" / "only_here")
    assert given_here(base, base) == base


def test_modules_are_searched_there_first(home):
    located(config("code_of_the_run:answer"), home)
    assert load_attribute("--data", "code_of_the_run:answer") == 42
    with pytest.raises(ConfigError) as raised:
        load_attribute("--data", "code_that_is_lost:answer")
    assert f"from {home}, from the working folder" in str(raised.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"folder": 3}'])
def test_a_run_without_the_record_of_its_folder_has_none(tmp_path, text):
    (tmp_path / "env.json").write_text(text)
    assert start_folder(RunFolder(tmp_path)) is None
    assert start_folder(RunFolder(tmp_path / "none")) is None


def test_the_configuration_of_a_run_is_repeated_from_another_folder(home):
    run = home / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config(path="photos")))
    (run / "env.json").write_text(json.dumps({"folder": str(home)}))
    request = train.parse(["--config", str(run / "config.yaml")])
    assert request.config.data.data_args == {"path": str(home / "photos")}
    assert request.start == home
    request = train.parse(["--resume", str(run), "--data-args", "path", "only_here"])
    assert request.config.data.data_args == {"path": str(home.parent / "here" / "only_here")}
    # A file of options that is no run's begins where it is used.
    (home / "run.yaml").write_text(to_yaml(config(path="photos")))
    assert train.parse(["--config", str(home / "run.yaml")]).config.data.data_args == {"path": "photos"}
