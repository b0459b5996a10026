"""How the inspection commands show their results as text."""

from collections.abc import Sequence

from kinlog.controller.salvage_text import render_left_out
from kinlog.replay.audit.statistics import RunStatistics
from kinlog.replay.inspection import SegmentSummary
from kinlog.replay.integrity.verify import Verification
from kinlog.replay.lives import Life
from kinlog.replay.plain_text import (
    format_bytes,
    format_count,
    format_duration,
    format_time,
    render_counts,
    render_paragraph,
    render_sections,
    render_table,
)

__all__ = ["render_segments", "render_statistics", "render_verification"]


def render_segments(segments: Sequence[SegmentSummary]) -> str:
    """Return a table of segments, and their sum."""
    rows = [
        (
            segment.name,
            str(segment.epoch),
            "-" if segment.first_seq is None else f"{segment.first_seq}..{segment.last_seq}",
            f"{segment.events:,}",
            f"{segment.frames:,}",
            format_bytes(segment.verified_bytes),
            segment.state.value,
        )
        for segment in segments
    ]
    table = render_table(
        ("segment", "epoch", "seq", "events", "frames", "bytes", "state"), rows, right=(1, 2, 3, 4, 5)
    )
    total = ", ".join(
        (
            format_count(len(segments), "segment"),
            format_count(sum(s.events for s in segments), "event"),
            format_bytes(sum(s.verified_bytes for s in segments)),
            f"{format_bytes(sum(s.file_bytes for s in segments))} on disk",
        )
    )
    return f"{table}\n\n{total}"


def render_statistics(statistics: RunStatistics) -> str:
    """Return a run's statistics."""
    s = statistics
    exhausted = ", the dataset is exhausted" if s.dataset_exhausted else ""
    undone = f", {s.steps.rolled_back:,} more undone by restarts" if s.steps.rolled_back else ""
    sections = [
        [
            (
                "events",
                f"{s.events:,} in {format_count(s.segments, 'segment')}, {format_bytes(s.verified_bytes)}",
            ),
            *_dropped_history(s.dropped_events),
            ("draws", f"{s.draw_cursor:,}{exhausted}"),
            ("steps applied", f"{s.steps.applied:,}{undone}"),
            ("weight version", f"{s.steps.weight_version:,}"),
        ],
        [
            ("groups drawn", f"{s.groups.drawn:,}"),
            ("  = applied", f"{s.groups.applied:,}"),
            ("  + dropped", render_counts(s.groups.dropped)),
            ("  + parked", render_counts(s.groups.parked)),
            ("  + alive", ", ".join(f"{phase} {n:,}" for phase, n in s.groups.alive.items()) or "none"),
        ],
        [
            ("attempts dispatched", f"{s.siblings.dispatched:,}"),
            ("  sealed", f"{s.siblings.sealed:,}: {render_counts(s.siblings.sealed_by_validity)}"),
            ("  finished by", render_counts(s.siblings.sealed_by_finish)),
            ("  superseded", render_counts(s.siblings.superseded)),
            ("  of them sealed", render_counts(s.siblings.superseded_sealed)),
            ("  running", f"{s.siblings.running:,}"),
            ("late results rejected", render_counts(s.siblings.late_rejected)),
        ],
        [
            ("tokens sealed", f"{s.tokens.sealed:,}"),
            ("  of earlier attempts", f"{s.tokens.resumed:,}"),
            ("  superseded", f"{s.tokens.superseded:,}"),
            ("tokens late", f"{s.tokens.late:,}"),
        ],
        [
            (
                "checkpoints",
                f"{len(s.checkpoints):,} committed, failed: {render_counts(s.checkpoints_failed)}",
            ),
            *(
                (f"  {c.name}", f"step {c.train_step}, seq {c.position_seq}, {format_time(c.committed_us)}")
                for c in s.checkpoints[-4:]
            ),
        ],
        [("events by kind", ""), *((f"  {kind}", f"{n:,}") for kind, n in _largest_first(s.events_by_kind))],
    ]
    return f"run {s.run_id}\n\n{render_sections(sections, indent=2)}\n\n{_render_lives(s.lives)}"


def _dropped_history(events: int) -> list[tuple[str, str]]:
    if not events:
        return []
    return [
        (
            "  dropped",
            f"{events:,}: attempts, tokens, kinds, checkpoints and lives are counted after them only",
        )
    ]


