"""Iterators of tf.data in a process that has one core, where autotuning costs time and decides nothing."""

from typing import Any

from hvdtrain.compat.tensorflow import OPTIONS, PREFETCHES, input_of, is_kind

_MARK = "__hvdtrain_untuned__"


def end_iterators_at_once() -> None:
    """Create this process's iterators of datasets without tf.data's autotuning, unless a dataset's options speak of it.

    An iterator that is deleted waits for its tuning thread. On one core this thread runs as soon as it is notified,
    does not yet see that it is to end, and sleeps for the rest of its period. The period doubles up to a minute, so
    each epoch and each evaluation may end in a wait as long as itself (`benchmarks/one_core.py`). There is nothing to
    tune on one core. What autotuning also does, to read ahead where the dataset does not, is kept.

    It replaces `tf.data.Dataset.__iter__` for as long as the process lives.
    """
    import tensorflow as tf

    begin = tf.data.Dataset.__iter__
    if getattr(begin, _MARK, False):
        return

    def untuned(dataset: Any) -> Any:
        return begin(_without_tuning(dataset))

    setattr(untuned, _MARK, True)
    # Keras' fit and users' loops make iterators of their own, so each dataset has to know.
    tf.data.Dataset.__iter__ = untuned


def _without_tuning(dataset: Any) -> Any:
    import tensorflow as tf

    if not tf.executing_eagerly():
        return dataset  # a graph knows no options; its loops over datasets have no iterator
    given = dataset.options()
    tuning = given.autotune
    if any(chosen is not None for chosen in (tuning.enabled, tuning.ram_budget, tuning.cpu_budget)):
        return dataset
    if given.experimental_optimization.inject_prefetch is not False and not _reads_ahead(dataset):
        dataset = dataset.prefetch(1)
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _reads_ahead(dataset: Any) -> bool:
    while is_kind(dataset, OPTIONS):
        dataset = input_of(dataset)
    return is_kind(dataset, PREFETCHES)
