"""What the saver does when something is wrong: with stored bytes, keys, the file, or what is to be stored."""

import json
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ormsgpack
import pytest
from blockbuster import blockbuster_ctx
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import CheckpointTuple, empty_checkpoint
from langgraph.graph import START, StateGraph
from langgraph.types import Command
from pydantic import BaseModel

from pancake_langgraph._errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    SchemaMismatch,
    StateTypeError,
    StoreUnavailable,
)
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.elements import Ref, RefKind
from pancake_langgraph.checkpoint.record import Record, place_of_row
from pancake_langgraph.checkpoint.rows import CheckpointRow, Spot
from pancake_langgraph.checkpoint.seal import Seal
from pancake_langgraph.saver import PancakeSaver
from tests.contract.saver_kit import (
    MODES,
    REDIS,
    SHARED,
    SQLITE,
    Chat,
    call,
    chat_graph,
    load_children,
    run_chat,
    start,
    thread,
)

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SEALS = pytest.mark.parametrize("keys", [[], [KEY]], ids=["plain", "encrypted"])


@pytest.fixture(scope="module")
def children() -> ModuleType:
    return load_children()


# -- damaged bytes --------------------------------------------------------------------------------------------------


class Database:
    """A second connection to a saver's file, that changes things behind its back."""

    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA synchronous=OFF")

    def cells(self, table: str, *columns: str) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield table, column, how to find the row, and its value."""
        (names,) = zip(*((c[1],) for c in self.connection.execute(f"PRAGMA table_info({table})") if c[5]), strict=True)
        for column in columns:
            for *key, value in self.connection.execute(f"SELECT {', '.join(names)}, {column} FROM {table}").fetchall():
                yield table, column, dict(zip(names, key, strict=True)), value

    def write(self, table: str, column: str, key: dict[str, Any], old: Any, new: Any) -> None:
        where = {**key, column: old}
        tests = " AND ".join(f"{name} IS ?" for name in where)
        changed = self.connection.execute(f"UPDATE {table} SET {column} = ? WHERE {tests}", (new, *where.values()))
        assert changed.rowcount == 1


@pytest.fixture
def database(saver_factory: Any) -> Iterator[Database]:
    saver_factory().setup()
    found = Database(saver_factory.where)
    yield found
    found.connection.close()


def unchanged_or_corrupt(saver: PancakeSaver, expected: list[CheckpointTuple]) -> bool:
    """Say whether reading refuses; where it does not, it has to give what was stored."""
    try:
        found = [*saver.list(thread()), saver.get_tuple(thread())]
    except CorruptCheckpoint:
        return True
    except SchemaMismatch:  # a server's row whose format number was hit
        assert "redis" in type(saver._core.store).__module__
        return True
    assert found == [*expected, expected[0]]
    return False


@SQLITE
@SEALS
def test_a_flipped_byte_is_found(saver_factory: Any, database: Database, keys: list[bytes]) -> None:
    saver = saver_factory(keys=keys)
    expected = run_chat(saver)
    cells = [
        *database.cells("checkpoints", "body"),
        *database.cells("writes", "body"),
        *database.cells("elements", "data"),
    ]
    assert len(cells) > 20
    for number, (table, column, key, value) in enumerate(cells):
        assert not unchanged_or_corrupt(saver, expected)
        for at in range(number % 10, len(value), 10):
            damaged = value[:at] + bytes([value[at] ^ (1 << at % 8)]) + value[at + 1 :]
            database.write(table, column, key, value, damaged)
            unchanged_or_corrupt(saver, expected)
            database.write(table, column, key, damaged, value)
    for table, column, key, value in cells:
        for damaged in (b"", value[:-1], value + b"\x00", value[:5]):
            database.write(table, column, key, value, damaged)
            unchanged_or_corrupt(saver, expected)
            database.write(table, column, key, damaged, value)


@SQLITE
@SEALS
def test_a_row_under_another_name_is_found(saver_factory: Any, database: Database, keys: list[bytes]) -> None:
    saver = saver_factory(keys=keys)
    expected = run_chat(saver)
    cells = [
        *database.cells("checkpoints", "checkpoint_ns", "checkpoint_id", "parent_id"),
        *database.cells("writes", "task_path", "task_id", "channel"),
    ]
    for table, column, key, value in cells:
        new = f"{value or ''}x"
        database.write(table, column, key, value, new)
        assert unchanged_or_corrupt(saver, expected), (table, column)
        database.write(table, column, {**key, **({column: new} if column in key else {})}, new, value)
    for table, _, key, value in database.cells("writes", "idx"):
        database.write(table, "idx", key, value, value + 100)
        assert unchanged_or_corrupt(saver, expected)
        database.write(table, "idx", {**key, "idx": value + 100}, value + 100, value)
    assert not unchanged_or_corrupt(saver, expected)


@SQLITE
@SEALS
def test_a_part_that_is_gone_is_reported_as_lost(saver_factory: Any, database: Database, keys: list[bytes]) -> None:
    saver = saver_factory(keys=keys)
    expected = run_chat(saver)
    for digest, data in database.connection.execute("SELECT hash, data FROM elements").fetchall():
        database.connection.execute("DELETE FROM elements WHERE hash = ?", (digest,))
        assert unchanged_or_corrupt(saver, expected)
        database.connection.execute("INSERT INTO elements VALUES (1, ?, ?)", (digest, data))
    assert not unchanged_or_corrupt(saver, expected)


@REDIS
@SEALS
def test_a_flipped_byte_is_found_in_a_server(saver_factory: Any, valkey: Any, keys: list[bytes]) -> None:
    saver = saver_factory(keys=keys)
    expected = run_chat(saver)
    num_refused = num_flips = 0
    with valkey.client() as client:
        for key in (b"pancake:{t}:c", b"pancake:{t}:w", b"pancake:{t}:e"):
            for number, (field, value) in enumerate(client.hgetall(key).items()):
                for at in range(number % 10, len(value), 10):
                    client.hset(key, field, value[:at] + bytes([value[at] ^ (1 << at % 8)]) + value[at + 1 :])
                    num_refused += unchanged_or_corrupt(saver, expected)
                    num_flips += 1
                client.hset(key, field, value)
    assert not unchanged_or_corrupt(saver, expected)
    assert num_refused > 0.9 * num_flips


@SQLITE
@SEALS
def test_rows_that_changed_threads_are_refused(saver_factory: Any, database: Database, keys: list[bytes]) -> None:
    saver = saver_factory(keys=keys)
    run_chat(saver, "t")
    run_chat(saver, "u")
    for table in ("checkpoints", "writes", "elements"):
        database.connection.execute(f"UPDATE {table} SET thread = -thread")
        database.connection.execute(f"UPDATE {table} SET thread = thread + 3")
    for name in ("t", "u"):
        with pytest.raises(CorruptCheckpoint):
            saver.get_tuple(thread(name))


# -- keys -----------------------------------------------------------------------------------------------------------


@SHARED
def test_keys_are_turned_over_one_after_the_other(saver_factory: Any) -> None:
    old = saver_factory(keys=[OTHER_KEY])
    expected = run_chat(old)
    both = saver_factory(keys=[KEY, OTHER_KEY])
    assert list(both.list(thread())) == expected
    graph = chat_graph(both)
    graph.invoke(Command(resume="yes"), thread())
    assert graph.get_state(thread()).values["extra"] == "yes"
    both.copy_thread("t", "copy")
    new = saver_factory(keys=[KEY])
    for saver, name in ((new, "t"), (old, "t"), (old, "copy"), (saver_factory(keys=[b"x" * 32]), "copy")):
        with pytest.raises(CorruptCheckpoint, match=r"encrypted with key [0-9a-f]{8}"):
            saver.get_tuple(thread(name))
    assert chat_graph(new).get_state(thread("copy")).values == graph.get_state(thread()).values


@SHARED
def test_plain_rows_are_refused_where_keys_are_given_and_sealed_ones_where_none_are(saver_factory: Any) -> None:
    run_chat(saver_factory(), "plain")
    run_chat(saver_factory(keys=[KEY]), "sealed")
    with pytest.raises(CorruptCheckpoint, match="stored in plain although encryption is on"):
        saver_factory(keys=[KEY]).get_tuple(thread("plain"))
    with pytest.raises(CorruptCheckpoint, match="encrypted with key"):
        saver_factory().get_tuple(thread("sealed"))


@SQLITE
def test_an_encrypted_file_tells_nothing_of_the_state(saver_factory: Any) -> None:
    saver = saver_factory(keys=[KEY])
    graph = chat_graph(saver)
    secret = "a secret that nobody may read"
    graph.invoke(
        {"messages": [HumanMessage(secret)], "items": [secret], "extra": {secret: 1}},
        {**thread(), "metadata": {"why": secret}},
    )
    assert graph.get_state(thread()).metadata["why"] == secret
    saver.close()
    for path in Path(saver_factory.where).parent.glob("saver.db*"):
        assert secret.encode() not in path.read_bytes()


@pytest.mark.parametrize("key", [b"short", b"", "k" * 32, b"k" * 33])
def test_a_key_of_another_length_is_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        PancakeSaver(keys=[key])


# -- files that are not ours, or cannot be used ---------------------------------------------------------------------


def refused(where: Path | str, error: type[CheckpointError], match: str) -> None:
    saver = PancakeSaver(where)
    for attempt in (saver.setup, lambda: saver.get_tuple(thread()), lambda: run_chat(saver)):
        with pytest.raises(error, match=match):
            attempt()
    saver.close()


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    foreign = sqlite3.connect(tmp_path / "foreign.db")
    foreign.execute("CREATE TABLE checkpoints (thread_id TEXT)")
    foreign.commit()
    foreign.close()
    (tmp_path / "text.db").write_text("This is no database. " * 100)
    refused(tmp_path / "foreign.db", SchemaMismatch, "another program")
    refused(tmp_path / "text.db", SchemaMismatch, "not a SQLite database")
    assert (tmp_path / "text.db").read_text() == "This is no database. " * 100


@SQLITE
def test_a_later_schema_is_refused(saver_factory: Any, database: Database) -> None:
    saver = saver_factory()
    run_chat(saver)
    saver.close()
    database.connection.execute("PRAGMA user_version=99")
    refused(saver_factory.where, SchemaMismatch, "schema version 99")


@REDIS
def test_a_later_format_in_a_server_is_refused(saver_factory: Any, valkey: Any) -> None:
    with valkey.client() as client:
        client.set("pancake:format", "99")
    refused(saver_factory.where, SchemaMismatch, "99")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for where in (tmp_path / "file" / "app.db", tmp_path / "folder", tmp_path / "missing" / "app.db"):
        refused(where, StoreUnavailable, "has to exist and to be writable")


def test_an_address_of_no_known_kind_is_refused() -> None:
    for where in ("postgres://localhost/db", ""):
        with pytest.raises(ConfigError, match=r"allowed are a file, ':memory:', or a URL"):
            PancakeSaver(where)


def test_a_server_that_is_not_there_is_reported_by_every_call(tmp_path: Path) -> None:
    refused(f"unix://{tmp_path}/nobody", StoreUnavailable, "start the server")


@SQLITE
@MODES
@pytest.mark.parametrize("trouble", ["full", "readonly"])
async def test_a_file_that_takes_no_more_leaves_the_thread_resumable(
    saver_factory: Any, mode: str, trouble: str
) -> None:
    saver = saver_factory()
    run_chat(saver)
    graph = chat_graph(saver)
    before = graph.get_state(thread())
    connection = saver._core.store._link._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count={pages}" if trouble == "full" else "PRAGMA query_only=1")
    large = {"messages": [HumanMessage("x" * 100_000)], "items": [], "extra": None}
    with pytest.raises(StoreUnavailable, match="free some space" if trouble == "full" else "writable"):
        await call(graph, mode, large)
    assert graph.get_state(thread()) == before
    connection.execute("PRAGMA max_page_count=1000000" if trouble == "full" else "PRAGMA query_only=0")
    assert (await call(graph, mode, Command(resume="yes")))["extra"] == "yes"


# -- values that may not be stored, or come back --------------------------------------------------------------------


class Known(BaseModel):
    number: int


class Unknown(BaseModel):
    number: int


UNSTORABLE: dict[str, tuple[Any, str]] = {
    "lock": (threading.Lock(), "lock cannot be stored"),
    "module": (json, "module cannot be stored"),
    "function": (json.loads, "function cannot be stored"),
    "file": (sys.stderr, "cannot be stored"),
    "generator": ((n for n in ""), "generator cannot be stored"),
    "class": (Known, "cannot be stored"),
    "app class": (Unknown(number=1), r"allow=\[Unknown\]"),
}


@MODES
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("name", UNSTORABLE)
async def test_what_cannot_be_stored_stops_the_step(saver_factory: Any, name: str, mode: str, durability: str) -> None:
    value, match = UNSTORABLE[name]
    saver = saver_factory(allow=[Known])
    builder = StateGraph(Chat).add_node("good", lambda state: {"extra": Known(number=1)})
    builder.add_node("bad", lambda state: {"extra": {"deep": [value]}}).add_edge(START, "good").add_edge("good", "bad")
    graph = builder.compile(checkpointer=saver)
    with pytest.raises(StateTypeError, match=f"channel 'extra'.*{match}"):
        await call(graph, mode, {"messages": [], "items": [], "extra": None}, durability=durability)
    found = list(saver.list(thread()))
    assert [each.checkpoint["channel_values"].get("extra") for each in found] in (
        [] if durability == "exit" else [Known(number=1), None, None],
        [],
    )
    assert all(each.pending_writes is None or "deep" not in str(each.pending_writes) for each in found)


@SHARED
def test_an_app_class_comes_back_only_where_it_is_allowed(saver_factory: Any) -> None:
    builder = StateGraph(Chat).add_node("n", lambda state: {"extra": [Known(number=1)]}).add_edge(START, "n")
    graph: Any = builder.compile(checkpointer=saver_factory(allow=[Known]))
    graph.invoke({"messages": []}, thread())
    found = saver_factory(allow=[Unknown, Known]).get_tuple(thread())
    assert found.checkpoint["channel_values"]["extra"] == [Known(number=1)]
    with pytest.raises(StateTypeError, match=r"channel 'extra'.*Known.*allow=\[Known\]"):
        saver_factory(allow=[Unknown]).get_tuple(thread())


def crafted(marker: str) -> Iterator[bytes]:
    """Yield encodings that name something to import and call, in every code and in LangGraph's own forms."""
    shapes: list[Any] = [
        ("os", "system", (marker,)),
        ("os", "system", marker),
        ("os", "system", [marker], {}),
        ("os", "system", [], {"command": marker}),
        ("os", "system", (marker,), {}, "__call__"),
        ("evil_marker", "Thing", {"a": 1}),
        ("evil_marker", "Thing", [1], {}, "build"),
        ("langchain_core.messages", "os.system", [marker]),
        ("langgraph.types", "Send.__init__.__globals__", [marker]),
        ("langgraph.types", "Command", [marker, "evil_marker", 1, 2]),
        {"lc": 2, "type": "constructor", "id": ["os", "system"], "args": [marker]},
        {"lc": 1, "type": "constructor", "id": ["langchain", "evil_marker"], "kwargs": {}},
    ]
    for code in range(128):
        for shape in shapes:
            yield ormsgpack.packb(ormsgpack.Ext(code, ormsgpack.packb(shape)))
    yield b"\x80\x04cos\nsystem\n(S'true'\ntR."
    yield json.dumps(shapes[-1]).encode()


