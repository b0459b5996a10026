"""Views of a log whose first events were dropped: what is left says the same as before, and what is missing is said."""

from pathlib import Path
from typing import Any

import pytest
from kinlog_compaction import folded
from kinlog_two_lives import compact_two_lives, two_lives

from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.store import LocalStore
from kinlog.replay.views.reading import dropped_note, view_table

Row = dict[str, Any]


@pytest.fixture
def scans(tmp_path: Path) -> tuple[LogScan, LogScan]:
    """The log of two lives before and after what is behind its oldest kept checkpoint was dropped."""
    run = two_lives(tmp_path / "run")
    run.kill()
    before = run.directory.path / "before"
    LocalStore().make_directory(before)
    for file in run.directory.log.glob("segment-*"):
        (before / file.name).write_bytes(file.read_bytes())
    compact_two_lives(run, drop=True)
    after = scan_log(run.directory.log)
    assert after.first_seq > 100
    return scan_log(before), after


def _rows(scan: LogScan, name: str, *keys: str) -> dict[tuple[object, ...], Row]:
    return {tuple(row[key] for key in keys): row for row in view_table(scan, name).to_pylist()}


def _same_but_for_the_past(now: Row, before: Row, first_seq: int) -> None:
    """What is told of a row is what was told of it; it may tell less of what happened before ``first_seq``."""
    told = {name: value for name, value in now.items() if value is not None}
    unequal = {name for name, value in told.items() if before[name] != value}
    assert unequal <= {"attempts", "times_undone"}, (unequal, now, before)
    for name in unequal:
        assert told[name] < before[name]
    for name in set(before) - set(told):
        if name.endswith("_seq") and before[name] is not None:
            assert before[name] < first_seq


def test_groups_that_could_still_change_are_all_there(scans):
    before, after = scans
    groups = _rows(after, "groups", "group_id")
    p, earlier = folded(after), _rows(before, "groups", "group_id")
    assert {i for (i,) in groups} >= set(p.groups)
    assert {i for (i,), row in earlier.items() if row["reserved_seq"] >= after.first_seq} <= {
        i for (i,) in groups
    }
    for (group_id,), row in groups.items():
        _same_but_for_the_past(row, earlier[group_id,], after.first_seq)
        if group_id in p.groups:
            assert row["phase"] == p.groups[group_id].phase.value
    assert any(row["reserved_seq"] is None for row in groups.values()), "none of them is older than the log"


def test_attempts_and_siblings_say_what_they_said(scans):
    before, after = scans
    for view, *keys in (
        ("attempts", "group_id", "generation", "attempt"),
        ("siblings", "group_id", "generation"),
    ):
        earlier = _rows(before, view, *keys)
        rows = _rows(after, view, *keys)
        assert rows
        for key, row in rows.items():
            _same_but_for_the_past(row, earlier[key], after.first_seq)
    old = [
        row for row in _rows(after, "attempts", *keys, "attempt").values() if row["dispatched_seq"] is None
    ]
    assert old
    for row in old:
        assert (row["worker"], row["seed"], row["epoch"], row["dispatched_at"]) == (None, None, None, None)


def test_steps_that_can_be_undone_and_kept_checkpoints_are_there(scans):
    _, after = scans
    p = folded(after)
    steps = [row for row in view_table(after, "steps").to_pylist() if row["surviving"]]
    assert {row["train_step"] for row in steps} >= set(p.steps)
    places = view_table(after, "step_groups").to_pylist()
    for step, group_ids in p.steps.items():
        assert tuple(row["group_id"] for row in places if row["train_step"] == step) == group_ids
    committed = {row["name"] for row in view_table(after, "checkpoints").to_pylist()}
    assert committed >= {checkpoint.name for checkpoint in p.checkpoints}


def test_what_is_missing_is_said(scans):
    before, after = scans
    assert dropped_note(before) == ""
    assert f"the events up to seq {after.first_seq - 1} were dropped" in dropped_note(after)
    assert view_table(after, "events", ["seq"]).column("seq")[0].as_py() == after.first_seq
