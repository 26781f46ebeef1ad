"""Threads come over from Redis as langgraph-checkpoint-redis stored them there, unchanged or not at all.

Real here: that package and its client library, and Redis' own modules for search (RediSearch 2.10) and JSON (RedisJSON
2.8) out of a wheel of Redis Stack 7.4.  The server that loads them is Valkey: the one in that wheel needs a version of
OpenSSL that distributions no longer have.  Search is limited to 10,000 results, as Redis Stack does it.
"""

import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.redis import AsyncRedisSaver, RedisSaver, ShallowRedisSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send
from redis.asyncio import Redis as AsyncClient

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint, StateTypeError, StoreUnavailable
from pancake_langgraph.cli.main import pancake
from pancake_langgraph.saver import PancakeSaver, observe
from tests.contract.transfer_bed import Chat, Order, everything, failing_once, run_talk, talk, thread

THREADS = ("T1", "a", "a,b", "t1", "t1:x", "ü %_*[]")


@pytest.fixture
def url(search_valkey: Any) -> str:
    """A server with threads of real graphs: stopped at an interrupt, gone on; names of every kind."""
    search_valkey.reset()
    where: str = search_valkey.url
    with RedisSaver.from_conn_string(where) as old:
        old.setup()
        for thread_id in THREADS:
            run_talk(old, thread_id)
        talk(old).invoke(Command(resume="other"), thread("T1"))
        talk(old).invoke({"messages": [HumanMessage("again", id="h2")]}, thread("T1"))
    return where


@pytest.fixture
def old(url: str) -> Iterator[RedisSaver]:
    with RedisSaver.from_conn_string(url) as saver:
        saver.setup()
        yield saver


@pytest.fixture
def documents(search_valkey: Any) -> Callable[..., dict[str, Any]]:
    """Reads the documents of a thread by key: `documents("checkpoint", "t1")`."""

    def read(prefix: str, thread_id: str) -> dict[str, Any]:
        with search_valkey.client() as client:
            found = {
                key.decode(): json.loads(client.execute_command("JSON.GET", key))
                for key in client.scan_iter(f"{prefix}:*", _type="ReJSON-RL")
            }
        return {key: document for key, document in found.items() if document["thread_id"] == thread_id}

    return read


@pytest.fixture
def change(search_valkey: Any) -> Callable[[str, str, object], None]:
    """Puts a value into a document: `change(key, path, value)`."""

    def put(key: str, path: str, value: object) -> None:
        with search_valkey.client() as client:
            assert client.execute_command("JSON.SET", key, path, json.dumps(value))

    return put


def by_place(found: CheckpointTuple) -> tuple[str, ...]:
    where = found.config["configurable"]
    return where["checkpoint_ns"], where["checkpoint_id"]


def checkpoint_of(given: CheckpointTuple) -> dict[str, Any]:
    """Return a checkpoint without what langgraph-checkpoint-redis adds to it for itself."""
    return {key: value for key, value in given.checkpoint.items() if key not in ("type", "pending_sends")}


def given_by(old: RedisSaver, documents: Any, thread_id: str) -> list[CheckpointTuple]:
    """Return what RedisSaver gives of a thread, asked for each checkpoint by its name."""
    found = []
    for document in documents("checkpoint", thread_id).values():
        checkpoint_ns = document["checkpoint_ns"].replace("__empty__", "")
        where = {"thread_id": thread_id, "checkpoint_ns": checkpoint_ns, "checkpoint_id": document["checkpoint_id"]}
        got = old.get_tuple({"configurable": where})
        assert got is not None
        found.append(got)
    return sorted(found, key=by_place)


