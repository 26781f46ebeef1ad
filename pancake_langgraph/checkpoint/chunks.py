"""Recognizes the unchanged parts of a list, so that a step encodes, copies and hashes only what is new.

A list is remembered in chunks that never change; a longer list shares all of them but its last.  An item is recognized
when it is the same object and holds the same: immutable values by identity alone, chat messages by what they hold.
Anything else is encoded again at every step.

A message changed in place is therefore noticed, wherever it lies in the list, unless what it holds now equals what it
held: a value replaced by an equal one of another type (`True` by `1`), a dictionary whose order alone changed, a field
assigned the value that it has.  Nor is it noticed when its `__dict__` itself was replaced, or rebuilt by hand.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import is_
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage

from pancake_langgraph.checkpoint.elements import FANOUT

#: Items in a chunk; whole leaves of them.
CHUNK: Final = 4 * FANOUT
IMMUTABLE: Final = frozenset({str, int, float, bool, bytes, type(None)})
#: Stands for an item that cannot be recognized again; no item is this object.
OPAQUE: Final = object()
# Copies of what is empty; shared, since thousands of them at every read are work for the garbage collector.
_NO_LIST: Final[list[Any]] = []
_NO_DICT: Final[dict[Any, Any]] = {}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Up to `CHUNK` neighbors of a list as they were stored.

    `entries` are the items' entries in leaves, `leaves` the hashes of the full leaves, `states` copies of the fields of
    messages (`None` for other items).  `watched` are the dictionaries and empty containers that messages consist of,
    `referents` what these held; `nested` are the other containers, `copies` what those held.
    """

    items: tuple[object, ...]
    entries: tuple[bytes, ...]
    leaves: tuple[bytes, ...]
    states: tuple[dict[str, Any] | None, ...]
    watched: tuple[object, ...]
    referents: list[object]
    nested: tuple[object, ...]
    copies: tuple[object, ...]

    def is_unchanged(self) -> bool:
        """Say whether no message was changed in place since."""
        # The one part of a put that grows with history.  The collector's view of a dictionary, all its values in one
        # pass, costs half of comparing it with a copy; keys need no look, since a message has all its fields.
        try:
            return gc.get_referents(*self.watched) == self.referents and self.nested == self.copies
        except Exception:  # noqa: BLE001 - fails open: only something new (an array, say) can refuse to be compared
            return False

    def is_next_of(self, items: Iterator[object]) -> bool:
        """Say whether what comes next are the items of this chunk, unchanged."""
        return all(map(is_, self.items, items)) and self.is_unchanged()

    def plus(self, more: Chunk) -> Chunk:
        """Return this chunk with the items of another one behind its own; `leaves` stay its own."""
        return Chunk(
            self.items + more.items,
            self.entries + more.entries,
            self.leaves,
            self.states + more.states,
            self.watched + more.watched,
            self.referents + more.referents,
            self.nested + more.nested,
            self.copies + more.copies,
        )


class Listing(NamedTuple):
    """The chunks of a list; the first `num_shared` were taken over as they are."""

    chunks: tuple[Chunk, ...]
    num_shared: int


