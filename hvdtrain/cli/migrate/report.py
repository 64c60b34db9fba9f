"""Report of `doctor --script`: what has to change in Horovod scripts, and the exit code."""

import contextlib
import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.cli.migrate.horovod import Facts, Finding, Imports, horovod_uses
from hvdtrain.cli.migrate.keras import VARIABLE, YES, keras_choice, keras_uses, settings_of
from hvdtrain.cli.migrate.program import Script, read_program
from hvdtrain.cli.migrate.source import Source, scripts_under, write
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.observability.wording import plural

NOTHING_TO_DO, TO_DO, FAILED = 0, 1, 2
"""Exit codes."""
_WRAPPERS = {"DistributedOptimizer", "PartialDistributedOptimizer"}
_OF_GRAPHS = {"disable_eager_execution", "disable_v2_behavior", "MonitoredTrainingSession"}
_SEVERAL = 2
"""Number of changes from which on a way around them is shown."""
_SHOWN = 6
"""Places listed in a sentence."""


@dataclass(frozen=True)
class Judged:
    """A script with its findings, sorted by line."""

    source: Source
    findings: list[Finding]
    imports: Imports
    left_with_keras_2: list[int]
    """The lines that need a manual change with tf_keras, too."""

    @property
    def to_do(self) -> list[Finding]:
        """The findings that need action."""
        return [finding for finding in self.findings if finding.needs_action]


@dataclass(frozen=True)
class Analysis:
    """The scripts of a program around its use of Horovod, sorted by path, and what could not be read."""

    judged: list[Judged]
    others: list[Path]
    """Scripts in which, and in the imports of which, Horovod is not used."""
    not_named: list[tuple[Path, Path]]
    """Scripts whose imports have to change and that the user did not name, each with a script that imports it."""
    errors: Sequence[str] = ()


def read_scripts(
    paths: Sequence[Path], *, write_changes: bool, show_all: bool, environ: Mapping[str, str] = os.environ
) -> int:
    """Print the report on scripts, and rewrite their imports if `write_changes`; return the exit code."""
    try:
        analysis = analyse(paths, environ)
        if write_changes:
            codes = [(each.source, each.imports.rewritten()) for each in analysis.judged]
            changed = [(source, source.rewritten(code)) for source, code in codes if code != source.code]
            write([(source.path, after) for source, after in changed])
            for source, after in changed:
                old, new = (raw.decode(source.encoding).splitlines(keepends=True) for raw in (source.raw, after))
                for line in difflib.unified_diff(old, new, str(source.path), str(source.path)):
                    print(line, end="" if line.endswith("\n") else "\n")
            analysis = analyse(paths, environ) if changed else analysis
    except UserError as error:
        return _fail([error.message])
    print("\n".join(lines_of(analysis, show_all=show_all)))
    if analysis.errors:
        return _fail(analysis.errors)
    return TO_DO if analysis.not_named or any(each.to_do for each in analysis.judged) else NOTHING_TO_DO


def _fail(messages: Sequence[str]) -> int:
    for message in messages:
        print(f"hvdtrain: error: {on_command_line(message)}", file=sys.stderr)
    return FAILED


def analyse(paths: Sequence[Path], environ: Mapping[str, str] = os.environ) -> Analysis:
    """Read the scripts under `paths` as one program, as it would run in the environment `environ`.

    Raises:
        ConfigError: a path does not exist or a folder has no script.
    """
    scripts, errors = read_program(paths, scripts_under(paths))
    limit = sys.getrecursionlimit()
    with contextlib.ExitStack() as after:
        after.callback(sys.setrecursionlimit, limit)
        sys.setrecursionlimit(50 * limit)  # for trees as deep as Python's parser takes
        analysis = _analysed(scripts, environ)
    errors |= {each.source.path: each.source.errors for each in scripts.values() if each.is_given}
    named = [path for path in sorted(errors) if path in paths or b"horovod" in path.read_bytes()]
    return replace(analysis, errors=[error for path in named for error in errors[path]])


def _analysed(scripts: Mapping[Path, Script], environ: Mapping[str, str]) -> Analysis:
    imported = {path: script.imported & scripts.keys() for path, script in scripts.items()}
    importers: dict[Path, set[Path]] = {path: set() for path in scripts}
    for path, found in imported.items():
        for each in found:
            importers[each].add(path)
    both = {path: imported[path] | importers[path] for path in scripts}
    with_horovod = [path for path, each in scripts.items() if b"horovod" in each.source.raw]
    users = [path for path in with_horovod if Imports(scripts[path], is_legacy=True).findings]
    members = _reachable(_reachable(users, importers), imported)
    facts: dict[Path, Facts] = {}
    judged, not_named = [], []
    for path in sorted(members, key=lambda each: scripts[each].source.path):
        if path not in facts:
            group = sorted(_reachable([path], both))
            facts |= dict.fromkeys(group, _facts([scripts[each] for each in group], environ))
        result = _judge(scripts[path], facts[path])
        if scripts[path].is_given:
            judged.append(result)
        elif any(finding.verdict == "change this import" for finding in result.findings):
            first = min((scripts[each] for each in importers[path]), key=lambda s: (not s.is_given, s.source.path))
            not_named.append((result.source.path, first.source.path))
    return Analysis(judged, sorted(scripts[path].source.path for path in scripts.keys() - members), not_named)


