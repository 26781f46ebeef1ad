"""What is particular to the engine on disk: codes, recall, merges, tombstones, expiry inside segments."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pancake_langgraph._errors import CorruptIndex, InvalidQuery, RetrievalError
from pancake_langgraph.retrieval.base import Item, ItemId, Query, TouchesItems, View
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine, describe
from pancake_langgraph.retrieval.manifest import read_current
from pancake_langgraph.retrieval.partitions import PrefetchesPartitions
from pancake_langgraph.retrieval.segment import Segment
from tests.index_children import Unsynced

DIM = 32
NUM = 6000
KINDS = ("pq", "sq8", "rabitq", "hnsw")


def clustered(count: int, seed: int) -> Any:
    """Return vectors of length one around 100 centers."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(1).standard_normal((100, DIM))
    drawn = centers[rng.integers(0, 100, count)] + 0.6 * rng.standard_normal((count, DIM))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


VECTORS = clustered(NUM, 2)
ASKED = clustered(40, 3)


def owner(number: int) -> tuple[str, ...]:
    """Return the namespace of an item: most are shared, some belong to one of twenty agents."""
    return ("agent", str(number % 20)) if number % 3 == 0 else ("shared",)


def items(numbers: Sequence[int]) -> list[Item]:
    """Return items, whose value is their number."""
    return [Item(ItemId(owner(n), f"k{n}"), {"n": n, "tenth": n % 10 == 0}, (VECTORS[n],)) for n in numbers]


def made(path: Path, **options: Any) -> DiskVectorEngine:
    """Open an index that uses codes where it can."""
    defaults: dict[str, Any] = {"merge": "manual", "flush_rows": 2000, "coded_rows": 1000, "exact_rows": 50}
    return DiskVectorEngine(path, **{"dim": DIM, "ack": "none", "disk": Unsynced(), **defaults, **options})


def filled(path: Path, **options: Any) -> DiskVectorEngine:
    """Return an index of all vectors in one segment with codes."""
    engine = made(path, **options)
    for start in range(0, NUM, 500):
        engine.put(items(range(start, start + 500)))
    engine.compact()
    return engine


def recall(engine: DiskVectorEngine, view: View, visible: Sequence[int], limit: int = 10) -> float:
    """Return which share of the best is found, and check that as many are found as there are."""
    hits = engine.search([Query(one, view, limit) for one in ASKED])
    truth = np.array(visible)[np.argsort(-(ASKED @ VECTORS[list(visible)].T), axis=1)[:, :limit]]
    assert all(len(found) == min(limit, len(visible)) for found in hits)
    same = [len({hit.item.value["n"] for hit in found} & set(best)) for found, best in zip(hits, truth, strict=True)]
    return sum(same) / truth.size


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An index of each kind of codes, for tests that only read."""
    path = tmp_path_factory.mktemp("index")
    engine = filled(path, codes=request.param)
    assert [one.kind for one in describe(path).segments] == [request.param]
    yield engine
    engine.close()


def test_codes_find_most_of_the_best(shared: DiskVectorEngine) -> None:
    assert recall(shared, View(), range(NUM)) >= 0.95


def test_views_find_most_of_the_best_however_few_they_show(shared: DiskVectorEngine) -> None:
    own = [n for n in range(NUM) if owner(n) == ("shared",)]
    assert recall(shared, View((("shared",),)), own) >= 0.95
    tenth = [n for n in range(NUM) if n % 10 == 0]
    assert recall(shared, View(where={"tenth": True}), tenth) >= 0.9
    few = [n for n in range(NUM) if owner(n) == ("agent", "3")]
    assert recall(shared, View((("agent", "3"),)), few) >= 0.9
    both = [n for n in range(NUM) if owner(n) == ("agent", "3") and n % 10 == 0]
    assert both == []
    assert [shared.search([Query(ASKED[0], View((("agent", "3"),), {"tenth": True}))])] == [[[]]]


def test_all_that_is_visible_comes_back_when_it_is_asked_for(shared: DiskVectorEngine) -> None:
    view = View((("agent", "3"), ("agent", "6")))
    visible = [n for n in range(NUM) if owner(n) in view.prefixes]
    [hits] = shared.search([Query(ASKED[0], view, NUM)])
    assert sorted(hit.item.value["n"] for hit in hits) == visible
    [every] = shared.search([Query(ASKED[0], View(), 2 * NUM)])
    assert len(every) == NUM
    allowed = frozenset(item.id for item in items(range(0, NUM, 7)))
    assert recall(shared, View(allowed=allowed), range(0, NUM, 7)) >= 0.95


def test_scores_are_exact_and_batches_answer_as_single_queries_do(shared: DiskVectorEngine) -> None:
    queries = [Query(one, view, 5) for one in ASKED[:6] for view in (View(), View((("shared",),)))]
    together = shared.search(queries)
    for query, hits in zip(queries, together, strict=True):
        [alone] = shared.search([query])
        assert [(hit.item.id, hit.score) for hit in hits] == [(hit.item.id, hit.score) for hit in alone]
        for hit in hits:
            wanted = float(np.dot(VECTORS[hit.item.value["n"]].astype(float), query.vector.astype(float)))
            assert hit.score == pytest.approx(wanted, abs=1e-6)


def test_prefetching_changes_no_answer(shared: DiskVectorEngine) -> None:
    query = Query(ASKED[0])
    [before] = shared.search([query])
    assert shared.prefetch([query, Query(ASKED[1], limit=0)]) > 0
    assert shared.prefetch([Query(ASKED[0], View((("nobody",),)))]) == 0
    [after] = shared.search([query])
    assert [hit.item.id for hit in before] == [hit.item.id for hit in after]


def test_partitions_that_were_warmed_hold_what_is_found(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    assert isinstance(engine, PrefetchesPartitions)
    near = engine.partitions(ASKED[0], 20)
    names = [one.id for one in near]
    assert len(set(names)) == 20
    assert engine.is_warm(names) == [False] * 20
    assert engine.warm([*names, ("gone", 1), (names[0][0], 10**6)]) == sum(one.num_bytes for one in near)
    assert engine.warm(names) == 0
    assert engine.is_warm([*names, ("gone", 1)]) == [True] * 20 + [False]
    engine.cool(names[:5])
    assert engine.is_warm(names) == [False] * 5 + [True] * 15
    held = sum(one.num_bytes for one in engine.partitions(ASKED[0], 10**6))
    assert held == VECTORS.nbytes
    assert engine.partitions(ASKED[0], 0) == []
    with pytest.raises(InvalidQuery):
        engine.partitions(ASKED[0][:5], 3)
    engine.put(items(range(3)))
    engine.compact()
    assert engine.is_warm(names) == [False] * 20
    engine.close()


def mapped_kib(folder: Path) -> int:
    """Return how much of the vectors of an index this process has in memory where they are mapped."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    maps = [at for at, line in enumerate(lines) if str(folder) in line and "raw.f32" in line]
    return sum(int(one.split()[1]) for at in maps for one in lines[at : at + 5] if one.startswith("Rss:"))


