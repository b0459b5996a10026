"""Replay: from a verified log, or a snapshot and the log's tail, to the projection."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import zstandard

from kinlog.lineage.fold import fold
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import Projection, decode_projection, encode_projection, projection_digest
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.events import RecordedEvent

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
    """Return the projection of a log as of ``through_seq``, or of its end, going on from ``snapshot`` if given."""
    start = snapshot.last_seq if snapshot is not None else 0
    events = scan.events(after_seq=start)
    if through_seq is not None:
        events = (record for record in events if record.seq <= through_seq)
    return replay(events, snapshot)


def write_snapshot_bytes(projection: Projection) -> bytes:
    """Return the content of a snapshot file: the projection's canonical msgpack, zstd-compressed."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(encode_projection(projection))


def read_snapshot(path: Path, expected_digest: str) -> Projection:
    """Read a snapshot, and compare it with the digest that the manifest promises.

    Raises
    ------
    CheckpointError
        The file cannot be read, or holds another projection.
    """
    try:
        projection = decode_projection(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    except (OSError, zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    found = projection_digest(projection).hex()
    if found != expected_digest:
        raise CheckpointError(f"{path}: expected projection digest {expected_digest}, found {found}")
    return projection
