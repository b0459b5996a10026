"""Between an event and its row in the log: columns plus payload, and back.

The payload is a msgpack array of the fields that are not columns, in declaration order. A reader passes over elements
that it does not know (a newer writer's added fields), and takes defaults for those that are not there.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from kinlog.schemas.columns import ENVELOPE_FIELDS
from kinlog.schemas.errors import EventTooLargeError, LogUnsupportedError
from kinlog.schemas.events import EVENT_TYPES, Event, kind_of
from kinlog.schemas.reasons import Reason
from kinlog.schemas.upcasters import PAST_VERSIONS, upcast

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "EncodedEvent",
    "decode_event",
    "decode_events",
    "decode_field",
    "encode_event",
    "payload_fields",
]

#: An event is metadata: a rollout of 64 model calls takes about 2.2 KB.
MAX_PAYLOAD_BYTES = 4096


class EncodedEvent(NamedTuple):
    """An event as the log stores it, before it has a place: its columns and its payload."""

    kind: str
    version: int
    group_id: int | None
    generation: int | None
    attempt: int | None
    train_step: int | None
    weight_version: int | None
    reason: str | None
    payload: bytes


class _Layout:
    """How one event type is split into columns and payload. Derived once from the type's own fields."""

    def __init__(self, event_type: type[Event]) -> None:
        fields = msgspec.structs.fields(event_type)
        self.event_type = event_type
        self.kind = kind_of(event_type)
        self.columns = tuple(f.name for f in fields if f.name in ENVELOPE_FIELDS)
        self.has_group_id = "group_id" in self.columns
        self.has_generation = "generation" in self.columns
        self.has_attempt = "attempt" in self.columns
        self.has_train_step = "train_step" in self.columns
        self.has_weight_version = "weight_version" in self.columns
        self.has_reason = "reason" in self.columns
        payload = [f for f in fields if f.name not in ENVELOPE_FIELDS]
        self.payload = tuple(f.name for f in payload)
        self.payload_values = _values_getter(self.payload)
        payload_type = msgspec.defstruct(
            f"{event_type.__name__}Payload",
            [
                (f.name, f.type) if f.required else (f.name, f.type, f.default)
                for f in sorted(payload, key=lambda f: not f.required)
            ],
            array_like=True,
            frozen=True,
        )
        if tuple(payload_type.__struct_fields__) != self.payload:
            raise TypeError(f"{event_type.__name__}: payload fields with defaults must come last")
        self.decoder: msgspec.msgpack.Decoder[msgspec.Struct] = msgspec.msgpack.Decoder(payload_type)
        self.list_decoder: msgspec.msgpack.Decoder[list[msgspec.Struct]] = msgspec.msgpack.Decoder(
            list[payload_type]  # type: ignore[valid-type]
        )


def _values_getter(names: tuple[str, ...]) -> Any:
    if not names:
        return lambda event: ()
    if len(names) == 1:
        only = attrgetter(names[0])
        return lambda event: (only(event),)
    return attrgetter(*names)


_LAYOUTS: dict[type[Event], _Layout] = {
    event_type: _Layout(event_type) for event_type in EVENT_TYPES.values()
}
_BY_KIND: dict[str, _Layout] = {layout.kind: layout for layout in _LAYOUTS.values()}
_ENCODER = msgspec.msgpack.Encoder()
_ANY_LIST: msgspec.msgpack.Decoder[list[object]] = msgspec.msgpack.Decoder(list[object])


def payload_fields() -> dict[str, list[str]]:
    """Return kind -> names of its payload's elements, in order: what makes a segment readable without kinlog."""
    return {layout.kind: list(layout.payload) for layout in _BY_KIND.values()}


def encode_event(event: Event) -> EncodedEvent:
    """Split an event into columns and payload.

    Raises
    ------
    EventTooLargeError
        The payload is over ``MAX_PAYLOAD_BYTES``.
    """
    layout = _LAYOUTS[type(event)]
    try:
        payload = _ENCODER.encode(layout.payload_values(event))
    except UnicodeEncodeError:
        event = _with_escaped_detail(event)
        payload = _ENCODER.encode(layout.payload_values(event))
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventTooLargeError(
            f"{layout.kind}: the payload is {len(payload)} bytes, the limit is {MAX_PAYLOAD_BYTES}. An event is "
            "metadata: keep tokens and text in the data plane, and split what belongs to many groups into several "
            "events of one frame."
        )
    # Once per event of a run: asking ready flags, and not the tuple of names, halves its cost.
    row = (
        layout.kind,
        layout.event_type.VERSION,
        event.group_id if layout.has_group_id else None,  # type: ignore[attr-defined]
        event.generation if layout.has_generation else None,  # type: ignore[attr-defined]
        event.attempt if layout.has_attempt else None,  # type: ignore[attr-defined]
        event.train_step if layout.has_train_step else None,  # type: ignore[attr-defined]
        event.weight_version if layout.has_weight_version else None,  # type: ignore[attr-defined]
        event.reason.value if layout.has_reason else None,  # type: ignore[attr-defined]
        payload,
    )
    return tuple.__new__(EncodedEvent, row)


