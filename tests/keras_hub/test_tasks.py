"""KerasHub's decoders as they are, with few weights that are drawn, on two ranks as in one process."""

import json
import re
from pathlib import Path

import pytest

from tests.launching import Job, launched

TASKS, FORMS = str(Path(__file__).with_name("tasks.py")), ("", "+")
ROUNDING = {"GPT2": 1e-12}
"""The rotary embeddings, biases and softmaxes of most others are computed in 32 bits."""
PREDICTED = {"Gemma2": 1e-4, "GemmaOneKeyHead": 1e-4}
"""By Keras alone predictions of Gemma2 move by 2e-5 where its first weights move by 1e-12: so much is its rounding.

Where whole weights can be had, they are compared, and predictions with those that Keras makes with them.
"""


@pytest.fixture(autouse=True)
def _keras_hub():
    pytest.importorskip("keras_hub", reason="keras-hub is not installed: see launch/lib/overlay.sh")


def test_a_task_takes_strings_and_labels(tmp_path):
    script = Path(__file__).with_name("texts.py")
    done = Job(launched("mpirun", 2, str(script)), cwd=tmp_path).expect(timeout=300)
    assert done.out.count("EQUAL") == 2, done.text[-3000:]


def test_the_example_trains_as_in_one_process(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "keras_hub_lora.py"
    losses = []
    for ranks in (1, 2):
        done = Job(launched("mpirun", ranks, str(script)), cwd=tmp_path).expect(timeout=300)
        losses.append([float(text) for text in re.findall(r"^epoch .* loss (\S+)", done.out, re.MULTILINE)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with what each model comes to in one process."""
    from tests.keras_hub.decoders import BACKBONES

    folder = tmp_path_factory.mktemp("alone")
    names = [name + form for form in FORMS for name in BACKBONES]
    Job(launched("mpirun", 2, TASKS, "none", str(folder), *names), cwd=folder).expect(timeout=1800)
    return folder


@pytest.mark.parametrize("form", FORMS, ids=["tasks", "below own layers"])
@pytest.mark.parametrize("axes", ["tp=2", "pp=2", "zero=3"])
def test_decoders_train_as_in_one_process(axes, form, alone, tmp_path):
    from tests.keras_hub.decoders import BACKBONES, REFUSED

    names = [name + form for name in BACKBONES]
    done = Job(launched("mpirun", 2, TASKS, axes, str(alone), *names), cwd=tmp_path).expect(timeout=1800)
    results = [json.loads(line.partition(" ")[2]) for line in done.out.splitlines() if line.startswith("RESULT")]
    assert [result.pop("name") for result in results] == names, done.text[-3000:]
    for name, figures in zip(BACKBONES, results, strict=True):
        if (name, axes) in REFUSED:
            assert REFUSED[name, axes][1] in figures.get("refused", ""), f"{name}: {figures}"
            continue
        whole = axes.startswith("zero")
        assert set(figures) == {"loss", "accuracy", "predict", *(["weights"] if whole else [])}, f"{name}: {figures}"
        for figure, difference in figures.items():
            rounded = PREDICTED if figure == "predict" and not whole else ROUNDING
            most = rounded.get(name, ROUNDING.get(name, 1e-5))
            assert difference <= most, f"{name}, {figure}: {difference}"


def test_the_table_of_the_docs_is_that_of_the_tests():
    from tests.keras_hub import table

    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.written(page), "python -m tests.keras_hub.table writes it anew"
