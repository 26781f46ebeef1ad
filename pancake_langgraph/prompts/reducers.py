"""How a field of a state takes up what nodes write to it: replaced, appended to, or as a list of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from langchain_core.messages import BaseMessage, RemoveMessage

from pancake_langgraph.prompts.fields import as_messages, is_messages

#: Writes to one field in one step that are put in order.
MAX_STEP_WRITES: Final = 64
_REMOVE_ALL: Final = "__remove_all__"


class Reducer(StrEnum):
    """How a write to a field and its old value make the new one."""

    REPLACE = "replace"
    APPEND = "append"
    MESSAGES = "add messages"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Writes:
    """What the nodes of one step wrote to one field, which had the value `before`; LangGraph orders them by task."""

    before: object
    writes: list[tuple[str, int, object]] = field(default_factory=list)

    @property
    def is_unordered(self) -> bool:
        """Whether the order of the writes cannot be told."""
        unknown = len(self.writes) > 1 and any(not order for order, _, _ in self.writes)
        return unknown or len(self.writes) > MAX_STEP_WRITES

    def add(self, order: str, written: object) -> None:
        """Take in one write."""
        if len(self.writes) <= MAX_STEP_WRITES:
            self.writes.append((order, len(self.writes), written))

    def value(self, reducer: Reducer | None, *, before: str | None = None) -> object:
        """Return the value after all writes, or after those of tasks that are ordered before `before`."""
        value = self.before
        for order, _, written in sorted(self.writes, key=lambda write: write[:2]):
            if before is None or order < before:
                value = reduced(value, written, reducer)[0]
        return value


def reduced(old: object, written: object, reducer: Reducer | None) -> tuple[object, bool]:
    """Return a field's value after a write, and whether what was there stayed as it was."""
    if reducer is Reducer.MESSAGES or (reducer is None and (is_messages(old) or is_messages(written))):
        return _merged(old if is_messages(old) else [], written)  # type: ignore[arg-type]
    if reducer is Reducer.APPEND and isinstance(old, list) and isinstance(written, list):
        return [*old, *written], True
    return written, False


def _merged(old: Sequence[BaseMessage], written: object) -> tuple[list[BaseMessage], bool]:
    """Add messages as LangGraph's reducer does; return whether the old ones stayed as they were.

    That one gives ids to the application's own messages, so that it cannot be asked.
    """
    new = as_messages(written)
    if new is None:
        return list(old), True
    all_removed = [n for n, m in enumerate(new) if m.id == _REMOVE_ALL and isinstance(m, RemoveMessage)]
    if all_removed:
        return new[all_removed[-1] + 1 :], False
    places = {message.id: n for n, message in enumerate(old)}
    merged, removed, grew = list(old), set[str | None](), True
    for message in new:
        at = places.get(message.id) if message.id is not None else None
        if isinstance(message, RemoveMessage):
            removed.add(message.id)
        elif at is None:
            places[message.id] = len(merged)
            merged.append(message)
        else:
            removed.discard(message.id)
            grew = grew and (at >= len(old) or merged[at] is message or _same(merged[at], message))
            merged[at] = message
    if removed:
        return [message for message in merged if message.id not in removed], False
    return merged, grew


def begins(value: object, head: object) -> bool:
    """Whether a list of messages begins with another, by its length and ends."""
    if not isinstance(value, list | tuple) or not isinstance(head, list | tuple) or len(head) > len(value):
        return False
    return not head or (_same(value[0], head[0]) and _same(value[len(head) - 1], head[-1]))


def _same(left: object, right: object) -> bool:
    return left is right or (
        isinstance(left, BaseMessage) and isinstance(right, BaseMessage) and left.content == right.content
    )


def same_atom(left: object, right: object) -> bool:
    """Whether two plain values are equal; anything else is not compared."""
    if isinstance(left, str) and isinstance(right, str):
        return len(left) == len(right) and left == right
    return isinstance(left, int | float | None) and left == right
