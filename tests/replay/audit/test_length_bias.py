"""A bias in what was lost is seen when it is there, and not when it is not."""

import random
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinlog.replay.audit.length_bias import measure_length_bias

_LENGTHS = st.lists(st.integers(0, 6), min_size=8, max_size=14)


@given(_LENGTHS, _LENGTHS)
def test_superiority_is_the_share_of_pairs_in_which_the_lost_one_is_longer(
    lost: list[int], trained: list[int]
):
    pairs = [(a > b) + (a == b) / 2 for a, b in product(lost, trained)]
    assert measure_length_bias(lost, trained).superiority == pytest.approx(sum(pairs) / len(pairs))


def test_p_value_is_close_to_that_of_all_ways_to_part_the_lengths():
    lost, trained = [19, 22, 16, 29, 24, 31, 18, 27], [20, 11, 17, 12, 15, 22, 9, 14]
    found = measure_length_bias(lost, trained)
    together = lost + trained
    as_high = ways = 0
    for chosen in combinations(range(16), 8):
        parts = [together[i] for i in chosen], [together[i] for i in range(16) if i not in chosen]
        superiority = measure_length_bias(*parts).superiority
        ways += 1
        as_high += superiority is not None and superiority >= (found.superiority or 1)
    assert found.p_value == pytest.approx(as_high / ways, abs=3e-3)


def test_losing_the_long_ones_is_found():
    chance = random.Random(1)
    lengths = sorted(chance.lognormvariate(4, 1) for _ in range(400))
    assert measure_length_bias(lengths[-60:], lengths[:-60]).found


@pytest.mark.parametrize("seed", range(20))
def test_losing_at_random_is_not(seed: int):
    chance = random.Random(seed)
    lengths = [chance.lognormvariate(4, 1) for _ in range(400)]
    assert not measure_length_bias(lengths[:60], lengths[60:]).found


def test_losing_the_short_ones_or_all_alike_is_not():
    assert not measure_length_bias([1.0] * 50, [2.0] * 50).found
    assert not measure_length_bias([2.0] * 50, [2.0] * 50).found


@given(st.permutations(range(10)), st.integers(1, 7))
def test_small_samples_are_compared_exactly(lengths: list[int], lost: int):
    """Against all ways to take so many of the same lengths."""
    found = measure_length_bias(lengths[:lost], lengths[lost:])
    superiorities = [
        measure_length_bias(chosen, [n for n in range(10) if n not in chosen]).superiority
        for chosen in combinations(range(10), lost)
    ]
    as_high = sum(s is not None and s >= (found.superiority or 0) for s in superiorities)
    assert found.p_value == pytest.approx(as_high / len(superiorities))


@given(st.lists(st.integers(0, 3), min_size=9, max_size=9), st.integers(1, 4))
def test_ties_of_small_samples_never_make_a_bias_more_likely(lengths: list[int], lost: int):
    """Against all ways to take so many of the same lengths, with a tie counted as a pair in which the lost is not longer."""

    def not_longer(chosen: tuple[int, ...]) -> int:
        rest = [lengths[i] for i in range(9) if i not in chosen]
        return sum(lengths[i] <= other for i in chosen for other in rest)

    found = measure_length_bias(lengths[:lost], lengths[lost:])
    ways = [not_longer(chosen) for chosen in combinations(range(9), lost)]
    as_few = sum(pairs <= not_longer(tuple(range(lost))) for pairs in ways)
    assert (found.p_value or 0) >= as_few / len(ways) - 1e-9


def test_losing_only_a_few_is_found_when_they_are_the_longest_of_many():
    bias = measure_length_bias([900.0, 950.0, 990.0], [float(n) for n in range(100)])
    assert bias.p_value == pytest.approx(6 / (103 * 102 * 101))
    assert bias.found
    # The same three in the middle say nothing.
    assert not measure_length_bias([40.0, 50.0, 60.0], [float(n) for n in range(100)]).found


def test_one_that_left_is_no_bias_among_few_however_long_it_was():
    bias = measure_length_bias([10_000.0], [float(n) for n in range(100)])
    assert (bias.superiority, bias.p_value, bias.found) == (1.0, pytest.approx(1 / 101), False)


def test_without_a_length_on_either_side_there_is_nothing_to_compare():
    for lost, trained in (([], [1.0]), ([100.0], [])):
        bias = measure_length_bias(lost, trained, unknown=3)
        assert (bias.superiority, bias.p_value, bias.found, bias.unknown) == (None, None, False, 3)
        assert bias.statistic == "nothing to compare"
