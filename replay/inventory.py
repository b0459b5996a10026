"""What the data plane holds, against what lineage says it should."""

import msgspec

from kinlog.lineage.state import GroupPhase, GroupState, Projection, SiblingState
from kinlog.schemas.reasons import Reason
from kinlog.schemas.receipts import canonical_key, staging_key
from kinlog.schemas.rows import NO_CALL, RowTag

__all__ = ["Inventory", "staged_rows", "canonical_rows", "expected_inventory", "compare_rows", "RowProblem"]


class Inventory(msgspec.Struct, frozen=True):
    """The visible rows of both partitions, by key."""

    staging: dict[str, RowTag] = {}
    training: dict[str, RowTag] = {}


class RowProblem(msgspec.Struct, frozen=True):
    """A row that lineage relies on and that is not there, or not the same."""

    key: str
    reason: Reason
    """``rows_missing`` or ``digest_mismatch``."""


def staged_rows(group: GroupState, sibling: SiblingState) -> dict[str, RowTag]:
    """Return the staged rows behind a sealed sibling, by key. A placeholder has none."""
    if sibling.sealed is None or sibling.sealed.receipt is None:
        return {}
    identity = (group.group_id, sibling.generation, sibling.attempt)
    return {
        staging_key(*identity, call.call): RowTag(
            group_id=group.group_id,
            generation=sibling.generation,
            attempt=sibling.attempt,
            call=call.call,
            digest=call.row_digest,
        )
        for call in sibling.sealed.receipt.calls
    }


def canonical_rows(group: GroupState) -> dict[str, RowTag]:
    """Return the canonical rows of a finalized group, by key."""
    return {
        canonical_key(group.group_id, row.generation, row.attempt): RowTag(
            group_id=group.group_id,
            generation=row.generation,
            attempt=row.attempt,
            call=NO_CALL,
            digest=row.row_digest,
        )
        for row in group.rows
    }


def expected_inventory(projection: Projection) -> Inventory:
    """Return what the data plane holds if it agrees with lineage: what a checkpoint at this place promises."""
    staging: dict[str, RowTag] = {}
    training: dict[str, RowTag] = {}
    for group in projection.groups.values():
        if group.rows:
            training.update(canonical_rows(group))
        elif group.phase is not GroupPhase.PARKED:
            for sibling in group.siblings.values():
                staging.update(staged_rows(group, sibling))
    return Inventory(staging, training)


def compare_rows(expected: dict[str, RowTag], found: dict[str, RowTag]) -> tuple[RowProblem, ...]:
    """Return the expected rows that are missing or differ, in key order."""
    problems = []
    for key in sorted(expected):
        if key not in found or not found[key].done:
            problems.append(RowProblem(key, Reason.ROWS_MISSING))
        elif found[key] != expected[key]:
            problems.append(RowProblem(key, Reason.DIGEST_MISMATCH))
    return tuple(problems)