def written(old: RedisSaver, documents: Any, thread_id: str) -> dict[tuple[str, ...], list[Any]]:
    """Return the pending writes of a thread by place, made of the documents with RedisSaver's own serializer."""
    found: dict[tuple[str, ...], list[Any]] = {}
    order = ("task_path", "task_id", "idx")
    every = sorted(documents("checkpoint_write", thread_id).values(), key=lambda each: [each[key] for key in order])
    for each in every:
        place = each["checkpoint_ns"].replace("__empty__", ""), each["checkpoint_id"]
        value = old.serde.loads_typed((each["type"], old._decode_blob(each["blob"])))
        found.setdefault(place, []).append((each["task_id"], each["channel"], value))
    return found


def test_threads_of_redis_saver_come_over_whole(saver_factory: Any, url: str, old: RedisSaver, documents: Any) -> None:
    saver = saver_factory()
    assert saver.import_from(url) == THREADS
    for thread_id in THREADS:
        found = sorted(saver.list(thread(thread_id)), key=by_place)
        given = given_by(old, documents, thread_id)
        assert [item._replace(pending_writes=None) for item in found] == [
            item._replace(pending_writes=None, checkpoint=checkpoint_of(item)) for item in given
        ]
        writes = written(old, documents, thread_id)
        assert {by_place(item): item.pending_writes for item in found if item.pending_writes} == writes
        assert len(found) >= 7
        assert len(writes) >= 7
        assert len({namespace for namespace, _ in map(by_place, found)}) >= 2


def test_messages_from_redis_are_messages(saver_factory: Any, url: str) -> None:
    saver = saver_factory()
    saver.import_from(url, ["t1"])
    values = [item.checkpoint["channel_values"].get("messages", ()) for item in everything(saver)]
    assert [HumanMessage("hi", id="h1"), AIMessage("hello", id="a1")] in values
    assert all(isinstance(message, BaseMessage) for value in values for message in value)


@pytest.mark.parametrize("thread_id", ["t1", "a,b"])
def test_a_thread_from_redis_goes_on(saver_factory: Any, url: str, thread_id: str) -> None:
    saver = saver_factory()
    saver.import_from(url, [thread_id])
    assert list(saver.threads()) == [thread_id]
    [waiting] = talk(saver).get_state(thread(thread_id)).interrupts
    assert waiting.value == {"question": ["really", 1]}
    done = talk(saver).invoke(Command(resume="yes"), thread(thread_id))
    assert done["seen"] == [*"cab", *"cab", "deep", "yes"]
    assert done["messages"] == [HumanMessage("hi", id="h1"), AIMessage("hello", id="a1")]


@pytest.mark.parametrize("wrap", [lambda saver: saver, observe], ids=["plain", "observed"])
def test_a_saver_object_comes_over_like_its_url(tmp_path: Path, url: str, old: RedisSaver, wrap: Any) -> None:
    serde = old.serde
    with PancakeSaver(tmp_path / "new.db") as saver, PancakeSaver() as other:
        assert saver.import_from(wrap(old)) == THREADS
        other.import_from(url)
        assert everything(saver) == everything(other)
    assert old.serde is serde


def test_numbers_and_paths_of_writes_are_those_in_redis(tmp_path: Path, url: str, documents: Any) -> None:
    with PancakeSaver(tmp_path / "new.db") as saver:
        saver.import_from(url, ["t1"])
    columns = ("checkpoint_id", "task_path", "task_id", "idx", "channel")
    connection = sqlite3.connect(tmp_path / "new.db")
    ours = connection.execute(f"SELECT {', '.join(columns)} FROM writes").fetchall()
    connection.close()
    theirs = [tuple(each[column] for column in columns) for each in documents("checkpoint_write", "t1").values()]
    assert len(ours) > 20
    assert sorted(ours) == sorted(theirs)


def test_what_a_task_wrote_beside_one_that_failed_is_not_done_again(
    saver_factory: Any, url: str, old: RedisSaver
) -> None:
    graph, runs = failing_once()
    with pytest.raises(RuntimeError, match="not yet"):
        graph(old).invoke({"seen": []}, thread("failed"))
    saver = saver_factory()
    saver.import_from(url, ["failed"])
    [error] = [task.error for task in graph(saver).get_state(thread("failed")).tasks if task.error]
    assert error == "RuntimeError()"
    assert sorted(graph(saver).invoke(None, thread("failed"))["seen"]) == ["bad", "good"]
    assert sorted(runs) == ["bad", "bad", "good"]


