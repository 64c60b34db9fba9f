"""What the environment's `horovodrun` starts: Horovod's launcher by way of `hvdtrain.runtime.horovodrun`."""

from hvdtrain.runtime.python_environment import PythonEnvironment

_PLAIN = "from horovod.runner.launch import run_commandline\n"
_QUIET = """\
try:  # hvdtrain setup: Horovod's own, without TensorFlow's start-up lines
    from hvdtrain.runtime.horovodrun import run_commandline
except ImportError:
    from horovod.runner.launch import run_commandline
"""


def prepare_launcher(environment: PythonEnvironment) -> None:
    """Let `horovodrun` show the lines of the job alone; without hvdtrain it works as before."""
    script = environment.scripts / "horovodrun"
    if script.exists():
        text = script.read_text()
        if f"\n{_PLAIN}" in text and _QUIET not in text:
            script.write_text(text.replace(_PLAIN, _QUIET, 1))
