"""Horovod in a script: its imports, their replacements, and uses of its functions, classes and constants."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import libcst as cst
from libcst.metadata import ExpressionContext

from hvdtrain.cli.migrate.packages import (
    COMPUTE_SERVICE,
    COUNTERPARTS,
    FACE,
    FACES,
    face_has,
    is_missing,
    parameters_of,
    split_module,
)
from hvdtrain.cli.migrate.program import Chain, Script, has_fromlist, name_of, text_of
from hvdtrain.config.errors import ConfigError

Verdict = Literal["works as is", "works with the import changed", "needs this change", "change this import"]
_ORDER: tuple[Verdict, ...] = ("works as is", "works with the import changed", "needs this change")
_WITH_OWN_KERAS = ("horovod.spark.keras", "horovod.spark.tensorflow", "horovod._keras")
_OF_TENSORFLOW = (
    "TensorFlow has the service itself, in tf.data.experimental.service: docs/data.md, Reading and decoding on other "
    "hosts."
)
_IN_GRAPHS = "it works in graphs with sessions, after tf.compat.v1.disable_v2_behavior(). Eagerly use "
_OF_GRAPHS = {
    "BroadcastGlobalVariablesHook": f"{_IN_GRAPHS}hvd.callbacks.BroadcastGlobalVariablesCallback(0) in model.fit, or "
    "hvd.broadcast_variables in a loop.",
    "broadcast_global_variables": f"{_IN_GRAPHS}hvd.broadcast_variables(model.variables + optimizer.variables, "
    "root_rank=0).",
}
_SAME_ORDER = {"DistributedOptimizer": 8, "BestModelCheckpoint": 2}
"""Number of positional arguments that `horovod.keras` and `horovod.tensorflow.keras` share."""


@dataclass(frozen=True, order=True)
class Finding:
    """A use of Horovod, TensorFlow or Keras in a script, as the script spells it, with its verdict."""

    line: int
    what: str
    advice: str = ""
    """The change; empty if none is needed."""
    verdict: Verdict = "needs this change"
    ends_with_keras_2: bool = False
    """Whether the change is not needed with tf_keras."""

    @property
    def is_by_hand(self) -> bool:
        """Whether the user has to make the change."""
        return self.verdict == "needs this change"

    @property
    def needs_action(self) -> bool:
        """Whether the script has to change here."""
        return self.verdict in ("change this import", "needs this change")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a program: uses tf_keras, wraps optimizers, loads models (Lambda layers refused), runs graphs."""

    is_legacy: bool
    wraps: bool
    loads: bool
    has_graphs: bool


def name_use(script: Script, chain: Chain) -> str:
    """Return a dotted expression as a finding shows it."""
    decorator = "@" if chain in script.code.decorators else ""
    return f"{decorator}{text_of(chain)}{'(...)' if chain in script.code.calls else ''}"


def named_arguments(call: cst.Call) -> dict[str, str]:
    """Return the text of each keyword argument."""
    return {arg.keyword.value: text_of(arg.value) for arg in call.args if arg.keyword}


def positional_arguments(call: cst.Call) -> list[cst.BaseExpression]:
    """Return the positional arguments, with what is behind a star."""
    return [arg.value for arg in call.args if not arg.keyword and arg.star != "**"]


def horovod_uses(script: Script, facts: Facts) -> Iterator[Finding]:
    """Judge each use of Horovod that is not an import."""
    for chain in script.code.chains:
        if script.code.contexts[chain] is ExpressionContext.LOAD:
            judged = [each for target in script.targets(chain) if (each := _judge(script, facts, target, chain))]
            if judged:  # a name may be one of several frameworks': one of them is enough
                order, advice = min(judged)
                yield Finding(script.line(chain), name_use(script, chain), advice, _ORDER[order])