def test_tasks_sent_before_a_checkpoint_of_an_old_version_come_over(
    tmp_path: Path, url: str, old: RedisSaver, documents: Any, change: Any
) -> None:
    for key in documents("checkpoint", "t1"):
        change(key, "$.checkpoint.v", 3)
    every = [item for item in old.list(thread("t1")) if item.config["configurable"]["thread_id"] == "t1"]
    with PancakeSaver(tmp_path / "new.db") as saver:
        saver.import_from(url, ["t1"])
        found = {by_place(item): item.checkpoint.get("pending_sends") or [] for item in everything(saver)}
    given = {by_place(item): item.checkpoint["pending_sends"] for item in every}
    assert found == given
    assert [Send("work", {"seen": [name]}) for name in "cab"] in found.values()


async def test_threads_of_the_async_saver_come_over(tmp_path: Path, url: str) -> None:
    async with AsyncClient.from_url(url) as client, AsyncRedisSaver.from_conn_string(redis_client=client) as old:
        await talk(old).ainvoke({"messages": [HumanMessage("hi", id="h1")]}, thread("async"))
        with PancakeSaver(tmp_path / "other.db") as saver, pytest.raises(ConfigError, match="pass the URL"):
            saver.import_from(old)
    with PancakeSaver(tmp_path / "new.db") as saver:
        saver.import_from(url, ["async", "t1"])
        assert len(everything(saver, "async")) == len(everything(saver, "t1"))
        assert talk(saver).invoke(Command(resume="yes"), thread("async"))["seen"][-1] == "yes"


def test_the_one_state_that_the_shallow_saver_keeps_comes_over(tmp_path: Path, url: str) -> None:
    with ShallowRedisSaver.from_conn_string(url) as old:
        old.setup()
        run_talk(old, "shallow")
        with PancakeSaver(tmp_path / "new.db") as saver, PancakeSaver() as other:
            saver.import_from(url, ["shallow"])
            other.import_from(old, ["shallow"])
            assert everything(saver, "shallow") == everything(other, "shallow")
            newest, given = saver.get_tuple(thread("shallow")), old.get_tuple(thread("shallow"))
            assert newest is not None
            assert given is not None
            assert newest.checkpoint == checkpoint_of(given)
            assert talk(saver).invoke(Command(resume="yes"), thread("shallow"))["seen"][-1] == "yes"


def bought(saver: BaseCheckpointSaver[Any], value: object) -> None:
    graph = StateGraph(Chat)
    graph.add_node("buy", lambda state: {"pair": value})
    graph.add_edge(START, "buy")
    graph.compile(checkpointer=saver).invoke({"seen": []}, thread("order"))


def test_a_class_of_the_app_comes_over_once_it_is_allowed(tmp_path: Path, url: str, old: RedisSaver) -> None:
    bought(old, [Order("tea", 2), {3, 4}])
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises(StateTypeError, match=r"thread 'order' was not imported.*Order"):
            saver.import_from(url, ["order"])
        assert not list(saver.threads())
    with PancakeSaver(tmp_path / "new.db", allow=[Order]) as saver:
        saver.import_from(url, ["order"])
        newest = saver.get_tuple(thread("order"))
        assert newest is not None
        assert newest.checkpoint["channel_values"]["pair"] == [Order("tea", 2), {3, 4}]


