"""What every vector engine must do, whatever it keeps its vectors in.  Test modules bind it to engines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pancake_langgraph._errors import InvalidItem, InvalidQuery, RetrievalError
from pancake_langgraph.retrieval.base import Hit, Item, ItemId, Query, TouchesItems, VectorEngine, View
from pancake_langgraph.retrieval.filters import matches

DIM = 8
#: Labels that a comparison as text, or by LIKE, would take for each other.
NAMESPACES = ((), ("a",), ("a", "b"), ("ab",), ("a_",), ("a%",), ("a.b",), ("%",), ("a", "b", "c"), ("ax",), ("A",))


@dataclass
class Clock:
    """Seconds that a test moves."""

    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Opener:
    """Makes engines; a module binds its own.  `close` is called after each test."""

    def __init__(self) -> None:
        self.opened: list[VectorEngine] = []

    def make(self, dim: int, clock: Callable[[], float]) -> VectorEngine:
        """Return a new, empty engine."""
        raise NotImplementedError

    def reopen(self, engine: VectorEngine) -> VectorEngine:
        """Close an engine that is kept and return it as another process would find it; others stay as they are.

        Append what is returned to `opened`, so that it is closed in the end.
        """
        return engine

    def before_and_after(self, engine: VectorEngine) -> Iterator[VectorEngine]:
        """Yield an engine, and then what is found when it is opened again."""
        yield engine
        yield self.reopen(engine)

    def stir(self, engine: VectorEngine) -> None:
        """Do what the engine does in the background now: flush, merge."""

    def open(self, dim: int = DIM, clock: Callable[[], float] | None = None) -> VectorEngine:
        """Return a new, empty engine that is closed after the test."""
        self.opened.append(self.make(dim, clock or Clock()))
        return self.opened[-1]

    def close(self) -> None:
        """Close all."""
        for engine in self.opened:
            engine.close()


def vector(*numbers: float) -> Any:
    """Return a vector whose further numbers are 0."""
    return np.array([*numbers, *[0.0] * (DIM - len(numbers))], np.float32)


def directed(seed: int, dim: int = DIM) -> Any:
    """Return a vector of length one in a direction of its own."""
    drawn = np.random.default_rng(seed).standard_normal(dim).astype(np.float32)
    return drawn / np.linalg.norm(drawn)


def an_item(key: str, *vectors: Any, at: tuple[str, ...] = ("a",), **changes: Any) -> Item:
    """Return an item; its value names it."""
    value = changes.pop("value", {"text": f"text of {key}"})
    return Item(ItemId(at, key), value, tuple(vectors), **changes)


def keys(hits: list[Hit]) -> list[str]:
    """Return the keys of hits, in order."""
    return [hit.item.id.key for hit in hits]


def find(engine: VectorEngine, wanted: Any, *, limit: int = 10, offset: int = 0, **view: Any) -> list[Hit]:
    """Search once."""
    [hits] = engine.search([Query(wanted, View(**view), limit, offset)])
    return hits


# -- the model ------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """Brute force over a dict, in double precision."""

    items: dict[ItemId, Item] = field(default_factory=dict)

    def shown(self, view: View) -> list[Item]:
        return [
            item
            for item in self.items.values()
            if any(item.id.namespace[: len(prefix)] == prefix for prefix in view.prefixes)
            and matches(view.where, item.value)
            and (view.allowed is None or item.id in view.allowed)
        ]

    def search(self, query: Query) -> list[tuple[ItemId, float]]:
        scored = [
            (item.id, max(float(np.dot(one.astype(float), query.vector.astype(float))) for one in item.vectors))
            for item in self.shown(query.view)
            if item.vectors
        ]
        scored.sort(key=lambda pair: (-pair[1], pair[0].namespace, pair[0].key))
        return scored[query.offset : query.offset + query.limit]

    def listed(self, view: View) -> list[ItemId]:
        found = sorted(self.shown(view), key=lambda item: (-item.updated_at_s, item.id.namespace, item.id.key))
        return [item.id for item in found]


# Whole numbers: products are exact in any precision, so that ties are ties and the order is defined.
VECTORS = st.lists(st.integers(-3, 3), min_size=DIM, max_size=DIM).map(lambda drawn: np.array(drawn, np.float32))
IDS = st.builds(ItemId, st.sampled_from(NAMESPACES), st.sampled_from("pqrst"))
VALUES = st.fixed_dictionaries(
    {}, optional={"kind": st.sampled_from(["x", "y"]), "size": st.integers(8, 11), "deep": st.just({"flag": True})}
)
ITEMS = st.builds(
    Item, IDS, VALUES, st.lists(VECTORS, max_size=3).map(tuple), st.just(1.0), st.integers(1, 5).map(float)
)
FILTERS = st.sampled_from(
    [
        {},
        {"kind": "x"},
        {"size": {"$gt": 9}},
        {"size": {"$lte": 9}, "kind": {"$ne": "y"}},
        {"kind": {"$in": ["y", "z"]}},
        {"size": {"$nin": [8]}},
        {"$or": [{"deep": {"flag": True}}, {"size": 10}]},
        {"$and": [{"kind": "x"}, {"size": {"$gte": 9}}]},
    ]
)
VIEWS = st.builds(
    View,
    st.lists(st.sampled_from(NAMESPACES), min_size=1, max_size=2).map(tuple),
    FILTERS,
    st.none() | st.frozensets(IDS, max_size=8),
)
QUERIES = st.builds(Query, VECTORS, VIEWS, st.integers(0, 12), st.integers(0, 3))
STEPS = st.one_of(
    st.tuples(st.just("put"), st.lists(ITEMS, min_size=1, max_size=6, unique_by=lambda item: item.id)),
    st.tuples(st.just("delete"), st.lists(IDS, max_size=4)),
    st.tuples(st.just("search"), st.lists(QUERIES, min_size=1, max_size=3)),
    st.tuples(st.just("list"), VIEWS),
    st.tuples(st.sampled_from(["reopen", "stir"]), st.none()),
)


class VectorEngineContract:
    """Bind it with a fixture `opener` that yields an `Opener` and closes it."""

    @pytest.fixture
    def engine(self, opener: Opener) -> VectorEngine:
        return opener.open()

    # -- against brute force --------------------------------------------------------------------------------------

    @settings(
        max_examples=60,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(steps=st.lists(STEPS, min_size=4, max_size=25))
    def test_it_equals_brute_force_after_any_writes(self, opener: Opener, steps: list[tuple[str, Any]]) -> None:
        engine, model = opener.open(), Model()
        for step, what in [*steps, ("search", [Query(vector(1, 1), limit=99)]), ("list", View())]:
            if step == "put":
                engine.put(what)
                model.items |= {item.id: item for item in what}
            elif step == "delete":
                gone = {item_id for item_id in what if model.items.pop(item_id, None) is not None}
                assert engine.delete(what) == len(gone)
            elif step == "search":
                for query, hits in zip(what, engine.search(what), strict=True):
                    assert [(hit.item.id, hit.score) for hit in hits] == model.search(query)
                    assert all(hit.item.value == model.items[hit.item.id].value for hit in hits)
            elif step == "list":
                assert [item.id for item in engine.items(what)] == model.listed(what)
            elif step == "reopen":
                engine = opener.reopen(engine)
            else:
                opener.stir(engine)
        assert engine.namespaces() == sorted({item_id.namespace for item_id in model.items})
        assert engine.stats().num_items == len(model.items)
        assert engine.stats().num_vectors == sum(len(item.vectors) for item in model.items.values())

    def test_among_many_vectors_the_best_are_found_in_order(self, opener: Opener) -> None:
        engine = opener.open(32)
        drawn = np.random.default_rng(7).standard_normal((700, 32)).astype(np.float32)
        drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
        engine.put([an_item(f"{row:03d}", one) for row, one in enumerate(drawn)])
        queries = [directed(seed, 32) for seed in range(20)]
        for asked, hits in zip(queries, engine.search([Query(one) for one in queries]), strict=True):
            truth = drawn.astype(float) @ asked.astype(float)
            assert [int(key) for key in keys(hits)] == np.argsort(-truth)[:10].tolist()
            assert [hit.score for hit in hits] == pytest.approx(np.sort(truth)[::-1][:10].tolist(), abs=1e-5)

    # -- what is stored -------------------------------------------------------------------------------------------

    def test_what_was_put_is_got_with_its_vectors_and_times(self, engine: VectorEngine, opener: Opener) -> None:
        value = {"text": "é ✓", "n": [1, 2.5, None, True, {"deep": {}}], "big": 2**53 + 1, "empty": ""}
        stored = an_item(
            "k", directed(1), directed(2), value=value, created_at_s=5.25, updated_at_s=6.5, expires_at_s=1e9
        )
        engine.put([stored, an_item("bare")])
        engine = opener.reopen(engine)
        found, bare, missing = engine.get([stored.id, ItemId(("a",), "bare"), ItemId(("a",), "no")])
        assert missing is None
        assert found is not None
        assert bare is not None
        assert (found.id, found.value, bare.vectors) == (stored.id, value, ())
        assert (found.created_at_s, found.updated_at_s, found.expires_at_s) == (5.25, 6.5, 1e9)
        assert len(found.vectors) == 2
        for got, was in zip(found.vectors, stored.vectors, strict=True):
            np.testing.assert_allclose(got, was, atol=1e-6)

    def test_later_changes_of_what_was_put_or_got_change_nothing_stored(self, engine: VectorEngine) -> None:
        value, one = {"tags": ["x"]}, vector(1.0)
        engine.put([an_item("k", one, value=value)])
        value["tags"].append("y")
        one[:] = 0
        for item in (engine.get([ItemId(("a",), "k")])[0], find(engine, vector(1.0))[0].item, engine.items(View())[0]):
            assert item is not None
            item.value["tags"].append("z")
        [hit] = find(engine, vector(1.0))
        assert (hit.item.value, hit.score) == ({"tags": ["x"]}, 1.0)

    def test_a_put_replaces_value_and_vectors(self, engine: VectorEngine, opener: Opener) -> None:
        engine.put([an_item("k", vector(9.0), vector(0, 9.0), value={"v": 1})])
        engine.put([an_item("k", vector(0, 0, 1.0), value={"v": 2})])
        engine = opener.reopen(engine)
        [hit] = find(engine, vector(1, 1))
        assert (hit.score, hit.item.value) == (0.0, {"v": 2})
        assert engine.stats().num_vectors == 1

    def test_a_put_without_vectors_leaves_no_stale_ones(self, engine: VectorEngine, opener: Opener) -> None:
        engine.put([an_item("k", vector(1.0))])
        engine.put([an_item("k", value={"text": "later"})])
        engine = opener.reopen(engine)
        assert find(engine, vector(1.0)) == []
        assert [item.value for item in engine.items(View())] == [{"text": "later"}]

    def test_a_deleted_item_is_gone_everywhere(self, engine: VectorEngine, opener: Opener) -> None:
        engine.put([an_item("k", vector(1.0)), an_item("l", vector(0.5), at=("b",))])
        gone, stays = ItemId(("a",), "k"), ItemId(("b",), "l")
        assert engine.delete([gone, gone, ItemId(("a",), "never")]) == 1
        for again in opener.before_and_after(engine):
            assert keys(find(again, vector(1.0))) == ["l"]
            assert again.get([gone]) == [None]
            assert [item.id for item in again.items(View())] == [stays]
            assert again.namespaces() == [("b",)]
            assert again.delete([gone]) == 0

    # -- what is found --------------------------------------------------------------------------------------------

    def test_an_empty_engine_answers_with_nothing(self, engine: VectorEngine) -> None:
        assert engine.search([]) == []
        assert engine.search([Query(vector(1.0)), Query(vector(0.0))]) == [[], []]
        assert (engine.items(View()), engine.namespaces(), engine.get([])) == ([], [], [])
        assert engine.delete([]) == 0
        engine.put([])
        assert engine.stats().num_items == 0

    def test_asked_for_more_than_there_is_it_gives_all(self, engine: VectorEngine) -> None:
        engine.put([an_item(key, vector(size)) for key, size in (("s", 1.0), ("m", 2.0), ("l", 3.0))])
        assert keys(find(engine, vector(1.0), limit=10_000)) == ["l", "m", "s"]
        assert keys(find(engine, vector(1.0), limit=10_000, offset=1)) == ["m", "s"]
        assert find(engine, vector(1.0), offset=3) == []
        assert find(engine, vector(1.0), limit=0) == []

    def test_an_item_with_several_vectors_is_found_once_by_its_nearest(self, engine: VectorEngine) -> None:
        engine.put([an_item("many", *[vector(size) for size in (5, 4, 3, 3, -1)]), an_item("one", vector(4.5))])
        engine.put([an_item("far", vector(1.0))])
        hits = find(engine, vector(1.0), limit=3)
        assert [(hit.item.id.key, hit.score) for hit in hits] == [("many", 5.0), ("one", 4.5), ("far", 1.0)]
        assert keys(find(engine, vector(1.0), limit=1, offset=1)) == ["one"]

    def test_equal_scores_are_ordered_by_id(self, engine: VectorEngine) -> None:
        same = directed(3)
        engine.put([an_item(key, same, at=at) for key, at in (("c", ("b",)), ("b", ("a",)), ("a", ("b",)))])
        engine.put([an_item("z", same, at=("a",))])
        assert keys(find(engine, directed(4))) == ["b", "z", "a", "c"]

    def test_two_items_with_the_same_vector_in_one_batch_are_both_found(self, engine: VectorEngine) -> None:
        engine.put([an_item("p", directed(3)), an_item("q", directed(3))])
        assert keys(find(engine, directed(3))) == ["p", "q"]

    def test_all_matching_items_come_back_when_fewer_match_than_asked_for(self, engine: VectorEngine) -> None:
        far = [an_item(f"far{number}", vector(-1.0, number), value={"agent": "me"}) for number in range(7)]
        near = [an_item(f"near{number}", vector(9.0, number), value={"agent": "you"}) for number in range(300)]
        engine.put([*near[:150], *far, *near[150:]])
        found = keys(find(engine, vector(1.0), limit=10, where={"agent": "me"}))
        assert sorted(found) == sorted(item.id.key for item in far)
        assert len(find(engine, vector(1.0), limit=5, where={"agent": {"$in": ["me"]}})) == 5

    def test_numbers_are_compared_as_numbers(self, engine: VectorEngine) -> None:
        engine.put([an_item(str(size), vector(1.0), value={"size": size}) for size in (2, 9, 10, 100)])
        assert sorted(keys(find(engine, vector(1.0), where={"size": {"$gt": 9}}))) == ["10", "100"]
        assert {item.id.key for item in engine.items(View(where={"size": {"$lt": 10}}))} == {"2", "9"}

    def test_namespaces_are_compared_label_by_label(self, engine: VectorEngine) -> None:
        engine.put([an_item("/".join(at) or "root", vector(1.0), at=at) for at in NAMESPACES])
        for prefix in NAMESPACES:
            expected = sorted("/".join(at) or "root" for at in NAMESPACES if at[: len(prefix)] == prefix)
            assert sorted(keys(find(engine, vector(1.0), limit=99, prefixes=(prefix,)))) == expected
            assert sorted(item.id.key for item in engine.items(View((prefix,)))) == expected
        assert engine.namespaces() == sorted(NAMESPACES)

    def test_prefixes_that_overlap_give_each_item_once_and_none_give_nothing(self, engine: VectorEngine) -> None:
        engine.put([an_item("x", vector(1.0), at=("a", "b")), an_item("y", vector(2.0), at=("c",))])
        prefixes = (("a",), ("a", "b"), ("a",), ("nowhere",))
        assert keys(find(engine, vector(1.0), prefixes=prefixes)) == ["x"]
        assert find(engine, vector(1.0), prefixes=()) == []
        assert engine.items(View(())) == []

    def test_nothing_outside_the_allow_list_comes_back_and_all_inside_does(self, engine: VectorEngine) -> None:
        engine.put([an_item(f"{number:03d}", vector(number)) for number in range(200)])
        allowed = frozenset({ItemId(("a",), "001"), ItemId(("a",), "150"), ItemId(("a",), "gone"), ItemId((), "002")})
        assert keys(find(engine, vector(1.0), allowed=allowed)) == ["150", "001"]
        assert keys(find(engine, vector(1.0), limit=1, offset=1, allowed=allowed)) == ["001"]
        assert {item.id.key for item in engine.items(View(allowed=allowed))} == {"150", "001"}
        assert find(engine, vector(1.0), allowed=frozenset()) == []
        assert find(engine, vector(1.0), allowed=allowed, prefixes=(("b",),)) == []

    def test_items_are_listed_last_updated_first_and_in_pages(self, engine: VectorEngine) -> None:
        times = {"p": 2.0, "q": 3.0, "r": 2.0, "s": 1.0}
        engine.put([an_item(key, updated_at_s=time_s) for key, time_s in times.items()])
        listed = [item.id.key for item in engine.items(View())]
        assert listed == ["q", "p", "r", "s"]
        pages = [engine.items(View(), limit=3, offset=offset) for offset in (0, 3, 6)]
        assert [[item.id.key for item in page] for page in pages] == [listed[:3], listed[3:], []]
        assert engine.items(View(), limit=0) == []

    # -- what expires ---------------------------------------------------------------------------------------------

    def test_an_item_counts_as_deleted_when_its_time_has_come(self, opener: Opener) -> None:
        clock = Clock(100.0)
        engine = opener.open(clock=clock)
        engine.put([an_item("short", vector(2.0), at=("s",), expires_at_s=110.0), an_item("long", vector(1.0))])
        clock.now_s = 109.9
        assert keys(find(engine, vector(1.0))) == ["short", "long"]
        clock.now_s = 110.0
        assert engine.get([ItemId(("s",), "short")]) == [None]
        for again in opener.before_and_after(engine):
            assert keys(find(again, vector(1.0), limit=1)) == ["long"]
            assert [item.id.key for item in again.items(View())] == ["long"]
            assert again.namespaces() == [("a",)]
            assert again.stats().num_items == 1
            assert again.delete([ItemId(("s",), "short")]) == 0

    def test_a_later_put_counts_for_when_an_item_expires(self, opener: Opener) -> None:
        clock = Clock(100.0)
        engine = opener.open(clock=clock)
        engine.put([an_item(key, vector(1.0), expires_at_s=110.0) for key in "pqr"])
        engine.put([an_item("p", vector(1.0)), an_item("q", vector(1.0), expires_at_s=120.0)])
        engine.put([an_item("r", vector(1.0), expires_at_s=105.0)])
        found = []
        for now_s in (104.0, 105.0, 115.0, 120.0):
            clock.now_s = now_s
            found.append("".join(sorted(keys(find(engine, vector(1.0))))))
        assert found == ["pqr", "pq", "pq", "p"]

    def test_what_was_stored_since_it_was_read_keeps_its_end(self, opener: Opener) -> None:
        clock = Clock(100.0)
        engine = opener.open(clock=clock)
        read = [an_item(key, vector(1.0), expires_at_s=110.0, updated_at_s=100.0) for key in "pqrs"]
        engine.put(read)
        engine.put([replace(read[1], updated_at_s=101.0, expires_at_s=120.0)])
        engine.put([replace(read[2], updated_at_s=101.0, expires_at_s=None)])
        engine.put([replace(read[3], expires_at_s=None)])
        if not isinstance(engine, TouchesItems):
            return
        seen = {item.id: 100.0 for item in read}
        assert engine.touch({item.id: 130.0 for item in read}, updated_at_s=seen) == 1
        assert engine.touch({read[0].id: 130.0}, updated_at_s={}) == 0
        engine = opener.reopen(engine)
        assert [item and item.expires_at_s for item in engine.get([one.id for one in read])] == [130, 120, None, None]

    def test_an_item_that_is_touched_or_put_again_lives_as_long_as_was_said_last(self, opener: Opener) -> None:
        clock = Clock(100.0)
        engine = opener.open(clock=clock)
        stored = [an_item(key, vector(1.0), expires_at_s=110.0, updated_at_s=100.0) for key in "pq"]
        engine.put(stored)
        wanted: dict[ItemId, float | None] = {stored[0].id: 130.0, stored[1].id: None, ItemId((), "gone"): 130.0}
        if isinstance(engine, TouchesItems):
            assert engine.touch(wanted) == 2
        else:
            engine.put([replace(item, expires_at_s=wanted[item.id]) for item in stored])
        engine = opener.reopen(engine)
        clock.now_s = 129.0
        assert [item.updated_at_s for item in engine.items(View())] == [100.0, 100.0]
        assert [hit.score for hit in find(engine, vector(1.0))] == [1.0, 1.0]
        clock.now_s = 130.0
        assert keys(find(engine, vector(1.0))) == ["q"]

    # -- what is refused ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("bad", "said"),
        [
            (an_item("x", np.ones(DIM + 1, np.float32)), "shape"),
            (an_item("x", np.ones((1, DIM), np.float32)), "shape"),
            (an_item("x", np.full(DIM, np.nan, np.float32)), "NaN"),
            (an_item("x", np.array([1.0] * (DIM - 1) + [np.inf])), "infinity"),
            (an_item("x", np.full(DIM, 1e300)), "infinity"),
            (an_item("x", "text"), "numbers"),
            (an_item("fine"), "twice"),
            (an_item("x", value={"when": {1, 2}}), "set"),
            (an_item("x", value={"n": float("nan")}), "NaN"),
            (an_item("x", value={1: "x"}), "key of int"),
            (an_item("x", value={"n": 2**64}), "65 bits"),
            (an_item("x", value={"t": "\ud800"}), "Unicode"),
            (an_item("x", value=["no mapping"]), "mapping"),
            (an_item(""), "empty"),
            (an_item("x", at=("a", "")), "empty"),
            (an_item("x", at=["a"]), "tuple"),
            (an_item("x", at=("a", 1)), "int"),
            (an_item("x", expires_at_s=float("inf")), "expires_at_s"),
            ("no item", "str"),
        ],
    )
    def test_one_bad_item_refuses_the_whole_batch(
        self, engine: VectorEngine, opener: Opener, bad: Any, said: str
    ) -> None:
        engine.put([an_item("fine", vector(1.0), value={"v": "old"})])
        batch = [an_item("fine", vector(2.0), value={"v": "new"}), an_item("more", vector(3.0)), bad]
        with pytest.raises(InvalidItem, match=said):
            engine.put(batch)
        engine = opener.reopen(engine)
        [hit] = find(engine, vector(1.0))
        assert (hit.item.value, hit.score, engine.stats().num_vectors) == ({"v": "old"}, 1.0, 1)

    def test_after_a_refused_batch_every_item_still_has_its_own_text(self, engine: VectorEngine) -> None:
        texts = {f"k{number:02d}": directed(number) for number in range(45)}
        engine.put([an_item(key, one) for key, one in list(texts.items())[:20]])
        with pytest.raises(InvalidItem, match="twice"):
            engine.put([an_item("k00", directed(90)), an_item("k00", directed(91))])
        for key, one in list(texts.items())[20:]:
            engine.put([an_item(key, one)])
        for key, one in texts.items():
            assert find(engine, one, limit=1)[0].item.value == {"text": f"text of {key}"}

    @pytest.mark.parametrize(
        "bad",
        [
            Query(np.ones(DIM - 1, np.float32)),
            Query(np.full(DIM, np.nan, np.float32)),
            Query(vector(1.0), limit=-1),
            Query(vector(1.0), offset=-1),
            Query(vector(1.0), limit=True),
            Query(vector(1.0), View(where={"kind": {"$like": "x"}})),
            Query(vector(1.0), View(where={"$eq": 1})),
            Query(vector(1.0), View(where=lambda value: True)),
            Query(vector(1.0), View(prefixes=("a",))),
            Query(vector(1.0), View(prefixes=(("",),))),
            Query(vector(1.0), View(allowed=["x"])),
            "no query",
        ],
    )
    def test_a_query_that_cannot_be_answered_is_refused(self, engine: VectorEngine, bad: Any) -> None:
        engine.put([an_item("k", vector(1.0))])
        with pytest.raises(InvalidQuery):
            engine.search([Query(vector(1.0)), bad])
        if isinstance(bad, Query) and np.isfinite(bad.vector).all() and len(bad.vector) == DIM and bad.limit == 10:
            with pytest.raises(InvalidQuery):
                engine.items(bad.view, limit=3, offset=bad.offset)
        assert len(find(engine, vector(1.0))) == 1

    def test_a_closed_engine_says_so(self, opener: Opener) -> None:
        engine = opener.open()
        engine.close()
        engine.close()
        calls: list[Callable[[], object]] = [
            lambda: engine.put([an_item("k")]),
            lambda: engine.delete([ItemId((), "k")]),
            lambda: engine.get([ItemId((), "k")]),
            lambda: engine.search([Query(vector(1.0))]),
            lambda: engine.items(View()),
            engine.namespaces,
            engine.stats,
        ]
        for call in calls:
            with pytest.raises(RetrievalError, match="closed"):
                call()

    def test_it_is_an_engine_that_says_its_length_and_sizes(self, engine: VectorEngine) -> None:
        assert isinstance(engine, VectorEngine)
        assert engine.dim == DIM
        engine.put([an_item("p", directed(1), directed(2)), an_item("q")])
        found = engine.stats()
        assert (found.num_items, found.num_vectors) == (2, 2)
        assert found.memory_bytes + found.disk_bytes > 0

    # -- from many threads ----------------------------------------------------------------------------------------

    @pytest.fixture
    def restless(self) -> Iterator[None]:
        """Let threads interrupt each other as often as possible."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(before)

    @pytest.mark.usefixtures("restless")
    def test_threads_that_add_delete_and_search_get_their_own_texts(self, opener: Opener) -> None:
        engine = opener.open(32)
        barrier, faults = threading.Barrier(8), []

        def work(number: int) -> None:
            try:
                barrier.wait(60)
                at = ("shared",) if number % 2 else ("own", str(number))
                for turn in range(12):
                    name = f"{number}-{turn}"
                    engine.put([an_item(name, directed(1 + number * 100 + turn, 32), at=at)])
                    if turn % 3 == 2:
                        assert engine.delete([ItemId(at, f"{number}-{turn - 1}")]) == 1
                    for known in (k for k in range(turn + 1) if k % 3 != 1 or k == turn):
                        hit = find(engine, directed(1 + number * 100 + known, 32), limit=1)[0]
                        assert hit.item.value == {"text": f"text of {number}-{known}"}
                        assert hit.score == pytest.approx(1.0, abs=1e-5)
            except BaseException as error:
                faults.append(error)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        engine = opener.reopen(engine)
        left = {f"{number}-{turn}" for number in range(8) for turn in range(12) if turn % 3 != 1}
        assert {item.id.key for item in engine.items(View())} == left
        assert engine.stats().num_vectors == len(left)

    @pytest.mark.usefixtures("restless")
    def test_a_batch_is_seen_whole_or_not_at_all(self, opener: Opener) -> None:
        engine = opener.open()
        batch = [an_item(f"{number:02d}", vector(1.0), value={"v": 0}) for number in range(24)]
        engine.put(batch)
        done, torn = threading.Event(), []

        def read() -> None:
            try:
                for _ in range(400):
                    seen = [hit.item.value["v"] for hit in find(engine, vector(1.0), limit=99)]
                    if len(seen) != len(batch) or len(set(seen)) > 1:
                        torn.append(seen)
            finally:
                done.set()

        reader = threading.Thread(target=read)
        reader.start()
        turn = 0
        while not done.is_set():
            turn += 1
            engine.put([replace(item, value={"v": turn}) for item in batch])
        reader.join()
        assert torn == []
