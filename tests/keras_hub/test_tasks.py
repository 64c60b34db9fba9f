"""KerasHub's decoders as they are, with few weights that are drawn, on two ranks as in one process."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.launching import launcher, run

NAMES = ("llama", "mistral", "gemma", "qwen", "phi", "gpt2")
ROUNDING = {"gpt2": 1e-12}
"""The rotary embeddings of the others are computed in 32 bits."""


@pytest.fixture(autouse=True)
def _keras_hub():
    pytest.importorskip("keras_hub", reason="keras-hub is not installed: see launch/lib/overlay.sh")


def test_a_task_takes_strings_and_labels(tmp_path):
    script = Path(__file__).with_name("texts.py")
    done = run([*launcher("mpirun", 2), sys.executable, str(script)], cwd=tmp_path, timeout=300)
    assert done.out.count("EQUAL") == 2, done.text[-3000:]


def test_the_example_trains_as_in_one_process(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "keras_hub_lora.py"
    losses = []
    for ranks in (1, 2):
        done = run([*launcher("mpirun", ranks), sys.executable, str(script)], cwd=tmp_path, timeout=300)
        losses.append([float(text) for text in re.findall(r"^epoch .* loss (\S+)", done.out, re.MULTILINE)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("axes", ["tp=2", "pp=2", "zero=3"])
def test_decoders_train_as_in_one_process(axes, tmp_path):
    script = Path(__file__).with_name("tasks.py")
    done = run([*launcher("mpirun", 2), sys.executable, str(script), axes, *NAMES], cwd=tmp_path, timeout=900)
    results = [json.loads(line.partition(" ")[2]) for line in done.out.splitlines() if line.startswith("RESULT")]
    assert [result.pop("name") for result in results] == list(NAMES), done.text[-3000:]
    for name, figures in zip(NAMES, results, strict=True):
        assert set(figures) == {"loss", "accuracy", "predict"}
        for figure, difference in figures.items():
            assert difference <= ROUNDING.get(name, 1e-5), f"{name}, {figure}: {difference}"
