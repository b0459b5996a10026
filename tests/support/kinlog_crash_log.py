"""Crash points of a log: what was said to be durable is compared with what an opening finds after every crash.

A *recording* is what processes did to a disk, and what they had promised meanwhile. For every prefix of it, and a choice
of what a power failure leaves of the unsynced rest, the log is opened by kinlog's own code, appended to, closed, and
opened again. What that recovery does is a recording too: its crashes are tried as well, and those of the recovery from
them.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from kinlog_builders import append_now, new_log, numbered, reopened
from kinlog_crash_disk import Disk, Effect, Process
from kinlog_crash_states import CrashStates

from kinlog.lineage.compaction import Compaction, compact_log
from kinlog.lineage.log import OpenedLog
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.schemas.errors import LogWriteError, RunNotFoundError
from kinlog.schemas.events import Event, Position
from kinlog.schemas.settings import LogSettings

LOG = Path("/run/log")

T = TypeVar("T")

#: Numbers of the events that recoveries append: none of a recording's own is as high.
_RECOVERED = 1_000_000

#: The share of recoveries after which the log is opened for writing once more.
_OPENED_AGAIN = 0.15


class Promise(NamedTuple):
    """What holds from some point of a recording on."""

    history: tuple[Event, ...]
    """What was appended, acknowledged or not: a log holds a prefix of it."""
    durable_seq: int
    """What a power failure may not take away."""
    acknowledged_seq: int
    """What the death of the process may not take away."""
    marks: tuple[Position, ...]
    droppable_seq: int = 0
    """Events up to here may be gone by a decision."""


NOTHING = Promise((), 0, 0, ())


@dataclass
class Recording:
    """Processes at work on a disk, and what they promised."""

    disk: Disk
    promises: list[tuple[int, Promise]] = field(default_factory=lambda: [(0, NOTHING)])
    """From this many effects on, this holds."""
    tried_from: int = 0
    """Crashes before this many effects were tried elsewhere."""
    tried_to: int | None = None
    """Crashes after this many effects need not be tried; ``None`` for all of them."""

    @property
    def promise(self) -> Promise:
        return self.promises[-1][1]

    def promise_now(self, promise: Promise) -> None:
        self.promises.append((len(self.disk.effects), promise))

    def promise_at(self, effects: int) -> Promise:
        return next(promise for since, promise in reversed(self.promises) if since <= effects)


class RecordedLog:
    """A log that is written on a recorded disk, life by life. The first opening creates it."""

    def __init__(self, recording: Recording | None = None, settings: LogSettings | None = None) -> None:
        self.recording = recording or Recording(Disk())
        self._settings = settings or LogSettings()
        self.process: Process
        self.opened: OpenedLog

    def open(self, *, take_over: bool = False) -> "RecordedLog":
        """Begin a life. What was appended and is not there any more is no history from now on."""
        promise = self.recording.promise
        self.process = Process(self.recording.disk)
        try:
            self.opened = reopened(
                LOG,
                marks=promise.marks,
                take_over=take_over,
                settings=self._settings,
                store=self.process,
            )
        except RunNotFoundError:
            assert promise.acknowledged_seq == 0, "a log that had acknowledged events is said not to exist"
            self.opened = new_log(LOG, settings=self._settings, store=self.process)
        kept = self.opened.scan.end.seq
        assert kept >= promise.acknowledged_seq, f"lost: {promise.acknowledged_seq} acknowledged, {kept} kept"
        self.recording.promise_now(promise._replace(history=promise.history[:kept]))
        return self

    def append(self, *events: Event) -> None:
        """Append, and wait for the acknowledgement: durable if the policy says so."""
        recording = self.recording
        begun = recording.promise._replace(history=recording.promise.history + events)
        recording.promise_now(begun)
        seq = append_now(self.opened, *events)
        durable = seq if self._settings.durability == "fsync" else begun.durable_seq
        recording.promise_now(begun._replace(acknowledged_seq=seq, durable_seq=durable))

    def mark(self, position: Position) -> None:
        """Hold the log to a place that it gave out as durable."""
        promise = self.recording.promise
        self.recording.promise_now(
            promise._replace(
                durable_seq=position.seq, acknowledged_seq=position.seq, marks=(*promise.marks, position)
            )
        )

    def compact(self, *, drop_through_seq: int = 0) -> Compaction:
        """Compact what is closed, and drop what may be dropped."""
        promise = self.recording.promise
        self.recording.promise_now(promise._replace(droppable_seq=drop_through_seq))
        epoch = self.opened.writer.epoch
        return compact_log(
            self.process, LOG, epoch=epoch, checkpoints=promise.marks, drop_through_seq=drop_through_seq
        )

    def close(self) -> None:
        self.mark(self.opened.close())

    def kill(self) -> None:
        """End the life at once: nothing more is written, and what was written stays for others to see."""
        self.process.kill()
        with suppress(LogWriteError):
            self.opened.close()


@dataclass
class Tally:
    """How much was tried."""

    operations: int = 0
    states: int = 0
    openings: int = 0
    kills: int = 0
    deepest: int = 0
    """Crashes in a row."""

    def __str__(self) -> str:
        return (
            f"{self.states} crash states of {self.operations} operations, {self.openings} openings, "
            f"{self.kills} kills before a power failure, up to {self.deepest} crashes in a row; "
            "acknowledged and lost: 0"
        )


class Explorer:
    """Tries crashes of recordings.

    Parameters
    ----------
    states:
        At most so many states of the disk for each prefix of the operations.
    deeper:
        Of so many recoveries for each recording, the crashes are tried too.
    """

    def __init__(self, *, states: int, deeper: int, seed: int = 0) -> None:
        self._states = states
        self._deeper = deeper
        self._chance = random.Random(seed)
        self._judged: set[tuple[int, Promise]] = set()
        self.tally = Tally()

    def explore(self, recording: Recording, *, levels: int = 3, crashes: int = 1) -> None:
        """Try every crash of a recording, and up to ``levels`` in a row."""
        self.tally.deepest = max(self.tally.deepest, crashes)
        # What follows a crash is crashed at every operation as well, but in fewer ways.
        recoveries = self._power_failures(recording, max(2, self._states // crashes))
        if crashes < levels:
            for recovery in [*self._sample(recoveries), *self._kills(recording)]:
                self.explore(recovery, levels=levels, crashes=crashes + 1)

    def _power_failures(self, recording: Recording, states: int) -> list[Recording]:
        crash, effects = CrashStates(recording.disk.start), recording.disk.effects[: recording.tried_to]
        self.tally.operations += len(effects) - recording.tried_from
        recoveries = []
        for done, effect in enumerate([None, *effects]):
            if effect is not None:
                crash.follow(effect)
            if done < recording.tried_from:
                continue
            promise = recording.promise_at(done)
            for image in crash.images(states, self._chance):
                self.tally.states += 1
                known = (image.key(), promise)
                if known not in self._judged:
                    self._judged.add(known)
                    lost_before = promise._replace(acknowledged_seq=promise.durable_seq)
                    recoveries.append(self._recovery(Disk(image), [], lost_before))
        return recoveries

    def _kills(self, recording: Recording) -> list[Recording]:
        """Recoveries on a disk that kept everything, of which much may not be durable yet."""
        recoveries = []
        end = recording.tried_to or len(recording.disk.effects)
        for done in self._sample(range(recording.tried_from, end)):
            self.tally.kills += 1
            before = recording.disk.effects[:done]
            promise = recording.promise_at(done)
            recoveries.append(self._recovery(Disk(recording.disk.start, before), before, promise))
        return recoveries

    def _recovery(self, disk: Disk, before: Sequence[Effect], promise: Promise) -> Recording:
        """Open, append and close, as after any crash. Fails when anything that was promised is not there."""
        self.tally.openings += 1
        recording = Recording(disk, [(0, promise)], tried_from=len(before))
        log = RecordedLog(recording).open()
        assert_prefix(log.opened.scan, promise)
        log.append(numbered(_RECOVERED), numbered(_RECOVERED + 1))
        log.close()
        recording.tried_to = len(disk.effects)
        again = scan_log(LOG, store=Process(disk), marks=recording.promise.marks)
        assert_prefix(again, recording.promise)
        if self._chance.random() < _OPENED_AGAIN:
            log.open().close()
            again = scan_log(LOG, store=Process(disk), marks=recording.promise.marks)
            assert again.end.seq == recording.promise.durable_seq
            assert (again.torn, again.fenced) == ([], []), "the repair left something to repair"
        return recording

    def _sample(self, things: Sequence[T]) -> list[T]:
        return self._chance.sample(things, min(self._deeper, len(things)))


def assert_prefix(scan: LogScan, promise: Promise) -> None:
    """Fail unless a log holds the beginning of what was appended, at least as far as was promised."""
    found = list(scan.events())
    end = scan.end.seq
    assert scan.first_seq <= promise.droppable_seq + 1
    assert [record.seq for record in found] == list(range(scan.first_seq, end + 1))
    assert [record.event for record in found] == list(promise.history[scan.first_seq - 1 : end])
    assert end >= promise.acknowledged_seq
