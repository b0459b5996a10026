"""What can be saved of a damaged log: the longest beginning that verifies, hangs together and can be replayed.

Opening refuses a log that is not what was written. Salvage asks the same rules again and again: each time they name a
place where trust ends, the view of the log is cut there, until they are satisfied.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kinlog.lineage.chain import ScannedSegment
from kinlog.lineage.fold import fold
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.segment import END_OF_STREAM, SegmentEnd, segment_name
from kinlog.lineage.state import Projection
from kinlog.lineage.store import LocalStore, Store
from kinlog.replay.integrity.left_out import LeftOut, Region, Why, joined_ranges, read_region, tally
from kinlog.replay.integrity.salvage_view import SalvageSource, SalvageView, find_sources
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError, TransitionError

__all__ = ["KeptFile", "SalvagePlan", "plan_salvage"]

_AFTER_DAMAGE = frozenset({Why.DAMAGED, Why.BEHIND_GAP, Why.MISFIT})


class KeptFile(NamedTuple):
    """A file of the salvaged log."""

    name: str
    size_bytes: int
    """Of what the view has under this name."""


class SalvagePlan(NamedTuple):
    """What is kept of a log, and what is not."""

    view: SalvageView
    run_id: str
    log_id: str
    kept: tuple[KeptFile, ...]
    marks: frozenset[tuple[int, int]]
    """seq and checksum of every place that a frame of the kept log ends at."""
    last_seq: int
    """The last event that is kept; 0 when there is none."""
    projection: Projection
    """What the kept events amount to."""
    faults: tuple[LogDamagedError, ...]
    """Why the log is refused: one for each place where trust ended."""
    impossible: str
    """The first event that does not fit those before it; empty when all fit that verify."""
    left_out: tuple[LeftOut, ...]
    missing: tuple[tuple[int, int], ...]
    """Ranges of seq, past the kept events, of which nothing is left to read."""
    sources: tuple[SalvageSource, ...]
    first_seq: int
    """The first event that the kept log has: 1, unless history was dropped."""

    def region_of(self, part: LeftOut) -> Region:
        """Return the bytes of a part that is left out."""
        source = next(source for source in self.sources if source.path.name == part.segment)
        return self.view.region(source, part.offset_bytes)


def plan_salvage(directory: Path, *, store: Store | None = None) -> SalvagePlan:
    """Find what can be saved of a log. Changes nothing.

    Raises
    ------
    RunNotFoundError
        There is no log.
    LogUnsupportedError
        The log was written by a newer kinlog: that one can salvage it.
    """
    store = store or LocalStore()
    sources = find_sources(directory, store)
    if not sources:
        raise RunNotFoundError(f"{directory} holds no log: expected files named {segment_name(1, 0)}")
    identities = Counter((s.info.log_id, s.info.run_id) for s in sources if s.info is not None)
    log_id, run_id = identities.most_common(1)[0][0] if identities else ("", "")
    view = SalvageView(store, [s for s in sources if s.info is None or s.info.log_id == log_id])
    scan = _trusted(directory, view)
    last_seq, projection, impossible = _replayed(scan, view)
    kept = tuple(_kept(scan, view, last_seq)) if scan is not None and last_seq else ()
    left_out = tuple(_left_out(sources, log_id, kept, scan, view))
    return SalvagePlan(
        view=view,
        run_id=run_id,
        log_id=log_id,
        kept=kept,
        marks=frozenset(_marks(scan, last_seq)) if scan is not None else frozenset(),
        last_seq=last_seq,
        projection=projection,
        faults=tuple(view.faults),
        impossible=impossible,
        left_out=left_out,
        missing=_gaps(last_seq, [run for part in left_out if part.why in _AFTER_DAMAGE for run in part.seqs]),
        sources=tuple(sources),
        first_seq=scan.first_seq if scan is not None else 1,
    )


def _trusted(directory: Path, view: SalvageView) -> LogScan | None:
    """Cut the view until it is a log, and return that; ``None`` when nothing is left."""
    while True:
        try:
            scan = scan_log(directory, store=view)
            for _ in scan.batches():  # compacted segments are verified when they are read
                pass
        except LogDamagedError as error:
            view.cut(error)
        except RunNotFoundError:
            return None
        else:
            return scan


def _replayed(scan: LogScan | None, view: SalvageView) -> tuple[int, Projection, str]:
    """Fold what is trusted. Returns the last event to keep, the projection at it, and the event that does not fit."""
    if scan is None:
        return 0, Projection(), ""
    through = _frame_end(scan, min([scan.end.seq, *_fences(scan, view)]))
    impossible = ""
    while True:
        projection = scan.beginning()
        try:
            for record in scan.events():
                if record.seq > through:
                    break
                fold(projection, record)
        except TransitionError as error:
            # A frame is all of its events, or none.
            impossible, through = str(error), _frame_end(scan, projection.last_seq)
        else:
            return through, projection, impossible


def _fences(scan: LogScan, view: SalvageView) -> Iterator[int]:
    """Yield where take-overs cut older epochs off, as files tell that are not trusted themselves.

    Without them, what an older writer wrote past its take-over would become history.
    """
    for epoch, first_seq in view.begun:
        for segment in scan.segments:
            if segment.info.epoch < epoch and first_seq <= segment.end.seq:
                yield first_seq - 1


def _frame_end(scan: LogScan, through_seq: int) -> int:
    """Return the last seq up to ``through_seq`` that a frame ends at."""
    start = scan.first_seq - 1
    ends = (end for segment in scan.segments for end in _ends(segment) if start <= end <= through_seq)
    return max(ends, default=start)


def _ends(segment: ScannedSegment) -> list[int]:
    return [segment.end.seq] if segment.compacted else [frame.last_seq for frame in segment.frames]


def _marks(scan: LogScan, last_seq: int) -> Iterator[tuple[int, int]]:
    """Yield seq and checksum of every place of the kept log that can be compared."""
    if scan.base is not None:
        yield scan.base.position.seq, scan.base.position.checksum
    for segment in scan.segments:
        for frame in segment.frames:
            if frame.last_seq <= last_seq and not segment.compacted:
                yield frame.last_seq, frame.checksum
        if segment.compacted and segment.end.seq <= last_seq:
            yield segment.end.seq, segment.end.checksum


def _kept(scan: LogScan, view: SalvageView, last_seq: int) -> Iterator[KeptFile]:
    """Yield the files that hold the events up to ``last_seq``."""
    for name in view.names(scan.directory):
        if view.source_of(name).file.kind == "base":
            yield KeptFile(name, len(view.read(scan.directory / name)))
    for segment in scan.segments:
        frames = [frame for frame in segment.frames if frame.last_seq <= last_seq]
        if not frames or (segment.compacted and segment.end.seq > last_seq):
            return
        size_bytes = frames[-1].end
        if segment.compacted or (frames == segment.scan.frames and segment.scan.end is SegmentEnd.CLOSED):
            size_bytes = len(view.read(segment.path))
        yield KeptFile(segment.path.name, size_bytes)


def _left_out(
    sources: list[SalvageSource],
    log_id: str,
    kept: tuple[KeptFile, ...],
    scan: LogScan | None,
    view: SalvageView,
) -> Iterator[LeftOut]:
    """Tell what every file holds beyond what is kept of it."""
    sizes = {file.name: view.source_bytes(file.name, file.size_bytes) for file in kept}
    replaced = {path.name for path in scan.replaced} if scan is not None else set()
    for source in sources:
        start = sizes.get(source.own_name, 0)
        region = view.region(source, start)
        if start and not view.is_shown(source) and not _is_copy(view, source, start):
            region = region._replace(offset=0)
        if source.path.name in replaced or region.content in (b"", END_OF_STREAM.rstrip(b"\0")):
            continue
        foreign = source.info is not None and source.info.log_id != log_id
        why = Why.FOREIGN if foreign else _why(source, start, scan, view)
        yield tally(source.path.name, region, why, *read_region(region))


def _is_copy(view: SalvageView, source: SalvageSource, size_bytes: int) -> bool:
    """Whether a file begins as the one does that is shown under its name."""
    shown = view.region(view.source_of(source.own_name), 0)
    return bytes(view.region(source, 0).data[:size_bytes]) == bytes(shown.data[:size_bytes])


def _why(source: SalvageSource, kept_bytes: int, scan: LogScan | None, view: SalvageView) -> Why:
    name = source.own_name if view.is_shown(source) else source.path.name
    if any(fault.segment == name for fault in view.faults):
        return Why.DAMAGED
    if scan is not None:
        if any(stray.path.name == name for stray in scan.fenced):
            return Why.FENCED
        if any(stray.path.name == name for stray in scan.torn):
            return Why.TORN
    # What is trusted and not kept did not fit; without a fault, so did nothing after it.
    misfit = kept_bytes < view.trusted_bytes(name) if kept_bytes else not view.faults
    return Why.MISFIT if misfit else Why.BEHIND_GAP


def _gaps(after_seq: int, runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of seq after ``after_seq`` that no run covers, up to the last of them."""
    gaps = []
    for first, last in joined_ranges(runs):
        if first > after_seq + 1:
            gaps.append((after_seq + 1, first - 1))
        after_seq = max(after_seq, last)
    return tuple(gaps)
