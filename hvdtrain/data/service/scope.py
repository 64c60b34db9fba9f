"""Whether a function is traced for a data service, which runs no Python of this process.

The name scope of the graph says so: it reaches whatever a source calls.
"""

from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

SCOPE = "for_data_service"


def for_service() -> AbstractContextManager[Any]:
    """Trace for a data service inside this context."""
    return tf.name_scope(SCOPE)


def traced_for_service() -> bool:
    """Whether what is traced now will run in a data service."""
    return not tf.executing_eagerly() and SCOPE in tf.get_current_name_scope()