def _largest_first(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _render_lives(lives: Sequence[Life]) -> str:
    rows = [
        (
            str(life.epoch),
            format_time(life.began_us),
            format_duration((life.ended_us - life.began_us) / 1e6),
            f"{life.first_seq}..{life.last_seq}",
            life.end.value,
            _restored_from(life),
            f"{life.host}:{life.pid}",
        )
        for life in lives
    ]
    titles = ("life", "began", "lasted", "seq", "end", "restored from", "process")
    return render_table(titles, rows, right=(0, 2, 3), indent=2)


def _restored_from(life: Life) -> str:
    if not life.restored:
        return "-"
    return f"{life.restored_checkpoint or 'the start'}, step {life.restored_step}"


def render_verification(verification: Verification) -> str:
    """Return the story of a log: segments, lives, repairs, checkpoints, what is wrong, the verdict, and what to do."""
    v = verification
    parts = [
        f"log {v.log}" + (f", run {v.run_id}" if v.run_id else ""),
        _indented(render_segments(v.segments)),
    ]
    if v.lives:
        parts.append(_render_lives(v.lives))
    parts += [
        render_paragraph(
            f"repaired by life {r.epoch}, at seq {r.seq}: {format_bytes(r.quarantined_bytes)} cut off {r.segment} from "
            f"byte {r.offset_bytes} on, kept in {r.quarantined_to}{'' if r.kept else ': NOT THERE ANY MORE'}",
            first="  ",
            rest="    ",
        )
        for r in v.repairs
    ]
    parts += [
        render_paragraph(
            f"not part of the log: {format_bytes(s.content_bytes)} of {s.segment} from byte {s.offset_bytes} on, "
            + ("an older writer's, past a take-over" if s.fenced else "left by a write that was cut short")
            + "; the next life keeps them aside",
            first="  ",
            rest="    ",
        )
        for s in v.stray
    ]
    if v.checkpoints:
        rows = [
            (
                c.name,
                "-" if c.train_step is None else str(c.train_step),
                "-" if c.position is None else str(c.position.seq),
                _yes(c.in_log),
                _yes(c.projection_equal),
                c.problem or "intact",
            )
            for c in v.checkpoints
        ]
        columns = ("checkpoint", "step", "seq", "in log", "replays to it", "files")
        parts.append(render_table(columns, rows, right=(1, 2), indent=2))
    else:
        parts.append("  no checkpoints")
    if v.left_out:
        parts.append(render_left_out(v.left_out, v.missing))
    parts += [_checked(v), _verdict(v)]
    if v.advice:
        parts.append("\n".join(["what to do", *(_step(step) for step in v.advice)]))
    return "\n\n".join(parts)


def _checked(v: Verification) -> str:
    """Say what was compared, and how much of it."""
    verified = (
        f"checked: {format_count(len(v.segments), 'file')}, {format_bytes(sum(s.verified_bytes for s in v.segments))} "
        f"verified in {format_count(sum(s.frames for s in v.segments), 'frame')}, "
        f"{format_count(v.salvageable_seq - v.dropped_events, 'event')} replayed"
    )
    committed = [c for c in v.checkpoints if c.kind is not None]
    if committed:
        files = format_count(sum(c.files for c in committed), "file")
        verified += f"; {format_count(len(committed), 'checkpoint')} with {files}"
    return verified


def _step(step: str) -> str:
    # A command may be longer than a line: it is never broken, so that it can be copied.
    sentence, colon, command = step.partition(": ")
    text = render_paragraph(f"{sentence}{colon.rstrip()}", first="  - ", rest="    ")
    return f"{text}\n      {command}" if command else text


def _verdict(v: Verification) -> str:
    if v.damage is not None:
        d = v.damage
        trust = f"every event up to seq {d.seq} verified" if d.seq else "no event verified before it"
        return (
            f"DAMAGED: {d.what}\n  in {d.segment}, at byte {d.offset_bytes}; {trust}\n"
            f"  expected {d.expected}\n  found    {d.found}"
        )
    if v.impossible:
        return f"IMPOSSIBLE: the bytes verify, but the events do not fit each other\n  {v.impossible}"
    assert v.end is not None
    sound = f"SOUND: {format_count(v.events - v.dropped_events, 'event')} verified, up to checksum {v.end.checksum:08x}"
    if v.dropped_events:
        sound += f"; the first {format_count(v.dropped_events, 'event')} were dropped, and only their sum was verified"
    if v.broken_checkpoints:
        return f"{sound}; but {format_count(len(v.broken_checkpoints), 'checkpoint')} not as promised"
    return sound


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.split("\n"))
