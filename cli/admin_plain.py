"""Messages of the admin RPC as plain values for JSON. Pure."""

from __future__ import annotations

from typing import Any


def as_plain(message: Any) -> dict[str, Any]:
    """A message as plain values for JSON: every field, numbers as numbers, enums by name, what is unset as null.

    The canonical JSON of protobuf would turn 64-bit numbers into strings, which no script wants to compare.
    """

    def plain(field: Any, value: Any) -> Any:
        if field.message_type is not None:
            return as_plain(value)
        return field.enum_type.values_by_number[value].name if field.enum_type is not None else value

    shown: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            shown[field.name] = dict(value)
        elif field.is_repeated:
            shown[field.name] = [plain(field, item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            shown[field.name] = None
        else:
            shown[field.name] = plain(field, value)
    return shown
