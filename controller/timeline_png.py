"""A timeline as a picture for a report. It needs Pillow: the extra ``plot``.

It is drawn twice as large and then reduced, so that thousands of attempts become shades and not noise.
"""

import io
from collections import Counter
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from kinlog.replay.lives import LifeEnd
from kinlog.replay.plain_text import format_count, format_time
from kinlog.replay.timeline.attempts import UNKNOWN_TOKENS, Outcome
from kinlog.replay.timeline.time_scale import TimeScale, tick_step_us
from kinlog.replay.timeline.timeline import Timeline

__all__ = ["draw_picture"]

_WIDTH, _HEIGHT = 1600, 1000
_LARGER = 2

_LEFT, _RIGHT = 176, 32
_TITLE, _LEGEND = 30, 116
_AXIS, _LIVES, _STEPS, _CHECKPOINTS, _LANES = 182, 194, 228, 262, 300
_RATE, _STALENESS, _BOTTOM = 742, 870, 966
_SMALL, _TEXT, _LARGE = 17, 20, 34

_RATE_BINS = 240

_INK, _QUIET, _LINE, _STRIPE = "#1b2230", "#5d687a", "#d5dae3", "#f3f5f8"
_LIFE, _KILL, _GAP, _STEP, _UNDONE = "#dce5f8", "#c81e3a", "#e9ecf2", "#4b5b7a", "#c3cad6"
_CHECKPOINT, _STALE = "#2f9e44", "#7048e8"
_COLOURS = {
    Outcome.TRAINED: "#5b9aa8",
    Outcome.WAITING: "#6fa8ff",
    Outcome.RUNNING: "#f0b429",
    Outcome.SUPERSEDED: "#e8590c",
    Outcome.REDONE: "#d6246e",
    Outcome.LATE: "#8250df",
    Outcome.DROPPED: "#8c95a4",
    Outcome.PARKED: "#9a6b3f",
}
#: What is rare is drawn last: nothing that was redone hides behind what went well.
_DRAWN_FIRST_TO_LAST = (
    Outcome.TRAINED,
    Outcome.WAITING,
    Outcome.DROPPED,
    Outcome.PARKED,
    Outcome.RUNNING,
    Outcome.LATE,
    Outcome.SUPERSEDED,
    Outcome.REDONE,
)


def draw_picture(timeline: Timeline) -> bytes:
    """Return a PNG file: the whole run, with lanes by worker."""
    return _Picture(timeline).png()


