"""The GPUs of this machine, counted without TensorFlow or a driver's library."""

from collections.abc import Mapping
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")


def count_gpus(environ: Mapping[str, str], driver: Path = DRIVER) -> int:
    """Return how many NVIDIA GPUs this machine has, or how many of them CUDA_VISIBLE_DEVICES leaves visible."""
    there = len(list(driver.iterdir())) if driver.is_dir() else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not there or visible is None:
        return there
    words = [word.strip() for word in visible.split(",")]
    shown = next((at for at, word in enumerate(words) if word in ("", "-1", "NoDevFiles")), len(words))
    return min(there, shown)
