"""Which checkpoints a new one leaves standing, and how far back the log must remember. Pure decisions."""

from typing import NamedTuple

from kinlog.lineage.state import CheckpointState, GroupPhase, GroupState, Projection
from kinlog.schemas.reasons import CheckpointKind

__all__ = ["Retention", "newest_anchor", "newly_durable", "outdated_rollouts", "retain"]

#: Rollout checkpoints that are kept of those since the last trainer checkpoint: the newest may turn out to be damaged.
_KEPT_ROLLOUTS = 2


class Retention(NamedTuple):
    """What stays when a checkpoint is committed."""

    names: frozenset[str]
    """Checkpoints to keep, the new one included."""
    frontier_step: int
    """The oldest step that can still be gone back to: groups applied up to it may be forgotten."""
    behind_seq: int
    """Events up to here are behind everything that can still be gone back to; 0 while that may be the run's start."""


def retain(p: Projection, *, name: str, train_step: int, keep: int, present: frozenset[str]) -> Retention:
    """Decide what a new trainer checkpoint leaves standing: the newest ``keep``, itself among them. No rollout checkpoint:
    all of them are older.

    Until there are that many, the start of the run (or wherever the frontier is) is a place to go back to as well, and
    the frontier does not move. ``present`` are the directories that exist: what was removed by hand, or left behind when
    a checkpoint was restored alone, does not count.
    """
    older = [
        c
        for c in p.checkpoints
        if c.kind is CheckpointKind.TRAINER
        and c.name != name
        and c.name in present
        and c.train_step < train_step
    ][-(keep - 1) :]
    names = frozenset({name, *(c.name for c in older)})
    if len(older) < keep - 1:
        return Retention(names, p.frontier_step, 0)
    return Retention(names, max(older[0].train_step, p.frontier_step), min(c.position.seq for c in older))


def newly_durable(p: Projection, train_step: int) -> list[GroupState]:
    """Return the applied groups whose step a trainer checkpoint at ``train_step`` is the first to cover."""
    before = max(
        (c.train_step for c in p.checkpoints if c.kind is CheckpointKind.TRAINER), default=p.frontier_step
    )
    return [
        group
        for group in p.groups.values()
        if group.phase is GroupPhase.APPLIED and before < (group.claimed_step or 0) <= train_step
    ]


def newest_anchor(p: Projection, present: frozenset[str]) -> CheckpointState | None:
    """Return the trainer checkpoint that a rollout checkpoint goes with; ``None`` for the start of the run."""
    anchors = [c for c in p.checkpoints if c.kind is CheckpointKind.TRAINER and c.name in present]
    return max(anchors, key=lambda c: c.train_step, default=None)


def outdated_rollouts(p: Projection, *, present: frozenset[str]) -> frozenset[str]:
    """Return the rollout checkpoints that one more makes superfluous. Trainer checkpoints never are: they may be the
    anchors of others."""
    rollouts = [c.name for c in p.checkpoints if c.kind is CheckpointKind.ROLLOUT and c.name in present]
    return frozenset(rollouts[: 1 - _KEPT_ROLLOUTS])
