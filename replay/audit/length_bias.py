"""Whether what was lost was longer than what was trained on: the bias that losing work in flight brings with it.

Two samples of lengths are compared by the Mann-Whitney U test (Mann and Whitney, 1947): lengths of rollouts are
heavy-tailed, so that means would say little. Small samples are compared exactly, larger ones by the normal approximation
with its corrections for ties and continuity.

What was never sealed has no length. It is counted, and no more: of groups that were given up because one sibling took too
long, only the shorter siblings are seen here.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from statistics import median

import msgspec

__all__ = ["LengthBias", "measure_length_bias"]

#: The normal approximation is for samples of at least this size. It overstates the p-values of extremes somewhat.
_MIN_NORMAL_SAMPLE = 8
#: With more pairs than this an exact p-value takes seconds. The approximation is then used for small samples as well.
_MAX_EXACT_PAIRS = 250_000
#: A bias is reported when chance would show it less than once in a thousand runs, and when it is not a trifle.
_SIGNIFICANCE = 0.001
_MIN_SUPERIORITY = 0.6


class LengthBias(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of what was lost, against lengths of what was trained on."""

    lost: int
    """Groups that left untrained, and of which a length is known."""
    trained: int
    median_lost: float | None
    """Completion tokens of a sibling, median over groups of their mean."""
    median_trained: float | None
    superiority: float | None
    """Probability that a lost group is longer than a trained one, ties counted half: 0.5 is no bias. ``None`` when there is
    nothing to compare."""
    p_value: float | None
    """Chance of a superiority at least as high without a bias, one-sided."""
    unknown: int = 0
    """Siblings of groups that left untrained which had begun, and were never sealed: how long they were nobody knows."""

    @property
    def found(self) -> bool:
        """Whether what was lost is longer than chance and trifles explain."""
        return (
            self.superiority is not None
            and self.p_value is not None
            and self.superiority >= _MIN_SUPERIORITY
            and self.p_value < _SIGNIFICANCE
        )

    @property
    def statistic(self) -> str:
        """The comparison in words."""
        if self.superiority is None or self.p_value is None:
            return "nothing to compare"
        return f"with probability {self.superiority:.2f} (Mann-Whitney, one-sided p = {self.p_value:.2g})"


def measure_length_bias(lost: Sequence[float], trained: Sequence[float], *, unknown: int = 0) -> LengthBias:
    """Compare the lengths of groups that left untrained with those of groups that were trained on."""
    superiority = p_value = None
    if lost and trained:
        superiority, p_value = _mann_whitney(lost, trained)
    return LengthBias(
        lost=len(lost),
        trained=len(trained),
        median_lost=median(lost) if lost else None,
        median_trained=median(trained) if trained else None,
        superiority=superiority,
        p_value=p_value,
        unknown=unknown,
    )


def _mann_whitney(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return U of ``first`` over the number of pairs, and the one-sided p-value of its being that high."""
    values = sorted([(value, True) for value in first] + [(value, False) for value in second])
    n, m, total = len(first), len(second), len(values)
    ranks = ties = 0.0
    shorter = not_longer = 0  # seconds so far; pairs in which the one of ``first`` is not longer
    at = 0
    while at < total:
        end = at
        while end < total and values[end][0] == values[at][0]:
            end += 1
        tied = end - at
        firsts = sum(is_first for _, is_first in values[at:end])
        # All of them have the mean of the ranks that they take up together, from 1.
        ranks += (at + end + 1) / 2 * firsts
        ties += tied**3 - tied
        not_longer += firsts * (m - shorter)
        shorter += tied - firsts
        at = end
    u = ranks - n * (n + 1) / 2
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return 0.5, 1.0  # all lengths are equal
    if min(n, m) < _MIN_NORMAL_SAMPLE and n * m <= _MAX_EXACT_PAIRS:
        return u / (n * m), _exact_p_value(n, m, not_longer)
    z = (u - n * m / 2 - 0.5) / math.sqrt(variance)
    return u / (n * m), math.erfc(z / math.sqrt(2)) / 2


def _exact_p_value(n: int, m: int, not_longer: int) -> float:
    """Return the chance that ``n`` of ``n + m`` values, taken at random, come out as not longer in no more pairs than these.

    A tie counts against the bias that is looked for. The ways to have k such pairs are the partitions of k into at most
    ``n`` parts of at most ``m``: the coefficients of a Gaussian binomial, which is made factor by factor.
    """
    small, large = sorted((n, m))
    ways = [1] + [0] * not_longer
    for part in range(1, small + 1):
        ways = [a - b for a, b in zip(ways, chain(repeat(0, large + part), ways), strict=False)]
        for start in range(min(part, len(ways))):
            ways[start::part] = accumulate(ways[start::part])
    return sum(ways) / math.comb(n + m, n)
