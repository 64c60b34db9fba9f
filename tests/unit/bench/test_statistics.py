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


def test_noise_is_refused_with_its_quartiles():
    found = ratio([10.0, 15.0, 8.0, 12.0], [20.0, 20.0, 20.0, 20.0])
    assert isinstance(found, Refused)
    assert found.reason == "too noisy: its quartiles are 0.475 and 0.637"


def test_the_limit_lies_at_a_tenth():
    assert isinstance(ratio([0.951, 1.0, 1.049, 1.0], [1.0] * 4), Spread)
    assert isinstance(ratio([0.9, 0.94, 1.0, 1.06, 1.1], [1.0] * 5), Refused)


@pytest.mark.parametrize(("rounds", "said"), [(0, "0 rounds"), (1, "1 round:"), (2, "2 rounds")])
def test_few_rounds_do_not_tell(rounds, said):
    found = ratio([10.0] * rounds, [20.0] * 5)
    assert isinstance(found, Refused)
    assert said in found.reason


def test_other_programs_are_a_reason_even_if_the_figures_agree():
    found = ratio([10.0] * 3, [20.0] * 3, [0.1, 1.4, 1.2])
    assert isinstance(found, Refused)
    assert found.reason == "too noisy: other programs took 1.20 cores meanwhile"


def test_a_median_of_nothing_is_no_figure():
    assert isinstance(ratio([0.0] * 3, [1.0] * 3), Refused)


def test_verdicts():
    assert verdict([10.0, 11.0, 12.0], [20.0, 21.0, 22.0]) == "slower"
    assert verdict([20.0, 21.0, 22.0], [10.0, 11.0, 12.0]) == "faster"
    assert verdict([10.0, 11.0, 12.0], [11.0, 11.5, 13.0]) == "within the spread"
    assert verdict([10.0, 11.0], [20.0, 21.0, 22.0]) == "too few rounds"
