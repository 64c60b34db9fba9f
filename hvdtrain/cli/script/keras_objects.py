"""Members of models, optimizers and layers in a Horovod script that Keras 3 lacks, judged by name and by assignment."""

import ast
from dataclasses import dataclass

from hvdtrain.cli.script import keras2
from hvdtrain.cli.script.kerases import Facts, file_name, real_name
from hvdtrain.cli.script.program import Resolver
from hvdtrain.cli.script.scopes import Chain


@dataclass(frozen=True)
class KerasObjects:
    """Judges uses of objects whose type a script does not spell out."""

    resolver: Resolver
    facts: Facts

    def advice(self, chain: Chain) -> str:
        """Return advice on a member of an object whose type is not known from its name."""
        if not isinstance(chain.node, ast.Attribute):
            return ""
        name, call = chain.node.attr, chain.call
        if call is not None and name in keras2.GONE_METHODS:
            return keras2.GONE_METHODS[name]
        if self.facts.is_legacy:
            return ""
        kind = self._optimizer_kind(chain)
        if kind and (advice := self._of_optimizer_member(name, kind, chain)):
            return advice
        return self._of_method(name, call, chain) if call is not None else ""

    def _of_optimizer_member(self, name: str, kind: str, chain: Chain) -> str:
        if name == "variables" and kind == "plain" and chain.call is not None:
            return "variables is a list in Keras 3: leave the parentheses out."
        if name == "apply_gradients" and kind == "plain" and chain.call is not None:
            named = {keyword.arg for keyword in chain.call.keywords}
            return next(
                (f"leave {each} out: Keras 3 does not know it." for each in keras2.APPLY_GRADIENTS if each in named), ""
            )
        is_lacking = name in keras2.REFUSED_BY_WRAPPED if kind == "wrapped" else name in keras2.OPTIMIZER_MEMBERS
        return keras2.OPTIMIZER_MEMBERS[name] if is_lacking else ""

    def _optimizer_kind(self, chain: Chain) -> str:
        """Return "wrapped" or "plain" for what is, or by its name seems to be, an optimizer of Keras; else nothing."""
        assert isinstance(chain.node, ast.Attribute)
        owner = chain.node.value
        made = self.resolver.made_by(owner, chain.scope)
        symbols = {target[-1] for target in made if target}
        if symbols & {"DistributedOptimizer", "PartialDistributedOptimizer"}:
            return "wrapped"
        if any("optimizers" in real_name(t, False) or t[-1] == "LossScaleOptimizer" for t in made if t):
            return "plain"
        last = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        is_named_so = last.lower() in ("opt", "optim") or "optimizer" in last.lower()
        if made or not is_named_so:
            return ""
        return "wrapped" if self.facts.wraps else "plain"

    def _of_method(self, name: str, call: ast.Call, chain: Chain) -> str:
        named = {keyword.arg for keyword in call.keywords}
        if name in keras2.METHODS:
            return keras2.METHODS[name]
        for keyword, advice in keras2.KEYWORDS.get(name, {}).items():
            if keyword in named:
                return advice
        if name == "reset_states":
            made = self.resolver.made_by(chain.node.value, chain.scope) if isinstance(chain.node, ast.Attribute) else ()
            return "" if any("layers" in target for target in made) else keras2.RESET_STATES
        if name == "add_weight" and call.args and isinstance(call.args[0], ast.Constant):
            return "Keras 3 takes the name by keyword: add_weight(name=..., shape=...)." * isinstance(
                call.args[0].value, str
            )
        return self._of_saving(name, call, chain)

    def _of_saving(self, name: str, call: ast.Call, chain: Chain) -> str:
        """Judge the endings of file names."""
        path = file_name(self.resolver, call, chain.scope)
        if path is None:
            return ""
        if name == "save_weights" and not path.endswith(".weights.h5"):
            return "Keras 3 needs a file name that ends in .weights.h5."
        if name == "load_weights" and not path.endswith((".h5", ".hdf5", ".keras")):
            return "Keras 3 reads weights from files that end in .weights.h5 (or .h5 of Keras 2)."
        is_saved = name == "save" and self._is_model(chain)
        return keras2.SAVE if is_saved and not path.endswith((".keras", ".h5", ".hdf5")) else ""

    def _is_model(self, chain: Chain) -> bool:
        """Whether the owner of a method is a model, or is called one."""
        assert isinstance(chain.node, ast.Attribute)
        made = self.resolver.made_by(chain.node.value, chain.scope)
        if made:
            return any(target[-1] in ("Model", "Sequential") or "applications" in target for target in made)
        return "model" in ast.unparse(chain.node.value).lower()
