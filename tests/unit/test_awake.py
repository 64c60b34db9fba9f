import time

from tests import awake


def test_seconds_are_counted_while_the_machine_runs():
    begin, counted = time.monotonic(), awake.awake_seconds()
    time.sleep(0.5)
    assert 0.2 < awake.awake_seconds() - counted <= time.monotonic() - begin + awake.LONGEST_TICK_S


def test_a_machine_that_stands_still_does_not_count():
    late = [0.0]
    clock = awake.AwakeClock(lambda: time.monotonic() + late[0])
    time.sleep(0.3)
    late[0] = 1000.0
    time.sleep(0.3)
    assert 0.2 < clock.seconds() < 100
