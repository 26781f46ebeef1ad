"""Pool hints on vLLM's own block pool: the model of the unit tests is right, and so is the code that moves blocks."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pancake_vllm.pool_hints import PoolHints
from pancake_vllm.pool_order import BlockPoolOrder
from tests.pool_suite import NUM_BLOCKS, SIZE, PoolHintContract, chain

pytestmark = pytest.mark.real


def block_pool(*, enable_caching: bool = True) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's import warns
        from vllm.v1.core.block_pool import BlockPool

    return BlockPool(NUM_BLOCKS + 1, enable_caching=enable_caching, hash_block_size=SIZE)


class RealPool:
    """vLLM's pool, used as its scheduler does."""

    def __init__(self) -> None:
        self.pool = block_pool()
        self.order = BlockPoolOrder(self.pool)

    @property
    def num_free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def take(self, hashes: Sequence[Hashable]) -> list[Any]:
        hits: list[Any] = []
        for block_hash in hashes:
            found = self.pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            hits += found
        self.pool.touch(hits)
        blocks = [*hits, *self.pool.get_new_blocks(len(hashes) - len(hits))]
        self.pool.cache_full_blocks(
            request=SimpleNamespace(block_hashes=list(hashes)),
            blocks=blocks,
            num_cached_blocks=len(hits),
            num_full_blocks=len(blocks),
            block_size=SIZE,
            kv_cache_group_id=0,
        )
        return blocks

    def give_back(self, blocks: Sequence[Any]) -> None:
        self.pool.free_blocks(reversed(blocks))

    def free_hashes(self) -> list[Hashable]:
        held = (self.order.hash_of(block) for block in self.pool.free_block_queue.get_all_free_blocks())
        return [block_hash for block_hash in held if block_hash is not None]

    def reset(self) -> bool:
        return bool(self.pool.reset_prefix_cache())


class TestBlockPool(PoolHintContract):
    @pytest.fixture
    def pool(self) -> RealPool:
        return RealPool()


def test_the_queue_is_whole_in_both_directions_after_moves() -> None:
    real = RealPool()
    blocks = real.take(chain("a", 10))
    real.give_back(blocks)
    for moved, anchor in [(blocks[3], blocks[7]), (blocks[9], blocks[0]), (blocks[0], None), (blocks[5], blocks[5])]:
        real.order.move_before(moved, anchor)
    real.order.move_first([blocks[4], blocks[6]])
    forward = [block.block_id for block in real.pool.free_block_queue.get_all_free_blocks()]
    backward: list[int] = []
    block = real.order.last()
    while block is not None:
        backward.append(block.block_id)
        block = real.order.before(block)
    assert forward == backward[::-1]
    assert len(set(forward)) == len(forward) == NUM_BLOCKS == real.num_free
    assert forward[:2] == [blocks[4].block_id, blocks[6].block_id]
    assert forward[-1] == blocks[0].block_id
    assert {b.block_id for b in real.pool.get_new_blocks(NUM_BLOCKS)} == set(forward)


def test_a_move_to_a_block_in_use_is_refused_before_anything_has_moved() -> None:
    real = RealPool()
    used, free = real.take(chain("a", 2)), real.take(chain("b", 2))
    real.give_back(free)
    with pytest.raises(RuntimeError, match="not in the free queue"):
        real.order.move_before(free[0], used[0])
    with pytest.raises(RuntimeError):
        real.order.move_before(used[0], free[0])
    with pytest.raises(RuntimeError, match="not in the free queue"):
        real.order.move_first([free[0], used[0]])
    assert real.num_free == len(real.pool.free_block_queue.get_all_free_blocks()) == NUM_BLOCKS - 2


def test_hints_bind_to_the_real_pool_and_stay_off_without_prefix_caching() -> None:
    hints = PoolHints()
    hints.bind(RealPool().pool, num_groups=1)
    assert hints.book is not None
    off = PoolHints()
    off.bind(block_pool(enable_caching=False), num_groups=1)
    assert (off.book, off.failures) == (None, 0)
