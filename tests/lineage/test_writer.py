"""Group commit: what is acknowledged is durable, an append is whole, and after one failed write nothing is written."""

import asyncio
import errno
import random

import pytest
from kinlog_builders import append_now, log_settings, new_log, numbered, reopened, sealed_result
from kinlog_stores import Failing, FaultyStore, Gate

from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import SegmentEnd, segment_name
from kinlog.lineage.writer import LogWriter, WriterStart
from kinlog.schemas import events as e
from kinlog.schemas.codec import encode_event
from kinlog.schemas.errors import LogWriteError, WriterFencedError
from kinlog.schemas.reasons import Reason

LIMIT_S = 20


@pytest.fixture
def store():
    return FaultyStore()


def encoded(*numbers):
    return [encode_event(numbered(number)) for number in numbers]


def bulky(size_bytes: int) -> e.AttemptSuperseded:
    return e.AttemptSuperseded(
        group_id=1, generation=0, attempt=1, reason=Reason.TIMEOUT, detail="x" * size_bytes
    )


def events_on_disk(directory):
    return [record.event for record in scan_log(directory).events()]


async def reached(gate):
    assert await asyncio.to_thread(gate.reached.wait, LIMIT_S), "the writer never got there"


async def settle():
    """Let everything that can run on the event loop run."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_was_appended_comes_back_with_its_times(opening, tmp_path):
    log = opening()
    log.writer.append(encoded(1, 2), 111)
    log.writer.append(encoded(3), 99).wait(LIMIT_S)
    assert log.writer.acknowledged_seq == log.writer.last_seq == 3
    records = list(scan_log(tmp_path / "log").events())
    assert [(r.seq, r.epoch, r.time_us, r.event) for r in records] == [
        (1, 1, 111, numbered(1)),
        (2, 1, 111, numbered(2)),
        (3, 1, 99, numbered(3)),
    ]


async def test_ticket_resolves_only_once_its_frame_is_synced(opening, store):
    log = opening(store=store)
    store.before = gate = Gate()
    waiting = asyncio.create_task(log.writer.append(encoded(1), 0).durable())
    await reached(gate)
    await settle()
    assert not waiting.done()
    assert log.writer.acknowledged_seq == 0
    gate.open()
    await asyncio.wait_for(waiting, LIMIT_S)
    assert log.writer.acknowledged_seq == 1


async def test_everything_queued_during_a_sync_becomes_one_frame(opening, store, tmp_path):
    log = opening(store=store)
    store.before = gate = Gate()
    first = log.writer.append(encoded(1), 0)
    await reached(gate)
    later = [log.writer.append(encoded(n, n), 0) for n in range(2, 12)]
    gate.open()
    await asyncio.wait_for(asyncio.gather(*(ticket.durable() for ticket in [first, *later])), LIMIT_S)
    frames = scan_log(tmp_path / "log").segments[0].scan.frames
    assert [frame.num_events for frame in frames] == [0, 1, 20]


async def test_one_call_into_the_event_loop_wakes_all_that_a_commit_made_durable(opening, store, monkeypatch):
    log = opening(store=store)
    store.before = gate = Gate()
    first = log.writer.append(encoded(1), 0)
    await reached(gate)
    later = [log.writer.append(encoded(n), 0) for n in range(2, 50)]
    waiting = [asyncio.create_task(ticket.durable()) for ticket in later]
    await settle()
    loop, calls = asyncio.get_running_loop(), []
    into_loop = loop.call_soon_threadsafe
    monkeypatch.setattr(
        loop, "call_soon_threadsafe", lambda call, *rest: calls.append(call) or into_loop(call, *rest)
    )
    gate.open()
    await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
    await first.durable()
    assert len(calls) == 1


def test_waits_of_a_loop_that_was_closed_harm_no_one(opening, store):
    log = opening(store=store)
    store.before = gate = Gate()
    ticket = log.writer.append(encoded(1), 0)

    async def give_up():
        await reached(gate)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ticket.durable(), 0.001)

    asyncio.run(give_up())
    gate.open()
    ticket.wait(LIMIT_S)
    append_now(log, numbered(2))


def test_blocking_wait_gives_up_in_time_and_may_be_repeated(opening, store):
    log = opening(store=store)
    store.before = gate = Gate()
    ticket = log.writer.append(encoded(1), 0)
    with pytest.raises(TimeoutError):
        ticket.wait(0)
    gate.open()
    ticket.wait(LIMIT_S)


async def test_ticket_does_not_wait_for_a_later_one_that_was_awaited_earlier(opening, store):
    log = opening(store=store)
    store.before = first_sync = Gate()
    early = log.writer.append(encoded(1), 0)
    await reached(first_sync)
    late = log.writer.append(encoded(2), 0)
    late_waits = asyncio.create_task(late.durable())
    await settle()
    early_waits = asyncio.create_task(early.durable())
    await settle()
    store.before = second_sync = Gate()
    first_sync.open()
    await reached(second_sync)
    await asyncio.wait_for(early_waits, LIMIT_S)
    assert not late_waits.done()
    second_sync.open()
    await asyncio.wait_for(late_waits, LIMIT_S)


@pytest.mark.parametrize("durability", ["interval", "os"])
def test_lazy_policies_acknowledge_without_a_sync_and_position_makes_durable(opening, store, durability):
    log = opening(store=store, settings=log_settings(durability=durability, interval_ms=3_600_000))
    store.syncs.clear()
    append_now(log, numbered(1))
    append_now(log, numbered(2))
    assert store.syncs == []
    assert asyncio.run(log.writer.position()).seq == 2
    assert len(store.syncs) == 1
    append_now(log, numbered(3))
    assert log.close().seq == 3
    assert len(store.syncs) > 1


def test_interval_policy_syncs_by_itself_when_nothing_more_comes(opening, store):
    log = opening(store=store, settings=log_settings(durability="interval", interval_ms=1))
    store.before = gate = Gate()
    gate.open()
    append_now(log, numbered(1))
    assert gate.reached.wait(LIMIT_S)


class Seconds:
    """A monotonic clock that moves only when told to."""

    now = 0

    def __call__(self) -> float:
        return float(self.now)


def test_interval_policy_syncs_in_time_under_a_steady_stream_of_appends(store, tmp_path):
    clock = Seconds()
    store.create(tmp_path / segment_name(1, 0)).close()
    start = WriterStart(tmp_path, "l", "r", "test", e.Position(1, 0, 0))
    settings = log_settings(durability="interval", interval_ms=3_600_000)
    writer = LogWriter(store, start, settings, monotonic_s=clock)
    store.syncs.clear()
    synced = []
    for clock.now in (0, 3599, 3601, 3602, 7200, 7203):
        writer.append(encoded(1), 0).wait(LIMIT_S)
        synced.append(len(store.syncs))
    writer.close()
    assert synced == [0, 0, 1, 1, 1, 2]


def test_fsync_policy_syncs_every_commit(opening, store):
    log = opening(store=store)
    store.syncs.clear()
    for number in range(1, 4):
        append_now(log, numbered(number))
    assert len(store.syncs) == 3


FAULTS = {
    "write EIO": ("write", errno.EIO),
    "disk full": ("write", errno.ENOSPC),
    "fsync EIO": ("sync", errno.EIO),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_write_or_sync_poisons_for_good_and_loses_nothing_acknowledged(
    opening, store, tmp_path, fault
):
    operation, code = FAULTS[fault]
    log = opening(store=store)
    append_now(log, numbered(1), numbered(2))
    store.before = failing = Failing(operation, code)
    with pytest.raises(LogWriteError, match="after seq 2.*Nothing acknowledged is lost") as failed:
        append_now(log, numbered(3))
    assert failed.value.__cause__.errno == code
    store.before = lambda operation, path: None  # the disk is well again, and still nothing may be written
    with pytest.raises(LogWriteError):
        log.writer.append(encoded(4), 0)
    with pytest.raises(LogWriteError):
        asyncio.run(log.writer.position())
    with pytest.raises(LogWriteError):
        log.close()
    assert failing.raised == 1
    assert events_on_disk(tmp_path / "log")[:2] == [numbered(1), numbered(2)]
    with_rest = reopened(tmp_path / "log")
    assert with_rest.scan.end.seq >= 2
    with_rest.close()


def test_short_write_poisons_and_is_cut_off_at_the_next_opening(opening, store, tmp_path):
    log = opening(store=store)
    append_now(log, numbered(1))
    store.short_write_bytes = 700
    with pytest.raises(LogWriteError, match="short write: 700"):
        append_now(log, numbered(2))
    again = reopened(tmp_path / "log") if _closed(log) else None
    assert again is not None
    assert again.scan.end.seq == 1
    assert [repair.offset_bytes for repair in again.repaired] == [again.scan.segments[0].scan.end_offset]
    again.close()


def _closed(log) -> bool:
    with pytest.raises(LogWriteError):
        log.close()
    return True


async def test_every_waiter_gets_the_error_whatever_it_waits_for(opening, store):
    log = opening(store=store)
    store.before = gate = Gate(error=OSError(errno.EIO, "EIO"))
    first = log.writer.append(encoded(1), 0)
    await reached(gate)
    queued = log.writer.append(encoded(2), 0)
    waiting = [
        asyncio.create_task(wait) for wait in (first.durable(), queued.durable(), log.writer.position())
    ]
    threaded = asyncio.create_task(asyncio.to_thread(queued.wait, LIMIT_S))
    await settle()
    gate.open()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, threaded, return_exceptions=True), LIMIT_S)
    assert [type(outcome) for outcome in outcomes] == [LogWriteError] * 4
    with pytest.raises(LogWriteError):
        await first.durable()


async def test_position_whose_own_sync_fails_gets_the_error(opening, store):
    log = opening(store=store, settings=log_settings(durability="os"))
    append_now(log, numbered(1))
    store.before = Failing("sync", errno.EIO)
    with pytest.raises(LogWriteError):
        await asyncio.wait_for(log.writer.position(), LIMIT_S)


async def test_cancelled_waits_leak_nothing_and_harm_no_one(opening, store):
    log = opening(store=store)
    store.before = gate = Gate()
    ticket = log.writer.append(encoded(1), 0)
    await reached(gate)
    other = asyncio.create_task(ticket.durable())
    doomed = [asyncio.create_task(ticket.durable()), asyncio.create_task(log.writer.position())]
    await settle()
    for task in doomed:
        task.cancel()
    await asyncio.gather(*doomed, return_exceptions=True)
    gate.open()
    await asyncio.wait_for(other, LIMIT_S)
    await asyncio.wait_for(log.writer.append(encoded(2), 0).durable(), LIMIT_S)
    assert (await asyncio.wait_for(log.writer.position(), LIMIT_S)).seq == 2
    assert len(log.writer._waiters) == 0


def test_appends_roll_over_into_closed_segments_that_chain(opening, tmp_path):
    log = opening(settings=log_settings(segment_bytes=65_536))
    written = [msg_numbered(n) for n in range(1, 60)]
    for event in written:
        append_now(log, event)
    position = log.close()
    scan = scan_log(tmp_path / "log", marks=[position])
    assert len(scan.segments) >= 3
    assert [segment.scan.end for segment in scan.segments] == [SegmentEnd.CLOSED] * len(scan.segments)
    assert [segment.scan.info.index for segment in scan.segments] == list(range(len(scan.segments)))
    assert events_on_disk(tmp_path / "log") == written
    assert max(path.stat().st_size for path in (tmp_path / "log").glob("*.arrows")) < 2 * 65_536


def msg_numbered(number: int) -> e.AttemptSuperseded:
    return e.AttemptSuperseded(
        group_id=number, generation=0, attempt=1, reason=Reason.TIMEOUT, detail="x" * 3000
    )


async def test_every_position_is_a_mark_that_the_log_keeps(opening, tmp_path):
    log = opening(settings=log_settings(segment_bytes=65_536))
    marks = [await log.writer.position()]
    for number in range(1, 50):
        log.writer.append([encode_event(msg_numbered(number))], 0)
        marks.append(await log.writer.position())
    marks.append(log.close())
    assert [mark.seq for mark in marks] == [*range(50), 49]
    assert len(list((tmp_path / "log").glob("*.arrows"))) >= 3
    assert scan_log(tmp_path / "log", marks=marks).end.seq == 49
    again = opening(marks=marks)
    assert (await again.writer.position()).epoch == 2


def test_append_never_spans_frames(opening, tmp_path):
    log = opening(settings=log_settings(segment_bytes=65_536))
    chance = random.Random(5)
    last_seqs, tickets = [], []
    for _ in range(150):
        size = chance.choice([1, 2, 3, 40])
        tickets.append(
            log.writer.append([encode_event(bulky(chance.choice([1, 800]))) for _ in range(size)], 0)
        )
        last_seqs.append(tickets[-1].seq)
    tickets[-1].wait(LIMIT_S)
    log.close()
    frames = [f for s in scan_log(tmp_path / "log").segments for f in s.scan.frames if f.num_events]
    assert {frame.last_seq for frame in frames} <= set(last_seqs)
    assert len(frames) < len(tickets), "nothing was committed together: the test proves nothing"


def test_append_of_no_events_or_too_many_is_refused_and_harms_nothing(opening):
    log = opening(settings=log_settings(segment_bytes=65_536))
    with pytest.raises(ValueError, match="1 to 4096 events, got 0"):
        log.writer.append([], 0)
    with pytest.raises(ValueError, match="got 4097"):
        log.writer.append(encoded(*range(4097)), 0)
    with pytest.raises(ValueError, match="payload"):
        log.writer.append([encode_event(bulky(4000))] * 4096, 0)
    assert append_now(log, *(numbered(n) for n in range(4096))) == 4096


def test_cohort_of_256_siblings_with_64_calls_each_is_one_append(opening, tmp_path):
    log = opening(settings=log_settings(segment_bytes=65_536))
    seals = [sealed_result(0, generation, 1, calls=64) for generation in range(256)]
    append_now(log, e.CohortSealed(group_id=0, attempt=1), *seals)
    log.close()
    assert events_on_disk(tmp_path / "log")[1:] == seals
    assert [f.num_events for s in scan_log(tmp_path / "log").segments for f in s.scan.frames].count(257) == 1


def test_closed_writer_takes_nothing_and_closing_again_says_the_same(opening):
    log = opening()
    append_now(log, numbered(1))
    position = log.close()
    with pytest.raises(LogWriteError, match="closed"):
        log.writer.append(encoded(2), 0)
    assert log.writer.close() == position


def test_closing_writes_what_is_queued(opening, store, tmp_path):
    log = opening(store=store)
    tickets = [log.writer.append(encoded(n), 0) for n in range(1, 30)]
    assert log.close().seq == 29
    for ticket in tickets:
        ticket.wait(0)
    assert len(events_on_disk(tmp_path / "log")) == 29


async def test_writer_that_was_taken_over_acknowledges_nothing_more(opening, store, tmp_path):
    log = opening(store=store)
    append_now(log, numbered(1))
    (tmp_path / "log" / segment_name(2, 0)).touch()
    with pytest.raises(WriterFencedError, match=r"epoch 1 .* was taken over"):
        await log.writer.append(encoded(2), 0).durable()
    assert log.writer.acknowledged_seq == 1
    with pytest.raises(WriterFencedError):
        log.writer.append(encoded(3), 0)


async def test_writer_whose_own_segment_is_gone_acknowledges_nothing_more(opening, tmp_path):
    # The epoch that took over may itself be long compacted: then nothing of it has its name any more, nor has ours.
    log = opening()
    append_now(log, numbered(1))
    own = tmp_path / "log" / segment_name(1, 0)
    own.rename(own.with_suffix(".gone"))
    with pytest.raises(WriterFencedError, match=rf"epoch 1 .* was taken over: {own.name}.* is gone"):
        await log.writer.append(encoded(2), 0).durable()
    assert log.writer.acknowledged_seq == 1


def test_writer_looks_for_its_current_segment_and_not_for_earlier_ones(opening, tmp_path):
    log = opening(settings=log_settings(segment_bytes=65_536))
    for number in range(1, 40):
        append_now(log, msg_numbered(number))
    (tmp_path / "log" / segment_name(1, 0)).rename(tmp_path / "compacted")
    assert append_now(log, numbered(40)) == 40


async def test_newer_epoch_is_looked_for_before_the_own_segment(opening, store, monkeypatch):
    # A compaction takes the oldest away first. In the other order it could do so between the two looks, and hide both.
    log = opening(store=store)
    looked = []
    monkeypatch.setattr(store, "exists", lambda path: bool(looked.append(path.name)) or path.exists())
    append_now(log, numbered(1))
    assert looked == [segment_name(2, 0), segment_name(1, 0)]


async def test_fenced_writer_is_refused_a_position(opening, tmp_path):
    log = opening()
    append_now(log, numbered(1))
    (tmp_path / "log" / segment_name(2, 0)).touch()
    with pytest.raises(WriterFencedError):
        await log.writer.position()


def test_disk_full_at_creation_is_a_write_error_and_releases_the_lock(store, tmp_path):
    store.before = Failing("write", errno.ENOSPC)
    with pytest.raises(LogWriteError, match="ENOSPC"):
        new_log(tmp_path / "log", store=store)
    FaultyStore().lock(tmp_path / "log" / "writer.lock").release()


def test_disk_full_at_opening_is_a_write_error_and_releases_the_lock(opening, store, tmp_path):
    log = opening()
    append_now(log, numbered(1))
    log.close()
    store.before = Failing("write", errno.ENOSPC)
    with pytest.raises(LogWriteError, match="ENOSPC"):
        opening(store=store)
    assert opening().scan.end.seq == 1


def test_disk_full_at_roll_over_loses_nothing_acknowledged(opening, store, tmp_path):
    log = opening(store=store, settings=log_settings(segment_bytes=65_536))
    acknowledged = append_now(log, msg_numbered(1))

    def refuse_second_segment(operation, path):
        if operation == "create":
            raise OSError(errno.ENOSPC, "ENOSPC")

    store.before = refuse_second_segment
    with pytest.raises(LogWriteError, match="ENOSPC"):
        for number in range(2, 60):
            acknowledged = append_now(log, msg_numbered(number))
    assert acknowledged > 5
    assert len(events_on_disk(tmp_path / "log")) == acknowledged
    assert opening().scan.end.seq == acknowledged if _closed(log) else False
