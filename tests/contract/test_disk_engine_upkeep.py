"""What an index on disk does by itself: it flushes what has waited for long, and cuts partitions that have grown."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pancake_langgraph.retrieval import clusters
from pancake_langgraph.retrieval.base import Item, ItemId, Query, View
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine, describe, verify
from pancake_langgraph.retrieval.faiss_codes import IvfCodes
from pancake_langgraph.retrieval.log import EMPTY_LOG_BYTES
from pancake_langgraph.retrieval.manifest import read_current
from pancake_langgraph.retrieval.segment import Segment
from tests.contract.index_kit import WAIT_S
from tests.index_children import Unsynced, an_id, an_item, contents, small

HOUR_S = 3600.0


class Watched(Unsynced):
    """Says when a flush or merge is done; the next ones fail where that is asked for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.is_broken = False

    def point(self, name: str) -> None:
        if name == "flush:frozen" and self.is_broken:
            raise OSError(5, "broken")
        if name == "swap:done":
            self.done.set()


def num_segments(path: Path) -> int:
    return len(describe(path).segments)


def log_bytes(path: Path) -> int:
    return sum(log.stat().st_size for log in (path / "wal").glob("*.log"))


# -- flushes by age -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", ["background", "manual"])
def test_what_has_waited_for_long_is_flushed_by_the_next_write(tmp_path: Path, merge: str) -> None:
    now, disk = [1000.0], Watched()
    engine = small(str(tmp_path), merge=merge, flush_rows=1000, flush_after_s=300, clock=lambda: now[0], disk=disk)
    engine.put([an_item("a", 1)])
    now[0] += 299
    engine.put([an_item("b", 2)])
    assert num_segments(tmp_path) == 0
    now[0] += 1
    engine.put([an_item("c", 3)])
    assert disk.done.wait(WAIT_S)
    assert num_segments(tmp_path) == 1
    disk.done.clear()
    engine.put([an_item("d", 4)])
    now[0] += 299
    engine.put([an_item("e", 5)])
    assert num_segments(tmp_path) == 1, "what was written after it waits for as long again"
    now[0] += 1
    assert engine.delete([an_id("e")]) == 1
    assert disk.done.wait(WAIT_S)
    engine.close()
    assert log_bytes(tmp_path) == EMPTY_LOG_BYTES
    engine = small(str(tmp_path), flush_rows=1000)
    assert contents(engine) == {"a": 1, "b": 2, "c": 3, "d": 4}
    engine.close()


def test_no_write_has_to_come_for_it(tmp_path: Path) -> None:
    disk = Watched()
    engine = small(str(tmp_path), merge="background", flush_rows=1000, flush_after_s=0.02, disk=disk)
    for number in range(3):
        engine.put([an_item(f"a{number}", number)])
        assert disk.done.wait(WAIT_S)
        disk.done.clear()
    engine.close()
    assert log_bytes(tmp_path) == EMPTY_LOG_BYTES
    assert verify(tmp_path) == []


def test_deletions_wait_no_longer_than_items(tmp_path: Path) -> None:
    now = [1000.0]
    engine = small(str(tmp_path), flush_rows=1000, flush_after_s=300, clock=lambda: now[0])
    engine.put([an_item(f"a{number}", number) for number in range(10)])
    engine.settle()
    engine.delete([an_id("a1")])
    assert log_bytes(tmp_path) > EMPTY_LOG_BYTES
    now[0] += 300
    engine.delete([an_id("a2")])
    assert log_bytes(tmp_path) == EMPTY_LOG_BYTES
    assert set(contents(engine)) == {f"a{number}" for number in range(10)} - {"a1", "a2"}
    engine.close()


def test_an_old_log_is_flushed_when_the_index_is_opened_again(tmp_path: Path) -> None:
    engine = small(str(tmp_path), flush_rows=1000)
    engine.put([an_item("a", 1)])
    engine.close()
    engine = small(str(tmp_path), flush_rows=1000)
    assert num_segments(tmp_path) == 0, "it is not old yet"
    engine.close()
    [log] = (tmp_path / "wal").glob("*.log")
    long_ago_s = time.time() - HOUR_S
    os.utime(log, (long_ago_s, long_ago_s))
    disk = Watched()
    engine = small(str(tmp_path), merge="background", flush_rows=1000, disk=disk)
    assert disk.done.wait(WAIT_S)
    assert contents(engine) == {"a": 1}
    engine.close()
    assert (num_segments(tmp_path), log_bytes(tmp_path)) == (1, EMPTY_LOG_BYTES)


def test_without_a_limit_nothing_is_flushed_by_its_age_and_nothing_looks_for_it(tmp_path: Path) -> None:
    now = [1000.0]
    engine = small(
        str(tmp_path), merge="background", flush_rows=1000, flush_after_s=None, clock=lambda: now[0], disk=Watched()
    )
    engine.put([an_item("a", 1)])
    now[0] += 1e9
    engine.put([an_item("b", 2)])
    assert engine._core._thread is None  # type: ignore[union-attr]
    engine.close()
    assert num_segments(tmp_path) == 0


