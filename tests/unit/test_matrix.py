"""The rows of tests/matrix name models that there are, and each has the losses of before."""

import json
from pathlib import Path

from tests.matrix.rows import ROWS

MATRIX = Path(__file__).parents[1] / "matrix"


def test_every_row_has_losses_and_a_model():
    from tests.matrix.models import KINDS

    losses = json.loads((MATRIX / "losses.json").read_text(encoding="utf-8"))
    assert list(losses) == list(ROWS), "python -m tests.matrix --write"
    assert all(len(each) == 4 for each in losses.values())
    assert {row.model for row in ROWS.values()} == set(KINDS)
