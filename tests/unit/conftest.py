"""A session of one process for the tests that need one, and none for those that must do without."""

import atexit
import gc
import os
import sys
import warnings
from collections.abc import Iterator

import pytest

from hvdtrain.runtime import session as running
from hvdtrain.runtime.logs import set_up_logging
from hvdtrain.runtime.session import Session

# A tenth of the time was Python's collector, which walks all graphs of TensorFlow that there are by then.
gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def _messages() -> None:
    """Show messages on the standard streams, as every process of a job does."""
    set_up_logging()


@pytest.fixture(autouse=True)
def _no_caching_device() -> Iterator[None]:
    """Undo what tf.map_fn leaves in the process where its function raises: no strategy can be entered any more."""
    yield
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.compat.v1.get_variable_scope()._caching_device = None


@pytest.fixture(autouse=True)
def _without_grappler() -> None:
    """Leave TensorFlow's graph optimizer off, which takes a tenth of the time, as the battery does.

    Tests that it could change turn it on by `tests.distributed.world.grappler`.
    """
    if tensorflow := sys.modules.get("tensorflow"):
        options = tensorflow.config.optimizer
        if not options.get_experimental_options().get("disable_meta_optimizer"):
            options.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture(scope="session")
def session() -> Iterator[Session]:
    """What `hvdtrain.init()` makes of a process that is alone; everything else it changes is put back."""
    import hvdtrain

    environ, hook = dict(os.environ), sys.excepthook
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another test may have used TensorFlow already
        hvdtrain.init(backend="single")
    os.environ.clear()
    os.environ.update(environ)
    opened = running.current()
    yield opened
    sys.excepthook = hook
    atexit.unregister(opened.close)
    running.set_current(None)
    opened.close()


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the session that another test may have opened."""
    monkeypatch.setattr(running._Current, "session", None)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Let layers compute in float64."""
    from tests.builders import compute_in

    compute_in("float64")
    yield
    compute_in("float32")
