"""Splits channel values into elements that are stored once, by content.

A list is a tree: leaves hold up to `FANOUT` entries, inner nodes up to `FANOUT` hashes.  Appending to a list makes one
new leaf and one node per level, so that a step's cost does not grow with history (the idea of a persistent vector;
Bagwell, 2001, with content hashes as in Merkle, 1987).  Entries shorter than a hash is worth lie in their leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress
from typing import Final

import ormsgpack

from pancake_langgraph._errors import CorruptCheckpoint
from pancake_langgraph.checkpoint.rows import HASH_BYTES

FANOUT: Final = 32
#: An encoding up to this long is kept where it is used instead of behind its hash.
INLINE_BYTES: Final = 96
_INLINE: Final = b"\x00"
_HASHED: Final = b"\x01"


class RefKind(IntEnum):
    """How a channel's value is found."""

    INLINE = 0
    ELEMENT = 1
    LEAF = 2
    TREE = 3


@dataclass(frozen=True, slots=True)
class Ref:
    """Leads to one value.

    `data` is the value's encoding (`INLINE`), its hash (`ELEMENT`), a leaf of a short list (`LEAF`), or for a long one
    (`TREE`) the packed list of node hashes at height `height` above the leaves.
    """

    kind: RefKind
    data: bytes
    height: int = 0

    def packed(self) -> list[object]:
        """Return what `Ref.unpacked` takes."""
        return [int(self.kind), self.data, self.height]

    @staticmethod
    def unpacked(values: Sequence[object]) -> Ref:
        """Undo `packed`.

        Raises:
            CorruptCheckpoint: if it is not one.
        """
        try:
            kind, data, height = values
            if isinstance(data, bytes) and isinstance(height, int) and isinstance(kind, int):
                return Ref(RefKind(kind), data, height)
        except (TypeError, ValueError):
            pass
        raise CorruptCheckpoint("a reference to a value is damaged; restore the store from a copy")


class ElementSink:
    """Takes elements that one write stores, by hash.  Not thread-safe; one per write."""

    def __init__(self, digest: Callable[[bytes], bytes]) -> None:
        """Hash with `digest`."""
        self._digest = digest
        self.plain: dict[bytes, bytes] = {}

    def add(self, data: bytes) -> bytes:
        """Take one element; return its hash."""
        key = self._digest(data)
        self.plain[key] = data
        return key

    def entry(self, encoding: bytes) -> bytes:
        """Return the entry for a list item with that encoding."""
        return _INLINE + encoding if len(encoding) <= INLINE_BYTES else _HASHED + self.add(encoding)

    def single(self, encoding: bytes) -> Ref:
        """Return the reference to a value that is no list."""
        if len(encoding) <= INLINE_BYTES:
            return Ref(RefKind.INLINE, encoding)
        return Ref(RefKind.ELEMENT, self.add(encoding))

    def leaf(self, entries: Sequence[bytes]) -> bytes:
        """Take a leaf of up to `FANOUT` entries; return its hash."""
        return self.add(ormsgpack.packb(list(entries)))

    def list_of(self, entries: Sequence[bytes], kept: Sequence[bytes] = ()) -> tuple[Ref, tuple[bytes, ...]]:
        """Return the reference to a list, and the hashes of its full leaves.

        Args:
            entries: All entries, in order.
            kept: Hashes of leading full leaves that are stored already (from an earlier call, of the same entries).
        """
        if len(entries) <= FANOUT:
            return self.joined((), entries), ()
        starts = range(len(kept) * FANOUT, len(entries) - FANOUT + 1, FANOUT)
        full = (*kept, *(self.leaf(entries[at : at + FANOUT]) for at in starts))
        return self.joined(full, entries[len(full) * FANOUT :]), full

    def joined(self, full_leaves: Sequence[bytes], rest: Sequence[bytes], *, num_kept: int = 0) -> Ref:
        """Return the reference to a list.

        Args:
            full_leaves: Hashes of its full leaves; none if it has no more than `FANOUT` entries.
            rest: The entries behind them.
            num_kept: How many full leaves a list began with that is stored already, and these here begin with.
        """
        if not full_leaves:
            return Ref(RefKind.LEAF, ormsgpack.packb(list(rest)))
        level = [*full_leaves, self.leaf(rest)] if rest else list(full_leaves)
        height = 0
        while len(level) > FANOUT:
            nodes = [b"".join(level[at : at + FANOUT]) for at in range(0, len(level), FANOUT)]
            # Nodes before the last kept child of this level lie in the stored list as well.
            num_kept = max(num_kept - 1, 0) // FANOUT
            level = [*map(self._digest, nodes[:num_kept]), *map(self.add, nodes[num_kept:])]
            height += 1
        return Ref(RefKind.TREE, b"".join(level), height)


