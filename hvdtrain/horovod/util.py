"""Small helpers that scripts take from `horovod.tensorflow.util`: Horovod's own."""

from horovod.tensorflow.util import _cache as _cache
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
from horovod.tensorflow.util import _make_subgraph as _make_subgraph
from horovod.tensorflow.util import refs_to_vars, vars_to_refs

__all__ = ["refs_to_vars", "vars_to_refs"]
