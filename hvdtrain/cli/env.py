"""`env`: the block to paste into a bug report."""

import argparse
import json

from hvdtrain.runtime.report import collect_environment, report_lines

_DESCRIPTION = """\
Prints versions, machine, MPI, GPUs and environment variables, to paste into a bug report. Variables with
SECRET, KEY, TOKEN, PASSWORD or CREDENTIAL in their name are masked. Works without TensorFlow and without
Horovod.
"""


def main(argv: list[str]) -> int:
    """Print versions, machine and settings."""
    parser = argparse.ArgumentParser(prog="python -m hvdtrain env", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args(argv).json
    facts = collect_environment(full=True)
    print(json.dumps(facts, indent=2) if as_json else "\n".join(report_lines(facts)))
    return 0
