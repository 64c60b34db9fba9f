"""State of layers beside their variables: vocabularies and adapted moments, by Keras' own protocol for saving, and
variables in attributes of which Keras does not know."""

import hashlib
import io
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.hashes import digest_of
from hvdtrain.state.structure import children
from hvdtrain.state.variables import unwrap

_VARIABLES, _ASSETS, _UNTRACKED = "variables/", "assets/", "untracked/"


def layers_with_states(model: Any) -> dict[str, Any]:
    """Return the layers that do more than hold variables when they are saved or loaded, by their place in the model.

    Of Keras' own those with assets, or that derive something from what they have adapted to; of others all that
    override how their variables are saved or loaded; and of all those with untracked variables. None of them has
    variables of which a rank holds a slice.
    """
    layers = list({id(layer): layer for layer in flatten_layers(model)}.values())
    return {
        f"{place}": layer
        for place, layer in enumerate(layers)
        if not any(placement_of(variable) for variable in layer.variables)
        and (_saves_itself(layer) or untracked_variables(layer))
    }


def untracked_variables(layer: Any) -> dict[str, tf.Variable]:
    """Return the variables in a layer's attributes that are none of its `variables`, by their path.

    Such as the states of a stateful RNN, or a tf.Variable that a user's layer makes.
    """
    tracked = {id(unwrap(variable)) for variable in layer.variables}
    held = {id(unwrap(variable)): (path, unwrap(variable)) for path, variable in _variables_in(layer)}
    return {path: variable for place, (path, variable) in held.items() if place not in tracked}


def _variables_in(thing: Any) -> Iterator[tuple[str, Any]]:
    for name, child in children(thing):
        if isinstance(child, keras.Variable | tf.Variable):
            yield name, child
        elif isinstance(child, list | tuple | dict):
            yield from ((f"{name}/{path}", variable) for path, variable in _variables_in(child))


