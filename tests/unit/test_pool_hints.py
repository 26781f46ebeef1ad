"""Pool hints on a small model of the engine's pool, and what travels on the wire."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from pancake_vllm.hint_book import HintBook
from pancake_vllm.hint_words import Answer, HintState, Hold, Retire, Verb, read_orders
from pancake_vllm.pool_hints import MAX_FAILURES, PoolHints, PoolHintsMixin
from pancake_vllm.pool_order import PoolOrder
from tests.pool_suite import NUM_BLOCKS, SIZE, Engine, PoolHintContract, chain


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    holds: Hashable | None = None


class ModelPool:
    """A free queue and a table of hashes, as plain lists."""

    block_size_tokens = SIZE
    enable_caching = True

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.queue = [Block(number) for number in range(num_blocks)]
        self.by_hash: dict[Hashable, list[Block]] = {}
        self.moves = 0
        self.order: PoolOrder = self

    @property
    def num_free(self) -> int:
        return len(self.queue)

    def take(self, hashes: Sequence[Hashable]) -> list[Block]:
        blocks: list[Block] = []
        for block_hash in hashes:
            if (hit := self.find(block_hash)) is None:
                break
            blocks.append(hit)
        for block in blocks:
            if block.ref_cnt == 0:
                self.queue.remove(block)
            block.ref_cnt += 1
        for block_hash in hashes[len(blocks) :]:
            block = self.queue.pop(0)
            self._forget(block)
            block.ref_cnt, block.holds = 1, block_hash
            blocks.append(block)
        for block in blocks:
            held = self.by_hash.setdefault(block.holds, [])
            if block not in held:
                held.append(block)
        return blocks

    def give_back(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.holds is None:
                    self.queue.insert(0, block)
                else:
                    self.queue.append(block)

    def reset(self) -> bool:
        if len(self.queue) < self.num_blocks:
            return False
        for block in self.queue:
            self._forget(block)
        return True

    def free_hashes(self) -> list[Hashable]:
        return [block.holds for block in self.queue if block.holds is not None]

    def _forget(self, block: Block) -> None:
        if block.holds is not None:
            self.by_hash[block.holds].remove(block)
            block.holds = None

    def find(self, block_hash: Hashable) -> Block | None:
        found = self.by_hash.get(block_hash)
        return found[0] if found else None

    def hash_of(self, block: Any) -> Hashable | None:
        return block.holds

    def last(self) -> Block | None:
        return self.queue[-1] if self.queue else None

    def before(self, block: Any) -> Block | None:
        position = self.queue.index(block)
        return self.queue[position - 1] if position else None

    def move_before(self, block: Any, anchor: Any) -> None:
        self.moves += 1
        if block is anchor:
            return
        self.queue.remove(block)
        self.queue.insert(len(self.queue) if anchor is None else self.queue.index(anchor), block)

    def move_first(self, blocks: Sequence[Any]) -> None:
        self.moves += len(blocks)
        for block in blocks:
            self.queue.remove(block)
        self.queue[:0] = blocks


class TestModelPool(PoolHintContract):
    @pytest.fixture
    def pool(self) -> ModelPool:
        return ModelPool(NUM_BLOCKS)


def test_a_step_costs_what_it_freed_and_nothing_when_nothing_moved() -> None:
    pool = ModelPool(1000)
    engine = Engine(pool, HintBook(pool))
    engine.carry("1", chain("a", 400))
    engine.book.settle(now_s=0.0)
    pool.moves = 0
    engine.read(chain("b", 7))
    assert pool.moves == 7
    for _ in range(10):
        engine.book.settle(now_s=0.0)
    assert pool.moves == 7


def test_a_hold_that_finds_no_room_does_not_look_at_all_that_is_held() -> None:
    class Counting(ModelPool):
        looks = 0

        def find(self, block_hash: Hashable) -> Block | None:
            self.looks += 1
            return super().find(block_hash)

    pool = Counting(1000)
    engine = Engine(pool, HintBook(pool, cap_ratio=0.75))
    for number in range(3):
        engine.carry(str(number), chain(f"{number}", 250))
    blocks = engine.start(chain("d", 10))
    pool.looks = 0
    answer = engine.book.hold(Hold("d", 10 * SIZE, 10.0, 0), chain("d", 10), now_s=engine.now_s)
    assert answer.state is HintState.REJECTED
    assert pool.looks < 20
    engine.end(blocks)


def test_blocks_that_running_requests_took_unseen_are_noticed() -> None:
    pool = ModelPool(10)
    engine = Engine(pool, HintBook(pool))
    engine.carry("1", chain("a", 5))
    taken = pool.take(chain("b", 8))  # as a decode does: nobody tells
    engine.book.settle(now_s=0.0)
    engine.end(taken)
    engine.read(chain("c", 1))
    assert engine.names() == "bca"
    assert engine.resident(chain("a", 5)) == 2


def test_hints_are_read_from_where_they_travel() -> None:
    assert read_orders(None) is None
    assert read_orders({"cached_token_stats": True}) is None
    empty = read_orders({"pancake": {}})
    assert empty is not None
    assert (empty.hold, empty.release, empty.retire, empty.refused) == (None, (), (), ())
    orders = read_orders(
        {
            "pancake": {
                "hold": {"id": "a", "num_tokens": 64, "ttl_s": 1e9, "priority": 1000},
                "release": ["b"],
                "retire": [{"id": "c", "keep_tokens": 5}],
            }
        }
    )
    assert orders is not None
    assert orders.hold == Hold("a", 64, 3600.0, 100)
    assert (orders.release, orders.retire, orders.refused) == (("b",), (Retire("c", 5),), ())


@pytest.mark.parametrize(
    "hold",
    [
        None,
        [],
        {},
        {"id": "", "num_tokens": 1, "ttl_s": 1},
        {"id": "a", "num_tokens": 0, "ttl_s": 1},
        {"id": "a", "num_tokens": True, "ttl_s": 1},
        {"id": "a", "num_tokens": 1, "ttl_s": float("nan")},
        {"id": "a", "num_tokens": 1, "ttl_s": -1},
        {"id": "a", "num_tokens": 1},
        {"id": "a" * 200, "num_tokens": 1, "ttl_s": 1},
        {"id": "a", "num_tokens": 1, "ttl_s": 1, "priority": "x"},
    ],
)
def test_what_cannot_be_read_is_refused_and_the_rest_is_done(hold: Any) -> None:
    orders = read_orders({"pancake": {"hold": hold, "release": [3, "b"], "retire": [{"id": "c"}, {}, 7]}})
    assert orders is not None
    assert (orders.hold, orders.release, orders.retire) == (None, ("b",), (Retire("c", 0),))
    assert [answer.verb for answer in orders.refused] == [Verb.HOLD, Verb.RELEASE, Verb.RETIRE, Verb.RETIRE]
    assert {answer.state for answer in orders.refused} == {HintState.REJECTED}


class Hints(PoolHints):
    """Hints on a model pool, without vLLM."""

    def _order(self, pool: Any) -> PoolOrder:
        return pool  # type: ignore[no-any-return]


def request(name: str, hashes: Sequence[Hashable], params: Any, *, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, kv_transfer_params=params, status=SimpleNamespace(name=status)
    )


def serve(hints: PoolHints, pool: ModelPool, carrier: Any) -> Any:
    hints.arrived(carrier)
    blocks = pool.take(carrier.block_hashes)
    hints.allocated(SimpleNamespace(get_block_ids=lambda: ([block.block_id for block in blocks],)))
    hints.stepped()
    answer = hints.finished(carrier)
    pool.give_back(blocks)
    hints.stepped()
    return answer


def hold(name: str, num_blocks: int) -> dict[str, Any]:
    return {"pancake": {"hold": {"id": name, "num_tokens": num_blocks * SIZE, "ttl_s": 30.0}}}


def bound(pool: ModelPool) -> Hints:
    hints = Hints(clock=lambda: 0.0)
    hints.bind(pool, num_groups=1)
    return hints


def test_a_number_larger_than_any_float_is_cut_and_does_not_raise() -> None:
    orders = read_orders(
        {"pancake": {"hold": {"id": "a", "num_tokens": 10**400, "ttl_s": 10**400, "priority": 10**400}}}
    )
    assert orders is not None
    assert orders.hold == Hold("a", 10**400, 3600.0, 100)


def test_a_carrier_gets_one_answer_per_hint() -> None:
    pool = ModelPool(NUM_BLOCKS)
    hints = bound(pool)
    first = serve(hints, pool, request("r1", chain("a", 4), hold("h1", 4)))
    assert first == {
        "version": 1,
        "answers": [{"verb": "hold", "id": "h1", "state": "accepted", "num_tokens": 64}],
        "held_tokens": 64,
        "cap_tokens": 480,
    }
    params = hold("h2", 9)
    params["pancake"] |= {"release": ["h1", "no"], "retire": [{"id": "h1"}]}
    second = serve(hints, pool, request("r2", chain("b", 4), params))
    told = [(answer["verb"], answer["state"], answer["num_tokens"]) for answer in second["answers"]]
    assert told == [
        ("release", "accepted", 64),
        ("release", "missing", 0),
        ("retire", "accepted", 64),
        ("hold", "clipped", 64),
    ]
    assert serve(hints, pool, request("r3", chain("c", 2), None)) is None
    probed = serve(hints, pool, request("r4", chain("c", 2), {"pancake": {}}))
    assert (probed["version"], probed["answers"]) == (1, [])


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_a_carrier_that_did_not_end_well_holds_nothing(status: str) -> None:
    pool = ModelPool(NUM_BLOCKS)
    hints = bound(pool)
    answer = serve(hints, pool, request("r", chain("a", 4), hold("h", 4), status=status))
    assert answer["answers"] == []
    assert hints.book is not None
    assert (hints.book.num_hints, pool.num_free) == (0, NUM_BLOCKS)


def test_failures_never_reach_the_scheduler_and_switch_hints_off(caplog: pytest.LogCaptureFixture) -> None:
    pool = ModelPool(NUM_BLOCKS)
    hints = bound(pool)
    for number in range(MAX_FAILURES + 2):
        assert hints.finished(SimpleNamespace(request_id=f"r{number}")) is None
    assert (hints.book, hints.failures) == (None, MAX_FAILURES)
    assert len([record for record in caplog.records if "pool hints are off" in record.message]) == 1
    assert serve(hints, pool, request("r", chain("a", 4), hold("h", 4))) is None


@pytest.mark.parametrize("cap_ratio", [0.0, -1.0, 0.95, float("nan")])
def test_a_cap_out_of_range_takes_no_hints(cap_ratio: float) -> None:
    hints = Hints(cap_ratio=cap_ratio)
    hints.bind(ModelPool(8), num_groups=1)
    assert hints.book is None


def test_several_groups_of_blocks_take_no_hints() -> None:
    hints = Hints()
    hints.bind(ModelPool(8), num_groups=2)
    assert hints.book is None


class Theirs:
    """A connector that answers for itself."""

    def bind_gpu_block_pool(self, pool: Any) -> None:
        self.pool = pool

    def on_new_request(self, request: Any) -> None: ...

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, output: Any) -> str:
        return "theirs"

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return True, {"cached_token_stats": 1}


class Mine(PoolHintsMixin, Theirs):
    """Theirs with hints."""


def test_a_connector_keeps_its_own_answers_beside_those_to_hints() -> None:
    pool = ModelPool(NUM_BLOCKS)
    connector = Mine()
    carrier = request("r", chain("a", 2), hold("h", 2))
    assert connector.request_finished(carrier, []) == (True, {"cached_token_stats": 1})
    connector._hints = bound(pool)
    blocks = pool.take(chain("a", 2))
    connector.on_new_request(carrier)
    connector.update_state_after_alloc(carrier, None, 0)  # not as expected: counted, and nothing else
    assert connector.build_connector_meta(None) == "theirs"
    delayed, params = connector.request_finished(carrier, [])
    pool.give_back(blocks)
    assert delayed
    assert params is not None
    assert set(params) == {"cached_token_stats", "pancake"}
    assert connector._hints.failures == 1


def test_an_answer_in_wire_form() -> None:
    answer = Answer(Verb.HOLD, "a", HintState.CLIPPED, 5)
    assert answer.to_wire() == {"verb": "hold", "id": "a", "state": "clipped", "num_tokens": 5}


# -- what is held whole ------------------------------------------------------------------------------------------------


@pytest.fixture
def whole() -> Engine:
    """An engine that holds the five blocks of one context, all there is of it."""
    engine = fresh()
    engine.read(chain("a", 5))
    engine.book.hold(Hold("a", 10**9, 60.0, 50, is_whole=True), chain("a", 5), now_s=engine.now_s)
    return engine


def fresh() -> Engine:
    pool = ModelPool(NUM_BLOCKS)
    return Engine(pool, HintBook(pool.order, cap_ratio=0.5))


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 7])
def test_a_context_is_known_as_whole_up_to_a_different_end(whole: Engine, num_blocks: int) -> None:
    assert whole.book.whole_behind(chain("a", 9), num_blocks) == "a"


@pytest.mark.parametrize(("name", "num_blocks"), [("a", 2), ("a", 0), ("a", 8), ("b", 5)])
def test_what_is_shorter_or_much_longer_or_another_context_is_not_it(whole: Engine, name: str, num_blocks: int) -> None:
    assert whole.book.whole_behind(chain(name, 9), num_blocks) is None


def test_a_part_of_a_context_is_not_known_as_whole() -> None:
    engine = fresh()
    engine.read(chain("a", 5))
    engine.book.hold(Hold("a", 10**9, 60.0, 50), chain("a", 5), now_s=engine.now_s)
    assert engine.book.whole_behind(chain("a", 5), 5) is None


def test_a_context_can_be_said_to_be_whole_later_unless_some_of_it_is_not_held() -> None:
    engine, cap = fresh(), NUM_BLOCKS // 2
    engine.read(chain("a", 5))
    engine.book.hold(Hold("a", 10**9, 60.0, 50), chain("a", 5), now_s=engine.now_s)
    engine.book.say_whole("a")
    engine.book.say_whole("nobody")
    assert engine.book.whole_behind(chain("a", 5), 5) == "a"
    engine.read(chain("c", cap + 2))
    engine.book.hold(Hold("c", 10**9, 60.0, 60), chain("c", cap + 2), now_s=engine.now_s)
    engine.book.say_whole("c")  # it was clipped
    engine.book.say_whole("a")  # its end has made way
    assert engine.book.whole_behind(chain("c", cap), cap) is None
    assert engine.book.whole_behind(chain("a", 5), 5) is None


def test_a_context_that_was_clipped_released_or_has_lapsed_is_not_known_as_whole(whole: Engine) -> None:
    whole.book.release("a")
    assert whole.book.whole_behind(chain("a", 5), 5) is None
    cap = NUM_BLOCKS // 2
    whole.read(chain("c", cap + 2))
    whole.book.hold(Hold("c", 10**9, 60.0, 50, is_whole=True), chain("c", cap + 2), now_s=whole.now_s)
    assert whole.book.whole_behind(chain("c", cap), cap) is None


def test_the_word_for_whole_is_read_and_anything_else_is_not() -> None:
    for said, expected in ((True, True), (1, False), ("yes", False), (None, False)):
        hold = {"id": "a", "num_tokens": 64, "ttl_s": 1.0, "whole": said}
        orders = read_orders({"pancake": {"hold": hold}})
        assert orders is not None
        assert orders.hold is not None
        assert orders.hold.is_whole is expected
