"""The figures of a timeline, counted from the rows that a picture of it shows."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from kinlog.replay.plain_text import format_count, format_time, render_counts, render_sections
from kinlog.replay.timeline.attempts import UNKNOWN_TOKENS, AttemptTable, Outcome

__all__ = ["AttemptFigures", "TimelineSummary", "count_attempts", "render_summary"]


class AttemptFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts, and their completion tokens."""

    dispatched: int
    sealed: int
    superseded: dict[str, int]
    """Given up, by reason."""
    superseded_sealed: dict[str, int]
    """Those of them that had been sealed, by reason: finished work that was redone."""
    outcomes: dict[str, int]
    """By what became of them. Those that were dispatched in dropped history and go on after it are among them."""
    tokens_sealed: int
    tokens_trained: int
    """Of what the surviving history is trained on."""
    tokens_redone: int
    """Of sealed attempts that were given up later."""
    tokens_waiting: int
    """Of sealed attempts whose group is alive."""


class TimelineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a timeline."""

    run_id: str
    events: int
    dropped_events: int
    """The first of them: of these only the sum is left. Groups and steps are of the whole run, all else is after them."""
    first_time_us: int
    last_time_us: int
    clock_went_back: int
    """How often a time was before the one before it: what followed is shown as much later."""
    lives: int
    kills: int
    """Lives that ended without a word, and were followed by another."""
    groups: dict[str, int]
    """``drawn`` = ``applied`` + ``dropped`` + ``parked`` + ``alive``."""
    attempts: AttemptFigures
    late_rejected: int
    """Results that came too late. One attempt may have several."""
    tokens_late: int
    tokens_saved: int
    """Of sealed siblings that restarts reused, added up over the restarts."""
    steps: int
    """On the surviving history."""
    steps_undone: int
    checkpoints: int
    checkpoints_failed: int


def count_attempts(attempts: AttemptTable, first_seq: int) -> AttemptFigures:
    """Count attempts row by row.

    Parameters
    ----------
    first_seq:
        Where the log begins: what was sealed before is not counted as sealed.
    """
    a = attempts
    superseded: Counter[str] = Counter()
    superseded_sealed: Counter[str] = Counter()
    tokens: Counter[Outcome] = Counter()
    sealed = tokens_sealed = 0
    for place in range(len(a)):
        known = 0 if a.tokens[place] == UNKNOWN_TOKENS else a.tokens[place]
        tokens[Outcome(a.outcome[place])] += known
        if a.seal_seq[place] >= first_seq:
            sealed += 1
            tokens_sealed += known
        reason = a.reason_of(place)
        if a.superseded[place] and reason is not None:
            superseded[reason.value] += 1
            if a.seal_seq[place]:
                superseded_sealed[reason.value] += 1
    outcomes = Counter(a.outcome)
    return AttemptFigures(
        dispatched=sum(seq > 0 for seq in a.begin_seq),
        sealed=sealed,
        superseded=dict(superseded),
        superseded_sealed=dict(superseded_sealed),
        outcomes={outcome.name.lower(): outcomes[outcome] for outcome in Outcome if outcomes[outcome]},
        tokens_sealed=tokens_sealed,
        tokens_trained=tokens[Outcome.TRAINED],
        tokens_redone=tokens[Outcome.REDONE],
        tokens_waiting=tokens[Outcome.WAITING],
    )


def render_summary(summary: TimelineSummary) -> str:
    """Return the figures as text."""
    s, a = summary, summary.attempts
    undone = f", {s.steps_undone:,} more undone by restarts" if s.steps_undone else ""
    failed = f", {s.checkpoints_failed:,} failed" if s.checkpoints_failed else ""
    outcomes = [
        (f"  {outcome.words}", f"{a.outcomes[outcome.name.lower()]:,}")
        for outcome in Outcome
        if outcome.name.lower() in a.outcomes
    ]
    sections = [
        [
            ("events", f"{s.events:,}, {format_time(s.first_time_us)} to {format_time(s.last_time_us)}"),
            *_unseen(s),
            ("lives", f"{s.lives:,}, {s.kills:,} of them killed"),
            ("groups", _groups(s.groups)),
            ("steps", f"{s.steps:,}{undone}"),
            ("checkpoints", f"{s.checkpoints:,}{failed}"),
        ],
        [("attempts dispatched", f"{a.dispatched:,}"), *outcomes],
        [
            ("superseded", render_counts(a.superseded)),
            ("  of them sealed", render_counts(a.superseded_sealed)),
            ("late results rejected", f"{s.late_rejected:,}"),
        ],
        [
            ("tokens sealed", f"{a.tokens_sealed:,}"),
            ("  trained on", f"{a.tokens_trained:,}"),
            ("  saved at restarts", f"{s.tokens_saved:,}"),
            ("  redone", f"{a.tokens_redone:,}"),
            ("tokens late", f"{s.tokens_late:,}"),
        ],
    ]
    return f"run {s.run_id}\n\n{render_sections(sections, indent=2)}"


def _groups(groups: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in groups.items())


def _unseen(s: TimelineSummary) -> list[tuple[str, str]]:
    facts = []
    if s.dropped_events:
        facts.append(
            (
                "  dropped",
                f"{s.dropped_events:,}: what happened is shown from seq {s.dropped_events + 1:,} on",
            )
        )
    if s.clock_went_back:
        facts.append(
            ("  clock", f"went back {format_count(s.clock_went_back, 'time')}: it is shown as standing still")
        )
    return facts
