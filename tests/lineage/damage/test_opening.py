"""Opening a damaged log changes nothing; opening one that a crash cut short goes on from its last whole frame."""

import shutil

import pytest
from kinlog_builders import append_now, directory_bytes, numbered, reopened
from kinlog_damage_oracle import DIRECTORY, lived_log, scanned, tiny_log
from kinlog_stores import MemoryStore

from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import segment_name
from kinlog.schemas.errors import LogDamagedError


@pytest.mark.parametrize("change", ["flip", "drop", "rename", "empty"])
def test_opening_a_damaged_log_changes_no_byte_on_disk(tmp_path, change):
    directory = tmp_path / "log"
    directory.mkdir()
    for path, content in lived_log().items():
        (directory / path.name).write_bytes(content)
    victim = directory / segment_name(1, 1)
    if change == "flip":
        content = bytearray(victim.read_bytes())
        content[-200] ^= 1
        victim.write_bytes(content)
    elif change == "drop":
        victim.unlink()
    elif change == "rename":
        shutil.move(victim, directory / segment_name(1, 2))
    else:
        victim.write_bytes(b"")
    before = directory_bytes(tmp_path)
    with pytest.raises(LogDamagedError):
        reopened(directory)
    with pytest.raises(LogDamagedError):
        scan_log(directory)
    assert directory_bytes(tmp_path) == before


def test_log_that_was_cut_anywhere_can_be_opened_and_goes_on():
    tiny = tiny_log()
    (path,) = tiny
    frames = scanned(tiny).segments[0].scan.frames
    records = list(scanned(tiny).events())
    for end in range(frames[0].end, len(tiny[path]), 41):
        store = MemoryStore({path: tiny[path][:end]})
        log = reopened(DIRECTORY, store=store)
        kept = log.scan.end.seq
        append_now(log, numbered(99))
        log.close()
        again = scan_log(DIRECTORY, store=store)
        assert [r.event for r in again.events()] == [*(r.event for r in records[:kept]), numbered(99)]
        assert not again.torn
