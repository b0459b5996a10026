"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open: the Chrome JSON trace event format.

The trainer and the controller are processes, and so is each worker; what a worker ran at once are its threads, because
slices of one thread may not overlap. An arrow leads from an attempt that was given up to the one in its place.
"""

import json
from collections.abc import Iterator
from itertools import chain

from kinlog.replay.lives import Life, LifeEnd
from kinlog.replay.rendering import JsonValue
from kinlog.replay.timeline.attempts import UNKNOWN_TOKENS
from kinlog.replay.timeline.timeline import Timeline

__all__ = ["trace_events", "render_trace"]

_CONTROLLER, _TRAINER, _FIRST_WORKER = 1, 2, 10
_LIVES, _MARKS, _CHECKPOINTS = 1, 2, 3
_STEPS, _WEIGHTS = 1, 2

#: Tokens a second are counted over this many equal parts of the run.
_RATE_BINS = 600

_Event = dict[str, JsonValue]


def render_trace(timeline: Timeline) -> str:
    """Return the trace, as JSON with an event a line."""
    s = timeline.summary
    other = {"run": s.run_id, "first_seq": str(timeline.first_seq), "began_us": str(timeline.begin_us)}
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace_events(timeline))
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n{events}\n]}}\n'


def trace_events(timeline: Timeline) -> Iterator[_Event]:
    """Yield the trace's events. Times are microseconds since the timeline's begin."""
    return chain(
        _names(timeline),
        _lives(timeline),
        _moments(timeline),
        _steps(timeline),
        _attempts(timeline),
        _arrows(timeline),
        _counters(timeline),
    )


def _names(timeline: Timeline) -> Iterator[_Event]:
    threads = {
        (_CONTROLLER, _LIVES): "lives",
        (_CONTROLLER, _MARKS): "what happened",
        (_CONTROLLER, _CHECKPOINTS): "checkpoints",
        (_TRAINER, _STEPS): "optimizer steps",
        (_TRAINER, _WEIGHTS): "weights",
    }
    processes = {_CONTROLLER: "controller", _TRAINER: "trainer"}
    for worker, (name, slots) in enumerate(zip(timeline.workers, timeline.slots, strict=True)):
        processes[_FIRST_WORKER + worker] = name or "worker not known"
        for slot in range(slots):
            threads[_FIRST_WORKER + worker, slot + 1] = f"attempt {slot + 1}"
    for place, (process, name) in enumerate(processes.items()):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": process,
            "tid": 0,
            "args": {"sort_index": place},
        }
    for (process, thread), name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _lives(timeline: Timeline) -> Iterator[_Event]:
    for life in timeline.lives:
        begin, end = life.began_us - timeline.begin_us, life.ended_us - timeline.begin_us
        yield _slice(f"life {life.epoch}", "life", (_CONTROLLER, _LIVES), begin, end, _life_facts(life))
        if life.end is LifeEnd.KILLED:
            facts: _Event = {"epoch": life.epoch, "seq": life.last_seq}
            yield _instant("killed", "kill", (_CONTROLLER, _LIVES), end, facts, scope="g")


def _life_facts(life: Life) -> _Event:
    return {
        "process": f"{life.host}:{life.pid}",
        "end": life.end.value,
        "first_seq": life.first_seq,
        "last_seq": life.last_seq,
        "restored_checkpoint": life.restored_checkpoint,
        "restored_step": life.restored_step,
    }


def _moments(timeline: Timeline) -> Iterator[_Event]:
    for mark in timeline.marks:
        time = mark.time_us - timeline.begin_us
        facts: _Event = {"seq": mark.seq, "text": mark.text}
        yield _instant(mark.kind.value, "mark", (_CONTROLLER, _MARKS), time, facts)
    for checkpoint in timeline.checkpoints:
        facts = {
            "seq": checkpoint.seq,
            "position_seq": checkpoint.position_seq,
            "train_step": checkpoint.train_step,
            "kind": checkpoint.kind.value if checkpoint.kind is not None else None,
            "failed": checkpoint.failed.value if checkpoint.failed is not None else None,
            "detail": checkpoint.detail,
        }
        begin, end = checkpoint.begin_us - timeline.begin_us, checkpoint.end_us - timeline.begin_us
        yield _slice(checkpoint.name, "checkpoint", (_CONTROLLER, _CHECKPOINTS), begin, end, facts)


def _steps(timeline: Timeline) -> Iterator[_Event]:
    for step in timeline.steps:
        name = f"step {step.train_step}{' (undone)' if step.undone else ''}"
        begin, end = step.begin_us - timeline.begin_us, step.end_us - timeline.begin_us
        facts: _Event = {
            "seq": step.seq,
            "groups": step.groups,
            "tokens": step.tokens,
            "mean_staleness": step.mean_staleness,
            "max_staleness": step.max_staleness,
        }
        yield _slice(name, "step", (_TRAINER, _STEPS), begin, end, facts)
    for weights in timeline.weights:
        time = weights.time_us - timeline.begin_us
        yield _instant(
            f"weights {weights.weight_version}", "weights", (_TRAINER, _WEIGHTS), time, {"seq": weights.seq}
        )


def _attempts(timeline: Timeline) -> Iterator[_Event]:
    a = timeline.attempts
    samples = {group.group_id: group.sample_id for group in timeline.groups}
    for place in range(len(a)):
        where = _thread_of(timeline, place)
        begin, end = a.begin_us[place] - timeline.begin_us, a.end_us[place] - timeline.begin_us
        outcome, reason = a.outcome_of(place), a.reason_of(place)
        facts: _Event = {
            "outcome": outcome.words,
            "group": a.group_id[place],
            "sibling": a.generation[place],
            "attempt": a.attempt[place],
            "sample": samples.get(a.group_id[place], ""),
            "tokens": a.tokens[place] if a.tokens[place] != UNKNOWN_TOKENS else None,
            "weight_version": a.weight_version[place],
            "reason": reason.value if reason is not None else None,
            "detail": timeline.details[a.detail[place]],
            "dispatched_seq": a.begin_seq[place] or None,
        }
        name = f"{a.group_id[place]}/{a.generation[place]} a{a.attempt[place]}"
        yield _slice(name, outcome.name.lower(), where, begin, end, facts)
        if a.seal_seq[place]:
            yield _instant("sealed", "seal", where, end, {"seq": a.seal_seq[place]})
        if a.superseded[place] and reason is not None:
            verdict = a.verdict_us[place] - timeline.begin_us
            said: _Event = {"seq": a.verdict_seq[place], "reason": reason.value}
            yield _instant(f"superseded: {reason.value}", "supersede", where, verdict, said)


def _arrows(timeline: Timeline) -> Iterator[_Event]:
    a = timeline.attempts
    before: dict[tuple[int, int], int] = {}
    for place in range(len(a)):
        sibling = (a.group_id[place], a.generation[place])
        given_up, before[sibling] = before.get(sibling), place
        if given_up is None or not a.superseded[given_up]:
            continue
        for end, at, time_us in (
            ("s", given_up, _last_moment(timeline, given_up)),
            ("f", place, a.begin_us[place]),
        ):
            process, thread = _thread_of(timeline, at)
            yield {
                "ph": end,
                "bp": "e",
                "id": place,
                "name": "redone",
                "cat": "redone",
                "pid": process,
                "tid": thread,
                "ts": time_us - timeline.begin_us,
            }


def _last_moment(timeline: Timeline, place: int) -> int:
    """An arrow begins inside of its slice, or nowhere."""
    a = timeline.attempts
    return max(a.begin_us[place], a.end_us[place] - 1)


def _counters(timeline: Timeline) -> Iterator[_Event]:
    for time_us, alive in timeline.live_groups:
        yield _counter("live groups", time_us - timeline.begin_us, alive)
    a, span_us = timeline.attempts, max(1, timeline.end_us - timeline.begin_us)
    tokens = [0] * _RATE_BINS
    for place in range(len(a)):
        if a.seal_seq[place] >= timeline.first_seq:
            at = (a.end_us[place] - timeline.begin_us) * _RATE_BINS // span_us
            tokens[min(at, _RATE_BINS - 1)] += a.tokens[place]
    for place, count in enumerate(tokens):
        yield _counter(
            "tokens/s", place * span_us // _RATE_BINS, round(count * 1e6 * _RATE_BINS / span_us, 1)
        )


def _thread_of(timeline: Timeline, place: int) -> tuple[int, int]:
    a = timeline.attempts
    return _FIRST_WORKER + a.worker[place], a.slot[place] + 1


def _slice(name: str, category: str, where: tuple[int, int], begin: int, end: int, facts: _Event) -> _Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": where[0],
        "tid": where[1],
        "ts": begin,
        "dur": max(0, end - begin),
        "args": {key: value for key, value in facts.items() if value not in (None, "")},
    }


def _instant(
    name: str, category: str, where: tuple[int, int], time: int, facts: _Event, *, scope: str = "t"
) -> _Event:
    return {
        "ph": "i",
        "s": scope,
        "name": name,
        "cat": category,
        "pid": where[0],
        "tid": where[1],
        "ts": time,
        "args": dict(facts),
    }


def _counter(name: str, time: int, value: float) -> _Event:
    return {"ph": "C", "name": name, "pid": _TRAINER, "tid": 0, "ts": time, "args": {"value": value}}
