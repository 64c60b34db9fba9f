"""Start TensorFlow without the lines that its C++ core writes whatever the log level.

They are written on every rank, to file descriptor 2: some while TensorFlow is imported, before its log is set up, and
one when it first looks for GPUs. Warnings and errors of a run, and whatever else is said meanwhile, are shown.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from hvdtrain.runtime.heap import kept_for_good

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
QUIET = "1"
"""TensorFlow's log level here: warnings and errors. Who sets another one gets that; with 0 nothing is hidden."""
_CHATTER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|I\d{4} \d\d:\d\d:|\d{4}-\d\d-\d\d [\d:.]+: I "  # for information
    rb"|To enable the following instructions:"  # the second line of such a one
    rb"|[WE]\d{4} .*Unable to register cu\w+ (factory|plugin)"  # two libraries that bring the same kernels
    rb"|[WE]\d{4} .*computation placer already registered"
    rb"|W\d{4} .*TF-TRT Warning: Could not find TensorRT"
)
_NO_DRIVER = re.compile(rb"E\d{4} .*failed call to cuInit")
"""On a machine without a GPU only; where there is one, it is an error."""


@contextmanager
def start_up_chatter_hidden() -> Iterator[None]:
    """Hold back what is written to file descriptor 2, and show it after the body but for known start-up lines.

    Nothing is held back from a user who asked for it by `TF_CPP_MIN_LOG_LEVEL=0`. If the body raises, all is shown.
    """
    if os.environ.get(LEVEL, QUIET) == "0":
        yield
        return
    _flush()
    try:
        before = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        chatter: re.Pattern[bytes] | None = None
        try:
            yield
            chatter = _CHATTER
        finally:
            _flush()
            os.dup2(before, 2)
            os.close(before)
            aside.seek(0)
            _show(aside.readlines(), chatter)


def import_tensorflow_quietly() -> None:
    """Import TensorFlow and Keras without start-up lines."""
    if "tensorflow" in sys.modules:
        return
    os.environ.setdefault(LEVEL, QUIET)
    with start_up_chatter_hidden(), kept_for_good():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401


def open_closed_streams() -> None:
    """Open the null device for standard streams that are closed (`2>&-`), before another file gets their numbers.

    What libraries print would end up in that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (for the whole process)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def hush_tensorflow() -> None:
    """Let TensorFlow, whoever imports it later in this process, start without start-up lines."""
    os.environ.setdefault(LEVEL, QUIET)
    if "tensorflow" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


def _show(lines: Iterable[bytes], chatter: re.Pattern[bytes] | None) -> None:
    """Write lines to file descriptor 2, but for those that match."""
    has_gpu = Path("/dev/nvidiactl").exists()
    for line in lines:
        known = chatter is not None and (chatter.match(line) or (not has_gpu and _NO_DRIVER.match(line)))
        if not known:
            os.write(2, line)


class _Finder(MetaPathFinder):
    """Finds TensorFlow once, as it would be found without it, with a loader that hides what it writes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See the base class."""
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Runs a module as its own loader does, which it leaves in its place."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See the base class."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, and let TensorFlow look for GPUs, which a script's first operation would do."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with start_up_chatter_hidden():
            self._loader.exec_module(module)
            module.config.list_physical_devices()
