"""TensorFlow and Keras in a Horovod script: names, arguments and members that the installed versions lack."""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations

import libcst as cst

from hvdtrain.cli.migrate import keras2
from hvdtrain.cli.migrate.horovod import Facts, Finding, name_use, named_arguments, positional_arguments
from hvdtrain.cli.migrate.packages import find, is_missing, parameters_of
from hvdtrain.cli.migrate.program import Chain, Script, name_of, text_of

VARIABLE = "TF_USE_LEGACY_KERAS"
YES = ("1", "true", "True")
"""Values that TensorFlow accepts as true."""
_LAZY = {"losses", "metrics", "optimizers", "initializers"}
"""Modules of Keras that TensorFlow offers at its top."""
_OF_THE_OLD_COPY = {"layers", "models", "engine", "optimizers", "optimizer_v2", "applications", "Model", "Sequential"}
"""Parts of `tensorflow.python.keras` whose objects Keras 3 and tf_keras refuse."""

_OTHER_KERAS = {
    "tf_keras": f"tf_keras is for scripts with os.environ['{VARIABLE}'] = '1' above their imports.",
    "keras": f"keras is Keras 3, and with {VARIABLE} Horovod trains tf_keras: from tensorflow import keras.",
}
_MISSING_NAMES = re.compile("ImportError|ModuleNotFoundError|AttributeError|Exception")
_VERSIONS = re.compile(r"version|hasattr\(|is_tf2|tf2\.enabled")


def settings_of(script: Script) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield settings of the variable: `os.environ[…] = "1"`, and `os.environ.setdefault(…, "1")`."""
    for node in script.nodes:
        match node:
            case (
                ast.Assign(
                    targets=[ast.Subscript(value=owner, slice=ast.Constant(value=name)), *_],
                    value=ast.Constant(value=value),
                )
                | ast.Call(
                    func=ast.Attribute(value=owner, attr="setdefault"),
                    args=[ast.Constant(value=name), ast.Constant(value=value)],
                )
            ) if name == VARIABLE and ast.unparse(owner).endswith("environ"):
                yield node, str(value)


def keras_choice(script: Script, is_legacy: bool, first_use: int | None) -> Iterator[Finding]:
    """Judge a script's choice of Keras, which must stand above `first_use`, its first import of Horovod."""
    for setting, value in settings_of(script):
        if value in YES and first_use is not None and setting.lineno > first_use:
            advice = "it is too late here: set it above the import of Horovod, which decides on a Keras."
            yield Finding(setting.lineno, ast.unparse(setting), advice)
        elif value in YES:
            yield Finding(setting.lineno, ast.unparse(setting), verdict="works as is")
    for node, module, member in script.code.imported_names():
        package, said = module.split(".")[0], f"{'from' if member else 'import'} {module}"
        if package == "tf_keras" and is_legacy:
            yield Finding(script.line(node), said, verdict="works as is")
        elif package == "tf_keras" or (package == "keras" and is_legacy):
            yield Finding(script.line(node), said, _OTHER_KERAS[package])


def keras_uses(script: Script, facts: Facts) -> Iterator[Finding]:
    """Find what has to change, but for lines in a `try` for missing names, and below tests of versions."""
    guarded: set[int] = set()
    for node in script.nodes:
        blocks: list[ast.stmt | ast.expr] = []
        if isinstance(node, ast.Try):
            caught = " ".join(ast.unparse(each.type) if each.type else "Exception" for each in node.handlers)
            blocks += node.body if _MISSING_NAMES.search(caught) else []
        elif isinstance(node, ast.If | ast.IfExp) and _VERSIONS.search(ast.unparse(node.test).lower()):
            blocks.append(node)
        for block in blocks:
            guarded.update(range(block.lineno, (block.end_lineno or block.lineno) + 1))
    judge = _Judge(script, facts)
    yield from (each for each in [*judge.imports(), *judge.chains()] if each.line not in guarded)


