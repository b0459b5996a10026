"""Selecting events by columns gives what selecting decoded events would."""

from collections.abc import Callable

import pytest
from kinlog_run_fixtures import Chance, DiskRun

from kinlog.lineage.scan import LogScan, scan_log
from kinlog.replay.selection import EventFilter, select_events
from kinlog.schemas.events import RecordedEvent, RowsCleared, StepApplied, kind_of
from kinlog.schemas.reasons import Reason


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> LogScan:
    run = DiskRun(tmp_path_factory.mktemp("selection") / "run", segment_bytes=65_536)
    chance = Chance(run, 5, permits=8)
    chance.live(through_step=6, groups_per_step=2)
    chance.turn(2)
    run.kill()
    run.restart()
    chance.live(through_step=8, groups_per_step=2)
    run.kill()
    return scan_log(run.directory.log)


def _field(record: RecordedEvent, name: str) -> object:
    return getattr(record.event, name, None)


@pytest.mark.parametrize(
    ("selection", "fits"),
    [
        (EventFilter(), lambda r: True),
        (EventFilter(kinds=frozenset({"step_applied"})), lambda r: isinstance(r.event, StepApplied)),
        (
            EventFilter(kinds=frozenset({"group_reserved", "sibling_sealed"})),
            lambda r: kind_of(type(r.event)) in {"group_reserved", "sibling_sealed"},
        ),
        (EventFilter(reasons=frozenset({Reason.TIMEOUT})), lambda r: _field(r, "reason") is Reason.TIMEOUT),
        (EventFilter(generation=2), lambda r: _field(r, "generation") == 2),
        (EventFilter(train_step=3), lambda r: _field(r, "train_step") == 3),
        (EventFilter(epoch=2), lambda r: r.epoch == 2),
        (EventFilter(first_seq=100, last_seq=140), lambda r: 100 <= r.seq <= 140),
        (
            EventFilter(group_id=3, generation=1),
            lambda r: (_field(r, "group_id"), _field(r, "generation")) == (3, 1),
        ),
        (
            EventFilter(group_id=3, kinds=frozenset({"sibling_dispatched"}), first_seq=20),
            lambda r: _field(r, "group_id") == 3 and "dispatched" in kind_of(type(r.event)) and r.seq >= 20,
        ),
    ],
)
def test_a_selection_is_what_looking_at_every_event_gives(
    scan: LogScan, selection: EventFilter, fits: Callable[[RecordedEvent], bool]
):
    expected = [record for record in scan.events() if fits(record)]
    assert expected
    assert list(select_events(scan, selection)) == expected


def test_the_story_of_a_group_holds_the_steps_and_clearings_that_list_it(scan: LogScan):
    step = next(r.event for r in scan.events() if isinstance(r.event, StepApplied))
    group_id = step.group_ids[0]
    told = list(select_events(scan, EventFilter(group_id=group_id)))
    listing = [r.event for r in told if isinstance(r.event, StepApplied | RowsCleared)]
    assert step in listing
    assert all(group_id in event.group_ids for event in listing)
    assert all(r.event in listing or _field(r, "group_id") == group_id for r in told)


def test_nothing_fits_a_group_that_was_never_drawn(scan: LogScan):
    assert list(select_events(scan, EventFilter(group_id=10_000))) == []
