"""The timeline of a run: everything that a picture of it shows, read from its log in one pass.

It is what happened, with the outcome that each attempt had by the end of the log, and no pixels: a page, an image and a
trace are made from it.
"""

import msgspec

from kinlog.replay.audit.account import RestartAccount
from kinlog.replay.lives import Life
from kinlog.replay.timeline.attempts import AttemptTable
from kinlog.replay.timeline.groups import TimelineGroup
from kinlog.replay.timeline.moments import CheckpointSpan, Mark, WeightsMark
from kinlog.replay.timeline.summary import TimelineSummary

__all__ = [
    "StepSpan",
    "Timeline",
]


class StepSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer step, from its first claim to its end."""

    train_step: int
    begin_us: int
    end_us: int
    seq: int
    groups: int
    tokens: int
    """Completion tokens of what it was trained on, as far as the log still says."""
    undone: bool
    """A restart went back to before it."""
    mean_staleness: float
    """Versions that the weights had moved on since the oldest token of a group, over its groups."""
    max_staleness: int


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What a picture of a run shows. Times are microseconds since 1970-01-01 UTC, and never go back."""

    summary: TimelineSummary
    begin_us: int
    end_us: int
    first_seq: int
    workers: tuple[str, ...]
    """Their names; the empty name stands for attempts whose dispatch is in dropped history."""
    slots: tuple[int, ...]
    """For each worker, how many attempts it ran at once at most."""
    attempts: AttemptTable
    details: tuple[str, ...]
    groups: tuple[TimelineGroup, ...]
    """By id."""
    steps: tuple[StepSpan, ...]
    weights: tuple[WeightsMark, ...]
    checkpoints: tuple[CheckpointSpan, ...]
    lives: tuple[Life, ...]
    restarts: tuple[RestartAccount, ...]
    marks: tuple[Mark, ...]
    live_groups: tuple[tuple[int, int], ...]
    """(time, groups alive from then on)."""
