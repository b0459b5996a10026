"""The workers' journals at restart and at checkpoints: which rows are put back, and what is still needed."""

from collections.abc import Mapping
from pathlib import Path

from kinlog.lineage.journal import ROWS, Attempt, journal_identities, scan_journal
from kinlog.lineage.state import GroupPhase, Projection
from kinlog.lineage.store import Store
from kinlog.replay.recovery.held_rows import HeldRows
from kinlog.replay.recovery.inventory import Inventory, staged_rows
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.reasons import Reason
from kinlog.schemas.receipts import staging_key
from kinlog.schemas.rows import RowTag

__all__ = [
    "journalled_attempts",
    "needed_attempts",
    "rows_in_journal",
    "rows_to_put_back",
    "unfinished_attempts",
]


def rows_to_put_back(restored: Projection, inventory: Inventory | HeldRows) -> dict[str, RowTag]:
    """Return the staged rows, by key, that live groups are made of and that the data plane lacks.

    A group whose canonical rows are all there needs no staged ones.
    """
    held = HeldRows.of(inventory)
    wanted: dict[str, RowTag] = {}
    for group in restored.live_groups():
        if group.phase is GroupPhase.FINALIZED and not held.canonical_problems(group):
            continue
        for generation, problems in held.staged_problems(group).items():
            expected = staged_rows(group, group.siblings[generation])
            for problem in problems:
                if problem.reason is Reason.ROWS_MISSING:
                    wanted[problem.key] = expected[problem.key]
    return wanted


def needed_attempts(p: Projection, durable_seq: int) -> frozenset[Attempt]:
    """Return the attempts whose rows only the journal can still give back.

    Parameters
    ----------
    durable_seq:
        Place of the oldest checkpoint that can be gone back to and that holds the data plane's rows: what was sealed at
        or before it is in there.
    """
    return frozenset(
        (group.group_id, generation, sibling.attempt)
        for group in p.groups.values()
        if group.phase is not GroupPhase.PARKED
        for generation, sibling in group.siblings.items()
        if sibling.running or (sibling.sealed is not None and sibling.sealed_seq > durable_seq)
    )


def unfinished_attempts(p: Projection) -> frozenset[Attempt]:
    """Return the attempts that a next attempt of their sibling may go on from: that under way, and those before it whose
    tokens it has gone on from itself."""
    return frozenset(
        (group.group_id, generation, attempt)
        for group in p.live_groups()
        for generation, sibling in group.siblings.items()
        if sibling.sealed is None
        for attempt in range(sibling.resumed_from or sibling.attempt, sibling.attempt + 1)
    )


def journalled_attempts(p: Projection, anchor_seq: int) -> frozenset[Attempt]:
    """Return the attempts whose rows a rollout checkpoint at this place takes from the journal: what was sealed since its
    anchor, at ``anchor_seq``, was taken. Steps applied since then are trained again: their groups are among them."""
    return frozenset(
        (group.group_id, generation, sibling.attempt)
        for group in p.groups.values()
        if group.phase is not GroupPhase.PARKED
        for generation, sibling in group.siblings.items()
        if sibling.sealed is not None
        and sibling.sealed_seq > anchor_seq
        and sibling.sealed.receipt is not None
        and sibling.sealed.receipt.calls
    )


def rows_in_journal(store: Store, directory: Path, wanted: Mapping[str, RowTag]) -> dict[str, RowTag]:
    """Return those of the wanted rows that the journal has, with that content: what a restart would put back.

    Segments that do not verify have none.
    """
    found: dict[str, RowTag] = {}
    for name in filter(ROWS.owns, store.names(directory)):
        try:
            journal = scan_journal(store, directory / name)
        except LogDamagedError:
            continue
        for *identity, digest in journal_identities(journal):
            key = staging_key(*identity)
            if key in wanted and wanted[key].digest == digest:
                found[key] = wanted[key]
    return found
