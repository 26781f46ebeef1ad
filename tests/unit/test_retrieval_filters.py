"""Filters: LangGraph's operators as its store in memory applies them where that is right, and four more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.store.memory import InMemoryStore

from pancake_langgraph._errors import InvalidQuery
from pancake_langgraph.retrieval.filters import compile_filter, matches

VALUE = {
    "kind": "note",
    "size": 10,
    "ratio": 0.5,
    "flag": True,
    "none": None,
    "tags": ["a", "b"],
    "when": "2024-05-01",
    "digits": "10",
    "deep": {"n": 3, "deeper": {"x": "y"}},
    "dotted.name": 1,
}


@pytest.mark.parametrize(
    "where",
    [
        {},
        {"kind": "note"},
        {"kind": "note", "size": 10},
        {"size": 10.0},
        {"none": None},
        {"missing": None},
        {"flag": True},
        {"tags": ["a", "b"]},
        {"tags": ("a", {"$ne": "x"})},
        {"deep": {"n": 3}},
        {"deep": {"deeper": {"x": {"$in": ["y"]}}}},
        {"deep": {}},
        {"dotted.name": 1},
        {"kind": {"$eq": "note"}},
        {"kind": {"$ne": "else"}},
        {"missing": {"$ne": "else"}},
        {"missing": {"$nin": ["x"]}},
        {"size": {"$gt": 9, "$lt": 11}},
        {"size": {"$gte": 10, "$lte": 10}},
        {"size": {"$gt": "9"}},
        {"digits": {"$gt": 9}},
        {"digits": {"$gt": "9"}},
        {"when": {"$gte": "2024-01-01", "$lt": "2025"}},
        {"kind": {"$in": ["x", "note", 3]}},
        {"tags": {"$in": [["a", "b"]]}},
        {"size": {"$nin": [1, 2]}},
        {"$and": [{"kind": "note"}, {"size": {"$gt": 1}}]},
        {"$or": [{"kind": "x"}, {"deep": {"n": {"$lte": 3}}}]},
        {"$and": []},
        {"kind": "note", "$or": [{"size": 1}, {"size": 10}]},
        {"size": {"$or": [{"$lt": 1}, {"$gt": 9}]}},
        {"deep": {"$or": [{"n": 1}, {"n": 3}]}},
        {"deep": {"$eq": {"n": 3, "deeper": {"x": "y"}}}},
    ],
)
def test_it_passes(where: dict[str, Any]) -> None:
    assert matches(where, VALUE)


@pytest.mark.parametrize(
    "where",
    [
        {"kind": "Note"},
        {"kind": None},
        {"missing": 0},
        {"flag": 1},
        {"size": True},
        {"flag": {"$in": [1]}},
        {"flag": {"$gt": 0}},
        {"flag": {"$gte": "0"}},
        {"size": "10"},
        {"tags": "a"},
        {"tags": ["a"]},
        {"tags": ["b", "a"]},
        {"deep": {"n": 4}},
        {"deep.n": 3},
        {"kind": {"n": 3}},
        {"kind": {}},
        {"missing": {}},
        {"size": {"$gt": 10}},
        {"size": {"$gt": 9, "$lt": 10}},
        {"kind": {"$gt": 1}},
        {"missing": {"$lt": 5}},
        {"none": {"$lt": 5}},
        {"tags": {"$gt": 1}},
        {"when": {"$gt": 5}},
        {"size": {"$lt": "x"}},
        {"kind": {"$in": []}},
        {"missing": {"$in": ["x"]}},
        {"kind": {"$nin": ["note"]}},
        {"$or": []},
        {"$and": [{"kind": "note"}, {"size": 1}]},
        {"kind": "x", "$or": [{"size": 10}]},
        {"deep": {"$eq": {"n": 3}}},
        {"deep": {"$ne": {"n": 3, "deeper": {"x": "y"}}}},
    ],
)
def test_it_does_not_pass(where: dict[str, Any]) -> None:
    assert not matches(where, VALUE)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"kind": {"$like": "n%"}}, r"unknown operator '\$like'; allowed are .*\$in.*\$or"),
        ({"$not": []}, "unknown operator"),
        ({"$eq": 1}, "at the top"),
        ({"a": {"$gt": 1, "b": 2}}, r"\$gt stands beside the field 'b'"),
        ({"a": {"$in": "text"}}, r"\$in got str"),
        ({"a": {"$nin": {"b": 1}}}, r"\$nin got dict"),
        ({"$or": {"a": 1}}, r"\$or got dict"),
        ({"$and": ["a"]}, r"\$and got list"),
        ({"a": {"$gt": None}}, r"\$gt got NoneType"),
        ({"a": {"$lt": True}}, r"\$lt got bool"),
        ({"a": {"$lt": [1]}}, r"\$lt got list"),
        ({"a": float("nan")}, "NaN"),
        ({"a": {"$eq": {1, 2}}}, "got set"),
        ({"a": object()}, "got object"),
        ({1: 2}, "key of int"),
        ("a", "got str"),
        (lambda value: True, "got function"),
        (None, "got NoneType"),
    ],
)
def test_it_is_refused(where: Any, said: str) -> None:
    with pytest.raises(InvalidQuery, match=said):
        compile_filter(where)


def test_a_filter_that_is_nested_too_deep_is_refused_and_not_a_crash() -> None:
    where: dict[str, Any] = {"a": 1}
    value: Any = {"$eq": 1}
    for _ in range(10_000):
        where, value = {"$and": [where]}, {"$eq": [value]}
    for bad in (where, {"a": value}):
        with pytest.raises(InvalidQuery, match="deeper than"):
            compile_filter(bad)


def test_large_whole_numbers_keep_their_order() -> None:
    assert matches({"n": {"$gt": 2**53}}, {"n": 2**53 + 1})
    assert not matches({"n": {"$gte": 2**53 + 1}}, {"n": float(2**53)})


def test_a_compiled_filter_keeps_what_it_was_given() -> None:
    wanted = ["x"]
    passes = compile_filter({"a": {"$in": wanted}, "b": {"$eq": wanted}})
    wanted.append("y")
    assert passes({"a": "x", "b": ["x"]})
    assert not passes({"a": "y", "b": ["x"]})


# LangGraph's store compares `True` with 1 as equal, and raises where sizes cannot be compared: neither is drawn.
SCALARS = st.none() | st.integers(-2, 2) | st.sampled_from(["x", "y", ""]) | st.sampled_from([0.5, -1.5])
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
NUMBERS = st.integers(-2, 2) | st.sampled_from([0.5, -1.5])
CONDITIONS = (
    JSON
    | st.builds(lambda operator, operand: {operator: operand}, st.sampled_from(["$eq", "$ne"]), JSON)
    | st.dictionaries(st.sampled_from("ab"), SCALARS, max_size=2)
)
ORDERS = st.dictionaries(st.sampled_from(["$gt", "$gte", "$lt", "$lte"]), NUMBERS, min_size=1, max_size=2)


@given(
    value=st.fixed_dictionaries({"n": NUMBERS}, optional={"a": JSON, "b": JSON}),
    where=st.fixed_dictionaries({}, optional={"a": CONDITIONS, "b": CONDITIONS, "n": ORDERS}),
)
def test_it_agrees_with_langgraphs_store_in_memory(value: dict[str, Any], where: dict[str, Any]) -> None:
    store = InMemoryStore()
    store.put(("x",), "k", value)
    assert matches(where, value) == bool(store.search(("x",), filter=where))
