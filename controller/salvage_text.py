"""How a salvage, and what lies behind damage, is shown as text."""

from collections.abc import Iterator, Sequence

from kinlog.replay.integrity.left_out import LeftOut
from kinlog.replay.integrity.salvage import Salvage
from kinlog.replay.plain_text import (
    format_bytes,
    format_count,
    render_counts,
    render_paragraph,
    render_table,
)

__all__ = ["render_left_out", "render_salvage"]

_MAX_GROUPS = 20


def render_salvage(salvage: Salvage) -> str:
    """Return what was saved, what was not and why, and how to go on."""
    s = salvage
    parts = [f"salvage of {s.source}" + (f", run {s.run_id}" if s.run_id else "")]
    parts += [_paragraph(f"trust ended here: {fault}") for fault in s.faults]
    if s.impossible:
        parts.append(_paragraph(f"this does not fit what came before it: {s.impossible}"))
    if s.left_out:
        parts.append(render_left_out(s.left_out, s.missing))
    if s.exported:
        parts.append(_paragraph(f"as files: {format_count(len(s.exported), 'file')} in {s.target}/left_out"))
    if s.checkpoints_lost:
        parts.append(
            _paragraph(f"checkpoints whose place is not in the copy: {', '.join(s.checkpoints_lost)}")
        )
    return "\n\n".join([*parts, "\n".join(_verdict(s))])


def _verdict(s: Salvage) -> Iterator[str]:
    if not s.events:
        yield "NOTHING SAVED: no event at the log's beginning verifies"
        return
    yield (
        f"SAVED: {format_count(s.events, 'event')} in {format_count(len(s.segments), 'segment')}, up to seq {s.last_seq}, "
        f"in {s.target}"
    )
    yield f"  look at it:     kinlog log verify {s.target}"
    if s.checkpoints:
        yield f"  to go on from:  {', '.join(s.checkpoints)}: copy the directory to {s.target}/checkpoints first"


def render_left_out(parts: Sequence[LeftOut], missing: Sequence[tuple[int, int]]) -> str:
    """Return a table of what is in no history, the events in it by kind, and the groups that they name."""
    rows = [
        (
            part.segment,
            str(part.offset_bytes),
            format_bytes(part.size_bytes),
            part.why.value,
            _ranges(part.seqs) or "-",
            f"{part.events:,}",
        )
        for part in parts
    ]
    titles = ("left out: segment", "from byte", "bytes", "why", "seq that still verify", "events")
    text = [render_table(titles, rows, right=(1, 2, 5), indent=2)]
    kinds: dict[str, int] = {}
    for part in parts:
        for kind, count in part.kinds.items():
            kinds[kind] = kinds.get(kind, 0) + count
    if kinds:
        text.append(_paragraph(f"events in it: {render_counts(kinds)}"))
    groups = sorted({group for part in parts for group in part.groups})
    if groups:
        more = f" and {len(groups) - _MAX_GROUPS:,} more" if len(groups) > _MAX_GROUPS else ""
        text.append(_paragraph(f"groups in it: {', '.join(map(str, groups[:_MAX_GROUPS]))}{more}"))
    if missing:
        text.append(_paragraph(f"nothing is left to read of seq {_ranges(missing)}"))
    return "\n".join(text)


def _ranges(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in ranges)


def _paragraph(text: str) -> str:
    return render_paragraph(text, first="  ", rest="    ")
