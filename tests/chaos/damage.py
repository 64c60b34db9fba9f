"""Ways in which the newest checkpoint of a stopped training gets lost."""

import shutil
from pathlib import Path

from hvdtrain.checkpoint.naming import complete


def damage_newest(folder: Path, variant: int) -> str:
    """Damage the newest of several checkpoints in `folder`, and return its name; empty where there are not several."""
    found = complete(folder) if folder.is_dir() else []
    if len(found) < 2:
        return ""
    newest, ways = found[-1], [_truncate, _flip, _remove_data, _remove_index, _exchange]
    ways[variant % len(ways)](newest, found)
    return newest.name


def _data(checkpoint: Path) -> Path:
    return next(path for path in sorted(checkpoint.iterdir()) if path.suffix == ".safetensors")


def _truncate(newest: Path, found: list[Path]) -> None:
    data = _data(newest)
    data.write_bytes(data.read_bytes()[:-7])


def _flip(newest: Path, found: list[Path]) -> None:
    data = bytearray(_data(newest).read_bytes())
    data[len(data) // 2] ^= 0x10
    _data(newest).write_bytes(data)


def _remove_data(newest: Path, found: list[Path]) -> None:
    _data(newest).unlink()


def _remove_index(newest: Path, found: list[Path]) -> None:
    (newest / "index.json").unlink()


def _exchange(newest: Path, found: list[Path]) -> None:
    """Put the data of the checkpoint before in the place of the newest one's."""
    shutil.copyfile(_data(found[-2]), _data(newest))
