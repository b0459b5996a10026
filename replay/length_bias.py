"""Whether what was lost was longer than what was trained on: the bias that losing work in flight brings with it.

Two samples of lengths are compared by the Mann-Whitney U test (Mann and Whitney, 1947), with the normal approximation and
its corrections for ties and continuity: lengths of rollouts are heavy-tailed, so that means would say little.
"""

import math
from collections.abc import Sequence
from statistics import median

import msgspec

__all__ = ["LengthBias", "measure_length_bias"]

#: Samples smaller than this say nothing under the normal approximation.
_MIN_SAMPLE = 8
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
    """Probability that a lost group is longer than a trained one, ties counted half: 0.5 is no bias. ``None`` when either
    sample is too small."""
    p_value: float | None
    """Chance of a superiority at least as high without a bias, one-sided."""

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
            return "too few to compare"
        return f"with probability {self.superiority:.2f} (Mann-Whitney, one-sided p = {self.p_value:.2g})"


def measure_length_bias(lost: Sequence[float], trained: Sequence[float]) -> LengthBias:
    """Compare the lengths of groups that left untrained with those of groups that were trained on."""
    superiority = p_value = None
    if min(len(lost), len(trained)) >= _MIN_SAMPLE:
        superiority, p_value = _mann_whitney(lost, trained)
    return LengthBias(
        lost=len(lost),
        trained=len(trained),
        median_lost=median(lost) if lost else None,
        median_trained=median(trained) if trained else None,
        superiority=superiority,
        p_value=p_value,
    )


def _mann_whitney(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return U of ``first`` over the number of pairs, and the one-sided p-value of its being that high."""
    values = sorted([(value, True) for value in first] + [(value, False) for value in second])
    n, m, total = len(first), len(second), len(values)
    ranks = ties = 0.0
    at = 0
    while at < total:
        end = at
        while end < total and values[end][0] == values[at][0]:
            end += 1
        tied = end - at
        # All of them have the mean of the ranks that they take up together, from 1.
        ranks += (at + end + 1) / 2 * sum(is_first for _, is_first in values[at:end])
        ties += tied**3 - tied
        at = end
    u = ranks - n * (n + 1) / 2
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return 0.5, 1.0  # all lengths are equal
    z = (u - n * m / 2 - 0.5) / math.sqrt(variance)
    return u / (n * m), math.erfc(z / math.sqrt(2)) / 2
