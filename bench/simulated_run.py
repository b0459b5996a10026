"""The history of a run that never was: what the benches of reading and planning read.

Groups overlap, attempts fail and are made again, groups are dropped and parked, steps are applied, checkpoints let go of
what they make superfluous, and the controller dies now and then and takes a few steps back. Everything is drawn from a
seed. Rows, digests and rewards are made up; the order of events and their sizes are those of a real run.
"""

import random
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from kinlog.schemas import events as e
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import CheckpointKind, FinishReason, Granularity, Partition, Reason, Validity
from kinlog.schemas.receipts import ModelCall, Receipt

__all__ = ["RunShape", "history", "sealed_event", "reserved_event", "dispatched_event"]


class RunShape(NamedTuple):
    """How large the groups of a run are, and how many there are at a time."""

    siblings: int = 16
    calls: int = 2
    in_flight: int = 64
    groups_per_step: int = 8
    steps_per_checkpoint: int = 8
    checkpoints_per_life: int = 40


def history(num_events: int, shape: RunShape | None = None, *, seed: int = 0) -> Iterator[e.Event]:
    """Yield the first ``num_events`` events of a run."""
    return islice(_Run(shape or RunShape(), random.Random(seed)).events(), num_events)


def reserved_event(group_id: int, siblings: int, weight_version: int = 0) -> e.GroupReserved:
    prompt = PromptRef(
        dataset_fingerprint="9f" * 16,
        sample_id=f"task/{group_id * 7919 % 100_003}",
        draw_index=group_id,
        dataset_epoch=group_id // 100_003,
        task_name="sums",
        agent_name="single",
        content_digest=_digest(group_id, 0, 0, 99),
    )
    return e.GroupReserved(
        group_id=group_id,
        prompt=prompt,
        num_generations=siblings,
        granularity=Granularity.SIBLING,
        retry_budget=e.RetryBudget(3, 2),
        weight_version=weight_version,
        train_step=None,
        draw_cursor=group_id + 1,
    )


def dispatched_event(
    group_id: int, generation: int, attempt: int, weight_version: int = 0
) -> e.SiblingDispatched:
    return e.SiblingDispatched(
        group_id=group_id,
        generation=generation,
        attempt=attempt,
        weight_version=weight_version,
        worker=f"generation-{generation % 4}",
        seed=(group_id * 64 + generation) * 2654435761 % 2**63,
    )


def sealed_event(
    group_id: int, generation: int, attempt: int, *, calls: int, weight_version: int = 0
) -> e.SiblingSealed:
    receipt = Receipt(
        tuple(
            ModelCall(
                call,
                call - 1,
                200 + 300 * call,
                280,
                weight_version,
                weight_version,
                _digest(group_id, generation, attempt, call),
            )
            for call in range(calls)
        )
    )
    return e.SiblingSealed(
        group_id=group_id,
        generation=generation,
        attempt=attempt,
        weight_version=weight_version,
        max_weight_version=weight_version,
        receipt=receipt,
        raw_reward=generation / 7,
        shaped_reward=generation / 14,
        prompt_tokens=receipt.prompt_tokens,
        completion_tokens=receipt.completion_tokens,
        finish_reason=FinishReason.STOP,
        validity=Validity.VALID,
    )


def _digest(group_id: int, generation: int, attempt: int, call: int) -> bytes:
    number = ((group_id * 1009 + generation) * 1013 + attempt) * 1019 + call
    return (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "little")