class _Judge:
    """Advice on names, calls and members."""

    def __init__(self, script: Script, facts: Facts) -> None:
        self._script = script
        self._facts = facts
        self._is_legacy = facts.is_legacy

    def imports(self) -> Iterator[Finding]:
        """Judge imports."""
        for node, module, member in self._script.code.imported_names():
            if advice := self._missing(f"{module}.{member}" if member.strip("*") else module):
                said = f"from {module} import {member}" if member else f"import {module}"
                yield Finding(self._script.line(node), said, advice)

    def chains(self) -> Iterator[Finding]:
        """Judge dotted expressions."""
        for chain in self._script.code.chains:
            targets = self._script.targets(chain)
            if targets:
                said = [self._of_target(target, chain) for target in sorted(targets)]
                advice = said[0] if all(said) else ""  # one of several may have what others lack
            else:
                advice, node = "", chain
                while not advice and isinstance(node, cst.Attribute):  # `optimizer.lr.assign`, `optimizer.lr`
                    advice = self._of_member(node, self._script.code.calls.get(node))
                    node = node.value  # type: ignore[assignment]
            if advice:
                yield Finding(self._script.line(chain), name_use(self._script, chain).removeprefix("@"), advice)

    def _of_target(self, target: str, chain: Chain) -> str:
        """Return advice on the use of a name that is known to be of TensorFlow, Keras or Horovod."""
        call = self._script.code.calls.get(chain)
        if target.startswith(("horovod.", "hvdtrain.")):
            return self._of_h5(call) if call and target.endswith(".load_model") and not self._is_legacy else ""
        advice = "" if isinstance(chain, cst.Name) else self._missing(target)  # a name's import is judged
        if not call or (advice and "legacy" not in target.split(".")):
            return advice
        return " ".join(filter(None, [advice, self._of_call(target, call)]))

    def _missing(self, name: str) -> str:
        """Return advice if the installed TensorFlow or Keras lacks a name; else an empty string."""
        parts = name.split(".")
        if parts[0] not in ("tensorflow", "keras", "tf_keras"):
            return ""
        if parts[:2] == ["tensorflow", "python"]:
            is_of_old_keras = parts[2:3] == ["keras"] and not _OF_THE_OLD_COPY.isdisjoint(parts)
            return "it belongs to an old copy of Keras, of which others take nothing: use tf.keras." * is_of_old_keras
        if not self._is_legacy and "legacy" in parts and "optimizers" in parts:
            return "Keras 3 has no legacy optimizers: leave .legacy out."
        if not self._is_legacy and name.startswith("tensorflow.compat.v1.layers"):
            return "it needs tf_keras: use keras.layers."
        real = installed_name(name, self._is_legacy)
        if not is_missing(real):
            return ""
        package = {"tf_keras": "tf_keras", "keras": "Keras 3"}.get(real.split(".")[0], "TensorFlow 2")
        return f"{package} has no {_shown(name)}: {_instead(parts, self._is_legacy)}"

    def _of_call(self, target: str, call: cst.Call) -> str:
        """Return advice on the arguments of a function or class of Keras."""
        real, parts = installed_name(target, self._is_legacy), target.split(".")
        named = named_arguments(call)
        if real.split(".")[0] not in ("keras", "tf_keras"):
            return "" if self._is_legacy else self._of_symbolic(parts[-1], call)
        if "optimizers" in parts:
            is_old = "legacy" in parts or parts[:3] == ["tensorflow", "compat", "v1"]
            advice = keras2.TF_KERAS_OPTIMIZER_KEYWORDS if self._is_legacy else keras2.OPTIMIZER_KEYWORDS
            return "" if self._is_legacy and is_old else _of_keywords(advice, named)
        takes = parameters_of(real)
        if takes is not None and takes.kwarg is None:
            unknown = sorted(named.keys() - {arg.arg for arg in [*takes.posonlyargs, *takes.args, *takes.kwonlyargs]})
            if unknown:
                return " ".join(
                    f"{parts[-1]} takes no {each}: {keras2.HINTS.get(each, 'leave it out.')}" for each in unknown
                )
        return "" if self._is_legacy else self._of_keras_3(parts, call, named)

    def _of_keras_3(self, parts: list[str], call: cst.Call, named: dict[str, str]) -> str:
        symbol, positional = parts[-1], positional_arguments(call)
        if symbol == "Lambda" and "layers" in parts and self._facts.loads:
            return "load_model refuses Lambda layers: keras.config.enable_unsafe_deserialization() before it."
        if "layers" in parts:
            return _of_keywords(keras2.LAYER_KEYWORDS, named)
        if symbol == "Model":
            return _of_keywords(keras2.MODEL_KEYWORDS, named)
        if symbol == "ModelCheckpoint":
            path, only = self._path(call), named.get("save_weights_only", "False")
            endings = (".weights.h5",) if only == "True" else (".keras", ".h5")
            if path and only in ("True", "False") and not path.endswith(endings):
                alone = " with save_weights_only" if only == "True" else ""
                return f"Keras 3 needs a file name that ends in {endings[0]}{alone}."
        elif symbol == "set_value" and positional and text_of(positional[0]).endswith(".learning_rate"):
            return f"{text_of(positional[0])} = value."
        elif symbol == "save_model" and len(positional) > 1:
            path, (kinds, advice) = self._script.constant(positional[1]), keras2.FILES["save"]
            return advice if path and not path.endswith(kinds) else ""
        return self._of_h5(call) if symbol == "load_model" else ""

    def _of_h5(self, call: cst.Call) -> str:
        is_compiled = named_arguments(call).get("compile") != "False"
        is_h5 = self._path(call).endswith((".h5", ".hdf5"))
        return keras2.LOAD_H5 if is_h5 and is_compiled else ""

    def _path(self, call: cst.Call) -> str:
        """Return the file name that a call is given, as far as its end is known."""
        keywords = [arg.value for arg in call.args if arg.keyword and arg.keyword.value == "filepath"]
        given = positional_arguments(call)[:1] or keywords
        return str(self._script.constant(given[0])) if given else ""

    def _of_symbolic(self, function: str, call: cst.Call) -> str:
        """Find functions of TensorFlow that are called with the symbolic tensor of a functional model."""
        values = [value for arg in positional_arguments(call) for value in self._script.values(arg) or [arg]]
        for value in (each for each in values if isinstance(each, cst.Call)):
            layer = value.func.func if isinstance(value.func, cst.Call) and value.func.args else None
            made = [installed_name(each, False).split(".") for each in self._script.targets(layer or value.func)]
            if any(parts[0] == "keras" and ("layers" in parts if layer else parts[-1] == "Input") for parts in made):
                return f"Keras 3 refuses symbolic tensors here: use keras.ops, or a Lambda layer around {function}."
        return ""

    def _of_member(self, chain: cst.Attribute, call: cst.Call | None) -> str:
        """Return advice on a member of an object whose type the script does not spell out."""
        name = chain.attr.value
        if call and name in keras2.GONE_METHODS:
            return keras2.GONE_METHODS[name]
        if self._is_legacy:
            return ""
        named = named_arguments(call) if call else {}
        kind = self._optimizer_kind(chain.value)
        if kind == "plain" and call and name == "variables":
            return "variables is a list in Keras 3: leave the parentheses out."
        if kind == "plain" and call and name == "apply_gradients":
            unknown = next((each for each in keras2.APPLY_GRADIENTS if each in named), "")
            return f"leave {unknown} out: Keras 3 does not know it." if unknown else ""
        if name in (keras2.REFUSED_BY_WRAPPED if kind == "wrapped" else keras2.OPTIMIZER_MEMBERS if kind else ()):
            return keras2.OPTIMIZER_MEMBERS[name]
        if not call:
            return ""
        if name in keras2.METHODS:
            is_layers = name == "reset_states" and any(".layers." in each for each in self._script.made_by(chain.value))
            return "" if is_layers else f"{keras2.METHODS[name]} {self._of_images(name, call)}".rstrip()
        if name == "add_weight" and any(isinstance(arg, cst.SimpleString) for arg in positional_arguments(call)[:1]):
            return "Keras 3 takes the name by keyword: add_weight(name=..., shape=...)."
        keywords = _of_keywords(keras2.KEYWORDS.get(name, {}), named)
        return f"{keywords} {self._of_images(name, call)}".strip() or self._of_file(name, chain.value, call)

    def _of_images(self, method: str, call: cst.Call) -> str:
        """Return advice on `fit` with so many steps of the images of an `ImageDataGenerator`."""
        is_bounded = method == "fit_generator" or (method == "fit" and "steps_per_epoch" in named_arguments(call))
        images = self._images(call) if is_bounded else ""
        if not images:
            return ""
        return (
            f"Keras 3 cuts short the epoch in which {images} ends, where Keras 2 began it anew: pass "
            f"(batch for batch in {images})."
        )

    def _images(self, call: cst.Call) -> str:
        """Return what the script calls the images of an `ImageDataGenerator` that a call is given; else nothing."""
        keyword = [arg.value for arg in call.args if arg.keyword and arg.keyword.value == "x"]
        for data in positional_arguments(call)[:1] or keyword:
            for value in self._script.values(data) or [data]:
                if isinstance(value, cst.Call) and name_of(value.func) in keras2.FLOWS:
                    return text_of(data) if isinstance(data, cst.Name) else f"{name_of(value.func)}(...)"
        return ""

    def _optimizer_kind(self, owner: cst.BaseExpression) -> str:
        """Return "wrapped" or "plain" for what is, or by its name seems to be, an optimizer of Keras; else nothing."""
        made = [installed_name(target, False).split(".") for target in self._script.made_by(owner)]
        if any(parts[-1] in ("DistributedOptimizer", "PartialDistributedOptimizer") for parts in made):
            return "wrapped"
        if any("optimizers" in parts or parts[-1] == "LossScaleOptimizer" for parts in made):
            return "plain"
        name = name_of(owner).lower()
        if made or not (name in ("opt", "optim") or "optimizer" in name):
            return ""
        return "wrapped" if self._facts.wraps else "plain"

    def _of_file(self, name: str, owner: cst.BaseExpression, call: cst.Call) -> str:
        """Judge the endings of file names."""
        endings, advice = keras2.FILES.get(name, ((), ""))
        path = self._path(call) if endings else ""
        if not path or path.endswith(endings):
            return ""
        made = [target.split(".") for target in self._script.made_by(owner)]
        is_model = any(parts[-1] in ("Model", "Sequential") or "applications" in parts for parts in made)
        return advice if name != "save" or is_model or (not made and "model" in text_of(owner).lower()) else ""