def _reachable(start: Iterable[Path], edges: Mapping[Path, Iterable[Path]]) -> set[Path]:
    reached: set[Path] = set()
    pending = list(start)
    while pending:
        path = pending.pop()
        if path not in reached:
            reached.add(path)
            pending += edges[path]
    return reached


def _facts(group: Sequence[Script], environ: Mapping[str, str]) -> Facts:
    settings = [value for script in group for _, value in list(settings_of(script))[-1:]]
    names = {getattr(node, "attr", "") or getattr(node, "id", "") for script in group for node in script.nodes}
    return Facts(
        is_legacy=(settings[-1] if settings else environ.get(VARIABLE)) in YES,
        wraps=bool(names & _WRAPPERS),
        loads="load_model" in names and "enable_unsafe_deserialization" not in names,
        has_graphs=bool(names & _OF_GRAPHS) or {"Graph", "as_default"} <= names,  # writers have an as_default, too
    )


def _judge(script: Script, facts: Facts) -> Judged:
    imports, with_keras_2 = Imports(script, is_legacy=facts.is_legacy), Imports(script, is_legacy=True)
    first_use = min((finding.line for finding in imports.findings), default=None)

    def found(imports: Imports, facts: Facts) -> list[Finding]:
        choice = keras_choice(script, facts.is_legacy, first_use)
        return sorted({*imports.findings, *choice, *horovod_uses(script, facts), *keras_uses(script, facts)})

    by_hand = [each for each in found(with_keras_2, replace(facts, is_legacy=True)) if each.is_by_hand]
    left = {(each.line, each.what) for each in by_hand}
    findings = [
        replace(each, ends_with_keras_2=each.is_by_hand and (each.line, each.what) not in left)
        for each in found(imports, facts)
    ]
    return Judged(script.source, findings, imports, [each.line for each in by_hand])


def lines_of(analysis: Analysis, *, show_all: bool = False) -> list[str]:
    """Return the report: what has to change by path and line, ways around it, and the counts."""
    lines = []
    for each in analysis.judged:
        for finding in each.findings if show_all else each.to_do:
            what = " ".join(finding.what.split())
            said = f"{each.source.place(finding.line)}: {what if len(what) <= 100 else f'{what[:97]}...'}"
            arrow = "-> " if finding.verdict == "change this import" else ""
            change = [said, f"    {arrow}{finding.advice}"]
            lines += change if finding.needs_action else [f"{said}: {finding.verdict}"]
    for path, importer in analysis.not_named:
        lines.append(f"{path}: {importer} imports it, and it imports Horovod: name it after --script, too.")
    lines += [f"{path}: no use of Horovod." for path in analysis.others if show_all]
    to_do = [finding for each in analysis.judged for finding in each.to_do]
    of_keras_2 = sum(finding.ends_with_keras_2 for finding in to_do)
    if of_keras_2 >= _SEVERAL:
        left = list(dict.fromkeys(each.source.place(n) for each in analysis.judged for n in each.left_with_keras_2))
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        lines += [
            "",
            f"{of_keras_2} of these changes are needed on Keras 3 only. There are two ways:",
            f"  short: stay with Keras 2: pip install 'tf_keras>=2.21,<2.22', and {VARIABLE}=1 in the environment.",
            f"         By hand then remains: {', '.join(left[:_SHOWN]) or 'nothing'}{more}.",
            "  long:  move to Keras 3: all changes above.",
        ]
    of_tensorflow_1 = sum("tf.compat.v1." in finding.advice for finding in to_do)
    if of_tensorflow_1 >= _SEVERAL:
        lines += [
            "",
            f"{of_tensorflow_1} of these names are TensorFlow 1's. A script with graphs and sessions may keep them:",
            "  import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()",
        ]
    return [*lines, *_counts(analysis)]


def _counts(analysis: Analysis) -> list[str]:
    users = [each for each in analysis.judged if each.findings]
    if not users:
        searched = analysis.others[0] if len(analysis.others) == 1 else f"{len(analysis.others)} scripts"
        return [] if analysis.errors else [f"{searched}: no use of Horovod was found."]
    verdicts = [finding.verdict for each in users for finding in each.findings]
    imports, by_hand = verdicts.count("change this import"), verdicts.count("needs this change")
    works = len(verdicts) - imports - by_hand
    to_do = [f"{plural(imports, 'import')} to change (--write does it)"] if imports else []
    to_do += [f"{plural(by_hand, 'change')} by hand"] if by_hand else []
    start = f"{plural(len(users), 'script')} with Horovod: {', '.join(to_do) or 'nothing to change'}"
    rest = f"{plural(works, 'use')} without a change (--all lists {'it' if works == 1 else 'them'})"
    return [*([""] if to_do else []), f"{start}; {rest}."]
