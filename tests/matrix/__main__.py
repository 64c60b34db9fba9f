"""Train rows of the matrix: `python -m tests.matrix [--world WORLD] [--write] [ROW ...]`.

With `--write`, the losses that come out are those of which later trainings must not differ.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.matrix.rows import ROWS

LOSSES = Path(__file__).with_name("losses.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--world", default="mpirun-2", help="where the rows of as many ranks run (mpirun-2)")
    parser.add_argument("--write", action="store_true", help=f"write the losses into {LOSSES.name}")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all of that many ranks")
    given = parser.parse_args()
    if unknown := sorted(set(given.rows) - set(ROWS)):
        parser.error(f"no such row: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "losses.json")
        chosen = {"MATRIX_ROWS": ";".join(given.rows), **({"MATRIX_WRITTEN": str(written)} if given.write else {})}
        command = [sys.executable, "-m", "tests.distributed", "--world", given.world, "matrix.check_all_rows"]
        code = subprocess.run(command, env={**os.environ, **chosen}, check=False).returncode
        if written.exists():
            known = json.loads(LOSSES.read_text(encoding="utf-8")) | json.loads(written.read_text(encoding="utf-8"))
            lines = [f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in ROWS if name in known]
            LOSSES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
