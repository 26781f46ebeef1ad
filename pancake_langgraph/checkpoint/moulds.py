"""Copies of messages that later ones are compared with, and made from.

Making a message from a copy costs a fifth of decoding it.  What comes out is what decoding gives: the same class, the
same fields in the same order, the same names marked as set, and containers of its own all the way down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

IMMUTABLE: Final = frozenset({str, int, float, bool, bytes, type(None)})
#: The field names, in order, of classes that every codec takes; a message of another class may not be allowed to come
#: back where it is read, so it is decoded.
_FIELDS: Final[Mapping[type, tuple[str, ...]]] = {
    kind: tuple(kind.model_fields)
    for kind in (
        AIMessage,
        AIMessageChunk,
        ChatMessage,
        FunctionMessage,
        HumanMessage,
        RemoveMessage,
        SystemMessage,
        ToolMessage,
    )
    if kind.model_config.get("extra") == "allow"
    and not kind.model_config.get("validate_assignment")
    and not kind.__private_attributes__
}
# Copies of what is empty; shared, since thousands of them at every read are work for the garbage collector.
_NO_LIST: Final[list[Any]] = []
_NO_DICT: Final[dict[Any, Any]] = {}
_set = object.__setattr__


class Mould(NamedTuple):
    """What a message held when it was stored.  It is never handed out, and never changes.

    `containers` names the fields that hold lists and dictionaries.  `marked` are the names marked as set, `None` where
    no message can be made from this mould.
    """

    kind: type
    fields: dict[str, Any]
    containers: tuple[str, ...]
    marked: frozenset[str] | None

    def is_of(self, message: Any) -> bool:
        """Say whether the message that it was made of still holds the same."""
        try:
            return not message.__pydantic_extra__ and bool(message.__dict__ == self.fields)
        except Exception:  # noqa: BLE001 - fails open: only something new (an array, say) can refuse to be compared
            return False

    def cast(self) -> object:
        """Return a new message.  Only where `marked` is given."""
        fields = self.fields.copy()
        for name in self.containers:
            fields[name] = _fresh(fields[name])
        made: Any = object.__new__(self.kind)
        _set(made, "__dict__", fields)
        _set(made, "__pydantic_fields_set__", set(self.marked or ()))
        _set(made, "__pydantic_extra__", {})
        _set(made, "__pydantic_private__", None)
        return made


def mould_of(item: Any) -> Mould | None:
    """Return the mould of a message; `None` for other items, and where what it holds cannot be compared later."""
    kind = type(item)
    names = _FIELDS.get(kind)
    if names is None and not _is_comparable(item):
        return None
    if item.__pydantic_extra__ or item.__pydantic_private__:
        return None
    fields = item.__dict__.copy()
    containers = [name for name, value in fields.items() if type(value) not in IMMUTABLE]
    try:
        for name in containers:
            fields[name] = _copied(fields[name])
    except TypeError:
        return None
    marked = frozenset(item.__pydantic_fields_set__) if names == tuple(fields) else None
    return Mould(kind, fields, tuple(containers), marked)


def _is_comparable(item: object) -> bool:
    # Where assignments are validated, they replace the dictionary of fields.
    return isinstance(item, BaseMessage) and not type(item).model_config.get("validate_assignment")


def _copied(value: Any) -> Any:
    """Return a copy for comparing; what is empty is shared."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is list:
        return [_copied(item) for item in value] if value else _NO_LIST
    if kind is dict:
        if not IMMUTABLE.issuperset(map(type, value)):
            raise TypeError
        return {key: _copied(item) for key, item in value.items()} if value else _NO_DICT
    raise TypeError


def _fresh(value: Any) -> Any:
    """Return a copy to hand out; it shares nothing that can be changed."""
    kind = type(value)
    if kind is dict:
        return {key: _fresh(item) for key, item in value.items()} if value else {}
    if kind is list:
        return [_fresh(item) for item in value] if value else []
    return value
