"""Which of the rows that lineage relies on are in the data plane, as they should be.

A restart looks at hundreds of thousands of rows, and nearly all are as they should be: each is looked up once, and taken
out of a copy of the listing, so that what is left is what nobody asked for.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kinlog.lineage.state import GroupState
from kinlog.replay.recovery.inventory import Inventory, RowProblem, canonical_rows, compare_rows, staged_rows
from kinlog.schemas.reasons import Partition
from kinlog.schemas.receipts import CALL_SUFFIXES, canonical_key
from kinlog.schemas.rows import NO_CALL, RowTag

__all__ = ["HeldRows", "GivenUp"]

#: Stands for a key that is not there. No row is like it.
_ABSENT = RowTag(done=False, group_id=-1, generation=-1, attempt=-1, call=NO_CALL, digest=b"")


class GivenUp(NamedTuple):
    """Rows that a plan does without: a group's canonical ones, and the staged ones of some of its siblings."""

    group: GroupState
    generations: Iterable[int]


class HeldRows:
    """An inventory beside the groups of one projection. Each group is compared once, however often it is asked about."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._staging_left = dict(inventory.staging)
        self._training_left = dict(inventory.training)
        self._staged: dict[int, dict[int, tuple[RowProblem, ...]]] = {}
        self._canonical: dict[int, tuple[RowProblem, ...]] = {}

    @classmethod
    def of(cls, inventory: "Inventory | HeldRows") -> "HeldRows":
        """Go on with a comparison that was begun, or begin one."""
        return inventory if isinstance(inventory, HeldRows) else cls(inventory)

    def canonical_problems(self, group: GroupState) -> tuple[RowProblem, ...]:
        """Return the canonical rows of a finalized group that are missing or differ, in key order."""
        problems = self._canonical.get(group.group_id)
        if problems is None:
            problems = self._canonical[group.group_id] = self._compare_canonical(group)
        return problems

    def staged_problems(self, group: GroupState) -> dict[int, tuple[RowProblem, ...]]:
        """Return the staged rows of a group's sealed siblings that are missing or differ, in key order, by generation;
        a generation without any is left out."""
        problems = self._staged.get(group.group_id)
        if problems is None:
            problems = self._staged[group.group_id] = self._compare_staged(group)
        return problems

    def left(
        self, given_up: Iterable[GivenUp], finalizing: Iterable[GroupState]
    ) -> dict[Partition, dict[str, RowTag]]:
        """Return the rows that nobody relies on, by key.

        Parameters
        ----------
        given_up:
            All that the plan does without of what was compared: the rest of it is relied on.
        finalizing:
            Groups whose finalize is driven again: it may have put canonical rows that are not in the log.
        """
        held = self.inventory
        staging, training = dict(self._staging_left), dict(self._training_left)
        for group, generations in given_up:
            training.update(_among(held.training, canonical_rows(group)))
            for generation in generations:
                staging.update(_among(held.staging, staged_rows(group, group.siblings[generation])))
        for group in finalizing:
            for generation, sibling in group.siblings.items():
                training.pop(canonical_key(group.group_id, generation, sibling.attempt), None)
        return {Partition.STAGING: staging, Partition.TRAINING: training}

    def _compare_canonical(self, group: GroupState) -> tuple[RowProblem, ...]:
        group_id, take = group.group_id, self._training_left.pop
        same = True
        for row in group.rows:
            generation, attempt = row.generation, row.attempt
            tag = take(canonical_key(group_id, generation, attempt), _ABSENT)
            if (
                tag.digest != row.row_digest
                or tag.call != NO_CALL
                or tag.attempt != attempt
                or tag.generation != generation
                or tag.group_id != group_id
                or not tag.done
            ):
                same = False
        return () if same else compare_rows(canonical_rows(group), self.inventory.training)

    def _compare_staged(self, group: GroupState) -> dict[int, tuple[RowProblem, ...]]:
        group_id, take = group.group_id, self._staging_left.pop
        suffixes = CALL_SUFFIXES
        differing: dict[int, None] = {}
        for generation, sibling in group.siblings.items():
            sealed = sibling.sealed
            if sealed is None or sealed.receipt is None:
                continue
            attempt = sibling.attempt
            attempt_key = canonical_key(group_id, generation, attempt)
            for call in sealed.receipt.calls:
                number = call.call
                tag = take(attempt_key + suffixes[number], _ABSENT)
                # Field by field, on purpose: to make the expected tag takes several times as long.
                if (
                    tag.digest != call.row_digest
                    or tag.call != number
                    or tag.attempt != attempt
                    or tag.generation != generation
                    or tag.group_id != group_id
                    or not tag.done
                ):
                    differing[generation] = None
        return {
            generation: problems
            for generation in differing
            if (
                problems := compare_rows(
                    staged_rows(group, group.siblings[generation]), self.inventory.staging
                )
            )
        }


def _among(found: dict[str, RowTag], keys: Iterable[str]) -> dict[str, RowTag]:
    return {key: found[key] for key in keys if key in found}
