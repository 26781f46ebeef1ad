"""Threads come over from the files of SqliteSaver, unchanged or not at all."""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command

from pancake_langgraph._errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    StateTypeError,
    StoreUnavailable,
)
from pancake_langgraph.checkpoint.codec import TypeName
from pancake_langgraph.checkpoint.foreign_serde import StrictSerializer
from pancake_langgraph.saver import PancakeSaver
from tests.contract.transfer_bed import (
    CRAFTED,
    Order,
    everything,
    run_talk,
    talk,
    thread,
)


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        run_talk(saver, "t1")
        run_talk(saver, "t2")
    return path


@contextmanager
def old_saver(path: Path) -> Iterator[SqliteSaver]:
    with SqliteSaver.from_conn_string(str(path)) as saver:
        saver.serde = JsonPlusSerializer(allowed_msgpack_modules=None)
        yield saver


def plant(path: Path, kind: str, data: bytes, *, thread_id: str = "t1") -> None:
    """Put a value into the newest pending write of another saver's file."""
    with sqlite3.connect(path) as connection:
        done = connection.execute(
            "UPDATE writes SET type = ?, value = ? WHERE rowid = (SELECT max(rowid) FROM writes WHERE thread_id = ?)",
            (kind, data, thread_id),
        )
        assert done.rowcount == 1
    connection.close()


def test_a_file_of_sqlite_saver_comes_over_whole(saver_factory: Any, old_file: Path) -> None:
    before = old_file.read_bytes()
    saver = saver_factory()
    assert saver.import_from(old_file) == ("t1", "t2")
    with old_saver(old_file) as old:
        for thread_id in ("t1", "t2"):
            found = everything(saver, thread_id)
            assert found == everything(old, thread_id)
            assert len({item.config["configurable"]["checkpoint_ns"] for item in found}) == 2
    assert any(len(item.pending_writes or ()) > 3 for item in everything(saver))
    assert old_file.read_bytes() == before


def test_a_thread_that_came_over_goes_on(saver_factory: Any, old_file: Path) -> None:
    saver = saver_factory()
    saver.import_from(old_file)
    [waiting] = talk(saver).get_state(thread("t1")).interrupts
    assert waiting.value["question"][0] == "really"
    done = talk(saver).invoke(Command(resume="yes"), thread("t1"))
    assert done["seen"][-1] == "yes"
    assert [message.content for message in done["messages"]] == ["hi", "hello"]


def test_numbers_and_paths_of_writes_are_kept(tmp_path: Path, old_file: Path) -> None:
    with PancakeSaver(tmp_path / "new.db") as saver:
        saver.import_from(old_file)
    ours = (
        "SELECT checkpoint_ns, checkpoint_id, task_id, idx, task_path, channel FROM writes JOIN threads USING (thread)"
    )
    theirs = "SELECT checkpoint_ns, checkpoint_id, task_id, idx, task_path, channel FROM writes"
    rows = []
    for path, query in ((tmp_path / "new.db", ours), (old_file, theirs)):
        connection = sqlite3.connect(path)
        rows.append(connection.execute(f"{query} WHERE thread_id = 't1' ORDER BY 1, 2, 3, 4").fetchall())
        connection.close()
    assert rows[0] == rows[1]
    assert any(row[4] for row in rows[0])


def test_a_file_from_before_task_paths_comes_over(tmp_path: Path, old_file: Path) -> None:
    with sqlite3.connect(old_file) as connection:
        connection.execute("ALTER TABLE writes DROP COLUMN task_path")
    connection.close()
    with PancakeSaver(tmp_path / "new.db") as saver:
        assert len(saver.import_from(old_file)) == 2


@pytest.mark.parametrize("code", CRAFTED)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_row_that_names_a_callable_is_refused_and_nothing_is_called(
    tmp_path: Path, old_file: Path, monkeypatch: pytest.MonkeyPatch, code: int, depth: int
) -> None:
    called: list[object] = []
    monkeypatch.setattr(os, "system", lambda *args: called.append(args))
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: called.append(args))
    value: Any = ormsgpack.Ext(code, ormsgpack.packb(CRAFTED[code]))
    for _ in range(depth):
        value = [{"inner": value}]
    plant(old_file, "msgpack", ormsgpack.packb(value))
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises(
            StateTypeError, match=r"(?s)thread 't1' was not imported.*(os\.system|subprocess\.run)"
        ) as caught:
            saver.import_from(old_file)
        assert "--allow " + ":".join(CRAFTED[code][:2]) in str(caught.value)
        assert not list(saver.threads())
        assert saver.import_from(old_file, ["t2"]) == ("t2",)
    assert not called


def test_old_rows_in_json_that_name_a_callable_are_refused(tmp_path: Path, old_file: Path) -> None:
    for value in (
        {"lc": 2, "type": "constructor", "id": ["os", "system"], "args": ["true"]},
        {"lc": 1, "type": "constructor", "id": ["langchain", "prompts", "prompt", "PromptTemplate"], "kwargs": {}},
        {"lc": 2, "type": "constructor", "id": ["os"], "args": []},
    ):
        plant(old_file, "json", json.dumps([value]).encode())
        with PancakeSaver(tmp_path / "new.db") as saver, pytest.raises(CheckpointError, match="t1"):
            saver.import_from(old_file)


