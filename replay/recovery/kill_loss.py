"""What a kill costs at the end of a log: work that is redone, and steps that are trained again."""

from collections.abc import Iterable

import msgspec

from kinlog.lineage.state import GroupPhase, Projection
from kinlog.replay.plain_text import format_count, render_paragraph
from kinlog.replay.recovery.plan import RecoveryPlan
from kinlog.replay.recovery.progress import Resumed
from kinlog.schemas.rows import RowTag

__all__ = ["KillLoss", "kill_loss", "render_loss"]


class KillLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What would be lost if the controller were killed now; of a run that is dead, what its end has cost."""

    ended_in_order: bool
    """The last life closed the log: there is nothing to kill."""
    log_seq: int
    checkpoint: str | None
    """What a restart goes back to; ``None``: the start of the run."""
    siblings_in_flight: int
    """Given another attempt in any case. How many tokens they have got to is in no log."""
    siblings_resumed: int
    """Of them, those whose next attempt goes on from tokens that are written down."""
    tokens_resumed: int
    """How many."""
    mean_tokens: float
    """Completion tokens of a sealed attempt, the mean of the run so far."""
    sealed_siblings_redone: int
    """Finished work that is generated again: no data plane would have its rows any more."""
    tokens_redone: int
    """Their completion tokens."""
    siblings_kept_by_journal: int
    """Sealed since the checkpoint: finished work whose rows the row journal has."""
    tokens_kept_by_journal: int
    rows_kept_by_journal: int
    steps_rolled_back: int
    """Applied since the durable trainer checkpoint: trained again."""
    groups_trained_again: int
    """The groups of these steps."""


def kill_loss(
    plan: RecoveryPlan,
    restored: Projection,
    *,
    at_end: Projection,
    put_back: Iterable[RowTag],
    resumed: Resumed = Resumed(),  # noqa: B008 - immutable
) -> KillLoss:
    """Say what a kill costs.

    Parameters
    ----------
    plan:
        What a restart does now.
    restored:
        The projection that the plan was made from: ``run_restored`` is folded.
    at_end:
        The projection of the whole log, before that.
    put_back:
        The rows that the row journal gives back.
    resumed:
        What the progress journal gives back.
    """
    rows = list(put_back)
    kept = {(row.group_id, row.generation, row.attempt) for row in rows}
    sealed = {
        (group.group_id, generation): sibling.sealed
        for group in restored.groups.values()
        for generation, sibling in group.siblings.items()
        if sibling.sealed is not None
    }
    redone = [(event.group_id, event.generation) for event in plan.superseded]
    kept_tokens = {
        attempt: seal.completion_tokens
        for attempt in kept
        if (seal := sealed.get(attempt[:2])) is not None
        and seal.attempt == attempt[2]
        and attempt[:2] not in redone
    }
    return KillLoss(
        ended_in_order=at_end.cleanly_closed,
        log_seq=at_end.last_seq,
        checkpoint=plan.checkpoint,
        siblings_in_flight=sum(
            sibling.running for group in restored.live_groups() for sibling in group.siblings.values()
        ),
        siblings_resumed=resumed.siblings,
        tokens_resumed=resumed.tokens,
        mean_tokens=at_end.sealed_tokens_total / at_end.sealed_total if at_end.sealed_total else 0.0,
        sealed_siblings_redone=sum(key in sealed for key in redone),
        tokens_redone=plan.lost_tokens,
        siblings_kept_by_journal=len(kept_tokens),
        tokens_kept_by_journal=sum(kept_tokens.values()),
        rows_kept_by_journal=len(rows),
        steps_rolled_back=at_end.train_step - plan.train_step,
        groups_trained_again=sum(
            group.phase is GroupPhase.APPLIED and (group.claimed_step or 0) > plan.train_step
            for group in at_end.groups.values()
        ),
    )


def render_loss(loss: KillLoss) -> str:
    """Return what a kill costs, in sentences."""
    title = f"what a kill would cost at seq {loss.log_seq:,}"
    if loss.ended_in_order:
        title += " (the last life ended in order: there is nothing to kill)"
    paragraphs = (render_paragraph(text, first="  - ", rest="    ") for text in _sentences(loss))
    return "\n".join((title, "", *paragraphs))


def _sentences(loss: KillLoss) -> list[str]:
    in_flight = format_count(loss.siblings_in_flight, "sibling")
    mean = f"; a sealed one had {loss.mean_tokens:,.0f} on average" if loss.mean_tokens else ""
    sentences = [
        f"{in_flight} in flight would be cut off. How many tokens they have by now is in no log{mean}."
        if loss.siblings_in_flight
        else "Nothing is in flight."
    ]
    if loss.siblings_in_flight:
        sentences.append(
            f"{format_count(loss.siblings_resumed, 'sibling')} of them would go on from "
            f"{format_count(loss.tokens_resumed, 'token')} that are written down; the others would be generated again."
        )
    if loss.sealed_siblings_redone:
        sentences.append(
            f"{format_count(loss.sealed_siblings_redone, 'finished sibling')} would be generated again, "
            f"{format_count(loss.tokens_redone, 'token')}: their rows would be gone with the data plane, or their group is "
            "redone as a whole."
        )
    else:
        sentences.append("No finished sibling would be generated again.")
    if loss.rows_kept_by_journal:
        sentences.append(
            f"The row journal keeps {format_count(loss.rows_kept_by_journal, 'row')} that no checkpoint has: with them "
            f"{format_count(loss.siblings_kept_by_journal, 'finished sibling')} of "
            f"{format_count(loss.tokens_kept_by_journal, 'token')} would come back."
        )
    where = f"checkpoint {loss.checkpoint}" if loss.checkpoint is not None else "the start of the run"
    if loss.steps_rolled_back:
        sentences.append(
            f"{format_count(loss.steps_rolled_back, 'step')} since {where} would be rolled back: trained again, on the same "
            f"{format_count(loss.groups_trained_again, 'group')}, which need not be generated again for it unless they are "
            "counted above."
        )
    else:
        sentences.append(f"No step would be rolled back: the restart would begin at {where}.")
    return sentences
