"""Pure decisions of the index on disk, and the arithmetic below them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.retrieval import clusters
from pancake_langgraph.retrieval.masks import bits_at, num_set, packed, unpacked, with_bits
from pancake_langgraph.retrieval.planner import Probe, Scan, SegmentSize, choose_merge, plan
from pancake_langgraph.retrieval.segment_files import row_sums

LARGE: dict[str, Any] = {"rows": 1_000_000, "lists": 4096, "wanted": 10, "recall": "balanced"}


def test_small_views_segments_without_codes_and_the_exact_setting_are_scanned() -> None:
    assert plan(**LARGE, visible=8192) == Scan()
    assert plan(**{**LARGE, "lists": 0}, visible=1_000_000) == Scan()
    assert plan(**{**LARGE, "recall": "exact"}, visible=1_000_000) == Scan()
    assert plan(**{**LARGE, "wanted": 5000}, visible=100_000) == Scan()


def test_the_fewer_rows_are_visible_the_more_partitions_are_looked_into() -> None:
    plans = [plan(**LARGE, visible=visible) for visible in (1_000_000, 250_000, 62_500, 10_000)]
    assert plans == [Probe(48, 160), Probe(96, 160), Probe(192, 160), Probe(480, 160)]
    assert plan(**{**LARGE, "recall": "fast"}, visible=1_000_000) == Probe(24, 80)
    assert plan(**{**LARGE, "lists": 100}, visible=10_000) == Probe(100, 160)
    assert plan(**{**LARGE, "rows": 86_000, "lists": 1024}, visible=86_000) == Probe(96, 160)


def test_deep_searches_look_into_enough_partitions_to_hold_what_they_ask_for() -> None:
    deep = plan(**{**LARGE, "wanted": 2000}, visible=1_000_000)
    assert isinstance(deep, Probe)
    assert deep.candidates == 32_000
    assert deep.probes * 1_000_000 / 4096 >= 4 * 32_000 * 0.99


def test_a_walk_through_a_graph_remembers_more_than_it_is_asked_for() -> None:
    assert plan(**{**LARGE, "lists": 1}, visible=1_000_000) == Probe(64, 64)
    assert plan(**{**LARGE, "lists": 1, "wanted": 100}, visible=1_000_000) == Probe(200, 200)
    assert plan(**{**LARGE, "lists": 1, "wanted": 100_000}, visible=700_000) == Scan()


def sizes(*found: tuple[int, int]) -> list[SegmentSize]:
    """Return sizes of segments called by their place."""
    return [SegmentSize(str(at), items, dead) for at, (items, dead) in enumerate(found)]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([], ()),
        ([(100, 0)] * 3, ()),
        ([(100, 0)] * 4, ("0", "1", "2", "3")),
        ([(400, 0), (100, 0), (100, 0), (100, 0), (100, 0)], ("1", "2", "3", "4")),
        ([(400, 0)] * 4, ("0", "1", "2", "3")),
        ([(10_000, 0), (1600, 0), (400, 0), (100, 0)], ()),
        ([(10_000, 1999), (100, 0)], ()),
        ([(100, 0), (10_000, 2000)], ("1",)),
        ([(100, 100)], ("0",)),
        ([(1, 0)] * 4, ("0", "1", "2", "3")),
    ],
)
def test_segments_of_one_tier_and_segments_full_of_tombstones_are_merged(
    found: list[tuple[int, int]], wanted: tuple[str, ...]
) -> None:
    assert choose_merge(sizes(*found), unit=100) == wanted


@given(st.lists(st.booleans(), min_size=1, max_size=70), st.data())
def test_bits_are_what_masks_are(mask: list[bool], data: st.DataObject) -> None:
    bits = packed(np.array(mask))
    more = data.draw(st.lists(st.integers(0, len(mask) - 1), max_size=5))
    changed = with_bits(bits, np.array(more, np.int64))
    wanted = np.array(mask)
    assert num_set(bits) == int(wanted.sum())
    np.testing.assert_array_equal(unpacked(bits, len(mask)), wanted)
    wanted[more] = True
    np.testing.assert_array_equal(bits_at(changed, np.arange(len(mask))), wanted)


@given(st.integers(0, 2), st.integers(0, 7), st.integers(1, 2**32 - 1))
def test_any_change_of_one_number_changes_the_sum_of_its_row(row: int, column: int, change: int) -> None:
    rows = np.random.default_rng(5).standard_normal((3, 8)).astype(np.float32)
    before = row_sums(rows)
    rows.view(np.uint32)[row, column] ^= np.uint32(change)
    assert (row_sums(rows) != before).tolist() == [at == row for at in range(3)]


def test_partitions_gather_what_lies_in_one_direction() -> None:
    centers = np.eye(8, dtype=np.float32)
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 8, 800)
    vectors = (centers[labels] + 0.05 * rng.standard_normal((800, 8))).astype(np.float32)
    centroids = clusters.train(vectors, 32)
    found, _ = clusters.assign(vectors, centroids)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)
    assert len(set(zip(labels.tolist(), found.tolist(), strict=True))) == len(np.unique(found))
    np.testing.assert_array_equal(clusters.train(vectors, 32), centroids)


def test_partitions_of_equal_and_of_zero_vectors_are_trained_without_trouble() -> None:
    for vectors in (np.zeros((50, 4), np.float32), np.ones((50, 4), np.float32)):
        centroids = clusters.train(vectors, 8)
        assert np.isfinite(centroids).all()
        assert len(clusters.assign(vectors, centroids)[0]) == 50
    assert len(clusters.train(np.ones((3, 4), np.float32), 8)) == 3


@pytest.mark.parametrize(("rows", "wanted"), [(0, 4), (1, 4), (16_000, 512), (86_000, 1024), (1_000_000, 4096)])
def test_there_are_about_four_times_the_root_of_partitions(rows: int, wanted: int) -> None:
    assert clusters.num_partitions(rows) == wanted
