"""Warnings about what is the same on all ranks."""

import warnings

from hvdtrain.runtime.launchers import detect_environment


def warn_on_first(text: str, *, stacklevel: int = 1) -> None:
    """Warn on the first rank alone, which says it for all.

    Args:
        text: what is said.
        stacklevel: how far above the caller the line is that the warning names; 1: where this is called.
    """
    if detect_environment().rank == 0:
        warnings.warn(text, stacklevel=stacklevel + 1)
