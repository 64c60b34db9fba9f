"""Environment variables for the ranks, passed where other users of a machine cannot read them.

``horovodrun --gloo`` writes all variables of its own environment, keys of other services among them, on the command
lines of the shells and of the `ssh` that start its ranks, which everybody can read who runs `ps`. Here a rank on
the launcher's own machine inherits them, and one elsewhere reads them from its input.
"""

import contextlib
import os
import re
import shlex
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.runtime.horovodrun.replaced import replaced

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""What a shell takes as the name of a variable. The few others stay on the command line."""


@contextlib.contextmanager
def private_environment(gloo_run: Any, extra: Callable[[str, int], Mapping[str, str]]) -> Iterator[None]:
    """Have Horovod's module `gloo_run` pass environment variables to its ranks as described above.

    Args:
        gloo_run: `horovod.runner.gloo_run`.
        extra: returns variables for the ranks alone, given the host and the port of the store.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:  # which is this user's alone
        passing = _Passing(gloo_run, extra, Path(folder, "environment"))
        with replaced(
            gloo_run,
            create_run_env_vars=passing.create_run_env_vars,
            _slot_info_to_command_fn=passing.slot_info_to_command_fn,
            get_remote_command=passing.get_remote_command,
        ):
            yield


class _Passing:
    """Stands in for three functions of `gloo_run`, which calls them in this order."""

    def __init__(self, gloo_run: Any, extra: Callable[[str, int], Mapping[str, str]], file: Path) -> None:
        self._create_run_env_vars = gloo_run.create_run_env_vars
        self._slot_info_to_command_fn = gloo_run._slot_info_to_command_fn
        self._get_remote_command = gloo_run.get_remote_command
        self._is_exportable = gloo_run.env_util.is_exportable
        # Its `kubectl exec` passes no input on. A pod's processes are seen in that pod only.
        self._by_command_line = gloo_run.env_util.is_kubeflow_mpi()
        self._extra = extra
        self._of_ranks: Mapping[str, str] = {}
        self._file = file

    def create_run_env_vars(self, server_ip: str, nics: Any, port: int, elastic: bool = False) -> dict[str, Any]:
        """Return the variables that are the same for all ranks and may be read by everybody."""
        self._of_ranks = self._extra(server_ip, port)
        variables = {**self._create_run_env_vars(server_ip, nics, port, elastic), **self._of_ranks}
        hidden = () if self._by_command_line else self._of_ranks
        return {name: value for name, value in variables.items() if name not in hidden}

    def slot_info_to_command_fn(self, run_command: str, env: Mapping[str, str]) -> Any:
        """Return what makes the command of a rank; its processes inherit what is in `os.environ` now."""
        if self._by_command_line:
            others = {name: value for name, value in env.items() if name not in self._of_ranks}
            return self._slot_info_to_command_fn(run_command, others)
        os.environ.update({**env, **self._of_ranks})
        return self._slot_info_to_command_fn(run_command, {n: v for n, v in env.items() if not _NAME.fullmatch(n)})

    def get_remote_command(self, local_command: str, *args: Any, **kwargs: Any) -> str:
        """Return a command for another host, whose input is the environment."""
        if self._by_command_line:
            return str(self._get_remote_command(local_command, *args, **kwargs))
        self._write_file()
        with_input = shlex.quote(f'eval "$(cat)"; {shlex.split(local_command)[0]}')
        return f"{self._get_remote_command(with_input, *args, **kwargs)} < {shlex.quote(str(self._file))}"

    def _write_file(self) -> None:
        names = [name for name in os.environ if self._is_exportable(name) and _NAME.fullmatch(name)]
        lines = [f"export {name}={shlex.quote(os.environ[name])}\n" for name in names]
        draft = self._file.with_name(f"{self._file.name}.{threading.get_ident()}")
        draft.write_text("".join(lines), errors="surrogateescape")
        draft.replace(self._file)  # ranks are started by threads at the same time
