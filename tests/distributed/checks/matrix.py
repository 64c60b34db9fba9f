"""The rows of tests/matrix: each ends as one process does, with the losses that it had before."""

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from world import World
from worlds import worlds

from tests.matrix.rows import ROWS, Row
from tests.matrix.training import assert_equal, by_keras, on_ranks

LOSSES = Path(__file__).parents[2] / "matrix" / "losses.json"
DIGITS = 1e-7
"""Rounding differs between machines."""


def check_some_rows(world: World) -> None:
    _train(world, {name: row for name, row in ROWS.items() if row.everyday and row.ranks == world.size})


@worlds("mpirun-2", "gloo-4", extended=True, why="all rows")
def check_all_rows(world: World) -> None:
    mpi = world.controller == "mpi"
    _train(world, {name: row for name, row in ROWS.items() if row.ranks == world.size and (mpi or not row.needs_mpi)})


def _train(world: World, rows: Mapping[str, Row]) -> None:
    """Train each row, and raise what is wrong with any. Collective."""
    chosen = os.environ.get("MATRIX_ROWS", "").split(";")
    known = json.loads(LOSSES.read_text(encoding="utf-8"))
    faults, losses = {}, {}
    for name, row in rows.items():
        if chosen != [""] and name not in chosen:
            continue
        fault = ""
        try:
            found = on_ranks(world, name)
            losses[name] = found.losses
            if not row.unlike:
                assert_equal(name, found, world.reference(by_keras, name))
            if "MATRIX_WRITTEN" not in os.environ:
                np.testing.assert_allclose(found.losses, known[name], rtol=DIGITS, err_msg="losses of before")
        except Exception as error:  # whatever it is, the other rows are tried
            fault = f"{type(error).__name__}: {error}"
            # Where the others wait for this rank, nobody reads more.
            print(f"rank {world.rank}: {name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        every = sorted({each.decode() for each in world.gather(fault.encode())} - {""})
        if every:
            faults[name] = " | ".join(every)
    if world.rank == 0 and "MATRIX_WRITTEN" in os.environ:
        Path(os.environ["MATRIX_WRITTEN"]).write_text(json.dumps(losses), encoding="utf-8")
    assert not faults, "\n\n".join(f"{name}: {fault}" for name, fault in faults.items())
