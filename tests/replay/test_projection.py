"""From a log, or a snapshot and the log's tail, to the same projection."""

from contextlib import suppress

import pytest
from kinlog_builders import open_ledger, story

from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import Projection, encode_projection, projection_digest
from kinlog.replay.projection import project, read_snapshot, replay, write_snapshot_bytes
from kinlog.schemas.errors import CheckpointError, TransitionError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on disk: its log, and its story."""
    directory = tmp_path_factory.mktemp("run") / "log"
    with open_ledger(directory) as ledger:
        told = story(11, ledger=ledger)
    return scan_log(directory), told


def test_projection_of_the_log_is_the_live_one(run):
    scan, told = run
    assert encode_projection(project(scan)) == encode_projection(told.p)


def test_snapshot_at_any_place_and_the_tail_give_the_whole(run):
    scan, told = run
    whole = encode_projection(told.p)
    for place in range(0, scan.end.seq + 1, 7):
        snapshot = project(scan, through_seq=place)
        assert snapshot.last_seq == place
        assert encode_projection(project(scan, snapshot)) == whole


def test_projecting_through_a_place_stops_there(run):
    scan, told = run
    assert encode_projection(project(scan, through_seq=9)) == encode_projection(replay(told.records[:9]))


def test_impossible_story_is_refused_with_its_place(run):
    _, told = run
    with pytest.raises(TransitionError, match="event seq 5 does not follow seq 3"):
        replay([*told.records[:3], *told.records[4:]])


def test_snapshot_file_comes_back_when_its_digest_matches(run, tmp_path):
    _, told = run
    path = tmp_path / "projection.zst"
    path.write_bytes(write_snapshot_bytes(told.p))
    digest = projection_digest(told.p).hex()
    assert read_snapshot(path, digest) == told.p
    with pytest.raises(CheckpointError, match=f"expected projection digest {'0' * 32}, found {digest}"):
        read_snapshot(path, "0" * 32)


def test_every_damaged_byte_of_a_snapshot_is_seen(run, tmp_path):
    _, told = run
    path = tmp_path / "projection.zst"
    content = write_snapshot_bytes(told.p)
    digest = projection_digest(told.p).hex()
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 0x40
        path.write_bytes(changed)
        with suppress(CheckpointError):
            assert read_snapshot(path, digest) == told.p  # a bit of the container that means nothing


@pytest.mark.parametrize("content", [None, b"", b"not zstd", "cut"])
def test_snapshot_that_cannot_be_read_is_a_checkpoint_error(run, tmp_path, content):
    _, told = run
    path = tmp_path / "projection.zst"
    if content is not None:
        path.write_bytes(write_snapshot_bytes(told.p)[:-20] if content == "cut" else content)
    with pytest.raises(CheckpointError, match=r"projection\.zst cannot be read"):
        read_snapshot(path, projection_digest(told.p).hex())


def test_snapshot_of_an_empty_projection_is_one_too(tmp_path):
    path = tmp_path / "projection.zst"
    path.write_bytes(write_snapshot_bytes(Projection()))
    assert read_snapshot(path, projection_digest(Projection()).hex()) == Projection()
