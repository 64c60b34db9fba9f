"""A generator object, as Keras users pass it to `fit`: a stream that can be read once."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from hvdtrain.config.errors import ConfigError, DataError


def as_function(data: Any, steps_per_epoch: int | None) -> Any:
    """Return a generator object as a function that goes on with its batches, and any other data as they are.

    The first batch, which is looked at before training, is given once more to the training.

    Args:
        data: what `fit` was given.
        steps_per_epoch: steps of an epoch; without them the end of an epoch would be the end of the data.

    Raises:
        ConfigError: a generator object without `steps_per_epoch`.
    """
    if not inspect.isgenerator(data):
        return data
    if steps_per_epoch is None:
        raise ConfigError(
            f"A generator can be read only once: pass steps_per_epoch=N, or the function that makes it, "
            f"fit({data.__name__}) and not fit({data.__name__}())."
        )
    return _continuing(data)


def _continuing(generator: Iterator[Any]) -> Callable[[], Iterator[Any]]:
    first: list[Any] = []
    ended = False

    def batches() -> Iterator[Any]:
        nonlocal ended
        if ended:
            raise DataError(f"{batches.__name__} ended before the training did: it has too few batches.")
        yield from first
        for batch in generator:
            if not first:
                first.append(batch)
            yield batch
        ended = True

    batches.__name__ = getattr(generator, "__name__", "the generator")
    return batches
