"""Time in a picture: the time between two lives may be shown as a narrow strip."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kinlog.replay.lives import Life

__all__ = ["Gap", "TimeScale", "tick_step_us"]

#: How wide a gap between two lives is drawn at most, as a share of the time that all lives took.
_NARROW = 0.025

_TICKS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
    10800, 21600, 43200, 86400, 172800, 604800,
)  # fmt: skip


class Gap(NamedTuple):
    """A time without a controller that is drawn narrower than it was."""

    begin_us: int
    end_us: int


class TimeScale:
    """Maps times to places between 0 and 1."""

    def __init__(self, lives: Sequence[Life], begin_us: int, end_us: int) -> None:
        alive_us = sum(life.ended_us - life.began_us for life in lives)
        narrow_us = max(1, int(alive_us * _NARROW))
        self.gaps = [
            Gap(before.ended_us, after.began_us)
            for before, after in pairwise(lives)
            if after.began_us - before.ended_us > narrow_us
        ]
        self._knots = [(begin_us, 0)]
        for gap in self.gaps:
            time_us, place = self._knots[-1]
            begin = place + gap.begin_us - time_us
            self._knots += [(gap.begin_us, begin), (gap.end_us, begin + narrow_us)]
        self._length = max(1, self._bent(end_us))

    def __call__(self, time_us: int) -> float:
        """Return the place of a time."""
        return self._bent(time_us) / self._length

    @property
    def length_us(self) -> int:
        """How long the run is without what the gaps leave out."""
        return self._length

    def _bent(self, time_us: int) -> int:
        at = max(0, bisect_right(self._knots, time_us, key=lambda knot: knot[0]) - 1)
        knot_us, place = self._knots[at]
        if at + 1 == len(self._knots):
            return place + time_us - knot_us
        next_us, next_place = self._knots[at + 1]
        return place + (time_us - knot_us) * (next_place - place) // max(1, next_us - knot_us)


def tick_step_us(length_us: int, ticks: int) -> int:
    """Return how far apart the ticks of an axis are, when there are to be about so many."""
    wanted_s = length_us / 1e6 / max(1, ticks)
    return int(next((step for step in _TICKS_S if step >= wanted_s), _TICKS_S[-1]) * 1e6)
