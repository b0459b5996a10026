"""An event's payload as JSON text with every field named, for millions of events.

It says what ``kinlog.replay.rendering.event_object`` says of these fields. Instead of walking through each value, types are
derived once that have the same fields, named, with digests as text; the rest is done by msgspec.
"""

import types
import typing
from functools import cache
from typing import Any, Union

import msgspec

from kinlog.schemas.columns import ENVELOPE_FIELDS
from kinlog.schemas.events import Event, PassedOver

__all__ = ["payload_text"]


class _Hex:
    """Bytes that are shown as hex."""

    __slots__ = ("content",)

    def __init__(self, content: bytes) -> None:
        self.content = content


def payload_text(event: Event) -> str | None:
    """Return the fields of an event that are no columns of the log, as JSON; ``None`` of an event that is passed over.

    JSON has no numbers that are not finite: they are null there.
    """
    if isinstance(event, PassedOver):
        return None
    named = msgspec.convert(event, _named(type(event)), from_attributes=True, dec_hook=_to_hex)
    return _ENCODER.encode(named).decode()


def _to_hex(wanted: type, value: Any) -> _Hex:
    return _Hex(value)


_ENCODER = msgspec.json.Encoder(enc_hook=lambda value: value.content.hex())


@cache
def _named(struct: type[Any]) -> type[Any]:
    """Return the type of a struct's payload with its fields named, and bytes as text."""
    hints = typing.get_type_hints(struct)
    skipped = ENVELOPE_FIELDS if issubclass(struct, Event) else ()
    fields = [(name, _as_named(hints[name])) for name in struct.__struct_fields__ if name not in skipped]
    return msgspec.defstruct(struct.__name__, fields, gc=False)


def _as_named(annotation: Any) -> Any:
    if annotation is bytes:
        return _Hex
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return _named(annotation)
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return list[_as_named(arguments[0])]  # type: ignore[misc]
    if typing.get_origin(annotation) in (types.UnionType, Union):
        return Union[tuple(_as_named(a) for a in arguments)]  # noqa: UP007 - a union made at run time
    return annotation
