"""A second reader of logs, written from docs/format.md alone: nothing of kinlog is imported here.

It agrees with kinlog on what a log holds, or both refuse it: whatever one of them does that the document does not say
is seen as a difference.
"""

import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

FORMAT_VERSION = 1
FEATURES = frozenset({"compacted"})
DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


def documented(table: str) -> Iterator[list[str]]:
    """Yield the rows of a table of the document, each as its cells."""
    body = DOCUMENT.read_text(encoding="utf-8").split(f"<!-- {table} -->\n")[1].split("\n\n")[0]
    for line in body.splitlines()[2:]:
        yield line.strip("|").split("|")


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


KINDS = {names_in(kind)[0]: int(version) for kind, version, *_ in documented("events")}
NAMES = {names_in(field)[0]: frozenset(names_in(names)) for field, names in documented("names")}
OWN_COLUMNS = ("group_id", "generation", "attempt", "train_step", "weight_version", "reason")

NAME = re.compile(
    r"(segment|compacted|base)-([0-9]{8})-([0-9]{8})(?:-([0-9]{8})-([0-9]{8}))?\.(?:arrows|kinlog)"
)
HEADER = re.compile(
    rb"KINLOG1 off=([0-9a-f]{16}) len=([0-9a-f]{8}) seq=([0-9a-f]{16}) num=([0-9a-f]{8}) "
    rb"epoch=([0-9a-f]{8}) durable=([0-9a-f]{16}) prev=([0-9a-f]{8}) sum=([0-9a-f]{8})"
)
HEADER_BYTES = 142
END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class NoLogError(Exception):
    """There is nothing to read."""


class RefusedError(Exception):
    """The log is damaged: where, and the last seq before it."""

    def __init__(self, file: str, offset: int, seq: int) -> None:
        super().__init__(f"{file}, byte {offset}, after seq {seq}")
        self.place = (file, offset, seq)


class UnsupportedError(Exception):
    """The log needs a newer reader; the message names for what."""


class LogFile(NamedTuple):
    first: tuple[int, int]
    last: tuple[int, int]
    kind: str
    name: str


class Frame(NamedTuple):
    offset: int
    length: int
    seq: int
    num: int
    epoch: int
    durable: int
    previous: int
    checksum: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def last_seq(self) -> int:
        return self.seq + self.num - 1


class Segment(NamedTuple):
    name: str
    info: dict | None
    frames: list[Frame]
    stop: int
    state: str


class Log(NamedTuple):
    end: tuple[int, int, int]
    segments: list[tuple[str, list[Frame]]]
    """By name: the frames of it that are history."""
    torn: list[tuple[str, int]]
    fenced: list[tuple[str, int]]


# ---- one segment ------------------------------------------------------------------------------------------------------


def verify(data: bytes, offset: int, covered_before: bytes = b"") -> Frame | None:
    found = HEADER.search(data, offset, offset + 8192)
    if found is None:
        return None
    frame = Frame(*(int(digits, 16) for digits in found.groups()))
    if (
        frame.offset != offset
        or frame.length < HEADER_BYTES
        or frame.end > len(data)
        or found.end() > frame.end
    ):
        return None
    content = data[offset : found.end() - 8] + b"0" * 8 + data[found.end() : frame.end]
    return frame if zlib.crc32(content, zlib.crc32(covered_before)) == frame.checksum else None


def scan(name: str, data: bytes) -> Segment:
    first = HEADER.search(data, 0, 1 << 20)
    prefix = int(first[1], 16) if first else 0
    opening = verify(data, prefix, data[:prefix]) if first and prefix <= len(data) else None
    if opening is None or opening.num:
        proven = proof(data, 0, 0) or data.endswith(END_MARK)
        return Segment(name, None, [], 0, "damaged" if proven else "torn")
    info = json.loads(pa.ipc.read_schema(pa.py_buffer(data[:prefix])).metadata[b"kinlog.segment"])
    missing = set(info["required_features"]) - FEATURES
    if info["format_version"] > FORMAT_VERSION or missing:
        wanted = f"format {info['format_version']}, features {sorted(missing)}"
        raise UnsupportedError(f"{name}: {wanted}, of kinlog {info['writer_version']}")
    frames = [opening]
    while True:
        last = frames[-1]
        rest = data[last.end :]
        if rest.startswith(END_MARK) and not rest[8:].strip(b"\0"):
            return Segment(name, info, frames, last.end, "closed")
        if not rest.strip(b"\0"):
            return Segment(name, info, frames, last.end, "live")
        frame = verify(data, last.end)
        if frame is None:
            proven = proof(data, last.end, last.last_seq + 1) or data.endswith(END_MARK)
            return Segment(name, info, frames, last.end, "damaged" if proven else "torn")
        if (frame.seq, frame.previous, frame.epoch) != (last.last_seq + 1, last.checksum, info["epoch"]):
            return Segment(name, info, frames, last.end, "damaged")
        frames.append(frame)


