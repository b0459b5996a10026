"""Between an event and its row in the log: columns plus payload, and back.

The payload is a msgpack array of the fields that are not columns, in declaration order. A reader passes over elements
that it does not know (a newer writer's added fields), and takes defaults for those that are not there.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import msgspec

from kinlog.schemas.columns import ENVELOPE_FIELDS
from kinlog.schemas.errors import EventTooLargeError, LogUnsupportedError
from kinlog.schemas.events import EVENT_TYPES, Event, kind_of
from kinlog.schemas.reasons import Reason
from kinlog.schemas.upcasters import PAST_VERSIONS, upcast

__all__ = ["MAX_PAYLOAD_BYTES", "EncodedEvent", "encode_event", "decode_event", "payload_fields"]

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
    payload = _ENCODER.encode(layout.payload_values(event))
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventTooLargeError(
            f"{layout.kind}: the payload is {len(payload)} bytes, the limit is {MAX_PAYLOAD_BYTES}. An event is "
            "metadata: keep tokens and text in the data plane, and split what belongs to many groups into several "
            "events of one frame."
        )
    columns = layout.columns
    reason = getattr(event, "reason", None)
    return EncodedEvent(
        layout.kind,
        layout.event_type.VERSION,
        event.group_id if "group_id" in columns else None,  # type: ignore[attr-defined]
        event.generation if "generation" in columns else None,  # type: ignore[attr-defined]
        event.attempt if "attempt" in columns else None,  # type: ignore[attr-defined]
        event.train_step if "train_step" in columns else None,  # type: ignore[attr-defined]
        event.weight_version if "weight_version" in columns else None,  # type: ignore[attr-defined]
        None if reason is None else cast(Reason, reason).value,
        payload,
    )


def decode_event(encoded: EncodedEvent) -> Event:
    """Rebuild an event from its row, of this or any past version.

    Raises
    ------
    LogUnsupportedError
        The kind or the reason is unknown, or the version is newer than this kinlog's.
    msgspec.DecodeError
        The payload is not what its kind says. The frame's checksum makes this a writer's bug, not damage.
    """
    layout = _BY_KIND.get(encoded.kind)
    if layout is None:
        raise LogUnsupportedError(
            f"event kind {encoded.kind!r} is unknown to this kinlog, which knows {len(_BY_KIND)} kinds: "
            "the log was written by a newer version. Upgrade kinlog to read it."
        )
    current = layout.event_type.VERSION
    if encoded.version > current:
        raise LogUnsupportedError(
            f"{encoded.kind} has version {encoded.version}, this kinlog reads up to version {current}: "
            "the log was written by a newer version. Upgrade kinlog to read it."
        )
    if encoded.version < current:
        return _decode_past(layout, encoded, current)
    payload = layout.decoder.decode(encoded.payload)
    fields: dict[str, Any] = {name: getattr(payload, name) for name in layout.payload}
    for name in layout.columns:
        fields[name] = getattr(encoded, name)
    if "reason" in fields:
        fields["reason"] = _reason(encoded.kind, fields["reason"])
    return layout.event_type(**fields)


def _reason(kind: str, name: str) -> Reason:
    try:
        return Reason(name)
    except ValueError as error:
        raise LogUnsupportedError(
            f"{kind} has reason {name!r}, which this kinlog does not know: "
            "the log was written by a newer version. Upgrade kinlog to read it."
        ) from error


def _decode_past(layout: _Layout, encoded: EncodedEvent, current: int) -> Event:
    names: Sequence[str] = PAST_VERSIONS[encoded.kind, encoded.version].payload_fields
    fields: dict[str, object] = dict(zip(names, _ANY_LIST.decode(encoded.payload), strict=False))
    for name in ENVELOPE_FIELDS:
        value = getattr(encoded, name)
        if value is not None:
            fields[name] = value
    fields = upcast(encoded.kind, encoded.version, current, fields)
    return msgspec.convert({**fields, "kind": encoded.kind}, type=layout.event_type)
