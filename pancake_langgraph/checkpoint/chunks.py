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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import is_
from typing import Any, Final, NamedTuple

from pancake_langgraph.checkpoint.elements import FANOUT
from pancake_langgraph.checkpoint.moulds import IMMUTABLE, Mould, mould_of

#: Items in a chunk; whole leaves of them.
CHUNK: Final = 4 * FANOUT
#: Stands for an item that cannot be recognized again; no item is this object.
OPAQUE: Final = object()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Up to `CHUNK` neighbors of a list as they were stored.

    `entries` are the items' entries in leaves, `leaves` the hashes of the full leaves, `moulds` what the messages held
    when their entries were made (`None` for other items).  `fields` are the messages' dictionaries, `referents` what
    these held; `empty` are the containers in them that held nothing, `nested` the others, `copies` what those held.
    """

    items: tuple[object, ...]
    entries: tuple[bytes, ...]
    leaves: tuple[bytes, ...]
    moulds: tuple[Mould | None, ...]
    fields: tuple[dict[str, Any], ...]
    referents: list[object]
    empty: tuple[object, ...]
    nested: tuple[object, ...]
    copies: tuple[object, ...]

    def is_unchanged(self) -> bool:
        """Say whether no message was changed in place since."""
        # The one part of a put that grows with history.  The collector's view of a dictionary, all its values in one
        # pass, costs half of comparing it with a copy; keys need no look, since a message has all its fields.
        try:
            return (
                not any(self.empty) and gc.get_referents(*self.fields) == self.referents and self.nested == self.copies
            )
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
            self.moulds + more.moulds,
            self.fields + more.fields,
            self.referents + more.referents,
            self.empty + more.empty,
            self.nested + more.nested,
            self.copies + more.copies,
        )


class Listing(NamedTuple):
    """The chunks of a list; the first `num_shared` were taken over as they are."""

    chunks: tuple[Chunk, ...]
    num_shared: int


def known_moulds(entries: Sequence[bytes], known: Sequence[Chunk]) -> list[Mould | None]:
    """Return for each entry of a list the mould that its item can be cast from, `None` where it has to be decoded.

    Args:
        entries: The list's entries.
        known: The chunks of a list stored before it.
    """
    moulds: list[Mould | None] = []
    for chunk in known:
        at = len(moulds)
        if chunk.entries == entries[at : at + len(chunk.entries)]:
            moulds += [None if mould is None or mould.marked is None else mould for mould in chunk.moulds]
        else:
            moulds += [None] * len(chunk.entries)
    return (moulds + [None] * (len(entries) - len(moulds)))[: len(entries)]


def chunks_of_stored(
    items: Sequence[object], entries: Sequence[bytes], full_leaves: Sequence[bytes], moulds: Sequence[Mould | None]
) -> tuple[Chunk, ...]:
    """Return the chunks of a list that was read.

    Args:
        items: Its items.
        entries: One for each of them.
        full_leaves: The hashes of its full leaves.
        moulds: Those that items were cast from, `None` for an item that was decoded.
    """
    pairs = [*zip(items, moulds, strict=True)]
    return tuple(
        _chunk(
            items[at : at + CHUNK],
            entries[at : at + CHUNK],
            full_leaves[at // FANOUT : (at + CHUNK) // FANOUT],
            [mould or mould_of(item) for item, mould in pairs[at : at + CHUNK]],
        )
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
    stored = _lookup([chunk for chunk, old in zip(known, kept, strict=True) if old is None], encode)
    chunks: list[Chunk] = []
    num_shared = 0
    for number, at in enumerate(range(0, len(items), CHUNK)):
        old = kept[number] if number < len(kept) else None
        if old is not None and len(old.items) == min(CHUNK, len(items) - at):
            num_shared += num_shared == number
            chunks.append(old)
            continue
        part = items[at if old is None else at + len(old.items) : at + CHUNK]
        found = [stored(item) for item in part]
        chunk = _chunk(part, [entry for entry, _ in found], (), [mould for _, mould in found])
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


def _lookup(lost: Sequence[Chunk], encode: Callable[[object], bytes]) -> Callable[[object], tuple[bytes, Mould | None]]:
    """Return a function that gives an item's entry, with what it held when that was made.

    Both come from `lost` if the item lies there unchanged, wherever it was: the mould has to stay with its entry, since
    an item that counts as unchanged need not encode to the same bytes.
    """
    places = {
        id(item): (entry, mould)
        for chunk in lost
        for item, entry, mould in zip(chunk.items, chunk.entries, chunk.moulds, strict=True)
        if item is not OPAQUE
    }

    def stored(item: object) -> tuple[bytes, Mould | None]:
        found = places.get(id(item))
        if found is not None and (type(item) in IMMUTABLE if found[1] is None else found[1].is_of(item)):
            return found
        entry = encode(item)
        return entry, mould_of(item)

    return stored


def _with_leaves(chunk: Chunk, leaf: Callable[[Sequence[bytes]], bytes]) -> Chunk:
    starts = range(len(chunk.leaves) * FANOUT, len(chunk.entries) - FANOUT + 1, FANOUT)
    new = [leaf(chunk.entries[at : at + FANOUT]) for at in starts]
    return replace(chunk, leaves=(*chunk.leaves, *new)) if new else chunk


def _chunk(
    items: Sequence[Any], entries: Sequence[bytes], leaves: Sequence[bytes], moulds: Sequence[Mould | None]
) -> Chunk:
    kept: list[object] = []
    states: list[dict[str, Any]] = []
    empty: list[object] = []
    nested: list[object] = []
    copies: list[object] = []
    for item, mould in zip(items, moulds, strict=True):
        if mould is None:
            kept.append(item if type(item) in IMMUTABLE else OPAQUE)
            continue
        kept.append(item)
        fields = item.__dict__
        states.append(fields)
        empty.append(item.__pydantic_extra__)
        for name in mould.containers:
            value = fields[name]
            if value:
                nested.append(value)
                copies.append(mould.fields[name])
            else:
                empty.append(value)
    return Chunk(
        tuple(kept),
        tuple(entries),
        tuple(leaves),
        tuple(moulds),
        tuple(states),
        gc.get_referents(*states),
        tuple(empty),
        tuple(nested),
        tuple(copies),
    )
