"""The pool of KV blocks that the fake engine models: block-granular prefix hits, least recently used goes first.

The rules are the engine's own: a prompt of `n` tokens hits at most `(n - 1) // block * block` of them; blocks in use
are never evicted; of one request's blocks the tail goes before the head; blocks without a hash are reused first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pancake_langgraph._errors import ConfigError, InvariantError
from pancake_langgraph.engines import _compat

#: Takes the events of one change, in the engine's own wire form.
EventSink = Callable[[list[dict[str, Any]]], None]


@dataclass(slots=True, eq=False)
class _Block:
    hash: int | None = None
    users: int = 0


@dataclass(slots=True, eq=False)
class Allocation:
    """The blocks of one request.  Give it back to the pool exactly once."""

    token_ids: list[int]
    cache_salt: str | None
    cached_tokens: int
    blocks: list[_Block] = field(default_factory=list)
    hashed_blocks: int = 0
    last_hash: int | None = None


class LruBlockPool:
    """Blocks, who uses them, and which prefix they hold.  Not thread-safe."""

    def __init__(self, num_blocks: int, block_size_tokens: int, *, on_events: EventSink | None = None) -> None:
        """Make `num_blocks` empty blocks of `block_size_tokens` each.

        Raises:
            ConfigError: if either is not positive.
        """
        if num_blocks < 1 or block_size_tokens < 1:
            raise ConfigError(
                f"pool: got {num_blocks} blocks of {block_size_tokens} tokens, allowed is 1 or more of each"
            )
        self.block_size_tokens = block_size_tokens
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: deque[_Block] = deque(self._blocks)
        self._by_hash: dict[int, list[_Block]] = {}
        self._on_events = on_events
        self._events: list[dict[str, Any]] = []
        self.allocated_tokens = 0
        #: Called before free blocks are taken, so that their order can be put right.
        self.before_use: Callable[[], None] | None = None

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses, whether they hold a prefix or not."""
        return len(self._free)

    @property
    def used_ratio(self) -> float:
        """Share of the blocks that requests use now."""
        return 1 - len(self._free) / len(self._blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens`."""
        return -(-num_tokens // self.block_size_tokens)

    def resident_tokens(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Return how many leading tokens are held, in whole blocks; touches nothing."""
        count = 0
        for block_hash, _ in self._hashes(token_ids, cache_salt):
            if block_hash not in self._by_hash:
                break
            count += 1
        return count * self.block_size_tokens

    def hashes_of(self, token_ids: Sequence[int], cache_salt: str | None) -> tuple[int, ...]:
        """Return the hashes of the whole blocks of a prefix."""
        return tuple(block_hash for block_hash, _ in self._hashes(token_ids, cache_salt))

    def holds(self, block_hash: int) -> bool:
        """Say whether some block holds this."""
        return block_hash in self._by_hash

    def arrange(self, rank: Callable[[int], tuple[int, int]]) -> int:
        """Order the free blocks by the rank of what they hold, else as they were; return how many go before 0."""
        ranked = [((0, 0) if block.hash is None else rank(block.hash), block) for block in self._free]
        ranked.sort(key=lambda pair: pair[0])
        self._free = deque(block for _, block in ranked)
        return sum(place < (0, 0) for place, _ in ranked)

    def allocate(self, token_ids: Sequence[int], cache_salt: str | None, *, extra_tokens: int) -> Allocation | None:
        """Take blocks for a prompt and `extra_tokens` after it; `None` when too few are free."""
        if self.before_use is not None:
            self.before_use()
        size = self.block_size_tokens
        hits: list[_Block] = []
        last_hash: int | None = None
        for block_hash, _ in self._hashes(token_ids[: (len(token_ids) - 1) // size * size], cache_salt):
            if block_hash not in self._by_hash:
                break
            hits.append(self._by_hash[block_hash][0])
            last_hash = block_hash
        needed = self.blocks_for(len(token_ids) + extra_tokens) - len(hits)
        if needed > len(self._free) - sum(block.users == 0 for block in hits):
            return None
        for block in hits:
            if block.users == 0:
                self._free.remove(block)
            block.users += 1
        allocation = Allocation(list(token_ids), cache_salt, len(hits) * size, hits, len(hits), last_hash)
        allocation.blocks = hits + [self._take_free() for _ in range(needed)]
        self._flush()
        return allocation

    def computed(self, allocation: Allocation, num_tokens: int) -> None:
        """Note that the first `num_tokens` of the request are computed: whole blocks can be hit from now on."""
        size = self.block_size_tokens
        full = min(num_tokens, len(allocation.token_ids)) // size
        if full <= allocation.hashed_blocks:
            return
        first, parent = allocation.hashed_blocks, allocation.last_hash
        stored: list[int] = []
        for position in range(first, full):
            tokens = allocation.token_ids[position * size : (position + 1) * size]
            block_hash = _chained(allocation.last_hash, tokens, allocation.cache_salt if position == 0 else None)
            block = allocation.blocks[position]
            block.hash = block_hash
            self._by_hash.setdefault(block_hash, []).append(block)
            allocation.last_hash = block_hash
            stored.append(block_hash)
        allocation.hashed_blocks = full
        self.allocated_tokens += len(stored) * size
        salts = [
            [allocation.cache_salt] if allocation.cache_salt and index == 0 else None for index in range(first, full)
        ]
        self._events.append(
            {
                "type": _compat.EVENT_STORED,
                "block_hashes": stored,
                "parent_block_hash": parent,
                "token_ids": allocation.token_ids[first * size : full * size],
                "block_size": size,
                "lora_name": None,
                "medium": _compat.POOL_MEDIUM,
                "extra_keys": salts,
                "group_idx": 0,
            }
        )
        self._flush()

    def free(self, allocation: Allocation) -> None:
        """Give the request's blocks back; what they hold stays until it is evicted."""
        reuse_first: list[_Block] = []
        for block in reversed(allocation.blocks):
            block.users -= 1
            if block.users < 0:
                raise InvariantError("pool: an allocation was freed twice")
            if block.users == 0:
                if block.hash is None:
                    reuse_first.append(block)
                else:
                    self._free.append(block)
        self._free.extendleft(reversed(reuse_first))

    def clear(self) -> bool:
        """Forget all prefixes; refused while any request runs."""
        if len(self._free) != len(self._blocks):
            return False
        for block in self._blocks:
            block.hash = None
        self._by_hash.clear()
        self._events.append({"type": _compat.EVENT_CLEARED})
        self._flush()
        return True

    def _take_free(self) -> _Block:
        block = self._free.popleft()
        if block.hash is not None:
            holders = self._by_hash[block.hash]
            holders.remove(block)
            if not holders:
                del self._by_hash[block.hash]
            self._events.append(
                {
                    "type": _compat.EVENT_REMOVED,
                    "block_hashes": [block.hash],
                    "medium": _compat.POOL_MEDIUM,
                    "group_idx": 0,
                }
            )
            block.hash = None
        block.users = 1
        return block

    def _hashes(self, token_ids: Sequence[int], cache_salt: str | None) -> Iterator[tuple[int, int]]:
        size, parent = self.block_size_tokens, None
        for start in range(0, len(token_ids) - size + 1, size):
            parent = _chained(parent, token_ids[start : start + size], cache_salt if start == 0 else None)
            yield parent, start

    def _flush(self) -> None:
        events, self._events = self._events, []
        if events and self._on_events is not None:
            self._on_events(events)


def _chained(parent: int | None, tokens: Sequence[int], cache_salt: str | None) -> int:
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=8)
    digest.update(b"" if parent is None else parent.to_bytes(8, "big"))
    digest.update(b"" if not cache_salt else b"salt" + cache_salt.encode())
    return int.from_bytes(digest.digest(), "big")
