"""Logs of every past version are read today as they were when they were written."""

import shutil

import pytest
from kinlog_builders import append_now, numbered, reopened
from kinlog_golden import (
    ALL,
    GOLDEN,
    READABLE,
    REFUSED,
    as_data,
    differences,
    expected_events,
    expected_refusal,
    expected_story,
    log_path,
)

from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import projection_digest
from kinlog.replay.checkpoints import find_checkpoints
from kinlog.replay.projection import SNAPSHOT_NAME, project, read_snapshot
from kinlog.replay.recovery.restore import restore_points, restored_projection, verify_run
from kinlog.schemas import events as e
from kinlog.schemas.errors import LogUnsupportedError
from kinlog.schemas.events import EVENT_TYPES, PassedOver, kind_of
from kinlog.schemas.reasons import Reason
from kinlog.schemas.upcasters import PAST_VERSIONS

UPCAST_BEFORE = ("v1/whole_run", "v1/extremes")


def test_golden_logs_are_there_and_small():
    assert {"v1/whole_run", "v1/extremes", "v1/torn", "v1/fenced"} <= set(READABLE)
    assert sorted(READABLE + REFUSED) == ALL
    for version in {name.partition("/")[0] for name in ALL}:
        size_bytes = sum(path.stat().st_size for path in (GOLDEN / version).rglob("*") if path.is_file())
        assert size_bytes < 300_000


@pytest.mark.parametrize("name", READABLE)
def test_golden_log_is_read_as_when_it_was_written(name):
    records = list(scan_log(log_path(name)).events())
    expected = expected_events(name)
    assert len(records) == len(expected)
    told = []
    for record, then in zip(records, expected, strict=True):
        assert [record.seq, record.epoch, record.time_us] == [then["seq"], then["epoch"], then["time_us"]]
        found = as_data(record.event)
        assert found.pop("kind") == then["kind"]
        told += differences(name, then["kind"], then["fields"], found)
    assert told == []


@pytest.mark.parametrize("name", READABLE)
def test_golden_log_replays_to_its_committed_projection(name):
    scan, expected = scan_log(log_path(name)), expected_story(name)
    assert as_data(scan.end) == expected["end"]
    assert [[s.path.name, s.offset_bytes] for s in scan.torn] == expected["torn"]
    assert [[s.path.name, s.offset_bytes] for s in scan.fenced] == expected["fenced"]
    assert differences(name, "projection", expected["projection"], as_data(project(scan))) == []


@pytest.mark.parametrize("name", REFUSED)
def test_log_of_a_newer_writer_is_refused_by_name(name):
    expected = expected_refusal(name)
    records = []
    with pytest.raises(LogUnsupportedError) as refused:
        for record in scan_log(log_path(name)).events():
            records.append(record)
    assert refused.value.code == expected["error"]
    assert all(named in str(refused.value) for named in expected["names"])
    assert len(records) <= expected["read_before"]


def test_kind_that_its_writer_marked_ignorable_keeps_its_seq_and_changes_nothing():
    scan = scan_log(log_path("v1/ignorable_kind"))
    assert [r.event for r in scan.events()][1] == PassedOver(original_kind="weather_observed")
    assert (project(scan).last_seq, project(scan).weight_version) == (3, 2)


def test_fields_that_a_newer_writer_added_are_ignored_and_missing_ones_take_their_defaults():
    opened, _, admitted, parked = (record.event for record in scan_log(log_path("v1/extra_fields")).events())
    assert opened == e.WriterOpened(host="here", pid=4)
    assert admitted == e.GroupAdmitted(group_id=0)
    assert parked == e.GroupParked(group_id=0, reason=Reason.EVICTED, detail="")


def test_every_kind_in_every_version_is_in_a_golden_log():
    """A new version of an event needs a golden log that was written with it."""
    found = {(event["kind"], event["version"]) for name in READABLE for event in expected_events(name)}
    present = {(kind, event_type.VERSION) for kind, event_type in EVENT_TYPES.items()}
    assert present | set(PAST_VERSIONS) <= found


# ---- finalize_failed, version 1 to 2: the first step that an event took ------------------------------------------------


