"""Analysis of scripts as one program: which of them use Horovod, on which Keras, and what has to change."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.cli.script.files import scripts_under
from hvdtrain.cli.script.finding import Finding, Replacement
from hvdtrain.cli.script.horovod_uses import HorovodUses
from hvdtrain.cli.script.imports import imports_of
from hvdtrain.cli.script.keras_uses import KerasUses
from hvdtrain.cli.script.kerases import VARIABLE, YES, Facts, keras_findings, setting_of
from hvdtrain.cli.script.program import Program, Resolver, Script
from hvdtrain.config.errors import ConfigError

_WRAPPERS = {"DistributedOptimizer", "PartialDistributedOptimizer"}
_OF_GRAPHS = {"disable_eager_execution", "disable_v2_behavior", "MonitoredTrainingSession"}


@dataclass(frozen=True)
class Judged:
    """A script with its findings, sorted by line, and the replacements of its imports."""

    script: Script
    findings: list[Finding]
    replacements: list[Replacement]
    left_with_keras_2: list[Finding]
    """The manual changes that it would need with tf_keras."""

    @property
    def to_do(self) -> list[Finding]:
        """The findings that need action."""
        return [finding for finding in self.findings if finding.needs_action]


@dataclass(frozen=True)
class Analysis:
    """The scripts of a program that belong to Horovod's use, sorted by path."""

    judged: list[Judged]
    errors: list[str]
    """Files and cells that could not be read."""
    others: list[Path]
    """Scripts in which, and in the imports of which, Horovod is not used."""
    not_named: list[tuple[Path, Path]]
    """Scripts that need action and are not among those the user named, each with a script that imports it."""


def analyse(paths: Sequence[Path], environ: Mapping[str, str] = os.environ) -> Analysis:
    """Read the scripts under `paths` as one program, as it would run in the environment `environ`.

    Raises:
        ConfigError: a path does not exist or a folder has no script.
    """
    program, errors = _read(paths)
    with _deep_recursion():
        return _analysed(program, errors, environ)


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Let trees be visited that are as deep as the parser takes, about three levels for each frame of its limit."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20 * limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _analysed(program: Program, errors: list[str], environ: Mapping[str, str]) -> Analysis:
    groups = _Groups(program)
    users = {path for path, script in program.scripts.items() if _imports_horovod(program, path, script)}
    members = groups.around(users)
    judged = [_judge(program, path, groups.facts(path, environ)) for path in sorted(members)]
    given = [each for each in judged if each.script.is_given]
    others = sorted(script.source.path for path, script in program.scripts.items() if path not in members)
    not_named = [
        (each.script.source.path, groups.importer(each.script))
        for each in judged
        if not each.script.is_given and any(finding.verdict == "change this import" for finding in each.findings)
    ]
    return Analysis(sorted(given, key=lambda each: each.script.source.path), errors, others, not_named)


def _read(paths: Sequence[Path]) -> tuple[Program, list[str]]:
    program = Program(paths)
    errors = []
    for path in scripts_under(paths):
        try:
            script = program.read(path)
        except ConfigError as error:
            if path in paths or b"horovod" in path.read_bytes():
                errors.append(error.message)
            continue
        if path in paths or b"horovod" in script.source.raw:
            errors += script.errors
    program.follow_imports()
    return program, errors


def _imports_horovod(program: Program, path: Path, script: Script) -> bool:
    if b"horovod" not in script.source.raw:
        return False
    found = imports_of(script, program.resolver(path), is_legacy=False)
    return bool(found.findings)


def _judge(program: Program, path: Path, facts: Facts) -> Judged:
    script, resolver = program.scripts[path], program.resolver(path)
    findings, replacements = _findings(script, resolver, facts)
    kept, _ = _findings(script, resolver, replace(facts, is_legacy=True))
    left = [finding for finding in kept if finding.verdict == "needs this change"]
    same = {(finding.line, finding.what) for finding in left}
    marked = [
        replace(each, ends_with_keras_2=each.verdict == "needs this change" and (each.line, each.what) not in same)
        for each in findings
    ]
    return Judged(script, marked, replacements, left)


def _findings(script: Script, resolver: Resolver, facts: Facts) -> tuple[list[Finding], list[Replacement]]:
    """Return findings by line, each once, and the replacements of imports."""
    imports = imports_of(script, resolver, facts.is_legacy)
    first_use = min((finding.line for finding in imports.findings), default=None)
    findings = [
        *imports.findings,
        *keras_findings(script, facts.is_legacy, first_use),
        *HorovodUses(script, resolver, facts).findings(),
        *KerasUses(script, resolver, facts).findings(),
    ]
    ordered = sorted(findings, key=lambda each: (each.line, each.what, each.advice))
    return list(dict.fromkeys(ordered)), imports.replacements


class _Groups:
    """The scripts of a program by their imports of one another."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._imported = {path: program.imported_by(path) for path in program.scripts}
        self._importers: dict[Path, list[Path]] = {}
        for path, imported in self._imported.items():
            for each in imported:
                self._importers.setdefault(each, []).append(path)
        self._facts: dict[Path, tuple[str | None, Facts]] = {}

    def around(self, users: Iterable[Path]) -> set[Path]:
        """Return `users`, the scripts that import them, and all modules that these import."""
        importers = _reachable(users, self._importers)
        return {path for path in _reachable(importers, self._imported) if path in self._program.scripts}

    def importer(self, script: Script) -> Path:
        """Return a script that imports another; one that the user named, if possible."""
        importers = [self._program.scripts[path] for path in self._importers[script.source.path.resolve()]]
        return min(importers, key=lambda each: (not each.is_given, each.source.path)).source.path

    def facts(self, path: Path, environ: Mapping[str, str]) -> Facts:
        """Return what is known of the program to which a script belongs."""
        if path not in self._facts:
            group = self._connected(path)
            self._facts.update(dict.fromkeys(group, self._facts_of(group)))
        setting, facts = self._facts[path]
        return replace(facts, is_legacy=(environ.get(VARIABLE) if setting is None else setting) in YES)

    def _connected(self, path: Path) -> set[Path]:
        both = {each: [*self._imported.get(each, ()), *self._importers.get(each, ())] for each in self._program.scripts}
        return {each for each in _reachable([path], both) if each in self._program.scripts}

    def _facts_of(self, group: set[Path]) -> tuple[str | None, Facts]:
        """Return the value of the variable that chooses a Keras, and the other facts."""
        settings: list[str] = []
        names: set[str] = set()
        for path in sorted(group):
            script = self._program.scripts[path]
            setting = setting_of(script)
            settings += [setting] if setting is not None else []
            names |= _names_of(script)
        loads = "load_model" in names and "enable_unsafe_deserialization" not in names
        has_graphs = bool(names & _OF_GRAPHS) or {"Graph", "as_default"} <= names  # writers have an as_default, too
        facts = Facts(wraps=bool(names & _WRAPPERS), loads=loads, has_graphs=has_graphs)
        return settings[-1] if settings else None, facts


def _names_of(script: Script) -> set[str]:
    """Return the names and attributes in a script."""
    return {getattr(node, "attr", "") or getattr(node, "id", "") for node in script.nodes}


def _reachable(start: Iterable[Path], edges: Mapping[Path, Sequence[Path]]) -> set[Path]:
    reached = set(start)
    pending = list(reached)
    while pending:
        for path in edges.get(pending.pop(), ()):
            if path not in reached:
                reached.add(path)
                pending.append(path)
    return reached
