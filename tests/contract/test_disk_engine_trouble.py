"""An index on disk in trouble: what is missing, closed, broken or odd is said, and nothing acknowledged is lost."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from pancake_langgraph._errors import CorruptIndex, InvalidQuery, RetrievalError
from pancake_langgraph.retrieval.base import Item, ItemId, Query, View
from pancake_langgraph.retrieval.disk import Disk
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine, describe, verify
from pancake_langgraph.retrieval.index_reader import IndexReader
from pancake_langgraph.retrieval.index_writer import IndexWriter
from pancake_langgraph.retrieval.loading import Damage
from pancake_langgraph.retrieval.manifest import read_current
from tests.contract.index_kit import flip
from tests.index_children import DIM, an_id, an_item, contents, small, vector


def filled(path: Path, **options: Any) -> dict[str, int]:
    """Make an index with six items in a segment and two in the log; return what it holds."""
    engine = small(str(path), flush_rows=1000, **options)
    engine.put([an_item(key, at) for at, key in enumerate("abcdst")])
    engine.settle()
    engine.put([an_item("e", 10), an_item("f", 11)])
    engine.close()
    return {**{key: at for at, key in enumerate("abcdst")}, "e": 10, "f": 11}


# -- what is missing ------------------------------------------------------------------------------------------------


def test_a_log_without_current_is_never_begun_anew(tmp_path: Path) -> None:
    engine = small(str(tmp_path), flush_rows=1000)
    engine.put([an_item("a", 1)])
    engine.close()
    kept = (tmp_path / "CURRENT").read_bytes()
    (tmp_path / "CURRENT").unlink()
    for open_index in (
        lambda: small(str(tmp_path)),
        lambda: small(str(tmp_path), read_only=True),
        lambda: describe(tmp_path),
    ):
        with pytest.raises(CorruptIndex, match=r"CURRENT is missing, but .*000001.log is there"):
            open_index()
    (tmp_path / "CURRENT").write_bytes(kept)
    engine = small(str(tmp_path))
    assert contents(engine) == {"a": 1}
    engine.close()


def test_segments_without_current_and_manifest_are_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    for file in (tmp_path / "CURRENT", tmp_path / read_current(tmp_path).file_name):
        file.unlink()
    [segment] = (tmp_path / "seg").iterdir()
    with pytest.raises(CorruptIndex, match="CURRENT is missing"):
        small(str(tmp_path))
    assert segment.is_dir()


@pytest.mark.parametrize("name", ["raw.f32", "docs.bin", "ids.u64"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_missing_file_of_a_segment_is_named_and_the_rest_can_be_used(
    tmp_path: Path, name: str, read_only: bool
) -> None:
    filled(tmp_path)
    [gone] = (tmp_path / "seg").glob(f"*/{name}")
    gone.unlink()
    with pytest.raises(CorruptIndex, match=str(gone)):
        small(str(tmp_path), read_only=read_only)
    engine = small(str(tmp_path), read_only=read_only, on_corrupt="skip")
    assert contents(engine) == {"e": 10, "f": 11}
    assert str(gone) in engine.damaged[0]
    engine.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_missing_log_is_named_and_the_rest_can_be_used(tmp_path: Path, read_only: bool) -> None:
    wanted = filled(tmp_path)
    [gone] = (tmp_path / "wal").iterdir()
    gone.unlink()
    with pytest.raises(CorruptIndex, match=str(gone)):
        small(str(tmp_path), read_only=read_only)
    with pytest.raises(CorruptIndex, match=str(gone)):
        describe(tmp_path)
    engine = small(str(tmp_path), read_only=read_only, on_corrupt="skip")
    assert contents(engine) == {key: wanted[key] for key in "abcdst"}
    engine.close()


def test_a_log_that_is_missing_between_two_others_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path)
    [log] = (tmp_path / "wal").iterdir()
    log.rename(log.with_name("000004.log"))
    (tmp_path / "wal" / "000002.log").write_bytes((tmp_path / "wal" / "000004.log").read_bytes())
    with pytest.raises(CorruptIndex, match=r"000003\.log: it is missing"):
        small(str(tmp_path))
    assert [finding.file for finding in verify(tmp_path)] == [str(tmp_path / "wal" / "000003.log")]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_log_with_a_damaged_beginning_gives_its_records_where_damage_may_be_skipped(
    tmp_path: Path, read_only: bool
) -> None:
    wanted = filled(tmp_path)
    [log] = (tmp_path / "wal").iterdir()
    flip(log, 0)
    with pytest.raises(CorruptIndex, match=str(log)):
        small(str(tmp_path), read_only=read_only)
    engine = small(str(tmp_path), read_only=read_only, on_corrupt="skip")
    assert contents(engine) == wanted
    engine.close()


def test_a_file_where_an_index_should_be_is_met_with_a_typed_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    folder = tmp_path / "folder"
    (folder / "CURRENT").mkdir(parents=True)
    for path in (file, folder):
        for open_index in (
            lambda path: small(str(path)),
            lambda path: small(str(path), read_only=True),
            describe,
            verify,
        ):
            with pytest.raises(RetrievalError, match=str(path)):
                open_index(path)


def test_sizes_can_be_asked_for_while_logs_come_and_go(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "wal" / "000009.log").symlink_to("gone")  # as a listing shows a log that is removed meanwhile
    engine = small(str(tmp_path))
    assert engine.stats().disk_bytes > 0
    assert describe(tmp_path).num_waiting == 2
    engine.close()


def test_what_a_restored_segment_brings_back_can_be_replaced_and_deleted(tmp_path: Path) -> None:
    filled(tmp_path)
    [damaged] = (tmp_path / "seg").glob("*/ids.u64")
    flip(damaged, 0)
    engine = small(str(tmp_path), flush_rows=1000, on_corrupt="skip")
    engine.put([an_item("a", 90), an_item("b", 91)])
    engine.settle()
    engine.close()
    flip(damaged, 0)
    engine = small(str(tmp_path), flush_rows=1000)
    engine.put([an_item("a", 92)])
    assert engine.delete([an_id("b")]) == 1
    assert sorted(item.value["n"] for item in engine.items(View(((("own",)),)))) == [2, 3, 10, 11, 92]
    engine.close()


# -- readers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "at"), [("raw.f32", 2 * DIM * 4), ("docs.bin", 8)])
def test_what_a_reader_found_damaged_does_not_come_back_with_the_next_state(tmp_path: Path, name: str, at: int) -> None:
    filled(tmp_path)
    [damaged] = (tmp_path / "seg").glob(f"*/{name}")
    flip(damaged, at)
    writer = small(str(tmp_path), flush_rows=1000)
    reader = small(str(tmp_path), flush_rows=1000, read_only=True, on_corrupt="skip")
    found = {hit.item.id.key for hit in reader.search([Query(vector(0), limit=50)])[0]}
    assert len(found) == 7
    writer.put([an_item("g", 20)])
    writer.settle()
    again = {hit.item.id.key for hit in reader.search([Query(vector(0), limit=50)])[0]}
    assert again == {*found, "g"}
    writer.close()
    reader.close()


def test_a_reader_that_gets_another_state_while_it_takes_damage_out_comes_to_an_end(tmp_path: Path) -> None:
    filled(tmp_path)
    [damaged] = (tmp_path / "seg").glob("*/docs.bin")
    flip(damaged, 8)
    reader = small(str(tmp_path), read_only=True, on_corrupt="skip")
    core = reader._core
    assert isinstance(core, IndexReader)

    class AnotherThreadLoads(Damage):
        def met(self, error: CorruptIndex) -> None:
            assert not self.found, "it goes round in circles"
            self.found.append(str(error))
            core._load()

    reader._damage = AnotherThreadLoads("skip")
    assert len(reader.items(View())) == 7
    reader.close()


def test_a_reader_notices_another_index_in_the_place_of_the_one_it_knows(tmp_path: Path) -> None:
    place = tmp_path / "index"
    for name, key in (("one", "a"), ("two", "b")):
        engine = small(str(tmp_path / name), flush_rows=1000)
        engine.put([an_item(key, 1)])
        engine.settle()
        engine.close()
    (tmp_path / "one").rename(place)
    reader = small(str(place), read_only=True)
    assert contents(reader) == {"a": 1}
    place.rename(tmp_path / "old")
    (tmp_path / "two").rename(place)
    assert contents(reader) == {"b": 1}
    reader.close()


def test_a_publication_is_noticed_also_when_file_times_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = small(str(tmp_path), flush_rows=1000)
    reader = small(str(tmp_path), read_only=True)
    real = os.fstat

    def coarse(fd: int) -> os.stat_result:
        found = list(real(fd))
        found[1] = 7
        return os.stat_result(found)

    monkeypatch.setattr("pancake_langgraph.retrieval.index_reader.os.fstat", coarse)
    for number in range(3):
        writer.put([an_item("a", number)])
        writer.settle()
        assert contents(reader) == {"a": number}
        assert reader.stats().delta_vectors == 0
    writer.close()
    reader.close()


# -- closing --------------------------------------------------------------------------------------------------------


def open_files(path: Path) -> list[str]:
    """Return the files below a path that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(str(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("read_only", [False, True])
def test_a_closed_engine_holds_no_files(tmp_path: Path, read_only: bool) -> None:
    filled(tmp_path)
    engine = small(str(tmp_path), read_only=read_only)
    assert len(contents(engine)) == 8
    assert open_files(tmp_path)
    engine.close()
    assert open_files(tmp_path) == []


def test_a_writer_that_cannot_be_opened_holds_no_files(tmp_path: Path) -> None:
    filled(tmp_path)

    class NoRename(Disk):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(RetrievalError, match="Input/output error"):
        small(str(tmp_path), fingerprint="mini", disk=NoRename())
    assert open_files(tmp_path) == []


@pytest.mark.parametrize(
    "late",
    [
        lambda writer: writer.settle(),
        lambda writer: writer.compact(),
        lambda writer: writer.delete([an_id("e")]),
    ],
)
def test_whoever_comes_too_late_touches_no_file_of_the_next_writer(
    tmp_path: Path, late: Callable[[IndexWriter], object]
) -> None:
    wanted = filled(tmp_path)
    engine = small(str(tmp_path), flush_rows=1000)
    writer = engine._core
    assert isinstance(writer, IndexWriter)
    engine.close()
    after = small(str(tmp_path), flush_rows=2)
    after.put([an_item("h", 1), an_item("i", 2), an_item("j", 3)])
    after.put([an_item("k", 4)])
    files = {file: file.read_bytes() for file in (tmp_path / "wal").iterdir()}
    with pytest.raises(RetrievalError, match="closed"):
        late(writer)
    assert {file: file.read_bytes() for file in (tmp_path / "wal").iterdir()} == files
    after.close()
    reader = small(str(tmp_path), read_only=True)
    assert contents(reader) == {**wanted, "h": 1, "i": 2, "j": 3, "k": 4}
    reader.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_search_beside_a_close_finds_everything_or_is_refused(tmp_path: Path, read_only: bool) -> None:
    filled(tmp_path)
    armed, engines = threading.Event(), []

    def clock() -> float:
        if armed.is_set():  # between the look whether it is closed and the look at what it holds
            engines[0].close()
        return 0.0

    engines.append(small(str(tmp_path), read_only=read_only, clock=clock))
    armed.set()
    with pytest.raises(RetrievalError, match="closed"):
        engines[0].search([Query(vector(0))])


# -- broken disks ---------------------------------------------------------------------------------------------------


class Stubborn(Disk):
    """Fails to sync while told to."""

    def __init__(self) -> None:
        self.fails = False

    def sync(self, fd: int) -> None:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        super().sync(fd)


def test_a_log_that_could_not_be_synced_is_not_got_around_by_a_flush(tmp_path: Path) -> None:
    disk = Stubborn()
    engine = small(str(tmp_path), disk=disk, flush_rows=1000)
    engine.put([an_item("a", 1)])
    disk.fails = True
    with pytest.raises(RetrievalError, match="could not be synced"):
        engine.put([an_item("b", 2)])
    disk.fails = False
    with pytest.raises(RetrievalError, match="could not be synced"):
        engine.settle()
    with pytest.raises(RetrievalError, match="could not be synced"):
        engine.put([an_item("c", 3)])
    engine.close()


def test_a_flush_that_is_interrupted_while_it_is_published_leaves_its_files_alone(tmp_path: Path) -> None:
    class Interrupted(Disk):
        armed = False

        def point(self, name: str) -> None:
            if self.armed and name == "publish:done":
                raise KeyboardInterrupt

    disk = Interrupted()
    engine = small(str(tmp_path), disk=disk, flush_rows=1000)
    engine.put([an_item("a", 1)])
    disk.armed = True
    with pytest.raises(KeyboardInterrupt):
        engine.settle()
    disk.armed = False
    with pytest.raises(RetrievalError, match="close the index and open it anew"):
        engine.settle()
    engine.close()
    engine = small(str(tmp_path))
    assert contents(engine) == {"a": 1}
    engine.close()


def test_a_merge_that_ends_in_an_error_of_another_library_is_counted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DiskVectorEngine(tmp_path, dim=DIM, flush_rows=2)
    writer = engine._core
    assert isinstance(writer, IndexWriter)
    real, failed = writer.settle, threading.Event()
    flushed = threading.Event()

    def settle() -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("bad allocation")
        real()
        flushed.set()

    monkeypatch.setattr(writer, "settle", settle)
    keys = iter("abcdefghijklmnopqrstuvwxyz" * 40)
    for number in range(1000):
        engine.put([an_item(next(keys), number)])
        if flushed.wait(0.01):
            break
    assert flushed.is_set()
    assert writer.num_failures == 1
    engine.close()


# -- odd numbers and names ------------------------------------------------------------------------------------------


def odd_vectors(name: str) -> Any:
    """Return 300 vectors that codes have trouble with."""
    drawn = np.random.default_rng(0).standard_normal((300, DIM)).astype(np.float32)
    one_huge = drawn.copy()
    one_huge[7] = 3e38
    return {
        "equal": np.ones_like(drawn),
        "zero": np.zeros_like(drawn),
        "two places": np.repeat(drawn[:2], 150, axis=0),
        "huge": drawn * np.float32(1e25),
        "tiny": drawn * np.float32(1e-15),
        "single": drawn[:1],
        "one huge among usual ones": one_huge,
    }[name]


ODD = ("equal", "zero", "two places", "huge", "tiny", "single", "one huge among usual ones")


@pytest.mark.parametrize("codes", ["pq", "sq8", "rabitq", "hnsw"])
@pytest.mark.parametrize("name", ODD)
def test_odd_vectors_can_be_merged_and_found(tmp_path: Path, name: str, codes: Any) -> None:
    vectors = odd_vectors(name)
    engine = DiskVectorEngine(tmp_path, dim=DIM, merge="manual", codes=codes, coded_rows=1, exact_rows=1)
    engine.put([Item(ItemId(("own",), f"{at:03d}"), {}, (one,)) for at, one in enumerate(vectors)])
    engine.compact()
    query = vectors[0]
    best = np.sort(vectors.astype(np.float64) @ query.astype(np.float64))[::-1][:5]
    found = [hit.score for hit in engine.search([Query(query, limit=5)])[0]]
    np.testing.assert_allclose(found, best, rtol=1e-5)
    engine.close()


@pytest.mark.parametrize("codes", ["pq", "sq8", "rabitq", "hnsw"])
@pytest.mark.parametrize("factor", [1e38, 1e-38])
def test_the_length_of_a_query_does_not_matter(tmp_path: Path, codes: Any, factor: float) -> None:
    drawn = np.random.default_rng(0).standard_normal((2000, DIM)).astype(np.float32)
    engine = DiskVectorEngine(tmp_path, dim=DIM, merge="manual", codes=codes, coded_rows=1, exact_rows=1)
    engine.put([Item(ItemId(("own",), f"{at:04d}"), {}, (one,)) for at, one in enumerate(drawn)])
    engine.compact()
    query = drawn[0] / np.abs(drawn[0]).max()
    usual, odd = engine.search([Query(query), Query(query * np.float32(factor))])
    assert {hit.item.id for hit in odd} == {hit.item.id for hit in usual}
    assert engine.partitions(query * np.float32(factor), 3) == engine.partitions(query, 3)
    engine.close()


@pytest.mark.parametrize("settled", [False, True])
def test_filters_that_look_alike_in_json_are_not_taken_for_each_other(tmp_path: Path, settled: bool) -> None:
    engine = small(str(tmp_path), flush_rows=1000)
    engine.put([an_item("a", 1), an_item("b", 2)])
    if settled:
        engine.settle()

    def found(where: Any) -> int:
        return len(engine.search([Query(vector(0), View(where=where))])[0])

    for where, wanted in (
        ({"n": {"$gte": float("-inf")}}, 2),
        ({"n": {"$gte": float("inf")}}, 0),
        ({"more": float("inf")}, 0),
        ({"more": None}, 2),
        ({"n": 1}, 1),
        ({"n": "1"}, 0),
        ({"n": True}, 0),
        ({"n": {"$in": {1, 2}}}, 2),
        ({"n": {"$in": {"1", "2"}}}, 0),
    ):
        assert found(where) == wanted, where
    for where in (
        {"n": "\ud800"},
        MappingProxyType({"n": np.float64(1.0)}),
        {"n": np.str_("x")},
        {"n": 2**70},
    ):
        assert found(where) == (1 if isinstance(where, MappingProxyType) else 0)
    engine.close()


def test_allow_lists_of_other_things_are_refused_and_odd_ids_in_them_are_not_there(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = small(str(tmp_path))
    strange: Any = frozenset({("own", "a")})
    with pytest.raises(InvalidQuery, match="got a tuple in it"):
        engine.search([Query(vector(0), View(allowed=strange))])
    allowed = frozenset({ItemId(("\ud800",), "a"), an_id("a")})
    [hits] = engine.search([Query(vector(0), View(allowed=allowed))])
    assert [hit.item.id for hit in hits] == [an_id("a")]
    engine.close()


def test_labels_with_control_characters_take_no_place_of_others(tmp_path: Path) -> None:
    engine = small(str(tmp_path), flush_rows=1000)
    near, far = vector(1), -vector(1)
    meant, stranger = ItemId(("a",), "b\x1fc"), ItemId(("a", "b"), "c")
    engine.put([Item(meant, {}, (far,)), Item(stranger, {}, (near,))])
    engine.settle()
    [hits] = engine.search([Query(vector(1), View(allowed=frozenset({meant})), limit=1)])
    assert [hit.item.id for hit in hits] == [meant]
    engine.close()


def test_texts_of_other_libraries_name_items_as_plain_ones_do(tmp_path: Path) -> None:
    engine = small(str(tmp_path))
    engine.put([Item(ItemId((np.str_("own"),), np.str_("a")), {"n": 1}, (vector(1),))])
    [found] = engine.get([ItemId(("own",), "a")])
    assert found is not None
    assert [type(label) for label in (*found.id.namespace, found.id.key)] == [str, str]
    engine.close()