@SQLITE
def test_rows_that_name_something_to_call_are_refused(
    saver_factory: Any, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "system", lambda *arguments, **named: calls.append(arguments))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil_marker.py").write_text("class Thing:\n    pass\n")
    saver, codec = saver_factory(), Codec.build()
    checkpoint = empty_checkpoint()
    config = saver.put(thread(checkpoint_ns=""), checkpoint, {}, {})
    row = CheckpointRow(Spot("", checkpoint["id"]), None, "", b"")
    fields = codec.encode({k: v for k, v in checkpoint.items() if k != "channel_values"}, channel="c")
    [(table, column, key, value)] = database.cells("checkpoints", "body")
    num_refused = 0
    for payload in crafted("true"):
        for values, body in (({"x": Ref(RefKind.INLINE, payload)}, fields), ({}, payload)):
            forged = Seal().seal(Record(body, values, codec.encode({}, channel="m")).packed(), place_of_row("t", row))
            database.write(table, column, key, value, forged)
            value = forged
            try:
                found = saver.get_tuple(config)
            except (StateTypeError, CorruptCheckpoint):
                num_refused += 1
            else:  # plain data that only looks alike
                assert not callable(found.checkpoint["channel_values"]["x"])
    assert num_refused > 2500
    assert calls == []
    assert "evil_marker" not in sys.modules


