"""What is set before MPI and Horovod start, and what the user's own settings keep."""

import pytest

from hvdtrain.runtime.tuning import set_exchange_defaults


def test_what_the_user_set_stays():
    environ = {"HOROVOD_CYCLE_TIME": "3"}
    set_exchange_defaults(environ)
    assert (environ["HOROVOD_CYCLE_TIME"], environ["OMPI_MCA_mpi_yield_when_idle"]) == ("3", "1")


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "^ofi"), ("^openib", "^openib,ofi"), ("^ofi,openib", "^ofi,openib"), ("self,tcp", "self,tcp")],
)
def test_the_transport_that_ends_late_is_left_out(before, after):
    environ = {} if before is None else {"OMPI_MCA_btl": before}
    set_exchange_defaults(environ)
    assert environ["OMPI_MCA_btl"] == after
