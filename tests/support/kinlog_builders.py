"""Builders that all tests share: plausible events, a run that is told event by event, and what a ledger needs around it."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from kinlog.lineage.decide import (
    Assignment,
    dispatch_siblings,
    reserve_group,
    retry_budget_spent,
    seal_cohort,
    seal_sibling,
    supersede_attempt,
)
from kinlog.lineage.fold import fold
from kinlog.lineage.ledger import Ledger
from kinlog.lineage.log import OpenedLog, create_log, open_log
from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.lineage.store import FileLock, Store
from kinlog.replay.projection import project
from kinlog.schemas import events as e
from kinlog.schemas.codec import decode_event, encode_event
from kinlog.schemas.prompts import PromptRef, digest_bytes
from kinlog.schemas.reasons import CheckpointKind, FinishReason, Granularity, Reason, Validity
from kinlog.schemas.receipts import ModelCall, Receipt
from kinlog.schemas.settings import LogSettings

RUN_ID = "run-1"
LOG_ID = "log-1"
DATASET = "dataset-1"
BUDGET = e.RetryBudget(2, 1)


class FreeCut:
    """A cut that is always valid."""

    def require(self) -> None:
        return


class ManualClock:
    """A wall clock in microseconds that moves only when told to; it may go backwards."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us


def digest_of(*parts: object) -> bytes:
    return digest_bytes(*(repr(part).encode() for part in parts))


def prompt_ref(draw_index: int, *, task_name: str = "sums", agent_name: str = "single") -> PromptRef:
    return PromptRef(
        dataset_fingerprint=DATASET,
        sample_id=f"row/{draw_index}",
        draw_index=draw_index,
        dataset_epoch=draw_index // 100,
        task_name=task_name,
        agent_name=agent_name,
        content_digest=digest_of("prompt", draw_index),
    )


def receipt_of(
    group_id: int, generation: int, attempt: int, *, calls: int = 2, weight_version: int = 0
) -> Receipt:
    return Receipt(
        tuple(
            ModelCall(
                call,
                call - 1,
                11 + 5 * call,
                5,
                weight_version,
                weight_version,
                digest_of("row", group_id, generation, attempt, call),
            )
            for call in range(calls)
        )
    )


def sealed_result(
    group_id: int,
    generation: int,
    attempt: int,
    *,
    calls: int = 2,
    weight_version: int = 0,
    max_weight_version: int | None = None,
    raw_reward: float = 1.0,
    placeholder: bool = False,
) -> e.SiblingSealed:
    receipt = receipt_of(group_id, generation, attempt, calls=calls, weight_version=weight_version)
    return e.SiblingSealed(
        group_id=group_id,
        generation=generation,
        attempt=attempt,
        weight_version=weight_version,
        max_weight_version=weight_version if max_weight_version is None else max_weight_version,
        receipt=None if placeholder else receipt,
        raw_reward=0.0 if placeholder else raw_reward,
        shaped_reward=0.0 if placeholder else raw_reward / 2,
        prompt_tokens=0 if placeholder else receipt.prompt_tokens,
        completion_tokens=0 if placeholder else receipt.completion_tokens,
        finish_reason=FinishReason.STOP,
        validity=Validity.PLACEHOLDER if placeholder else Validity.VALID,
    )