class _Run:
    def __init__(self, shape: RunShape, chance: random.Random) -> None:
        self.shape = shape
        self.chance = chance
        self.next_group_id = 0
        self.train_step = 0
        self.finalized: deque[int] = deque()
        self.attempts: dict[int, list[int]] = {}
        """Group -> attempt of each of its siblings, while it is not applied."""
        self.undoable: dict[int, list[int]] = {}
        """Step -> its groups, since the older of the two checkpoints that are kept."""
        self.kept = [0, 0]
        """Steps of the checkpoints that are kept."""

    def events(self) -> Iterator[e.Event]:
        yield e.RunOpened(
            run_id="r",
            kinlog_version="bench",
            config_digest=bytes(16),
            dataset_fingerprint="9f" * 16,
            seed=7,
        )
        yield e.WriterOpened(host="bench", pid=1)
        lives: deque[Iterator[e.Event]] = deque()
        checkpoints = 0
        while True:
            while len(lives) < self.shape.in_flight:
                lives.append(self._group(self.next_group_id))
                self.next_group_id += 1
                yield next(lives[-1])
            lives.rotate(-1)
            event = next(lives[0], None)
            if event is None:
                lives.popleft()
            else:
                yield event
            if len(self.finalized) >= self.shape.groups_per_step:
                yield from self._step()
                if self.train_step % self.shape.steps_per_checkpoint == 0:
                    yield from self._checkpoint()
                    checkpoints += 1
                elif checkpoints >= self.shape.checkpoints_per_life:
                    yield from self._restore()
                    checkpoints = 0

    def _group(self, group_id: int) -> Iterator[e.Event]:
        """Yield the events of a group, from its reservation to the replay buffer or another end."""
        chance, siblings = self.chance, self.shape.siblings
        yield reserved_event(group_id, siblings, self.train_step)
        yield e.GroupAdmitted(group_id=group_id)
        attempts = self.attempts[group_id] = [1] * siblings
        for generation in range(siblings):
            yield dispatched_event(group_id, generation, 1, self.train_step)
        order = list(range(siblings))
        chance.shuffle(order)
        for generation in order:
            while chance.random() < 0.02:
                identity = {"group_id": group_id, "generation": generation, "attempt": attempts[generation]}
                yield e.AttemptSuperseded(**identity, reason=Reason.WORKER_LOST, detail="actor died")
                attempts[generation] += 1
                yield dispatched_event(group_id, generation, attempts[generation], self.train_step)
                yield e.LateResultRejected(
                    **identity, reason=Reason.SUPERSEDED_ATTEMPT, completion_tokens=280
                )
            yield sealed_event(
                group_id,
                generation,
                attempts[generation],
                calls=self.shape.calls,
                weight_version=self.train_step,
            )
        if chance.random() < 0.0005:
            yield e.GroupParked(group_id=group_id, reason=Reason.RETRY_BUDGET)
            return
        yield e.FinalizeStarted(group_id=group_id)
        rows = tuple(
            e.CanonicalRowRef(generation, attempt, 760, _digest(group_id, generation, attempt, 98))
            for generation, attempt in enumerate(attempts)
        )
        yield e.GroupFinalized(group_id=group_id, rows=rows, valid_fraction=1.0)
        yield e.RowsCleared(
            partition=Partition.STAGING,
            reason=Reason.FINALIZED,
            num_rows=siblings * self.shape.calls,
            group_ids=(group_id,),
        )
        if chance.random() < 0.02:
            yield e.GroupDropped(group_id=group_id, reason=Reason.STALE)
        else:
            self.finalized.append(group_id)

    def _step(self) -> Iterator[e.Event]:
        step = self.train_step + 1
        group_ids = [self.finalized.popleft() for _ in range(self.shape.groups_per_step)]
        for group_id in group_ids:
            yield e.GroupClaimed(group_id=group_id, train_step=step)
        yield e.StepApplied(train_step=step, group_ids=tuple(group_ids))
        self.train_step = step
        self.undoable[step] = group_ids
        yield e.WeightsPublished(weight_version=step, train_step=step)

    def _checkpoint(self) -> Iterator[e.Event]:
        self.kept = [self.kept[-1], self.train_step]
        yield e.CheckpointCommitted(
            name=f"step_{self.train_step:06d}",
            checkpoint_kind=CheckpointKind.TRAINER,
            train_step=self.train_step,
            position=e.Position(1, 1, 0),
            frontier_step=self.kept[0],
        )
        durable = [step for step in self.undoable if step <= self.kept[0]]
        group_ids = tuple(group_id for step in durable for group_id in self.undoable.pop(step))
        if group_ids:
            yield e.RowsCleared(
                partition=Partition.TRAINING,
                reason=Reason.STEP_DURABLE,
                num_rows=len(group_ids) * self.shape.siblings,
                group_ids=group_ids,
            )

    def _restore(self) -> Iterator[e.Event]:
        """The controller dies, and goes back to its last checkpoint: later steps are made again."""
        step = self.kept[-1]
        yield e.WriterOpened(host="bench", pid=2)
        yield e.RunRestored(
            checkpoint=f"step_{step:06d}",
            position=e.Position(1, 1, 0),
            train_step=step,
            weight_version=step,
        )
        undone = [
            group_id
            for later in range(step + 1, self.train_step + 1)
            for group_id in self.undoable.pop(later)
        ]
        self.finalized.extendleft(reversed(undone))
        self.train_step = step
