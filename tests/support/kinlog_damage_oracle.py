"""Small logs in memory, and the judge of what is read from damaged copies of them.

A damaged copy is a correct prefix of the log, or it is refused by an error that says where and what. Nothing else.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kinlog_builders import append_now, log_settings, new_log, numbered, reopened
from kinlog_stores import MemoryStore

from kinlog.lineage import scan as scan_module
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.segment import SegmentScan, scan_segment, segment_name
from kinlog.schemas import events as e
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError

DIRECTORY = Path("/log")
SEGMENTS = [(1, 0), (1, 1), (2, 0), (3, 0)]

#: The files of a log, by path.
Files = dict[Path, bytes]


def frozen(store: MemoryStore) -> Files:
    return {path: bytes(content) for path, content in store.files.items()}


def tiny_log() -> Files:
    """One closed segment, three frames."""
    store = MemoryStore({})
    log = new_log(DIRECTORY, store=store)
    for number in (1, 2, 3):
        append_now(log, numbered(number))
    log.close()
    return frozen(store)


def lived_log() -> Files:
    """Three epochs in four segments: one that rolled over, one that was killed, one that was closed."""
    store = MemoryStore({})
    # Far below what a configuration allows: a segment of a few frames.
    log = new_log(DIRECTORY, store=store, settings=log_settings(segment_bytes=5700))
    append_now(log, numbered(1))
    append_now(log, numbered(2), numbered(3))
    append_now(log, numbered(4))
    log.close()
    killed = reopened(DIRECTORY, store=store)
    append_now(killed, numbered(5))
    append_now(killed, numbered(6))
    at_kill = frozen(store)
    killed.close()
    store = MemoryStore(at_kill)
    # Only so many of the zeros that a killed writer leaves, so that every byte can be tried.
    live = segment_path(2, 0)
    del store.files[live][len(at_kill[live].rstrip(b"\0")) + 64 :]
    last = reopened(DIRECTORY, store=store)
    append_now(last, numbered(7))
    append_now(last, numbered(8))
    last.close()
    return frozen(store)


def killed_log() -> Files:
    """The lived log as the kill of its second life left it: no end mark proves that its last frame had been durable."""
    lived = lived_log()
    return {path: content for path, content in lived.items() if path < segment_path(3, 0)}


def segment_path(epoch: int, index: int) -> Path:
    return DIRECTORY / segment_name(epoch, index)


def scanned(files: Files, marks: Sequence[e.Position] = ()) -> LogScan:
    return scan_log(DIRECTORY, store=MemoryStore(files), marks=marks)


def with_file(files: Files, path: Path, content: bytes | bytearray) -> Files:
    return {**files, path: bytes(content)}


def last_segment(files: Files) -> Path:
    return max(files)


def pieces(content: bytes) -> tuple[bytes, list[bytes], bytes]:
    """A segment as its beginning with the opening frame, its other frames, and its end."""
    frames = scan_segment(memoryview(content)).frames
    return (
        content[: frames[0].end],
        [content[f.offset : f.end] for f in frames[1:]],
        content[frames[-1].end :],
    )


def flipped_bits(content: bytes, bits: Sequence[int]) -> Iterator[tuple[int, bytearray]]:
    """Yield each bit with the content in which it is flipped: one buffer, changed back after each."""
    changed = bytearray(content)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
        yield bit, changed
        changed[bit // 8] ^= 1 << bit % 8


def damaged_copies(
    files: dict[str, bytes], chance: random.Random, count: int
) -> list[tuple[str, dict[str, bytes]]]:
    """Copies with one thing wrong each: a bit, a cut, zeros, a segment or a frame where it does not belong."""
    names = sorted(name for name in files if name.endswith((".arrows", ".kinlog")))
    copies = []
    for _ in range(count):
        name = chance.choice([name for name in names if files[name]])
        content = bytearray(files[name])
        place = chance.randrange(len(content))
        frames = scan_segment(memoryview(files[name])).frames if name.endswith(".arrows") else []
        kinds = [
            "flip",
            "flip",
            "cut",
            "zero",
            "zero tail",
            "drop",
            "copy",
            "rename",
            *["frame"] * bool(frames),
        ]
        what = chance.choice(kinds)
        changed = dict(files)
        if what == "flip":
            content[place] ^= 1 << chance.randrange(8)
            changed[name] = bytes(content)
        elif what == "cut":
            changed[name] = bytes(content[:place])
        elif what == "zero":
            size = min(chance.choice([1, 8, 512]), len(content) - place)
            content[place : place + size] = bytes(size)
            changed[name] = bytes(content)
        elif what == "zero tail":
            changed[name] = bytes(content[:place]) + bytes(len(content) - place)
        elif what == "drop":
            del changed[name]
        elif what in ("copy", "rename"):
            changed[chance.choice([*names, "segment-00000009-00000000.arrows"])] = files[name]
            if what == "rename":
                changed.pop(name, None)
        else:
            one, other = chance.choice(frames), chance.choice(frames)
            changed[name] = bytes(
                content[: one.offset] + content[other.offset : other.end] + content[one.end :]
            )
        copies.append((f"{what} {name} {place}", changed))
    return copies


class Oracle:
    """What a log holds, and what is left of each of its files, for judging damaged copies of it."""

    def __init__(self, files: Files, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        """With ``monkeypatch``, the files that a test leaves alone are scanned only once."""
        if monkeypatch is not None:
            intact = {content: scan_segment(memoryview(content)) for content in files.values()}
            monkeypatch.setattr(
                scan_module, "scan_segment", lambda data: intact.get(bytes(data)) or scan_segment(data)
            )
        self.files = files
        whole = scanned(files)
        self.end = whole.end
        self.records = list(whole.events())
        # All frames, also those of a compacted segment, of which a scan has only the first.
        self.frames = {s.path: scan_segment(memoryview(files[s.path])).frames for s in whole.segments}
        self._judged: dict[tuple[object, ...], int | None] = {}

    @property
    def mark(self) -> e.Position:
        """A place in the middle, as a checkpoint would promise it."""
        first = self.frames[min(self.files)]
        return next(e.Position(f.epoch, f.last_seq, f.checksum) for f in first if f.last_seq == 3)

    def judge(self, damaged: Files, *, marks: Sequence[e.Position] = (), decode: bool = True) -> int | None:
        """Events of a correct prefix, ``None`` for a refusal; anything else fails."""
        try:
            scan = scanned(damaged, marks)
            # What is in a compacted segment is verified when it is read.
            read = list(scan.events()) if decode else []
        except RunNotFoundError:
            assert not any(self._holds_a_frame(path, content) for path, content in damaged.items())
            return None
        except LogDamagedError as error:
            self._check_refusal(error, damaged)
            return None
        for segment in scan.segments:
            kept = segment.scan.frames[-1].end
            assert damaged[segment.path][:kept] == self.files[segment.path][:kept], (
                "damage was taken for history"
            )
        assert all(scan.end.seq >= mark.seq for mark in marks), "less than a checkpoint promises"
        if decode:
            assert read == [record for record in self.records if record.seq <= scan.end.seq]
        return scan.end.seq

    def judge_one(
        self, path: Path, content: bytes | bytearray, *, marks: Sequence[e.Position] = ()
    ) -> int | None:
        """The same for a copy in which one segment is different. What is scanned alike is judged once."""
        scan = scan_segment(memoryview(content))
        alike = self._likeness(path, scan, len(content), marks)
        if alike is None:
            return self.judge(with_file(self.files, path, content), marks=marks)
        if alike not in self._judged:
            self._judged[alike] = self.judge(with_file(self.files, path, content), marks=marks)
        return self._judged[alike]

    def _likeness(
        self, path: Path, scan: SegmentScan, size_bytes: int, marks: Sequence[e.Position]
    ) -> tuple[object, ...] | None:
        if scan.frames != self.frames[path][: len(scan.frames)]:
            return None
        return path, len(scan.frames), scan.end_offset, scan.end, scan.found, size_bytes == 0, tuple(marks)

    def durable_before(self, path: Path, byte: int) -> int:
        """Events of the frames that end before a byte of a segment, and of the segments before it."""
        return max(
            (
                f.last_seq
                for p, frames in self.frames.items()
                for f in frames
                if p < path or (f.end <= byte and p == path)
            ),
            default=0,
        )

    def _holds_a_frame(self, path: Path, content: bytes) -> bool:
        return bool(scan_segment(memoryview(content)).frames)

    def _check_refusal(self, error: LogDamagedError, damaged: Files) -> None:
        """A refusal names the file, a byte in it, the last seq before it, and two different values."""
        path = DIRECTORY / error.segment
        assert path in damaged
        assert 0 <= error.offset_bytes <= len(damaged[path])
        assert 0 <= error.seq <= self.end.seq
        assert error.expected
        assert error.found
        assert error.expected != error.found
        for named in (
            error.segment,
            f"byte {error.offset_bytes}",
            f"seq {error.seq}",
            error.expected,
            error.found,
        ):
            assert named in str(error)