def _judge(script: Script, facts: Facts, target: str, chain: Chain) -> tuple[int, str] | None:
    """Return the index of a verdict, and advice; None for a module, and for names that are not Horovod's."""
    module, rest = split_module(target)
    if not module and rest[0] == "horovod" and len(rest) > 1 and not rest[1].startswith("__"):
        is_gone = is_missing(f"horovod.{rest[1]}") or is_missing(target)
        return (2, f"{target} is not part of Horovod 0.28.1.") if is_gone else (0, "")
    if not module or not rest or rest[0].startswith("__"):
        return None
    if f"{target}.".startswith(f"{COMPUTE_SERVICE}."):
        return 2, _OF_TENSORFLOW
    ours = COUNTERPARTS.get(module, module)
    if not face_has(ours, rest[0]):
        is_horovods = not is_missing(f"{FACES.get(module, module)}.{rest[0]}")
        return 2, f"{ours} has no {rest[0]}." if is_horovods else f"{rest[0]} is not part of Horovod 0.28.1."
    call = script.code.calls.get(chain)
    advice = _of_arguments(script, facts, call, module=module, symbol=rest[0]) if call and len(rest) == 1 else ""
    return (2, advice) if advice else (int(module not in FACES), "")


def _of_arguments(script: Script, facts: Facts, call: cst.Call, module: str, symbol: str) -> str:
    """Return the change that the arguments of a call need."""
    ours = COUNTERPARTS.get(module, module)
    named, positional = named_arguments(call), positional_arguments(call)
    if named.get("legacy_opts") == "True" and not facts.is_legacy:
        return "Keras 3 has no legacy optimizers: leave legacy_opts out."
    if symbol == "DistributedOptimizer" and positional:
        made = script.made_by(positional[0])
        is_v1 = any(target.startswith("tensorflow.compat.v1.train.") for target in made)
        if is_v1 and ours != FACE:
            return f"optimizers of tf.compat.v1.train are wrapped by {FACE}.DistributedOptimizer."
        if not is_v1 and named.get("op", "").endswith("Adasum") and not (facts.has_graphs and not made):
            return "Keras optimizers take no Adasum: hvd.DistributedGradientTape(tape, op=hvd.Adasum)."
    if symbol in _OF_GRAPHS and not facts.has_graphs:
        return _OF_GRAPHS[symbol]
    if symbol == "TensorFlowState" and not facts.has_graphs:
        if named.get("session", "None") != "None":
            return "TensorFlow 2 has no sessions: leave session out."
        if not positional and "variables" not in named:
            return "TensorFlow 2 keeps no list of all variables: pass variables=model.variables + optimizer.variables."
    if module.startswith("horovod.keras") and len(positional) > (moved := _SAME_ORDER.get(symbol, 99)):
        return f"name the arguments after the first {moved}: their order is another."
    takes = parameters_of(f"{ours}.{symbol}")
    if takes is None or any(arg.star == "*" for arg in call.args):
        return ""
    known = [arg.arg for arg in [*takes.posonlyargs, *takes.args] if arg.arg != "self"]
    unknown = sorted(named.keys() - known - {arg.arg for arg in takes.kwonlyargs}) if not takes.kwarg else []
    if unknown:
        return f"{symbol} takes no {unknown[0]}."
    required = set(known[len(positional) : len(known) - len(takes.defaults)]) - named.keys()
    is_open = any(arg.star for arg in call.args)
    return f"{symbol} needs {' and '.join(sorted(required, key=known.index))}." if required and not is_open else ""


