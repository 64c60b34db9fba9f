"""The report on a user's Horovod script."""

import ast
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.cli.script.calls import calls_of
from hvdtrain.cli.script.finding import Finding
from hvdtrain.cli.script.imports import Replacement, imports_of
from hvdtrain.cli.script.kerases import keras_findings, uses_legacy_keras
from hvdtrain.config.errors import ConfigError


@dataclass(frozen=True)
class Script:
    """A script, with its findings and the replacements of its imports."""

    path: Path
    source: bytes
    findings: list[Finding]
    replacements: list[Replacement]


def read_script(path: Path, environ: Mapping[str, str] = os.environ) -> Script:
    """Analyse a script, as it would run in the environment `environ`, without running it.

    Raises:
        ConfigError: the file does not exist, or is not Python.
    """
    try:
        source = path.read_bytes()
        tree = ast.parse(source, str(path))
    except OSError as error:
        raise ConfigError(f"--script {path}: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"--script {path} is not Python 3: {error}.") from error
    imports = list(imports_of(tree))
    bound = {each.bound: each.module for each in imports}
    findings = [each.finding for each in imports if each.finding]
    first_use = min((finding.line for finding in findings), default=None)
    is_legacy = uses_legacy_keras(tree, environ)
    if first_use is not None:
        findings += keras_findings(tree, is_legacy, first_use)
    findings += calls_of(tree, bound, is_legacy)
    replacements = [each.replacement for each in imports if each.replacement]
    return Script(path, source, sorted(findings, key=lambda f: f.line), replacements)


def lines_of(script: Script) -> list[str]:
    """Return the report: a line per import and call, with advice below, and the counts."""
    if not script.findings:
        return [f"{script.path}: no use of Horovod was found."]
    width = max(len(finding.what) for finding in script.findings)
    lines = []
    for finding in script.findings:
        lines.append(f"{finding.line:>5}  {finding.what:<{width}}  {finding.verdict}")
        if finding.advice:
            lines.append(f"{'':>7}{finding.advice}")
    counts = Counter(finding.verdict for finding in script.findings)
    return [*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]


def needs_hand(script: Script) -> bool:
    """Whether manual changes are needed."""
    return any(finding.verdict == "needs this change" for finding in script.findings)
