"""Calls of Horovod in a script, and calls of Keras 2 that are common in such scripts."""

import ast
from collections.abc import Iterator, Mapping, Set

from hvdtrain.cli.script.finding import Finding, Verdict
from hvdtrain.cli.script.names import FACE, STANDS_FOR

_OF_TENSORFLOW_1 = {
    "BroadcastGlobalVariablesHook": "belongs to TensorFlow 1's sessions: model.fit with "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0), or hvd.broadcast_variables in a loop.",
    "broadcast_global_variables": "TensorFlow 2 keeps no list of all variables: "
    "hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0).",
    "LocalGradientAggregationHelper": "works in TensorFlow 1's graphs only: "
    "hvd.DistributedOptimizer(optimizer, backward_passes_per_step=...).",
}
_OF_KERAS_2 = {
    "fit_generator": "Keras 3 has model.fit only, which takes generators too.",
    "evaluate_generator": "Keras 3 has model.evaluate only, which takes generators too.",
}
_POSITIONS_THAT_MOVED = {"DistributedOptimizer": 8, "PartialDistributedOptimizer": 99, "BestModelCheckpoint": 2}
"""Number of positional arguments that `horovod.keras` and `horovod.tensorflow.keras` share."""


def calls_of(tree: ast.AST, bound: Mapping[str, str], is_legacy: bool) -> Iterator[Finding]:
    """Yield a finding for each call and decorator.

    Args:
        tree: the script.
        bound: dotted name behind each imported name.
        is_legacy: whether the script uses tf_keras.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _dotted(node.func, bound)
            yield from _of_horovod(node, name, is_legacy) if name else _of_keras(node, is_legacy)
        elif isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if not isinstance(decorator, ast.Call) and (name := _dotted(decorator, bound)):
                    yield from _found(decorator.lineno, f"@{ast.unparse(decorator)}", name)


def _dotted(node: ast.expr, bound: Mapping[str, str]) -> str | None:
    """Return the dotted name of a call's target if it is Horovod's."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join([bound[node.id], *reversed(parts)])


def _of_horovod(call: ast.Call, name: str, is_legacy: bool) -> Iterator[Finding]:
    yield from _found(call.lineno, f"{ast.unparse(call.func)}(...)", name, call, is_legacy)


def _found(line: int, said: str, name: str, call: ast.Call | None = None, is_legacy: bool = False) -> Iterator[Finding]:
    module, _, symbol = name.rpartition(".")
    names = FACE.get(STANDS_FOR.get(module, module))
    if names is None:
        # A method of an imported object, or a part of Horovod that needs no change.
        return
    works: Verdict = "works as is" if module in FACE else "works with the import changed"
    if symbol not in names:
        yield Finding(line, said, "needs this change", f"{symbol} is not part of Horovod 0.28.1.")
        return
    advice = _OF_TENSORFLOW_1.get(symbol) or (_arguments(call, module, symbol, is_legacy) if call else "")
    yield Finding(line, said, "needs this change" if advice else works, advice)


def _arguments(call: ast.Call, module: str, symbol: str, is_legacy: bool) -> str:
    """Return the changes that the arguments of a call need."""
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
    if named.get("session", "None") != "None":
        return "TensorFlow 2 has no sessions: leave session out."
    if named.get("legacy_opts") == "True" and not is_legacy:
        return "Keras 3 has no legacy optimizers: leave legacy_opts out."
    if symbol == "TensorFlowState" and not call.args and "variables" not in named:
        return "TensorFlow 2 keeps no list of all variables: pass variables=model.variables + optimizer.variables."
    if symbol == "DistributedOptimizer" and named.get("op", "").endswith("Adasum"):
        return "Keras optimizers take no Adasum: hvd.DistributedGradientTape(tape, op=hvd.Adasum)."
    if symbol == "DistributedOptimizer" and call.args and "v1.train." in ast.unparse(call.args[0]):
        return "TensorFlow 1's optimizers need sessions: use one of keras.optimizers."
    if module.startswith("horovod.keras") and len(call.args) > _POSITIONS_THAT_MOVED.get(symbol, 99):
        return f"name the arguments after the first {_POSITIONS_THAT_MOVED[symbol]}: their order is another."
    return ""


def _of_keras(call: ast.Call, is_legacy: bool) -> Iterator[Finding]:
    """Find calls, common in Horovod's examples, that the script's Keras lacks."""
    said = ast.unparse(call.func)
    named = {keyword.arg for keyword in call.keywords}
    advice = (_not_in_tf_keras if is_legacy else _not_in_keras_3)(said, named, call)
    if advice:
        yield Finding(call.lineno, f"{said}(...)", "needs this change", advice)


def _not_in_keras_3(said: str, named: Set[str | None], call: ast.Call) -> str:
    last = said.rpartition(".")[2]
    if last == "compile" and "experimental_run_tf_function" in named:
        return "leave experimental_run_tf_function out: Keras 3 does not know it."
    if ".optimizers.legacy." in f".{said}":
        return "Keras 3 has no legacy optimizers: leave .legacy out."
    if "optimizers." in said and "lr" in named:
        return "the argument is called learning_rate."
    if "optimizers." in said and "decay" in named:
        return "Keras 3 has no decay: pass a schedule of keras.optimizers.schedules as learning_rate."
    if last == "variables" and "opt" in said.lower() and not call.args:
        return "of an optimizer that is not wrapped variables is a list: leave the parentheses out."
    return _OF_KERAS_2.get(last, "") if "." in said else ""


def _not_in_tf_keras(said: str, named: Set[str | None], call: ast.Call) -> str:
    if "optimizers." not in said or ".optimizers.legacy." in f".{said}":
        return ""
    if "lr" in named:
        return "the argument is called learning_rate; lr is passed over."
    if "decay" in named:
        return "decay is for the optimizers of optimizers.legacy: use one, or pass a schedule as learning_rate."
    return ""
