"""A log is begun once, also over a kill in the middle of it; and a restart goes on with the log that it was decided from only."""

from pathlib import Path

import pytest
from kinlog_builders import append_now, log_settings, new_log, numbered

from kinlog.controller.log_opening import begin_log, go_on_with_log
from kinlog.lineage.log import OpenedLog, lock_log
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.store import LocalStore
from kinlog.schemas.errors import LogWriteError, RunExistsError


def _begin(log: Path) -> OpenedLog:
    return begin_log(log, log_settings(), version="test", store=LocalStore())


def _go_on(log: Path, scan: LogScan) -> OpenedLog:
    return go_on_with_log(
        log, log_settings(), version="test", store=LocalStore(), lock=lock_log(log), scan=scan
    )


def test_log_without_an_event_is_taken_up_and_one_with_events_is_not(tmp_path: Path):
    log = tmp_path / "log"
    first = _begin(log)
    first.close()
    again = _begin(log)
    assert again.scan.log_id == first.scan.log_id
    append_now(again, numbered(0))
    again.close()
    with pytest.raises(RunExistsError):
        _begin(log)


def test_log_that_has_grown_since_the_restart_was_decided_is_refused_and_unlocked(tmp_path: Path):
    log = tmp_path / "log"
    older = new_log(log)
    append_now(older, numbered(0))
    decided_from = scan_log(log)
    append_now(older, numbered(1))
    older.close()
    with pytest.raises(LogWriteError, match="grew from seq 1 to 2 while it was read: another process"):
        _go_on(log, decided_from)
    opened = _go_on(log, scan_log(log))
    append_now(opened, numbered(2))
    opened.close()
