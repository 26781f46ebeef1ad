"""What an index on disk says about damaged files, other embedders and later versions, and what of it stays usable."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from pancake_langgraph._errors import CorruptIndex, EmbedderMismatch, RetrievalError
from pancake_langgraph.retrieval.base import Item, Query, View
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine, describe, verify
from pancake_langgraph.retrieval.manifest import read_current
from tests.contract.index_kit import flip
from tests.index_children import DIM, Contents, an_id, an_item, contents, small, vector

FIRST: Contents = {f"a{number:02d}": number for number in range(12)}
SECOND: Contents = {f"s{number:02d}": 100 + number for number in range(5)}
WAITING: Contents = {"a90": 900, "a91": 901}
#: Every kind of file of a segment with codes, items that expire, and items with several vectors, and where to hit it.
SEGMENT_FILES = (
    *("namespaces.json", "namespaces.i32", "updated.f64", "ids.u64", "ids.i32", "docs.u64", "sums.u32"),
    *("codes.faiss",),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An index of a segment with codes and tombstones, a flat one, and two items in the log."""
    engine = small(str(tmp_path), flush_rows=1000)
    engine.put([an_item(key, number) for key, number in {**FIRST, "gone": 1}.items()])
    engine.compact()
    engine.put([an_item(key, number) for key, number in SECOND.items()])
    engine.delete([an_id("gone")])
    engine.settle()
    for key, number in WAITING.items():
        engine.put([an_item(key, number)])
    engine.close()
    assert [one.kind for one in read_current(tmp_path).segments] == ["sq8", "flat"]
    assert verify(tmp_path) == []
    return tmp_path


def reader(path: Path, **options: str) -> DiskVectorEngine:
    """Open an index for reading."""
    return small(str(path), read_only=True, **options)


@pytest.mark.parametrize("name", SEGMENT_FILES)
@pytest.mark.parametrize("at", [0, -1])
def test_a_damaged_file_of_a_segment_is_named_and_the_other_segments_can_be_used(
    path: Path, name: str, at: int
) -> None:
    damaged = path / "seg" / read_current(path).segments[0].name / name
    flip(damaged, at)
    with pytest.raises(CorruptIndex, match=str(damaged)):
        reader(path)
    assert [finding.file for finding in verify(path)] == [str(damaged)]
    with pytest.raises(CorruptIndex, match=str(damaged)):
        small(str(path))
    engine = reader(path, on_corrupt="skip")
    assert contents(engine) == {**SECOND, **WAITING}
    assert len(engine.damaged) == 1
    assert str(damaged) in engine.damaged[0]
    engine.close()


def test_a_writer_beside_a_damaged_segment_keeps_it_for_whoever_restores_it(path: Path) -> None:
    damaged = path / "seg" / read_current(path).segments[0].name / "codes.faiss"
    flip(damaged, 50)
    engine = small(str(path), on_corrupt="skip")
    engine.put([an_item("z", 7)])
    engine.compact()
    assert contents(engine) == {**SECOND, **WAITING, "z": 7}
    engine.close()
    flip(damaged, 50)
    engine = small(str(path))
    assert contents(engine) == {**FIRST, **SECOND, **WAITING, "z": 7}
    engine.close()


def test_a_damaged_vector_is_named_and_all_other_items_can_be_used(path: Path) -> None:
    damaged = path / "seg" / read_current(path).segments[0].name / "raw.f32"
    flip(damaged, 2 * DIM * 4 + 5)
    engine = reader(path)
    for _ in range(2):
        with pytest.raises(CorruptIndex, match=f"{damaged}: row 2 is damaged"):
            engine.search([Query(vector(1), limit=3)])
    assert len(engine.search([Query(vector(1), View((("shared",),)), limit=3)])[0]) == 3
    engine.close()
    engine = reader(path, on_corrupt="skip")
    found = {hit.item.id.key for hit in engine.search([Query(vector(1), limit=99)])[0]}
    assert found < {*FIRST, *SECOND, *WAITING}
    assert len(found) == len(FIRST) + len(SECOND) + len(WAITING) - 1
    assert contents(engine).keys() == found
    engine.close()
    assert [str(finding.file) for finding in verify(path)] == [str(damaged)]


