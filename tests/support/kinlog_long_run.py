"""A long run, told in a second or two: many workers and groups, failures, late results, drops, and kills with restarts."""

import random
from collections.abc import Iterator
from heapq import heappop, heappush

from kinlog_builders import BUDGET, RUN_ID, digest_of, prompt_ref, receipt_of

from kinlog.schemas import events as e
from kinlog.schemas.reasons import CheckpointKind, FinishReason, Granularity, Reason, Validity

_BEGAN_US = 1_767_225_600_000_000
_DIGEST = digest_of("row")
_RECEIPT = receipt_of(0, 0, 1, calls=1)
_PERMITS = 96
_GROUPS_PER_STEP = 16


class LongRun:
    """Tells events in the order of their times. Every group of ``kill_every`` applied steps, the controller is killed."""

    def __init__(
        self, *, groups: int, siblings: int = 8, workers: int = 16, kill_every: int = 200, seed: int = 1
    ) -> None:
        self._groups, self._siblings, self._workers = groups, siblings, workers
        self._kill_every = kill_every
        self._chance = random.Random(seed)
        self._seq = self._epoch = self._step = self._next_group = 0
        self._now_us = _BEGAN_US
        self._running: list[tuple[int, int, int, int]] = []
        """(when it ends, group, generation, attempt)."""
        self._unsealed: dict[int, set[int]] = {}
        self._ready: list[int] = []
        self._attempts: dict[tuple[int, int], int] = {}

    def events(self) -> Iterator[e.RecordedEvent]:
        yield from self._open()
        while self._unsealed or self._next_group < self._groups:
            while len(self._unsealed) < _PERMITS and self._next_group < self._groups:
                yield from self._draw()
            yield from self._end_one()
            if len(self._ready) >= _GROUPS_PER_STEP:
                yield from self._train()
                if self._step % self._kill_every == 0:
                    yield from self._restart()

    def _told(self, event: e.Event) -> e.RecordedEvent:
        self._seq += 1
        return e.RecordedEvent(self._seq, self._epoch, self._now_us, event)

    def _open(self) -> Iterator[e.RecordedEvent]:
        self._epoch += 1
        yield self._told(
            e.RunOpened(
                run_id=RUN_ID, kinlog_version="0", config_digest=_DIGEST, dataset_fingerprint="d", seed=1
            )
        )
        yield self._told(e.WriterOpened(host="node", pid=1))

    def _draw(self) -> Iterator[e.RecordedEvent]:
        group_id, self._next_group = self._next_group, self._next_group + 1
        yield self._told(
            e.GroupReserved(
                group_id=group_id,
                prompt=prompt_ref(group_id, task_name=("sums", "gcd")[group_id % 2]),
                num_generations=self._siblings,
                granularity=Granularity.SIBLING,
                retry_budget=BUDGET,
                weight_version=self._step,
                draw_cursor=group_id + 1,
            )
        )
        yield self._told(e.GroupAdmitted(group_id=group_id))
        self._unsealed[group_id] = set(range(self._siblings))
        for generation in range(self._siblings):
            yield self._dispatch(group_id, generation)

    def _dispatch(self, group_id: int, generation: int) -> e.RecordedEvent:
        attempt = self._attempts[group_id, generation] = self._attempts.get((group_id, generation), 0) + 1
        self._now_us += self._chance.randrange(100, 3_000)
        lasts_us = int(self._chance.lognormvariate(0, 0.7) * 4_000_000)
        heappush(self._running, (self._now_us + lasts_us, group_id, generation, attempt))
        worker = f"generation-{(group_id * self._siblings + generation + attempt) % self._workers}"
        return self._told(
            e.SiblingDispatched(
                group_id=group_id,
                generation=generation,
                attempt=attempt,
                weight_version=self._step,
                worker=worker,
                seed=1,
            )
        )

    def _end_one(self) -> Iterator[e.RecordedEvent]:
        ends_us, group_id, generation, attempt = heappop(self._running)
        self._now_us = max(self._now_us, ends_us)
        named = {"group_id": group_id, "generation": generation, "attempt": attempt}
        if self._chance.random() < 0.02:
            reason = self._chance.choice((Reason.TIMEOUT, Reason.WORKER_LOST, Reason.INFRASTRUCTURE_FAILURE))
            yield self._told(e.AttemptSuperseded(**named, reason=reason, detail="told so"))
            if self._chance.random() < 0.3:
                yield self._told(
                    e.LateResultRejected(**named, reason=Reason.SUPERSEDED_ATTEMPT, completion_tokens=9)
                )
            yield self._dispatch(group_id, generation)
            return
        yield self._told(
            e.SiblingSealed(
                **named,
                weight_version=max(0, self._step - 1),
                max_weight_version=self._step,
                receipt=_RECEIPT,
                raw_reward=1.0,
                shaped_reward=1.0,
                prompt_tokens=10,
                completion_tokens=self._chance.randrange(10, 400),
                finish_reason=FinishReason.STOP,
                validity=Validity.VALID,
            )
        )
        self._unsealed[group_id].discard(generation)
        if not self._unsealed[group_id]:
            yield from self._finalize(group_id)

    def _finalize(self, group_id: int) -> Iterator[e.RecordedEvent]:
        del self._unsealed[group_id]
        if self._chance.random() < 0.01:
            yield self._told(e.GroupDropped(group_id=group_id, reason=Reason.LOW_VALID_FRACTION))
            return
        yield self._told(e.FinalizeStarted(group_id=group_id))
        rows = tuple(
            e.CanonicalRowRef(generation, self._attempts[group_id, generation], 16, _DIGEST)
            for generation in range(self._siblings)
        )
        yield self._told(e.GroupFinalized(group_id=group_id, rows=rows, valid_fraction=1.0))
        self._ready.append(group_id)

    def _train(self) -> Iterator[e.RecordedEvent]:
        self._step += 1
        chosen, self._ready = self._ready[:_GROUPS_PER_STEP], self._ready[_GROUPS_PER_STEP:]
        for group_id in chosen:
            yield self._told(e.GroupClaimed(group_id=group_id, train_step=self._step))
        self._now_us += 400_000
        yield self._told(e.StepApplied(train_step=self._step, group_ids=tuple(chosen)))
        yield self._told(e.WeightsPublished(weight_version=self._step, train_step=self._step))
        if self._step % 25 == 0:
            position = e.Position(self._epoch, self._seq, 0)
            self._now_us += 600_000
            yield self._told(
                e.CheckpointCommitted(
                    name=f"step_{self._step:06d}",
                    checkpoint_kind=CheckpointKind.TRAINER,
                    train_step=self._step,
                    position=position,
                    frontier_step=self._step,
                )
            )

    def _restart(self) -> Iterator[e.RecordedEvent]:
        """Killed, and resumed two minutes later: what was running is redone, and now and then what was sealed."""
        self._epoch += 1
        self._now_us += 120_000_000
        yield self._told(e.WriterOpened(host="node", pid=self._epoch))
        step, name = self._step, f"step_{self._step:06d}"
        yield self._told(e.RunRestored(checkpoint=name, position=None, train_step=step, weight_version=step))
        running = sorted(self._running, key=lambda one: one[1:])
        self._running.clear()
        lost = [(*one[1:], Reason.CONTROLLER_RESTART) for one in running]
        for group_id, unsealed in self._unsealed.items():
            sealed = set(range(self._siblings)) - unsealed
            for generation in sealed:
                if self._chance.random() < 0.2:
                    attempt = self._attempts[group_id, generation]
                    lost.append((group_id, generation, attempt, Reason.ROWS_MISSING))
                    unsealed.add(generation)
        for group_id, generation, attempt, reason in lost:
            yield self._told(
                e.AttemptSuperseded(group_id=group_id, generation=generation, attempt=attempt, reason=reason)
            )
        for group_id, generation, _, _ in lost:
            yield self._dispatch(group_id, generation)
