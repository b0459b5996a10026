"""A timeline as one HTML page that needs nothing else: no server, no network, and for its figures no JavaScript."""

import html
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from kinlog.replay.lives import Life, LifeEnd
from kinlog.replay.plain_text import format_count, format_time
from kinlog.replay.timeline.page_data import pack_timeline
from kinlog.replay.timeline.timeline import Timeline

__all__ = ["render_page"]

#: In this order: a later one uses what an earlier one defines.
_SCRIPTS = (
    "decode.js",
    "scale.js",
    "lanes.js",
    "paint.js",
    "charts.js",
    "inspect.js",
    "pointer.js",
    "main.js",
)


def render_page(timeline: Timeline) -> str:
    """Return the page. Everything that comes from the log is escaped, or inside of base64."""
    page = Template(_part("timeline.html"))
    run_id = timeline.summary.run_id
    return page.substitute(
        title=html.escape(f"kinlog timeline of run {run_id}"),
        run_id=html.escape(run_id),
        subtitle=html.escape(_subtitle(timeline)),
        style=_part("timeline.css"),
        cards=_cards(timeline),
        tables=_tables(timeline),
        data=pack_timeline(timeline),
        script="\n".join(_part(name) for name in _SCRIPTS),
    )


def _part(name: str) -> str:
    return (files("kinlog.replay.timeline") / "page" / name).read_text(encoding="utf-8")


def _subtitle(timeline: Timeline) -> str:
    s = timeline.summary
    said = [
        f"{format_time(s.first_time_us)} to {format_time(s.last_time_us)}",
        format_count(s.events, "event"),
        format_count(s.lives, "life", "lives"),
    ]
    if s.dropped_events:
        said.append(
            f"the first {format_count(s.dropped_events, 'event')} were dropped: shown from seq {timeline.first_seq:,} on"
        )
    if s.clock_went_back:
        said.append(
            f"the clock went back {format_count(s.clock_went_back, 'time')}, and is shown standing still"
        )
    return " · ".join(said)


def _cards(timeline: Timeline) -> str:
    s, a = timeline.summary, timeline.summary.attempts
    undone = f", {s.steps_undone:,} undone" if s.steps_undone else ""
    failed = f", {s.checkpoints_failed:,} failed" if s.checkpoints_failed else ""
    left = [f"{s.groups[name]:,} {name}" for name in ("dropped", "parked", "alive") if s.groups[name]]
    cards = [
        ("", a.tokens_trained, "tokens trained on"),
        ("saved", s.tokens_saved, "saved at restarts"),
        ("saved", s.tokens_resumed, "of cut off attempts, gone on from"),
        ("lost", a.tokens_redone, "tokens redone"),
        ("", s.tokens_late, "tokens late"),
        ("", a.dispatched, f"attempts, {sum(a.superseded.values()):,} superseded"),
        ("", s.groups["applied"], ", ".join([f"of {s.groups['drawn']:,} groups trained", *left])),
        ("", s.steps, f"optimizer steps{undone}"),
        ("", s.checkpoints, f"checkpoints{failed}"),
        ("", s.kills, "kills"),
    ]
    return "\n".join(
        f'<div class="card {kind}"><b>{value:,}</b> <span>{html.escape(words)}</span></div>'
        for kind, value, words in cards
    )


def _tables(timeline: Timeline) -> str:
    s = timeline.summary.attempts
    reasons = [
        (reason, f"{count:,}", f"{s.superseded_sealed.get(reason, 0):,}")
        for reason, count in sorted(s.superseded.items(), key=lambda item: (-item[1], item[0]))
    ]
    checkpoints = [
        (
            c.name,
            f"failed: {c.failed.value} {c.detail}" if c.failed is not None else c.kind or "",
            "" if c.train_step is None else f"{c.train_step:,}",
            "" if c.position_seq is None else f"{c.position_seq:,}",
            f"{(c.end_us - c.begin_us) / 1e6:.2f} s",
        )
        for c in timeline.checkpoints
    ]
    return "\n".join(
        (
            _table(
                "Lives",
                ("life", "began", "lasted", "end", "restored from", "tokens saved", "redone"),
                [_life(timeline, life) for life in timeline.lives],
                right=(2, 5, 6),
            ),
            _table(
                "Why attempts were superseded",
                ("reason", "attempts", "of them sealed"),
                reasons,
                right=(1, 2),
            ),
            _table(
                "Checkpoints", ("name", "kind", "step", "up to seq", "took"), checkpoints, right=(2, 3, 4)
            ),
        )
    )


def _life(timeline: Timeline, life: Life) -> tuple[str, ...]:
    restart = next((r for r in timeline.restarts if r.epoch == life.epoch), None)
    return (
        str(life.epoch),
        format_time(life.began_us),
        f"{(life.ended_us - life.began_us) / 1e6:,.1f} s",
        life.end.value,
        f"{life.restored_checkpoint or 'the start'}, step {life.restored_step}" if life.restored else "",
        f"{restart.tokens_reused:,}" if restart is not None else "",
        f"{restart.tokens_regenerated:,}" if restart is not None else "",
    )


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> str:
    if not rows:
        return ""

    def cell(tag: str, place: int, text: str) -> str:
        kinds = ["number"] * (place in right) + ["killed"] * (text == LifeEnd.KILLED.value)
        named = f' class="{" ".join(kinds)}"' if kinds else ""
        return f"<{tag}{named}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", place, name) for place, name in enumerate(columns))
    body = "\n".join(
        f"<tr>{''.join(cell('td', place, text) for place, text in enumerate(row))}</tr>" for row in rows
    )
    return f"<div><h2>{html.escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
