"""The files with which a run begins: written again if somebody removes them while it trains."""

from pathlib import Path

from hvdtrain.checkpoint.lock import FolderLock
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runtime.terminal import say


class StartFiles:
    """What a run's folder must hold for its checkpoints to be of use: `config.yaml`, `env.json` and the description.

    Args:
        folder: of the run.
        lock: this job's on the folder.
    """

    def __init__(self, folder: RunFolder, lock: FolderLock) -> None:
        self._folder = folder
        self._lock = lock
        self._contents: dict[Path, bytes] = {}

    def remember(self) -> None:
        """Keep in memory what the files hold, once they are written."""
        folder = self._folder
        files = (folder.config, folder.environment, folder.preprocessing, folder.tokenizer)
        self._contents = {file: file.read_bytes() for file in files if file.is_file()}

    def restore(self) -> None:
        """Write those again that are missing, and warn of it; called where the folder is about to be written.

        Raises:
            CheckpointError: another job writes to the folder by now.
            OSError: it cannot be written.
        """
        self._lock.renew()
        missing = [file for file in self._contents if not file.exists()]
        for file in missing:
            file.write_bytes(self._contents[file])
        if missing:
            names = ", ".join(file.name for file in missing)
            say(
                f"hvdtrain: warning: {names} of the run folder {self._folder.path} were removed while the run trains. "
                "They are written again; checkpoints from before are not."
            )
