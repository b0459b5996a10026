"""Events as JSON with every field named, and as one line of text."""

import json

import pytest
from hypothesis import given
from kinlog_builders import Story
from kinlog_strategies import any_events

from kinlog.replay.rendering import event_line, event_object, to_json_value
from kinlog.schemas.events import Event, RecordedEvent, SiblingSealed


def _sealed() -> RecordedEvent:
    told = Story()
    told.ready()
    return next(record for record in told.records if isinstance(record.event, SiblingSealed))


def test_nested_structs_are_objects_and_digests_are_hex():
    record = _sealed()
    shown = event_object(record)
    assert shown["kind"] == "sibling_sealed"
    receipt = shown["receipt"]
    assert isinstance(receipt, dict)
    calls = receipt["calls"]
    assert isinstance(calls, list)
    assert isinstance(calls[0], dict)
    assert isinstance(record.event, SiblingSealed)
    assert record.event.receipt is not None
    assert calls[0]["row_digest"] == record.event.receipt.calls[0].row_digest.hex()
    assert calls[1] == {**calls[1], "call": 1, "parent": 0}
    assert shown["finish_reason"] == "stop"


def test_time_is_iso_8601_in_utc_with_microseconds():
    record = RecordedEvent(1, 1, 1_700_000_000_000_001, _sealed().event)
    assert event_object(record)["time"] == "2023-11-14T22:13:20.000001Z"


def test_a_line_names_the_sibling_and_abbreviates_the_receipt():
    line = event_line(_sealed())
    assert "g0.s0.a1" in line
    assert "receipt=2 calls" in line
    assert "\n" not in line


@given(any_events())
def test_every_event_can_be_shown(event: Event):
    record = RecordedEvent(7, 2, 1_700_000_000_000_000, event)
    shown = json.loads(json.dumps(event_object(record)))
    assert set(event.__struct_fields__) <= set(shown)
    assert event_line(record).strip().startswith("7")


def test_a_value_that_kinlog_does_not_record_is_refused():
    with pytest.raises(TypeError, match="complex"):
        to_json_value(1j)
