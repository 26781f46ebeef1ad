"""The order in which the engine's pool gives up free blocks, and vLLM's pool behind it.

vLLM keeps free blocks in one queue.  It takes from the front and puts back at the end, so that the place in the queue
is all that decides which context goes first.  Moving a block changes no answer and takes nothing from anybody: a block
at the end of the queue is as free as one at its front.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol


class Block(Protocol):
    """One block of the pool; `ref_cnt` is 0 while it is free."""

    block_id: int
    ref_cnt: int


class PoolOrder(Protocol):
    """What the hints need of a pool.  Not thread-safe: belongs to the scheduler."""

    @property
    def num_blocks(self) -> int:
        """Blocks that can hold something."""
        ...

    @property
    def block_size_tokens(self) -> int:
        """Tokens per block."""
        ...

    def find(self, block_hash: Hashable) -> Block | None:
        """Return the block that a request with this hash would hit."""
        ...

    def hash_of(self, block: Block) -> Hashable | None:
        """Return what a block holds, `None` for nothing that could be hit."""
        ...

    def last(self) -> Block | None:
        """Return the free block that is given up last."""
        ...

    def before(self, block: Block) -> Block | None:
        """Return the free block that is given up just before `block`."""
        ...

    def move_before(self, block: Block, anchor: Block | None) -> None:
        """Move a free block right before another free one; to the end without one."""
        ...

    def move_first(self, blocks: Sequence[Block]) -> None:
        """Let these free blocks be given up first, in this order."""
        ...


class BlockPoolOrder:
    """vLLM's `BlockPool` with one KV cache group.

    Uses the pool's own look-up and its free queue's `remove`, `append` and `prepend_n`; only putting a block in the
    middle, for which the queue has no method, sets links of the queue, in the way `append` does.
    """

    def __init__(self, pool: Any) -> None:
        """Look at the pool of a scheduler.

        Raises:
            AttributeError: if the pool or its queue is not as it is in vLLM 0.32.
        """
        from vllm.v1.core.kv_cache_utils import get_block_hash

        self._pool = pool
        self._queue = pool.free_block_queue
        self._get_block_hash = get_block_hash
        self._head = self._queue.fake_free_list_head
        self._tail = self._queue.fake_free_list_tail
        for name in ("remove", "append", "prepend_n", "num_free_blocks"):
            getattr(self._queue, name)

    @property
    def num_blocks(self) -> int:
        """Blocks that can hold something: all but the placeholder."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def block_size_tokens(self) -> int:
        """Tokens per block."""
        return int(self._pool.hash_block_size)

    def find(self, block_hash: Hashable) -> Any | None:
        """Return the block that a request with this hash would hit."""
        found = self._pool.get_cached_block(block_hash, [0])
        return None if found is None or found[0].is_null else found[0]

    def hash_of(self, block: Any) -> Hashable | None:
        """Return what a block holds, without the number of its group."""
        key = block.block_hash
        if key is None:
            return None
        block_hash: Hashable = self._get_block_hash(key)
        return block_hash

    def last(self) -> Any | None:
        """Return the free block that is given up last."""
        return self._real(self._tail.prev_free_block)

    def before(self, block: Any) -> Any | None:
        """Return the free block that is given up just before `block`."""
        return self._real(block.prev_free_block)

    def _real(self, block: Any) -> Any | None:
        return None if block is None or block is self._head else block

    def move_before(self, block: Any, anchor: Any | None) -> None:
        """Move a free block right before another free one; to the end without one."""
        if block is anchor:
            return
        if anchor is not None and anchor.prev_free_block is None:
            raise RuntimeError(f"block {anchor.block_id} is not in the free queue")  # before anything has moved
        self._queue.remove(block)
        if anchor is None:
            self._queue.append(block)
            return
        previous = anchor.prev_free_block
        previous.next_free_block = block
        block.prev_free_block, block.next_free_block = previous, anchor
        anchor.prev_free_block = block
        self._queue.num_free_blocks += 1

    def move_first(self, blocks: Sequence[Any]) -> None:
        """Let these free blocks be given up first, in this order."""
        for block in blocks:
            if block.prev_free_block is None:
                raise RuntimeError(f"block {block.block_id} is not in the free queue")  # before anything has moved
        for block in blocks:
            self._queue.remove(block)
        self._queue.prepend_n(list(blocks))
