"""Import the libraries one after another in a process of its own, and tell what was found.

``python -m hvdtrain.runtime.diagnosis.probe`` prints one line of JSON per library, as soon as it is known: a
library that takes the process down is the one after the last line.
"""

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.runtime.diagnosis.machine import Outcome, run
from hvdtrain.runtime.horovod_patches import installed_hashes

Finding = dict[str, Any]
"""Facts about one library; ``missing`` where it is not installed, ``error`` where it cannot be used."""


def find_mpi4py() -> Finding:
    """Load the MPI library without initialising it."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {"version": mpi4py.__version__, "library": MPI.Get_library_version().strip(" \n\0")}


def find_tensorflow() -> Finding:
    """Import TensorFlow."""
    import tensorflow as tf

    return {"version": tf.__version__, "gpus": len(tf.config.list_physical_devices("GPU"))}


def find_keras() -> Finding:
    """Import Keras."""
    import keras

    return {"version": keras.__version__, "backend": keras.backend.backend()}


def find_horovod() -> Finding:
    """Load Horovod's library into this TensorFlow."""
    import horovod
    import horovod.tensorflow as hvd

    built_for = None  # the version of TensorFlow that Horovod's build wrote down, if it did
    with contextlib.suppress(OSError, ValueError):
        built_for = json.loads(Path(horovod.__file__).with_name("metadata.json").read_text()).get("tensorflow")
    return {
        "version": horovod.__version__,
        "patches": installed_hashes(),
        "built_for": built_for or None,
        "gloo": bool(hvd.gloo_built()),
        "mpi": bool(hvd.mpi_built()),
        "nccl": int(hvd.nccl_built()),
        "cuda": bool(hvd.cuda_built()),
    }


# In the order in which a rank loads them: the control channel needs MPI before TensorFlow is imported.
STAGES: dict[str, Callable[[], Finding]] = {
    "mpi4py": find_mpi4py,
    "tensorflow": find_tensorflow,
    "keras": find_keras,
    "horovod": find_horovod,
}


def find(name: str) -> Finding:
    """Run one stage; nothing it raises gets out."""
    if importlib.util.find_spec(name) is None:
        return {"missing": True}
    try:
        return STAGES[name]()
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}


def probe(*, timeout: float = 180.0) -> dict[str, Finding]:
    """Run all stages in a process of their own and return what they found, by library."""
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    outcome = run([sys.executable, "-m", __spec__.name], timeout=timeout, environ=environ)
    found: dict[str, Finding] = {}
    chatter = []
    for line in outcome.output.splitlines():
        if line.startswith('{"stage": '):
            finding = json.loads(line)
            found[finding.pop("stage")] = finding
        else:
            chatter.append(line)
    code = outcome.returncode
    how = f"took more than {timeout:g} s" if code is None else f"ended the process with code {code}"
    last = Outcome(code, "\n".join(chatter)).tail(4)
    missing = [name for name in STAGES if name not in found]
    for name in missing:
        error = (
            f"its import {how}\n{last}".rstrip() if name == missing[0] else f"not reached, since {missing[0]} failed"
        )
        found[name] = {"error": error}
    return found


def main() -> None:
    """Print what each stage finds."""
    for name in STAGES:
        print(json.dumps({"stage": name, **find(name)}), flush=True)


if __name__ == "__main__":
    main()
