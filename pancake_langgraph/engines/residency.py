"""What lies in an engine's pool, told by the events that it publishes.  Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pancake_langgraph.engines import _compat

#: More blocks than this are not remembered (64 million tokens at 64 tokens a block).
MAX_BLOCKS: Final = 1_000_000
_DIGEST_BYTES: Final = 16

#: Block hashes are opaque: newer engines send integers, older ones byte strings.
BlockHash = int | bytes
_Key = tuple[BlockHash | None, bytes, tuple[Any, ...]]


@dataclass(slots=True)
class _Entry:
    key: _Key
    copies: int


class PoolIndex:
    """Finds how much of a prompt the engine would not have to compute.

    A block is found by its parent's hash, its own tokens and its extra keys, never by computing the engine's hash.
    Only the main group of the engine's own pool is indexed.  Not thread-safe.
    """

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        """Know nothing: `complete` is false until `reset` says that the pool was seen from a known state."""
        self._max_blocks = max_blocks
        self._entries: dict[BlockHash, _Entry] = {}
        self._by_key: dict[_Key, BlockHash] = {}
        self._block_size_tokens: int | None = None
        self._complete = False
        self._allocated_tokens = 0

    @property
    def complete(self) -> bool:
        """Whether every event since a known state was seen and understood."""
        return self._complete

    @property
    def allocated_tokens(self) -> int:
        """Tokens of all blocks ever stored; it only grows."""
        return self._allocated_tokens

    @property
    def block_size_tokens(self) -> int | None:
        """Tokens per block, once a block was stored."""
        return self._block_size_tokens

    @property
    def num_blocks(self) -> int:
        """Distinct blocks in the pool now."""
        return len(self._entries)

    def reset(self, *, complete: bool) -> None:
        """Forget all blocks; `complete` says whether the pool is known to be empty at this point."""
        self._entries.clear()
        self._by_key.clear()
        self._block_size_tokens = None  # an engine that restarted may have another
        self._complete = complete

    def mark_incomplete(self) -> None:
        """Note that events were lost; `complete` stays false until `reset` or until the engine clears its pool."""
        self._complete = False

    def apply(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Apply the events of one batch, in order.  What is not understood makes the index incomplete."""
        for event in events:
            kind = event.get("type")
            if kind == _compat.EVENT_CLEARED:
                self.reset(complete=True)
            elif event.get("medium") not in (None, _compat.POOL_MEDIUM):
                continue  # another tier's block
            elif event.get("group_idx") not in (None, 0):
                self._complete = False  # several groups: a hit needs all of them, which is not modelled
            elif kind == _compat.EVENT_STORED:
                self._store(event)
            elif kind == _compat.EVENT_REMOVED:
                self._remove(event.get("block_hashes") or ())
            else:
                self._complete = False

    def resident_tokens(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Return how many leading tokens are in the pool, in whole blocks.

        The engine computes the last token of a prompt always, so that of a prompt of `n` tokens it reports at most
        `(n - 1) // block * block` as cached.
        """
        size = self._block_size_tokens
        if size is None:
            return 0
        parent: BlockHash | None = None
        extra: tuple[Any, ...] = (cache_salt,) if cache_salt else ()
        for start in range(0, len(token_ids) - size + 1, size):
            found = self._by_key.get((parent, _digest(token_ids[start : start + size]), extra))
            if found is None:
                return start
            parent, extra = found, ()  # the salt stands in the first block only; the chain carries it on
        return len(token_ids) // size * size

    def _store(self, event: Mapping[str, Any]) -> None:
        hashes, tokens, size = event.get("block_hashes"), event.get("token_ids"), event.get("block_size")
        if not isinstance(hashes, list | tuple) or not isinstance(tokens, list | tuple) or not isinstance(size, int):
            self._complete = False
            return
        if size <= 0 or len(tokens) != len(hashes) * size or self._block_size_tokens not in (None, size):
            self._complete = False  # some blocks were left out: which tokens belong to which hash is not said
            return
        self._block_size_tokens = size
        extra_keys = event.get("extra_keys") or [None] * len(hashes)
        adapter: tuple[Any, ...] = (("adapter", event["lora_name"]),) if event.get("lora_name") else ()
        parent = event.get("parent_block_hash")
        for position, (block_hash, extra) in enumerate(zip(hashes, extra_keys, strict=False)):
            tokens_here = tokens[position * size : (position + 1) * size]
            self._add(block_hash, (parent, _digest(tokens_here), _frozen(extra) + adapter))
            parent = block_hash
        self._allocated_tokens += len(tokens)

    def _add(self, block_hash: BlockHash, key: _Key) -> None:
        entry = self._entries.get(block_hash)
        if entry is not None:
            entry.copies += 1  # two requests computed the same block at once; the engine keeps both
            return
        if len(self._entries) >= self._max_blocks:
            self.reset(complete=False)
        self._entries[block_hash] = _Entry(key, 1)
        self._by_key[key] = block_hash

    def _remove(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            entry = self._entries.get(block_hash)
            if entry is None:
                continue
            entry.copies -= 1
            if entry.copies == 0:
                del self._entries[block_hash]
                self._by_key.pop(entry.key, None)


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()


def _frozen(extra: Any) -> tuple[Any, ...]:
    """Make one block's extra keys hashable."""
    if extra is None:
        return ()
    if isinstance(extra, list | tuple):
        return tuple(_frozen(item) if isinstance(item, list | tuple) else item for item in extra)
    return (extra,)