def chunks_of_stored(
    items: Sequence[object], entries: Sequence[bytes], full_leaves: Sequence[bytes]
) -> tuple[Chunk, ...]:
    """Return the chunks of a list that was read.

    Args:
        items: Its items.
        entries: One for each of them.
        full_leaves: The hashes of its full leaves.
    """
    return tuple(
        _chunk(items[at : at + CHUNK], entries[at : at + CHUNK], full_leaves[at // FANOUT : (at + CHUNK) // FANOUT])
        for at in range(0, len(items), CHUNK)
    )


def chunks_of_new(
    items: Sequence[object],
    known: Sequence[Chunk],
    *,
    encode: Callable[[object], bytes],
    leaf: Callable[[Sequence[bytes]], bytes],
) -> Listing:
    """Return the chunks of a list that is about to be stored.

    Args:
        items: Its items.
        known: The chunks of the list stored before it.
        encode: Gives the entry of an item that is not known; raises what it likes.
        leaf: Gives the hash of a full leaf that is not known.
    """
    kept = _kept(items, known)
    entry_of = _lookup([chunk for chunk, old in zip(known, kept, strict=True) if old is None], encode)
    chunks: list[Chunk] = []
    num_shared = 0
    for number, at in enumerate(range(0, len(items), CHUNK)):
        old = kept[number] if number < len(kept) else None
        if old is not None and len(old.items) == min(CHUNK, len(items) - at):
            num_shared += num_shared == number
            chunks.append(old)
            continue
        first = at if old is None else at + len(old.items)
        part = items[first : at + CHUNK]
        chunk = _chunk(part, [entry_of(item) for item in part], ())
        chunk = chunk if old is None else old.plus(chunk)
        # A list of one leaf at most is kept where it is used; it has no leaf of its own.
        chunks.append(_with_leaves(chunk, leaf) if len(items) > FANOUT else chunk)
    return Listing(tuple(chunks), num_shared)


def _kept(items: Sequence[object], known: Sequence[Chunk]) -> list[Chunk | None]:
    """Return those chunks that are still where they were, unchanged; `None` for the others."""
    kept: list[Chunk | None] = []
    end, rest = 0, iter(items)
    for chunk in known:
        end += len(chunk.items)
        if end <= len(items) and chunk.is_next_of(rest):
            kept.append(chunk)
        else:
            kept.append(None)
            rest = islice(items, end, None)
    return kept


def _lookup(lost: Sequence[Chunk], encode: Callable[[object], bytes]) -> Callable[[object], bytes]:
    """Return a function that gives an item's entry: from `lost` if it lies there unchanged, wherever it was."""
    places = {
        id(item): (entry, state)
        for chunk in lost
        for item, entry, state in zip(chunk.items, chunk.entries, chunk.states, strict=True)
        if item is not OPAQUE
    }

    def entry_of(item: object) -> bytes:
        found = places.get(id(item))
        return encode(item) if found is None or not _is_same(item, found[1]) else found[0]

    return entry_of


def _is_same(item: object, state: Mapping[str, Any] | None) -> bool:
    if not isinstance(item, BaseMessage):
        return state is None
    try:
        return not item.__pydantic_extra__ and bool(item.__dict__ == state)
    except Exception:  # noqa: BLE001 - as in `Chunk.is_unchanged`
        return False


def _with_leaves(chunk: Chunk, leaf: Callable[[Sequence[bytes]], bytes]) -> Chunk:
    starts = range(len(chunk.leaves) * FANOUT, len(chunk.entries) - FANOUT + 1, FANOUT)
    new = [leaf(chunk.entries[at : at + FANOUT]) for at in starts]
    if not new:
        return chunk
    return Chunk(
        chunk.items,
        chunk.entries,
        (*chunk.leaves, *new),
        chunk.states,
        chunk.watched,
        chunk.referents,
        chunk.nested,
        chunk.copies,
    )


def _chunk(items: Sequence[object], entries: Sequence[bytes], leaves: Sequence[bytes]) -> Chunk:
    kept: list[object] = []
    states: list[dict[str, Any] | None] = []
    watched: list[object] = []
    nested: list[object] = []
    copies: list[object] = []
    for item in items:
        state = _state(item, watched, nested, copies) if isinstance(item, BaseMessage) else None
        states.append(state)
        kept.append(item if type(item) in IMMUTABLE or state is not None else OPAQUE)
    return Chunk(
        tuple(kept),
        tuple(entries),
        tuple(leaves),
        tuple(states),
        tuple(watched),
        gc.get_referents(*watched),
        tuple(nested),
        tuple(copies),
    )


def _state(
    message: BaseMessage, watched: list[object], nested: list[object], copies: list[object]
) -> dict[str, Any] | None:
    """Return a copy of a message's fields, and add to the lists; `None` where they cannot be compared safely later."""
    extra = message.__pydantic_extra__
    if extra or message.__pydantic_private__:
        return None
    if type(message).model_config.get("validate_assignment"):  # then an assignment replaces the dictionary of fields
        return None
    fields = message.__dict__
    state = fields.copy()
    empty: list[object] = [fields] if extra is None else [fields, extra]
    full: list[str] = []
    try:
        for name, value in fields.items():
            if type(value) not in IMMUTABLE:
                state[name] = _copied(value)
                if value:
                    full.append(name)
                else:
                    empty.append(value)
    except TypeError:
        return None
    watched += empty
    for name in full:
        nested.append(fields[name])
        copies.append(state[name])
    return state


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is list:
        return [_copied(item) for item in value] if value else _NO_LIST
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()} if value else _NO_DICT
    raise TypeError
