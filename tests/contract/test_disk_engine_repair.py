"""The way out of a damaged index: what can be read is kept, what cannot is named and put aside."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pancake_langgraph._errors import CorruptIndex, IndexLocked, RetrievalError
from pancake_langgraph.retrieval.base import Query, View
from pancake_langgraph.retrieval.disk_engine import verify
from pancake_langgraph.retrieval.manifest import read_current
from pancake_langgraph.retrieval.repair import Repaired, repair
from tests.contract.index_kit import flip
from tests.index_children import DIM, Contents, an_id, an_item, contents, small, vector

FIRST: Contents = {f"a{number:02d}": number for number in range(12)}
SECOND: Contents = {f"s{number:02d}": 100 + number for number in range(5)}
WAITING: Contents = {"a90": 900, "a91": 901}
ALL: Contents = {**FIRST, **SECOND, **WAITING}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An index of a segment with codes and tombstones, a flat one, and two items in the log."""
    root = tmp_path / "index"
    engine = small(str(root), flush_rows=1000)
    engine.put([an_item(key, number) for key, number in {**FIRST, "gone": 1}.items()])
    engine.compact()
    engine.put([an_item(key, number) for key, number in SECOND.items()])
    engine.delete([an_id("gone")])
    engine.settle()
    for key, number in WAITING.items():
        engine.put([an_item(key, number)])
    engine.close()
    return root


def segment(path: Path, number: int = 0) -> Path:
    """Return the folder of a segment."""
    return path / "seg" / read_current(path).segments[number].name


def check(path: Path, wanted: Contents) -> Repaired:
    """Repair an index and check that it holds what it should and can be written again."""
    done = repair(path)
    assert done.num_items == len(wanted)
    assert verify(path) == []
    engine = small(str(path), flush_rows=1000)
    assert contents(engine) == wanted
    engine.put([an_item("z", 7)])
    engine.compact()
    engine.close()
    reader = small(str(path), read_only=True)
    assert contents(reader) == {**wanted, "z": 7}
    reader.close()
    return done


def test_a_whole_index_is_left_as_it_is(path: Path) -> None:
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "LOCK"}
    assert repair(path) == Repaired(len(ALL), (), None)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "LOCK"}


@pytest.mark.parametrize("name", ["CURRENT", "CLOSED", "MANIFEST"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_nothing_is_lost_with_what_only_describes_the_index(path: Path, name: str, is_gone: bool) -> None:
    file = path / (read_current(path).file_name if name == "MANIFEST" else name)
    if is_gone:
        file.unlink()
    else:
        flip(file, 3)
    if (name, is_gone) != ("CLOSED", True):
        with pytest.raises(CorruptIndex, match=r"pancake index repair"):
            small(str(path))
    done = check(path, ALL)
    assert [line for line in done.lost if "items" in line] == []


def test_damaged_codes_are_made_again(path: Path) -> None:
    damaged = segment(path) / "codes.faiss"
    flip(damaged, 50)
    harmed = damaged.read_bytes()
    done = check(path, ALL)
    assert done.lost == ()
    assert done.kept_in is not None
    assert (done.kept_in / damaged.relative_to(path)).read_bytes() == harmed


@pytest.mark.parametrize("name", ["ids.u64", "docs.u64", "dead"])
def test_a_segment_that_cannot_be_read_is_lost_as_a_whole_and_kept_aside(path: Path, name: str) -> None:
    folder = segment(path)
    flip(next((path / "dead").iterdir()) if name == "dead" else folder / name, 0)
    done = check(path, {**SECOND, **WAITING})
    assert f"{folder}: all of its 12 items" in done.lost
    assert done.kept_in is not None
    assert (done.kept_in / folder.relative_to(path) / "docs.bin").exists()
    assert not folder.exists()


def test_items_that_cannot_be_read_are_named_and_all_others_kept(path: Path) -> None:
    flip(segment(path) / "docs.bin", 30)
    flip(segment(path, 1) / "raw.f32", 2 * DIM * 4 + 5)
    engine = small(str(path), on_corrupt="skip", read_only=True)
    engine.search([Query(vector(1), limit=99)])
    engine.items(View())
    kept = {item.id.key: item.value["n"] for item in engine.items(View())}
    engine.close()
    assert len(kept) == len(ALL) - 2
    [gone] = SECOND.keys() - kept.keys()
    done = check(path, kept)
    assert any(line.endswith("docs.bin: the document at byte 0 is damaged") for line in done.lost)
    assert f"item {gone!r} of shared/x: its vector is damaged" in done.lost


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_what_is_left_of_a_damaged_log_is_kept(path: Path, harm: str) -> None:
    [log] = (path / "wal").glob("*.log")
    if harm == "flip":
        flip(log, 60)
    elif harm == "cut":
        os.truncate(log, log.stat().st_size - 3)
    else:
        log.unlink()
    left = {"flip": {"a91": 901}, "cut": {"a90": 900}, "gone": {}}[harm]
    done = check(path, {**FIRST, **SECOND, **left})
    assert len(done.lost) == 1
    assert str(log) in done.lost[0]
    assert "repair" not in done.lost[0]


def test_where_nothing_says_what_belongs_to_it_the_index_is_left_alone(path: Path) -> None:
    for file in path.glob("MANIFEST-*"):
        flip(file, 5)
    with pytest.raises(CorruptIndex, match="no manifest is whole"):
        repair(path)
    assert not (path / "lost").exists()
    with pytest.raises(RetrievalError, match="there is no index"):
        repair(path.parent / "none")
    (path.parent / "empty").mkdir()
    with pytest.raises(RetrievalError, match="there is no index"):
        repair(path.parent / "empty")
    assert list((path.parent / "empty").iterdir()) == []


def test_an_index_that_somebody_writes_to_is_not_repaired(path: Path) -> None:
    engine = small(str(path))
    with pytest.raises(IndexLocked):
        repair(path)
    engine.close()


def test_a_second_repair_keeps_its_own_copy(path: Path) -> None:
    for number in ("001", "002"):
        shutil.rmtree(segment(path))
        assert repair(path).kept_in == path / "lost" / number
