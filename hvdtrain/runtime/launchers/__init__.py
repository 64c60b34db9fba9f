"""Who started this process, and which of how many it is: known before TensorFlow, Horovod or MPI loads.

One file for each launcher, with a class that has `detect()`; `detect.py` asks them in turn. To add one, write its file
and put it into the table there. May import `config` only.
"""

from hvdtrain.runtime.launchers.detect import detect_environment
from hvdtrain.runtime.launchers.environment import UNKNOWN, Controller, Environment

__all__ = ["UNKNOWN", "Controller", "Environment", "detect_environment"]