def test_a_damaged_document_is_named_and_all_other_items_can_be_used(path: Path) -> None:
    damaged = path / "seg" / read_current(path).segments[0].name / "docs.bin"
    flip(damaged, 30)
    engine = reader(path)
    for call in (
        lambda: engine.items(View()),
        lambda: engine.items(View(where={"n": 1})),
        lambda: engine.search([Query(vector(1), limit=99)]),
    ):
        with pytest.raises(CorruptIndex, match=f"{damaged}: the document at byte 0 is damaged"):
            call()
    engine.close()
    engine = reader(path, on_corrupt="skip")
    [only] = engine.items(View(where={"n": 5}))
    assert only.value["n"] == 5
    assert len(contents(engine)) == len(FIRST) + len(SECOND) + len(WAITING) - 1
    engine.close()


def test_damaged_tombstones_bring_nothing_deleted_back(path: Path) -> None:
    [damaged] = (path / "dead").iterdir()
    flip(damaged, 0)
    with pytest.raises(CorruptIndex, match=str(damaged)):
        reader(path)
    assert [finding.file for finding in verify(path)] == [str(damaged)]
    engine = reader(path, on_corrupt="skip")
    assert contents(engine) == {**SECOND, **WAITING}
    engine.close()


def test_damage_inside_the_log_is_named_and_its_other_records_can_be_used(path: Path) -> None:
    [log] = (path / "wal").iterdir()
    flip(log, 60)
    for opened in (reader, lambda path: small(str(path))):
        with pytest.raises(CorruptIndex, match=f"{log}: the record at byte 8 is damaged"):
            opened(path)
    assert [finding.file for finding in verify(path)] == [str(log)]
    engine = small(str(path), on_corrupt="skip", flush_rows=1000)
    kept = {**FIRST, **SECOND, "a91": 901}
    assert contents(engine) == kept
    engine.put([an_item("z", 7)])
    engine.settle()
    engine.close()
    engine = small(str(path))
    assert contents(engine) == {**kept, "z": 7}
    engine.close()


@pytest.mark.parametrize(("left", "kept"), [(None, 4), (-1, 4), (-300, 3), (-1060, 0), (0, 0)])
def test_a_log_that_lost_its_end_after_a_close_is_named_and_left_as_it_is(
    tmp_path: Path, left: int | None, kept: int
) -> None:
    engine = small(str(tmp_path), flush_rows=1000)
    for number in range(5):
        engine.put([an_item(f"a{number}", number)])
    engine.close()
    [log] = (tmp_path / "wal").iterdir()
    size = log.stat().st_size
    if left is None:
        flip(log, -5)
    else:
        os.truncate(log, size + left if left else 0)
    harmed = log.read_bytes()
    for opened in (reader, lambda path: small(str(path)), describe):
        with pytest.raises(CorruptIndex, match=f"{log}: it is whole up to byte .*, and had {size} when"):
            opened(tmp_path)
    assert [finding.file for finding in verify(tmp_path)] == [str(log)]
    assert log.read_bytes() == harmed
    engine = small(str(tmp_path), on_corrupt="skip")
    assert set(contents(engine)) == {f"a{number}" for number in range(kept)}
    engine.close()
    with pytest.raises(CorruptIndex):
        reader(tmp_path)


def test_what_was_whole_at_a_close_is_still_looked_after_when_a_later_writer_was_killed(tmp_path: Path) -> None:
    engine = small(str(tmp_path / "open"), flush_rows=1000)
    engine.put([an_item("a", 1)])
    engine.close()
    engine = small(str(tmp_path / "open"), flush_rows=1000)
    engine.put([an_item("b", 2)])
    shutil.copytree(tmp_path / "open", tmp_path / "killed")
    engine.close()
    [log] = (tmp_path / "killed" / "wal").iterdir()
    os.truncate(log, log.stat().st_size - 1)
    engine = small(str(tmp_path / "killed"), flush_rows=1000)
    assert contents(engine) == {"a": 1}
    engine.close()
    os.truncate(log, 50)
    with pytest.raises(CorruptIndex, match=str(log)):
        small(str(tmp_path / "killed"))