class Imports:
    """Findings about a script's imports of Horovod, and the code with these imports changed."""

    def __init__(self, script: Script, *, is_legacy: bool) -> None:
        self.findings: list[Finding] = []
        self._edits: dict[cst.CSTNode, object] = {}
        self._script = script
        self._is_legacy = is_legacy
        aliases = [each for node in script.code.imports if isinstance(node, cst.Import) for each in node.names]
        plain = {text_of(each.name) for each in aliases if not each.asname}
        self._plain = {name for name in plain if name.split(".")[0] == "horovod"}
        """Modules that are imported without `as`, so that every use spells them out."""
        self._spelled: dict[str, None] = {}
        """Their counterparts, in order of use; `horovod` for its other parts."""
        for chain in script.code.chains if self._plain else ():
            self._spelled_out(chain)
        for node in script.code.imports:
            if isinstance(node, cst.Import):
                for alias in node.names:
                    self._import(node, alias)
            elif node.module and not node.relative:
                self._from(node, text_of(node.module))
        for call in script.code.calls.values():
            if call.args and name_of(call.func):
                self._call(call, call.args[0].value)

    def rewritten(self) -> str:
        """Return the script's code after the changes.

        Raises:
            ConfigError: LibCST cannot print the script byte for byte, as with a form feed at its start.
        """
        if self._edits and self._script.code.rewritten({}) != self._script.source.code:
            raise ConfigError(f"--write cannot keep the bytes of {self._script.source.path}. Nothing was written.")
        return self._script.code.rewritten(self._edits) if self._edits else self._script.source.code

    def _add(self, node: cst.CSTNode, said: str, advice: str, edits: Mapping[Any, object] | None = None) -> None:
        verdict: Verdict = "change this import" if edits else "needs this change" if advice else "works as is"
        self.findings.append(Finding(self._script.line(node), said, advice, verdict))
        self._edits |= edits or {}

    def _warn_of_own_keras(self, node: cst.Import | cst.ImportFrom, module: str) -> None:
        if module.startswith(_WITH_OWN_KERAS) and not self._is_legacy:
            advice = "it trains with plain Horovod, which reduces no gradients on Keras 3: set TF_USE_LEGACY_KERAS=1."
            self._add(node, text_of(node), advice)

    def _spelled_out(self, chain: Chain) -> None:
        """Let `horovod.tensorflow`, imported without `as`, be its counterpart."""
        parts: list[cst.BaseExpression] = [chain]
        while isinstance(parts[-1], cst.Attribute):
            parts.append(parts[-1].value)
        if name_of(parts[-1]) == "horovod" and "horovod" in self._script.targets(parts[-1]):
            if f"{text_of(chain)}.".startswith(f"{COMPUTE_SERVICE}."):
                self._spelled["horovod"] = None
                return
            module, rest = split_module(text_of(chain))
            self._spelled[COUNTERPARTS.get(module, "horovod")] = None
            if module:
                self._edits[parts[len(rest)]] = cst.parse_expression(COUNTERPARTS[module])

    def _import(self, node: cst.Import, alias: cst.ImportAlias) -> None:
        name = text_of(alias.name)
        if not _is_horovods(name):
            return
        said = f"import {name}" + (f" as {alias.evaluated_alias}" if alias.asname else "")
        ours = {COUNTERPARTS[name]: None} if name in COUNTERPARTS else {}
        if not alias.asname:
            others = self._plain - COUNTERPARTS.keys()
            if name == "horovod" and not self._plain & COUNTERPARTS.keys() and self._spelled.keys() - {"horovod"}:
                ours = {each: None for each in self._spelled if each != "horovod"}
            if ours and "horovod" in self._spelled and not others - {name}:
                ours |= {"horovod": None}
        new = [cst.ImportAlias(cst.parse_expression(each)) for each in ours]  # type: ignore[arg-type]
        if new:
            edit = cst.FlattenSentinel([*new[:-1], alias.with_changes(name=new[-1].name)])
            self._add(node, said, said.replace(name, ", ".join(ours)), {alias: edit})
        else:
            self._add(node, said, _lacking(name))
        self._warn_of_own_keras(node, name)

    def _from(self, node: cst.ImportFrom, module: str) -> None:
        if not _is_horovods(module):
            return
        aliases = [] if isinstance(node.names, cst.ImportStar) else list(node.names)
        names = {alias: f"{module}.{alias.evaluated_name}" for alias in aliases}
        ours = COUNTERPARTS.get(module)
        changed = [each for each in aliases if names[each] in COUNTERPARTS]
        others = [each for each in aliases if each not in changed]
        if ours:
            lacking = [each for each in others if not face_has(ours, each.evaluated_name)]
            for alias in lacking:
                self._add(node, f"from {module} import {alias.evaluated_name}", _lacking(names[alias]))
            new = node.with_changes(module=cst.parse_expression(ours))
            if not lacking:
                self._add(node, text_of(node), text_of(new), {node: new})
            return
        for alias in others:
            self._add(node, _from(module, [alias]), _lacking(names[alias]))
        if not aliases:
            self._add(node, text_of(node), _lacking(module))
        if changed:
            each_as = [f"{COUNTERPARTS[names[a]]} as {a.evaluated_alias or a.evaluated_name}" for a in changed]
            after = "; ".join([*(f"import {each}" for each in each_as), *([_from(module, others)] if others else [])])
            edit = cst.FlattenSentinel(cst.parse_statement(after).body)  # type: ignore[arg-type]
            self._add(node, text_of(node), after, {node: edit})
        self._warn_of_own_keras(node, module)

    def _call(self, call: cst.Call, name: cst.BaseExpression) -> None:
        """Judge `import_module(…)`, `__import__(…)`, and functions that by their name import a module, too."""
        said, module = text_of(call) if _string(name).startswith("horovod") else "", _string(name)
        ours = COUNTERPARTS.get(module)
        if not self._script.is_importer(call):
            for node in positional_arguments(call):
                ours = COUNTERPARTS.get(_string(node))
                if ours and any(word in name_of(call.func).lower() for word in ("import", "lazy", "load", "module")):
                    self._add(node, text_of(node), f"if this names a module to import: '{ours}'.")
        elif ours and name_of(call.func) == "__import__" and not has_fromlist(call):
            self._add(call, said, f"it gives horovod, the package around it: import {ours}.")
        elif ours and isinstance(name, cst.SimpleString) and name.raw_value == module:
            edit = name.with_changes(value=name.value.replace(module, ours))
            self._add(call, said, said.replace(module, ours), {name: edit})
        elif ours:
            self._add(call, said, f"import {ours}.")
        elif _is_horovods(module):
            self._add(call, text_of(call), _lacking(module))
        elif not module and _first_words(name).startswith("horovod"):
            self._add(call, text_of(call), f"for TensorFlow and Keras the name must be {FACE} or {FACE}.keras.")


