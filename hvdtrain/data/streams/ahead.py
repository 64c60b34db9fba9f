"""Prefetching in threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(tasks: Iterable[Callable[[], T]], *, workers: int = 1, limit: int = 4) -> Iterator[T]:
    """Call `tasks` in threads and yield their results in order.

    How far ahead it runs depends on how many results were taken, never on timing: with one worker, tasks that draw
    from a shared generator draw the same on every rank. The first task runs alone, since a caller that inspects one
    result may want no more.

    Args:
        tasks: functions to call; with one worker, one at a time.
        workers: number of threads.
        limit: results held at most.
    """
    remaining = iter(tasks)
    for first in remaining:
        yield first()
        break
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
    try:
        for task in remaining:
            waiting.append(pool.submit(task))
            if len(waiting) > limit:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Python's garbage collector may close this on any thread, the watchdog's too, and a task may take for ever.
        # What was begun is finished, so that ranks have drawn the same.
        pool.shutdown(wait=False)
