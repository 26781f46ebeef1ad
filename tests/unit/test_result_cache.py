"""Results that were found before: given to nobody else, and never when they are not true any more."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph._clock import VirtualClock
from pancake_langgraph.retrieval.base import Hit, Item, ItemId, Namespace, Query, View
from pancake_langgraph.retrieval.result_cache import Missed, Question, ResultCache
from tests.unit.retrieval_kit import SmallEngine, item, vector

NOTES = ("notes",)
EVERYTHING = View()


class Memory:
    """An engine behind a cache, as a store has it; `epoch_s` is the time items expire by."""

    def __init__(self, **settings: Any) -> None:
        self.engine = SmallEngine()
        self.clock = VirtualClock()
        self.epoch_s = 1000.0
        self.cache = ResultCache(clock=self.clock, epoch_s=lambda: self.epoch_s, **settings)

    def put(self, *items: Item) -> None:
        self.engine.put(items)
        self.cache.invalidate({entry.id.namespace for entry in items})

    def search(self, seed: int, view: View = EVERYTHING, limit: int = 3) -> list[Hit]:
        found = self.cache.look_up(Question(vector(seed), view, limit))
        if isinstance(found, Missed):
            hits = self.engine.search([Query(vector(seed), view, limit)])[0]
            self.cache.store(found, hits)
            return hits
        return found

    @property
    def num_searches(self) -> int:
        return len(self.engine.calls)


@pytest.fixture
def memory() -> Memory:
    made = Memory()
    made.put(*(item(n) for n in range(10)))
    return made


def ids(hits: list[Hit]) -> list[ItemId]:
    return [hit.item.id for hit in hits]


def test_the_same_question_is_searched_once(memory: Memory) -> None:
    first = memory.search(1)
    assert ids(memory.search(1)) == ids(first)
    assert [hit.score for hit in memory.search(1)] == [hit.score for hit in first]
    assert memory.num_searches == 1
    stats = memory.cache.stats()
    assert (stats.hits, stats.misses, stats.entries) == (2, 1, 1)


def test_an_empty_result_is_one_too() -> None:
    memory = Memory()
    assert memory.search(1) == memory.search(1) == []
    assert memory.num_searches == 1


@pytest.mark.parametrize(
    "other",
    [
        Question(vector(2), View((NOTES,))),
        Question("text", View((NOTES,))),
        Question(vector(1), View((NOTES,)), limit=4),
        Question(vector(1), View((NOTES,)), offset=1),
        Question(vector(1), View((("notes", "mine"),))),
        Question(vector(1), View((("note", "s"),))),
        Question(vector(1), View()),
        Question(vector(1), View((NOTES, ("other",)))),
        Question(vector(1), View((NOTES,), allowed=frozenset())),
        Question(vector(1), View((NOTES,), where={"a": 1})),
        Question(np.array(vector(1), np.float64), View((NOTES,))),
        Question(vector(1).reshape(2, 4), View((NOTES,))),
    ],
)
def test_other_questions_and_views_are_others(other: Question) -> None:
    cache = ResultCache()
    missed = cache.look_up(Question(vector(1), View((NOTES,))))
    assert isinstance(missed, Missed)
    assert cache.store(missed, [])
    assert isinstance(cache.look_up(other), Missed)
    assert cache.look_up(Question(vector(1), View((NOTES,)))) == []


FILTERS: list[dict[str, Any]] = [
    {"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}, {"a": [1]}, {"a": [[1]]}, {"a": {"b": 1}},
    {"a": [["b", 1]]}, {"a": {}}, {"a": []}, {"b": 1}, {}, {"a": 1, "b": 2}, {"a": "mapping"},
]  # fmt: skip


def test_filters_that_look_alike_are_told_apart() -> None:
    cache = ResultCache()
    for where in FILTERS:
        missed = cache.look_up(Question("q", View(where=where)))
        assert isinstance(missed, Missed), where
        assert cache.store(missed, [])
    assert cache.look_up(Question("q", View(where={"b": 2, "a": 1}))) == []  # the order of names means nothing


@pytest.mark.parametrize("where", [{"a": object()}, {"a": {1, 2}}, {"a": np.float32(1)}])
def test_a_filter_of_strange_values_is_not_remembered(where: dict[str, Any]) -> None:
    cache = ResultCache()
    missed = cache.look_up(Question("q", View(where=where)))
    assert isinstance(missed, Missed)
    assert not cache.store(missed, [])
    assert cache.stats().unfit == 1


def test_a_filter_that_contains_itself_is_not_remembered() -> None:
    where: dict[str, Any] = {}
    where["a"] = where
    assert isinstance(ResultCache().look_up(Question("q", View(where=where))), Missed)


# -- writes ---------------------------------------------------------------------------------------------------------


def test_a_write_is_seen_by_every_view_it_lies_in(memory: Memory) -> None:
    views = [View(), View((NOTES,)), View((("notes", "mine"),)), View((("x",), NOTES))]
    for view in views:
        memory.search(50, view)
    memory.put(item(50, ("notes", "mine")))
    for view in views:
        assert ids(memory.search(50, view))[0] == ItemId(("notes", "mine"), "50")


def test_a_write_leaves_other_views_alone(memory: Memory) -> None:
    others = [View((("other",),)), View((("notes", "mine", "deep"),)), View((("note",),)), View((("notes", "my"),))]
    for view in others:
        memory.search(1, view)
    memory.put(item(50, ("notes", "mine")))
    before = memory.num_searches
    for view in others:
        memory.search(1, view)
    assert memory.num_searches == before


def test_a_search_that_a_write_overtakes_is_not_remembered(memory: Memory) -> None:
    for namespace, is_kept in ((NOTES, False), (("other",), True)):
        missed = memory.cache.look_up(Question(namespace[0], View((NOTES,))))
        assert isinstance(missed, Missed)
        memory.cache.invalidate([namespace])
        assert memory.cache.store(missed, []) is is_kept
    assert memory.cache.stats().refused == 1


def test_a_search_that_very_many_writes_overtake_is_not_remembered() -> None:
    cache = ResultCache()
    missed = cache.look_up(Question("q", View((NOTES,))))
    assert isinstance(missed, Missed)
    cache.invalidate([("other", str(n)) for n in range(1000)])
    assert not cache.store(missed, [])


def test_clear_forgets_also_what_is_under_way() -> None:
    cache = ResultCache()
    first, second = (cache.look_up(Question(text)) for text in "ab")
    assert isinstance(first, Missed)
    assert isinstance(second, Missed)
    assert cache.store(first, [])
    cache.clear()
    assert not cache.store(second, [])
    assert cache.stats().entries == 0
    assert isinstance(third := cache.look_up(Question("b")), Missed)
    assert cache.store(third, [])


# -- ends -----------------------------------------------------------------------------------------------------------


def test_results_expire(memory: Memory) -> None:
    memory.search(1)
    memory.clock.advance(299.0)
    memory.search(1)
    assert memory.num_searches == 1
    memory.clock.advance(1.0)
    memory.search(1)
    assert memory.num_searches == 2
    assert memory.cache.stats().expired == 1


def test_a_result_goes_when_one_of_its_items_expires() -> None:
    memory = Memory()
    short = Item(ItemId(NOTES, "short"), {}, (vector(1),), expires_at_s=1010.0)
    memory.put(short, item(2))
    assert ids(memory.search(1))[0].key == "short"
    memory.engine.delete([short.id])  # expired items are gone for an engine, and nobody is told
    memory.epoch_s = 1009.0
    assert ids(memory.search(1))[0].key == "short"
    memory.epoch_s = 1010.0
    assert ids(memory.search(1))[0].key == "2"


def test_the_least_recently_used_results_go() -> None:
    memory = Memory(max_entries=2)
    for seed in (1, 2, 1, 3, 1):
        memory.search(seed)
    assert memory.num_searches == 3
    memory.search(2)
    assert memory.num_searches == 4
    assert memory.cache.stats().entries == 2
    assert len(memory.cache._by_prefix[()]) == 2


# -- others ---------------------------------------------------------------------------------------------------------


def test_what_an_engine_leaks_is_not_remembered(memory: Memory) -> None:
    private = View((("other",),), allowed=None)
    chosen = View((NOTES,), allowed=frozenset({ItemId(NOTES, "1")}))
    for view in (private, chosen):
        missed = memory.cache.look_up(Question("q", view))
        assert isinstance(missed, Missed)
        assert not memory.cache.store(missed, [Hit(item(2), 1.0)])
    assert memory.cache.stats().leaks == 2


def test_nobody_changes_what_others_get(memory: Memory) -> None:
    stored = Item(ItemId(NOTES, "n"), {"tags": ["a"], "deep": {"b": [1]}}, (vector(77),))
    memory.put(stored)
    for _ in range(3):
        value: Any = memory.search(77)[0].item.value
        assert value == {"tags": ["a"], "deep": {"b": [1]}}
        if value is not stored.value:
            value["tags"].append("changed")
            value["deep"]["b"].clear()


NAMESPACES: list[Namespace] = [(), ("a",), ("a", "b"), ("b",), ("a", "c")]
STEP = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 5), st.sampled_from(NAMESPACES)),
    st.tuples(st.just("search"), st.integers(0, 3), st.lists(st.sampled_from(NAMESPACES), min_size=1, max_size=2)),
)


@given(st.lists(STEP, max_size=40), st.integers(1, 4))
def test_a_cache_changes_no_answer(steps: list[tuple[str, int, Any]], max_entries: int) -> None:
    memory = Memory(max_entries=max_entries)
    for what, seed, where in steps:
        if what == "put":
            memory.put(item(seed, where))
        else:
            view = View(tuple(where))
            expected = memory.engine._best(Query(vector(seed), view, 3))
            assert ids(memory.search(seed, view)) == ids(expected)


def test_readers_read_their_own_writes_in_many_threads() -> None:
    memory = Memory()
    wrong: list[int] = []

    def work(agent: int) -> None:
        namespace = ("agents", str(agent % 2))
        for n in range(60):
            seed = agent * 1000 + n
            memory.search(seed, View((namespace,)))
            memory.put(item(seed, namespace))
            if ids(memory.search(seed, View((namespace,)), 1)) != [ItemId(namespace, str(seed))]:
                wrong.append(seed)

    memory.engine.stored = LockedDict()
    threads = [threading.Thread(target=work, args=(agent,)) for agent in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class LockedDict(dict[ItemId, Item]):
    """A dict that many threads may write to while others look at all of it."""

    def values(self) -> Any:
        return list(super().values())

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self