def proof(data: bytes, stop: int, next_seq: int) -> bool:
    """Whether a frame behind ``stop`` says that the event ``next_seq`` had been durable."""
    for found in HEADER.finditer(data, stop):
        offset = int(found[1], 16)
        frame = verify(data, offset) if stop <= offset <= found.start() else None
        if frame is not None and frame.durable >= next_seq:
            return True
    return False


# ---- a log ------------------------------------------------------------------------------------------------------------


def load(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def parse_name(name: str) -> LogFile | None:
    found = NAME.fullmatch(name)
    if found is None:
        return None
    kind, *numbers = found.groups()
    one = (int(numbers[0]), int(numbers[1]))
    if kind == "compacted" and numbers[3] is not None and name.endswith(".arrows"):
        return LogFile(one, (int(numbers[2]), int(numbers[3])), kind, name)
    if numbers[2] is not None or name.endswith(".arrows") != (kind == "segment"):
        return None
    return LogFile(one if kind == "segment" else (0, 0), one, kind, name)


def current(files: Mapping[str, bytes]) -> list[LogFile]:
    """The files that make up the log, without those that others stand for."""
    parsed = sorted(file for name in files if (file := parse_name(name)))
    standing = [file for file in parsed if file.kind != "segment"]
    return [
        file
        for file in parsed
        if not any(
            other.name != file.name and other.first <= file.first and file.last <= other.last
            for other in standing
        )
    ]


def read_base(name: str, data: bytes) -> dict:
    if data[:8] != b"KINLOGB1" or struct.pack("<I", zlib.crc32(data[12:])) != data[8:12]:
        raise RefusedError(name, 0, 0)
    base = unpack(pa.CompressedInputStream(pa.BufferReader(data[12:]), "zstd").read())
    if not isinstance(base, dict):
        raise RefusedError(name, 0, 0)
    return base


def open_log(files: Mapping[str, bytes], marks: tuple[tuple[int, int, int], ...] = ()) -> Log:
    """Verify a log, given as its files by name."""
    found = current(files)
    bases = [read_base(file.name, files[file.name]) for file in found if file.kind == "base"]
    scanned = [scan(file.name, files[file.name]) for file in found if file.kind != "base"]
    if not bases and all(
        s.info is None and s.state == "torn" and never_begun(files[s.name]) for s in scanned
    ):
        raise NoLogError("no segment, or none that was begun")
    log = _chain(scanned, files, bases[0] if bases else None)
    ends = [
        (f.last_seq, f.checksum) for name, frames in log.segments if not _is_compacted(name) for f in frames
    ]
    for _, seq, checksum in marks:
        if seq and (seq, checksum) not in ends:
            raise RefusedError(log.segments[-1][0], scanned[-1].stop, log.end[1])
    return log


def never_begun(data: bytes) -> bool:
    """Whether a segment without an opening frame is what a killed creation leaves."""
    written = len(data.rstrip(b"\0"))
    return written == 0 or len(data) - written >= 32 * 1024 >= written


def _is_compacted(name: str) -> bool:
    return name.startswith("compacted-")


def _chain(scanned: list[Segment], files: Mapping[str, bytes], base: dict | None) -> Log:
    end = tuple(base["position"]) if base else (0, 0, 0)
    log_id = base["log_id"] if base else None
    history: list[tuple[str, list[Frame]]] = []
    torn: list[tuple[str, int]] = []
    fenced: list[tuple[str, int]] = []
    for place, (name, info, frames, stop, state) in enumerate(scanned):
        later = scanned[place + 1 :]
        if info is None:
            if state == "damaged" or _is_compacted(name):
                raise RefusedError(name, stop, end[1])
            if files[name]:
                torn.append((name, 0))
            continue
        log_id = log_id or info["log_id"]
        if info["log_id"] != log_id or name != _own_name(info):
            raise RefusedError(name, 0, end[1])
        newer = next((s.info for s in later if s.info and s.info["epoch"] > info["epoch"]), None)
        if "replaces" in info:
            if not _follows(info, end):
                raise RefusedError(name, 0, end[1])
            end = tuple(info["replaces"]["end"])
            if state != "closed" or frames[-1].last_seq != end[1] or not files[name].endswith(END_MARK):
                raise RefusedError(name, stop, frames[-1].last_seq)
            history.append((name, frames))
            continue
        if newer and (info["first_seq"] > newer["first_seq"] or _follows(newer, end)):
            fenced.append((name, 0))
            continue
        if not _follows(info, end):
            raise RefusedError(name, 0, end[1])
        kept = [f for f in frames if newer is None or f.last_seq < newer["first_seq"]]
        end = (info["epoch"], kept[-1].last_seq, kept[-1].checksum)
        history.append((name, kept))
        if newer and end[1] == newer["first_seq"] - 1:
            if kept[-1].end != stop or state in ("torn", "damaged"):
                fenced.append((name, kept[-1].end))
        elif state == "damaged" or (
            state == "torn" and not all(s.info is None and s.state == "torn" for s in later)
        ):
            raise RefusedError(name, stop, end[1])
        elif state == "torn":
            torn.append((name, stop))
    if not history and base is None:
        raise RefusedError(scanned[0].name, 0, 0)
    return Log(end, history, torn, fenced)


def _own_name(info: dict) -> str:
    first = f"{info['epoch']:08d}-{info['index']:08d}"
    if "replaces" not in info:
        return f"segment-{first}.arrows"
    last = info["replaces"]
    return f"compacted-{first}-{last['last_epoch']:08d}-{last['last_index']:08d}.arrows"


def _follows(info: dict, end: tuple[int, int, int]) -> bool:
    return (info["first_seq"], info["previous"]) == (end[1] + 1, end[2])


def events(files: Mapping[str, bytes], log: Log) -> Iterator[dict]:
    """Yield the rows of a verified log, with their fields by name. A kind that may be passed over has no fields."""
    for name, frames in log.segments:
        stream = pa.ipc.open_stream(pa.py_buffer(files[name][: frames[-1].end]))
        names = json.loads(stream.schema.metadata[b"kinlog.payload_fields"])
        ignorable = json.loads(stream.schema.metadata[b"kinlog.ignorable_kinds"])
        for batch in stream:
            times = batch.column("time").cast(pa.int64()).to_pylist()
            for row, time_us in zip(batch.to_pylist(), times, strict=True):
                kind, version = row["kind"], row["version"]
                place = {"seq": row["seq"], "epoch": row["epoch"], "time_us": time_us}
                named = {**place, "kind": kind, "version": version}
                if kind not in KINDS and kind in ignorable:
                    yield {**named, "fields": None}
                    continue
                if kind not in KINDS or version > KINDS[kind]:
                    raise UnsupportedError(f"{kind} version {version}")
                if row["reason"] is not None and row["reason"] not in NAMES["reason"]:
                    raise UnsupportedError(f"{kind} has reason {row['reason']}")
                own = {column: row[column] for column in OWN_COLUMNS if row[column] is not None}
                payload = dict(zip(names[kind], unpack(row["payload"]), strict=False))
                yield {**named, "fields": {**own, **payload}}


# ---- MessagePack, as far as payloads use it -----------------------------------------------------------------------------

_FIXED = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_SIZED = {
    0xC4: ("bytes", ">B"),
    0xC5: ("bytes", ">H"),
    0xC6: ("bytes", ">I"),
    0xD9: ("text", ">B"),
    0xDA: ("text", ">H"),
    0xDB: ("text", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}


def unpack(data: bytes) -> object:
    value, end = _value(data, 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes after the payload's array")
    return value


def _value(data: bytes, at: int) -> tuple[object, int]:
    code = data[at]
    at += 1
    if code < 0x80 or code >= 0xE0:
        return (code if code < 0x80 else code - 0x100), at
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], at
    if code in _FIXED:
        return struct.unpack_from(_FIXED[code], data, at)[0], at + struct.calcsize(_FIXED[code])
    if code < 0xC0:
        kind, size = ("map", code & 0x0F) if code < 0x90 else ("array", code & 0x0F)
        if code >= 0xA0:
            kind, size = "text", code & 0x1F
    else:
        kind, form = _SIZED[code]
        size = struct.unpack_from(form, data, at)[0]
        at += struct.calcsize(form)
    if kind in ("bytes", "text"):
        content = data[at : at + size]
        return (content if kind == "bytes" else content.decode()), at + size
    items = []
    for _ in range(size * 2 if kind == "map" else size):
        item, at = _value(data, at)
        items.append(item)
    return (items if kind == "array" else dict(zip(items[::2], items[1::2], strict=True))), at
