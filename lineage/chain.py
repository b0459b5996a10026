"""Chaining a log's segments to one history, and finding what is no part of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from kinlog.lineage.base import Base
from kinlog.lineage.frame import FrameHeader
from kinlog.lineage.names import LogFile, compacted_name
from kinlog.lineage.segment import SegmentEnd, SegmentInfo, SegmentScan, segment_name
from kinlog.lineage.store import Store
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.events import Position

__all__ = ["Chain", "ScannedFile", "ScannedSegment", "StrayBytes", "chain_segments", "damage_in"]


class ScannedFile(NamedTuple):
    """A segment as it was found, before anything is known of the others."""

    path: Path
    file: LogFile
    size_bytes: int
    scan: SegmentScan
    checksum: int
    """CRC-32 of all verified bytes; 0 for a compacted segment, which is verified when it is read."""


class ScannedSegment(NamedTuple):
    """A segment that belongs to the log's surviving history."""

    path: Path
    scan: SegmentScan
    """Of a compacted segment, the opening frame only: the others are verified when they are read."""
    end: Position
    """The last frame of it that counts: what follows chains to it. A newer epoch may have begun before its last."""
    checksum: int
    """CRC-32 of its bytes up to there; 0 for a compacted segment."""

    @property
    def info(self) -> SegmentInfo:
        assert self.scan.info is not None
        return self.scan.info

    @property
    def compacted(self) -> bool:
        return self.info.replaces is not msgspec.UNSET

    @property
    def through_seq(self) -> int:
        """The last seq of it that counts."""
        return self.end.seq

    @property
    def frames(self) -> list[FrameHeader]:
        """The frames that count, the opening one first."""
        return [frame for frame in self.scan.frames if frame.last_seq <= self.end.seq]


class StrayBytes(NamedTuple):
    """Bytes that are no part of history: a torn tail, or what an older writer wrote past a take-over."""

    path: Path
    offset_bytes: int
    size_bytes: int


class Chain(NamedTuple):
    """One history."""

    segments: list[ScannedSegment]
    end: Position
    log_id: str
    run_id: str
    torn: list[StrayBytes]
    fenced: list[StrayBytes]


def chain_segments(store: Store, scanned: Sequence[ScannedFile], base: Base | None) -> Chain:
    """Chain segments, in the order of their names, to one history that begins at ``base``, or at seq 1.

    Raises
    ------
    LogDamagedError
        They are not one history, or something is wrong with one of them that no crash explains.
    """
    segments: list[ScannedSegment] = []
    torn: list[StrayBytes] = []
    fenced: list[StrayBytes] = []
    end = base.position if base is not None else Position(0, 0, 0)
    identity = (base.log_id, base.run_id) if base is not None else None
    for place, (path, file, size_bytes, scan, checksum) in enumerate(scanned):
        info, later = scan.info, scanned[place + 1 :]
        if info is None:
            # An epoch that was claimed and never begun, or a segment that a crash left without a beginning. If it had
            # held events, the next segment would not fit the chain.
            if scan.end is SegmentEnd.DAMAGED:
                raise damage_in("damaged segment", path, scan, end)
            if size_bytes:
                torn.append(StrayBytes(path, 0, size_bytes))
            continue
        identity = identity or (info.log_id, info.run_id)
        _check_identity(path, info, identity[0], end)
        newer = _next_begun_epoch(info.epoch, later)
        cut = newer.first_seq if newer is not None else None
        is_segment = file.kind == "segment"
        if is_segment and newer is not None and (info.first_seq > newer.first_seq or _follows(newer, end)):
            fenced.append(StrayBytes(path, 0, size_bytes))
            continue
        if not _follows(info, end):
            raise LogDamagedError(
                "the chain of segments is broken",
                segment=path.name,
                offset_bytes=0,
                seq=end.seq,
                expected=f"first seq {end.seq + 1} after checksum {end.checksum:08x}",
                found=f"first seq {info.first_seq} after checksum {info.previous:08x}",
            )
        if info.replaces is not msgspec.UNSET:
            end = info.replaces.end
            segments.append(ScannedSegment(path, scan, end, 0))
            continue
        last = [frame for frame in scan.frames if cut is None or frame.last_seq < cut][-1]
        end = Position(info.epoch, last.last_seq, last.checksum)
        whole = last.end == scan.end_offset
        if not whole:
            checksum = crc32(store.read(path)[: last.end])
        segments.append(ScannedSegment(path, scan, end, checksum))
        if cut is not None and end.seq == cut - 1:
            if not whole or scan.end in (SegmentEnd.TORN, SegmentEnd.DAMAGED):
                fenced.append(StrayBytes(path, last.end, size_bytes - last.end))
        elif scan.end is SegmentEnd.DAMAGED or (scan.end is SegmentEnd.TORN and not _all_torn(later)):
            raise damage_in("damaged frame", path, scan, end)
        elif scan.end is SegmentEnd.TORN:
            torn.append(StrayBytes(path, scan.end_offset, size_bytes - scan.end_offset))
    if identity is None:
        raise damage_in("no segment can be read", scanned[0].path, scanned[0].scan, end)
    return Chain(segments, end, *identity, torn, fenced)


def damage_in(what: str, path: Path, scan: SegmentScan, end: Position) -> LogDamagedError:
    """Return the error for a segment whose scan shows damage; ``end`` is where trust ended before it."""
    return LogDamagedError(
        what,
        segment=path.name,
        offset_bytes=scan.end_offset,
        seq=end.seq,
        expected=scan.expected,
        found=scan.found,
    )


def _next_begun_epoch(epoch: int, later: Sequence[ScannedFile]) -> SegmentInfo | None:
    """Return what the next epoch that began says of its first segment, ``None`` when there is none."""
    return next((s.scan.info for s in later if s.scan.info is not None and s.scan.info.epoch > epoch), None)


def _follows(info: SegmentInfo, end: Position) -> bool:
    return (info.first_seq, info.previous) == (end.seq + 1, end.checksum)


def _all_torn(scanned: Sequence[ScannedFile]) -> bool:
    return all(s.scan.info is None and s.scan.end is SegmentEnd.TORN for s in scanned)


def _check_identity(path: Path, info: SegmentInfo, log_id: str, end: Position) -> None:
    own = segment_name(info.epoch, info.index)
    if info.replaces is not msgspec.UNSET:
        own = compacted_name((info.epoch, info.index), (info.replaces.last_epoch, info.replaces.last_index))
    expected = f"log {log_id}, {path.name}"
    found = f"log {info.log_id}, {own}"
    if expected != found:
        raise LogDamagedError(
            "foreign or renamed segment",
            segment=path.name,
            offset_bytes=0,
            seq=end.seq,
            expected=expected,
            found=found,
        )
