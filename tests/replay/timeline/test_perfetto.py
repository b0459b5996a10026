"""The trace of a timeline is one that trace viewers open: its slices nest, and nothing of the timeline is missing."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from kinlog_long_run import LongRun

from kinlog.lineage.state import Projection
from kinlog.replay.lives import LifeEnd
from kinlog.replay.timeline.building import timeline_of
from kinlog.replay.timeline.perfetto import render_trace, trace_events
from kinlog.replay.timeline.timeline import Timeline

#: What each phase must have, by the trace event format.
_FIELDS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return timeline_of(LongRun(groups=80, kill_every=2).events(), run_id="run-1", beginning=Projection())


@pytest.fixture(scope="module")
def events(timeline: Timeline) -> list[dict]:
    return list(trace_events(timeline))


def test_every_event_has_the_fields_of_its_phase(timeline: Timeline, events: list[dict]):
    length_us = timeline.end_us - timeline.begin_us
    for event in events:
        assert set(event) - {"ph"} == _FIELDS[event["ph"]]
        assert 0 <= event.get("ts", 0) <= length_us
        assert event.get("dur", 0) >= 0


def test_slices_of_one_thread_never_overlap(events: list[dict]):
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(slices))


def test_every_process_and_thread_has_a_name(events: list[dict]):
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {"controller", "trainer", "generation-0"} <= set(processes.values())
    for event in events:
        assert event["pid"] in processes
        assert event["ph"] in "MC" or (event["pid"], event["tid"]) in threads


def test_trace_holds_what_the_timeline_holds(timeline: Timeline, events: list[dict]):
    a = timeline.summary.attempts
    slices = Counter(event["cat"] for event in events if event["ph"] == "X")
    assert {name: slices[name] for name in a.outcomes} == a.outcomes
    assert slices["step"] == len(timeline.steps)
    assert slices["checkpoint"] == len(timeline.checkpoints)
    moments = Counter(event["cat"] for event in events if event["ph"] == "i")
    assert moments["seal"] == a.sealed
    assert moments["supersede"] == sum(a.superseded.values())
    assert moments["kill"] == sum(life.end is LifeEnd.KILLED for life in timeline.lives) > 0
    assert moments["weights"] == len(timeline.weights)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"live groups", "tokens/s"}


def test_arrow_leads_from_an_attempt_that_was_given_up_to_the_one_in_its_place(events: list[dict]):
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys() != set()
    assert all(begins[key]["ts"] <= ends[key]["ts"] for key in begins)


def test_tokens_a_second_add_up_to_what_was_sealed(timeline: Timeline, events: list[dict]):
    rates = [e["args"]["value"] for e in events if e["ph"] == "C" and e["name"] == "tokens/s"]
    seconds = (timeline.end_us - timeline.begin_us) / 1e6 / len(rates)
    assert sum(rates) * seconds == pytest.approx(timeline.summary.attempts.tokens_sealed, rel=1e-3)


def test_trace_is_json_with_every_event(timeline: Timeline):
    found = json.loads(render_trace(timeline))
    assert len(found["traceEvents"]) == len(list(trace_events(timeline)))
