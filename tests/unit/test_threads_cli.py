"""`pancake threads`: what is shown, what is asked first, and what is refused."""

import base64
import json
import operator
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypedDict

import pytest
from click.testing import CliRunner, Result
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from pancake_langgraph.cli import threads as threads_module
from pancake_langgraph.cli.main import pancake
from pancake_langgraph.saver import PancakeSaver

KEY = bytes(range(32))
SECRET_WORDS = "nobody should see this"


class Chat(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    log: Annotated[list[str], operator.add]


def chat(saver: Any) -> Any:
    graph = StateGraph(Chat)
    graph.add_node("agent", lambda state: {"messages": [AIMessage(SECRET_WORDS)], "log": ["x" * 500]})
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    return graph.compile(checkpointer=saver, interrupt_before=["agent"])


def fill(saver: Any, *thread_ids: str, turns: int = 2) -> None:
    for thread_id in thread_ids:
        for _ in range(turns):
            config = {"configurable": {"thread_id": thread_id}}
            chat(saver).invoke({"messages": [HumanMessage("hi")]}, config)
            chat(saver).invoke(None, config)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with PancakeSaver(tmp_path / "app.db") as saver:
        fill(saver, "small", turns=1)
        fill(saver, "big", turns=3)
    return tmp_path / "app.db"


def run(*args: object, code: int = 0, typed: str | None = None, **environ: str) -> Result:
    found = CliRunner(env=environ).invoke(pancake, ["threads", *map(str, args)], input=typed)
    assert found.exit_code == code, found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
    return found


def ids_in(store: Path, **options: Any) -> list[str]:
    with PancakeSaver(store, **options) as saver:
        return sorted(saver.threads())


# -- looking --------------------------------------------------------------------------------------------------------


def test_list_shows_every_thread_and_no_content(store: Path) -> None:
    found = run("list", "--store", store)
    assert "2 threads" in found.stdout
    assert found.stdout.index("small") < found.stdout.index("big")
    assert SECRET_WORDS not in found.output


def test_list_as_json_has_figures(store: Path) -> None:
    small, big = sorted(
        json.loads(run("list", "--json", PANCAKE_SAVER=str(store)).stdout), key=lambda t: t["num_bytes"]
    )
    assert (small["thread_id"], small["num_checkpoints"], small["newest_step"]) == ("small", 3, 1)
    assert small["namespaces"] == [""]
    assert small["newest_ts"].startswith("20")
    assert big["num_bytes"] > small["num_bytes"] > 500
    assert big["problem"] is None


def test_list_of_nothing(tmp_path: Path) -> None:
    PancakeSaver(tmp_path / "empty.db").setup()
    assert "0 threads" in run("list", "--store", tmp_path / "empty.db").stdout


def test_list_names_threads_it_cannot_read(store: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    found = run("list", "--store", store, "--key-file", tmp_path / "key")
    assert found.stdout.count("cannot be read") == 2
    assert "stored in plain although encryption is on" in found.stderr


def test_ids_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    with PancakeSaver(tmp_path / "app.db") as saver:
        fill(saver, "[b]\x1b\n", turns=1)
    found = run("list", "--store", tmp_path / "app.db").stdout
    assert "\x1b" not in found
    assert r"[b]\x1b\n" in found


def test_sizes_are_by_channel(store: Path) -> None:
    found = run("sizes", "big", "--store", store).stdout
    assert "messages" in found
    sizes = json.loads(run("sizes", "big", "--json", "--store", store).stdout)
    assert sizes["log"] > 500
    assert sum(sizes.values()) == json.loads(run("list", "--json", "--store", store).stdout)[1]["num_bytes"]


def test_show_gives_the_history_without_values(store: Path) -> None:
    lines = run("show", "small", "--store", store).stdout.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert [line.split("  ")[1:3] for line in heads] == [["step 1", "loop"], ["step 0", "loop"], ["step -1", "input"]]
    nexts = [line.split(";")[0].strip() for line in lines if line.startswith("  next")]
    assert nexts == ["next: none", "next: agent", "next: none"]
    assert any("messages:" in line and "2 items" in line for line in lines)
    assert SECRET_WORDS not in "".join(lines)


def test_show_gives_values_cut_short_when_asked(store: Path) -> None:
    found = run("show", "big", "--values", "--limit", 1, "--store", store).stdout
    assert SECRET_WORDS in found
    assert "x" * 300 not in found
    item = json.loads(run("show", "small", "--values", "--json", "--limit", 1, "--store", store).stdout)
    assert SECRET_WORDS in item["values"]["messages"]
    assert item["channels"]["log"]["num_items"] == 1
    assert "values" not in json.loads(run("show", "small", "--json", "--limit", 1, "--store", store).stdout)


# -- removing -------------------------------------------------------------------------------------------------------


def test_prune_keeps_the_latest_and_says_what_went(store: Path) -> None:
    assert "1 thread pruned: 8 checkpoints," in run("prune", "big", "--keep-latest", "--store", store).stdout
    assert "2 threads pruned: 2 checkpoints," in run("prune", "--all", "--store", store).stdout
    with PancakeSaver(store) as saver:
        [left] = saver.list({"configurable": {"thread_id": "big"}})
        assert len(left.checkpoint["channel_values"]["messages"]) == 6


def test_delete_asks_first(store: Path) -> None:
    asked = run("delete", "big", "--store", store, typed="n\n", code=1)
    assert "big (9 checkpoints)" in asked.output
    assert ids_in(store) == ["big", "small"]
    assert "1 thread deleted: 9 checkpoints" in run("delete", "big", "--store", store, typed="y\n").stdout
    assert ids_in(store) == ["small"]
    run("delete", "small", "--yes", "--store", store)
    assert ids_in(store) == []


def test_an_unknown_thread_is_an_error_and_nothing_happens(store: Path, tmp_path: Path) -> None:
    for args in (
        ("delete", "small", "nope", "--yes"),
        ("prune", "small", "nope"),
        ("show", "nope"),
        ("sizes", "nope"),
        ("export", "small", "nope", "--to", tmp_path / "file"),
    ):
        assert "no thread 'nope'" in run(*args, "--store", store, code=1).output
    assert ids_in(store) == ["big", "small"]
    assert not (tmp_path / "file").exists()


def test_threads_are_named_or_all_are_meant(store: Path, tmp_path: Path) -> None:
    for args in (("prune",), ("prune", "big", "--all"), ("export", "--to", tmp_path / "file")):
        assert "name threads, or give --all" in run(*args, "--store", store, code=2).output


# -- moving ---------------------------------------------------------------------------------------------------------


def test_export_and_import_round_trip_into_an_encrypted_store(store: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    exported = run("export", "--all", "--to", tmp_path / "file", "--store", store)
    assert "2 threads exported" in exported.stdout
    assert "not encrypted" in exported.stderr
    assert "--force" in run("export", "--all", "--to", tmp_path / "file", "--store", store, code=1).output
    run("export", "--all", "--to", tmp_path / "file", "--force", "--store", store)
    new = tmp_path / "new.db"
    args = ("--store", new, "--key-file", tmp_path / "key")
    assert "2 threads imported" in run("import", "--from", tmp_path / "file", *args).stdout
    assert "exists already" in run("import", "--from", tmp_path / "file", *args, code=1).output
    with PancakeSaver(store) as old, PancakeSaver(new, keys=[KEY]) as saver:
        for thread_id in ("big", "small"):
            config: Any = {"configurable": {"thread_id": thread_id}}
            assert list(saver.list(config)) == list(old.list(config))
    assert SECRET_WORDS.encode() not in new.read_bytes()


def test_a_damaged_export_imports_nothing(store: Path, tmp_path: Path) -> None:
    run("export", "--all", "--to", tmp_path / "file", "--store", store)
    text = (tmp_path / "file").read_text()
    (tmp_path / "file").write_text(text.replace('"thread_id":"big"', '"thread_id":"bug"'))
    assert "digest" in run("import", "--from", tmp_path / "file", "--store", tmp_path / "new.db", code=1).output
    assert ids_in(tmp_path / "new.db") == []


def test_import_from_sqlite_saver(tmp_path: Path) -> None:
    with SqliteSaver.from_conn_string(str(tmp_path / "old.sqlite")) as old:
        fill(old, "t1", "t2")
    args = ("import", "t2", "--from-sqlite", tmp_path / "old.sqlite", "--store", tmp_path / "new.db")
    assert "1 thread imported" in run(*args).stdout
    assert ids_in(tmp_path / "new.db") == ["t2"]


def test_import_of_an_apps_class_needs_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_state.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass\nclass Order:\n    item: str\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import shop_state

    graph = StateGraph(dict)
    graph.add_node("buy", lambda state: {"order": shop_state.Order("tea")})
    graph.add_edge(START, "buy")
    with SqliteSaver.from_conn_string("old.sqlite") as old:
        graph.compile(checkpointer=old).invoke({}, {"configurable": {"thread_id": "t1"}})
    args = ("import", "--from-sqlite", "old.sqlite", "--store", "new.db")
    refused = run(*args, code=1).output
    assert "--allow shop_state:Order" in refused
    assert "1 thread imported" in run(*args, "--allow", "shop_state:Order").stdout
    assert (
        "Order(item='tea')" in run("show", "t1", "--values", "--store", "new.db", "--allow", "shop_state:Order").stdout
    )


def test_one_origin_and_a_url_where_one_is_due(tmp_path: Path, store: Path) -> None:
    assert "give one of" in run("import", "--store", store, code=2).output
    assert "give one of" in run("import", "--from", store, "--from-sqlite", store, "--store", store, code=2).output
    for option, scheme in (("--from-postgres", "postgresql://"), ("--from-redis", "redis://")):
        assert scheme in run("import", option, "dbname=app", "--store", store, code=2).output
    assert "the other saver failed" in (
        run("import", "--from-postgres", "postgresql://127.0.0.1:1/x", "--store", store, code=1).output
    )


def test_threads_move_to_a_server(store: Path, tmp_path: Path, clean_valkey_url: str) -> None:
    run("export", "--all", "--to", tmp_path / "file", "--store", store)
    run("import", "--from", tmp_path / "file", PANCAKE_SAVER=clean_valkey_url)
    listed = json.loads(run("list", "--json", PANCAKE_SAVER=clean_valkey_url).stdout)
    assert sorted(info["num_checkpoints"] for info in listed) == [3, 9]
    run("prune", "--all", PANCAKE_SAVER=clean_valkey_url)
    run("delete", "small", "--yes", PANCAKE_SAVER=clean_valkey_url)
    assert "1 thread" in run("list", PANCAKE_SAVER=clean_valkey_url).stdout


# -- opening --------------------------------------------------------------------------------------------------------


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert "there is no file" in run("list", "--store", tmp_path / "typo.db", code=1).output
    assert not (tmp_path / "typo.db").exists()
    assert "--store" in run("list", code=2, PANCAKE_SAVER="").output


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "other.db")
    connection.execute("CREATE TABLE x (y)")
    connection.close()
    assert "another program" in run("list", "--store", tmp_path / "other.db", code=1).output


@pytest.mark.parametrize(
    "content",
    [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", base64.b64encode(KEY), base64.urlsafe_b64encode(KEY)],
    ids=["raw", "hex", "HEX", "base64", "urlsafe"],
)
def test_keys_come_raw_in_hex_and_in_base64(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    assert threads_module._read_key(tmp_path / "key") == KEY


@pytest.mark.parametrize("content", [b"", b"short", KEY + b"x", KEY.hex().encode()[:-2], b"\xff" * 64])
def test_other_files_are_no_keys(tmp_path: Path, store: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    found = run("list", "--store", store, "--key-file", tmp_path / "key", code=1).output
    assert f"{len(content)} bytes" in found


def test_an_older_key_still_reads(tmp_path: Path) -> None:
    with PancakeSaver(tmp_path / "app.db", keys=[KEY]) as saver:
        fill(saver, "t1")
    (tmp_path / "old").write_bytes(KEY)
    (tmp_path / "new").write_bytes(KEY[::-1])
    args = ("show", "t1", "--store", tmp_path / "app.db", "--key-file", tmp_path / "new")
    assert "add the old key" in run(*args, code=1).output
    run(*args, "--key-file", tmp_path / "old")


def test_a_class_that_is_no_class_name_is_refused(store: Path) -> None:
    assert "module:Class" in run("list", "--allow", "Order", "--store", store, code=1).output


def test_progress_is_told_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 2.5, 3.0, 4.6])
    told: list[str] = []
    monkeypatch.setattr(threads_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(threads_module, "show_progress", lambda step, elapsed_s: told.append(f"{step} {elapsed_s}"))
    tick = threads_module._ticker("exported")
    for _ in range(4):
        tick("t")
    assert told == ["2 threads exported 2.5", "4 threads exported 4.6"]
