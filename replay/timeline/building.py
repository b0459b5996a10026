"""Building a timeline: one pass over a log's events."""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from kinlog.lineage.fold import fold
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import Projection
from kinlog.replay.audit.account import Account
from kinlog.replay.lives import Life, LifeEnd, LivesTally
from kinlog.replay.timeline.attempts import REASONS, AttemptTable, Outcome, pack_slots
from kinlog.replay.timeline.groups import GroupEnd, TimelineGroup, shown_group, shown_prompt
from kinlog.replay.timeline.moments import MomentsTally
from kinlog.replay.timeline.steady_clock import SteadyClock
from kinlog.replay.timeline.summary import TimelineSummary, count_attempts
from kinlog.replay.timeline.timeline import StepSpan, Timeline
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason

__all__ = ["build_timeline", "timeline_of"]

_REASON_CODES = {reason: code for code, reason in enumerate(REASONS, 1)}


def build_timeline(scan: LogScan) -> Timeline:
    """Read a whole log.

    Raises
    ------
    TransitionError
        The log tells an impossible story.
    LogUnsupportedError
        An event was written by a newer kinlog.
    """
    return timeline_of(
        scan.events(), run_id=scan.run_id, beginning=scan.beginning(), first_seq=scan.first_seq
    )


def timeline_of(
    records: Iterable[e.RecordedEvent], *, run_id: str, beginning: Projection, first_seq: int = 1
) -> Timeline:
    """Build the timeline of events.

    Parameters
    ----------
    records:
        In order.
    beginning:
        What they begin at: an empty projection, or what is left of history that was dropped. It is folded into.
    first_seq:
        Of the first event.

    Raises
    ------
    TransitionError
        They tell an impossible story.
    """
    builder = _Builder(beginning, first_seq)
    for record in records:
        builder.begin(beginning, record.time_us)
        # What the builder takes for granted, the fold checks.
        fold(beginning, record)
        builder.add(record)
    return builder.finish(run_id, beginning.last_seq)


class _Group:
    """A group whose attempts can still change."""

    def __init__(self, shown: TimelineGroup) -> None:
        self.shown = shown
        self.newest: dict[int, int] = {}
        """generation -> place of its newest attempt, unless that was given up."""

    def sealed_places(self, attempts: AttemptTable) -> list[int]:
        """Return the places of the attempts whose results stand."""
        return [place for place in self.newest.values() if attempts.seal_seq[place]]


