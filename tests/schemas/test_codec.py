"""An event and its row: nothing is lost on the way, and what is too large, unknown or too new is refused by name."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_builders import digest_of, receipt_of, sealed_result
from kinlog_strategies import any_events, events_of

from kinlog.schemas import codec
from kinlog.schemas import events as e
from kinlog.schemas.codec import (
    MAX_PAYLOAD_BYTES,
    decode_event,
    decode_events,
    decode_field,
    encode_event,
    payload_fields,
)
from kinlog.schemas.columns import ENVELOPE_FIELDS, log_schema
from kinlog.schemas.errors import EventTooLargeError, LogUnsupportedError
from kinlog.schemas.reasons import Reason
from kinlog.schemas.upcasters import PAST_VERSIONS, PastVersion

MSGPACK = msgspec.msgpack


@pytest.mark.parametrize("kind", e.EVENT_TYPES)
@settings(max_examples=15)
@given(data=st.data())
def test_every_kind_comes_back_as_it_was_encoded(kind, data):
    event = data.draw(events_of(e.EVENT_TYPES[kind]))
    encoded = encode_event(event)
    assert encoded.kind == kind
    assert decode_event(encoded) == event


def columns_of(encoded: list[codec.EncodedEvent]) -> dict[str, list[object]]:
    return {name: [getattr(event, name) for event in encoded] for name in ENVELOPE_FIELDS}


@pytest.mark.parametrize("kind", e.EVENT_TYPES)
@settings(max_examples=10)
@given(data=st.data())
def test_many_of_a_kind_at_once_come_back_as_each_does(kind, data):
    events = data.draw(st.lists(events_of(e.EVENT_TYPES[kind]), max_size=20))
    encoded = [encode_event(event) for event in events]
    version = e.EVENT_TYPES[kind].VERSION
    assert decode_events(kind, version, columns_of(encoded), [row.payload for row in encoded]) == events


@given(st.lists(events_of(e.SiblingSealed), max_size=20))
def test_one_number_of_many_payloads_is_read_without_the_rest(events):
    payloads = [encode_event(event).payload for event in events]
    for field in ("max_weight_version", "prompt_tokens", "completion_tokens"):
        expected = [getattr(event, field) for event in events]
        assert decode_field(e.SiblingSealed, field, payloads) == expected


@given(any_events())
def test_encoding_what_was_decoded_gives_the_same_bytes(event):
    encoded = encode_event(event)
    assert encode_event(decode_event(encoded)) == encoded


@pytest.mark.parametrize("kind", e.EVENT_TYPES)
def test_every_field_is_either_a_column_or_in_the_payload(kind):
    fields = e.EVENT_TYPES[kind].__struct_fields__
    in_payload = payload_fields()[kind]
    assert [name for name in fields if name not in ENVELOPE_FIELDS] == in_payload
    assert set(ENVELOPE_FIELDS) <= set(log_schema().names)


def test_values_that_are_not_finite_are_kept_bit_for_bit():
    for value in (math.inf, -math.inf, -0.0):
        event = sealed_result(0, 0, 1, raw_reward=value)
        decoded = decode_event(encode_event(event))
        assert (decoded.raw_reward, math.copysign(1, decoded.raw_reward)) == (value, math.copysign(1, value))
    assert math.isnan(decode_event(encode_event(sealed_result(0, 0, 1, raw_reward=math.nan))).raw_reward)


def test_receipt_of_64_model_calls_fits_an_event():
    event = msgspec.structs.replace(
        sealed_result(2**40, 1023, 99), receipt=receipt_of(2**40, 1023, 99, calls=64, weight_version=10**6)
    )
    calls = tuple(
        msgspec.structs.replace(call, prompt_tokens=131_072, completion_tokens=32_768)
        for call in event.receipt.calls
    )
    event = msgspec.structs.replace(event, receipt=msgspec.structs.replace(event.receipt, calls=calls))
    assert len(encode_event(event).payload) <= MAX_PAYLOAD_BYTES
    assert decode_event(encode_event(event)) == event


def test_payload_at_the_limit_is_taken_and_one_byte_more_is_refused():
    def superseded(size: int) -> e.AttemptSuperseded:
        return e.AttemptSuperseded(
            group_id=1, generation=0, attempt=1, reason=Reason.TIMEOUT, detail="x" * size
        )

    overhead = len(encode_event(superseded(1000)).payload) - 1000
    largest = superseded(MAX_PAYLOAD_BYTES - overhead)
    assert len(encode_event(largest).payload) == MAX_PAYLOAD_BYTES
    with pytest.raises(EventTooLargeError, match=r"attempt_superseded: the payload is 4097 bytes.*4096"):
        encode_event(superseded(MAX_PAYLOAD_BYTES - overhead + 1))


def test_unknown_kind_is_refused_by_name():
    encoded = encode_event(e.GroupAdmitted(group_id=3))._replace(kind="group_teleported")
    with pytest.raises(LogUnsupportedError, match="'group_teleported'.*Upgrade"):
        decode_event(encoded)


def test_newer_version_of_a_known_kind_is_refused_by_name():
    encoded = encode_event(e.GroupAdmitted(group_id=3))._replace(version=2)
    with pytest.raises(LogUnsupportedError, match="group_admitted has version 2.*up to version 1"):
        decode_event(encoded)


def test_reason_that_a_newer_writer_added_is_refused_by_name():
    event = e.GroupDropped(group_id=3, reason=Reason.STALE)
    encoded = encode_event(event)._replace(reason="solar_flare")
    with pytest.raises(LogUnsupportedError, match=r"group_dropped.*'solar_flare'"):
        decode_event(encoded)


@pytest.mark.parametrize("kind", e.EVENT_TYPES)
@settings(max_examples=15)
@given(data=st.data())
def test_field_that_a_newer_writer_added_at_the_end_is_ignored(kind, data):
    event = data.draw(events_of(e.EVENT_TYPES[kind]))
    encoded = encode_event(event)
    longer = [*MSGPACK.decode(encoded.payload), {"added": [1, 2]}]
    assert decode_event(encoded._replace(payload=MSGPACK.encode(longer))) == event


def test_field_that_an_older_writer_did_not_have_takes_its_default():
    event = e.AttemptSuperseded(group_id=1, generation=2, attempt=3, reason=Reason.TIMEOUT, detail="slow")
    encoded = encode_event(event)._replace(payload=MSGPACK.encode([]))
    assert decode_event(encoded) == msgspec.structs.replace(event, detail="")


def test_missing_required_field_is_an_error_and_not_a_default():
    encoded = encode_event(e.WriterOpened(host="here", pid=1))
    with pytest.raises(msgspec.ValidationError):
        decode_event(encoded._replace(payload=MSGPACK.encode(["here"])))


def test_past_versions_are_read_through_the_whole_chain_of_upcasters(monkeypatch):
    monkeypatch.setattr(e.CheckpointFailed, "VERSION", 3)
    monkeypatch.setitem(
        PAST_VERSIONS,
        ("checkpoint_failed", 1),
        PastVersion(("path",), lambda fields: {"name": fields.pop("path"), **fields}),
    )
    monkeypatch.setitem(
        PAST_VERSIONS,
        ("checkpoint_failed", 2),
        PastVersion(("name",), lambda fields: {**fields, "detail": "not recorded before version 3"}),
    )
    event = e.CheckpointFailed(
        name="step_000004", reason=Reason.TIMEOUT, detail="not recorded before version 3"
    )
    for version in (1, 2):
        past = encode_event(event)._replace(version=version, payload=MSGPACK.encode(["step_000004"]))
        assert decode_event(past) == event
        assert decode_events(past.kind, version, columns_of([past] * 2), [past.payload] * 2) == [event] * 2
    assert encode_event(event).version == 3
    assert decode_event(encode_event(event)) == event


def test_past_version_with_columns_and_nested_values_is_converted_to_the_present_types(monkeypatch):
    event = sealed_result(4, 1, 2)
    encoded = encode_event(event)
    monkeypatch.setattr(e.SiblingSealed, "VERSION", 2)
    names = tuple(codec.payload_fields()["sibling_sealed"])
    monkeypatch.setitem(PAST_VERSIONS, ("sibling_sealed", 1), PastVersion(names, lambda fields: fields))
    assert decode_event(encoded) == event


def test_digest_of_the_wrong_length_is_no_event():
    row = e.CanonicalRowRef(0, 1, 16, digest_of("row")[:-1])
    encoded = encode_event(e.GroupFinalized(group_id=0, rows=(row,), valid_fraction=1.0))
    with pytest.raises(msgspec.ValidationError):
        decode_event(encoded)
