"""What a run has on disk: where its parts are, and its log segment by segment."""

from enum import StrEnum
from pathlib import Path

import msgspec

from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan, StrayBytes
from kinlog.lineage.segment import SegmentEnd, SegmentScan, parse_segment_name, scan_segment, segment_name
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
    if _segment_paths(path / "log"):
        return RunDirectory(path)
    if _segment_paths(path):
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
    newest = scan.segments[-1].path.name if scan.segments else ""
    summaries = []
    for path in _segment_paths(scan.directory):
        segment = history.get(path.name)
        scanned = segment.scan if segment is not None else scan_segment(scan.store.read(path))
        through_seq = segment.through_seq if segment is not None else 0
        state = SegmentState.FENCED if path.name in fenced else _state(scanned, path.name == newest)
        summaries.append(_summary(path, path.stat().st_size, scanned, state, through_seq))
    return tuple(summaries)


def survey_segments(directory: Path) -> tuple[SegmentSummary, ...]:
    """Summarise each segment by itself, whether or not they make one history: for logs that are refused."""
    paths = _segment_paths(directory)
    summaries = []
    for path in paths:
        data = LocalStore().read(path)
        scanned = scan_segment(data)
        through_seq = scanned.frames[-1].last_seq if scanned.frames else 0
        state = _state(scanned, path == paths[-1])
        summaries.append(_summary(path, len(data), scanned, state, through_seq))
    return tuple(summaries)


def stray_content_bytes(stray: StrayBytes) -> int:
    """Return how many bytes a repair would keep aside: preallocated zeros at the end are not content."""
    return len(bytes(LocalStore().read(stray.path)[stray.offset_bytes :]).rstrip(b"\0"))


def _segment_paths(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [directory / name for name in LocalStore().names(directory) if parse_segment_name(name)]


def _state(scan: SegmentScan, newest: bool) -> SegmentState:
    if scan.end is SegmentEnd.DAMAGED:
        return SegmentState.DAMAGED
    if scan.info is None and scan.found == "an empty file":
        return SegmentState.EMPTY
    if scan.end is SegmentEnd.LIVE:
        return SegmentState.LIVE if newest else SegmentState.UNCLOSED
    return SegmentState.CLOSED if scan.end is SegmentEnd.CLOSED else SegmentState.TORN


def _summary(
    path: Path, file_bytes: int, scan: SegmentScan, state: SegmentState, through_seq: int
) -> SegmentSummary:
    epoch, index = parse_segment_name(path.name) or (0, 0)
    frames = [frame for frame in scan.frames if frame.num_events and frame.last_seq <= through_seq]
    return SegmentSummary(
        name=path.name,
        run_id=scan.info.run_id if scan.info is not None else "",
        log_id=scan.info.log_id if scan.info is not None else "",
        epoch=epoch,
        index=index,
        first_seq=frames[0].first_seq if frames else None,
        last_seq=frames[-1].last_seq if frames else None,
        frames=len(frames),
        events=sum(frame.num_events for frame in frames),
        verified_bytes=scan.end_offset,
        file_bytes=file_bytes,
        state=state,
    )
