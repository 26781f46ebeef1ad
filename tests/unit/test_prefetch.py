"""Bringing partitions up in the background: latest drafts, searches that come first, trouble, ends."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pancake_langgraph.retrieval import prefetch
from pancake_langgraph.retrieval.base import Hit, Item, ItemId, Query, Vector, View
from pancake_langgraph.retrieval.draft import DraftSettings
from pancake_langgraph.retrieval.partitions import PartitionId, PrefetchesPartitions
from pancake_langgraph.retrieval.prefetch import PartitionPrefetcher
from tests.unit.partition_kit import Shelves, readers

LIMIT_S = 30.0
MEGABYTE = 1 << 20


@pytest.fixture
def shelves() -> Shelves:
    return Shelves(64, 8)


@pytest.fixture
def prefetcher(shelves: Shelves) -> Iterator[PartitionPrefetcher]:
    settings = DraftSettings(budget_bytes=shelves.total_bytes // 4, per_query=4)
    with PartitionPrefetcher(shelves, settings, embed=lambda text: vector(len(text))) as made:
        yield made
        shelves.gate.set()


def vector(seed: int) -> Vector:
    found = np.random.default_rng(seed).standard_normal(8)
    return (found / np.linalg.norm(found)).astype(np.float32)


def near(shelves: Shelves, wanted: Vector, n: int = 4) -> set[PartitionId]:
    return {entry.id for entry in shelves.partitions(wanted, n)}


def test_the_shelves_keep_the_port(shelves: Shelves) -> None:
    assert isinstance(shelves, PrefetchesPartitions)


def test_a_draft_is_warm_when_its_search_comes(shelves: Shelves, prefetcher: PartitionPrefetcher) -> None:
    prefetcher.draft("a", "find")
    assert prefetcher.wait_idle(LIMIT_S)
    assert shelves.warm_ids == near(shelves, vector(4))
    prefetcher.searched("a", vector(4))
    assert prefetcher.wait_idle(LIMIT_S)
    stats = prefetcher.stats()
    assert (stats.hits, stats.needed, stats.late, stats.useful, stats.fetched) == (4, 4, 0, 4, 4)
    assert stats.hit_rate == stats.precision == 1.0
    assert stats.read_bytes == stats.warm_bytes == stats.hit_bytes == stats.needed_bytes > 0


def test_an_expected_search_brings_up_what_the_agent_asked_last(
    shelves: Shelves, prefetcher: PartitionPrefetcher
) -> None:
    prefetcher.searched("a", vector(1))
    prefetcher.wait_idle(LIMIT_S)
    prefetcher._outlook.lost(list(shelves.warm_ids))
    shelves.warm_ids.clear()
    prefetcher.expect("a")
    prefetcher.wait_idle(LIMIT_S)
    assert shelves.warm_ids == near(shelves, vector(1))
    prefetcher.expect("b", vector(2))
    prefetcher.wait_idle(LIMIT_S)
    assert shelves.warm_ids == near(shelves, vector(1)) | near(shelves, vector(2))


def test_of_an_agents_drafts_only_the_last_is_followed(shelves: Shelves, prefetcher: PartitionPrefetcher) -> None:
    shelves.gate.clear()
    prefetcher.expect("busy", vector(9))
    assert shelves.began.acquire(timeout=LIMIT_S)
    for text in ("a", "ab", "abc"):
        prefetcher.draft("a", text)
    shelves.gate.set()
    prefetcher.wait_idle(LIMIT_S)
    assert shelves.warm_ids == near(shelves, vector(9)) | near(shelves, vector(3))
    assert prefetcher.stats().hints == 2


def test_a_text_of_another_kind_does_not_push_a_question_out(shelves: Shelves, prefetcher: PartitionPrefetcher) -> None:
    shelves.gate.clear()
    prefetcher.expect("busy", vector(9))
    assert shelves.began.acquire(timeout=LIMIT_S)
    for text in ("is it", "a", "abcd"):
        prefetcher.draft("a", text)
    shelves.gate.set()
    prefetcher.wait_idle(LIMIT_S)
    assert shelves.warm_ids == near(shelves, vector(9)) | near(shelves, vector(5)) | near(shelves, vector(4))
    assert prefetcher.stats().hints == 3


@pytest.mark.parametrize(("newer", "is_stopped"), [("ab", True), ("is it", False)])
def test_only_a_longer_draft_of_the_same_text_stops_what_is_brought_up(newer: str, is_stopped: bool) -> None:
    shelves = Shelves(8, 8, sizes=[MEGABYTE] * 8)
    settings = DraftSettings(budget_bytes=8 * MEGABYTE, per_query=4)
    with PartitionPrefetcher(shelves, settings, embed=lambda text: vector(len(text))) as prefetcher:
        shelves.gate.clear()
        prefetcher.draft("a", "a")
        assert shelves.began.acquire(timeout=LIMIT_S)
        prefetcher.draft("a", newer)
        shelves.gate.set()
        prefetcher.wait_idle(LIMIT_S)
        order = [ids for what, ids in shelves.log if what == "warm"]
        first = [(part.id,) for part in shelves.partitions(vector(1), 4)]
        assert order[0] == first[0]
        assert (order[:4] != first) is is_stopped


def test_a_search_that_comes_first_makes_its_draft_void(shelves: Shelves, prefetcher: PartitionPrefetcher) -> None:
    shelves.gate.clear()
    prefetcher.expect("busy", vector(9))
    assert shelves.began.acquire(timeout=LIMIT_S)
    prefetcher.expect("a", vector(1))
    prefetcher.searched("a", vector(2))
    shelves.gate.set()
    prefetcher.wait_idle(LIMIT_S)
    assert not near(shelves, vector(1)) - near(shelves, vector(9)) - near(shelves, vector(2)) & shelves.warm_ids
    assert (prefetcher.stats().overtaken, prefetcher.stats().hints) == (1, 1)


def test_no_search_has_to_wait_for_what_is_learnt_from_it(
    shelves: Shelves, prefetcher: PartitionPrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_SETTLE_S", 1000.0)
    prefetcher.expect("a", vector(1))
    assert prefetcher.wait_idle(LIMIT_S)
    prefetcher.searched("a", vector(1))
    assert prefetcher.stats().searches == 0
    prefetcher.expect("b", vector(2))  # what is planned now is planned with what that search has told
    for _ in range(1000):
        if prefetcher.stats().hints == 2:
            break
        time.sleep(0.01)
    assert (prefetcher.stats().searches, prefetcher.stats().hints) == (1, 2)
    prefetcher.searched("b", vector(2))
    assert prefetcher.wait_idle(LIMIT_S)
    assert prefetcher.stats().searches == 2


class Library(Shelves):
    """Shelves that can be searched, and keep what for."""

    dim = 8

    def __init__(self) -> None:
        super().__init__(64, 8)
        self.asked: list[Query] = []

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        self.asked += queries
        return [[] for _ in queries]

    put = delete = get = items = namespaces = stats = close = lambda self, *args, **kwargs: None


def test_what_a_search_reads_besides_partitions_is_read_ahead_in_the_agents_own_view() -> None:
    library, view = Library(), View(prefixes=(("notes",),))
    with PartitionPrefetcher(
        library, DraftSettings(budget_bytes=1 << 20), embed=lambda text: vector(len(text))
    ) as made:
        made.draft("a", "find")
        assert made.wait_idle(LIMIT_S)
        made.searched("a", vector(4), query=Query(vector(4), view, limit=3))
        made.searched("other", vector(5), query=Query(vector(5)))
        made.draft("a", "and this")
        assert made.wait_idle(LIMIT_S)
        assert made.stats().failures == 0
    first, second = library.asked
    assert (first.view, first.limit) == (View(), 10)
    assert (second.view, second.limit) == (view, 3)
    assert np.array_equal(first.vector, vector(4))


def test_agents_that_are_new_are_taken_to_search_like_the_last_one() -> None:
    library, first, last = Library(), View(prefixes=(("a",),)), View(prefixes=(("b",),))
    settings = DraftSettings(budget_bytes=1 << 20)
    with PartitionPrefetcher(library, settings, like=Query(vector(1), first, limit=3)) as made:
        made.expect("new", vector(4))
        assert made.wait_idle(LIMIT_S)
        made.searched("other", vector(1), query=Query(vector(1), last, limit=2))
        made.expect("newer", vector(5))
        assert made.wait_idle(LIMIT_S)
    assert [(one.view, one.limit) for one in library.asked] == [(first, 3), (last, 2)]


def test_agents_that_are_new_do_not_pay_for_what_the_last_one_wanted() -> None:
    allowed = frozenset({ItemId(("a",), "1")})
    dear = Query(vector(1), View((("a",),), {"n": {"$gt": 1}}, allowed), limit=50_000, offset=10)
    wrong = Query(vector(1), limit=-1)
    library = Library()
    with PartitionPrefetcher(library, DraftSettings(budget_bytes=1 << 20), like=dear) as made:
        made.expect("new", vector(4))
        assert made.wait_idle(LIMIT_S)
        made.searched("other", vector(1), query=wrong)
        made.expect("newer", vector(5))
        assert made.wait_idle(LIMIT_S)
    assert [(one.view, one.limit, one.offset) for one in library.asked] == [(View((("a",),)), 32, 0), (View(), 0, 0)]


def test_the_first_page_is_searched_for_after_a_later_one() -> None:
    library = Library()
    with PartitionPrefetcher(library, DraftSettings(budget_bytes=1 << 20)) as made:
        made.searched("a", vector(1), query=Query(vector(1), limit=5, offset=10))
        made.expect("a", vector(4))
        assert made.wait_idle(LIMIT_S)
    assert [(one.limit, one.offset) for one in library.asked] == [(5, 0)]


class MarkedLibrary(Library):
    """Says in which state it is, and finds one item."""

    def __init__(self) -> None:
        super().__init__()
        self.state: object | None = object()

    def mark(self) -> object | None:
        return self.state

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        super().search(queries)
        return [[Hit(Item(ItemId(("notes",), "gate"), {"n": len(self.asked)}), 0.5)] for _ in queries]


def asked(seed: int) -> Query:
    return Query(vector(seed), View(prefixes=(("notes",),)), limit=3)


@pytest.fixture
def marked() -> MarkedLibrary:
    return MarkedLibrary()


@pytest.fixture
def rehearsing(marked: MarkedLibrary) -> Iterator[PartitionPrefetcher]:
    settings = DraftSettings(budget_bytes=1 << 20)
    with PartitionPrefetcher(marked, settings, embed=lambda text: vector(len(text)), like=asked(1)) as made:
        yield made


def test_a_search_for_just_what_was_drafted_has_its_answer(rehearsing: PartitionPrefetcher) -> None:
    rehearsing.draft("a", "find")
    assert rehearsing.wait_idle(LIMIT_S)
    found = rehearsing.searched("a", vector(4), query=asked(4))
    assert found is not None
    assert [hit.item.value["n"] for hit in found] == [1]
    assert rehearsing.searched("a", vector(4), query=asked(4)) is None
    assert rehearsing.wait_idle(LIMIT_S)
    stats = rehearsing.stats()
    assert (stats.rehearsed, stats.answered, stats.searches, stats.failures) == (1, 1, 2, 0)


@pytest.mark.parametrize("trouble", ["changed", "unknown", "other words", "no query", "closed"])
def test_no_answer_is_given_that_a_search_could_not_give_now(
    marked: MarkedLibrary, rehearsing: PartitionPrefetcher, trouble: str
) -> None:
    rehearsing.draft("a", "find")
    assert rehearsing.wait_idle(LIMIT_S)
    if trouble in ("changed", "unknown"):
        marked.state = object() if trouble == "changed" else None
    if trouble == "closed":
        assert len(rehearsing._rehearsals) == 1
        rehearsing.close()
        assert len(rehearsing._rehearsals) == 0
    query = asked(5 if trouble == "other words" else 4)
    assert rehearsing.searched("a", query.vector, query=None if trouble == "no query" else query) is None
    assert rehearsing.stats().answered == 0


def test_a_search_goes_on_when_it_cannot_be_compared_with_drafts(rehearsing: PartitionPrefetcher) -> None:
    rehearsing.draft("a", "find")
    assert rehearsing.wait_idle(LIMIT_S)
    wrong: Any = (["notes"],)  # no namespace, as its search will say
    assert rehearsing.searched("a", vector(4), query=Query(vector(4), View(prefixes=wrong))) is None
    assert rehearsing.wait_idle(LIMIT_S)
    assert (rehearsing.stats().failures, rehearsing.stats().answered) == (1, 0)


@pytest.mark.parametrize("state", [object(), None])
def test_what_changes_while_it_is_searched_for_a_draft_is_not_kept(
    marked: MarkedLibrary, rehearsing: PartitionPrefetcher, monkeypatch: pytest.MonkeyPatch, state: object
) -> None:
    search, before = marked.search, marked.state

    def changing(queries: Sequence[Query]) -> list[list[Hit]]:
        marked.state = state
        return search(queries)

    monkeypatch.setattr(marked, "search", changing)
    rehearsing.draft("a", "find")
    assert rehearsing.wait_idle(LIMIT_S)
    assert rehearsing.stats().rehearsed == 1
    for now in (marked.state, before):
        marked.state = now
        assert rehearsing.searched("a", vector(4), query=asked(4)) is None


def test_a_filter_that_its_caller_changes_meanwhile_is_not_taken_for_the_one_that_was_searched(
    marked: MarkedLibrary, rehearsing: PartitionPrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, tags = marked.search, ["mine"]
    mine = Query(vector(1), View(where={"tag": {"$in": tags}}))

    def changing(queries: Sequence[Query]) -> list[list[Hit]]:
        tags[:] = ["theirs"]
        return search(queries)

    monkeypatch.setattr(marked, "search", changing)
    rehearsing.searched("a", vector(1), query=mine)
    rehearsing.draft("a", "find")
    assert rehearsing.wait_idle(LIMIT_S)
    assert rehearsing.stats().rehearsed == 1
    assert rehearsing.searched("a", vector(4), query=replace(mine, vector=vector(4))) is None


@pytest.mark.parametrize("what", ["search", "close"])
def test_what_is_over_while_it_is_searched_for_a_draft_is_not_kept(
    marked: MarkedLibrary, rehearsing: PartitionPrefetcher, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    search = marked.search

    def overtaken(queries: Sequence[Query]) -> list[list[Hit]]:
        if what == "search":
            rehearsing.searched("a", vector(4), query=asked(4))
        else:
            rehearsing.close()
        return search(queries)

    monkeypatch.setattr(marked, "search", overtaken)
    rehearsing.draft("a", "find")
    assert rehearsing.wait_idle(LIMIT_S)
    assert rehearsing.stats().rehearsed == 1
    assert len(rehearsing._rehearsals) == 0


def test_a_search_that_a_cache_has_answered_leaves_the_rehearsal(rehearsing: PartitionPrefetcher) -> None:
    rehearsing.draft("a", "find")
    assert rehearsing.wait_idle(LIMIT_S)
    assert rehearsing.searched("a", vector(4), query=asked(4), is_answered=True) is None
    assert rehearsing.stats().answered == 0
    assert rehearsing.searched("a", vector(4), query=asked(4)) is not None


def test_what_a_search_tells_is_looked_at_without_being_asked_for(
    prefetcher: PartitionPrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_SETTLE_S", 0.02)
    prefetcher.searched("a", vector(1))
    for _ in range(1000):
        if prefetcher.stats().searches:
            break
        time.sleep(0.01)
    assert prefetcher.stats().searches == 1


def test_the_rest_of_a_draft_is_given_up_when_its_search_comes() -> None:
    shelves = Shelves(8, 8, sizes=[MEGABYTE] * 8)
    settings = DraftSettings(budget_bytes=4 * MEGABYTE, per_query=4)
    with PartitionPrefetcher(shelves, settings) as prefetcher:
        shelves.gate.clear()
        prefetcher.expect("a", vector(1))
        assert shelves.began.acquire(timeout=LIMIT_S)
        prefetcher.searched("a", vector(1))
        shelves.gate.set()
        prefetcher.wait_idle(LIMIT_S)
        stats = prefetcher.stats()
        assert next(len(ids) for what, ids in shelves.log if what == "warm") == 1  # not all four
        assert (stats.hits, stats.late, stats.needed, stats.fetched) == (0, 4, 4, 1)


def test_memory_is_given_back_before_more_is_taken() -> None:
    shelves = Shelves(64, 8, sizes=[1] * 64)
    with PartitionPrefetcher(shelves, DraftSettings(budget_bytes=4, per_query=4)) as prefetcher:
        for seed in range(20):
            prefetcher.expect("a", vector(seed))
            prefetcher.wait_idle(LIMIT_S)
            assert shelves.warm_ids == near(shelves, vector(seed))
    warm = 0
    for what, ids in shelves.log:
        warm += len(ids) if what == "warm" else -len(ids)
        assert 0 <= warm <= 4


def test_partitions_that_are_gone_give_their_room_back(shelves: Shelves, prefetcher: PartitionPrefetcher) -> None:
    prefetcher.expect("a", vector(1))
    prefetcher.wait_idle(LIMIT_S)
    assert prefetcher.stats().warm_bytes > 0
    shelves.warm_ids.clear()  # a merge: other segments from now on
    prefetcher._forget_gone()
    assert prefetcher.stats().warm_bytes == 0


@pytest.mark.parametrize("what", ["warm", "embed", "partitions"])
def test_trouble_is_counted_and_passed_over(
    shelves: Shelves, prefetcher: PartitionPrefetcher, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(prefetcher if what == "embed" else shelves, "_embed" if what == "embed" else what, fail)
        prefetcher.draft("a", "words")
        assert prefetcher.wait_idle(LIMIT_S)
    assert prefetcher.stats().failures == 1
    assert prefetcher.stats().warm_bytes == 0
    prefetcher.draft("a", "words")
    prefetcher.wait_idle(LIMIT_S)
    assert shelves.warm_ids == near(shelves, vector(5))


def test_a_vector_of_another_length_is_trouble_too(prefetcher: PartitionPrefetcher) -> None:
    prefetcher.expect("a", np.zeros(3, np.float32))
    prefetcher.searched("a", np.zeros(3, np.float32))
    prefetcher.wait_idle(LIMIT_S)
    stats = prefetcher.stats()
    assert stats.failures + stats.overtaken == 2
    assert stats.warm_bytes == 0


def test_an_empty_draft_and_one_without_an_embedder_mean_nothing(shelves: Shelves) -> None:
    with PartitionPrefetcher(shelves, DraftSettings(budget_bytes=1000)) as prefetcher:
        prefetcher.draft("a", "  ")
        assert prefetcher.stats().hints == 0
        prefetcher.draft("a", "words")
        prefetcher.wait_idle(LIMIT_S)
        assert prefetcher.stats().failures == 0
    assert shelves.log == [("cool", ())]


def test_too_many_hints_push_out_the_oldest(shelves: Shelves, prefetcher: PartitionPrefetcher) -> None:
    shelves.gate.clear()
    prefetcher.expect("busy", vector(9))
    assert shelves.began.acquire(timeout=LIMIT_S)
    for n in range(300):
        prefetcher.expect(f"agent {n}", vector(9))
    for _ in range(1100):
        prefetcher.searched("other", vector(9))
    shelves.gate.set()
    prefetcher.wait_idle(LIMIT_S)
    stats = prefetcher.stats()
    assert (stats.hints, stats.searches, stats.dropped) == (257, 1024, 44 + 76)


def test_close_gives_all_memory_back_and_stops(shelves: Shelves) -> None:
    prefetcher = PartitionPrefetcher(shelves, DraftSettings(budget_bytes=10_000, per_query=4))
    prefetcher.expect("a", vector(1))
    prefetcher.wait_idle(LIMIT_S)
    assert shelves.warm_ids
    prefetcher.close()
    assert not shelves.warm_ids
    assert "pancake-prefetch" not in {thread.name for thread in threading.enumerate()}
    prefetcher.expect("a", vector(2))
    prefetcher.searched("a", vector(2))
    prefetcher.close()
    assert not shelves.warm_ids


def test_a_forked_process_does_nothing(
    shelves: Shelves, prefetcher: PartitionPrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with prefetcher._changed:  # another thread may have held it at the fork
            prefetcher.expect("a", vector(1))
            prefetcher.searched("a", vector(1))
            prefetcher.close()
    assert prefetcher.wait_idle(LIMIT_S)
    assert shelves.log == []


def test_readers_find_most_of_what_they_need() -> None:
    shelves = Shelves(512, 24)
    settings = DraftSettings(budget_bytes=shelves.total_bytes // 20, per_query=8)
    with PartitionPrefetcher(shelves, settings) as prefetcher:
        for step in readers(num_agents=16, num_steps=400, dim=24):
            prefetcher.expect(step.agent, step.draft)
            assert prefetcher.wait_idle(LIMIT_S)
            prefetcher.searched(step.agent, step.vector)
            assert prefetcher.wait_idle(LIMIT_S)
            assert sum(shelves.parts[n].num_bytes for _, n in shelves.warm_ids) <= settings.budget_bytes
        stats = prefetcher.stats()
    assert stats.hit_rate >= 0.5
    assert stats.failures == stats.late == stats.dropped == 0