def _is_horovods(module: str) -> bool:
    return module.split(".")[0] == "horovod" or f"{module}.".startswith(f"{FACE}.")


def _lacking(name: str) -> str:
    """Return advice on the import of a name that does not exist; empty if it does."""
    if f"{name}.".startswith(f"{COMPUTE_SERVICE}."):
        return _OF_TENSORFLOW
    module, rest = split_module(name)
    if module in FACES and rest and not face_has(module, rest[0]):
        return f"{rest[0]} is not part of {module}."
    if module in COUNTERPARTS and rest and not face_has(COUNTERPARTS[module], rest[0]) and not is_missing(name):
        return f"{COUNTERPARTS[module]} has no {rest[0]}: import what you use by its public name."
    return f"{name} is not part of Horovod 0.28.1." if is_missing(name) else ""


def _from(module: str, aliases: Sequence[cst.ImportAlias]) -> str:
    names = (f"{each.evaluated_name}{f' as {each.evaluated_alias}' if each.asname else ''}" for each in aliases)
    return f"from {module} import {', '.join(names)}"


def _string(node: cst.BaseExpression) -> str:
    value = getattr(node, "evaluated_value", "")
    return value if isinstance(value, str) else ""


def _first_words(node: cst.BaseExpression) -> str:
    """Return the constant start of a string that is put together."""
    if isinstance(node, cst.BinaryOperation):
        return _first_words(node.left)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return _first_words(node.func.value)
    if isinstance(node, cst.FormattedString):
        return str(getattr(node.parts[0], "value", "")) if node.parts else ""
    return _string(node)
