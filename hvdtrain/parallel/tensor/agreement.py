"""The same initial values on all ranks, of which each holds slices."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras_variables import assign_to_tensor, tensor_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.building import Made, drawn_slice

_TIMEOUT_S = 600.0


def agree_on_slices(backend: Backend, made: Sequence[Made], whole: Sequence[Any], paths: Mapping[int, str]) -> None:
    """Let the slices of all ranks be those of one model: that of the first rank.

    Args:
        backend: the ranks, all of which call it.
        made: variables that were made as slices.
        whole: those that are going to be cut.
        paths: structural paths by the variables' ids.

    Raises:
        ConfigError: ranks that split other variables, or gave them other values that cannot be drawn again.
    """
    mine = {paths[id(each.variable)]: _facts(each) for each in made}
    mine |= {paths[id(variable)]: [list(variable.shape)] for variable in whole}
    everyone = backend.gather_bytes(json.dumps(mine).encode(), timeout=_TIMEOUT_S, among="tp")
    facts = [json.loads(text) for text in everyone]
    for place, theirs in enumerate(facts):
        strange = [path for path in {**facts[0], **theirs} if facts[0].get(path, [0])[0] != theirs.get(path, [0])[0]]
        if strange:
            raise ConfigError(
                "Every rank splits the same variables of the same model. Received: "
                f"{strange[0]!r} of another shape, or whole, on the rank at tp={place}."
            )
    differing = [path for path, fact in facts[0].items() if any(theirs[path] != fact for theirs in facts)]
    _draw_again(made, facts[0], differing, paths)
    # Of the whole ones the first rank's values are everyone's, before they are cut.
    backend.broadcast({paths[id(variable)]: tensor_of(variable) for variable in whole}, among="tp")


def _facts(made: Made) -> list[Any]:
    """Return shape, checksum and seed of a variable's whole initial value; no seed of one that was assigned."""
    seed = getattr(made.initializer, "seed", None)
    return [list(made.cut.whole), made.drawn, seed if isinstance(seed, int) and not made.assigned else None]


def _draw_again(
    made: Sequence[Made], first: Mapping[str, list[Any]], differing: Sequence[str], paths: Mapping[int, str]
) -> None:
    """Draw what differs by the seeds of the first rank."""
    by_path = {paths[id(each.variable)]: each for each in made}
    for path in differing:
        _, drawn, seed = first[path]
        each = by_path[path]
        if seed is not None:
            each.initializer.seed = seed  # type: ignore[attr-defined]
        value, again = drawn_slice(each.initializer, each.variable, each.cut)
        if seed is None or again != drawn:
            raise ConfigError(
                f"The ranks gave {path!r} other initial values, and hold slices of it: seed them alike, by "
                "hvdtrain.init(seed=…), keras.utils.set_random_seed or the initializer's seed."
            )
        assign_to_tensor(each.variable, value)