@pytest.mark.parametrize("method", [{"args": ["x", 1]}, {"kwargs": {"item": "x", "count": 1}}])
@pytest.mark.parametrize("is_write", [True, False])
def test_a_document_that_names_a_class_is_refused_before_its_module_is_imported(
    tmp_path: Path, url: str, old: RedisSaver, documents: Any, change: Any, monkeypatch: pytest.MonkeyPatch,
    method: dict[str, Any], is_write: bool,
) -> None:  # fmt: skip
    source = "import dataclasses\n\n@dataclasses.dataclass\nclass Thing:\n    item: str\n    count: int\n"
    (tmp_path / "transfer_trap.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    crafted = [{"inner": {"lc": 2, "type": "constructor", "id": ["transfer_trap", "Thing"], **method}}]
    if is_write:
        key = next(key for key, each in documents("checkpoint_write", "t1").items() if each["channel"] == "seen")
        change(key, "$.type", "json")
        change(key, "$.blob", old._encode_blob(json.dumps(crafted).encode()))
    else:
        key = max(documents("checkpoint", "t1"))
        change(key, "$.checkpoint.channel_values.seen", crafted)
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises(StateTypeError, match=r"thread 't1' was not imported.*transfer_trap\.Thing"):
            saver.import_from(url, ["t1"])
        assert not list(saver.threads())
    assert "transfer_trap" not in sys.modules


def test_a_document_that_names_a_function_is_refused_and_nothing_is_called(
    tmp_path: Path, url: str, documents: Any, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    monkeypatch.setattr(os, "system", called.append)
    crafted = {"lc": 2, "type": "constructor", "id": ["os", "system"], "args": ["true"]}
    change(max(documents("checkpoint", "t1")), "$.checkpoint.channel_values.seen", crafted)
    with PancakeSaver(tmp_path / "new.db") as saver, pytest.raises(StateTypeError, match=r"os\.system"):
        saver.import_from(url, ["t1"])
    assert not called


@pytest.mark.parametrize(("path", "value"), [("$.blob", "no base64"), ("$.blob", None), ("$.type", 7)])
def test_damaged_writes_are_refused(
    tmp_path: Path, url: str, documents: Any, change: Any, path: str, value: object
) -> None:
    change(next(iter(documents("checkpoint_write", "t1"))), path, value)
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises((CorruptCheckpoint, StateTypeError), match="thread 't1' was not imported"):
            saver.import_from(url, ["t1"])
        assert saver.import_from(url, ["T1"]) == ("T1",)


def test_documents_of_others_are_left_alone(tmp_path: Path, url: str, search_valkey: Any) -> None:
    with search_valkey.client() as client:
        client.execute_command("JSON.SET", "checkpoint:of:another:app", "$", '{"thread_id": "t1"}')
        client.execute_command("JSON.SET", "checkpoint:list", "$", "[1]")
        client.set("checkpoint:text", "x")
    with PancakeSaver(tmp_path / "new.db") as saver:
        assert saver.import_from(url) == THREADS


def test_servers_that_cannot_be_read_are_told_apart(
    tmp_path: Path, url: str, clean_valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises(ConfigError, match="no thread 'nope'"):
            saver.import_from(url, ["nope"])
        with pytest.raises(StoreUnavailable, match="ReJSON-RL"):
            saver.import_from(clean_valkey_url)
        with pytest.raises(StoreUnavailable, match="the other saver failed"):
            saver.import_from(f"unix://{tmp_path}/missing")
        monkeypatch.setitem(sys.modules, "langgraph.checkpoint.redis", None)
        with pytest.raises(ConfigError, match="pip install langgraph-checkpoint-redis"):
            saver.import_from(url)


def test_the_command_imports_from_redis(tmp_path: Path, url: str) -> None:
    store = str(tmp_path / "new.db")
    ran = CliRunner().invoke(pancake, ["threads", "import", "t1", "a,b", "--from-redis", url, "--store", store])
    assert ran.exit_code == 0, ran.output
    assert "2 threads imported" in ran.output
    with PancakeSaver(store) as saver:
        assert sorted(saver.threads()) == ["a,b", "t1"]
