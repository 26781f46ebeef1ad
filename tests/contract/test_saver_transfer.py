"""Threads move out to a file and in again, unchanged or not at all."""

import base64
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from pancake_langgraph._errors import (
    ConfigError,
    CorruptCheckpoint,
    PancakeError,
    SchemaMismatch,
    StateTypeError,
)
from pancake_langgraph.checkpoint.transfer import digest_of
from pancake_langgraph.saver import PancakeSaver
from tests.contract.transfer_bed import (
    KEY,
    OTHER_KEY,
    Order,
    everything,
    noted,
    run_talk,
    talk,
    thread,
)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An export of `t1` (a talk) and `t2` (incremental channels, pruned; a list of three levels)."""
    with PancakeSaver(tmp_path / "source.db", keys=[OTHER_KEY]) as saver:
        run_talk(saver, "t1")
        for turn in range(3):
            long = [f"{turn} {number} {'x' * 100}" for number in range(600)]
            noted(saver).invoke({"notes": [f"in {turn}"], "long": long}, thread("t2"))
        saver.prune(["t2"])
        assert saver.export_threads(tmp_path / "threads.jsonl") == ("t1", "t2")
    return tmp_path / "threads.jsonl"


@contextmanager
def source(tmp_path: Path) -> Iterator[PancakeSaver]:
    with PancakeSaver(tmp_path / "source.db", keys=[OTHER_KEY]) as saver:
        yield saver


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["plain", "encrypted"])
def test_an_export_comes_back_equal_in_another_store_with_other_keys(
    saver_factory: Any, tmp_path: Path, export: Path, keys: tuple[bytes, ...]
) -> None:
    saver = saver_factory(keys=keys)
    assert saver.import_threads(export) == ("t1", "t2")
    with source(tmp_path) as old:
        for thread_id in ("t1", "t2"):
            assert everything(saver, thread_id) == everything(old, thread_id)
        assert noted(saver).get_state(thread("t2")).values == noted(old).get_state(thread("t2")).values
        assert saver.sizes("t2").keys() == old.sizes("t2").keys()
    assert noted(saver).get_state(thread("t2")).values["notes"][-1] == "note 5"
    assert talk(saver).invoke(Command(resume="yes"), thread("t1"))["seen"][-1] == "yes"
    saver.prune(["t1", "t2"])
    assert len(noted(saver).get_state(thread("t2")).values["long"]) == 1800


def test_an_export_depends_on_content_only_and_needs_no_classes(tmp_path: Path) -> None:
    old = PancakeSaver(tmp_path / "a.db", allow=[Order], keys=[KEY])
    graph = StateGraph(dict)
    graph.add_node("buy", lambda state: {"order": Order("tea", 2)})
    graph.add_edge(START, "buy")
    graph.compile(checkpointer=old).invoke({}, thread("t1"))
    old.close()
    with (
        PancakeSaver(tmp_path / "a.db", keys=[KEY]) as blind,
        PancakeSaver(tmp_path / "b.db", keys=[OTHER_KEY]) as other,
    ):
        blind.export_threads(tmp_path / "a.jsonl")
        other.import_threads(tmp_path / "a.jsonl")
        other.export_threads(tmp_path / "b.jsonl")
        with pytest.raises(StateTypeError, match="Order"):
            other.get_tuple(thread("t1"))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_parts_are_stored_under_hashes_of_the_new_key(tmp_path: Path, export: Path) -> None:
    hashes = []
    for name, keys in (("plain.db", []), ("keyed.db", [KEY]), ("again.db", [KEY])):
        with PancakeSaver(tmp_path / name, keys=keys) as saver:
            saver.import_threads(export)
        connection = sqlite3.connect(tmp_path / name)
        hashes.append({digest for (digest,) in connection.execute("SELECT hash FROM elements")})
        connection.close()
    assert hashes[0]
    assert not hashes[0] & hashes[1]
    assert hashes[1] == hashes[2]


def test_an_export_is_private_and_not_overwritten_by_accident(tmp_path: Path, export: Path) -> None:
    assert stat.S_IMODE(export.stat().st_mode) == 0o600
    head = json.loads(export.read_text().splitlines()[0])
    assert head == {"format": "pancake-threads", "version": 1, "encrypted": False}
    before = export.read_bytes()
    with source(tmp_path) as saver:
        with pytest.raises(ConfigError, match="exists"):
            saver.export_threads(export)
        with pytest.raises(ConfigError, match="no thread 'nope'"):
            saver.export_threads(export, ["t1", "nope"], overwrite=True)
        assert export.read_bytes() == before
        assert saver.export_threads(export, ["t1"], overwrite=True) == ("t1",)
    assert len(export.read_text().splitlines()) == 3
    assert not list(tmp_path.glob(".*new"))


def test_threads_are_taken_by_name(tmp_path: Path, export: Path) -> None:
    with PancakeSaver(tmp_path / "new.db") as saver:
        assert saver.import_threads(export, ["t2"]) == ("t2",)
        with pytest.raises(ConfigError, match="'t2' exists"):
            saver.import_threads(export)
        with pytest.raises(ConfigError, match="no thread 'nope'"):
            saver.import_threads(export, ["t1", "nope"])
        assert list(saver.threads()) == ["t2"]


def lines_of(export: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in export.read_text().splitlines()]


def other_content(lines: list[dict[str, Any]]) -> None:
    content = bytearray(base64.b64decode(lines[2]["content"]))
    content[len(content) // 2] ^= 1
    lines[2]["content"] = base64.b64encode(bytes(content)).decode()


def own_digest(lines: list[dict[str, Any]], content: bytes) -> None:
    """Put content in place whose digest fits: what somebody does who knows the format."""
    lines[2].update(content=base64.b64encode(content).decode(), digest=digest_of("t2", content))


TAMPERED: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "one bit": other_content,
    "another id": lambda lines: lines[2].update(thread_id="t3"),
    "ids swapped": lambda lines: (lines[1].update(thread_id="t2"), lines[2].update(thread_id="t1")),
    "no digest": lambda lines: lines[2].pop("digest"),
    "no content": lambda lines: lines[2].pop("content"),
    "cut short": lambda lines: lines.pop(),
    "a thread gone": lambda lines: lines.pop(1),
    "a thread twice": lambda lines: lines.insert(2, lines[1]),
    "more after the end": lambda lines: lines.append(lines[1]),
    "garbage with its digest": lambda lines: own_digest(lines, b"garbage"),
    "other shapes with their digest": lambda lines: own_digest(lines, ormsgpack.packb([1, [[1]], [], []])),
    "parts gone with their digest": lambda lines: own_digest(
        lines, ormsgpack.packb([*ormsgpack.unpackb(base64.b64decode(lines[2]["content"]))[:3], []])
    ),
}


@pytest.mark.parametrize("change", TAMPERED)
def test_a_tampered_export_is_refused_whole(tmp_path: Path, export: Path, change: str) -> None:
    lines = lines_of(export)
    TAMPERED[change](lines)
    if "with" in change:
        lines = [*lines[:1], lines[2]]  # the end is refused last, so the thread itself has to be found out
    export.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises(CorruptCheckpoint):
            saver.import_threads(export)
        assert not list(saver.threads())


@pytest.mark.parametrize("text", ["", "hello\n", "[1]\n", '{"format": "pancake-threads", "version": 2}\n'])
def test_other_files_and_later_versions_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other").write_text(text)
    with PancakeSaver(tmp_path / "new.db") as saver, pytest.raises(SchemaMismatch):
        saver.import_threads(tmp_path / "other")


def test_a_crafted_export_that_names_a_callable_is_refused_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    monkeypatch.setattr(os, "system", called.append)
    with PancakeSaver(tmp_path / "a.db", allow=[Order]) as saver:
        graph = StateGraph(dict)
        graph.add_node("buy", lambda state: {"order": Order("tea", 2)})
        graph.add_edge(START, "buy")
        graph.compile(checkpointer=saver).invoke({}, thread("t1"))
        saver.export_threads(tmp_path / "a.jsonl")
    lines = lines_of(tmp_path / "a.jsonl")
    content = base64.b64decode(lines[1]["content"])
    module, name = Order.__module__.encode(), b"Order"
    assert module in content
    content = content.replace(name, b"Other")
    lines[1].update(content=base64.b64encode(content).decode(), digest=digest_of("t1", content))
    end = PancakeSaver(tmp_path / "b.db")
    lines.pop()
    export_end(lines)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with end as saver:
        saver.import_threads(tmp_path / "a.jsonl")
        with pytest.raises(PancakeError):
            saver.get_tuple(thread("t1"))
    assert not called


def export_end(lines: list[dict[str, Any]]) -> None:
    from pancake_langgraph.checkpoint.transfer import _digest_of_all

    digests = [line["digest"] for line in lines[1:]]
    lines.append({"end": True, "threads": len(digests), "digest": _digest_of_all(digests)})