@pytest.mark.parametrize("name", UPCAST_BEFORE)
def test_failed_finalize_of_version_1_replays_through_its_upcaster_and_counts_against_no_budget(name):
    """Version 1 did not say whether a failure is charged to the group: nothing was, and nothing is at replay."""
    stored = {
        row
        for batch in scan_log(log_path(name)).batches()
        for row in zip(batch.column("kind").to_pylist(), batch.column("version").to_pylist(), strict=True)
    }
    assert ("finalize_failed", 1) in stored
    failed = [r.event for r in scan_log(log_path(name)).events() if isinstance(r.event, e.FinalizeFailed)]
    assert failed
    assert not any(event.charged for event in failed)
    assert all(group.finalize_failures == 0 for group in project(scan_log(log_path(name))).groups.values())


def test_log_that_was_compacted_or_lost_its_oldest_events_amounts_to_the_same():
    goes_on, compacted, dropped = (
        expected_story(f"v2/{name}") for name in ("goes_on", "compacted", "dropped")
    )
    assert goes_on == compacted == dropped
    assert expected_events("v2/compacted") == expected_events("v2/goes_on")
    assert expected_events("v2/dropped") == expected_events("v2/goes_on")[3:]


def test_log_of_version_1_goes_on_with_events_of_version_2(tmp_path):
    directory = tmp_path / "log"
    shutil.copytree(log_path("v1/extremes"), directory)
    before = list(scan_log(directory).events())
    opened = reopened(directory)
    append_now(opened, e.FinalizeStarted(group_id=0))
    charged = e.FinalizeFailed(group_id=0, reason=Reason.TIMEOUT, charged=True, detail="no answer")
    append_now(opened, charged, numbered(9))
    opened.close()
    scan = scan_log(directory)
    versions = [
        version
        for batch in scan.batches()
        for kind, version in zip(
            batch.column("kind").to_pylist(), batch.column("version").to_pylist(), strict=True
        )
        if kind == kind_of(e.FinalizeFailed)
    ]
    assert versions == [1, 2]
    records = list(scan.events())
    assert records[: len(before)] == before
    assert records[-2].event == charged
    assert project(scan).groups[0].finalize_failures == 1


# ---- checkpoints --------------------------------------------------------------------------------------------------------


def test_checkpoint_of_version_1_is_intact_and_is_where_its_log_was_at_its_position():
    (found,) = find_checkpoints(GOLDEN / "v1" / "whole_run" / "checkpoints", log_id="log-1")
    assert found.problem == ""
    manifest = found.manifest
    assert manifest is not None
    snapshot = read_snapshot(found.path / SNAPSHOT_NAME, manifest.projection_digest)
    own = scan_log(found.path / "log", marks=[manifest.position])
    whole = scan_log(log_path("v1/whole_run"), marks=[manifest.position])
    assert snapshot == project(own) == project(whole, through_seq=manifest.position.seq)
    assert projection_digest(project(whole, snapshot)) == projection_digest(project(whole))


def test_run_of_version_1_can_go_back_to_its_checkpoint():
    run = RunDirectory(GOLDEN / "v1" / "whole_run")
    scan = verify_run(run)
    point = next(restore_points(run, scan))
    assert point.name == "step_000001"
    assert point.at_end == project(scan)
    assert restored_projection(point).train_step == 1


def test_every_other_difference_is_told():
    assert differences(
        "v1/x", "projection", {"groups": {"3": {}}}, {"groups": {"3": {"finalize_failures": 1}}}
    )
    assert differences("v1/x", "finalize_failed", {"detail": "a"}, {"detail": "b", "charged": False})
    assert not differences("v1/x", "finalize_failed", {"detail": "a"}, {"detail": "a", "charged": False})
    assert differences("v1/x", "projection", {"steps": {}}, {})
    assert differences("v1/x", "group_reserved", {"retry_budget": [2, 1]}, {"retry_budget": [2]})
    assert differences("v1/x", "sealed", {"reward": 0.0}, {"reward": -0.0})
    assert differences("v1/x", "sealed", {"flag": 1}, {"flag": True})
