"""A listing that lacks names for a while never forks a history: what is hidden is waited for, or opening is refused."""

from pathlib import Path

import pytest
from kinlog_builders import append_now, log_settings, new_log
from kinlog_late_names import LateNamesStore

from kinlog.lineage.log import OpenedLog, open_log
from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import segment_name
from kinlog.schemas import events as e
from kinlog.schemas.errors import LogDamagedError, LogWriteError, RunLockedError
from kinlog.schemas.reasons import Reason
from kinlog.schemas.settings import LogSettings

FOR_EVER = 1_000_000


def bulky(number: int) -> e.AttemptSuperseded:
    return e.AttemptSuperseded(
        group_id=number, generation=0, attempt=1, reason=Reason.TIMEOUT, detail="x" * 2000
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log of three epochs, the first of which rolled over into three segments; another machine wrote it."""
    directory = tmp_path / "log"
    log = new_log(directory, settings=log_settings(segment_bytes=8_000))
    for number in range(1, 4):
        append_now(log, bulky(number))
    log.close()
    for number in (4, 5):
        log = opened(directory, LateNamesStore({}))
        append_now(log, bulky(number))
        log.close()
    assert [name for name in LateNamesStore({}).names(directory) if name.endswith(".arrows")] == [
        segment_name(1, 0),
        segment_name(1, 1),
        segment_name(1, 2),
        segment_name(2, 0),
        segment_name(3, 0),
    ]
    return directory


def opened(directory: Path, store: LateNamesStore) -> OpenedLog:
    return open_log(directory, writer_version="test", settings=LogSettings(), store=store, sleep=store.sleep)


def groups(directory: Path) -> list[int]:
    return [record.event.group_id for record in scan_log(directory).events()]


def without_later_epochs(directory: Path) -> None:
    for epoch in (2, 3):
        (directory / segment_name(epoch, 0)).unlink()


@pytest.mark.parametrize("listings", [1, 2, 3, 4])
def test_segment_that_shows_late_is_waited_for(directory: Path, listings: int):
    without_later_epochs(directory)
    store = LateNamesStore({segment_name(1, 2): 2 + listings})
    log = opened(directory, store)
    assert log.scan.end.seq == 3
    append_now(log, bulky(6))
    log.close()
    assert groups(directory) == [1, 2, 3, 6]
    assert len(store.slept_s) == listings // 2


@pytest.mark.parametrize("name", [segment_name(1, 1), segment_name(1, 2)])
def test_segment_that_never_shows_is_refused_by_name_and_nothing_is_lost(directory: Path, name: str):
    without_later_epochs(directory)
    store = LateNamesStore({segment_name(1, 1): FOR_EVER, segment_name(1, 2): FOR_EVER})
    if name == segment_name(1, 2):
        del store.hidden[segment_name(1, 1)]
    with pytest.raises(LogWriteError, match=f"{name} exists .* does not show it"):
        opened(directory, store)
    assert len(store.slept_s) == 4
    log = opened(directory, LateNamesStore({}))
    assert log.scan.end.seq == 3
    log.close()


@pytest.mark.parametrize("hidden", [{(3, 0)}, {(2, 0), (3, 0)}, {(1, 2), (2, 0), (3, 0)}])
def test_epoch_that_shows_late_cannot_be_taken_twice(directory: Path, hidden: set[tuple[int, int]]):
    store = LateNamesStore({segment_name(*place): FOR_EVER for place in hidden})
    with pytest.raises(RunLockedError, match="has taken epoch"):
        opened(directory, store)
    log = opened(directory, LateNamesStore({}))
    assert log.scan.end.seq == 5
    log.close()


@pytest.mark.parametrize("place", [(1, 0), (1, 1), (1, 2), (2, 0)])
def test_segment_that_is_missing_before_others_is_refused(directory: Path, place: tuple[int, int]):
    with pytest.raises(LogDamagedError):
        opened(directory, LateNamesStore({segment_name(*place): FOR_EVER}))
    assert groups(directory) == [1, 2, 3, 4, 5]


def test_log_that_does_not_show_at_all_is_not_created_again(directory: Path):
    names = LateNamesStore({}).names(directory)
    with pytest.raises(RunLockedError):
        new_log(directory, store=LateNamesStore(dict.fromkeys(names, FOR_EVER)))
    assert groups(directory) == [1, 2, 3, 4, 5]


def test_asking_for_what_comes_next_leaves_nothing_behind(directory: Path):
    before = LateNamesStore({}).names(directory)
    opened(directory, LateNamesStore({})).close()
    assert LateNamesStore({}).names(directory) == sorted([*before, segment_name(4, 0)])
