"""Who observes a ledger is shown what was recorded, as it is in the log, and nothing else."""

import pytest
from kinlog_builders import FreeCut, ManualClock, new_log, numbered

from kinlog.lineage.ledger import Ledger
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import Projection
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.events import GroupAdmitted, RecordedEvent


def test_commits_are_shown_whole_once_and_after_they_are_folded(tmp_path):
    opened = new_log(tmp_path / "log")
    projection = Projection()
    shown: list[tuple[list[RecordedEvent], int]] = []
    woken: list[int] = []
    ledger = Ledger(
        projection,
        opened.writer,
        ManualClock(),
        on_commit=lambda: woken.append(len(shown)),
        observe=lambda records: shown.append((list(records), projection.weight_version)),
    )
    ledger.commit(FreeCut(), numbered(1), numbered(2))
    with pytest.raises(TransitionError):
        ledger.commit(FreeCut(), GroupAdmitted(group_id=7))
    ledger.commit(FreeCut(), numbered(3))
    opened.close()
    assert [version for _, version in shown] == [2, 3]
    assert [record for records, _ in shown for record in records] == list(scan_log(tmp_path / "log").events())
    assert woken == [1, 2]