#: Fetches elements' plain bytes; raises `CorruptCheckpoint` when one is missing.
Fetch = Callable[[Sequence[bytes]], Mapping[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Listed:
    """A list on its way back: its entries, and the hashes of its full leaves."""

    entries: tuple[bytes, ...]
    full_leaves: tuple[bytes, ...]


def open_refs(refs: Mapping[str, Ref], fetch: Fetch) -> Mapping[str, bytes | Listed]:
    """Return each value's encoding, or its entries when it is a list; one fetch per level for all of them together."""
    nodes: MutableMapping[str, list[bytes]] = {
        key: _split(ref.data) for key, ref in refs.items() if ref.kind is RefKind.TREE
    }
    heights = {key: refs[key].height for key in nodes}
    while any(heights.values()):
        wanted = [node for key, height in heights.items() if height for node in nodes[key]]
        found = fetch(wanted)
        for key, height in heights.items():
            if height:
                nodes[key] = [child for node in nodes[key] for child in _split(found[node])]
                heights[key] = height - 1
    singles = [ref.data for ref in refs.values() if ref.kind is RefKind.ELEMENT]
    found = fetch([*singles, *(leaf for leaves in nodes.values() for leaf in leaves)])
    opened: dict[str, bytes | Listed] = {}
    for key, ref in refs.items():
        if ref.kind is RefKind.TREE:
            entries = tuple(entry for leaf in nodes[key] for entry in _entries(found[leaf]))
            opened[key] = Listed(entries, tuple(nodes[key][: len(entries) // FANOUT]))
        elif ref.kind is RefKind.LEAF:
            opened[key] = Listed(tuple(_entries(ref.data)), ())
        else:
            opened[key] = found[ref.data] if ref.kind is RefKind.ELEMENT else ref.data
    return opened


def open_entries(entries: Sequence[bytes], fetch: Fetch) -> list[bytes]:
    """Return the encodings behind entries, in order."""
    behind = [entry[1:] for entry in entries]
    is_hashed = [entry.startswith(_HASHED) for entry in entries]
    found = fetch([*compress(behind, is_hashed)])
    return [found[data] if hashed else data for data, hashed in zip(behind, is_hashed, strict=True)]


def reachable(ref: Ref, plain: Mapping[bytes, bytes]) -> Iterator[bytes]:
    """Yield the hashes of all elements a reference leads to; those not in `plain` end their branch."""
    if ref.kind is RefKind.ELEMENT:
        yield ref.data
    elif ref.kind is RefKind.LEAF:
        yield from _hashed(ref.data)
    elif ref.kind is RefKind.TREE:
        level = _split(ref.data)
        for _ in range(ref.height):
            yield from level
            level = [child for node in level if node in plain for child in _split(plain[node])]
        yield from level
        for leaf in level:
            if leaf in plain:
                yield from _hashed(plain[leaf])


def _hashed(leaf: bytes) -> Iterator[bytes]:
    return (entry[1:] for entry in _entries(leaf) if entry[:1] == _HASHED)


def _split(joined: bytes) -> list[bytes]:
    if len(joined) % HASH_BYTES:
        raise CorruptCheckpoint("a list's node is damaged; restore the store from a copy")
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def _entries(leaf: bytes) -> list[bytes]:
    try:
        entries = ormsgpack.unpackb(leaf)
    except ormsgpack.MsgpackDecodeError as exc:
        raise CorruptCheckpoint("a list's leaf is damaged; restore the store from a copy") from exc
    if not isinstance(entries, list) or not all(isinstance(entry, bytes) and entry for entry in entries):
        raise CorruptCheckpoint("a list's leaf is damaged; restore the store from a copy")
    return entries