def test_a_flush_by_age_that_fails_is_tried_again_as_late(tmp_path: Path) -> None:
    now, disk = [1000.0], Watched()
    engine = small(str(tmp_path), flush_rows=1000, flush_after_s=300, clock=lambda: now[0], disk=disk)
    disk.is_broken = True
    engine.put([an_item("a", 1)])
    now[0] += 300
    failures = []
    for step_s in (0, 0, 299, 1):
        now[0] += step_s
        engine.put([an_item("b", 2)])
        failures.append(engine._core.num_failures)  # type: ignore[union-attr]
    assert failures == [1, 1, 1, 2]
    disk.is_broken = False
    now[0] += 300
    engine.put([an_item("c", 3)])
    assert num_segments(tmp_path) == 1
    assert contents(engine) == {"a": 1, "b": 2, "c": 3}
    engine.close()


# -- partitions that have grown -------------------------------------------------------------------------------------

DIM = 32
OLD, NEW = 6000, 1500


def directions(count: int, seed: int) -> Any:
    drawn = np.random.default_rng(seed).standard_normal((count, DIM))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


def crowd(count: int, seed: int, spread: float = 0.05) -> Any:
    """Return vectors near one direction."""
    drawn = directions(1, 99) + spread * np.random.default_rng(seed).standard_normal((count, DIM))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


def put(engine: DiskVectorEngine, vectors: Any, first: int) -> None:
    for start in range(0, len(vectors), 500):
        rows = enumerate(vectors[start : start + 500], first + start)
        engine.put([Item(ItemId(("x",), f"k{number}"), {"n": number}, (row,)) for number, row in rows])


def grown(path: Path, kind: str, new: Any) -> DiskVectorEngine:
    """Return an index to which many vectors came after it was trained."""
    engine = DiskVectorEngine(
        path,
        dim=DIM,
        ack="none",
        codes=kind,
        merge="manual",
        coded_rows=1000,
        exact_rows=50,
        disk=Unsynced(),  # type: ignore[arg-type]
    )
    put(engine, directions(OLD, 1), 0)
    engine.compact()
    put(engine, new, OLD)
    engine.compact()
    return engine


def sizes(path: Path) -> list[int]:
    [entry] = read_current(path).segments
    codes = Segment(path, entry, DIM).codes
    assert isinstance(codes, IvfCodes)
    rows = [codes.rows_in(number) for number in range(codes.num_lists)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(entry.num_rows)), "each row is in one partition"
    return [len(found) for found in rows]


def found(engine: DiskVectorEngine, queries: Any, vectors: Any) -> float:
    """Return which share of the best ten is found."""
    hits = engine.search([Query(one, View(), 10) for one in queries])
    best = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    same = [len({hit.item.value["n"] for hit in one} & set(true)) for one, true in zip(hits, best, strict=True)]
    return sum(same) / best.size


@pytest.mark.parametrize("kind", ["pq", "sq8", "rabitq"])
def test_a_partition_that_has_grown_is_cut_without_training_anew(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = crowd(NEW, 2)
    everything = np.concatenate((directions(OLD, 1), new))
    with monkeypatch.context() as whole:
        whole.setattr("pancake_langgraph.retrieval.segment_build._CUT_AT", 10**6)
        uncut = grown(tmp_path / "whole", kind, new)
    engine = grown(tmp_path / "cut", kind, new)
    before, after = sizes(tmp_path / "whole"), sizes(tmp_path / "cut")
    assert len(after) > len(before)
    assert max(after) < 0.4 * max(before)
    trained = [read_current(tmp_path / name).segments[0].trained_rows for name in ("whole", "cut")]
    assert trained == [OLD, OLD]
    asked = np.concatenate((crowd(40, 3), directions(40, 4)))
    as_good = found(uncut, asked, everything) - 1 / 800  # of 800 neighbors one may lie in another partition now
    assert found(engine, asked, everything) >= max(as_good, 0.8 if kind != "pq" else 0.5)
    uncut.close()
    assert verify(tmp_path / "cut") == []
    engine.close()


def test_vectors_that_are_all_the_same_are_left_together(tmp_path: Path) -> None:
    engine = grown(tmp_path, "sq8", np.repeat(directions(1, 99), NEW, axis=0))
    first = sizes(tmp_path)
    assert max(first) >= NEW
    assert len(first) <= clusters.num_partitions(OLD) + 4
    for turn in range(3):
        put(engine, directions(1, 10 + turn), OLD + NEW + turn)
        engine.compact()
    assert len(sizes(tmp_path)) <= len(first) + 1
    assert len(engine.search([Query(directions(1, 99)[0], View(), 50)])[0]) == 50
    engine.close()


def test_rows_are_parted_where_they_can_be() -> None:
    one, other = crowd(60, 1), -crowd(40, 2)
    both = np.concatenate((one, other))
    pair = clusters.parts(both, 2)
    assert np.bincount(clusters.assign(both, pair)[0]).tolist() in ([60, 40], [40, 60])
    assert len(clusters.parts(np.repeat(one[:1], 100, axis=0), 8)) == 1
    assert len(clusters.parts(np.concatenate((np.repeat(one[:1], 99, axis=0), other[:1])), 2)) == 1