class _Builder:
    def __init__(self, beginning: Projection, first_seq: int) -> None:
        self._first_seq = first_seq
        self._settled_steps = beginning.frontier_step
        self._clock = SteadyClock()
        self._account, self._lives = Account(beginning), LivesTally()
        self._moments = MomentsTally(first_seq)
        self._epoch = 0
        self._workers: dict[str, int] = {}
        self._details: dict[str, int] = {"": 0}
        self._attempts = AttemptTable()
        self._groups: dict[int, _Group] = {}
        self._running: set[int] = set()
        self._given_up: dict[tuple[int, int, int], int] = {}
        """Attempts that were given up before they were sealed, by identity: a result of theirs comes late."""
        self._steps: list[StepSpan] = []
        self._step_groups: dict[int, tuple[int, ...]] = {}
        """Step -> its groups, on the surviving history."""
        self._step_began: dict[int, int] = {}
        self._weight_version = beginning.weight_version
        self._late_results = self._late_tokens = self._resumed_tokens = 0
        self._alive = 0
        self._live_groups: list[tuple[int, int]] = []
        self._begun = False
        self._last_us = 0
        self._handlers: dict[type[e.Event], Callable[[e.RecordedEvent, Any], None]] = {
            e.SiblingDispatched: self._dispatched,
            e.SiblingSealed: self._sealed,
            e.AttemptSuperseded: self._superseded,
            e.LateResultRejected: self._late,
            e.GroupReserved: self._reserved,
            e.GroupDropped: self._left,
            e.GroupParked: self._left,
            e.GroupClaimed: self._claimed,
            e.StepApplied: self._applied,
            e.WeightsPublished: self._published,
            e.RunRestored: self._restored,
        }

    def add(self, record: e.RecordedEvent) -> None:
        """Read the next event."""
        now_us = self._clock(record.time_us)
        record = e.RecordedEvent(record.seq, record.epoch, now_us, record.event)
        if self._epoch not in (0, record.epoch):
            self._life_ended()
        self._epoch, self._last_us = record.epoch, now_us
        self._account.add(record)
        self._lives.add(record)
        self._moments.add(record)
        handle = self._handlers.get(type(record.event))
        if handle is not None:
            handle(record, record.event)

    def finish(self, run_id: str, events: int) -> Timeline:
        """Return the timeline of what was read."""
        self._account.finish()
        self._life_ended()
        self._settle_outcomes()
        a, end_us = self._attempts, self._clock.last_us
        workers = sorted(self._workers, key=_natural)
        places = {self._workers[name]: place for place, name in enumerate(workers)}
        a.worker = array("q", (places[worker] for worker in a.worker))
        slots, needed = pack_slots(zip(a.worker, a.begin_us, a.end_us, strict=True))
        a.slot = array("q", slots)
        lives = self._lives.lives()
        groups = tuple(group.shown for _, group in sorted(self._groups.items()))
        return Timeline(
            summary=self._summary(run_id, events, lives),
            begin_us=self._clock.first_us,
            end_us=end_us,
            first_seq=self._first_seq,
            workers=tuple(workers),
            slots=tuple(needed.get(place, 0) for place in range(len(workers))),
            attempts=a,
            details=tuple(self._details),
            groups=groups,
            steps=tuple(self._steps),
            weights=tuple(self._moments.weights),
            checkpoints=tuple(self._moments.checkpoints),
            lives=lives,
            restarts=tuple(self._account.restarts),
            marks=tuple(self._moments.marks),
            live_groups=tuple(self._live_groups),
        )

    def _summary(self, run_id: str, events: int, lives: Sequence[Life]) -> TimelineSummary:
        account = self._account
        ends = Counter(group.shown.end for group in self._groups.values())
        return TimelineSummary(
            run_id=run_id,
            events=events,
            dropped_events=self._first_seq - 1,
            first_time_us=self._clock.first_us,
            last_time_us=self._clock.last_us,
            clock_went_back=self._clock.went_back,
            lives=account.lives,
            kills=sum(life.end is LifeEnd.KILLED for life in lives),
            groups={
                "drawn": account.drawn_total,
                "applied": ends[GroupEnd.APPLIED] + account.settled_applied,
                "dropped": ends[GroupEnd.DROPPED] + account.settled_dropped.total(),
                "parked": ends[GroupEnd.PARKED],
                "alive": self._alive,
            },
            attempts=count_attempts(self._attempts, self._first_seq),
            late_rejected=self._late_results,
            tokens_late=self._late_tokens,
            tokens_saved=sum(restart.tokens_reused for restart in account.restarts),
            tokens_resumed=self._resumed_tokens,
            steps=max(self._step_groups, default=self._settled_steps),
            steps_undone=account.steps_rolled_back,
            checkpoints=sum(c.failed is None for c in self._moments.checkpoints),
            checkpoints_failed=sum(c.failed is not None for c in self._moments.checkpoints),
        )

    # ---- where the log begins ---------------------------------------------------------------------------------------

    def begin(self, beginning: Projection, time_us: int) -> None:
        """Take over what is alive where dropped history ends: who ran it, and since when, is not known any more."""
        if self._begun:
            return
        self._begun = True
        now_us = self._last_us = self._clock(time_us)
        self._step_groups.update(beginning.steps)
        for group_id, state in sorted(beginning.groups.items()):
            group = self._groups[group_id] = _Group(shown_group(state))
            for sibling in state.siblings.values():
                if sibling.waiting:
                    continue
                place = self._unknown_attempt(now_us, group_id, sibling.generation, sibling.attempt)
                group.newest[sibling.generation] = place
                if sibling.sealed is None:
                    self._running.add(place)
                else:
                    self._seal(place, sibling.sealed, sibling.sealed_seq, now_us)
        self._count_alive(now_us, beginning.alive_total)

    def _unknown_attempt(self, now_us: int, group_id: int, generation: int, attempt: int) -> int:
        return self._attempts.add(
            group_id=group_id,
            generation=generation,
            attempt=attempt,
            worker=self._workers.setdefault("", len(self._workers)),
            begin_us=now_us,
            begin_seq=0,
            weight_version=self._weight_version,
        )

    # ---- attempts ---------------------------------------------------------------------------------------------------

    def _dispatched(self, record: e.RecordedEvent, event: e.SiblingDispatched) -> None:
        place = self._attempts.add(
            group_id=event.group_id,
            generation=event.generation,
            attempt=event.attempt,
            worker=self._workers.setdefault(event.worker, len(self._workers)),
            begin_us=record.time_us,
            begin_seq=record.seq,
            weight_version=event.weight_version,
        )
        self._groups[event.group_id].newest[event.generation] = place
        self._running.add(place)

    def _sealed(self, record: e.RecordedEvent, event: e.SiblingSealed) -> None:
        place = self._groups[event.group_id].newest[event.generation]
        self._running.discard(place)
        self._resumed_tokens += event.resumed_tokens
        self._seal(place, event, record.seq, record.time_us)

    def _seal(self, place: int, event: e.SiblingSealed, seq: int, now_us: int) -> None:
        a = self._attempts
        a.end_us[place], a.seal_seq[place] = now_us, seq
        a.outcome[place] = Outcome.WAITING
        a.tokens[place] = event.completion_tokens
        a.weight_version[place] = event.weight_version

    def _superseded(self, record: e.RecordedEvent, event: e.AttemptSuperseded) -> None:
        a, place = self._attempts, self._groups[event.group_id].newest.pop(event.generation)
        a.superseded[place] = True
        outcome = Outcome.REDONE if a.seal_seq[place] else Outcome.SUPERSEDED
        self._judge(record, place, outcome, event.reason, event.detail)

    def _judge(
        self, record: e.RecordedEvent, place: int, outcome: Outcome, reason: Reason, detail: str
    ) -> None:
        a = self._attempts
        # One that was running when a life ended, ended with it; that the next life gave it up came later.
        a.end_us[place] = a.end_us[place] or record.time_us
        a.verdict_us[place], a.verdict_seq[place] = record.time_us, record.seq
        a.outcome[place], a.reason[place] = outcome, _REASON_CODES[reason]
        a.detail[place] = self._details.setdefault(detail, len(self._details))
        self._running.discard(place)
        if not a.seal_seq[place]:
            self._given_up[a.group_id[place], a.generation[place], a.attempt[place]] = place

    def _late(self, record: e.RecordedEvent, event: e.LateResultRejected) -> None:
        self._late_results += 1
        self._late_tokens += event.completion_tokens
        a, identity = self._attempts, (event.group_id, event.generation, event.attempt)
        place = self._given_up.get(identity)
        if place is None:
            place = self._given_up[identity] = self._unknown_attempt(record.time_us, *identity)
            a.end_us[place] = record.time_us
            self._running.discard(place)
        a.late_us[place], a.late_seq[place] = record.time_us, record.seq
        a.late_reason[place] = _REASON_CODES[event.reason]
        a.outcome[place], a.tokens[place] = Outcome.LATE, event.completion_tokens

    def _life_ended(self) -> None:
        """What was running died with its controller, whenever the next one says so."""
        for place in self._running:
            self._attempts.end_us[place] = self._attempts.end_us[place] or self._last_us

    # ---- groups and steps -------------------------------------------------------------------------------------------

    def _reserved(self, record: e.RecordedEvent, event: e.GroupReserved) -> None:
        shown = shown_prompt(event.group_id, event.prompt, event.num_generations)
        self._groups[event.group_id] = _Group(shown)
        self._count_alive(record.time_us, 1)

    def _left(self, record: e.RecordedEvent, event: e.GroupDropped | e.GroupParked) -> None:
        group = self._groups[event.group_id]
        end, outcome = (
            (GroupEnd.DROPPED, Outcome.DROPPED)
            if isinstance(event, e.GroupDropped)
            else (GroupEnd.PARKED, Outcome.PARKED)
        )
        for place in group.newest.values():
            self._judge(record, place, outcome, event.reason, event.detail)
        self._count_alive(record.time_us, -(group.shown.end is GroupEnd.ALIVE))
        group.shown.end, group.shown.reason = end, event.reason

    def _claimed(self, record: e.RecordedEvent, event: e.GroupClaimed) -> None:
        self._step_began.setdefault(event.train_step, record.time_us)

    def _published(self, record: e.RecordedEvent, event: e.WeightsPublished) -> None:
        self._weight_version = event.weight_version

    def _applied(self, record: e.RecordedEvent, event: e.StepApplied) -> None:
        groups = [self._groups[group_id] for group_id in event.group_ids]
        places = [group.sealed_places(self._attempts) for group in groups]
        staleness = [self._staleness(of_group) for of_group in places]
        for group in groups:
            group.shown.end, group.shown.train_step = GroupEnd.APPLIED, event.train_step
        self._count_alive(record.time_us, -len(groups))
        self._step_groups[event.train_step] = event.group_ids
        self._steps.append(
            StepSpan(
                train_step=event.train_step,
                begin_us=self._step_began.pop(event.train_step, record.time_us),
                end_us=record.time_us,
                seq=record.seq,
                groups=len(groups),
                tokens=sum(self._attempts.tokens[place] for of_group in places for place in of_group),
                undone=False,
                mean_staleness=fmean(staleness) if staleness else 0.0,
                max_staleness=max(staleness, default=0),
            )
        )

    def _staleness(self, places: list[int]) -> int:
        a = self._attempts
        versions = [a.weight_version[place] for place in places if a.tokens[place] > 0]
        return self._weight_version - min(versions, default=self._weight_version)

    def _restored(self, record: e.RecordedEvent, event: e.RunRestored) -> None:
        self._weight_version = event.weight_version
        undone = [step for step in self._step_groups if step > event.train_step]
        for step in undone:
            for group_id in self._step_groups.pop(step):
                shown = self._groups[group_id].shown
                shown.end, shown.train_step = GroupEnd.ALIVE, None
                self._count_alive(record.time_us, 1)
        self._steps = [
            replace(step, undone=True) if step.train_step in undone else step for step in self._steps
        ]
        self._step_began.clear()

    def _count_alive(self, now_us: int, change: int) -> None:
        self._alive += change
        if self._live_groups and self._live_groups[-1][0] == now_us:
            self._live_groups.pop()
        self._live_groups.append((now_us, self._alive))

    def _settle_outcomes(self) -> None:
        """Say of each sealed attempt of the surviving history that it was trained on."""
        for group_ids in self._step_groups.values():
            for group_id in group_ids:
                for place in self._groups[group_id].sealed_places(self._attempts):
                    self._attempts.outcome[place] = Outcome.TRAINED


def _natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Sort ``worker-2`` before ``worker-10``, and the unknown one last."""
    parts = re.findall(r"([0-9]*)([^0-9]*)", name)
    return not name, [(int(digits) if digits else -1, text) for digits, text in parts]
