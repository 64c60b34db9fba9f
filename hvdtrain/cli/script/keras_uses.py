"""Uses of TensorFlow and Keras in a Horovod script that the installed versions do not support."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from hvdtrain.cli.script import keras2
from hvdtrain.cli.script.finding import Finding
from hvdtrain.cli.script.keras_objects import KerasObjects
from hvdtrain.cli.script.kerases import KERASES, Facts, file_name, real_name
from hvdtrain.cli.script.packages import arguments_of, lookup
from hvdtrain.cli.script.program import Resolver, Script
from hvdtrain.cli.script.scopes import Chain, Scope, Target, prefixes

_OF_THE_OLD_COPY = {"layers", "models", "engine", "optimizers", "optimizer_v2", "applications", "Model", "Sequential"}
"""Parts of `tensorflow.python.keras` whose objects Keras 3 and tf_keras refuse."""


@dataclass(frozen=True)
class KerasUses:
    """Judges a script's uses of TensorFlow and Keras."""

    script: Script
    resolver: Resolver
    facts: Facts

    def findings(self) -> Iterator[Finding]:
        """Yield what has to change."""
        for node in self.script.nodes:
            if isinstance(node, ast.ImportFrom) and node.level == 0 and not self._is_guarded(node):
                yield from self._of_import(node)
            elif isinstance(node, ast.Import) and not self._is_guarded(node):
                for alias in node.names:
                    yield from self._of_module(node, f"import {alias.name}", tuple(alias.name.split(".")))
        for chain in self.script.chains:
            if not self._is_guarded(chain.node):
                yield from self._of_chain(chain)

    def _of_import(self, node: ast.ImportFrom) -> Iterator[Finding]:
        module = node.module or ""
        for alias in node.names:
            name = () if alias.name == "*" else (alias.name,)
            yield from self._of_module(node, f"from {module} import {alias.name}", (*module.split("."), *name))

    def _of_module(self, node: ast.stmt, said: str, target: Target) -> Iterator[Finding]:
        advice = self._missing(target)
        if advice:
            yield Finding(node.lineno, said, "needs this change", advice)

    def _of_chain(self, chain: Chain) -> Iterator[Finding]:
        targets = self.resolver.targets(chain.node, chain.scope)
        if targets:
            said_of_each = [self._of_target(target, chain) for target in sorted(targets)]
            advice = said_of_each[0] if all(said_of_each) else ""  # one of several may have what others lack
        else:
            objects = KerasObjects(self.resolver, self.facts)
            advice = next((said for each in prefixes(chain) if (said := objects.advice(each))), "")
        if advice:
            said = ast.unparse(chain.node) + ("(...)" if chain.call is not None else "")
            yield Finding(chain.node.lineno, said, "needs this change", advice)

    def _of_target(self, target: Target, chain: Chain) -> str:
        """Return advice on the use of a name that is known to be of TensorFlow, Keras or Horovod."""
        if target[0] in ("horovod", "hvdtrain"):
            is_load = chain.call is not None and target[-1] == "load_model" and not self.facts.is_legacy
            return self._of_h5(chain.call, chain.scope) if is_load and chain.call else ""
        is_imported = isinstance(chain.node, ast.Name)  # then its import is judged
        advice = "" if is_imported else self._missing(target)
        return advice or (self._of_call(target, chain.call, chain.scope) if chain.call else "")

    @cached_property
    def _guarded(self) -> set[ast.AST]:
        """Nodes that run only on some versions: in a `try`, or below an `if` about versions."""
        guarded: set[ast.AST] = set()
        for node in self.script.nodes:
            if isinstance(node, ast.Try) and any(map(_catches_missing_names, node.handlers)):
                guarded.update(each for statement in node.body for each in ast.walk(statement))
            elif isinstance(node, (ast.If, ast.IfExp)) and _is_about_versions(node.test):
                guarded.update(ast.walk(node))
        return guarded

    def _is_guarded(self, node: ast.AST) -> bool:
        return node in self._guarded

    def _missing(self, target: Target) -> str:
        """Return advice if the installed TensorFlow or Keras lacks a name; else an empty string."""
        if target[0] not in ("tensorflow", *KERASES):
            return ""
        if target[:2] == ("tensorflow", "python"):
            is_of_old_keras = target[2:3] == ("keras",) and not _OF_THE_OLD_COPY.isdisjoint(target[3:])
            return "it belongs to an old copy of Keras, of which others take nothing: use tf.keras." * is_of_old_keras
        is_legacy = self.facts.is_legacy
        real = real_name(target, is_legacy)
        if not is_legacy and "legacy" in target and "optimizers" in target:
            return "Keras 3 has no legacy optimizers: leave .legacy out."
        if not is_legacy and target[:4] == ("tensorflow", "compat", "v1", "layers"):
            return "it needs tf_keras: use keras.layers."
        if lookup(real)[0] != "missing":
            return ""
        package = "tf_keras" if real[0] == "tf_keras" else "Keras 3" if real[0] == "keras" else "TensorFlow 2"
        shown = ".".join(("tf", *target[1:]) if target[0] == "tensorflow" else target)
        return f"{package} has no {shown}: {_instead(target, is_legacy)}"

    def _of_call(self, target: Target, call: ast.Call, scope: Scope) -> str:
        """Return advice on the arguments of a function or class of Keras."""
        real = real_name(target, self.facts.is_legacy)
        if real[0] not in KERASES:
            return "" if self.facts.is_legacy else self._of_symbolic(target, call, scope)
        named = {keyword.arg for keyword in call.keywords if keyword.arg}
        if "optimizers" in target:
            return self._of_optimizer(target, named)
        return self._unknown_argument(real, named) or (
            "" if self.facts.is_legacy else self._of_keras_3(target, call, named, scope)
        )

    def _of_optimizer(self, target: Target, named: set[str]) -> str:
        if not self.facts.is_legacy:
            return next((advice for name, advice in keras2.OPTIMIZER_KEYWORDS.items() if name in named), "")
        if "legacy" in target or target[:3] == ("tensorflow", "compat", "v1"):
            return ""
        if "lr" in named:
            return "the argument is called learning_rate; lr is passed over."
        if "decay" in named:
            return "decay is for the optimizers of optimizers.legacy: use one, or pass a schedule as learning_rate."
        return ""

    def _unknown_argument(self, real: Target, named: set[str]) -> str:
        place = lookup(real)[1]
        takes = arguments_of(place) if place else None
        if takes is None or takes.kwarg is not None:
            return ""
        known = {arg.arg for arg in [*takes.posonlyargs, *takes.args, *takes.kwonlyargs]}
        unknown = sorted(named - known)
        return f"{real[-1]} takes no {unknown[0]}: {keras2.HINTS.get(unknown[0], 'leave it out.')}" if unknown else ""

    def _of_keras_3(self, target: Target, call: ast.Call, named: set[str], scope: Scope) -> str:
        symbol = target[-1]
        if "layers" in target:
            if symbol == "Lambda" and self.facts.loads:
                return "load_model refuses Lambda layers: keras.config.enable_unsafe_deserialization() before it."
            return next((advice for name, advice in keras2.LAYER_KEYWORDS.items() if name in named), "")
        if symbol == "Model":
            return next((advice for name, advice in keras2.MODEL_KEYWORDS.items() if name in named), "")
        if symbol == "ModelCheckpoint":
            return self._of_checkpoint(call, scope)
        if symbol == "set_value" and call.args:
            is_rate = isinstance(call.args[0], ast.Attribute) and call.args[0].attr == "learning_rate"
            return f"{ast.unparse(call.args[0])} = value." if is_rate else ""
        if symbol == "save_model" and len(call.args) > 1:
            path = self.resolver.constant(call.args[1], scope)
            return "" if path is None or path.endswith((".keras", ".h5", ".hdf5")) else keras2.SAVE
        return self._of_h5(call, scope) if symbol == "load_model" else ""

    def _of_checkpoint(self, call: ast.Call, scope: Scope) -> str:
        path = file_name(self.resolver, call, scope)
        only = next((ast.unparse(k.value) for k in call.keywords if k.arg == "save_weights_only"), "False")
        endings = (".weights.h5",) if only == "True" else (".keras", ".h5")
        if path is None or only not in ("True", "False") or path.endswith(endings):
            return ""
        return f"Keras 3 needs a file name that ends in {endings[0]}{' with save_weights_only' * (only == 'True')}."

    def _of_h5(self, call: ast.Call, scope: Scope) -> str:
        path = file_name(self.resolver, call, scope)
        compiles = all(ast.unparse(k.value) != "False" for k in call.keywords if k.arg == "compile")
        if path is None or not path.endswith((".h5", ".hdf5")) or not compiles:
            return ""
        return "Keras 3 does not read every .h5 file of Keras 2 (losses by name, Lambda layers): save and load .keras."

    def _of_symbolic(self, target: Target, call: ast.Call, scope: Scope) -> str:
        """Find functions of TensorFlow that are called with the symbolic tensor of a functional model."""
        for arg in call.args:
            if any(map(self._is_symbolic, self.resolver.values(arg, scope) or [(arg, scope)])):
                return f"Keras 3 refuses symbolic tensors here: use keras.ops, or a Lambda layer around {target[-1]}."
        return ""

    def _is_symbolic(self, value: tuple[ast.expr, Scope]) -> bool:
        node, scope = value
        if not isinstance(node, ast.Call):
            return False
        layer = node.func.func if isinstance(node.func, ast.Call) and node.args else None
        made = [real_name(target, False) for target in self.resolver.targets(layer or node.func, scope)]
        return any(t[0] == "keras" and ("layers" in t if layer else t[-1] == "Input") for t in made)


def _instead(target: Target, is_legacy: bool) -> str:
    """Return advice on a name that does not exist."""
    v1 = ("tensorflow", "compat", "v1", *target[1:])
    hint = next((keras2.NAME_HINTS[part] for part in reversed(target) if part in keras2.NAME_HINTS), "")
    if target[0] == "tensorflow" and "keras" not in target and lookup(v1)[0] == "exists":
        name = f"tf.{'.'.join(v1[1:])}"
        return f"use {name}; {hint}" if hint else f"use {name}."
    if hint:
        return hint
    for left_out in range(1, len(target) - 2):
        for kept in combinations(range(1, len(target) - 1), len(target) - 2 - left_out):
            shorter = (target[0], *(target[index] for index in kept), target[-1])
            if lookup(real_name(shorter, is_legacy))[0] == "exists" and len(shorter) > 2:
                return f"use {'.'.join(shorter)}."
    return "use another."


def _catches_missing_names(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else "Exception"
    return any(name in caught for name in ("ImportError", "ModuleNotFoundError", "AttributeError", "Exception"))


def _is_about_versions(test: ast.expr) -> bool:
    said = ast.unparse(test).lower()
    return "version" in said or "hasattr(" in said or "is_tf2" in said or "tf2.enabled" in said