def test_old_rows_in_json_with_messages_come_over(tmp_path: Path, old_file: Path) -> None:
    message = {"lc": 2, "type": "constructor", "id": ["langchain_core", "messages", "ai", "AIMessage"]}
    plant(old_file, "json", json.dumps([{**message, "kwargs": {"content": "old", "id": "x"}}]).encode())
    with PancakeSaver(tmp_path / "new.db") as saver:
        saver.import_from(old_file)
        written = [value for item in everything(saver) for _, _, value in item.pending_writes or ()]
    assert [AIMessage("old", id="x")] in written


def test_pickled_and_encrypted_rows_are_refused(tmp_path: Path, old_file: Path) -> None:
    for kind in ("pickle", "msgpack+aes"):
        plant(old_file, kind, b"x")
        with PancakeSaver(tmp_path / "new.db") as saver, pytest.raises(StateTypeError, match=kind.replace("+", r"\+")):
            saver.import_from(old_file)


@pytest.mark.parametrize("data", [b"\xc1", b"", ormsgpack.packb(ormsgpack.Ext(0, b"\xc1"))])
def test_damaged_rows_are_refused(tmp_path: Path, old_file: Path, data: bytes) -> None:
    plant(old_file, "msgpack", data)
    with PancakeSaver(tmp_path / "new.db") as saver, pytest.raises(CorruptCheckpoint):
        saver.import_from(old_file)


def test_what_is_nested_without_end_is_refused_at_once_or_row_by_row() -> None:
    def nested(data: bytes, lists: int) -> bytes:
        head = ormsgpack.packb(["builtins", "tuple", []])[:-1]
        return ormsgpack.packb(ormsgpack.Ext(0, head + b"\x91" * (1 + lists) + data))

    def is_allowed(name: TypeName) -> bool:
        return name == ("builtins", "tuple")

    data, serde = b"\xc0", StrictSerializer(is_allowed)
    for _ in range(18):
        data = nested(data, 8)
        assert isinstance(serde.loads_typed(("msgpack", data)), tuple)
    data = nested(data, 8)
    for each in (serde, StrictSerializer(is_allowed)):
        with pytest.raises(CorruptCheckpoint):
            each.loads_typed(("msgpack", data))
    for _ in range(100):
        data = nested(data, 1000)
    with pytest.raises(CorruptCheckpoint):
        serde.loads_typed(("msgpack", data))


def app_class_file(tmp_path: Path) -> Path:
    path = tmp_path / "orders.sqlite"
    graph = StateGraph(dict)
    graph.add_node("buy", lambda state: {"order": Order("tea", 2)})
    graph.add_edge(START, "buy")
    graph.add_edge("buy", END)
    with SqliteSaver.from_conn_string(str(path)) as old:
        graph.compile(checkpointer=old).invoke({}, thread("t1"))
    return path


def test_a_class_of_the_app_comes_over_once_it_is_allowed(tmp_path: Path) -> None:
    path = app_class_file(tmp_path)
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises(StateTypeError, match="Order"):
            saver.import_from(path)
        assert not list(saver.threads())
    with PancakeSaver(tmp_path / "new.db", allow=[Order]) as saver:
        saver.import_from(path)
        newest = saver.get_tuple(thread("t1"))
        assert newest is not None
        assert newest.checkpoint["channel_values"]["__root__"] == {"order": Order("tea", 2)}


def test_an_object_that_cannot_be_made_any_more_is_refused_and_not_taken_as_raw_data(
    tmp_path: Path, old_file: Path
) -> None:
    plant(old_file, "msgpack", ormsgpack.packb(ormsgpack.Ext(0, ormsgpack.packb(("my_app.gone", "Order", 1)))))
    with (
        PancakeSaver(tmp_path / "new.db", allow=[("my_app.gone", "Order")]) as saver,
        pytest.raises(StateTypeError, match=r"my_app\.gone\.Order cannot be made any more"),
    ):
        saver.import_from(old_file)


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    PancakeSaver(tmp_path / "own.db").setup()
    (tmp_path / "text").write_text("no database")
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises(ConfigError, match="no file of SqliteSaver"):
            saver.import_from(tmp_path / "own.db")
        with pytest.raises(StoreUnavailable, match="cannot be read as SqliteSaver"):
            saver.import_from(tmp_path / "text")
        with pytest.raises(ConfigError, match="there is no file"):
            saver.import_from(tmp_path / "missing")
        with pytest.raises(ConfigError, match="int"):
            saver.import_from(3)  # type: ignore[arg-type]


def test_threads_that_exist_and_threads_that_do_not_are_refused_before_anything_is_stored(
    tmp_path: Path, old_file: Path
) -> None:
    with PancakeSaver(tmp_path / "new.db") as saver:
        run_talk(saver, "t2")
        before = everything(saver, "t2")
        with pytest.raises(ConfigError, match="'t2' exists"):
            saver.import_from(old_file)
        with pytest.raises(ConfigError, match="no thread 't9'"):
            saver.import_from(old_file, ["t9"])
        assert list(saver.threads()) == ["t2"]
        assert everything(saver, "t2") == before
