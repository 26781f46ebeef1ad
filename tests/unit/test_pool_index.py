"""The residency index: chains, salts, evictions, and what it does not understand."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.engines.fake_pool import LruBlockPool
from pancake_langgraph.engines.residency import PoolIndex

BLOCK = 4


def stored(hashes, tokens, *, parent=None, extra=None, **more):
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra,
        "group_idx": 0,
        **more,
    }


def removed(*hashes, **more):
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0, **more}


def fresh() -> PoolIndex:
    index = PoolIndex()
    index.reset(complete=True)
    return index


def test_an_index_that_saw_no_start_is_incomplete():
    assert not PoolIndex().complete
    assert PoolIndex().resident_tokens((1, 2, 3, 4)) == 0


def test_blocks_are_followed_through_their_parents():
    index = fresh()
    index.apply([stored([11, 12], list(range(8)), extra=[None, None])])
    index.apply([stored([13], [8, 9, 10, 11], parent=12, extra=[None])])
    assert index.resident_tokens(range(12)) == 12
    assert index.resident_tokens(range(11)) == 8
    assert index.resident_tokens([0, 1, 2, 3, 9, 9, 9, 9]) == 4
    assert index.resident_tokens([8, 9, 10, 11]) == 0  # same tokens, another parent
    assert index.allocated_tokens == 12
    assert index.block_size_tokens == BLOCK


def test_the_salt_stands_in_the_first_block_only():
    index = fresh()
    index.apply([stored([21, 22], list(range(8)), extra=[["tenant"], None])])
    assert index.resident_tokens(range(8), "tenant") == 8
    assert index.resident_tokens(range(8)) == 0
    assert index.resident_tokens(range(8), "other") == 0


def test_an_adapters_blocks_are_not_the_base_models():
    index = fresh()
    index.apply([stored([31], list(range(4)), extra=[["adapter-x"]], lora_name="adapter-x")])
    assert index.resident_tokens(range(4)) == 0
    assert index.resident_tokens(range(4), "adapter-x") == 0


def test_a_hole_ends_the_prefix():
    index = fresh()
    index.apply([stored([1, 2, 3], list(range(12))), removed(2)])
    assert index.resident_tokens(range(12)) == 4


def test_a_block_computed_twice_stays_until_both_copies_are_gone():
    index = fresh()
    index.apply([stored([1], [0, 1, 2, 3]), stored([1], [0, 1, 2, 3]), removed(1)])
    assert index.resident_tokens(range(4)) == 4
    index.apply([removed(1)])
    assert index.resident_tokens(range(4)) == 0
    assert index.allocated_tokens == 8


def test_clearing_starts_from_a_known_state():
    index = PoolIndex()
    index.apply([stored([1], [0, 1, 2, 3])])
    assert not index.complete
    index.apply([{"type": "AllBlocksCleared"}])
    assert index.complete
    assert index.resident_tokens(range(4)) == 0


def test_other_tiers_are_left_out():
    index = fresh()
    index.apply([stored([1], [0, 1, 2, 3], medium="CPU"), removed(7, medium="CPU")])
    assert index.resident_tokens(range(4)) == 0
    assert index.complete


def test_what_is_not_understood_makes_it_incomplete():
    for event in (
        {"type": "SomethingNew"},
        stored([1], [0, 1, 2]),
        stored([1], [0, 1, 2, 3], group_idx=1),
        {"type": "BlockStored", "medium": "GPU"},
    ):
        index = fresh()
        index.apply([event])
        assert not index.complete, event


def test_a_removed_block_that_was_never_seen_is_no_trouble():
    index = fresh()
    index.apply([removed(99)])
    assert index.complete


def test_the_table_is_bounded_and_says_so():
    index = PoolIndex(max_blocks=2)
    index.reset(complete=True)
    index.apply([stored([1, 2, 3], list(range(12)))])
    assert index.num_blocks <= 2
    assert not index.complete


class ReferencePool:
    """An LRU pool written another way: one ordered table of prefixes, oldest first, no blocks in use."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.table: OrderedDict[tuple, None] = OrderedDict()

    def request(self, tokens: tuple[int, ...], salt: str | None) -> int:
        keys = [(salt, tokens[: end + BLOCK]) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]
        hits = 0
        for key in keys[: (len(tokens) - 1) // BLOCK]:
            if key not in self.table:
                break
            hits += 1
        used = [self.table.pop(key) for key in keys[:hits]]
        assert len(used) == hits
        # The last block is computed anew even when an older copy lies in the pool: then there are two.
        needed = -(-len(tokens) // BLOCK) - hits
        free = self.num_blocks - hits - len(self.table)
        for _ in range(max(0, needed - free)):
            self.table.popitem(last=False)
        for key in reversed(keys):
            self.table.pop(key, None)
            self.table[key] = None
        return hits * BLOCK

    def resident(self, tokens: tuple[int, ...], salt: str | None) -> int:
        count = 0
        for end in range(0, len(tokens) - BLOCK + 1, BLOCK):
            if (salt, tokens[: end + BLOCK]) not in self.table:
                break
            count += BLOCK
        return count


#: Lengths that end inside a block: there the reference needs no copies of the last block.
_PROMPTS = st.tuples(
    st.integers(0, 2),
    st.integers(1, 6).map(lambda blocks: blocks * BLOCK + 1),
    st.integers(0, 24),
    st.sampled_from([None, "s"]),
)


def _tokens(stem: int, length: int, turn: int) -> tuple[int, ...]:
    """Return `length` tokens of one of three stems that branch off at `turn`."""
    return tuple(position if position < turn else 1000 * (stem + 1) + position for position in range(length))


@given(st.lists(_PROMPTS, max_size=40), st.integers(7, 16))
def test_index_equals_an_lru_pool(requests, num_blocks):
    index = fresh()
    pool = LruBlockPool(num_blocks, BLOCK, on_events=index.apply)
    reference = ReferencePool(num_blocks)
    asked = []
    for stem, length, turn, salt in requests:
        tokens = _tokens(stem, length, turn)
        asked.append((tokens, salt))
        told = min(index.resident_tokens(tokens, salt), (len(tokens) - 1) // BLOCK * BLOCK)
        allocation = pool.allocate(tokens, salt, extra_tokens=0)
        assert allocation is not None
        assert allocation.cached_tokens == told == reference.request(tokens, salt)
        pool.computed(allocation, len(tokens))
        pool.free(allocation)
        for other, other_salt in asked:
            expected = reference.resident(other, other_salt)
            assert index.resident_tokens(other, other_salt) == expected
            assert pool.resident_tokens(other, other_salt) == expected
    assert index.complete
    assert index.num_blocks <= num_blocks
    assert index.allocated_tokens == pool.allocated_tokens


@given(st.lists(st.tuples(_PROMPTS, st.booleans()), max_size=40), st.integers(8, 20))
def test_index_equals_the_pool_while_requests_overlap(steps, num_blocks):
    index = fresh()
    pool = LruBlockPool(num_blocks, BLOCK, on_events=index.apply)
    running, asked = [], []
    for (stem, length, turn, salt), finish_first in steps:
        if finish_first and running:
            pool.free(running.pop(0))
        tokens = _tokens(stem, length - 1, turn)
        asked.append((tokens, salt))
        allocation = pool.allocate(tokens, salt, extra_tokens=2)
        if allocation is not None:
            pool.computed(allocation, len(tokens) // 2)
            pool.computed(allocation, len(tokens))
            running.append(allocation)
        for other, other_salt in asked:
            assert index.resident_tokens(other, other_salt) == pool.resident_tokens(other, other_salt)
    for allocation in running:
        pool.free(allocation)
    assert pool.num_free_blocks == num_blocks
    assert pool.clear()
    assert index.num_blocks == 0
