"""Reading ahead in other threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(tasks: Iterable[Callable[[], T]], *, workers: int = 1, limit: int = 4) -> Iterator[T]:
    """Call `tasks` in other threads and return what they give, in their order.

    How many are called depends on how many results were asked for, never on time: with one worker, what they draw
    from a generator that they share is the same on every rank. The first is called alone, as who looks at one result
    may want no more.

    Args:
        tasks: what is called; with one worker one after the other.
        workers: threads.
        limit: results that may wait.
    """
    remaining = iter(tasks)
    for first in remaining:
        yield first()
        break
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="data") as pool:
        for task in remaining:
            waiting.append(pool.submit(task))
            if len(waiting) > limit:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