def answers(engine: DiskVectorEngine) -> list[list[tuple[ItemId, float]]]:
    """Return what is found for all that is asked."""
    return [[(hit.item.id, hit.score) for hit in hits] for hits in engine.search([Query(one) for one in ASKED])]


def test_vectors_that_were_read_are_taken_from_the_mapped_file_until_they_are_let_go(
    tmp_path: Path,
) -> None:
    filled(tmp_path).close()
    engine = made(tmp_path)
    engine.search([Query(ASKED[0])])
    assert mapped_kib(tmp_path) == 0  # they were read
    read = answers(engine)
    assert answers(engine) == read
    assert mapped_kib(tmp_path) > 0
    engine.cool([one.id for one in engine.partitions(ASKED[0], 10**6)])
    assert mapped_kib(tmp_path) == 0
    assert [answers(engine), answers(engine)] == [read, read]
    assert mapped_kib(tmp_path) > 0
    engine.close()


def test_vectors_of_large_segments_are_always_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pancake_langgraph.retrieval.segment.MAPPED_BYTES", VECTORS.nbytes - 1)
    filled(tmp_path).close()
    engine = made(tmp_path)
    assert answers(engine) == answers(engine)
    assert mapped_kib(tmp_path) == 0
    engine.close()


def test_deleted_and_replaced_items_of_a_coded_segment_are_never_found(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    engine.delete([item.id for item in items(range(0, NUM, 2))])
    engine.put(items(range(1, 500, 2)))
    for again in range(2):
        left = range(1, NUM, 2)
        assert recall(engine, View(), left) >= 0.95
        assert recall(engine, View((("shared",),)), [n for n in left if owner(n) == ("shared",)]) >= 0.95
        assert engine.stats().num_vectors == len(left)
        if not again:
            engine.close()
            engine = made(tmp_path)
    engine.close()


def test_the_exact_setting_finds_all_of_the_best(tmp_path: Path) -> None:
    filled(tmp_path).close()
    engine = made(tmp_path, recall="exact")
    assert recall(engine, View(), range(NUM)) == 1
    engine.close()
    engine = made(tmp_path, recall="fast")
    assert recall(engine, View(), range(NUM)) >= 0.9
    engine.close()


# -- merges ---------------------------------------------------------------------------------------------------------


def test_tombstones_over_a_fifth_are_compacted_and_give_their_room_back(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    before = engine.stats().disk_bytes
    engine.delete([item.id for item in items(range(1000))])
    engine.settle()
    assert engine.stats().dead_vectors == 1000
    engine.delete([item.id for item in items(range(1000, 1500))])
    engine.settle()
    found = engine.stats()
    assert (found.dead_vectors, found.num_vectors) == (0, NUM - 1500)
    assert found.disk_bytes < 0.8 * before
    engine.delete([item.id for item in items(range(NUM))])
    engine.compact()
    assert (engine.stats().num_items, describe(tmp_path).segments) == (0, ())
    engine.put(items(range(3)))
    assert recall(engine, View(), range(3)) == 1
    engine.close()


def test_small_segments_are_merged_by_tiers_and_training_is_used_on(tmp_path: Path) -> None:
    engine = made(tmp_path, flush_rows=100)
    counts = []
    for start in range(0, 4000, 100):
        engine.put(items(range(start, start + 100)))
        engine.settle()
        counts.append(len(describe(tmp_path).segments))
    assert max(counts) <= 3 * 3 + 3
    engine.compact()
    [whole] = read_current(tmp_path).segments
    assert whole.num_rows == 4000
    engine.put(items(range(4000, 4500)))
    engine.compact()
    [grown] = read_current(tmp_path).segments
    assert (grown.num_rows, grown.trained_rows) == (4500, whole.trained_rows)
    assert recall(engine, View(), range(4500)) >= 0.95
    engine.compact()
    assert read_current(tmp_path).segments == (grown,)
    engine.close()


def test_what_changes_while_a_merge_is_built_is_kept(tmp_path: Path) -> None:
    class Busy(Unsynced):
        def point(self, name: str) -> None:
            if name in work:
                work.pop(name)()

    work: dict[str, Any] = {}
    engine = made(tmp_path, disk=Busy())
    engine.put(items(range(1500)))
    work["build:begun"] = lambda: (engine.delete([items([5])[0].id]), engine.put(items([2000])))
    work["build:named"] = lambda: engine.put([Item(items([7])[0].id, {"n": 7, "new": True}, (VECTORS[7],))])
    work["publish:manifest"] = lambda: engine.delete([items([9])[0].id])
    engine.settle()
    work["merge:begun"] = lambda: engine.delete([items([11])[0].id])
    work["publish:rename"] = lambda: engine.delete([items([13])[0].id])
    engine.compact()
    assert work == {}
    gone = {5, 9, 11, 13}
    for again in range(2):
        assert {item.value["n"] for item in engine.items(View())} == {*range(1500), 2000} - gone
        [item] = engine.items(View(where={"new": True}))
        assert item.value == {"n": 7, "new": True}
        if not again:
            engine.close()
            engine = made(tmp_path)
    engine.close()


# -- other things ---------------------------------------------------------------------------------------------------


def test_items_expire_inside_segments_and_touching_them_moves_only_that(tmp_path: Path) -> None:
    now = [100.0]
    engine = made(tmp_path, clock=lambda: now[0])
    lasting = [Item(ItemId(("a",), f"k{n}"), {"n": n}, (VECTORS[n],), 1.0, 2.0, 110.0 + n % 2 * 10) for n in range(100)]
    engine.put(lasting)
    engine.compact()
    assert isinstance(engine, TouchesItems)
    assert engine.touch({lasting[0].id: 150.0, lasting[2].id: None, ItemId((), "none"): 1.0}) == 2
    now[0] = 110.0
    assert engine.stats().num_items == 52
    [found] = engine.search([Query(VECTORS[0], limit=100)])
    assert {hit.item.value["n"] for hit in found} == {*range(1, 100, 2), 0, 2}
    assert engine.get([lasting[0].id])[0].updated_at_s == 2.0  # type: ignore[union-attr]
    engine.close()
    now[0] = 120.0
    engine = made(tmp_path, clock=lambda: now[0])
    assert {item.value["n"] for item in engine.items(View())} == {0, 2}
    engine.compact()
    assert engine.stats().dead_vectors == 0
    now[0] = 1e9
    assert {item.value["n"] for item in engine.items(View())} == {2}
    engine.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.one_of(st.sets(st.integers(0, 299)), st.sets(st.integers(100, 150), min_size=30)), strided=st.booleans())
def test_rows_are_read_the_same_however_they_lie(scanned: Segment, rows: set[int], strided: bool) -> None:
    wanted = np.arange(0, 300, 2) if strided else np.array(sorted(rows), np.int64)
    block, where = scanned.scanned(wanted)
    np.testing.assert_array_equal(block if where is None else block[where], scanned.raw[wanted])
    scanned.forget(wanted)
    for _ in ("read", "taken"):
        np.testing.assert_array_equal(scanned.vectors(wanted), scanned.raw[wanted])
    scanned.forget(wanted[::3])
    np.testing.assert_array_equal(scanned.vectors(wanted), scanned.raw[wanted])  # some are read, others taken


def test_rows_that_the_device_has_to_bring_are_read_until_they_are_near(
    scanned: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    monkeypatch.setattr(os, "preadv", partial(counted, reads, os.preadv))
    rows = np.arange(0, 100, 2)
    scanned.forget(np.arange(300))
    scanned.vectors(rows)
    assert len(reads) == len(rows)
    scanned.vectors(rows)
    assert len(reads) == len(rows)
    faults = itertools.count()
    monkeypatch.setattr("pancake_langgraph.retrieval.segment.num_faults", lambda: next(faults))
    scanned.vectors(rows)
    assert len(reads) == 2 * len(rows)
    monkeypatch.undo()
    monkeypatch.setattr(os, "preadv", partial(counted, reads, os.preadv))
    scanned.vectors(np.arange(0, 110, 2))
    assert len(reads) == 3 * len(rows) + 5
    scanned.vectors(np.arange(0, 110, 2))
    assert len(reads) == 3 * len(rows) + 5


def counted(calls: list[int], read: Callable[..., int], fd: int, buffers: Any, offset: int) -> int:
    """Read, and note that."""
    calls.append(offset)
    return read(fd, buffers, offset)


def test_a_file_of_vectors_that_was_cut_is_named_by_whoever_reads_it(tmp_path: Path) -> None:
    filled(tmp_path).close()
    engine = made(tmp_path)
    before = answers(engine)
    assert answers(engine) == before
    [file] = tmp_path.glob("seg/*/raw.f32")
    os.truncate(file, 4096)
    with pytest.raises(CorruptIndex, match=r"raw\.f32: row 32 "):
        answers(engine)
    engine.close()


def test_what_stands_before_the_cut_of_a_file_of_vectors_stays_usable(tmp_path: Path) -> None:
    filled(tmp_path).close()
    engine = made(tmp_path, on_corrupt="skip")
    assert answers(engine) == answers(engine)
    [file] = tmp_path.glob("seg/*/raw.f32")
    os.truncate(file, 4096)
    assert len({found for hits in answers(engine) for found, _ in hits}) == 4096 // (4 * DIM)
    assert any("row 32 " in one for one in engine.damaged)
    engine.close()


def test_views_of_all_rows_are_searched_as_what_they_show(tmp_path: Path) -> None:
    engine = made(tmp_path)
    every = [Item(ItemId(("shared",), f"k{n}"), {"n": n}, (VECTORS[n],)) for n in range(NUM)]
    engine.put(every)
    engine.compact()
    shared = View((("shared",),))
    assert recall(engine, shared, range(NUM)) >= 0.95
    best = [hits[0].item.id for hits in engine.search([Query(one, shared) for one in ASKED])]
    engine.delete(best)
    left = engine.search([Query(one, shared) for one in ASKED])
    assert not set(best) & {hit.item.id for hits in left for hit in hits}
    assert all(len(hits) == 10 for hits in left)
    engine.close()


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("scanned")
    engine = made(path)
    engine.put(items(range(300)))
    engine.compact()
    engine.close()
    return Segment(path, read_current(path).segments[0], DIM)


def test_files_of_replaced_segments_are_closed(tmp_path: Path) -> None:
    engine = made(tmp_path, flush_rows=50)
    for start in range(0, 1000, 50):
        engine.put(items(range(start, start + 50)))
        engine.settle()
    engine.compact()
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    [left] = read_current(tmp_path).segments
    folders = {Path(name).parent.name for name in opened if name.startswith(f"{tmp_path}/seg/")}
    assert folders == {left.name}
    engine.close()


@pytest.mark.parametrize(
    "options",
    [
        *({"ack": "soon"}, {"recall": "all"}, {"codes": "zip"}, {"merge": "no"}, {"on_corrupt": "hide"}),
        *({"flush_rows": 0}, {"exact_rows": True}, {"coded_rows": 1.5}, {"dim": 0}),
        *({"flush_after_s": 0}, {"flush_after_s": True}, {"flush_after_s": float("nan")}, {"flush_after_s": "5"}),
    ],
)
def test_a_setting_that_is_not_allowed_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(RetrievalError, match=next(iter(options))):
        made(tmp_path, **options)
    assert not (tmp_path / "CURRENT").exists()


@pytest.mark.parametrize("ack", ["sync", "group", "none"])
def test_each_way_to_acknowledge_keeps_what_was_written(tmp_path: Path, ack: str) -> None:
    engine = made(tmp_path, ack=ack, disk=None)
    engine.put(items(range(5)))
    engine.sync()
    engine.close()
    engine = made(tmp_path)
    assert recall(engine, View(), range(5)) == 1
    engine.close()
