"""A log is followed while it is written: every event once, nothing read twice, nothing believed before it verifies."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kinlog_builders import FreeCut, append_now, directory_bytes, numbered, open_ledger, reopened
from kinlog_run_fixtures import Chance, DiskRun

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.ledger import Ledger
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.segment import scan_segment, segment_name
from kinlog.lineage.store import LocalStore
from kinlog.replay.checkpoints import find_checkpoints
from kinlog.replay.watch import followed_log
from kinlog.replay.watch.followed_log import FollowedLog
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.events import RecordedEvent


class CountingStore(LocalStore):
    """Notes what is read."""

    def __init__(self) -> None:
        self.whole: list[str] = []
        self.parts: list[tuple[str, int]] = []

    def read(self, path: Path) -> memoryview:
        self.whole.append(path.name)
        return super().read(path)

    def read_part(self, path: Path, offset_bytes: int, size_bytes: int) -> memoryview:
        self.parts.append((path.name, offset_bytes))
        return super().read_part(path, offset_bytes, size_bytes)


def _append(ledger: Ledger, number: int) -> None:
    ledger.commit(FreeCut(), numbered(number)).wait(20)


def _new(log: FollowedLog) -> list[RecordedEvent]:
    events = log.events()
    assert events is not None
    return list(events)


def _moments(run: DiskRun) -> Iterator[None]:
    """Live two lives, with steps, checkpoints, segments that roll over, a kill and compactions; yield now and then."""
    chance = Chance(run, 3, permits=8)
    for through_step in range(1, 13):
        chance.live(through_step=through_step, groups_per_step=2, checkpoint_every=3)
        run.position()
        yield
        if through_step == 6:
            run.kill()
            run.restart()
            run.position()
            yield
        if through_step in (8, 11):
            log_id = scan_log(run.directory.log).log_id
            found = find_checkpoints(run.directory.checkpoints, log_id=log_id, verify=False)
            positions = [f.manifest.position for f in found if f.manifest is not None][:1]
            compact_log(LocalStore(), run.directory.log, epoch=run._epoch, checkpoints=positions)
            yield


def test_every_event_is_seen_once_and_in_order_over_segments_lives_and_compactions(tmp_path: Path):
    run = DiskRun(tmp_path / "run", segment_bytes=65_536)
    run.position()
    log = FollowedLog(run.directory.log)
    seen = list(log.scan.events())
    names = set()
    for _ in _moments(run):
        seen += _new(log)
        names |= {path.name.partition("-")[0] for path in run.directory.log.iterdir()}
        assert log.tail.last.seq == seen[-1].seq == run.p.last_seq
    assert seen == list(scan_log(run.directory.log).events())
    assert {"segment", "compacted"} <= names
    run.close()
    assert _new(log)[-1].seq == run.p.last_seq


def test_only_what_is_new_is_read(tmp_path: Path):
    with open_ledger(tmp_path / "log") as ledger:
        for number in range(50):
            _append(ledger, number)
        store = CountingStore()
        log = FollowedLog(tmp_path / "log", store)
        end = log.scan.segments[-1].frames[-1].end
        store.whole.clear()
        store.parts.clear()
        _append(ledger, 51)
        assert len(_new(log)) == 1
        assert not _new(log)
    assert store.whole == []
    assert min(offset for _, offset in store.parts) >= end


def test_frame_that_is_half_written_is_not_there_yet(tmp_path: Path):
    written, growing = tmp_path / "written", tmp_path / "growing"
    with open_ledger(written) as ledger:
        for number in range(3):
            _append(ledger, number)
        whole = (written / segment_name(1, 0)).read_bytes()
    frames = scan_segment(memoryview(whole)).frames
    last = frames[-1]
    growing.mkdir()
    path = growing / segment_name(1, 0)
    zeros = bytes(len(whole) - last.offset)
    path.write_bytes(whole[: last.offset] + zeros)
    log = FollowedLog(growing)
    for cut in range(last.offset, last.end - 64, 7):  # its last bytes are zeros anyway
        path.write_bytes(whole[:cut] + zeros)
        assert not _new(log)
    path.write_bytes(whole)
    assert [record.seq for record in _new(log)] == [last.last_seq]


def _flip(path: Path, frame: int) -> None:
    data = bytearray(path.read_bytes())
    data[scan_segment(memoryview(data)).frames[frame].offset + 100] ^= 1
    path.write_bytes(data)


def test_damage_is_refused_as_soon_as_it_cannot_be_half_a_frame(tmp_path: Path):
    path = tmp_path / "log" / segment_name(1, 0)
    with open_ledger(tmp_path / "log") as ledger:
        _append(ledger, 1)
        log = FollowedLog(tmp_path / "log")
        _append(ledger, 2)
        _append(ledger, 3)
        _flip(path, -2)
        assert not _new(log)
        with pytest.raises(LogDamagedError):
            log.events()


def test_torn_tail_that_stays_is_scanned_once(tmp_path: Path):
    path = tmp_path / "log" / segment_name(1, 0)
    with open_ledger(tmp_path / "log") as ledger:
        _append(ledger, 1)
        store = CountingStore()
        log = FollowedLog(tmp_path / "log", store)
        _append(ledger, 2)
        whole = path.read_bytes()
    _flip(path, -1)
    data = bytearray(path.read_bytes())
    end = scan_segment(memoryview(whole)).frames[-1].end
    path.write_bytes(data[:end] + bytes(len(whole) - end))
    store.whole.clear()
    for _ in range(5):
        assert not _new(log)
    assert store.whole == [path.name]
    path.write_bytes(whole)
    assert [record.event for record in _new(log)] == [numbered(2)]


def test_log_that_changes_while_it_is_scanned_is_scanned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    damage = LogDamagedError("it changed", segment="s", offset_bytes=0, seq=1, expected="a", found="b")
    failures = [damage]

    def scanned(*arguments: Any, **options: Any) -> LogScan:
        if failures:
            raise failures.pop()
        return scan_log(*arguments, **options)

    monkeypatch.setattr(followed_log, "scan_log", scanned)
    with open_ledger(tmp_path / "log") as ledger:
        _append(ledger, 1)
        assert FollowedLog(tmp_path / "log").tail.last.seq == 1
    failures += [damage, damage]
    with pytest.raises(LogDamagedError):
        FollowedLog(tmp_path / "log")


def test_what_an_older_life_wrote_past_a_take_over_is_said_to_be_no_history(tmp_path: Path):
    log_path, other = tmp_path / "log", tmp_path / "other"
    with open_ledger(log_path) as ledger:
        _append(ledger, 1)
        shutil.copytree(log_path, other)
        log = FollowedLog(log_path)
        _append(ledger, 2)
        assert len(_new(log)) == 1
        newer = reopened(other)
        append_now(newer, numbered(7))
        newer.close()
        shutil.copy(other / segment_name(2, 0), log_path)
        assert log.events() is None
    again = [record.event for record in FollowedLog(log_path).scan.events()]
    assert again == [numbered(1), numbered(7)]


def test_lag_is_what_no_mark_says_is_durable(tmp_path: Path):
    run = DiskRun(tmp_path / "run")  # durability: os, so nothing is synced unless somebody asks
    log = FollowedLog(run.directory.log)
    marked = run.position().seq
    run.story.reserve()
    asyncio.run(run._ledger.writer.position())
    _new(log)
    assert log.tail.durable_seq == marked
    assert log.tail.unproven_events == run.p.last_seq - marked > 0
    assert not log.tail.closed
    run.close()
    _new(log)
    assert (log.tail.closed, log.tail.unproven_events) == (True, 0)


def test_following_changes_nothing(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    run.position()
    before = directory_bytes(run.directory.path)
    _new(FollowedLog(run.directory.log))
    assert directory_bytes(run.directory.path) == before
    run.close()
