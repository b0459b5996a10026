"""Reading by columns: what is chosen is what looking at every event would choose, in live and in compacted segments."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from kinlog_builders import append_now, new_log, numbered, reopened, story

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.reading import Choice, read_events
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.store import LocalStore
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.events import RecordedEvent


@pytest.fixture(scope="module", params=["live", "compacted"])
def scan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LogScan:
    """A log whose frames have one to five events."""
    directory = tmp_path_factory.mktemp("reading") / "log"
    opened = new_log(directory)
    events = story(3).events
    while events:
        count = 1 + len(events) % 5
        append_now(opened, *events[:count])
        events = events[count:]
    opened.close()
    if request.param == "compacted":
        compact_log(LocalStore(), directory, epoch=_new_epoch(directory), checkpoints=())
    return scan_log(directory)


def _new_epoch(directory: Path) -> int:
    """Begin another life: the newest segment is never compacted."""
    opened = reopened(directory)
    append_now(opened, numbered(1))
    opened.close()
    return opened.writer.epoch


def _of_group(batch: pa.RecordBatch) -> pa.Array:
    assert batch.schema.names == ["kind", "group_id"]
    return pc.fill_null(pc.equal(batch.column("group_id"), 3), fill_value=False)


def _records(batches) -> list[RecordedEvent]:
    return [record for batch in batches for record in read_events(batch)]


@pytest.mark.parametrize("newest_first", [False, True])
def test_chosen_events_are_those_that_fit(scan: LogScan, newest_first: bool):
    expected = [record for record in scan.events() if getattr(record.event, "group_id", None) == 3]
    assert len(expected) > 5
    # In the order of the log, whatever order the choice names its columns in.
    choice = Choice(("group_id", "kind"), _of_group)
    batches = list(scan.batches(newest_first=newest_first, choice=choice))
    assert _records(reversed(batches) if newest_first else batches) == expected


def test_every_row_of_the_range_is_looked_at_once_and_no_other(scan: LogScan):
    everything = [record.seq for record in scan.events()]
    for after, through in ((0, None), (7, 30), (1, 2), (29, 30), (30, 30), (0, 10_000)):
        seen: list[int] = []

        def rows(batch: pa.RecordBatch, seen: list[int] = seen) -> pa.Array:
            seen += batch.column("seq").to_pylist()
            return pc.equal(pc.bit_wise_and(batch.column("seq"), 1), 0)

        found = _records(scan.batches(after, through_seq=through, choice=Choice(("seq",), rows)))
        assert seen == [seq for seq in everything if after < seq <= (through or 10_000)]
        assert [record.seq for record in found] == [seq for seq in seen if seq % 2 == 0]


def test_a_range_ends_where_it_says_also_in_the_middle_of_a_frame(scan: LogScan):
    everything = [record.seq for record in scan.events()]
    for after, through in ((0, 3), (4, 17), (20, 20), (11, 12)):
        for newest_first in (False, True):
            batches = list(scan.batches(after, through_seq=through, newest_first=newest_first))
            found = _records(reversed(batches) if newest_first else batches)
            assert [record.seq for record in found] == [seq for seq in everything if after < seq <= through]


def test_damage_in_a_column_that_is_not_looked_at_is_refused(scan: LogScan, tmp_path: Path):
    directory = tmp_path / "log"
    directory.mkdir()
    for path in scan.directory.glob("*.arrows"):
        (directory / path.name).write_bytes(path.read_bytes())
    damaged = scan_log(directory)
    segment = damaged.segments[0].path
    data = bytearray(segment.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    segment.write_bytes(data)
    with pytest.raises(LogDamagedError):
        list(damaged.batches(choice=Choice(("kind", "group_id"), _of_group)))
