"""A timeline as the page of it holds it: small, and quick to decode in a browser.

One deflated block, in base64: the length of a JSON head (32 bits), the head, and after it the columns of its tables. A
column is the differences between its neighbours as 64-bit integers, split into byte planes: nearly all of them are zeros.
Base64 also means that no text of the log can be taken for HTML.
"""

import base64
import json
import zlib
from array import array
from collections.abc import Iterable, Sequence
from operator import sub

from kinlog.replay.lives import Life
from kinlog.replay.rendering import JsonValue
from kinlog.replay.timeline.attempts import REASONS, Outcome
from kinlog.replay.timeline.timeline import Timeline

__all__ = ["pack_timeline"]

#: How a group ended, as a number.
_ENDS = ("alive", "applied", "dropped", "parked")

#: Staleness is a whole number of thousandths in a column.
_THOUSANDTHS = 1000


def pack_timeline(timeline: Timeline) -> str:
    """Return what ``replay/timeline/page/decode.js`` decodes. Times are microseconds since the timeline's begin, -1 for none."""
    tasks, agents = _Names(), _Names()
    tables = {
        "attempts": _attempts(timeline),
        "groups": _groups(timeline, tasks, agents),
        "steps": _steps(timeline),
        "weights": _weights(timeline),
    }
    head: dict[str, JsonValue] = {
        "run_id": timeline.summary.run_id,
        "begin_us": timeline.begin_us,
        "span": timeline.end_us - timeline.begin_us,
        "first_seq": timeline.first_seq,
        "workers": list(timeline.workers),
        "slots": list(timeline.slots),
        "details": list(timeline.details),
        "samples": [group.sample_id for group in timeline.groups],
        "tasks": tasks.listed(),
        "agents": agents.listed(),
        "reasons": [reason.value for reason in REASONS],
        "outcomes": [outcome.words for outcome in Outcome],
        "ends": list(_ENDS),
        "lives": [_life(timeline, life) for life in timeline.lives],
        "checkpoints": [
            {
                "name": c.name,
                "kind": c.kind.value if c.kind is not None else None,
                "train_step": c.train_step,
                "begin": c.begin_us - timeline.begin_us,
                "end": c.end_us - timeline.begin_us,
                "seq": c.seq,
                "position_seq": c.position_seq,
                "failed": c.failed.value if c.failed is not None else None,
                "detail": c.detail,
            }
            for c in timeline.checkpoints
        ],
        "marks": [
            {"kind": m.kind.value, "time": m.time_us - timeline.begin_us, "seq": m.seq, "text": m.text}
            for m in timeline.marks
        ],
        "tables": {
            name: {"rows": len(next(iter(table.values()))), "columns": list(table)}
            for name, table in tables.items()
        },
    }
    head_bytes = json.dumps(head, separators=(",", ":")).encode()
    columns = b"".join(_planes(column) for table in tables.values() for column in table.values())
    block = len(head_bytes).to_bytes(4, "little") + head_bytes + columns
    return base64.b64encode(zlib.compress(block, level=6)).decode()


class _Names:
    """Names in the order in which they were first seen."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, name: str) -> int:
        return self._places.setdefault(name, len(self._places))

    def listed(self) -> list[JsonValue]:
        return list(self._places)


def _planes(column: Sequence[int]) -> bytes:
    differences = array("q", column[:1])
    differences.extend(map(sub, column[1:], column))
    data = differences.tobytes()
    return b"".join(data[byte::8] for byte in range(8))


def _since(begin_us: int, times: Iterable[int]) -> "array[int]":
    return array("q", (time_us - begin_us if time_us else -1 for time_us in times))


def _attempts(timeline: Timeline) -> dict[str, "array[int]"]:
    a, begin_us = timeline.attempts, timeline.begin_us
    return {
        "group_id": a.group_id,
        "generation": a.generation,
        "attempt": a.attempt,
        "worker": a.worker,
        "slot": a.slot,
        "begin": _since(begin_us, a.begin_us),
        "end": _since(begin_us, a.end_us),
        "verdict": _since(begin_us, a.verdict_us),
        "late": _since(begin_us, a.late_us),
        "begin_seq": a.begin_seq,
        "seal_seq": a.seal_seq,
        "verdict_seq": a.verdict_seq,
        "late_seq": a.late_seq,
        "outcome": a.outcome,
        "superseded": array("q", a.superseded),
        "reason": a.reason,
        "late_reason": a.late_reason,
        "detail": a.detail,
        "tokens": a.tokens,
        "weight_version": a.weight_version,
    }


def _groups(timeline: Timeline, tasks: _Names, agents: _Names) -> dict[str, "array[int]"]:
    groups = timeline.groups
    return {
        "group_id": array("q", (g.group_id for g in groups)),
        "num_generations": array("q", (g.num_generations for g in groups)),
        "task": array("q", (tasks.place(g.task_name) for g in groups)),
        "agent": array("q", (agents.place(g.agent_name) for g in groups)),
        "end": array("q", (_ENDS.index(g.end) for g in groups)),
        "train_step": array("q", (g.train_step or 0 for g in groups)),
        "reason": array("q", (REASONS.index(g.reason) + 1 if g.reason is not None else 0 for g in groups)),
    }


def _steps(timeline: Timeline) -> dict[str, "array[int]"]:
    steps = timeline.steps
    return {
        "train_step": array("q", (s.train_step for s in steps)),
        "begin": _since(timeline.begin_us, (s.begin_us for s in steps)),
        "end": _since(timeline.begin_us, (s.end_us for s in steps)),
        "seq": array("q", (s.seq for s in steps)),
        "groups": array("q", (s.groups for s in steps)),
        "tokens": array("q", (s.tokens for s in steps)),
        "undone": array("q", (s.undone for s in steps)),
        "mean_staleness": array("q", (round(s.mean_staleness * _THOUSANDTHS) for s in steps)),
        "max_staleness": array("q", (s.max_staleness for s in steps)),
    }


def _weights(timeline: Timeline) -> dict[str, "array[int]"]:
    return {
        "weight_version": array("q", (w.weight_version for w in timeline.weights)),
        "time": _since(timeline.begin_us, (w.time_us for w in timeline.weights)),
        "seq": array("q", (w.seq for w in timeline.weights)),
    }


def _life(timeline: Timeline, life: Life) -> dict[str, JsonValue]:
    restart = next((r for r in timeline.restarts if r.epoch == life.epoch), None)
    return {
        "epoch": life.epoch,
        "process": f"{life.host}:{life.pid}" if life.host else "",
        "began_us": life.began_us,
        "begin": life.began_us - timeline.begin_us,
        "end": life.ended_us - timeline.begin_us,
        "first_seq": life.first_seq,
        "last_seq": life.last_seq,
        "how": life.end.value,
        "restored": life.restored,
        "restored_checkpoint": life.restored_checkpoint,
        "restored_step": life.restored_step,
        "tokens_reused": restart.tokens_reused if restart is not None else None,
        "tokens_regenerated": restart.tokens_regenerated if restart is not None else None,
    }
