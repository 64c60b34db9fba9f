"""Small helpers that scripts take from `horovod.tensorflow.util`: Horovod's own."""

from horovod.tensorflow.util import refs_to_vars, vars_to_refs

from hvdtrain.compat.horovod import script_utilities

__all__ = ["refs_to_vars", "vars_to_refs"]

_cache, _executing_eagerly, _make_subgraph = script_utilities()
