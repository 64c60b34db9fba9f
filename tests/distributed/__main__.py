"""Run distributed checks by their names, with the terminal attached.

Usage: python -m tests.distributed [--world WORLD] [--pdb RANK] FILE[.CHECK] ...

With `--pdb`, `breakpoint()` stops that rank alone, a check that fails on it stops there too, and nothing times out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.distributed.worlds import DEFAULT, WORLDS, all_checks
from tests.launching import job_environment, launcher


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed")
    parser.add_argument("--world", choices=WORLDS, default=DEFAULT, help=f"where they run (default: {DEFAULT})")
    parser.add_argument("--pdb", type=int, metavar="RANK", help="debug this rank; needs mpirun, which passes stdin on")
    parser.add_argument("checks", nargs="+", metavar="FILE[.CHECK]")
    given = parser.parse_args()
    known = [check.name for check in all_checks()]
    names = [name for each in given.checks for name in known if each in {name, name.split(".")[0]}]
    if unknown := [each for each in given.checks if not any(each in {n, n.split(".")[0]} for n in names)]:
        parser.error(f"no such check: {', '.join(unknown)}")
    launch = WORLDS[given.world]
    if given.pdb is not None and launch.controller == "gloo":
        parser.error("--pdb needs a world under mpirun: horovodrun does not pass the terminal's input on")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        script = [
            str(Path(__file__).with_name("battery.py")),
            str(results),
            folder,
            f"{folder}/references",
            launch.backend,
            *names,
        ]
        words = launcher(launch.controller, launch.size)
        if given.pdb is not None:
            script.append(f"--pdb={given.pdb}")
            words += ["--stdin", str(given.pdb)] if words else []
        code = subprocess.run(
            [*words, sys.executable, *script], env=job_environment(**launch.environ), check=False
        ).returncode
        outcomes = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    for name in names:
        outcome = outcomes.get(name, {"failure": "did not run", "seconds": 0.0})
        print(f"{'FAILED' if outcome['failure'] else 'passed'} {outcome['seconds']:7.2f} s  {name}")
        print(outcome["failure"], end="\n" if outcome["failure"] else "")
    return code or any(outcomes.get(name, {"failure": True})["failure"] for name in names)


if __name__ == "__main__":
    sys.exit(main())
