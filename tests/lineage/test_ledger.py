"""The ledger: one way to change a run, in memory and in the log alike."""

import asyncio

import pytest
from kinlog_builders import FreeCut, ManualClock, Story, numbered, open_ledger, story
from msgspec.structs import replace

from kinlog.lineage.ledger import Ledger
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import Projection, encode_projection, projection_digest
from kinlog.replay.projection import project
from kinlog.schemas import events as e
from kinlog.schemas.errors import EventTooLargeError, LogWriteError, TransitionError
from kinlog.schemas.reasons import Reason


class EndedCut:
    def require(self) -> None:
        raise RuntimeError("the cut is over")


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(tmp_path / "log") as opened:
        yield opened


def unchanged(ledger: Ledger, error: type[Exception], *events: object, match: str) -> None:
    before = encode_projection(ledger.projection)
    with pytest.raises(error, match=match):
        ledger.commit(FreeCut(), *events)
    assert encode_projection(ledger.projection) == before
    assert ledger.writer.last_seq == ledger.projection.last_seq


def test_commit_is_in_the_projection_at_once_and_in_the_log_when_its_ticket_says_so(ledger, tmp_path):
    told = Story(ledger)
    ticket = ledger.commit(FreeCut(), numbered(5), numbered(6))
    assert (ledger.projection.weight_version, ticket.seq) == (6, 4)
    ticket.wait(20)
    records = list(scan_log(tmp_path / "log").events())
    assert [record.event for record in records] == [*told.events, numbered(5), numbered(6)]


def test_clock_may_go_backwards_and_order_is_by_seq(tmp_path):
    clock = ManualClock(5_000)
    with open_ledger(tmp_path / "log", clock) as ledger:
        ledger.commit(FreeCut(), numbered(1))
        clock.now_us = 10
        ledger.commit(FreeCut(), numbered(2))
    records = list(scan_log(tmp_path / "log").events())
    assert [(r.seq, r.time_us, r.event) for r in records] == [(1, 5_000, numbered(1)), (2, 10, numbered(2))]


def test_nothing_is_committed_outside_a_cut(ledger):
    with pytest.raises(RuntimeError, match="the cut is over"):
        ledger.commit(EndedCut(), numbered(1))
    assert ledger.projection.last_seq == 0


def test_refused_event_is_in_neither_projection_nor_log_and_the_ledger_goes_on(ledger):
    unchanged(ledger, TransitionError, e.GroupAdmitted(group_id=4), match="not alive")
    too_large = e.CheckpointFailed(name="c", reason=Reason.TIMEOUT, detail="x" * 5000)
    unchanged(ledger, EventTooLargeError, numbered(1), too_large, match="limit is 4096")
    ledger.commit(FreeCut(), numbered(1)).wait(20)


def test_commit_of_nothing_is_refused_and_harms_nothing(ledger):
    unchanged(ledger, ValueError, match="1 to 4096 events, got 0")
    ledger.commit(FreeCut(), numbered(1)).wait(20)


def test_commit_that_no_frame_can_hold_is_refused_and_harms_nothing(ledger):
    unchanged(ledger, ValueError, *(numbered(n) for n in range(5000)), match="4096")
    ledger.commit(FreeCut(), numbered(1)).wait(20)


def test_event_that_a_reader_could_not_decode_is_refused(ledger):
    told = Story(ledger)
    group = told.ready()
    told.start_finalize(group)
    event = told.finalized_event(group)
    short = replace(event, rows=(replace(event.rows[0], row_digest=b"short"), event.rows[1]))
    unchanged(ledger, ValueError, short, match="length")
    unchanged(ledger, ValueError, replace(event, valid_fraction="all of them"), match="float")
    told.commit(event)


def test_live_projection_is_what_a_reader_folds_whatever_types_the_caller_used(tmp_path):
    with open_ledger(tmp_path / "log") as ledger:
        told = Story(ledger)
        group = told.generating()
        told.seal(group, raw_reward=1)  # an integer where a float is meant
        told.start_finalize(group)
        event = told.finalized_event(group)
        told.commit(replace(event, valid_fraction=1, rows=list(event.rows)))
        live = projection_digest(ledger.projection)
    assert projection_digest(project(scan_log(tmp_path / "log"))) == live


def test_broken_unit_breaks_the_ledger_since_it_is_a_bug(ledger):
    with pytest.raises(TransitionError):
        ledger.commit(FreeCut(), numbered(1), e.GroupAdmitted(group_id=4))
    with pytest.raises(LogWriteError, match="broken by an earlier error"):
        ledger.commit(FreeCut(), numbered(2))
    assert ledger.writer.last_seq == 0


def test_ledger_takes_nothing_after_the_writer_failed(ledger):
    ledger.commit(FreeCut(), numbered(1)).wait(20)
    ledger.writer.close()
    for _ in range(2):
        with pytest.raises(LogWriteError):
            ledger.commit(FreeCut(), numbered(2))


def test_ledger_is_not_built_on_a_projection_of_another_place(ledger):
    with pytest.raises(ValueError, match="the projection is at seq 9, the log at seq 0"):
        Ledger(Projection(last_seq=9), ledger.writer, ManualClock())


def test_position_is_the_place_of_everything_committed(ledger, tmp_path):
    told = Story(ledger)
    told.finalized()
    position = asyncio.run(ledger.position())
    assert position.seq == ledger.projection.last_seq
    assert scan_log(tmp_path / "log", marks=[position]).end == position


def test_listener_hears_of_every_commit_and_of_no_refusal(ledger):
    heard = []
    listening = Ledger(ledger.projection, ledger.writer, ManualClock(), on_commit=lambda: heard.append(1))
    listening.commit(FreeCut(), numbered(1))
    with pytest.raises(TransitionError):
        listening.commit(FreeCut(), e.GroupAdmitted(group_id=4))
    assert heard == [1]


@pytest.mark.parametrize("seed", range(3))
def test_whole_run_through_the_ledger_replays_to_the_live_projection(tmp_path, seed):
    with open_ledger(tmp_path / "log") as ledger:
        told = story(seed, ledger=ledger)
        live = encode_projection(ledger.projection)
    scan = scan_log(tmp_path / "log")
    assert [record.event for record in scan.events()] == told.events
    assert encode_projection(project(scan)) == live
    with open_ledger(tmp_path / "log") as again:
        assert encode_projection(again.projection) == live
        again.commit(FreeCut(), e.WriterOpened(host="h", pid=2)).wait(20)
