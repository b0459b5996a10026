"""Whoever follows a log sees every event of its history once and in order, whatever becomes of its files."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from kinlog_builders import append_now, log_settings, new_log, numbered, reopened

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.log import OpenedLog
from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import segment_name
from kinlog.lineage.store import LocalStore
from kinlog.replay.selection import EventFilter
from kinlog.replay.watch.following import follow_events
from kinlog.schemas.errors import LogDamagedError, WriterFencedError
from kinlog.schemas.events import RecordedEvent


class _End(Exception):
    """Stands for Ctrl-C."""


class _Follower:
    """Follows a log through acts: each happens when there is nothing more for now."""

    def __init__(self, log: Path, *acts: Callable[[], object], selection: EventFilter | None = None) -> None:
        self._acts = iter(acts)
        self.told: list[str] = []
        self.records: list[RecordedEvent] = []
        events = follow_events(log, selection or EventFilter(), pause=self._pause, tell=self.told.append)
        self.ended = False
        with suppress(_End):
            for record in events:
                self.records.append(record)
            self.ended = True

    def _pause(self) -> None:
        act = next(self._acts, None)
        if act is None:
            raise _End
        act()

    @property
    def numbers(self) -> list[int]:
        return [record.event.weight_version for record in self.records]


def _append(opened: OpenedLog, *numbers: int) -> Callable[[], object]:
    return lambda: [append_now(opened, numbered(number)) for number in numbers]


def test_what_is_appended_is_seen_over_roll_over_a_close_and_a_new_life(tmp_path: Path):
    log = tmp_path / "log"
    opened = new_log(log, settings=log_settings(segment_bytes=65_536))
    append_now(opened, numbered(0))
    newer: list[OpenedLog] = []

    def next_life() -> None:
        opened.close()
        newer.append(reopened(log))
        append_now(newer[0], numbered(700))

    follower = _Follower(
        log,
        _append(opened, 1, 2),
        lambda: None,
        _append(opened, *range(3, 700)),
        next_life,
        lambda: _append(newer[0], 701)(),
    )
    assert follower.numbers == list(range(702))
    assert [record.seq for record in follower.records] == list(range(1, 703))
    assert len(list(log.glob("segment-*"))) > 2
    assert follower.told == []
    newer[0].close()


def test_segments_may_be_compacted_meanwhile(tmp_path: Path):
    log = tmp_path / "log"
    opened = new_log(log, settings=log_settings(segment_bytes=65_536))
    append_now(opened, numbered(0))
    follower = _Follower(
        log,
        _append(opened, *range(1, 400)),
        lambda: compact_log(LocalStore(), log, epoch=1, checkpoints=()),
        _append(opened, 400),
        lambda: compact_log(LocalStore(), log, epoch=1, checkpoints=()),
        _append(opened, 401),
    )
    assert list(log.glob("compacted-*"))
    assert follower.numbers == list(range(402))
    opened.close()


def test_events_that_were_dropped_before_they_were_seen_are_told_of(tmp_path: Path):
    log = tmp_path / "log"
    opened = new_log(log, settings=log_settings(segment_bytes=65_536))
    append_now(opened, numbered(0))

    def append_and_drop() -> None:
        _append(opened, *range(1, 700))()
        compact_log(LocalStore(), log, epoch=1, checkpoints=(), drop_through_seq=699)

    follower = _Follower(log, append_and_drop, _append(opened, 700))
    first_seq = scan_log(log).first_seq
    assert first_seq > 2
    assert follower.numbers == [0, *range(first_seq - 1, 701)]
    assert follower.told == [f"{first_seq - 2} events up to seq {first_seq - 1} were dropped"]
    opened.close()


def test_half_a_frame_is_not_there_yet(tmp_path: Path):
    log = tmp_path / "log"
    opened = new_log(log)
    append_now(opened, numbered(0))
    append_now(opened, numbered(1))
    path = log / segment_name(1, 0)
    whole = path.read_bytes()
    end = scan_log(log).segments[0].frames[1].end
    path.write_bytes(whole[: end + 70] + bytes(len(whole) - end - 70))
    seen_before = []
    follower = _Follower(log, lambda: seen_before.append(True), lambda: path.write_bytes(whole))
    assert follower.numbers == [0, 1]
    opened.close()


def test_what_an_older_writer_wrote_past_a_take_over_is_taken_back(tmp_path: Path):
    log = tmp_path / "log"
    older = new_log(log)
    append_now(older, numbered(0))
    newer: list[OpenedLog] = []
    whole = log / segment_name(1, 0)

    def take_over() -> None:
        # The older one wrote on, unseen by the newer one, until its next commit finds that it is fenced.
        written = whole.read_bytes()
        whole.write_bytes(before)
        newer.append(reopened(log, take_over=True))
        whole.write_bytes(written)
        append_now(newer[0], numbered(10))

    before = whole.read_bytes()
    follower = _Follower(log, _append(older, 1), take_over, lambda: _append(newer[0], 11)())
    assert follower.numbers == [0, 1, 10, 11]
    assert [record.seq for record in follower.records] == [1, 2, 2, 3]
    assert "after seq 1 is no history" in follower.told[0]
    with pytest.raises(WriterFencedError):
        append_now(older, numbered(2))
    newer[0].close()


def test_damage_that_stays_is_refused(tmp_path: Path):
    log = tmp_path / "log"
    opened = new_log(log)
    append_now(opened, numbered(0))

    def damage() -> None:
        append_now(opened, numbered(1))
        opened.close()
        path = log / segment_name(1, 0)
        data = bytearray(path.read_bytes())
        data[scan_log(log).segments[0].frames[-1].offset + 100] ^= 1
        path.write_bytes(data)

    with pytest.raises(LogDamagedError):
        _Follower(log, damage, lambda: None)


def test_a_filter_and_an_end_hold_for_what_comes_as_well(tmp_path: Path):
    log = tmp_path / "log"
    opened = new_log(log)
    append_now(opened, numbered(6))
    selection = EventFilter(train_step=1, last_seq=4)
    follower = _Follower(log, _append(opened, 7), _append(opened, 14, 8, 9), selection=selection)
    assert (follower.numbers, follower.ended) == ([7, 8], True)
    opened.close()
