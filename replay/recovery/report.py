"""The recovery report: what a restart did, or would do, for people and as JSON."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kinlog.lineage.state import GroupPhase, Projection
from kinlog.replay.plain_text import (
    format_bytes,
    format_count,
    render_counts,
    render_paragraph,
    render_sections,
    render_table,
)
from kinlog.replay.recovery.inventory import RowProblem
from kinlog.replay.recovery.plan import RecoveryPlan
from kinlog.replay.recovery.progress import Resumed
from kinlog.schemas.events import AttemptSuperseded, Position
from kinlog.schemas.reasons import Reason

__all__ = [
    "RecoveryReport",
    "SkippedCheckpoint",
    "brief_problem",
    "build_report",
    "render_redone",
    "render_report",
]


class SkippedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that was looked at and not used."""

    name: str
    reason: str


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a restart keeps, redoes, drops and clears."""

    run_id: str
    executed: bool
    """False: this is what a restart would do, and nothing was changed."""
    checkpoint: str | None
    """``None``: from the start of the run, since there is no usable checkpoint."""
    checkpoint_position: Position | None
    skipped: tuple[SkippedCheckpoint, ...]
    log_epoch: int
    log_seq: int
    """The last event of the log that was replayed."""
    tail_events: int
    """Events past the checkpoint that were replayed."""
    train_step: int
    weight_version: int
    steps_undone: int
    draw_cursor: int
    """The next draw: no prompt before it is drawn again, and none is skipped."""

    groups_alive: int
    groups_reused: int
    """Finalized, with their canonical rows: back in the buffer as they are."""
    groups_to_finalize: int
    """All their siblings are reused, and have no canonical rows yet, or none that the log knows of."""
    groups_refinalized: int
    """Those of them whose finalize has no known outcome: driven again."""
    groups_rolled_back: dict[str, int]
    """Their canonical rows are gone: finalized or generated again, by reason."""
    groups_waiting: int
    """With siblings to dispatch."""
    groups_dropped: dict[str, int]
    groups_parked: dict[str, int]
    """Set aside, in this life or an earlier one."""

    siblings_reused: int
    siblings_to_dispatch: int
    """All that are generated after the restart, those never dispatched before included."""
    siblings_redispatched: dict[str, int]
    """Attempts given up by this restart, by reason."""
    siblings_sealed_redone: dict[str, int]
    """Those of them that had been sealed: finished work that is lost, by reason."""

    tokens_saved: int
    """Completion tokens of reused siblings."""
    tokens_to_redo: int
    """Completion tokens of sealed siblings that are generated again. What was in flight is not in the log."""
    siblings_resumed: int
    """Of those that were in flight: the next attempt goes on from tokens that were written down."""
    tokens_resumed: int
    """How many."""

    rows_retired: dict[str, int]
    """Rows of steps that the checkpoint itself made durable, by partition: cleared, as they were the first time."""
    rows_cleared: dict[str, int]
    """Rows that nobody refers to, by partition."""
    rows_missing: tuple[RowProblem, ...]
    """Rows that the checkpoint promised, and that are redone by explicit choice."""
    quarantined_bytes: int
    rows_put_back: int
    """Staged rows that the data plane lacked, and that the row journal gave back."""
    seconds: dict[str, float]
    """Time spent by phase, in order."""
    notes: tuple[str, ...]
    """What the reader should know about this report."""


def build_report(
    plan: RecoveryPlan,
    restored: Projection,
    *,
    executed: bool,
    checkpoint_position: Position | None,
    skipped: Sequence[SkippedCheckpoint],
    log_end: Position,
    step_before: int,
    quarantined_bytes: int = 0,
    rows_put_back: int = 0,
    resumed: Resumed = Resumed(),  # noqa: B008 - immutable
    seconds: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
) -> RecoveryReport:
    """Put a plan, and what is known besides, into a report.

    Parameters
    ----------
    plan:
        The plan that is, or would be, carried out.
    restored:
        The projection that the plan was made from: ``run_restored`` is folded, the plan's own events are not.
    executed:
        Whether the plan is carried out; otherwise nothing is changed.
    checkpoint_position:
        The checkpoint's place in the log; ``None`` when the run begins again from its start.
    skipped:
        Checkpoints that were looked at and not used.
    log_end:
        The last event of the log as it was found.
    step_before:
        The last optimizer step that the log holds before the restart undoes any.
    quarantined_bytes:
        What the repair of the log's tail copies aside.
    rows_put_back:
        What the row journal gives back.
    resumed:
        What the progress journal gives back.
    seconds:
        Time spent by phase, in order.
    notes:
        What the reader should know besides.

    Raises
    ------
    ValueError
        ``restored`` is not the projection that the plan was made from.
    """
    kept = Counter(sibling.group_id for sibling in plan.reused)
    return RecoveryReport(
        run_id=restored.run_id,
        executed=executed,
        checkpoint=plan.checkpoint,
        checkpoint_position=checkpoint_position,
        skipped=tuple(skipped),
        log_epoch=log_end.epoch,
        log_seq=log_end.seq,
        tail_events=log_end.seq - (checkpoint_position.seq if checkpoint_position is not None else 0),
        train_step=plan.train_step,
        weight_version=plan.weight_version,
        steps_undone=step_before - plan.train_step,
        draw_cursor=restored.draw_cursor,
        groups_alive=restored.alive_total - len(plan.dropped) - len(plan.parked),
        groups_reused=len(plan.finalized),
        groups_to_finalize=restored.alive_total
        - len(plan.dropped)
        - len(plan.parked)
        - len(plan.finalized)
        - len(plan.waiting),
        groups_refinalized=len(plan.refinalized),
        groups_rolled_back=_by_reason(event.reason for event in plan.finalize_failed),
        groups_waiting=len(plan.waiting),
        groups_dropped=_by_reason(event.reason for event in plan.dropped),
        groups_parked=_by_reason(
            [
                *(event.reason for event in plan.parked),
                *(
                    group.parked_reason
                    for group in restored.groups.values()
                    if group.phase is GroupPhase.PARKED and group.parked_reason is not None
                ),
            ]
        ),
        siblings_reused=len(plan.reused),
        siblings_to_dispatch=sum(
            restored.groups[group_id].num_generations - kept[group_id] for group_id in plan.waiting
        ),
        siblings_redispatched=_by_reason(event.reason for event in plan.superseded),
        siblings_sealed_redone=_by_reason(
            event.reason for event in plan.superseded if _was_sealed(restored, event)
        ),
        tokens_saved=plan.tokens_saved,
        tokens_to_redo=plan.lost_tokens,
        siblings_resumed=resumed.siblings,
        tokens_resumed=resumed.tokens,
        rows_retired={partition.value: len(keys) for partition, keys in plan.retired.items() if keys},
        rows_cleared={partition.value: len(keys) for partition, keys in plan.unreferenced.items() if keys},
        rows_missing=plan.missing_promised,
        quarantined_bytes=quarantined_bytes,
        rows_put_back=rows_put_back,
        seconds=dict(seconds or {}),
        notes=tuple(notes),
    )


def _was_sealed(restored: Projection, event: AttemptSuperseded) -> bool:
    sibling = restored.groups[event.group_id].siblings[event.generation]
    if sibling.attempt != event.attempt or sibling.waiting:
        raise ValueError(
            f"group {event.group_id}/{event.generation}: attempt {event.attempt} does not stand in the projection: "
            "the report needs the one from before the plan was carried out"
        )
    return sibling.sealed is not None


def _by_reason(reasons: Iterable[Reason]) -> dict[str, int]:
    return dict(Counter(reason.value for reason in reasons))


def render_report(report: RecoveryReport) -> str:
    """Return the report as text, for a terminal or a log file."""
    title = "recovery" if report.executed else "what a restart would do (nothing was changed)"
    sections = [_from_where(report), _groups(report), _siblings(report), _leavings(report)]
    parts = [f"run {report.run_id}: {title}", render_sections(sections, indent=2)]
    if report.notes:
        notes = (render_paragraph(note, first="  note: ", rest="        ") for note in report.notes)
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def brief_problem(name: str, problem: str) -> str:
    """Return why a checkpoint is not used, for a place that names it already."""
    return re.sub(rf"^\S*{re.escape(name)}(: | )", "", problem)


def render_redone(plan: RecoveryPlan) -> str:
    """Return the plan attempt by attempt and group by group, each with its reason, as a table."""
    rows = [
        *(
            (str(e.group_id), str(e.generation), str(e.attempt), "generate again", e.reason.value, e.detail)
            for e in plan.superseded
        ),
        *(
            (str(e.group_id), "", "", "finalize again", e.reason.value, e.detail)
            for e in plan.finalize_failed
        ),
        *((str(group_id), "", "", "finalize again", "outcome unknown", "") for group_id in plan.refinalized),
        *((str(e.group_id), "", "", "drop", e.reason.value, e.detail) for e in plan.dropped),
        *((str(e.group_id), "", "", "park", e.reason.value, e.detail) for e in plan.parked),
    ]
    if not rows:
        return "nothing is redone or dropped"
    rows.sort(key=lambda row: int(row[0]))
    return render_table(
        ("group", "sibling", "attempt", "what", "reason", "detail"), rows, right=(0, 1, 2), indent=2
    )


def _from_where(report: RecoveryReport) -> list[tuple[str, str]]:
    if report.checkpoint is None or report.checkpoint_position is None:
        used = "none: from the start of the run"
    else:
        used = f"{report.checkpoint}, at seq {report.checkpoint_position.seq:,} of the log"
    tail = format_count(report.tail_events, "event")
    trainer = f"step {report.train_step}, weights {report.weight_version}"
    if report.steps_undone:
        trainer += f"; {format_count(report.steps_undone, 'later step')} undone"
    return [
        ("checkpoint", used),
        *(
            ("  skipped", f"{skipped.name}: {brief_problem(skipped.name, skipped.reason)}")
            for skipped in report.skipped
        ),
        ("log", f"seq {report.log_seq:,} of epoch {report.log_epoch}; {tail} past the checkpoint replayed"),
        ("trainer", trainer),
        ("next draw", f"{report.draw_cursor:,}"),
    ]


def _groups(report: RecoveryReport) -> list[tuple[str, str]]:
    again = report.groups_refinalized
    lost = f", {again:,} of them again: the outcome was lost" if again else ""
    return [
        ("groups alive", f"{report.groups_alive:,}"),
        ("  in the buffer", f"{report.groups_reused:,}"),
        ("  to finalize", f"{report.groups_to_finalize:,}{lost}"),
        ("  to generate", f"{report.groups_waiting:,}"),
        ("groups rolled back", render_counts(report.groups_rolled_back)),
        ("groups dropped", render_counts(report.groups_dropped)),
        ("groups parked", render_counts(report.groups_parked)),
    ]


def _siblings(report: RecoveryReport) -> list[tuple[str, str]]:
    return [
        ("siblings reused", f"{report.siblings_reused:,}"),
        ("siblings to dispatch", f"{report.siblings_to_dispatch:,}"),
        ("  redispatched", render_counts(report.siblings_redispatched)),
        ("  of them sealed", render_counts(report.siblings_sealed_redone)),
        ("tokens saved", f"{report.tokens_saved:,}"),
        ("tokens to redo", f"{report.tokens_to_redo:,} of sealed siblings; those in flight are not counted"),
        (
            "tokens to go on from",
            f"{report.tokens_resumed:,} of {format_count(report.siblings_resumed, 'sibling')} in flight",
        ),
    ]


def _leavings(report: RecoveryReport) -> list[tuple[str, str]]:
    missing = [(f"  {problem.key}", problem.reason.value) for problem in report.rows_missing]
    seconds = ", ".join(f"{phase} {spent:.3f}" for phase, spent in report.seconds.items())
    return [
        *([("promised rows missing", f"{len(missing):,}"), *missing] if missing else []),
        ("rows of durable steps", render_counts(report.rows_retired)),
        ("rows to clear" if not report.executed else "rows cleared", render_counts(report.rows_cleared)),
        ("bytes quarantined", format_bytes(report.quarantined_bytes)),
        ("rows put back", f"{report.rows_put_back:,}"),
        *([("seconds", seconds)] if seconds else []),
    ]
