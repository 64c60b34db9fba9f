"""What `doctor --script` prints, writes and returns."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.cli.script.analysis import Analysis, Judged, analyse
from hvdtrain.cli.script.finding import Finding
from hvdtrain.cli.script.kerases import VARIABLE
from hvdtrain.cli.script.rewrite import changes_of, write
from hvdtrain.config.errors import UserError, on_command_line

NOTHING_TO_DO, TO_DO, FAILED = 0, 1, 2
"""Exit codes."""
_SEVERAL = 2
"""Number of changes for Keras 3 from which on tf_keras is recommended."""
_SHOWN = 6
"""Places listed in a sentence."""


def read_scripts(
    paths: Sequence[Path], *, write_changes: bool, show_all: bool, environ: Mapping[str, str] = os.environ
) -> int:
    """Print the report on scripts, and rewrite their imports if `write_changes`; return the exit code."""
    try:
        analysis = analyse(paths, environ)
        if write_changes:
            changes = changes_of((each.script.source, each.replacements) for each in analysis.judged)
            write(changes)
            for change in changes:
                print(change.difference(), end="")
            analysis = analyse(paths, environ) if changes else analysis
    except UserError as error:
        return _fail([error.message])
    print("\n".join(lines_of(analysis, show_all=show_all)))
    return _fail(analysis.errors) if analysis.errors else exit_code(analysis)


def _fail(messages: Sequence[str]) -> int:
    for message in messages:
        print(f"hvdtrain: error: {on_command_line(message)}", file=sys.stderr)
    return FAILED


def exit_code(analysis: Analysis) -> int:
    """Return 1 if a script has to change, else 0."""
    return TO_DO if analysis.not_named or any(each.to_do for each in analysis.judged) else NOTHING_TO_DO


def lines_of(analysis: Analysis, *, show_all: bool = False) -> list[str]:
    """Return the report: what has to change by path and line, the two ways with Keras 2's idioms, and the counts."""
    lines = [line for each in analysis.judged for line in _lines_of_script(each, show_all)]
    for path, importer in analysis.not_named:
        lines.append(f"{path}: {importer} imports it, and it imports Horovod: name it after --script, too.")
    if show_all:
        lines += [f"{path}: no use of Horovod." for path in analysis.others]
    lines += _two_ways(analysis) + _of_tensorflow_1(analysis)
    return [*lines, *_counts(analysis)]


def _lines_of_script(judged: Judged, show_all: bool) -> Iterator[str]:
    source = judged.script.source
    for finding in judged.findings if show_all else judged.to_do:
        if finding.needs_action:
            yield f"{source.place(finding.line)}: {_short(finding.what)}"
            yield f"    {_advice(finding)}"
        else:
            yield f"{source.place(finding.line)}: {_short(finding.what)}: {finding.verdict}"


def _advice(finding: Finding) -> str:
    return f"-> {finding.advice}" if finding.verdict == "change this import" else finding.advice


def _short(what: str) -> str:
    """Return a use on one line."""
    line = " ".join(what.split())
    return line if len(line) <= 100 else f"{line[:97]}..."


def _two_ways(analysis: Analysis) -> list[str]:
    """Compare Keras 2 with the changes for Keras 3, where these are several."""
    of_keras_2 = [each for judged in analysis.judged for each in judged.to_do if each.ends_with_keras_2]
    if len(of_keras_2) < _SEVERAL:
        return []
    left = [
        judged.script.source.place(finding.line) for judged in analysis.judged for finding in judged.left_with_keras_2
    ]
    return [
        "",
        f"{len(of_keras_2)} of these changes are needed on Keras 3 only. There are two ways:",
        f"  short: stay with Keras 2: pip install 'tf_keras>=2.21,<2.22', and {VARIABLE}=1 in the environment.",
        f"         By hand then remains: {_listed(list(dict.fromkeys(left)))}.",
        "  long:  move to Keras 3: all changes above.",
    ]


def _listed(places: Sequence[str]) -> str:
    shown = ", ".join(places[:_SHOWN]) or "nothing"
    return shown + (f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else "")


def _of_tensorflow_1(analysis: Analysis) -> list[str]:
    """Say how scripts for TensorFlow 1 keep its names, where several of them are used."""
    names = [each for judged in analysis.judged for each in judged.to_do if "tf.compat.v1." in each.advice]
    if len(names) < _SEVERAL:
        return []
    return [
        "",
        f"{len(names)} of these names are TensorFlow 1's. A script with graphs and sessions may keep them:",
        "  import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()",
    ]


def _counts(analysis: Analysis) -> list[str]:
    users = [each for each in analysis.judged if each.findings]
    if not users:
        if analysis.errors:
            return []
        if len(analysis.others) == 1:
            return [f"{analysis.others[0]}: no use of Horovod was found."]
        return [f"{len(analysis.others)} scripts: no use of Horovod was found."]
    findings = [finding for each in users for finding in each.findings]
    imports = sum(finding.verdict == "change this import" for finding in findings)
    by_hand = sum(finding.verdict == "needs this change" for finding in findings)
    works = len(findings) - imports - by_hand
    to_do = [f"{_number(imports, 'import')} to change (--write does it)"] if imports else []
    to_do += [f"{_number(by_hand, 'change')} by hand"] if by_hand else []
    start = f"{_number(len(users), 'script')} with Horovod"
    rest = f"{_number(works, 'use')} without a change (--all lists {'it' if works == 1 else 'them'})"
    return [*([""] if to_do else []), f"{start}: {', '.join(to_do) or 'nothing to change'}; {rest}."]


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
