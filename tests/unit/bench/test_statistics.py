import pytest

from hvdtrain.bench.results import Refused, Spread, ratio, spread, verdict


def test_quartiles():
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0)


def test_a_quiet_machine_gives_a_ratio():
    found = ratio([10.0, 10.1, 9.9], [20.0, 20.3, 19.7], [0.02, 0.05])
    assert isinstance(found, Spread)
    assert found.median == pytest.approx(0.5, rel=0.01)


def test_what_slows_both_sides_alike_does_not_matter():
    slow = [1.0, 3.0, 1.5, 2.0, 5.0]
    found = ratio([10 * s for s in slow], [20 * s for s in slow])
    assert found == Spread(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("over", "under", "foreign", "reason"),
    [
        ([10.0, 15.0, 8.0, 12.0], [20.0] * 4, [], "too noisy: its quartiles are 0.475 and 0.637"),
        ([0.9, 0.94, 1.0, 1.06, 1.1], [1.0] * 5, [], "too noisy: its quartiles are 0.94 and 1.06"),
        ([0.0] * 3, [1.0] * 3, [], "too noisy: its quartiles are 0 and 0"),
        ([10.0] * 3, [20.0] * 3, [0.1, 1.4, 1.2], "too noisy: other programs took 1.20 cores meanwhile"),
        ([], [20.0] * 5, [], "0 rounds: fewer than 3 do not show how noisy it was"),
        ([10.0], [20.0] * 5, [], "1 round: fewer than 3 do not show how noisy it was"),
        ([10.0] * 2, [20.0] * 5, [], "2 rounds: fewer than 3 do not show how noisy it was"),
    ],
)
def test_noise_is_refused_with_the_reason(over, under, foreign, reason):
    assert ratio(over, under, foreign) == Refused(reason)


def test_the_limit_lies_at_a_tenth():
    assert isinstance(ratio([0.951, 1.0, 1.049, 1.0], [1.0] * 4), Spread)


def test_verdicts():
    assert verdict([10.0, 11.0, 12.0], [20.0, 21.0, 22.0]) == "slower"
    assert verdict([20.0, 21.0, 22.0], [10.0, 11.0, 12.0]) == "faster"
    assert verdict([10.0, 11.0, 12.0], [11.0, 11.5, 13.0]) == "within the spread"
    assert verdict([10.0, 11.0], [20.0, 21.0, 22.0]) == "too few rounds"
