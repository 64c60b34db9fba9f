"""What is said of a user's Horovod script."""

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
    """A script, what it does with Horovod, and how its imports are rewritten."""

    path: Path
    source: bytes
    findings: list[Finding]
    replacements: list[Replacement]


def read_script(path: Path, environ: Mapping[str, str] = os.environ) -> Script:
    """Read a script, which would be started in `environ`, without running it.

    Raises:
        ConfigError: there is no such file, or it is not Python.
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
    """Return the report: a line for each import and call, advice under it, and the counts."""
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
    """Tell whether something must be changed by hand."""
    return any(finding.verdict == "needs this change" for finding in script.findings)
