"""Remembers what was stored last, so that the next step encodes only what is new.

An item is recognized when it is the same object and has not changed: immutable values by identity alone, chat messages
by comparing all their fields with a copy (containers copied deeply).  Anything else is encoded again at every step.  A
message changed in place is therefore noticed, with one exception: a value inside one of its containers that was
replaced by an equal one of another type (`True` by `1`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq, is_
from typing import Any, Final

from langchain_core.messages import BaseMessage

from pancake_langgraph.checkpoint.elements import FANOUT, Ref
from pancake_langgraph.checkpoint.rows import Spot

MAX_NAMESPACES: Final = 256
MAX_ITEMS: Final = 200_000
_IMMUTABLE: Final = frozenset({str, int, float, bool, bytes, type(None)})
#: Stands for an item that cannot be recognized again; no item is this object.
OPAQUE: Final = object()


@dataclass(frozen=True, slots=True)
class StoredList:
    """How a list was stored: its reference, one entry for each item, and the hashes of its full leaves."""

    ref: Ref
    entries: tuple[bytes, ...]
    full_leaves: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Remembered:
    """One channel as it was stored: a list's `items` with their `entries`, or a single `value`.

    `messages` and `states` are those of the items that are messages, and copies of their fields.
    """

    version: object
    ref: Ref
    value: object = OPAQUE
    items: tuple[object, ...] = ()
    entries: tuple[bytes, ...] = ()
    full_leaves: tuple[bytes, ...] = ()
    messages: tuple[BaseMessage, ...] = ()
    states: tuple[dict[str, Any], ...] = ()

    def is_unchanged(self) -> bool:
        """Say whether no message was changed in place since."""
        if any([message.__pydantic_extra__ for message in self.messages]):  # noqa: C419 - a list is faster, and hot
            return False
        return all(map(eq, [message.__dict__ for message in self.messages], self.states))

    def known_entries(self, items: Sequence[object]) -> list[bytes | None]:
        """Return for each of `items` its stored entry, or `None` where it has to be encoded."""
        shared = min(len(items), len(self.items))
        if all(map(is_, self.items[:shared], items)) and self.is_unchanged():
            return [*self.entries[:shared], *[None] * (len(items) - shared)]
        states = {id(message): state for message, state in zip(self.messages, self.states, strict=True)}
        return [
            entry if index < len(self.items) and item is self.items[index] and _is_same(item, states) else None
            for index, (item, entry) in enumerate(zip(items, [*self.entries, *[b""] * len(items)], strict=False))
        ]

    def kept_leaves(self, known: Sequence[bytes | None]) -> tuple[bytes, ...]:
        """Return the hashes of leading full leaves all of whose entries are known."""
        first = next((index for index, entry in enumerate(known) if entry is None), len(known))
        return self.full_leaves[: first // FANOUT]


@dataclass(frozen=True, slots=True)
class Latest:
    """What a namespace held at `spot`."""

    spot: Spot
    channels: Mapping[str, Remembered] = field(default_factory=dict)

    @property
    def num_items(self) -> int:
        """Number of list items kept alive."""
        return sum(len(channel.items) for channel in self.channels.values())


class Memory:
    """The latest stored values by thread and namespace, bounded, the longest unused forgotten first.  Thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[str, str], Latest] = OrderedDict()
        self._num_items = 0

    def get(self, thread_id: str, checkpoint_ns: str) -> Latest | None:
        """Return what is remembered."""
        with self._lock:
            found = self._latest.get((thread_id, checkpoint_ns))
            if found is not None:
                self._latest.move_to_end((thread_id, checkpoint_ns))
            return found

    def put(self, thread_id: str, latest: Latest) -> None:
        """Remember."""
        key = (thread_id, latest.spot.checkpoint_ns)
        with self._lock:
            self._drop(key)
            self._latest[key] = latest
            self._num_items += latest.num_items
            while len(self._latest) > MAX_NAMESPACES or (self._num_items > MAX_ITEMS and len(self._latest) > 1):
                self._drop(next(iter(self._latest)))

    def forget(self, thread_id: str) -> None:
        """Forget a thread."""
        with self._lock:
            for key in [key for key in self._latest if key[0] == thread_id]:
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        gone = self._latest.pop(key, None)
        if gone is not None:
            self._num_items -= gone.num_items


def remember_list(
    version: object, stored: StoredList, items: Sequence[object], known: Remembered | None = None
) -> Remembered:
    """Remember a stored list.

    Args:
        version: The channel's version.
        stored: How it was stored.
        items: Its items.
        known: What was remembered before, if all its items are still in front, unchanged: their copies are taken over.
    """
    kept = [] if known is None else list(known.items)
    messages = [] if known is None else list(known.messages)
    states = [] if known is None else list(known.states)
    for item in items[len(kept) :]:
        state = _state(item)
        kept.append(item if type(item) in _IMMUTABLE or state is not None else OPAQUE)
        if state is not None and isinstance(item, BaseMessage):
            messages.append(item)
            states.append(state)
    return Remembered(
        version,
        stored.ref,
        items=tuple(kept),
        entries=stored.entries,
        full_leaves=stored.full_leaves,
        messages=tuple(messages),
        states=tuple(states),
    )


def remember_single(version: object, ref: Ref, value: object) -> Remembered:
    """Remember a stored value that is no list."""
    return Remembered(version, ref, value if type(value) in _IMMUTABLE else OPAQUE)


def _is_same(item: object, states: Mapping[int, dict[str, Any]]) -> bool:
    if not isinstance(item, BaseMessage):
        return type(item) in _IMMUTABLE
    return not item.__pydantic_extra__ and item.__dict__ == states.get(id(item))


def _state(item: object) -> dict[str, Any] | None:
    """Return a copy of a message's fields; `None` where they cannot be compared safely later."""
    if not isinstance(item, BaseMessage) or item.__pydantic_extra__ or item.__pydantic_private__:
        return None
    try:
        return {name: _copied(value) for name, value in item.__dict__.items()}
    except TypeError:
        return None


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is list:
        return [_copied(item) for item in value]
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    raise TypeError
