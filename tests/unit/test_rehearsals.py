"""Answers that were found for drafts: given once, to the very query, of the very state."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pancake_langgraph.retrieval.base import Hit, Item, ItemId, Query, Vector, View
from pancake_langgraph.retrieval.rehearsals import Rehearsals, key_of

NS = ("notes",)
NOW = object()


def vector(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(8).astype(np.float32)


def hits(*keys: str) -> list[Hit]:
    return [Hit(Item(ItemId(NS, key), {"text": key}), 0.5) for key in keys]


def keys(found: Sequence[Hit] | None) -> list[str] | None:
    return None if found is None else [hit.item.id.key for hit in found]


ASKED = Query(vector(1), View((NS,), {"n": 1}), limit=5, offset=2)


@pytest.fixture
def rehearsals() -> Rehearsals:
    made = Rehearsals()
    made.keep("ann", "where is", key_of(ASKED), hits("a", "b"), NOW)
    return made


def test_an_answer_is_given_to_an_equal_query_and_only_once(rehearsals: Rehearsals) -> None:
    equal = Query(vector(1), View((NS,), {"n": 1}), limit=5, offset=2)
    assert keys(rehearsals.take("ann", equal, NOW)) == ["a", "b"]
    assert rehearsals.take("ann", equal, NOW) is None
    assert len(rehearsals) == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(ASKED, vector=vector(2)),
        replace(ASKED, vector=np.nextafter(vector(1), np.float32(9.0))),
        replace(ASKED, limit=4),
        replace(ASKED, offset=0),
        replace(ASKED, view=View(((*NS, "x"),), {"n": 1})),
        replace(ASKED, view=View((NS,))),
        replace(ASKED, view=View((NS,), {"n": True})),
        replace(ASKED, view=View((NS,), {"n": 1}, frozenset())),
        replace(ASKED, view=View((NS,), {"n": object()})),
    ],
)
def test_a_query_that_differs_in_anything_is_not_answered(rehearsals: Rehearsals, other: Query) -> None:
    assert rehearsals.take("ann", other, NOW) is None
    assert keys(rehearsals.take("ann", ASKED, NOW)) == ["a", "b"]


def test_nothing_is_given_to_another_agent_or_after_a_change(rehearsals: Rehearsals) -> None:
    assert rehearsals.take("bob", ASKED, NOW) is None
    assert len(rehearsals) == 1
    assert rehearsals.take("ann", ASKED, object()) is None
    assert len(rehearsals) == 0, "documents that may be gone are let go of"


def test_an_unknown_state_lets_go_of_all(rehearsals: Rehearsals) -> None:
    assert rehearsals.take("bob", ASKED, None) is None
    assert len(rehearsals) == 0


def test_an_allow_list_that_its_caller_has_shortened_is_another(rehearsals: Rehearsals) -> None:
    allowed: Any = {ItemId(NS, "a"), ItemId(NS, "b")}
    query = Query(vector(1), View((NS,), allowed=allowed))
    rehearsals.keep("ann", "x", key_of(query), hits("a", "b"), NOW)
    allowed.clear()
    assert rehearsals.take("ann", query, NOW) is None


def test_what_was_found_in_another_state_is_let_go_of(rehearsals: Rehearsals) -> None:
    rehearsals.keep("bob", "x", key_of(ASKED), hits("c"), object())
    assert len(rehearsals) == 1
    assert rehearsals.take("ann", ASKED, NOW) is None


def test_a_longer_draft_takes_the_place_of_its_beginning_and_of_others_the_last_stays(rehearsals: Rehearsals) -> None:
    for seed, text in ((2, "I look"), (3, "I look for"), (4, "I look for keys")):
        rehearsals.keep("ann", text, key_of(Query(vector(seed))), hits(str(seed)), NOW)
    assert len(rehearsals) == 2
    assert [keys(rehearsals.take("ann", Query(vector(seed)), NOW)) for seed in (2, 3, 4)] == [None, None, ["4"]]
    assert keys(rehearsals.take("ann", ASKED, NOW)) == ["a", "b"]
    for seed, text in ((5, "one"), (6, "two"), (7, "")):
        rehearsals.keep("ann", text, key_of(Query(vector(seed))), hits(str(seed)), NOW)
    assert [keys(rehearsals.take("ann", Query(vector(seed)), NOW)) for seed in (5, 6, 7)] == [None, ["6"], ["7"]]


def test_the_same_question_twice_is_one_answer(rehearsals: Rehearsals) -> None:
    rehearsals.keep("ann", "where", key_of(ASKED), hits("c"), NOW)
    assert len(rehearsals) == 1
    assert keys(rehearsals.take("ann", ASKED, NOW)) == ["c"]


def test_memory_is_bounded() -> None:
    rehearsals = Rehearsals(max_agents=3, max_hits=2)
    for name in "abcd":
        rehearsals.keep(name, name, key_of(Query(vector(1))), hits("1"), NOW)
    assert [keys(rehearsals.take(name, Query(vector(1)), NOW)) for name in "abcd"] == [None, ["1"], ["1"], ["1"]]
    rehearsals.keep("a", "a", key_of(Query(vector(1))), hits("1", "2", "3"), NOW)
    rehearsals.keep("a", "a", key_of(Query(vector(1), View(where={"n": object()}))), hits("1"), NOW)
    assert len(rehearsals) == 0
    rehearsals.keep("a", "a", key_of(Query(vector(1))), hits("1"), NOW)
    rehearsals.clear()
    assert len(rehearsals) == 0