def _with_escaped_detail(event: Event) -> Event:
    """Return an event with its ``detail`` made text that UTF-8 can encode.

    It quotes errors, which quote whatever they failed of: a lone surrogate in it must not end the run that records it,
    and every life after it. In names, which identify, one is refused instead.
    """
    detail = getattr(event, "detail", None)
    if not isinstance(detail, str):
        return event
    escaped = detail.encode("utf-8", errors="backslashreplace").decode("utf-8")
    return msgspec.structs.replace(event, detail=escaped)


def decode_event(encoded: EncodedEvent) -> Event:
    """Rebuild an event from its row, of this or any past version.

    Raises
    ------
    LogUnsupportedError
        The kind or the reason is unknown, or the version is newer than this kinlog's.
    msgspec.DecodeError
        The payload is not what its kind says. The frame's checksum makes this a writer's bug, not damage.
    """
    layout = _readable(encoded.kind, encoded.version)
    if encoded.version < layout.event_type.VERSION:
        return _decode_past(layout, encoded.version, encoded._asdict(), _ANY_LIST.decode(encoded.payload))
    payload = layout.decoder.decode(encoded.payload)
    fields: dict[str, Any] = {name: getattr(payload, name) for name in layout.payload}
    for name in layout.columns:
        fields[name] = getattr(encoded, name)
    if "reason" in fields:
        fields["reason"] = _reason(encoded.kind, fields["reason"])
    return layout.event_type(**fields)


def decode_events(
    kind: str, version: int, columns: Mapping[str, Sequence[Any]], payloads: Sequence[bytes]
) -> list[Event]:
    """Rebuild events of one kind and version: as :func:`decode_event` does, for all of them at once.

    Parameters
    ----------
    columns:
        The values of each of the ``ENVELOPE_FIELDS``, in the order of the payloads.
    """
    layout = _readable(kind, version)
    if version < layout.event_type.VERSION:
        return [
            _decode_past(layout, version, dict(zip(columns, row, strict=True)), _ANY_LIST.decode(payload))
            for *row, payload in zip(*columns.values(), payloads, strict=True)
        ]
    values = [
        [_reason(kind, value) for value in columns[name]] if name == "reason" else columns[name]
        for name in layout.columns
    ]
    rows: Iterable[tuple[Any, ...]] = zip(*values, strict=True) if values else repeat(())
    names = layout.payload + layout.columns
    event_type, astuple = layout.event_type, msgspec.structs.astuple
    return [
        event_type(**dict(zip(names, (*astuple(payload), *row), strict=True)))
        for payload, row in zip(layout.list_decoder.decode(_as_array(payloads)), rows, strict=False)
    ]


def decode_field(event_type: type[Event], field: str, payloads: Sequence[bytes]) -> list[Any]:
    """Return one field of the payload of each event, decoding nothing else. For the present version only."""
    decoded = _field_decoder(event_type, field).decode(_as_array(payloads))
    return [getattr(payload, field) for payload in decoded]


@cache
def _field_decoder(event_type: type[Event], field: str) -> msgspec.msgpack.Decoder[list[msgspec.Struct]]:
    names = _LAYOUTS[event_type].payload
    types = {f.name: f.type for f in msgspec.structs.fields(event_type)}
    passed_over = [(name, msgspec.Raw) for name in names[: names.index(field)]]
    wanted = msgspec.defstruct("Wanted", [*passed_over, (field, types[field])], array_like=True, gc=False)
    return msgspec.msgpack.Decoder(list[wanted])  # type: ignore[valid-type]


def _as_array(payloads: Sequence[bytes]) -> bytes:
    """Return the msgpack array of values that are msgpack already: one call decodes it, where each value would take its
    own."""
    return b"".join((b"\xdd", len(payloads).to_bytes(4, "big"), *payloads))


def _readable(kind: str, version: int) -> _Layout:
    layout = _BY_KIND.get(kind)
    if layout is None:
        raise LogUnsupportedError(
            f"event kind {kind!r} is unknown to this kinlog, which knows {len(_BY_KIND)} kinds: "
            "the log was written by a newer version. Upgrade kinlog to read it."
        )
    if version > layout.event_type.VERSION:
        raise LogUnsupportedError(
            f"{kind} has version {version}, this kinlog reads up to version {layout.event_type.VERSION}: "
            "the log was written by a newer version. Upgrade kinlog to read it."
        )
    return layout


def _reason(kind: str, name: str) -> Reason:
    try:
        return Reason(name)
    except ValueError as error:
        raise LogUnsupportedError(
            f"{kind} has reason {name!r}, which this kinlog does not know: "
            "the log was written by a newer version. Upgrade kinlog to read it."
        ) from error


def _decode_past(
    layout: _Layout, version: int, columns: Mapping[str, object], payload: Sequence[object]
) -> Event:
    names = PAST_VERSIONS[layout.kind, version].payload_fields
    fields: dict[str, object] = dict(zip(names, payload, strict=False))
    for name in ENVELOPE_FIELDS:
        if columns[name] is not None:
            fields[name] = columns[name]
    fields = upcast(layout.kind, version, layout.event_type.VERSION, fields)
    return msgspec.convert({**fields, "kind": layout.kind}, type=layout.event_type)
