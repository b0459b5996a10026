"""Selecting events by columns gives what selecting decoded events would."""

from collections.abc import Callable

import pytest
from kinlog_run_fixtures import Chance, DiskRun, TickingClock

from kinlog.lineage.scan import LogScan, scan_log
from kinlog.replay.selection import EventFilter, Selector, select_events
from kinlog.schemas.events import GroupReserved, RecordedEvent, RowsCleared, StepApplied, kind_of
from kinlog.schemas.reasons import Reason

_START_US = TickingClock().now_us


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
            EventFilter(since_us=_START_US + 700_000, until_us=_START_US + 900_000),
            lambda r: _START_US + 700_000 <= r.time_us <= _START_US + 900_000,
        ),
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


@pytest.mark.parametrize(
    "kinds", [frozenset[str](), frozenset({"step_applied"}), frozenset({"sibling_sealed"})]
)
@pytest.mark.parametrize("first_seq", [1, 60])
def test_every_group_is_told_as_looking_at_every_event_would(
    scan: LogScan, kinds: frozenset[str], first_seq: int
):
    everything = [
        r for r in scan.events() if r.seq >= first_seq and (not kinds or kind_of(type(r.event)) in kinds)
    ]
    for group_id in range(12):
        expected = [
            r
            for r in everything
            if _field(r, "group_id") == group_id or group_id in (_field(r, "group_ids") or ())
        ]
        selection = EventFilter(group_id=group_id, kinds=kinds, first_seq=first_seq)
        assert list(select_events(scan, selection)) == expected


def test_a_sample_stands_for_all_groups_that_were_drawn_from_it(scan: LogScan):
    reserved = [r.event for r in scan.events() if isinstance(r.event, GroupReserved)]
    sample_id = reserved[4].prompt.sample_id
    groups = [event.group_id for event in reserved if event.prompt.sample_id == sample_id]
    expected = sorted(
        {r.seq: r for group_id in groups for r in select_events(scan, EventFilter(group_id=group_id))}.items()
    )
    assert [r.seq for r in select_events(scan, EventFilter(sample_id=sample_id))] == [
        seq for seq, _ in expected
    ]
    # The reservation itself may lie before what is shown.
    later = list(select_events(scan, EventFilter(sample_id=sample_id, first_seq=expected[3][0])))
    assert later == [record for _, record in expected[3:]]
    assert list(select_events(scan, EventFilter(sample_id=sample_id, group_id=groups[0] + 1))) == []
    assert list(select_events(scan, EventFilter(sample_id="no such sample"))) == []


@pytest.mark.parametrize(
    "selection",
    [
        EventFilter(),
        EventFilter(first_seq=100, last_seq=140),
        EventFilter(group_id=3, first_seq=20),
        EventFilter(group_id=3, kinds=frozenset({"step_applied"})),
        EventFilter(sample_id="row/4", first_seq=40),
        EventFilter(sample_id="row/4", generation=1),
        EventFilter(reasons=frozenset({Reason.TIMEOUT}), last_seq=200),
    ],
)
def test_batch_after_batch_the_same_is_selected(scan: LogScan, selection: EventFilter):
    selector = Selector(selection, scan.beginning())
    pieces = [batch.slice(row, 7) for batch in scan.batches() for row in range(0, batch.num_rows, 7)]
    selected = [record for piece in pieces for record in selector.events_of(piece)]
    assert selected
    assert selected == list(select_events(scan, selection))


def test_nothing_fits_a_group_that_was_never_drawn(scan: LogScan):
    assert list(select_events(scan, EventFilter(group_id=10_000))) == []
