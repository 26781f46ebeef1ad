"""Threads come over from PostgreSQL as the real PostgresSaver stored them there, unchanged or not at all."""

import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ormsgpack
import psycopg
import pytest
from click.testing import CliRunner
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from pancake_langgraph._errors import ConfigError, StateTypeError, StoreUnavailable
from pancake_langgraph.cli.main import pancake
from pancake_langgraph.saver import PancakeSaver
from tests.contract.transfer_bed import (
    CRAFTED,
    Chat,
    Order,
    everything,
    failing_once,
    history,
    noted,
    run_talk,
    talk,
    thread,
)

THREADS = ("T1", "a,b:c", "fork", "t1", "ü %_*")


@pytest.fixture
def url(postgres: Any) -> str:
    """A database with threads of real graphs: stopped at an interrupt, gone on, forked; names of every kind."""
    where: str = postgres.fresh_database("old")
    with PostgresSaver.from_conn_string(where) as old:
        old.setup()
        for thread_id in THREADS:
            run_talk(old, thread_id)
        talk(old).invoke(Command(resume="other"), thread("T1"))
        talk(old).invoke({"messages": [HumanMessage("again", id="h2")]}, thread("T1"))
        first = list(talk(old).get_state_history(thread("fork")))[1]
        talk(old).update_state(first.config, {"seen": ["forked"]}, as_node="work")
    return where


@pytest.fixture
def old(url: str) -> Iterator[PostgresSaver]:
    with PostgresSaver.from_conn_string(url) as saver:
        saver.serde = JsonPlusSerializer(allowed_msgpack_modules=None)
        yield saver


def test_threads_of_postgres_saver_come_over_whole(saver_factory: Any, url: str, old: PostgresSaver) -> None:
    saver = saver_factory()
    assert sorted(saver.import_from(url)) == sorted(THREADS)
    for thread_id in THREADS:
        found = everything(saver, thread_id)
        assert found == everything(old, thread_id)
        assert len(found) >= 7
        assert len({item.config["configurable"]["checkpoint_ns"] for item in found}) >= 2
        assert history(saver, thread_id) == history(old, thread_id)
    assert any(len(item.pending_writes or ()) > 3 for item in everything(saver))


def test_a_thread_from_postgres_goes_on_as_it_would_have_there(
    saver_factory: Any, url: str, old: PostgresSaver
) -> None:
    saver = saver_factory()
    saver.import_from(url, ["t1"])
    assert list(saver.threads()) == ["t1"]
    assert talk(saver).get_state(thread("t1")).interrupts == talk(old).get_state(thread("t1")).interrupts != ()
    done = talk(saver).invoke(Command(resume="yes"), thread("t1"))
    assert done == talk(old).invoke(Command(resume="yes"), thread("t1"))
    assert done["seen"][-1] == "yes"


def test_a_saver_object_comes_over_like_its_url(tmp_path: Path, url: str, old: PostgresSaver) -> None:
    with PancakeSaver(tmp_path / "new.db") as saver:
        assert sorted(saver.import_from(old)) == sorted(THREADS)
        assert everything(saver) == everything(old)


def test_incremental_channels_come_over_and_go_on(saver_factory: Any, url: str, old: PostgresSaver) -> None:
    for turn in range(3):
        noted(old).invoke({"notes": [f"in {turn}"], "long": ["x" * 200] * turn}, thread("delta"))
    saver = saver_factory()
    saver.import_from(url, ["delta"])
    assert everything(saver, "delta") == everything(old, "delta")
    assert history(saver, "delta", noted) == history(old, "delta", noted)
    for each in (saver, old):
        noted(each).invoke({"notes": ["more"], "long": []}, thread("delta"))
    notes = noted(saver).get_state(thread("delta")).values["notes"]
    assert notes == noted(old).get_state(thread("delta")).values["notes"]
    assert notes == ["in 0", "note 1", "in 1", "note 3", "in 2", "note 5", "more", "note 7"]