def test_a_damaged_note_of_the_close_is_named(path: Path) -> None:
    flip(path / "CLOSED", 1)
    with pytest.raises(CorruptIndex, match="CLOSED: its checksum"):
        reader(path)
    assert [finding.file for finding in verify(path)] == [str(path / "CLOSED")]
    engine = small(str(path), on_corrupt="skip", flush_rows=1000)
    assert contents(engine) == {**FIRST, **SECOND, **WAITING}
    engine.close()
    assert verify(path) == []


@pytest.mark.parametrize("at", [0, 12, -2])
def test_a_damaged_manifest_is_named(path: Path, at: int) -> None:
    damaged = path / read_current(path).file_name
    flip(damaged, at)
    with pytest.raises(CorruptIndex, match=str(damaged)):
        reader(path)
    assert [finding.file for finding in verify(path)] == [str(damaged)]


def test_a_damaged_current_is_named_and_the_manifest_can_be_found_without_it(path: Path) -> None:
    flip(path / "CURRENT", 3)
    with pytest.raises(CorruptIndex, match="CURRENT"):
        reader(path)
    engine = reader(path, on_corrupt="skip")
    assert contents(engine) == {**FIRST, **SECOND, **WAITING}
    engine.close()
    (path / "CURRENT").unlink()
    with pytest.raises(CorruptIndex, match="CURRENT is missing"):
        small(str(path))


@pytest.mark.parametrize("remove", ["seg/000002/docs.bin", "seg/000002", "dead", "wal"])
def test_what_is_missing_is_named(path: Path, remove: str) -> None:
    gone = path / remove
    files = [gone] if gone.is_file() else list(gone.iterdir())
    for file in files:
        file.unlink()
    with pytest.raises(CorruptIndex, match=str(gone)):
        reader(path)
    assert {finding.file for finding in verify(path)} == {str(file) for file in files}


# -- whose index it is ----------------------------------------------------------------------------------------------


def test_another_length_or_fingerprint_is_refused_with_both_sizes_and_names(tmp_path: Path) -> None:
    small(str(tmp_path), fingerprint="mini-1").close()
    for read_only in (False, True):
        with pytest.raises(EmbedderMismatch, match=r"of 9 numbers.* of 8"):
            small(str(tmp_path), dim=9, read_only=read_only)
        with pytest.raises(EmbedderMismatch, match=r"mini-2.*mini-1"):
            small(str(tmp_path), fingerprint="mini-2", read_only=read_only)
    engine = small(str(tmp_path), dim=None)
    assert (engine.dim, engine.fingerprint) == (DIM, "mini-1")
    engine.close()


def test_an_index_without_a_fingerprint_takes_the_first_one_over(tmp_path: Path) -> None:
    small(str(tmp_path)).close()
    small(str(tmp_path), fingerprint="mini-1").close()
    with pytest.raises(EmbedderMismatch):
        small(str(tmp_path), fingerprint="mini-2")
    assert describe(tmp_path).fingerprint == "mini-1"


def an_item_without_vectors(key: str, number: int) -> Item:
    """Return what a store without an embedder writes."""
    return replace(an_item(key, number), vectors=())


