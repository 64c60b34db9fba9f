"""The picture of a run."""

import json
from pathlib import Path

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest

from hvdtrain.config.errors import DataError
from hvdtrain.observability import plots
from hvdtrain.runs.run_files import _title

STEP = {"kind": "step", "step": 1, "epoch": 0, "loss": 2.0, "learning_rate": 1e-3, "grad_norm": None}
RUN = [
    {"kind": kind, "step": step, "epoch": (step - 1) // 10, "loss": 3 / step, "accuracy": 1 - 1 / step}
    for step in range(1, 101)
    for kind in (["step", "evaluation"] if step % 10 == 0 else ["step"])
]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[matplotlib.figure.Figure]:
    """Return the figures that were saved."""
    saved: list[matplotlib.figure.Figure] = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k))
    )
    return saved


def draw(folder: Path, records: list[dict[str, object]]) -> Path:
    metrics, picture = folder / "metrics.jsonl", folder / "curves.png"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    plots.draw_curves(metrics, picture, title="digits")
    return picture


def test_loss_and_accuracy_are_drawn_side_by_side_over_steps(
    tmp_path: Path, figures: list[matplotlib.figure.Figure]
) -> None:
    picture = matplotlib.image.imread(draw(tmp_path, RUN))
    assert picture.shape[1] > 2 * picture.shape[0]
    panels = figures[0].axes
    assert [panel.get_title(loc="left") for panel in panels] == ["loss", "accuracy"]
    for panel, name in zip(panels, ("loss", "accuracy"), strict=True):
        lines = {line.get_label(): line for line in panel.get_lines()}
        validation = [(record["step"], record[name]) for record in RUN if record["kind"] == "evaluation"]
        np.testing.assert_allclose(lines["validation"].get_xydata(), validation)
        assert len(lines["training"].get_xdata()) == 100


def test_staleness_has_a_histogram(tmp_path: Path, figures: list[matplotlib.figure.Figure]) -> None:
    draw(tmp_path, RUN)
    plots.draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", staleness={0: 3, 2: 5})
    *_, panel = figures[-1].axes
    assert panel.get_title(loc="left") == "updates by staleness"
    assert {bar.get_x() + bar.get_width() / 2: bar.get_height() for bar in panel.patches} == {0: 3, 2: 5}


def test_another_metric_takes_the_place_of_accuracy() -> None:
    assert plots.second_panel([STEP, STEP | {"perplexity": 7.0, "other": 1.0}]) == ["perplexity"]
    assert plots.second_panel([STEP | {"perplexity": 7.0, "accuracy": 1.0}]) == ["accuracy"]
    assert plots.second_panel([STEP]) == []


def test_what_an_epochs_last_step_alone_came_to_is_left_out() -> None:
    steps, values = np.array([1.0, 10, 20, 21, 30, 40, 42]), np.arange(7.0)
    for found, expected in zip(plots.without_stubs(steps, values), ([1, 10, 20, 30, 40], [0, 1, 2, 4, 5]), strict=True):
        np.testing.assert_array_equal(found, expected)
    for count in (0, 1, 2):
        assert len(plots.without_stubs(steps[:count], values[:count])[0]) == count


def test_a_file_that_is_no_metrics_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("no\n")
    with pytest.raises(DataError):
        plots.draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")


def test_the_title_names_the_mesh_of_a_split_model():
    summary = {"recipe": "gpt_char", "world_size": 4, "launcher": "mpirun"}
    assert _title(summary) == "gpt_char, 4 ranks"
    assert _title({**summary, "mesh": {"pp": 2, "tp": 2}}) == "gpt_char, 4 ranks on a mesh of pp 2 x tp 2"
