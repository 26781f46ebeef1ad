"""What pool hints must do to a pool, whatever pool it is: bound to a small model of one, and to vLLM's own."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pancake_vllm.hint_book import HintBook
from pancake_vllm.hint_words import Answer, HintState, Hold, Retire
from pancake_vllm.pool_order import PoolOrder

SIZE = 16
NUM_BLOCKS = 40


class Pool(Protocol):
    """A pool as a scheduler uses it."""

    order: PoolOrder

    def take(self, hashes: Sequence[Hashable]) -> list[Any]:
        """Give a request the blocks of its prompt: hits first, then the first free ones."""
        ...

    def give_back(self, blocks: Sequence[Any]) -> None:
        """Take the blocks of a request back, in chain order."""
        ...

    def free_hashes(self) -> list[Hashable]:
        """Return what the free blocks hold, the first to go first; empty ones left out."""
        ...

    def reset(self) -> bool:
        """Forget all prefixes; false while a block is in use."""
        ...

    @property
    def num_free(self) -> int:
        """Free blocks as the pool counts them."""
        ...


def chain(name: str, length: int) -> list[bytes]:
    """Return the hashes of one prompt, the same for every name."""
    return [f"{name}-{number:03d}".encode().ljust(32, b".") for number in range(length)]


@dataclass
class Engine:
    """A pool and a book, and the clock of both."""

    pool: Pool
    book: HintBook
    now_s: float = 0.0

    def start(self, hashes: Sequence[Hashable]) -> list[Any]:
        """Let a request in."""
        self.book.settle(now_s=self.now_s)
        blocks = self.pool.take(hashes)
        self.book.allocated([block.block_id for block in blocks])
        self.book.settle(now_s=self.now_s)
        return blocks

    def end(self, blocks: Sequence[Any]) -> None:
        """Let a request go."""
        self.pool.give_back(blocks)
        self.book.settle(now_s=self.now_s)

    def read(self, hashes: Sequence[Hashable]) -> None:
        """Serve one request."""
        self.end(self.start(hashes))

    def carry(
        self,
        name: str,
        hashes: Sequence[Hashable],
        *,
        priority: int = 0,
        ttl_s: float = 10.0,
        length: int | None = None,
    ) -> Answer:
        """Serve one request that holds its prompt."""
        blocks = self.start(hashes)
        num_tokens = (len(hashes) if length is None else length) * SIZE
        answer = self.book.hold(Hold(name, num_tokens, ttl_s, priority), list(hashes), now_s=self.now_s)
        self.end(blocks)
        return answer

    def resident(self, hashes: Sequence[Hashable]) -> int:
        """Return how many leading blocks are there."""
        return next((n for n, h in enumerate(hashes) if self.pool.order.find(h) is None), len(hashes))

    def names(self) -> str:
        """Return whose blocks go when, as letters without repetition."""
        letters = [h.decode()[0] for h in self.pool.free_hashes() if isinstance(h, bytes)]
        return "".join(a for a, b in zip(letters, ["", *letters], strict=False) if a != b)


class PoolHintContract:
    """Bind it with a fixture `pool` that yields an empty pool of `NUM_BLOCKS` blocks."""

    @pytest.fixture
    def engine(self, pool: Pool) -> Iterator[Engine]:
        made = Engine(pool, HintBook(pool.order, cap_ratio=0.5))
        yield made
        assert made.pool.num_free == NUM_BLOCKS, "nothing is in use at the end"

    def test_a_held_context_outlives_younger_ones(self, engine: Engine) -> None:
        assert engine.carry("h", chain("a", 8)).state is HintState.ACCEPTED
        engine.read(chain("b", 8))
        for number in range(20):
            engine.read(chain(f"c{number}", 8))
        assert (engine.resident(chain("a", 8)), engine.resident(chain("b", 8))) == (8, 0)

    def test_held_contexts_go_lowest_priority_first_then_the_one_held_last(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 4), priority=5)
        engine.carry("2", chain("b", 4), priority=1)
        engine.carry("3", chain("c", 4), priority=5)
        engine.read(chain("d", 4))
        assert engine.names() == "dbca"

    def test_who_needs_held_blocks_gets_them_from_the_end_of_the_lowest(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 8), priority=1)
        engine.carry("2", chain("b", 8), priority=2)
        blocks = engine.start(chain("c", 28))
        assert (engine.resident(chain("a", 8)), engine.resident(chain("b", 8))) == (4, 8)
        engine.end(blocks)
        engine.read(chain("d", NUM_BLOCKS))
        assert engine.resident(chain("b", 8)) == 0

    def test_a_released_context_counts_as_just_used(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 4))
        engine.carry("2", chain("b", 4))
        engine.read(chain("c", 4))
        assert engine.book.release("1").state is HintState.ACCEPTED
        assert engine.names() == "cab"
        assert engine.book.release("1").state is HintState.MISSING
        engine.book.release("2")
        assert engine.book.held_tokens == engine.book.num_hints == 0

    def test_a_retired_context_goes_first_its_end_before_its_beginning(self, engine: Engine) -> None:
        engine.read(chain("b", 4))
        engine.carry("1", chain("a", 4))
        answer = engine.book.retire(Retire("1", keep_tokens=SIZE), now_s=0.0)
        assert (answer.state, answer.num_tokens) == (HintState.ACCEPTED, 3 * SIZE)
        assert engine.pool.free_hashes() == [*chain("a", 4)[:0:-1], *reversed(chain("b", 4)), chain("a", 1)[0]]
        assert engine.book.retire(Retire("1"), now_s=0.0).state is HintState.MISSING

    def test_a_context_may_be_retired_after_its_release(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 4))
        engine.read(chain("b", 4))
        engine.book.release("1")
        engine.book.retire(Retire("1"), now_s=0.0)
        assert engine.names() == "ab"

    def test_retiring_spares_what_others_hold_and_waits_for_what_is_in_use(self, engine: Engine) -> None:
        shared, mine = chain("s", 4), chain("m", 4)
        engine.carry("1", [*shared, *mine])
        engine.carry("2", shared)
        engine.read(chain("b", 4))
        running = engine.start([*shared, *mine])
        answer = engine.book.retire(Retire("1"), now_s=0.0)
        assert (answer.state, answer.num_tokens) == (HintState.DEFERRED, 4 * SIZE)
        engine.end(running)
        assert engine.names() == "mbs"

    def test_retiring_waits_for_what_is_in_use_also_when_nothing_is_held(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 4))
        running = engine.start(chain("a", 4))
        engine.read(chain("b", 4))
        assert engine.book.retire(Retire("1"), now_s=0.0).state is HintState.DEFERRED
        engine.end(running)
        assert engine.names() == "ab"

    def test_a_hold_lapses_at_its_time(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 4), ttl_s=5.0)
        engine.now_s = 4.9
        engine.read(chain("b", 4))
        assert engine.names() == "ba"
        engine.now_s = 5.0
        engine.read(chain("c", 4))
        assert (engine.book.num_hints, engine.book.held_tokens, engine.book.lapsed) == (0, 0, 1)
        engine.read(chain("b", 4))
        assert engine.names() == "acb"

    def test_the_cap_clips_then_rejects_and_gives_way_to_higher_priorities(self, engine: Engine) -> None:
        assert engine.carry("1", chain("a", 12)).state is HintState.ACCEPTED
        clipped = engine.carry("2", chain("b", 12))
        assert (clipped.state, clipped.num_tokens) == (HintState.CLIPPED, 8 * SIZE)
        assert engine.carry("3", chain("c", 4)).state is HintState.REJECTED
        assert engine.book.held_tokens == engine.book.cap_tokens == NUM_BLOCKS // 2 * SIZE
        assert engine.carry("4", chain("d", 16), priority=1).state is HintState.ACCEPTED
        assert engine.book.held_tokens <= engine.book.cap_tokens
        assert (engine.book.lapsed, engine.book.num_hints) == (1, 2)  # of the other the beginning is left
        assert [chain("a", 12).index(h) for h in engine.book.hashes_of("1")] == [0, 1, 2, 3]

    def test_what_the_pool_has_lost_counts_under_the_cap_no_more(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 20))
        engine.read(chain("b", NUM_BLOCKS))
        assert engine.carry("2", chain("c", 20)).state is HintState.ACCEPTED
        assert engine.book.num_hints == 1

    def test_nothing_cached_is_missing_and_less_than_a_block_is_rejected(self, engine: Engine) -> None:
        assert engine.book.hold(Hold("1", 64, 9.0, 0), chain("a", 4), now_s=0.0).state is HintState.MISSING
        assert engine.book.hold(Hold("1", SIZE - 1, 9.0, 0), chain("a", 4), now_s=0.0).state is HintState.REJECTED
        engine.read(chain("a", 2))
        partly = engine.book.hold(Hold("1", 64, 9.0, 0), chain("a", 4), now_s=0.0)
        assert (partly.state, partly.num_tokens) == (HintState.CLIPPED, 2 * SIZE)

    def test_a_hold_of_blocks_in_use_comes_into_force_when_they_are_free(self, engine: Engine) -> None:
        blocks = engine.start(chain("a", 4))
        engine.book.hold(Hold("1", 4 * SIZE, 9.0, 0), chain("a", 4), now_s=0.0)
        engine.read(chain("b", 4))
        engine.end(blocks)
        engine.read(chain("c", 4))
        assert engine.names() == "bca"

    def test_a_held_context_that_was_read_keeps_its_place(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 4), priority=1)
        engine.carry("2", chain("b", 4), priority=2)
        engine.read([*chain("a", 4), *chain("x", 2)])
        assert engine.names() == "xab"

    def test_an_id_in_force_is_replaced(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 4))
        engine.carry("1", [*chain("a", 4), *chain("g", 2)])
        assert (engine.book.num_hints, engine.book.held_tokens) == (1, 6 * SIZE)

    def test_what_two_hold_is_counted_once_and_kept_until_both_end(self, engine: Engine) -> None:
        shared = chain("s", 4)
        engine.carry("1", [*shared, *chain("m", 2)], priority=2)
        engine.carry("2", [*shared, *chain("n", 2)], priority=1)
        assert engine.book.held_tokens == 8 * SIZE
        assert engine.names() == "nms"
        engine.book.release("1")
        assert engine.names() == "mns"
        engine.book.release("2")
        assert engine.book.held_tokens == 0

    def test_a_reset_works_and_leaves_nothing_held_that_could_be_in_the_way(self, engine: Engine) -> None:
        engine.carry("1", chain("a", 20), ttl_s=1000.0)
        assert engine.pool.reset()
        engine.read(chain("b", 4))
        assert engine.carry("2", chain("c", 20)).state is HintState.ACCEPTED
        assert engine.book.num_hints == 1

    def test_tables_are_bounded(self, pool: Pool) -> None:
        engine = Engine(pool, HintBook(pool.order, cap_ratio=0.9, max_hints=3))
        states = [engine.carry(str(number), chain("a", 2)).state for number in range(10)]
        assert set(states) == {HintState.ACCEPTED}
        assert engine.book.num_hints == 3
        assert engine.carry("low", chain("a", 2), priority=-1).state is HintState.REJECTED

    # Several executors: each pool that passes the suite is one, and examples are the same on every run.
    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["start", "end", "carry", "release", "retire", "wait", "reset"]),
                st.integers(0, 5),
                st.integers(1, 9),
                st.integers(0, 2),
            ),
            max_size=60,
        )
    )
    def test_in_any_history_held_blocks_go_last_by_priority_and_the_pool_stays_whole(
        self, pool: Pool, steps: list[tuple[str, int, int, int]]
    ) -> None:
        assert pool.reset()
        engine, running = Engine(pool, HintBook(pool.order, cap_ratio=0.5)), []
        try:
            self.live(engine, running, steps)
        finally:
            for blocks in running:
                engine.end(blocks)
        check(engine, 0)

    @staticmethod
    def live(engine: Engine, running: list[list[Any]], steps: list[tuple[str, int, int, int]]) -> None:
        """Do all steps, and look after each."""
        pool = engine.pool
        for what, which, length, priority in steps:
            # Prompts of one parity share their first three blocks.
            hashes = [*chain("xy"[which % 2], min(length, 3)), *chain("abcdef"[which], max(length - 3, 0))]
            room = pool.num_free >= length
            if what == "start" and room and len(running) < 3:
                running.append(engine.start(hashes))
            elif what == "end" and running:
                engine.end(running.pop(which % len(running)))
            elif what == "carry" and room:
                engine.carry(str(which), hashes, priority=priority, ttl_s=10.0 + length)
            elif what == "release":
                engine.book.release(str(which))
            elif what == "retire":
                engine.book.retire(Retire(str(which), keep_tokens=length), now_s=engine.now_s)
            elif what == "wait":
                engine.now_s += length
            elif what == "reset":
                pool.reset()
            engine.book.settle(now_s=engine.now_s)
            check(engine, sum_used(running))


def sum_used(running: Sequence[Sequence[Any]]) -> int:
    return len({block.block_id for blocks in running for block in blocks})


def check(engine: Engine, num_used: int) -> None:
    """Held after all others, in the order of rank; every free block once; the share within its cap."""
    book, order = engine.book, engine.pool.order
    assert engine.pool.num_free == NUM_BLOCKS - num_used
    ids: list[int] = []
    ranks: list[tuple[int, int]] = []
    block = order.last()
    while block is not None:
        ids.append(block.block_id)
        block_hash = order.hash_of(block)
        owner = book._owner(block_hash)
        is_owned = owner is not None and block_hash is not None and order.find(block_hash) is block
        ranks.append(owner.rank if is_owned and owner is not None else (-1, 0))
        block = order.before(block)
    assert len(ids) == len(set(ids)) == engine.pool.num_free
    assert ranks == sorted(ranks, reverse=True)
    assert book.held_tokens <= book.cap_tokens
