"""The projection at any point is what replaying up to there gives, wherever it is gone on from."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from kinlog_builders import new_log, numbered
from kinlog_run_fixtures import Chance, DiskRun
from kinlog_two_lives import two_lives

from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import encode_projection
from kinlog.replay.at import find_seq, find_step, find_time, project_at
from kinlog.replay.checkpoints import read_manifest
from kinlog.replay.projection import SNAPSHOT_NAME, replay
from kinlog.replay.times import parse_time_us
from kinlog.schemas.codec import encode_event
from kinlog.schemas.events import RunRestored, StepApplied


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Checkpoints at steps 3, 6 and 9; killed after step 7 and gone on from step 6."""
    run = two_lives(tmp_path_factory.mktemp("at") / "run", through_step=9)
    run.kill()
    return run.directory


def test_every_point_is_what_a_replay_up_to_there_gives(run: RunDirectory):
    scan = scan_log(run.log)
    used = set()
    for seq in (1, 2, 50, 100, 150, 200, 250, 300, scan.end.seq - 1, scan.end.seq):
        projection, checkpoint = project_at(run, scan, seq)
        assert encode_projection(projection) == encode_projection(replay(scan.events(through_seq=seq)))
        used.add(checkpoint)
    assert {None, "step_000003", "step_000006", "step_000009"} >= used > {None}


def test_the_nearest_checkpoint_is_gone_on_from_and_none_that_is_not_what_it_promised(
    run: RunDirectory,
):
    scan = scan_log(run.log)
    at = read_manifest(run.checkpoints / "step_000006").position.seq
    assert project_at(run, scan, at)[1] == "step_000006"
    assert project_at(run, scan, at - 1)[1] == "step_000003"
    snapshot = run.checkpoints / "step_000006" / SNAPSHOT_NAME
    content = snapshot.read_bytes()
    try:
        snapshot.write_bytes((run.checkpoints / "step_000003" / SNAPSHOT_NAME).read_bytes())
        projection, checkpoint = project_at(run, scan, at + 5)
    finally:
        snapshot.write_bytes(content)
    assert checkpoint == "step_000003"
    assert projection == replay(scan.events(through_seq=at + 5))


def test_a_step_is_found_where_the_surviving_history_applied_it(run: RunDirectory):
    scan = scan_log(run.log)
    applied = [record for record in scan.events() if isinstance(record.event, StepApplied)]
    for step in range(1, 10):
        last = [record for record in applied if record.event.train_step == step][-1]
        assert find_step(scan, step).seq == last.seq
    assert len([record for record in applied if record.event.train_step == 7]) == 2
    with pytest.raises(LookupError, match="no step 99 on its surviving history"):
        find_step(scan, 99)


def test_a_step_that_a_restart_undid_is_not_found_and_the_restart_is_named(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    chance = Chance(run, 5, permits=8)
    chance.live(through_step=4, groups_per_step=2, checkpoint_every=3)
    run.kill()
    run.restart()
    run.kill()
    scan = scan_log(run.directory.log)
    restored = next(record for record in scan.events() if isinstance(record.event, RunRestored))
    assert find_step(scan, 3).epoch == 1
    with pytest.raises(LookupError, match=f"restart at seq {restored.seq}, which went back to step 3"):
        find_step(scan, 4)


def test_a_seq_that_is_not_there_is_refused_with_where_the_log_ends(run: RunDirectory):
    scan = scan_log(run.log)
    assert find_seq(scan, scan.end.seq).seq == scan.end.seq
    with pytest.raises(LookupError, match=f"the log ends at seq {scan.end.seq}"):
        find_seq(scan, scan.end.seq + 1)


def test_a_time_is_that_of_the_newest_event_recorded_by_then(run: RunDirectory):
    scan = scan_log(run.log)
    records = list(scan.events())
    for record in records[:: len(records) // 7]:
        same = [other.seq for other in records if other.time_us <= record.time_us]
        moment = find_time(scan, record.time_us)
        assert (moment.seq, moment.note) == (same[-1], "")
        assert find_time(scan, record.time_us + 1).seq >= moment.seq
    with pytest.raises(LookupError, match="nothing was recorded by then: the first event, seq 1, is of "):
        find_time(scan, records[0].time_us - 1)


def test_where_a_clock_went_back_order_is_by_seq_and_the_note_says_so(tmp_path: Path):
    opened = new_log(tmp_path / "log")
    for number, time_us in enumerate((100, 500, 600, 200, 300, 700)):
        opened.writer.append([encode_event(numbered(number))], time_us).wait(20)
    opened.close()
    scan = scan_log(tmp_path / "log")
    assert find_time(scan, 150).seq == 1
    moment = find_time(scan, 350)
    assert (moment.seq, moment.time_us) == (5, 300)
    assert moment.note == "2 events before it were recorded by a clock that was ahead: order is by seq"
    assert (find_time(scan, 700).seq, find_time(scan, 700).note) == (6, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T23:59:59.123457", datetime(2026, 1, 31, 23, 59, 59, 123457, tzinfo=UTC)),
        ("2026-01-31 23:59:59 UTC", datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)),
        ("2026-01-31T23:59:59Z", datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)),
        ("2026-02-01T01:59:59+02:00", datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
    ],
)
def test_times_are_utc_unless_they_say_otherwise_to_the_last_microsecond(text: str, expected: datetime):
    assert parse_time_us(text) == round(expected.timestamp() * 1_000_000)
