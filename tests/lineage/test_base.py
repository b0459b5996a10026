"""A base stands for dropped history: intact, or refused."""

import zlib
from pathlib import Path

import msgspec
import pytest
import zstandard
from kinlog_builders import story
from kinlog_compaction import LOG, MortalStore, compacted, folded, framed_life, live, told_life

from kinlog.lineage.base import Base, decode_base, encode_base
from kinlog.lineage.fold import FOLD_VERSION
from kinlog.lineage.scan import scan_log
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.events import Position
from kinlog.schemas.prompts import digest_bytes


def encoded() -> bytes:
    return encode_base(
        story(3).p, log_id="l", run_id="r", position=Position(2, 9, 0xABC), fold_version=FOLD_VERSION
    )


def test_projection_and_place_come_back():
    base = decode_base(encoded())
    assert base.decode() == story(3).p
    assert base.decode() is not base.decode()
    assert (base.log_id, base.run_id, base.position) == ("l", "r", Position(2, 9, 0xABC))


def test_every_flipped_bit_is_found():
    data = bytearray(encoded())
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        with pytest.raises(ValueError, match="expected|it begins"):
            decode_base(bytes(data))
        data[place] ^= 1 << place % 8


def test_a_cut_off_base_is_refused():
    data = encoded()
    for size in (0, 1, 8, 11, 12, len(data) - 1):
        with pytest.raises(ValueError, match="expected|it begins|header"):
            decode_base(data[:size])


@pytest.fixture
def dropped() -> MortalStore:
    """A log whose first life was dropped."""
    store = MortalStore()
    live(store, told_life(1))
    live(store, framed_life)
    compacted(store, drop_through_seq=scan_log(LOG, store=store).segments[0].end.seq)
    return store


def base_path(store: MortalStore) -> Path:
    [path] = [path for path in store.files if path.name.startswith("base-")]
    return path


def test_damaged_base_is_refused_by_name(dropped):
    path = base_path(dropped)
    dropped.files[path][20] ^= 1
    with pytest.raises(LogDamagedError, match=path.name):
        scan_log(LOG, store=dropped)


def test_log_without_its_base_is_refused(dropped):
    del dropped.files[base_path(dropped)]
    with pytest.raises(LogDamagedError, match="chain"):
        scan_log(LOG, store=dropped)


def test_base_of_an_older_fold_is_gone_on_from_and_what_it_did_not_count_begins_there(dropped):
    path = base_path(dropped)
    base = decode_base(bytes(dropped.files[path]))
    fields = msgspec.msgpack.decode(base.projection)
    del fields["late_rejected"], fields["sealed_total"]
    older = msgspec.structs.replace(base, fold_version=FOLD_VERSION - 1)
    dropped.files[path] = bytearray(with_projection(older, msgspec.msgpack.encode(fields)))
    p = folded(scan_log(LOG, store=dropped))
    assert (p.late_rejected, p.sealed_total) == (0, 0)
    assert p.drawn_total == base.decode().drawn_total
    live(dropped, told_life(2))
    assert folded(scan_log(LOG, store=dropped)).drawn_total >= p.drawn_total


def with_projection(base: Base, content: bytes) -> bytes:
    """The file of a base whose projection has these bytes."""
    base = msgspec.structs.replace(base, projection=content, digest=digest_bytes(content))
    body = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(base))
    return b"KINLOGB1" + zlib.crc32(body).to_bytes(4, "little") + body
