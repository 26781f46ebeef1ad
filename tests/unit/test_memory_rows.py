"""The engine in memory looks at what is new only, and answers as one that was filled at once."""

from __future__ import annotations

import numpy as np
import pytest

from pancake_langgraph.retrieval import checks
from pancake_langgraph.retrieval.base import Item, ItemId, Query, View
from pancake_langgraph.retrieval.memory_engine import MemoryVectorEngine

DIM = 8
VIEWS = (
    View(),
    View((("a",), ("c", "d"))),
    View((("a",),), {"n": {"$gt": 3}}),
    View(allowed=frozenset(ItemId(("a",), str(number)) for number in range(0, 40, 3))),
)


def item(number: int, version: int = 0) -> Item:
    random = np.random.default_rng([number, version])
    vectors = tuple(random.standard_normal((number % 3, DIM)).astype(np.float32))
    namespace = (("a",), ("a", "b"), ("c",), ("c", "d"))[number % 4]
    return Item(ItemId(namespace, str(number)), {"n": (number + version) % 7}, vectors)


def answers(engine: MemoryVectorEngine) -> list[object]:
    vector = np.random.default_rng(9).standard_normal(DIM).astype(np.float32)
    found: list[object] = []
    for view in VIEWS:
        [hits] = engine.search([Query(vector, view, 7, 1)])
        found.append([(hit.item.id, hit.item.value, hit.score) for hit in hits])
        found.append([one.id for one in engine.items(view)])
    return [*found, engine.namespaces(), engine.stats().num_items, engine.stats().num_vectors]


def test_searches_between_writes_answer_as_an_engine_that_was_filled_at_once() -> None:
    random, engine = np.random.default_rng(4), MemoryVectorEngine(DIM)
    held: dict[ItemId, Item] = {}
    for step in range(120):
        numbers = random.choice(400, 20, replace=False).tolist()
        if step % 4 == 3:
            engine.delete([item(number).id for number in numbers])
            for number in numbers:
                held.pop(item(number).id, None)
        else:
            put = [item(number, step) for number in numbers]
            engine.put(put)
            held |= {one.id: one for one in put}
        if step % 3 == 0:
            other = MemoryVectorEngine(DIM)
            other.put(list(held.values()))
            assert answers(engine) == answers(other)


def test_a_filter_looks_at_each_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = checks.compile_filter

    def counting(where: object) -> object:
        passes = original(where)  # type: ignore[arg-type]
        return lambda value: (seen.append(value["n"]), passes(value))[1]

    monkeypatch.setattr(checks, "compile_filter", counting)
    engine = MemoryVectorEngine(DIM)
    query = Query(np.ones(DIM, np.float32), View(((),), {"n": {"$gte": 0}}))
    engine.put([Item(ItemId(("a",), str(n)), {"n": n}, (np.ones(DIM, np.float32),)) for n in range(5)])
    engine.search([query])
    engine.put([Item(ItemId(("a",), "5"), {"n": 5}, (np.ones(DIM, np.float32),))])
    assert len(engine.search([query])[0]) == 6
    assert sorted(seen) == list(range(6))


def test_what_is_replaced_again_and_again_takes_no_more_room() -> None:
    engine = MemoryVectorEngine(DIM)
    for version in range(5_000):
        engine.put([item(2, version)])
        engine.put([Item(ItemId(("bare",), "x"), {"n": version})])
    assert engine.stats().memory_bytes <= 4 * DIM * 1024
    assert len(engine._rows._items) <= 1024
    assert len(engine.search([Query(np.ones(DIM, np.float32))])[0]) == 1
