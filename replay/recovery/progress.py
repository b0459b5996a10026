"""What unfinished rollouts had generated, as the progress journal has it: what a restart need not generate again."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc
from msgspec.structs import replace

from kinlog.lineage.decide import resumable_attempts
from kinlog.lineage.journal import PROGRESS, UNREADABLE, Attempt, journal_batches, scan_journal
from kinlog.lineage.state import Projection
from kinlog.lineage.store import Store
from kinlog.replay.recovery.plan import RecoveryPlan

__all__ = ["Resumed", "resumed_by", "written_tokens"]


class Resumed(NamedTuple):
    """Siblings whose next attempt goes on from tokens that are there."""

    siblings: int = 0
    tokens: int = 0


def resumed_by(
    plan: RecoveryPlan, restored: Projection, store: Store, directory: Path, *, max_resumes: int
) -> Resumed:
    """Return what the attempts after a restart go on from. What newer weights sampled is counted, whatever the policy.

    Parameters
    ----------
    plan:
        What the restart does.
    restored:
        The projection that it was made from.
    directory:
        The run's progress directory. It may not exist.
    max_resumes:
        As for :func:`kinlog.lineage.decide.dispatch_siblings`.
    """
    given_up = {(event.group_id, event.generation): event for event in plan.superseded}
    candidates: list[list[Attempt]] = []
    for group_id in plan.waiting:
        group = restored.groups[group_id]
        for generation, sibling in group.siblings.items():
            event = given_up.get((group_id, generation))
            if event is None and not sibling.waiting:
                continue
            last = sibling if event is None else replace(sibling, last_reason=event.reason)
            attempts = resumable_attempts(group, last, max_resumes=max_resumes)
            candidates.append([(group_id, generation, attempt) for attempt in attempts])
    wanted = {attempt for attempts in candidates for attempt in attempts}
    written = written_tokens(store, directory, wanted) if wanted else {}
    gone_on_from = [
        tokens for attempts in candidates if (tokens := max((written.get(a, 0) for a in attempts), default=0))
    ]
    return Resumed(len(gone_on_from), sum(gone_on_from))


def written_tokens(store: Store, directory: Path, wanted: Collection[Attempt]) -> dict[Attempt, int]:
    """Return how many tokens the journal has of each attempt of which it has any. Segments that cannot be read have
    none."""
    tokens: Counter[Attempt] = Counter()
    for name in filter(PROGRESS.owns, store.names(directory)):
        try:
            journal = scan_journal(store, directory / name)
            for batch in journal_batches(journal):
                columns = (
                    batch.column(column).to_pylist() for column in ("group_id", "generation", "attempt")
                )
                lengths = pc.list_value_length(batch.column("token_ids")).to_pylist()
                for attempt, length in zip(zip(*columns, strict=True), lengths, strict=True):
                    if attempt in wanted:
                        tokens[attempt] += length
        except UNREADABLE:
            continue
    return dict(tokens)
