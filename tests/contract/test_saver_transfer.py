"""Threads move: out to a file and in again, and over from other savers, unchanged or not at all."""

import base64
import dataclasses
import importlib
import json
import operator
import os
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypedDict

import ormsgpack
import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send, interrupt

from pancake_langgraph._errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    PancakeError,
    SchemaMismatch,
    StateTypeError,
    StoreUnavailable,
)
from pancake_langgraph.checkpoint import foreign, foreign_sources
from pancake_langgraph.checkpoint.codec import TypeName
from pancake_langgraph.checkpoint.foreign_serde import StrictSerializer
from pancake_langgraph.checkpoint.transfer import digest_of
from pancake_langgraph.saver import PancakeSaver, observe

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
#: Rows of another saver that name what must not be called, by the code of LangGraph's wire.
CRAFTED = {
    0: ("os", "system", "echo called"),
    1: ("os", "system", ["echo called"]),
    2: ("subprocess", "run", {"args": ["true"]}),
    3: ("os", "system", "echo called", "__call__"),
    4: ("os", "system", {}),
    5: ("os", "system", {}, "model_validate_json"),
}


@dataclasses.dataclass
class Order:
    item: str
    count: int


class Chat(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    pair: tuple[int, str]
    seen: Annotated[list[str], operator.add]


def talk(saver: BaseCheckpointSaver[Any]) -> Any:
    """A fan-out, a sub-graph with its own namespace, and an interrupt."""
    inner = StateGraph(Chat)
    inner.add_node("deep", lambda state: {"seen": ["deep"]})
    inner.add_node("ask", lambda state: {"seen": [interrupt({"question": ("really", 1)})]})
    inner.add_edge(START, "deep")
    inner.add_edge("deep", "ask")
    inner.add_edge("ask", END)
    graph = StateGraph(Chat)
    graph.add_node("answer", lambda state: {"messages": [AIMessage("hello", id="a1")], "pair": (1, "one")})
    graph.add_node("work", lambda state: {"seen": state["seen"]})
    graph.add_node("inner", inner.compile())
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", lambda state: [Send("work", {"seen": [name]}) for name in "cab"], ["work"])
    graph.add_edge("work", "inner")
    graph.add_edge("inner", END)
    return graph.compile(checkpointer=saver)


def run_talk(saver: BaseCheckpointSaver[Any], thread_id: str) -> None:
    talk(saver).invoke({"messages": [HumanMessage("hi", id="h1")]}, thread(thread_id))


def thread(thread_id: str) -> Any:
    return {"configurable": {"thread_id": thread_id}}


def everything(saver: BaseCheckpointSaver[Any], thread_id: str = "t1") -> list[CheckpointTuple]:
    return sorted(saver.list(thread(thread_id)), key=lambda found: sorted(found.config["configurable"].items()))


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


# -- from SqliteSaver -----------------------------------------------------------------------------------------------


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


def test_a_class_of_the_app_comes_over_once_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "Order", Order, raising=False)
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


# -- from any saver -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda saver: saver, observe], ids=["plain", "observed"])
def test_any_saver_that_lists_comes_over(saver_factory: Any, wrap: Callable[[Any], Any]) -> None:
    old, saver = InMemorySaver(), saver_factory(keys=[KEY])
    run_talk(old, "t1")
    serde = old.serde
    assert saver.import_from(wrap(old)) == ("t1",)
    assert old.serde is serde
    assert everything(saver) == everything(old)
    assert talk(saver).invoke(Command(resume="yes"), thread("t1"))["seen"][-1] == "yes"


def test_our_own_saver_comes_over(tmp_path: Path) -> None:
    with PancakeSaver() as old, PancakeSaver(tmp_path / "new.db") as saver:
        run_talk(old, "t1")
        saver.import_from(old)
        assert everything(saver) == everything(old)


def test_order_of_writes_survives_without_task_paths() -> None:
    writes = [("b", "x", 1), ("b", "__interrupt__", 2), ("b", "y", 3), ("a", "x", 4), ("b", "z", 5)]
    found = foreign_sources.numbered(writes)
    assert [(w.task_id, w.idx, w.value) for w in found] == [
        ("b", 0, 1), ("b", -3, 2), ("b", 1, 3), ("b", 2, 5), ("a", 0, 4)
    ]  # fmt: skip
    assert [w.task_path for w in found if w.task_id == "b"] < [w.task_path for w in found if w.task_id == "a"]
    assert {w.task_path for w in foreign_sources.numbered([("a", "x", 1), ("b", "x", 2)])} == {""}


