"""Uses of Horovod in a script: functions, classes and constants, called or not."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvdtrain.cli.script.finding import Finding, Verdict
from hvdtrain.cli.script.kerases import Facts
from hvdtrain.cli.script.names import FACE, FACES, STANDS_FOR, has, horovod_has, module_of, place_of
from hvdtrain.cli.script.packages import arguments_of
from hvdtrain.cli.script.program import Resolver, Script
from hvdtrain.cli.script.scopes import Chain, Target

_IN_GRAPHS = "it works in graphs with sessions, after tf.compat.v1.disable_v2_behavior(). Eagerly use "
_OF_GRAPHS = {
    "BroadcastGlobalVariablesHook": _IN_GRAPHS + "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in model.fit, or "
    "hvd.broadcast_variables in a loop.",
    "broadcast_global_variables": _IN_GRAPHS + "hvd.broadcast_variables(model.variables + optimizer.variables, "
    "root_rank=0).",
}
"""What works in graphs of TensorFlow 1 only, with advice for other scripts."""
_POSITIONS_THAT_MOVED = {"DistributedOptimizer": 8, "PartialDistributedOptimizer": 99, "BestModelCheckpoint": 2}
"""Number of positional arguments that `horovod.keras` and `horovod.tensorflow.keras` share."""
_RANK: dict[Verdict, int] = {"works as is": 0, "works with the import changed": 1, "needs this change": 2}


@dataclass(frozen=True)
class HorovodUses:
    """Judges what a script uses of Horovod."""

    script: Script
    resolver: Resolver
    facts: Facts

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each use."""
        for chain in self.script.chains:
            if not isinstance(chain.node.ctx, ast.Load):
                continue
            judged = [each for each in map(lambda t: self._judge(t, chain), self._targets(chain)) if each]
            if judged:
                # Where a name may be one of several frameworks', what one of them has is not missing.
                verdict, advice = min(judged, key=lambda each: (_RANK[each[0]], each))
                yield Finding(chain.node.lineno, _said(chain), verdict, advice)

    def _targets(self, chain: Chain) -> list[Target]:
        targets = self.resolver.targets(chain.node, chain.scope)
        return sorted(each for each in targets if each and each[0] in ("horovod", "hvdtrain"))

    def _judge(self, target: Target, chain: Chain) -> tuple[Verdict, str] | None:
        """Return verdict and advice; None for a module, and for what is not Horovod's."""
        module, rest = module_of(target)
        if target[0] == "hvdtrain" and not module:
            return None
        if not module:
            return self._of_other_parts(target)
        if not rest:
            return None if module in STANDS_FOR or module in FACES else self._missing_module(module)
        symbol = rest[0]
        ours = STANDS_FOR.get(module, module if module in FACES else "")
        if not ours:
            return self._missing_module(module)
        if symbol.startswith("__"):
            return None
        if not has(ours, symbol):
            lacking = f"{ours} has no {symbol}." if _is_horovods(module, symbol) else _not_part(symbol)
            return "needs this change", lacking
        advice = self._arguments(chain, ours, module, symbol) if chain.call and len(rest) == 1 else ""
        works: Verdict = "works as is" if module in FACES else "works with the import changed"
        return ("needs this change", advice) if advice else (works, "")

    def _missing_module(self, module: str) -> tuple[Verdict, str]:
        return "needs this change", f"{module} is Horovod's own inner part: use {FACE}'s public names."

    def _of_other_parts(self, target: Target) -> tuple[Verdict, str] | None:
        """Judge what is outside of Horovod's TensorFlow and Keras modules: it needs no change where it exists."""
        if len(target) < 2 or target[1].startswith("__"):
            return None
        if not horovod_has("horovod", target[1]) or (len(target) > 2 and _is_missing(target)):
            return "needs this change", f"{'.'.join(target)} is not part of Horovod 0.28.1."
        return "works as is", ""

    def _arguments(self, chain: Chain, ours: str, module: str, symbol: str) -> str:
        """Return the changes that the arguments of a call need."""
        call = chain.call
        assert call is not None
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
        if named.get("legacy_opts") == "True" and not self.facts.is_legacy:
            return "Keras 3 has no legacy optimizers: leave legacy_opts out."
        if symbol == "DistributedOptimizer" and call.args and (advice := self._of_optimizer(chain, call, ours, named)):
            return advice
        if not self.facts.has_graphs and (advice := _of_eager_mode(call, symbol, named)):
            return advice
        moved = _POSITIONS_THAT_MOVED.get(symbol, 99)
        if module.startswith("horovod.keras") and len(call.args) > moved:
            return f"name the arguments after the first {moved}: their order is another."
        return _unknown_arguments(call, set(named), ours, symbol)

    def _of_optimizer(self, chain: Chain, call: ast.Call, ours: str, named: Mapping[str, str]) -> str:
        """Judge `DistributedOptimizer` by the optimizer that it wraps."""
        made = self.resolver.made_by(call.args[0], chain.scope)
        is_v1 = any(target[:4] == ("tensorflow", "compat", "v1", "train") for target in made)
        if is_v1 and ours != FACE:
            return f"optimizers of tf.compat.v1.train are wrapped by {FACE}.DistributedOptimizer."
        if not is_v1 and named.get("op", "").endswith("Adasum") and not (self.facts.has_graphs and not made):
            return "Keras optimizers take no Adasum: hvd.DistributedGradientTape(tape, op=hvd.Adasum)."
        return ""


def _of_eager_mode(call: ast.Call, symbol: str, named: Mapping[str, str]) -> str:
    """Judge what works in TensorFlow 1's graphs only."""
    if symbol in _OF_GRAPHS:
        return _OF_GRAPHS[symbol]
    if symbol == "TensorFlowState" and named.get("session", "None") != "None":
        return "TensorFlow 2 has no sessions: leave session out."
    if symbol == "TensorFlowState" and not call.args and "variables" not in named:
        return "TensorFlow 2 keeps no list of all variables: pass variables=model.variables + optimizer.variables."
    return ""


def _is_horovods(module: str, symbol: str) -> bool:
    return horovod_has(FACES.get(module, module), symbol)


def _is_missing(target: Target) -> bool:
    return not horovod_has(".".join(target[:-1]), target[-1])


def _not_part(symbol: str) -> str:
    return f"{symbol} is not part of Horovod 0.28.1."


def _unknown_arguments(call: ast.Call, named: set[str], ours: str, symbol: str) -> str:
    """Find arguments that a function does not take, and required ones that are left out."""
    place = place_of(ours, symbol)
    takes = arguments_of(place) if place else None
    if takes is None or any(isinstance(arg, ast.Starred) for arg in call.args):
        return ""
    positional = [arg.arg for arg in [*takes.posonlyargs, *takes.args] if arg.arg != "self"]
    known = {*positional, *(arg.arg for arg in takes.kwonlyargs)}
    unknown = sorted(named - known) if takes.kwarg is None else []
    if unknown:
        return f"{symbol} takes no {unknown[0]}."
    if any(keyword.arg is None for keyword in call.keywords):
        return ""
    required = positional[: len(positional) - len(takes.defaults)]
    lacking = [name for name in required[len(call.args) :] if name not in named]
    return f"{symbol} needs {' and '.join(lacking)}." if lacking else ""


def _said(chain: Chain) -> str:
    said = ast.unparse(chain.node)
    if chain.is_decorator:
        return f"@{said}"
    return f"{said}(...)" if chain.call is not None else said
