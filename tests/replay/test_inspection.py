"""Finding a run on disk, and its log segment by segment."""

from pathlib import Path

import pytest
from kinlog_builders import append_now, new_log, numbered, reopened
from kinlog_run_fixtures import small_run

from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import scan_segment, segment_name
from kinlog.replay.inspection import SegmentState, list_segments, locate_run, survey_segments
from kinlog.schemas.errors import RunNotFoundError, WriterFencedError


def _states(log: Path) -> dict[str, SegmentState]:
    return {segment.name: segment.state for segment in list_segments(scan_log(log))}


def test_a_run_is_found_by_its_directory_and_by_its_log(tmp_path: Path):
    small_run(tmp_path / "run").kill()
    by_run, by_log = locate_run(tmp_path / "run"), locate_run(tmp_path / "run" / "log")
    assert by_run.log == by_log.log == tmp_path / "run" / "log"
    assert by_run.checkpoints == by_log.checkpoints == tmp_path / "run" / "checkpoints"


def test_a_log_of_another_name_is_found_without_a_run_around_it(tmp_path: Path):
    new_log(tmp_path / "kept").close()
    found = locate_run(tmp_path / "kept")
    assert found.log == tmp_path / "kept"
    assert not found.checkpoints.exists()


@pytest.mark.parametrize(("name", "words"), [("absent", "does not exist"), ("empty", "holds no kinlog run")])
def test_a_directory_without_a_run_is_refused_with_what_was_expected(tmp_path: Path, name: str, words: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunNotFoundError, match=words) as caught:
        locate_run(tmp_path / name)
    assert segment_name(1, 0) in str(caught.value)


def test_segments_of_a_killed_and_restarted_run_cover_every_event_once(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    scan = scan_log(run.directory.log)
    first, second = list_segments(scan)
    assert (first.state, second.state) == (SegmentState.UNCLOSED, SegmentState.LIVE)
    assert first.first_seq == 1
    assert first.last_seq is not None
    assert second.first_seq == first.last_seq + 1
    assert second.last_seq == scan.end.seq == first.events + second.events
    assert first.verified_bytes < first.file_bytes
    assert {first.log_id, second.log_id} == {scan.log_id}


def test_a_segment_that_was_closed_in_order_says_so(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.close()
    assert _states(run.directory.log)[segment_name(2, 0)] is SegmentState.CLOSED


def test_a_torn_tail_an_empty_epoch_and_damage_have_states_of_their_own(tmp_path: Path):
    log = tmp_path / "log"
    opened = new_log(log)
    append_now(opened, numbered(1))
    append_now(opened, numbered(2))
    opened.close()
    newest = log / segment_name(1, 0)
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-40])
    (log / segment_name(2, 0)).touch()
    assert _states(log) == {segment_name(1, 0): SegmentState.TORN, segment_name(2, 0): SegmentState.EMPTY}
    assert list_segments(scan_log(log))[0].events == 1

    first_event = scan_segment(memoryview(whole)).frames[1]
    damaged = bytearray(whole)
    damaged[first_event.offset + first_event.length // 2] ^= 1
    newest.write_bytes(damaged)
    assert survey_segments(log)[0].state is SegmentState.DAMAGED


def test_what_an_older_writer_wrote_past_a_take_over_is_fenced_and_not_counted(tmp_path: Path):
    log = tmp_path / "log"
    older = new_log(log)
    append_now(older, numbered(1))
    newer = reopened(log, take_over=True)
    append_now(newer, numbered(2))
    with pytest.raises(WriterFencedError):
        append_now(older, numbered(3))
    newer.close()
    first, second = list_segments(scan_log(log))
    assert (first.state, first.events) == (SegmentState.FENCED, 1)
    assert (second.first_seq, second.last_seq) == (2, 2)
