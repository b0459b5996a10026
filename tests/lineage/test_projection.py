"""The projection: the same bytes in every process, and snapshot plus tail is the full replay."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kinlog_builders import recorded_again, story

from kinlog.lineage.fold import fold
from kinlog.lineage.state import Projection, decode_projection, encode_projection, projection_digest

SUPPORT = str(Path(sys.modules["kinlog_builders"].__file__).parent)


def replayed(records, start: Projection | None = None) -> Projection:
    p = start or Projection()
    for record in records:
        fold(p, record)
    return p


@pytest.mark.parametrize("seed", range(4))
def test_snapshot_and_tail_is_full_replay_for_every_prefix(seed):
    told = story(seed, groups=8)
    whole = encode_projection(told.p)
    records = [recorded_again(record) for record in told.records]
    p = Projection()
    for place, record in enumerate(records):
        fold(p, record)
        snapshot = encode_projection(p)
        assert encode_projection(decode_projection(snapshot)) == snapshot
        if place % 5 == 0:
            assert encode_projection(replayed(records[place + 1 :], decode_projection(snapshot))) == whole
    assert encode_projection(p) == whole


def test_digest_is_the_same_in_another_process_with_another_hash_seed():
    code = (
        "from kinlog_builders import story; from kinlog.lineage.state import projection_digest; "
        "print(projection_digest(story(5).p).hex())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": SUPPORT, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {projection_digest(story(5).p).hex()}


def test_digest_follows_every_group():
    told = story(5)
    before = projection_digest(told.p)
    told.p.groups[min(told.p.groups)].siblings[0].attempt += 1
    assert projection_digest(told.p) != before


def test_bytes_that_are_no_projection_are_refused():
    for data in (b"", b"\x01", msgspec.msgpack.encode({"groups": 3}), encode_projection(Projection())[:-1]):
        with pytest.raises(msgspec.DecodeError):
            decode_projection(data)


@pytest.mark.parametrize("num_groups", [0, 15, 16, 0xFFFF, 0x10000])
def test_groups_encoded_one_by_one_are_the_bytes_of_the_whole(num_groups):
    p = story(3).p
    group = next(iter(p.groups.values()))
    p = msgspec.structs.replace(
        p,
        groups={
            n: msgspec.structs.replace(group, group_id=n, siblings={}) for n in reversed(range(num_groups))
        },
    )
    encoded = encode_projection(p)
    decoded = decode_projection(encoded)
    assert decoded == p
    assert msgspec.msgpack.encode(decoded) == encoded
