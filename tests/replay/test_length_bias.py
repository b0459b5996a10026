"""A bias in what was lost is seen when it is there, and not when it is not."""

import random
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinlog.replay.length_bias import measure_length_bias

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


def test_a_few_say_nothing():
    bias = measure_length_bias([100.0] * 7, [1.0] * 100)
    assert (bias.superiority, bias.found, bias.median_lost) == (None, False, 100.0)