class _Picture:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._scale = TimeScale(timeline.lives, timeline.begin_us, timeline.end_us)
        size = (_WIDTH * _LARGER, _HEIGHT * _LARGER)
        self._image = Image.new("RGB", size, "white")
        self._draw = ImageDraw.Draw(self._image)
        self._fonts = {size: ImageFont.load_default(size * _LARGER) for size in (_SMALL, _TEXT, _LARGE)}

    def png(self) -> bytes:
        self._heading()
        self._legend()
        self._lanes()
        self._gaps()
        self._axis()
        self._lives()
        self._steps()
        self._checkpoints()
        self._throughput()
        self._staleness()
        file = io.BytesIO()
        self._image.reduce(_LARGER).save(file, format="PNG", optimize=True)
        return file.getvalue()

    # ---- drawing, in the units of the reduced picture -----------------------------------------------------------------

    def _x(self, time_us: int) -> float:
        return _LEFT + self._scale(time_us) * (_WIDTH - _LEFT - _RIGHT)

    def _box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        box = [round(value * _LARGER) for value in (left, top, right, bottom)]
        self._draw.rectangle((box[0], box[1], max(box[0], box[2] - 1), max(box[1], box[3] - 1)), fill=colour)

    def _line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        larger = [(x * _LARGER, y * _LARGER) for x, y in points]
        self._draw.line(larger, fill=colour, width=round(width * _LARGER), joint="curve")

    def _words(
        self, x: float, y: float, text: str, colour: str = _INK, size: int = _TEXT, anchor: str = "lm"
    ) -> None:
        self._draw.text((x * _LARGER, y * _LARGER), text, fill=colour, font=self._fonts[size], anchor=anchor)

    def _width(self, text: str, size: int) -> float:
        return self._draw.textlength(text, font=self._fonts[size]) / _LARGER

    def _fitted(self, text: str, width: float, size: int) -> str:
        if self._width(text, size) <= width:
            return text
        while text and self._width(f"{text}...", size) > width:
            text = text[:-1]
        return f"{text}..." if len(text) > 2 else ""

    # ---- from top to bottom ---------------------------------------------------------------------------------------------

    def _heading(self) -> None:
        s, a = self._timeline.summary, self._timeline.summary.attempts
        self._words(40, _TITLE + 8, f"run {s.run_id}", size=_LARGE)
        seen = f", shown from seq {self._timeline.first_seq:,} on" if s.dropped_events else ""
        began = f"{format_time(s.first_time_us)}, {format_count(s.events, 'event')}{seen}"
        self._words(_WIDTH - _RIGHT, _TITLE + 8, began, _QUIET, anchor="rm")
        facts = (
            f"{a.tokens_trained:,} tokens trained on",
            f"{s.tokens_saved:,} saved at restarts",
            f"{a.tokens_redone:,} redone",
            f"{s.groups['applied']:,} of {s.groups['drawn']:,} groups in {format_count(s.steps, 'step')}",
            format_count(s.checkpoints, "checkpoint"),
            format_count(s.kills, "kill"),
        )
        self._words(40, _TITLE + 50, "    ".join(facts), _QUIET)

    def _legend(self) -> None:
        x, counts = 40.0, self._timeline.summary.attempts.outcomes
        for outcome in Outcome:
            count = counts.get(outcome.name.lower(), 0)
            if count:
                text = f"{outcome.words}  {count:,}"
                self._box(x, _LEGEND - 8, x + 16, _LEGEND + 8, _COLOURS[outcome])
                self._words(x + 26, _LEGEND, text, size=_SMALL)
                x += 26 + self._width(text, _SMALL) + 34

    def _axis(self) -> None:
        t = self._timeline
        step = tick_step_us(self._scale.length_us, 14)
        self._words(40, _AXIS - 14, "elapsed", _QUIET, _SMALL)
        self._line([(_LEFT, _AXIS), (_WIDTH - _RIGHT, _AXIS)], _LINE)
        free = 0.0
        for time_us in range(t.begin_us, t.end_us + 1, step):
            x = self._x(time_us)
            if any(gap.begin_us < time_us < gap.end_us for gap in self._scale.gaps) or x < free:
                continue
            text = _elapsed(time_us - t.begin_us)
            self._line([(x, _AXIS - 6), (x, _AXIS)], _QUIET)
            self._words(x + 5, _AXIS - 14, text, _QUIET, _SMALL)
            free = x + self._width(text, _SMALL) + 20

    def _gaps(self) -> None:
        for gap in self._scale.gaps:
            left, right = self._x(gap.begin_us), self._x(gap.end_us)
            self._box(left, _AXIS, right, _BOTTOM, _GAP)
            text = f"{_lasting(gap.end_us - gap.begin_us)} down"
            # Written from bottom to top: a strip is narrow.
            strip = Image.new("RGB", (300 * _LARGER, 24 * _LARGER), _GAP)
            ImageDraw.Draw(strip).text(
                (150 * _LARGER, 12 * _LARGER), text, fill=_QUIET, font=self._fonts[_SMALL], anchor="mm"
            )
            if right - left >= 24:
                x, y = (left + right) / 2 - 12, (_LANES + _RATE) / 2 - 150
                self._image.paste(strip.rotate(90, expand=True), (round(x * _LARGER), round(y * _LARGER)))

    def _lives(self) -> None:
        self._words(40, _LIVES + 13, "lives", _QUIET, _SMALL)
        for life in self._timeline.lives:
            left, right = self._x(life.began_us), self._x(life.ended_us)
            self._box(left, _LIVES, max(right, left + 1), _LIVES + 26, _LIFE)
            room = right - left - 20
            if life.end is LifeEnd.KILLED:
                self._line([(right, _AXIS), (right, _BOTTOM)], _KILL, 2)
                self._words(right - 7, _LIVES + 13, "killed", _KILL, _SMALL, "rm")
                room -= self._width("killed", _SMALL) + 12
            origin = f", from {life.restored_checkpoint or 'the start'}" if life.restored else ""
            text = self._fitted(f"life {life.epoch}{origin}", room, _SMALL)
            self._words(left + 8, _LIVES + 13, text, size=_SMALL)

    def _steps(self) -> None:
        self._words(40, _STEPS + 12, "steps", _QUIET, _SMALL)
        for step in self._timeline.steps:
            left, right = self._x(step.begin_us), self._x(step.end_us)
            right = max(right, left + 1.5)
            self._box(left, _STEPS, right, _STEPS + 24, _UNDONE if step.undone else _STEP)
            text = str(step.train_step)
            if self._width(text, _SMALL) < right - left - 4:
                self._words(
                    (left + right) / 2, _STEPS + 12, text, _INK if step.undone else "white", _SMALL, "mm"
                )

    def _checkpoints(self) -> None:
        self._words(40, _CHECKPOINTS + 12, "checkpoints", _QUIET, _SMALL)
        checkpoints = self._timeline.checkpoints
        for place, checkpoint in enumerate(checkpoints):
            left, right = self._x(checkpoint.begin_us), self._x(checkpoint.end_us)
            right = max(right, left + 2)
            colour = _CHECKPOINT if checkpoint.failed is None else _KILL
            self._box(left, _CHECKPOINTS + 2, right, _CHECKPOINTS + 22, colour)
            following = checkpoints[place + 1 : place + 2]
            end = self._x(following[0].begin_us) if following else _WIDTH - _RIGHT
            lasting = _lasting(checkpoint.end_us - checkpoint.begin_us)
            for text in (f"{checkpoint.name}  {lasting}", checkpoint.name):
                if self._width(text, _SMALL) < end - right - 12:
                    self._words(right + 6, _CHECKPOINTS + 12, text, _QUIET, _SMALL)
                    break

    def _lanes(self) -> None:
        t, a = self._timeline, self._timeline.attempts
        bottom = _RATE - 26
        rows = sum(t.slots)
        space = min(10.0, (bottom - _LANES) * 0.12 / max(1, len(t.slots)))
        row = min(48.0, (bottom - _LANES - space * len(t.slots)) / max(1, rows))
        tops, top, free = [], float(_LANES), 0.0
        for worker, slots in enumerate(t.slots):
            tops.append(top)
            end = top + slots * row
            self._box(_LEFT, top, _WIDTH - _RIGHT, end, _STRIPE)
            if (top + end) / 2 >= free:
                name = self._fitted(t.workers[worker] or "worker not known", _LEFT - 56, _SMALL)
                self._words(40, (top + end) / 2, name, size=_SMALL)
                free = (top + end) / 2 + _SMALL + 2
            top = end + space
        places: dict[int, list[int]] = {}
        for place, outcome in enumerate(a.outcome):
            places.setdefault(outcome, []).append(place)
        thin = row * 0.12 if row >= 4 else 0.0
        for outcome in _DRAWN_FIRST_TO_LAST:
            for place in places.get(outcome, ()):
                y = tops[a.worker[place]] + a.slot[place] * row
                left, right = self._x(a.begin_us[place]), self._x(a.end_us[place])
                self._box(left, y, max(left + 0.5, right - 0.5), y + row - thin, _COLOURS[outcome])

    def _throughput(self) -> None:
        t, a = self._timeline, self._timeline.attempts
        kept: Counter[int] = Counter()
        redone: Counter[int] = Counter()
        for place in range(len(a)):
            if a.seal_seq[place] >= t.first_seq and a.tokens[place] != UNKNOWN_TOKENS:
                at = min(int(self._scale(a.end_us[place]) * _RATE_BINS), _RATE_BINS - 1)
                (redone if a.outcome[place] == Outcome.REDONE else kept)[at] += a.tokens[place]
        most = max((kept[at] + redone[at] for at in range(_RATE_BINS)), default=0)
        seconds = self._scale.length_us / 1e6 / _RATE_BINS
        self._chart("tokens / s", _RATE, f"{most / seconds:,.0f}")
        width, height = (_WIDTH - _LEFT - _RIGHT) / _RATE_BINS, 96
        for at in range(_RATE_BINS):
            base, x = _RATE + 100.0, _LEFT + at * width
            for count, colour in (
                (kept[at], _COLOURS[Outcome.TRAINED]),
                (redone[at], _COLOURS[Outcome.REDONE]),
            ):
                if count:
                    high = height * count / most
                    self._box(x, base - high, x + width - 1, base, colour)
                    base -= high

    def _staleness(self) -> None:
        steps = [step for step in self._timeline.steps if not step.undone]
        most = max((step.max_staleness for step in steps), default=0) or 1
        self._chart("staleness", _STALENESS, str(most))
        points = [(self._x(step.end_us), _STALENESS + 96 - 88 * step.mean_staleness / most) for step in steps]
        if len(points) > 1:
            self._line(points, _STALE, 2)
        for x, y in points:
            self._box(x - 2.5, y - 2.5, x + 2.5, y + 2.5, _STALE)

    def _chart(self, title: str, top: float, most: str) -> None:
        self._words(40, top + 50, title, _QUIET, _SMALL)
        self._words(_LEFT - 10, top + 8, most, _QUIET, _SMALL, "rm")
        self._words(_LEFT - 10, top + 96, "0", _QUIET, _SMALL, "rm")
        self._line([(_LEFT, top + 100), (_WIDTH - _RIGHT, top + 100)], _LINE)


def _elapsed(time_us: int) -> str:
    seconds = time_us / 1e6
    if seconds < 60:
        return f"{seconds:g} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _lasting(duration_us: int) -> str:
    seconds = duration_us / 1e6
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
