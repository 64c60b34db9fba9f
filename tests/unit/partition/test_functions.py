"""Functions of Keras in a step with the whole batch: each is listed, and the page says what it fetches."""

import keras
import pytest

from tests.distributed.keras_operations import NO_TENSORS, OPERATIONS, OVER_BATCH, public_functions
from tests.distributed.zoo.operations import KINDS, PAGE, kinds_on_page, written


def test_every_public_function_is_tried():
    assert {*OPERATIONS, *NO_TENSORS} == set(public_functions()), "a case in tests/distributed/keras_operations.py"
    assert set(OVER_BATCH) <= set(OPERATIONS)


def test_the_page_names_every_function():
    for cases, over_batch in ((OPERATIONS, False), (OVER_BATCH, True)):
        named = [name for kind in KINDS for name in kinds_on_page(kind, over_batch=over_batch)]
        assert sorted(named) == sorted(cases), "python -m tests.distributed.zoo.operations"


@pytest.mark.extended  # it traces four hundred functions
def test_the_page_says_what_each_function_fetches():
    page, floats = PAGE.read_text(encoding="utf-8"), keras.config.floatx()
    try:
        assert page == written(page), "python -m tests.distributed.zoo.operations writes it anew"
    finally:
        keras.config.set_floatx(floats)