def test_what_a_task_wrote_beside_one_that_failed_is_not_done_again(
    saver_factory: Any, url: str, old: PostgresSaver
) -> None:
    graph, runs = failing_once()
    with pytest.raises(RuntimeError, match="not yet"):
        graph(old).invoke({"seen": []}, thread("failed"))
    saver = saver_factory()
    saver.import_from(url, ["failed"])
    assert everything(saver, "failed") == everything(old, "failed")
    assert sorted(graph(saver).invoke(None, thread("failed"))["seen"]) == ["bad", "good"]
    assert sorted(runs) == ["bad", "bad", "good"]


def test_numbers_of_writes_are_those_in_postgres(tmp_path: Path, url: str) -> None:
    with PancakeSaver(tmp_path / "new.db") as saver:
        saver.import_from(url, ["t1"])
    columns = "checkpoint_ns, checkpoint_id, task_id, idx, channel"
    with psycopg.connect(url) as connection:
        theirs = connection.execute(f"SELECT {columns} FROM checkpoint_writes WHERE thread_id = 't1'").fetchall()
    connection = sqlite3.connect(tmp_path / "new.db")
    ours = connection.execute(f"SELECT {columns} FROM writes").fetchall()
    connection.close()
    assert len(ours) > 20
    assert sorted(ours) == sorted(theirs)


def test_a_class_of_the_app_comes_over_once_it_is_allowed(tmp_path: Path, url: str, old: PostgresSaver) -> None:
    graph = StateGraph(Chat)
    graph.add_node("buy", lambda state: {"pair": Order("tea", 2)})
    graph.add_edge(START, "buy")
    graph.compile(checkpointer=old).invoke({"seen": []}, thread("order"))
    with PancakeSaver(tmp_path / "new.db") as saver, pytest.raises(StateTypeError, match="Order"):
        saver.import_from(url, ["order"])
    with PancakeSaver(tmp_path / "new.db", allow=[Order]) as saver:
        saver.import_from(url, ["order"])
        newest = saver.get_tuple(thread("order"))
        assert newest is not None
        assert newest.checkpoint["channel_values"]["pair"] == Order("tea", 2)


@pytest.mark.parametrize("place", ["checkpoint_writes", "checkpoint_blobs"])
def test_a_row_in_postgres_that_names_a_callable_is_refused_and_nothing_is_called(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    called: list[object] = []
    monkeypatch.setattr(os, "system", lambda *args: called.append(args))
    crafted = ormsgpack.packb([ormsgpack.Ext(0, ormsgpack.packb(CRAFTED[0]))])
    with psycopg.connect(url) as connection:
        done = connection.execute(
            f"UPDATE {place} SET type = 'msgpack', blob = %s WHERE thread_id = 't1' AND channel = 'seen'", (crafted,)
        )
        assert done.rowcount
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises(StateTypeError, match=r"thread 't1' was not imported.*os\.system"):
            saver.import_from(url, ["t1"])
        assert not list(saver.threads())
        assert saver.import_from(url, ["T1"]) == ("T1",)
    assert not called


def test_databases_that_cannot_be_read_are_told_apart(
    tmp_path: Path, postgres: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PancakeSaver(tmp_path / "new.db") as saver:
        with pytest.raises(ConfigError, match="no thread 'nope'"):
            saver.import_from(url, ["nope"])
        with pytest.raises(StoreUnavailable, match="checkpoints"):
            saver.import_from(postgres.fresh_database("empty"))
        with pytest.raises(StoreUnavailable, match="the other saver failed"):
            saver.import_from(url.replace("/old?", "/missing?"))
        monkeypatch.setitem(sys.modules, "langgraph.checkpoint.postgres", None)
        with pytest.raises(ConfigError, match="pip install langgraph-checkpoint-postgres"):
            saver.import_from(url)


def test_the_command_imports_from_postgres(tmp_path: Path, url: str, old: PostgresSaver) -> None:
    store = str(tmp_path / "new.db")
    ran = CliRunner().invoke(pancake, ["threads", "import", "--from-postgres", url, "--store", store])
    assert ran.exit_code == 0, ran.output
    assert "5 threads imported" in ran.output
    with PancakeSaver(store) as saver:
        assert everything(saver) == everything(old)