def states_of(layers: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the state of each layer, as the bytes of an .npz file."""
    return {place: _packed(layer) for place, layer in layers.items()}


def restore_states(layers: Mapping[str, Any], states: Mapping[str, np.ndarray]) -> None:
    """Restore the states of layers; those that are not built yet, or not listed, stay as they are."""
    for place, layer in layers.items():
        if place in states and layer.built:
            _unpack(layer, states[place])


def copy_states(model: Any, copy: Any) -> None:
    """Give the layers of a model's copy the states of those of the model."""
    restore_states(layers_with_states(copy), states_of(layers_with_states(model)))


class Ranks(Protocol):
    """Ranks that exchange bytes, such as those of a backend."""

    @property
    def rank(self) -> int:
        """This rank's place among them."""

    def gather_bytes(self, payload: bytes, *, timeout: float | None) -> list[bytes]:
        """Return every rank's payload. Collective."""


def share_states(model: Any, ranks: Ranks, root: int, apart: Collection[int] = ()) -> None:
    """Give every rank the states of `root`, but for layers with a variable `apart`, by id. Collective.

    Layers derive anew what they derive from their variables, and the model's functions are traced anew.

    Raises:
        ConfigError: the layers' configurations differ, such as a vocabulary that was given to the constructor.
    """
    layers = {
        place: layer
        for place, layer in layers_with_states(model).items()
        if not any(id(unwrap(variable)) in apart for variable in layer.variables)
    }
    if not layers:
        return
    states = states_of(layers)
    mine = {place: [_config_hash(layer), _hash(states[place])] for place, layer in layers.items()}
    everyone = [json.loads(text) for text in ranks.gather_bytes(json.dumps(mine).encode(), timeout=None)]
    for rank, theirs in enumerate(everyone):
        for place, layer in layers.items():
            if theirs.get(place, [None])[0] != everyone[root][place][0]:
                raise ConfigError(
                    f"{type(layer).__name__} {layer.name!r} of rank {rank} was made with other arguments than that of "
                    f"rank {root}, such as another vocabulary. Make it from the same data on every rank, or "
                    f"adapt() it: rank {root}'s state is used then."
                )
    if all(theirs == everyone[root] for theirs in everyone):
        restore_states(layers, states)
        forget_traces(model)
        return
    payload = json.dumps({place: state.tobytes().hex() for place, state in states.items()}).encode()
    sent = ranks.gather_bytes(payload if ranks.rank == root else b"{}", timeout=None)[root]
    received = {place: np.frombuffer(bytes.fromhex(text), np.uint8) for place, text in json.loads(sent).items()}
    restore_states(layers, received)
    forget_traces(model)


def forget_traces(model: Any) -> None:
    """Let go of Keras' compiled functions, which hold what layers were when they were traced."""
    if not isinstance(model, keras.Model):
        return
    if model.train_function is not None:  # fit may be running
        model.make_train_function(force=True)
    model.test_function = model.predict_function = None


def refuse_in_graph() -> None:
    """Refuse to share states in a graph, of which they are no part.

    Raises:
        ConfigError: called inside tf.function, or in a graph of TensorFlow 1.
    """
    if not tf.executing_eagerly():
        raise ConfigError(
            "broadcast_variables(model) shares what is no tensor: call it before the step, outside of it."
        )


def _saves_itself(layer: Any) -> bool:
    if hasattr(layer, "save_assets") or hasattr(layer, "finalize_state"):
        return True
    # Keras' own layers and those of this package hold variables alone.
    kinds = [kind for kind in type(layer).__mro__ if kind.__module__.split(".")[0] not in ("keras", "hvdtrain")]
    return any(hook in vars(kind) for kind in kinds for hook in ("save_own_variables", "load_own_variables"))


def _packed(layer: Any) -> np.ndarray:
    """Return the bytes [n], uint8, of an .npz file of what the layer saves."""
    store: dict[str, Any] = {}
    if layer.built and hasattr(layer, "save_own_variables") and _saves_itself(layer):
        layer.save_own_variables(store)
    parts = {f"{_VARIABLES}{name}": np.asarray(value) for name, value in store.items()}
    parts |= {f"{_UNTRACKED}{path}": variable.numpy() for path, variable in untracked_variables(layer).items()}
    if hasattr(layer, "save_assets"):
        with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
            layer.save_assets(folder)
            for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                parts[f"{_ASSETS}{file.relative_to(folder)}"] = np.frombuffer(file.read_bytes(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **dict[str, Any](parts))
    return np.frombuffer(buffer.getvalue(), np.uint8)


def _unpack(layer: Any, state: np.ndarray) -> None:
    with np.load(io.BytesIO(state.tobytes())) as parts:
        store = {name.removeprefix(_VARIABLES): parts[name] for name in parts.files if name.startswith(_VARIABLES)}
        files = {name.removeprefix(_ASSETS): parts[name] for name in parts.files if name.startswith(_ASSETS)}
        held = {name.removeprefix(_UNTRACKED): parts[name] for name in parts.files if name.startswith(_UNTRACKED)}
    if files:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
            for name, content in files.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.tobytes())
            layer.load_assets(folder)
    if store:
        layer.load_own_variables(store)
    for path, variable in untracked_variables(layer).items():
        if path in held:
            variable.assign(held[path])


def _hash(state: np.ndarray) -> str:
    with np.load(io.BytesIO(state.tobytes())) as parts:
        return digest_of(dict(parts))


def _config_hash(layer: Any) -> str | None:
    """Return a hash of what the layer was made with; None if it cannot say."""
    try:
        config = dict(layer.get_config())
    except NotImplementedError:
        return None
    config.pop("name", None)
    # Things by their names: an address would differ by process.
    plain = json.dumps(config, sort_keys=True, default=lambda thing: getattr(thing, "__name__", type(thing).__name__))
    return hashlib.sha256(plain.encode()).hexdigest()