@pytest.mark.parametrize("is_settled", [False, True])
def test_vectors_may_come_to_an_index_that_never_had_any(tmp_path: Path, is_settled: bool) -> None:
    engine = small(str(tmp_path), dim=1, flush_rows=1000)
    engine.put([an_item_without_vectors("a", 1)])
    if is_settled:
        engine.settle()
    reader = small(str(tmp_path), dim=DIM, read_only=True, fingerprint="mini-1")
    other = small(str(tmp_path), dim=DIM + 1, read_only=True)
    assert reader.search([Query(vector(1))]) == [[]]
    assert other.dim == DIM + 1
    engine.close()
    engine = small(str(tmp_path), fingerprint="mini-1", flush_rows=1000)
    engine.put([an_item("b", 2)])
    for one in (engine, reader):
        assert [item.id.key for item in one.items(View())] == ["b", "a"]
        assert [hit.item.id.key for hit in one.search([Query(vector(2))])[0]] == ["b"]
        assert (one.dim, one.fingerprint) == (DIM, "mini-1")
    with pytest.raises(EmbedderMismatch, match=f"of {DIM + 1} numbers"):
        other.items(View())
    engine.compact()
    assert [hit.item.id.key for hit in reader.search([Query(vector(2))])[0]] == ["b"]
    for one in (engine, reader, other):
        one.close()
    for options in ({"dim": DIM + 1}, {"fingerprint": "mini-2"}):
        with pytest.raises(EmbedderMismatch):
            small(str(tmp_path), **options)
    assert verify(tmp_path) == []


def test_an_index_that_has_vectors_keeps_their_length(tmp_path: Path) -> None:
    engine = small(str(tmp_path), flush_rows=1000)
    engine.put([an_item("a", 1)])
    engine.delete([an_id("a")])
    engine.close()
    for read_only in (False, True):
        with pytest.raises(EmbedderMismatch, match=r"of 9 numbers.* of 8"):
            small(str(tmp_path), dim=9, read_only=read_only)


def test_what_is_no_folder_for_an_index_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RetrievalError, match="an index is a folder, and this is a file"):
        small(str(tmp_path / "file"))
    with pytest.raises(RetrievalError, match=r"the folder is not empty \(it has 'file'\)"):
        small(str(tmp_path))
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    (tmp_path / "file").rename(tmp_path / ".hidden")
    small(str(tmp_path)).close()
    (tmp_path / "mine").write_text("mine")
    small(str(tmp_path)).close()


def change_format(path: Path) -> str:
    """Make the manifest one of a later format, with a checksum that fits."""
    file = path / read_current(path).file_name
    body = json.loads(file.read_bytes().rpartition(b"\n}")[0] + b"\n}")
    text = json.dumps({**body, "format": 7, "more": "things"}).encode()
    file.write_bytes(text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n")
    return "format 7"


def change_log(path: Path) -> str:
    """Make the log one of a later format."""
    [log] = (path / "wal").iterdir()
    data = bytearray(log.read_bytes())
    data[7] = 9
    log.write_bytes(data)
    return "format 9"


@pytest.mark.parametrize("change", [change_format, change_log])
def test_an_index_of_a_later_version_is_left_alone(path: Path, change: Callable[[Path], str]) -> None:
    said = change(path)
    for on_corrupt in ("raise", "skip"):
        for read_only in (False, True):
            with pytest.raises(RetrievalError, match=said) as caught:
                small(str(path), on_corrupt=on_corrupt, read_only=read_only)
            assert not isinstance(caught.value, CorruptIndex)


def test_where_there_is_no_index_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="there is no index"):
        small(str(tmp_path / "none"), read_only=True)
    with pytest.raises(RetrievalError, match="needs `dim`"):
        small(str(tmp_path), dim=None)
    for look in (verify, describe):
        with pytest.raises(RetrievalError, match="there is no index"):
            look(tmp_path / "none")


def test_an_index_is_described(path: Path) -> None:
    found = describe(path)
    everything = len(FIRST) + len(SECOND) + len(WAITING)
    assert (found.dim, found.num_items, found.num_waiting) == (DIM, everything, len(WAITING))
    engine = small(str(path), flush_rows=1000)
    for _ in range(3):
        engine.put([an_item("a90", 900), an_item("a00", 0)])
    engine.close()
    found = describe(path)
    assert (found.num_items, found.num_waiting) == (everything, len(WAITING) + 1)
    assert [(one.kind, one.num_items, one.num_dead) for one in found.segments] == [("sq8", 13, 2), ("flat", 5, 0)]
    assert found.num_bytes > sum(one.num_bytes for one in found.segments) > 0
