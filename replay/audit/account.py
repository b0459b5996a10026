"""The account behind the audit: event by event, without the fold."""

from collections import Counter
from statistics import fmean

import msgspec

from kinlog.lineage.state import GroupPhase, Projection
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason, Validity

__all__ = ["Account", "GivenUp", "RestartAccount", "SealedAttempt"]

#: What a restart appends before it does any new work. Whatever else comes first ends its account.
_RECOVERY_EVENTS = (
    e.WriterOpened,
    e.TailTruncated,
    e.RunRestored,
    e.RecoveryPlanned,
    e.FinalizeFailed,
    e.AttemptSuperseded,
    e.GroupDropped,
    e.GroupParked,
    e.RowsCleared,
    e.WeightsPublished,
    e.LateResultRejected,
    e.CheckpointCommitted,
    e.CheckpointFailed,
    e.WriterClosed,
)


class SealedAttempt(msgspec.Struct, frozen=True):
    """What the account keeps of a seal."""

    attempt: int
    raw_reward: float
    shaped_reward: float
    completion_tokens: int
    valid: bool
    generated: bool
    """False: a placeholder."""


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """A sibling's attempt that was given up: to be redone, or with its group."""

    seq: int
    group_id: int
    generation: int
    attempt: int
    """0: the sibling was never dispatched."""
    reason: Reason
    with_group: bool
    was_sealed: bool


class RestartAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What one restart did with the siblings that it found."""

    epoch: int
    began_us: int
    """Wall clock, microseconds since 1970-01-01 UTC."""
    restored: bool
    """False: this life ended before it had restored anything."""
    checkpoint: str | None
    train_step: int | None
    sealed_before: int
    """Sealed siblings of groups that were alive at the restart, those of undone steps included."""
    reused: int
    regenerated: dict[str, int]
    """Sealed siblings that the restart gave up, by reason."""
    left_with_group: dict[str, int]
    """Sealed siblings whose group the restart dropped or parked, by reason."""
    tokens_reused: int
    tokens_regenerated: int
    in_flight_redispatched: dict[str, int]
    """Attempts that were running when the life before ended, by the reason they were given up for."""


class _Restart:
    """An account of a restart that is not complete yet."""

    def __init__(self, epoch: int, began_us: int, sealed: dict[tuple[int, int], int]) -> None:
        self.epoch = epoch
        self.began_us = began_us
        self.sealed = sealed
        self.restored: e.RunRestored | None = None
        self.regenerated: Counter[str] = Counter()
        self.tokens_regenerated = 0
        self.in_flight: Counter[str] = Counter()
        self.left: dict[int, Reason] = {}


class Account:
    """Counts a log's events, in order.

    Parameters
    ----------
    beginning:
        What the log begins at. Of groups that were settled before, it has only the numbers; an empty projection is the
        start of the run.
    """

    def __init__(self, beginning: Projection) -> None:
        self.lives = 0
        self.drawn: set[int] = set()
        self.draws: Counter[int] = Counter()
        """draw index -> reservations."""
        self.draw_cursor = 0
        self.dropped: dict[int, Reason] = {}
        self.parked: dict[int, Reason] = {}
        self.steps: list[e.StepApplied] = []
        """The surviving history, in order."""
        self.steps_rolled_back = 0
        self.sealed: dict[int, dict[int, SealedAttempt]] = {}
        """group -> generation -> the seal that stands."""
        self.sealed_total = 0
        self.sealed_redone: Counter[str] = Counter()
        self.running: set[tuple[int, int]] = set()
        self.redispatched_without_reason: list[str] = []
        self.given_up: list[GivenUp] = []
        self.lengths_at_leaving: dict[int, float] = {}
        """Of groups that left untrained, as far as anything of them was sealed then."""
        self._attempts: dict[int, dict[int, int]] = {}
        """group -> generation -> its newest attempt, of groups that have not left."""
        self.late_rejected = 0
        self.restarts: list[RestartAccount] = []
        self._restart: _Restart | None = None
        self.settled_applied = beginning.applied_forgotten
        self.settled_dropped = Counter({reason.value: n for reason, n in beginning.dropped.items()})
        self.settled_steps = beginning.frontier_step
        self.first_draw = beginning.draw_cursor
        """Draws before it are only known as a number."""
        if beginning.last_seq:
            self._go_on_from(beginning)

    @property
    def drawn_total(self) -> int:
        return len(self.drawn) + self.settled_applied + self.settled_dropped.total()

    def _go_on_from(self, p: Projection) -> None:
        self.lives = 1  # the one that was going on
        self.draw_cursor = p.draw_cursor
        self.sealed_total = p.sealed_total
        self.late_rejected = p.late_rejected
        self.steps = [
            e.StepApplied(train_step=step, group_ids=groups) for step, groups in sorted(p.steps.items())
        ]
        for group in p.groups.values():
            self.drawn.add(group.group_id)
            if group.phase is GroupPhase.PARKED and group.parked_reason is not None:
                self.parked[group.group_id] = group.parked_reason
            self._attempts[group.group_id] = {s.generation: s.attempt for s in group.siblings.values()}
            for sibling in group.siblings.values():
                if sibling.running:
                    self.running.add((group.group_id, sibling.generation))
                if sibling.sealed is not None:
                    self._keep(sibling.sealed)

    def applied_groups(self) -> Counter[int]:
        """Return group -> how often the surviving history trains on it."""
        return Counter(group_id for step in self.steps for group_id in step.group_ids)

    def length_of(self, group_id: int) -> float | None:
        """Return the mean completion tokens of what stands sealed of a group; ``None`` when nothing does."""
        lengths = [
            seal.completion_tokens for seal in self.sealed.get(group_id, {}).values() if seal.generated
        ]
        return fmean(lengths) if lengths else None

    def add(self, record: e.RecordedEvent) -> None:
        """Count the next event."""
        event = record.event
        if not isinstance(event, _RECOVERY_EVENTS):
            self.finish()
        match event:
            case e.WriterOpened():
                self._life_began(record)
            case e.RunRestored():
                self._restored(event)
            case e.GroupReserved():
                self.drawn.add(event.group_id)
                self._attempts[event.group_id] = dict.fromkeys(range(event.num_generations), 0)
                self.draws[event.prompt.draw_index] += 1
                self.draw_cursor = max(self.draw_cursor, event.draw_cursor, event.prompt.draw_index + 1)
            case e.DatasetExhausted():
                self.draw_cursor = max(self.draw_cursor, event.draw_cursor)
            case e.SiblingDispatched():
                self._dispatched(event)
            case e.SiblingSealed():
                self._sealed(event)
            case e.AttemptSuperseded():
                self._superseded(record.seq, event)
            case e.LateResultRejected():
                self.late_rejected += 1
            case e.GroupDropped():
                self.parked.pop(event.group_id, None)
                self._left(record.seq, event.group_id, event.reason, self.dropped)
            case e.GroupParked():
                self._left(record.seq, event.group_id, event.reason, self.parked)
            case e.StepApplied():
                self.steps.append(event)

    def finish(self) -> None:
        """Complete the account of the restart that is going on, if there is one."""
        restart, self._restart = self._restart, None
        if restart is None:
            return
        applied = self.applied_groups()
        before = {key: tokens for key, tokens in restart.sealed.items() if key[0] not in applied}
        left: Counter[str] = Counter()
        reused = tokens_reused = 0
        for (group_id, generation), tokens in before.items():
            if group_id in restart.left:
                left[restart.left[group_id].value] += 1
            elif generation in self.sealed.get(group_id, {}):
                reused += 1
                tokens_reused += tokens
        restored = restart.restored
        self.restarts.append(
            RestartAccount(
                epoch=restart.epoch,
                began_us=restart.began_us,
                restored=restored is not None,
                checkpoint=restored.checkpoint if restored is not None else None,
                train_step=restored.train_step if restored is not None else None,
                sealed_before=len(before),
                reused=reused,
                regenerated=dict(restart.regenerated),
                left_with_group=dict(left),
                tokens_reused=tokens_reused,
                tokens_regenerated=restart.tokens_regenerated,
                in_flight_redispatched=dict(restart.in_flight),
            )
        )

    def _life_began(self, record: e.RecordedEvent) -> None:
        self.finish()
        self.lives += 1
        if self.lives > 1:
            standing = {
                (group_id, generation): seal.completion_tokens
                for group_id, seals in self.sealed.items()
                if group_id not in self.dropped and group_id not in self.parked
                for generation, seal in seals.items()
            }
            self._restart = _Restart(record.epoch, record.time_us, standing)

    def _restored(self, event: e.RunRestored) -> None:
        surviving = [step for step in self.steps if step.train_step <= event.train_step]
        self.steps_rolled_back += len(self.steps) - len(surviving)
        self.steps = surviving
        if self._restart is not None:
            self._restart.restored = event

    def _dispatched(self, event: e.SiblingDispatched) -> None:
        key = (event.group_id, event.generation)
        if key in self.running or event.generation in self.sealed.get(event.group_id, {}):
            self.redispatched_without_reason.append(
                f"{event.group_id}/{event.generation} attempt {event.attempt}"
            )
        self._attempts.setdefault(event.group_id, {})[event.generation] = event.attempt
        self.running.add(key)

    def _sealed(self, event: e.SiblingSealed) -> None:
        self.sealed_total += 1
        self.running.discard((event.group_id, event.generation))
        self._keep(event)

    def _keep(self, event: e.SiblingSealed) -> None:
        self.sealed.setdefault(event.group_id, {})[event.generation] = SealedAttempt(
            event.attempt,
            event.raw_reward,
            event.shaped_reward,
            event.completion_tokens,
            event.validity is Validity.VALID,
            event.validity is not Validity.PLACEHOLDER,
        )

    def _superseded(self, seq: int, event: e.AttemptSuperseded) -> None:
        key, reason = (event.group_id, event.generation), event.reason.value
        seal = self.sealed.get(event.group_id, {}).pop(event.generation, None)
        self.running.discard(key)
        self.given_up.append(
            GivenUp(
                seq=seq,
                group_id=event.group_id,
                generation=event.generation,
                attempt=event.attempt,
                reason=event.reason,
                with_group=False,
                was_sealed=seal is not None,
            )
        )
        if seal is not None:
            self.sealed_redone[reason] += 1
        if self._restart is None:
            return
        if seal is None:
            self._restart.in_flight[reason] += 1
        else:
            self._restart.regenerated[reason] += 1
            self._restart.tokens_regenerated += seal.completion_tokens

    def _left(self, seq: int, group_id: int, reason: Reason, where: dict[int, Reason]) -> None:
        where[group_id] = reason
        length = self.length_of(group_id)
        if length is not None:
            self.lengths_at_leaving[group_id] = length
        seals = self.sealed.get(group_id, {})
        self.given_up += [
            GivenUp(
                seq=seq,
                group_id=group_id,
                generation=generation,
                attempt=attempt,
                reason=reason,
                with_group=True,
                was_sealed=generation in seals,
            )
            # A parked group that is dropped later has left once.
            for generation, attempt in sorted(self._attempts.pop(group_id, {}).items())
        ]
        self.running = {key for key in self.running if key[0] != group_id}
        if self._restart is not None:
            self._restart.left[group_id] = reason
