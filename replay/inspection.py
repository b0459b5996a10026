"""What a run has on disk: where its parts are, and its log segment by segment."""

from enum import StrEnum
from pathlib import Path

import msgspec

from kinlog.lineage.names import LogFile, log_files
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan, StrayBytes
from kinlog.lineage.segment import SegmentEnd, SegmentScan, scan_segment, segment_name
from kinlog.lineage.store import LocalStore
from kinlog.schemas.errors import RunNotFoundError

__all__ = [
    "SegmentState",
    "SegmentSummary",
    "list_segments",
    "locate_run",
    "stray_content_bytes",
    "survey_segments",
]


class _LogAlone(RunDirectory):
    """A log directory of any name, without a run around it."""

    @property
    def log(self) -> Path:
        return self.path


class SegmentState(StrEnum):
    """How a segment ends, and what that means for it."""

    CLOSED = "closed"
    """Ended in order: by roll-over, or by a writer that was closed."""
    LIVE = "live"
    """The newest: being written, or left by a writer that was killed."""
    UNCLOSED = "unclosed"
    """Its writer was killed between two frames, and a newer epoch went on after it. Nothing is lost."""
    TORN = "torn"
    """A write was cut short. The next opening for writing copies the tail aside and cuts it off."""
    FENCED = "fenced"
    """Holds an older writer's bytes past a take-over: those are no part of history."""
    EMPTY = "empty"
    """An epoch that was claimed and never begun."""
    COMPACTED = "compacted"
    """Stands for several segments, compressed."""
    DROPPED = "dropped"
    """Stands for events that were dropped: what they amounted to is all that is left of them."""
    REPLACED = "replaced"
    """Is in a compacted segment as well; a crash left it behind. The next life removes it."""
    DAMAGED = "damaged"
    """Bytes that no crash explains: the log is refused."""


class SegmentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of a log."""

    name: str
    run_id: str
    log_id: str
    """What the segment says of itself; empty when not even its beginning can be read."""
    epoch: int
    index: int
    """Of the first segment that it is or stands for."""
    first_seq: int | None
    """``None`` when it holds no events that count."""
    last_seq: int | None
    frames: int
    """Frames with events that count."""
    events: int
    verified_bytes: int
    """From the file's beginning to the end of its last verified frame."""
    file_bytes: int
    """What the file takes: a live segment is preallocated with zeros."""
    state: SegmentState


def locate_run(path: Path) -> RunDirectory:
    """Find a run, given its directory or its log's. Only the log of it is certain to exist.

    Raises
    ------
    RunNotFoundError
        Neither ``path`` nor ``path/log`` holds a log.
    """
    if _log_files(path / "log"):
        return RunDirectory(path)
    if _log_files(path):
        return RunDirectory(path.parent) if path.name == "log" else _LogAlone(path)
    what = (
        "holds no kinlog run"
        if path.is_dir()
        else ("is not a directory" if path.exists() else "does not exist")
    )
    raise RunNotFoundError(
        f"{path} {what}: expected a run's directory, with segments such as log/{segment_name(1, 0)}, or its log "
        "directory itself. Check the path."
    )


def list_segments(scan: LogScan) -> tuple[SegmentSummary, ...]:
    """Summarise a verified log's segments, those that are no part of its history included."""
    history = {segment.path.name: segment for segment in scan.segments}
    fenced = {stray.path.name for stray in scan.fenced}
    replaced = {path.name for path in scan.replaced}
    newest = scan.segments[-1].path.name if scan.segments else ""
    summaries = []
    for file in _log_files(scan.directory):
        path = scan.directory / file.name
        if file.kind == "base":
            if scan.base is not None and file.name not in replaced:
                summaries.append(_dropped(path, scan))
            continue
        segment = history.get(file.name)
        # Of a compacted segment, the scan has the opening frame only.
        known = segment.scan if segment is not None and not segment.compacted else None
        scanned = known or scan_segment(scan.store.read(path))
        through_seq = segment.through_seq if segment is not None else 0
        if file.name in replaced:
            state = SegmentState.REPLACED
        elif file.name in fenced:
            state = SegmentState.FENCED
        else:
            state = _state(file, scanned, file.name == newest)
        summaries.append(_summary(path, file, path.stat().st_size, scanned, state, through_seq))
    return tuple(summaries)


def _dropped(path: Path, scan: LogScan) -> SegmentSummary:
    size_bytes = path.stat().st_size
    return SegmentSummary(
        name=path.name,
        run_id=scan.run_id,
        log_id=scan.log_id,
        epoch=0,
        index=0,
        first_seq=1,
        last_seq=scan.first_seq - 1,
        frames=0,
        events=0,
        verified_bytes=size_bytes,
        file_bytes=size_bytes,
        state=SegmentState.DROPPED,
    )


def survey_segments(directory: Path) -> tuple[SegmentSummary, ...]:
    """Summarise each segment by itself, whether or not they make one history: for logs that are refused."""
    files = [file for file in _log_files(directory) if file.kind != "base"]
    summaries = []
    for file in files:
        path = directory / file.name
        data = LocalStore().read(path)
        scanned = scan_segment(data)
        through_seq = scanned.frames[-1].last_seq if scanned.frames else 0
        state = _state(file, scanned, file == files[-1])
        summaries.append(_summary(path, file, len(data), scanned, state, through_seq))
    return tuple(summaries)


def stray_content_bytes(stray: StrayBytes) -> int:
    """Return how many bytes a repair would keep aside: preallocated zeros at the end are not content."""
    return len(bytes(LocalStore().read(stray.path)[stray.offset_bytes :]).rstrip(b"\0"))


def _log_files(directory: Path) -> list[LogFile]:
    return log_files(LocalStore().names(directory)) if directory.is_dir() else []


def _state(file: LogFile, scan: SegmentScan, newest: bool) -> SegmentState:
    if scan.end is SegmentEnd.DAMAGED:
        return SegmentState.DAMAGED
    if file.kind == "compacted":
        return SegmentState.COMPACTED if scan.end is SegmentEnd.CLOSED else SegmentState.DAMAGED
    if scan.info is None and scan.found == "an empty file":
        return SegmentState.EMPTY
    if scan.end is SegmentEnd.LIVE:
        return SegmentState.LIVE if newest else SegmentState.UNCLOSED
    return SegmentState.CLOSED if scan.end is SegmentEnd.CLOSED else SegmentState.TORN


def _summary(
    path: Path, file: LogFile, file_bytes: int, scan: SegmentScan, state: SegmentState, through_seq: int
) -> SegmentSummary:
    frames = [frame for frame in scan.frames if frame.num_events and frame.last_seq <= through_seq]
    return SegmentSummary(
        name=path.name,
        run_id=scan.info.run_id if scan.info is not None else "",
        log_id=scan.info.log_id if scan.info is not None else "",
        epoch=file.first[0],
        index=file.first[1],
        first_seq=frames[0].first_seq if frames else None,
        last_seq=frames[-1].last_seq if frames else None,
        frames=len(frames),
        events=sum(frame.num_events for frame in frames),
        verified_bytes=scan.end_offset,
        file_bytes=file_bytes,
        state=state,
    )
