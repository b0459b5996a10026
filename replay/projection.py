"""Replay: from a verified log, or a snapshot and the log's tail, to the projection."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import zstandard

from kinlog.lineage.fold import fold
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.replay.settled import replay_newest_first
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.events import RecordedEvent
from kinlog.schemas.prompts import digest_bytes

__all__ = ["SNAPSHOT_NAME", "replay", "project", "write_snapshot_bytes", "read_snapshot"]

SNAPSHOT_NAME = "projection.zst"


def replay(events: Iterable[RecordedEvent], projection: Projection | None = None) -> Projection:
    """Fold events into ``projection`` (in place), or into an empty one.

    Raises
    ------
    TransitionError
        The events tell an impossible story.
    """
    projection = Projection() if projection is None else projection
    for record in events:
        fold(projection, record)
    return projection


def project(
    scan: LogScan, snapshot: Projection | None = None, *, through_seq: int | None = None
) -> Projection:
    """Return the projection of a log as of ``through_seq``, or of its end, going on from ``snapshot`` (in place) if given.

    Raises
    ------
    TransitionError
        The events tell an impossible story, as far as that is looked at: see ``kinlog.replay.settled``.
    LogUnsupportedError
        An event was written by a newer kinlog.
    """
    start = scan.beginning() if snapshot is None else snapshot
    batches = scan.batches(start.last_seq, through_seq=through_seq, newest_first=True)
    return replay_newest_first(batches, start)


def write_snapshot_bytes(projection: Projection) -> bytes:
    """Return the content of a snapshot file: the projection's canonical msgpack, zstd-compressed."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(encode_projection(projection))


def read_snapshot(path: Path, expected_digest: str) -> Projection:
    """Read a snapshot, and compare it with the digest that the manifest promises.

    The digest is that of the bytes as they were written: a snapshot of an older kinlog lacks the fields that came later,
    and takes their defaults.

    Raises
    ------
    CheckpointError
        The file cannot be read, or holds another projection.
    """
    try:
        content = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        projection = decode_projection(content)
    except (OSError, zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    found = digest_bytes(content).hex()
    if found != expected_digest:
        raise CheckpointError(f"{path}: expected projection digest {expected_digest}, found {found}")
    return projection