def _of_keywords(advice: Mapping[str, str], named: Collection[str]) -> str:
    """Return the advice on the keywords that have some, each by its name where there are several."""
    found = {keyword: said for keyword, said in advice.items() if keyword in named}
    return " ".join(f"{keyword}: {said}" if len(found) > 1 else said for keyword, said in found.items())


def installed_name(name: str, is_legacy: bool) -> str:
    """Return the name under which a part of Keras is installed.

    With tf_keras, `import keras` is a finding of its own, and its uses are judged as if it were changed.
    """
    parts = ["tensorflow"] * (is_legacy and name.split(".")[0] == "keras") + name.split(".")
    if parts[:3] == ["tensorflow", "compat", "v2"]:
        parts = ["tensorflow", *parts[3:]]
    is_v1 = parts[:3] == ["tensorflow", "compat", "v1"]
    rest = parts[3:] if is_v1 else parts[1:]
    if parts[0] == "tensorflow" and rest and (rest[0] == "keras" or (rest[0] in _LAZY and not is_v1)):
        legacy = ["tf_keras", "api", "_v1" if is_v1 else "_v2", "keras"]
        parts = [*(legacy if is_legacy else ["keras", "_tf_keras", "keras"]), *rest[rest[0] == "keras" :]]
    return ".".join(parts)


def _instead(parts: list[str], is_legacy: bool) -> str:
    """Return advice on a name that does not exist."""
    v1 = ".".join(["tensorflow", "compat", "v1", *parts[1:]])
    hint = next((keras2.NAME_HINTS[part] for part in reversed(parts) if part in keras2.NAME_HINTS), "")
    if parts[0] == "tensorflow" and "keras" not in parts and find(v1)[0] == "exists":
        return f"use {_shown(v1)}; {hint}" if hint else f"use {_shown(v1)}."
    if hint:
        return hint
    for left in range(len(parts) - 3, 0, -1):
        for kept in combinations(parts[1:-1], left):
            shorter = ".".join([parts[0], *kept, parts[-1]])
            if find(installed_name(shorter, is_legacy))[0] == "exists":
                return f"use {shorter}."
    return "use another."


def _shown(name: str) -> str:
    return f"tf{name.removeprefix('tensorflow')}" if name.startswith("tensorflow.") else name