# -- event loops, and the end of a process --------------------------------------------------------------------------


async def test_no_call_blocks_the_loop(saver_factory: Any) -> None:
    run_chat(saver_factory())  # whatever is imported late is there now
    saver = saver_factory(keys=[KEY])
    graph = chat_graph(saver)
    value = {"messages": [HumanMessage("Hi")], "items": [], "extra": None}
    with blockbuster_ctx():
        async with saver:
            await graph.ainvoke(value, thread("b"))
            await graph.ainvoke(Command(resume="yes"), thread("b"))
            await graph.aupdate_state(thread("b"), {"items": ["x"]}, "ask")
            assert len([found async for found in graph.aget_state_history(thread("b"))]) == 5
            await saver.acopy_thread("b", "c")
            await saver.aprune(["b"])
            await saver.adelete_for_runs(["nobody"])
            await saver.aget_delta_channel_history(config=thread("c"), channels=["x"])
            await saver.adelete_thread("b")
            assert [found async for found in saver.alist(thread("b"))] == []


@SHARED
def test_a_process_ends_by_itself_and_what_was_queued_is_written(saver_factory: Any, children: ModuleType) -> None:
    with start("leave", saver_factory.where, "100") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "end\n"
        assert process.wait(timeout=5) == 0, process.stderr.read() if process.stderr else ""
        assert process.stderr is not None
        assert process.stderr.read() == ""
    numbers = sorted(found.checkpoint["channel_values"]["n"] for found in saver_factory().list(thread()))
    assert numbers == [*range(100), 1000]


def test_a_saver_that_was_closed_opens_itself_again(saver_factory: Any) -> None:
    with saver_factory() as saver:
        run_chat(saver)
    saver.close()
    assert len(run_chat(saver, "again")) == 3