def numbered(number: int) -> e.WeightsPublished:
    """A small event that is recognised by its number."""
    return e.WeightsPublished(weight_version=number, train_step=number // 7)


class Story:
    """A run told step by step: every event is decided by ``decide``, folded, and kept.

    Told to a ledger when there is one, else to a projection of its own.
    """

    def __init__(self, ledger: Ledger | None = None, *, epoch: int = 1) -> None:
        self._ledger = ledger
        self._own = Projection()
        self._epoch = epoch
        self.records: list[e.RecordedEvent] = []
        if ledger is None or ledger.projection.last_seq == 0:
            self.commit(
                e.RunOpened(
                    run_id=RUN_ID,
                    kinlog_version="0",
                    config_digest=digest_of("config"),
                    dataset_fingerprint=DATASET,
                    seed=7,
                )
            )
        self.commit(e.WriterOpened(host="here", pid=epoch))

    @property
    def p(self) -> Projection:
        return self._own if self._ledger is None else self._ledger.projection

    def commit(self, *events: e.Event) -> int:
        """Record events as one unit; returns the last seq."""
        seq = self.p.last_seq
        records = [
            e.RecordedEvent(seq + 1 + place, self._epoch, 1000 + seq, event)
            for place, event in enumerate(events)
        ]
        if self._ledger is not None:
            self._ledger.commit(FreeCut(), *events)
        else:
            for record in records:
                fold(self._own, record)
        self.records += records
        return self.p.last_seq

    # ---- one step each ------------------------------------------------------------------------------------------

    def reserve(
        self,
        *,
        siblings: int = 2,
        granularity: Granularity = Granularity.SIBLING,
        budget: e.RetryBudget = BUDGET,
        train_step: int | None = None,
    ) -> int:
        event = reserve_group(
            self.p,
            prompt=prompt_ref(self.p.draw_cursor),
            num_generations=siblings,
            granularity=granularity,
            retry_budget=budget,
            train_step=train_step,
        )
        self.commit(event)
        return event.group_id

    def admit(self, group_id: int) -> None:
        self.commit(e.GroupAdmitted(group_id=group_id))

    def dispatch(self, group_id: int, *generations: int) -> None:
        """Dispatch these generations, or all that wait."""
        chosen = generations or tuple(
            g for g, s in sorted(self.group(group_id).siblings.items()) if s.waiting
        )
        assignments = [Assignment(g, f"worker-{g}", 100 * group_id + g) for g in chosen]
        self.commit(*dispatch_siblings(self.p, group_id, assignments, max_resumes=2))

    def generating(self, *, siblings: int = 2, granularity: Granularity = Granularity.SIBLING) -> int:
        """A group with all its siblings running."""
        group_id = self.reserve(siblings=siblings, granularity=granularity)
        self.admit(group_id)
        self.dispatch(group_id)
        return group_id

    def result(self, group_id: int, generation: int, **facts: object) -> e.SiblingSealed:
        """A plausible result of the sibling's current attempt."""
        facts.setdefault("weight_version", self.p.weight_version)
        sibling = self.group(group_id).siblings[generation]
        result = sealed_result(group_id, generation, sibling.attempt, **facts)  # type: ignore[arg-type]
        return replace(result, resumed_tokens=result.completion_tokens // 2 if sibling.resumed_from else 0)

    def seal(self, group_id: int, *generations: int, **facts: object) -> None:
        """Seal these generations, or all that run; a cohort only as a whole."""
        group = self.group(group_id)
        chosen = generations or tuple(g for g, s in sorted(group.siblings.items()) if s.running)
        results = {g: self.result(group_id, g, **facts) for g in chosen}
        if group.granularity is Granularity.PROMPT_GROUP:
            self.commit(*seal_cohort(self.p, group_id, results))
            return
        for result in results.values():
            self.commit(*seal_sibling(self.p, result)[1])

    def supersede(
        self, group_id: int, generation: int, reason: Reason = Reason.INFRASTRUCTURE_FAILURE
    ) -> None:
        self.commit(*supersede_attempt(self.p, group_id, generation, reason, "told so"))

    def ready(
        self, *, siblings: int = 2, granularity: Granularity = Granularity.SIBLING, **facts: object
    ) -> int:
        group_id = self.generating(siblings=siblings, granularity=granularity)
        self.seal(group_id, **facts)
        return group_id

    def start_finalize(self, group_id: int) -> None:
        self.commit(e.FinalizeStarted(group_id=group_id))

    def finalized_event(self, group_id: int) -> e.GroupFinalized:
        siblings = self.group(group_id).siblings
        rows = tuple(
            e.CanonicalRowRef(g, s.attempt, 16, digest_of("canonical", group_id, g, s.attempt))
            for g, s in sorted(siblings.items())
        )
        return e.GroupFinalized(group_id=group_id, rows=rows, valid_fraction=1.0)

    def finish_finalize(self, group_id: int) -> None:
        self.commit(self.finalized_event(group_id))

    def finalized(
        self, *, siblings: int = 2, granularity: Granularity = Granularity.SIBLING, **facts: object
    ) -> int:
        group_id = self.ready(siblings=siblings, granularity=granularity, **facts)
        self.start_finalize(group_id)
        self.finish_finalize(group_id)
        return group_id

    def claim(self, *group_ids: int) -> None:
        step = self.p.train_step + 1
        for group_id in group_ids:
            self.commit(e.GroupClaimed(group_id=group_id, train_step=step))

    def apply(self, *group_ids: int) -> None:
        step = self.p.train_step + 1
        self.commit(e.StepApplied(train_step=step, group_ids=group_ids))
        self.commit(e.WeightsPublished(weight_version=step, train_step=step))

    def train(self, *group_ids: int) -> None:
        self.claim(*group_ids)
        self.apply(*group_ids)

    def checkpoint(
        self,
        *,
        name: str | None = None,
        kind: CheckpointKind = CheckpointKind.TRAINER,
        frontier_step: int | None = None,
    ) -> e.CheckpointCommitted:
        """Commit a checkpoint of everything so far."""
        step = self.p.train_step
        event = e.CheckpointCommitted(
            name=name or f"step_{step:06d}",
            checkpoint_kind=kind,
            train_step=step,
            position=e.Position(self._epoch, self.p.last_seq, 0),
            frontier_step=self.p.frontier_step if frontier_step is None else frontier_step,
        )
        self.commit(event)
        return event

    def restore(self, checkpoint: e.CheckpointCommitted | None = None) -> None:
        """Go back to a checkpoint, or to the start of the run."""
        self.commit(
            e.RunRestored(
                checkpoint=checkpoint.name if checkpoint else None,
                position=checkpoint.position if checkpoint else None,
                train_step=checkpoint.train_step if checkpoint else 0,
                weight_version=checkpoint.train_step if checkpoint else 0,
            )
        )

    def group(self, group_id: int) -> GroupState:
        return self.p.groups[group_id]

    def phases(self) -> dict[int, GroupPhase]:
        return {group_id: group.phase for group_id, group in self.p.groups.items()}

    @property
    def events(self) -> list[e.Event]:
        return [record.event for record in self.records]


def story(seed: int, *, groups: int = 12, siblings: int = 3, ledger: Ledger | None = None) -> Story:
    """Tell a whole run by chance: cohorts, failures, retries, parking, finalizes, steps, checkpoints and restores."""
    chance = random.Random(seed)
    told = Story(ledger)
    kept: list[e.CheckpointCommitted] = []
    while told.p.next_group_id < groups or any(
        g.phase is not GroupPhase.FINALIZED for g in told.p.live_groups()
    ):
        for act in chance.sample(_ACTS, len(_ACTS)):
            act(told, chance, groups, siblings)
        if chance.random() < 0.3:
            frontier = told.p.train_step if chance.random() < 0.5 else None
            kept = [*kept[-1:], told.checkpoint(frontier_step=frontier)]
        if kept and chance.random() < 0.15:
            usable = [c for c in kept if told.p.frontier_step <= c.train_step <= told.p.train_step]
            if usable:
                told.restore(chance.choice(usable))
                kept = [c for c in kept if c.train_step <= told.p.train_step]
    told.commit(e.DatasetExhausted(draw_cursor=told.p.draw_cursor))
    return told


def _reserve_some(told: Story, chance: random.Random, groups: int, siblings: int) -> None:
    if told.p.next_group_id < groups:
        granularity = Granularity.PROMPT_GROUP if chance.random() < 0.4 else Granularity.SIBLING
        told.reserve(siblings=siblings, granularity=granularity)


def _admit_and_dispatch(told: Story, chance: random.Random, groups: int, siblings: int) -> None:
    for group in list(told.p.live_groups()):
        if group.phase is GroupPhase.RESERVED:
            told.admit(group.group_id)
        if group.phase in (GroupPhase.ADMITTED, GroupPhase.GENERATING) and any(
            s.waiting for s in group.siblings.values()
        ):
            told.dispatch(group.group_id)


def _end_some_attempts(told: Story, chance: random.Random, groups: int, siblings: int) -> None:
    for group in list(told.p.live_groups()):
        running = [s for s in group.siblings.values() if s.running]
        if not running or chance.random() < 0.3:
            continue
        chosen = chance.choice(running)
        if chance.random() < 0.25:
            reason = chance.choice(
                [Reason.INFRASTRUCTURE_FAILURE, Reason.DATA_FAILURE, Reason.TIMEOUT, Reason.WORKER_LOST]
            )
            late = told.result(group.group_id, chosen.generation)
            spent = retry_budget_spent(group, chosen, reason)
            told.supersede(group.group_id, chosen.generation, reason)
            if spent:
                told.commit(e.GroupParked(group_id=group.group_id, reason=Reason.RETRY_BUDGET))
            told.commit(*seal_sibling(told.p, late)[1])
        elif group.granularity is Granularity.PROMPT_GROUP:
            told.seal(group.group_id, raw_reward=chance.random())
        else:
            told.seal(group.group_id, chosen.generation, raw_reward=chance.random())


def _finalize_some(told: Story, chance: random.Random, groups: int, siblings: int) -> None:
    for group in list(told.p.live_groups()):
        if group.phase is GroupPhase.READY and chance.random() < 0.7:
            told.start_finalize(group.group_id)
        elif group.phase is GroupPhase.FINALIZING:
            if chance.random() < 0.2:
                told.commit(e.FinalizeFailed(charged=True, group_id=group.group_id, reason=Reason.TIMEOUT))
            else:
                told.finish_finalize(group.group_id)


def _train_some(told: Story, chance: random.Random, groups: int, siblings: int) -> None:
    ready = [g.group_id for g in told.p.live_groups() if g.phase is GroupPhase.FINALIZED]
    if len(ready) >= 2:
        told.train(*ready[:2])
    elif ready and chance.random() < 0.1:
        told.commit(e.GroupDropped(group_id=ready[0], reason=Reason.STALE))


_ACTS = (_reserve_some, _admit_and_dispatch, _end_some_attempts, _finalize_some, _train_some)


def recorded_again(record: e.RecordedEvent) -> e.RecordedEvent:
    """The event as a reader of the log gets it: encoded and decoded."""
    return e.RecordedEvent(record.seq, record.epoch, record.time_us, decode_event(encode_event(record.event)))


# ---- logs and ledgers on disk -----------------------------------------------------------------------------------


def log_settings(**changed: object) -> LogSettings:
    return LogSettings(**changed)  # type: ignore[arg-type]


def new_log(directory: Path, *, settings: LogSettings | None = None, store: Store | None = None) -> OpenedLog:
    return create_log(
        directory,
        log_id=LOG_ID,
        run_id=RUN_ID,
        writer_version="test",
        settings=settings or LogSettings(),
        store=store,
    )


def reopened(
    directory: Path,
    *,
    marks: Sequence[e.Position] = (),
    lock: FileLock | None = None,
    take_over: bool = False,
    settings: LogSettings | None = None,
    store: Store | None = None,
) -> OpenedLog:
    return open_log(
        directory,
        writer_version="test",
        settings=settings or LogSettings(),
        marks=marks,
        lock=lock,
        take_over=take_over,
        store=store,
    )


def append_now(opened: OpenedLog, *events: e.Event) -> int:
    """Append events as one unit and wait until they are durable; returns the last seq."""
    ticket = opened.writer.append(
        [encode_event(event) for event in events], 1_000_000 + opened.writer.last_seq
    )
    ticket.wait(20)
    return ticket.seq


@contextmanager
def open_ledger(directory: Path, clock: Callable[[], int] | None = None) -> Iterator[Ledger]:
    """The ledger of a log, created or reopened."""
    opened = reopened(directory) if directory.exists() else new_log(directory)
    projection = project(opened.scan) if opened.scan.segments else Projection()
    ledger = Ledger(projection, opened.writer, clock or ManualClock())
    try:
        yield ledger
    finally:
        opened.close()


def directory_bytes(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
