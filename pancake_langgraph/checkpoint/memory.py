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
from operator import is_
from typing import Any, Final

from langchain_core.messages import BaseMessage

from pancake_langgraph.checkpoint.elements import FANOUT, Ref
from pancake_langgraph.checkpoint.rows import Spot

MAX_NAMESPACES: Final = 256
MAX_ITEMS: Final = 200_000
_IMMUTABLE: Final = frozenset({str, int, float, bool, bytes, type(None)})
#: Stands for an item that cannot be recognized again; no item is this object.
OPAQUE: Final = object()
# Copies of what is empty; shared, since thousands of them at every read are work for the garbage collector.
_NO_LIST: Final[list[Any]] = []
_NO_DICT: Final[dict[Any, Any]] = {}


@dataclass(frozen=True, slots=True)
class StoredList:
    """How a list was stored: its reference, one entry for each item, and the hashes of its full leaves."""

    ref: Ref
    entries: tuple[bytes, ...]
    full_leaves: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Remembered:
    """One channel as it was stored: a list's `items` with their `entries`, or a single `value`.

    `messages` are those of the items that are messages, `live` and `extras` their own dictionaries of fields and of
    further fields, `states` copies of the former as they were stored.
    """

    version: object
    ref: Ref
    value: object = OPAQUE
    items: tuple[object, ...] = ()
    entries: tuple[bytes, ...] = ()
    full_leaves: tuple[bytes, ...] = ()
    messages: tuple[BaseMessage, ...] = ()
    live: tuple[dict[str, Any], ...] = ()
    extras: tuple[dict[str, Any] | None, ...] = ()
    states: tuple[dict[str, Any], ...] = ()

    def is_unchanged(self) -> bool:
        """Say whether no message was changed in place since."""
        # The one part of a put that grows with history: two passes without a line of Python per message.
        return not any(self.extras) and self.live == self.states

    def is_front_of(self, items: Sequence[object]) -> bool:
        """Say whether `items` begin with all that is remembered, unchanged."""
        return len(self.items) <= len(items) and all(map(is_, self.items, items)) and self.is_unchanged()

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
    live = [] if known is None else list(known.live)
    extras = [] if known is None else list(known.extras)
    states = [] if known is None else list(known.states)
    for item in items[len(kept) :]:
        state = _state(item)
        kept.append(item if type(item) in _IMMUTABLE or state is not None else OPAQUE)
        if state is not None and isinstance(item, BaseMessage):
            messages.append(item)
            live.append(item.__dict__)
            extras.append(item.__pydantic_extra__)
            states.append(state)
    return Remembered(
        version,
        stored.ref,
        items=tuple(kept),
        entries=stored.entries,
        full_leaves=stored.full_leaves,
        messages=tuple(messages),
        live=tuple(live),
        extras=tuple(extras),
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
    if type(item).model_config.get("validate_assignment"):  # then an assignment replaces the dictionary of fields
        return None
    state = item.__dict__.copy()
    try:
        for name, value in item.__dict__.items():
            if type(value) not in _IMMUTABLE:
                state[name] = _copied(value)
    except TypeError:
        return None
    return state


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is list:
        return [_copied(item) for item in value] if value else _NO_LIST
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()} if value else _NO_DICT
    raise TypeError
