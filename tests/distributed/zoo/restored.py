"""Usage: python -m zoo.restored FOLDER: restore what a sweep of layers has left, in a process of its own.

Prints what differs, and ends with code 1 then.
"""

import json
import sys
from pathlib import Path

from as_keras import assert_same
from world import computing_in

import hvdtrain
from zoo import layers
from zoo.cases import BATCH, EVALUATED, RESTORE, STATES, evaluated_by, folder_of


def fault_of(name: str, case: layers.Case, folder: Path) -> str:
    with computing_in(case.dtype):
        trainer = hvdtrain.Trainer(case.model())
        trainer.restore(folder / STATES)
        evaluated, _ = evaluated_by(trainer, case, batch=BATCH)
    try:
        assert_same(evaluated, json.loads((folder / EVALUATED).read_text()), name, case.tolerance)
    except AssertionError as error:
        return str(error)
    return ""


def main(folder: Path) -> int:
    hvdtrain.init()
    cases = layers.cases()
    found = {name: folder_of(folder, name, RESTORE) for name in cases}
    left = {name: place for name, place in found.items() if (place / EVALUATED).exists()}
    faults = [fault for name, place in left.items() if (fault := fault_of(name, cases[name], place))]
    print(f"{len(left)} restored", *faults, sep="\n")
    return int(bool(faults) or not left)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