class Rot:
    """A cipher that hides nothing."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "rot", plaintext[::-1]

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return ciphertext[::-1]


def test_an_encrypted_saver_comes_over_and_stays_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    old = InMemorySaver(serde=EncryptedSerializer(Rot()))
    run_talk(old, "t1")
    with PancakeSaver() as saver:
        saver.import_from(old)
        assert everything(saver) == everything(old)
    crafted = ormsgpack.packb(ormsgpack.Ext(0, ormsgpack.packb(CRAFTED[0])))
    place = next(iter(old.writes))
    key, write = next(iter(old.writes[place].items()))
    old.writes[place][key] = (write[0], write[1], ("msgpack+rot", crafted[::-1]), write[3])
    called: list[object] = []
    monkeypatch.setattr(os, "system", called.append)
    with PancakeSaver() as saver, pytest.raises(StateTypeError, match=r"os\.system"):
        saver.import_from(old)
    assert not called


class RedisLike(JsonPlusSerializer):
    """Makes any class that JSON names, and swallows what goes wrong, as langgraph-checkpoint-redis does."""

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return self.revived(json.loads(data[1])) if data[0] == "json" else super().loads_typed(data)

    def revived(self, value: Any) -> Any:
        if isinstance(value, dict) and value.get("lc"):
            try:
                made = self._reviver(value)
                return self._reconstruct_from_constructor(value) if isinstance(made, dict) else made
            except Exception:
                return value
        return value

    def _reconstruct_from_constructor(self, value: dict[str, Any]) -> Any:
        kind = getattr(importlib.import_module(".".join(value["id"][:-1])), value["id"][-1])
        kwargs = {name: self.revived(part) for name, part in value["kwargs"].items()}
        return set(kwargs["__set_items__"]) if kind is set else kind(**kwargs)


def redis_like_with(*path: str, **kwargs: Any) -> InMemorySaver:
    """A saver in whose first pending write stands an object of the class of that name."""
    old = InMemorySaver(serde=RedisLike())
    run_talk(old, "t1")
    crafted = json.dumps({"lc": 2, "type": "constructor", "id": list(path), "kwargs": kwargs}).encode()
    place = next(iter(old.writes))
    key, write = next(iter(old.writes[place].items()))
    old.writes[place][key] = (write[0], write[1], ("json", crafted), write[3])
    return old


def test_objects_in_a_format_of_its_own_come_over_if_they_are_allowed() -> None:
    inner = {"lc": 2, "type": "constructor", "id": ["builtins", "set"], "kwargs": {"__set_items__": [1, 2]}}
    old = redis_like_with("uuid", "SafeUUID", value=inner)
    with PancakeSaver() as saver, pytest.raises(StateTypeError, match=r"--allow uuid:SafeUUID"):
        saver.import_from(old)
    with PancakeSaver() as saver:
        saver.import_from(redis_like_with("builtins", "set", __set_items__=[1, 2]))
        assert {1, 2} in [value for item in everything(saver) for _, _, value in item.pending_writes or ()]
    with PancakeSaver(allow=[HTTPStatus]) as saver:
        saver.import_from(redis_like_with("http", "HTTPStatus", value=404))
        found = [value for item in everything(saver) for _, _, value in item.pending_writes or ()]
        assert HTTPStatus.NOT_FOUND in found


def test_a_serializer_that_swallows_refusals_does_not_get_past(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(os, "system", called.append)
    old = redis_like_with("os", "system", command="true")
    with PancakeSaver() as saver, pytest.raises(StateTypeError, match=r"os\.system"):
        saver.import_from(old)
    assert not called


def test_a_saver_that_cannot_be_read_strictly_is_refused() -> None:
    class Own:
        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            return "own", b""

        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            return None

    class Silent(BaseCheckpointSaver[Any]):
        pass

    class Broken(BaseCheckpointSaver[Any]):
        def list(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError("the database is away")

    with PancakeSaver() as saver:
        with pytest.raises(ConfigError, match="Own"):
            saver.import_from(InMemorySaver(serde=Own()))
        with pytest.raises(ConfigError, match="does not implement `list`"):
            saver.import_from(Silent())
        with pytest.raises(StoreUnavailable, match="the database is away"):
            saver.import_from(Broken())


def test_what_does_not_come_back_equal_is_taken_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    old = InMemorySaver()
    run_talk(old, "t1")
    monkeypatch.setattr(foreign, "_is_equal", lambda *args: False)
    with PancakeSaver() as saver:
        with pytest.raises(CorruptCheckpoint, match="did not come back"):
            saver.import_from(old)
        assert not list(saver.threads())
        monkeypatch.undo()
        assert saver.import_from(old) == ("t1",)


@pytest.mark.parametrize(
    ("module", "name", "url"),
    [
        ("langgraph.checkpoint.postgres", "PostgresSaver", "postgresql://example/db"),
        ("langgraph.checkpoint.redis", "RedisSaver", "redis://example:6379"),
    ],
)
def test_packages_of_servers_are_imported_when_needed(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, url: str
) -> None:
    old = InMemorySaver()
    run_talk(old, "t1")
    opened: list[str] = []

    @contextmanager
    def from_conn_string(where: str) -> Iterator[InMemorySaver]:
        opened.append(where)
        yield old

    stand_in = ModuleType(module)
    setattr(stand_in, name, type(name, (), {"from_conn_string": staticmethod(from_conn_string)}))
    with PancakeSaver() as saver:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match="pip install langgraph-checkpoint-"):
            saver.import_from(url)
        monkeypatch.setitem(sys.modules, module, stand_in)
        assert saver.import_from(url) == ("t1",)
        assert everything(saver) == everything(old)
    assert opened == [url]


# -- export and import ----------------------------------------------------------------------------------------------


def merged(state: list[Any], updates: list[Any]) -> list[Any]:
    return [*state, *(item for update in updates for item in update)]


class Delta(TypedDict):
    notes: Annotated[list[str], DeltaChannel(merged, snapshot_frequency=1000)]
    long: Annotated[list[str], operator.add]


def noted(saver: BaseCheckpointSaver[Any]) -> Any:
    graph = StateGraph(Delta)
    graph.add_node("note", lambda state: {"notes": [f"note {len(state['notes'])}"]})
    graph.add_edge(START, "note")
    graph.add_edge("note", END)
    return graph.compile(checkpointer=saver)


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
