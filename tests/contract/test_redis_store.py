"""What is special about the store over Redis: its URL, keys, expiry, lost parts, writers at the same time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import redis

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint, SchemaMismatch, StoreUnavailable
from pancake_langgraph.checkpoint import redis_keys as layout
from pancake_langgraph.checkpoint import redis_store
from pancake_langgraph.checkpoint.redis_commands import Membership
from pancake_langgraph.checkpoint.redis_keys import FORMAT_KEY, THREADS_KEY, run_key, thread_keys
from pancake_langgraph.checkpoint.redis_link import shown
from pancake_langgraph.checkpoint.redis_store import RedisStore
from pancake_langgraph.checkpoint.rows import CheckpointRow, Removal, Spot, ThreadContent
from pancake_langgraph.checkpoint.store import DELETION_KEPT_S, ORPHANS_KEPT_S, StaleNeed
from tests.contract.redis_kit import LONG_S, filled, listed, put, put_writes, row, write

FOREVER = 10**13


@pytest.fixture
def client(valkey: Any) -> Iterator[redis.Redis]:
    valkey.reset()
    with valkey.client() as client:
        yield client


@pytest.fixture
def store(client: redis.Redis, valkey_url: str) -> Iterator[RedisStore]:
    store = RedisStore(valkey_url, timeout_s=LONG_S)
    yield store
    store.close()


def expiries_ms(client: redis.Redis, thread_id: str = "t") -> set[int]:
    """When the keys of a thread that exist expire; -1 is never."""
    return {client.pexpiretime(key) for key in thread_keys(thread_id).data if client.exists(key)}


# -- constructing -----------------------------------------------------------------------------------------------------


def test_constructing_imports_and_opens_nothing() -> None:
    code = (
        "import sys; from pancake_langgraph.checkpoint.redis_store import RedisStore; "
        "RedisStore('redis://nowhere.invalid:1/0').close(); sys.exit('redis' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("url", ["", "app.db", "http://host", "redis:/host", "mongodb://user:hush@host"])
def test_a_url_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://") as caught:
        RedisStore(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://:hush@host:port", "redis://:hush@host?socket_timeout=hush", "redis://[:hush@"]
)
def test_a_url_that_cannot_be_read_is_refused_with_the_first_call(url: str) -> None:
    with pytest.raises(ConfigError, match="percent-encoded") as caught:
        RedisStore(url).open()
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("rediss://ann:hush@host/2?ssl_check_hostname=False", "rediss://ann@host/2"),
        ("redis://:hush@host", "redis://host"),
        ("unix://ann@/run/redis.sock?password=hush", "unix://ann@/run/redis.sock"),
        ("redis+cluster://ann:hu@sh@host:7000", "redis+cluster://ann@host:7000"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://[::1]", "redis://[::1]"),
        ("unix:///run/redis.sock?password=hu@sh", "unix:///run/redis.sock"),
        ("redis://:hu/sh@host", "redis://…"),
        ("redis://:hu?sh@host", "redis://…"),
        ("redis://:hush", "redis://…"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, expected: str) -> None:
    assert shown(url) == expected


# -- keys and expiry --------------------------------------------------------------------------------------------------


def test_a_thread_has_a_fixed_number_of_keys(store: RedisStore, client: redis.Redis) -> None:
    for number in range(50):
        put(store, row(f"{number:02}", run_id="r"))
        put_writes(store, write(f"{number:02}"))
    expected = {*thread_keys("t").data, THREADS_KEY, FORMAT_KEY, run_key("r")}
    assert set(client.keys()) == expected


def test_delete_leaves_only_the_memory_of_it_and_that_for_a_day(store: RedisStore, client: redis.Redis) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    assert set(client.keys()) == {thread_keys("t").state, FORMAT_KEY}
    assert 0 < client.ttl(thread_keys("t").state) <= DELETION_KEPT_S
    with pytest.raises(Exception, match="deleted"):
        put(store, row("6", "2"))
    assert set(client.keys()) == {thread_keys("t").state, thread_keys("t").dead, FORMAT_KEY}
    assert 0 < client.ttl(thread_keys("t").dead) <= DELETION_KEPT_S
    store.write_thread("t", ThreadContent((row("1"),), (), {}), expires_at_s=None)
    assert set(client.keys()) == {thread_keys("t").rows, thread_keys("t").index, THREADS_KEY, FORMAT_KEY}


def test_a_rewrite_to_nothing_leaves_no_key(store: RedisStore, client: redis.Redis) -> None:
    filled(store)
    every = frozenset({Spot("", "1"), Spot("", "2")})
    store.rewrite_thread("t", lambda _: Removal(every, frozenset(), frozenset()))
    assert set(client.keys()) == {FORMAT_KEY}


def test_all_keys_of_a_thread_expire_in_the_same_millisecond(store: RedisStore, client: redis.Redis) -> None:
    at_s = time.time() + 1_000
    filled(store)
    assert expiries_ms(client) == {-1}
    for step, action in enumerate(
        (
            lambda at: put(store, row("3", run_id="s"), expires_at_s=at),
            lambda at: put_writes(store, write("3"), expires_at_s=at),
            lambda at: store.touch("t", expires_at_s=at),
            lambda at: store.write_thread("t", store.read_thread("t"), expires_at_s=at),
        )
    ):
        action(at_s + step)
        assert expiries_ms(client) == {int((at_s + step) * 1_000)}
        store.rewrite_thread("t", lambda _: Removal(frozenset(), frozenset({Spot("", "1")}), frozenset()))
        assert expiries_ms(client) == {int((at_s + step) * 1_000)}
    put(store, row("4"))
    assert expiries_ms(client) == {-1}


def test_a_new_thread_has_its_expiry_from_the_first_write_on(store: RedisStore, client: redis.Redis) -> None:
    at_s = time.time() + 1_000
    filled(store, expires_at_s=at_s)
    assert expiries_ms(client) == {int(at_s * 1_000)}
    assert len([key for key in thread_keys("t").data if client.exists(key)]) == 5


def test_writes_without_a_checkpoint_expire_and_name_no_thread(store: RedisStore, client: redis.Redis) -> None:
    keys = thread_keys("t")
    soon_s = time.time() + 1_000
    put_writes(store, write("6"), expires_at_s=soon_s)
    assert expiries_ms(client) == {int(soon_s * 1_000)}
    put_writes(store, write("6", 1))
    [at_ms] = expiries_ms(client)
    assert soon_s * 1_000 < at_ms <= (time.time() + ORPHANS_KEPT_S) * 1_000
    assert set(client.keys()) == {keys.writes, keys.index, FORMAT_KEY}
    put(store, row("6"))
    assert expiries_ms(client) == {-1}
    assert client.smembers(THREADS_KEY) == {b"t"}


def test_writes_that_meet_the_first_checkpoint_on_its_way_set_no_expiry(
    store: RedisStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, answers = redis_store.has_no_checkpoint, []

    def look(session: Any, keys: Any) -> bool:
        answers.append(original(session, keys))
        if len(answers) == 1:
            put(store, row("1"))
        return answers[-1]

    monkeypatch.setattr(redis_store, "has_no_checkpoint", look)
    put_writes(store, write("1"))
    assert answers == [True]  # the second attempt sees the checkpoint with its first question
    assert expiries_ms(client) == {-1}
    assert store.get_writes("t", Spot("", "1")) == (write("1"),)


def test_the_set_of_a_run_outlives_its_threads(store: RedisStore, client: redis.Redis) -> None:
    def expiry_ms(run_id: str) -> int:
        found = client.pexpiretime(run_key(run_id))
        return FOREVER if found == -1 else found

    soon_s = time.time() + 10_000
    put(store, row("1", run_id="r"), expires_at_s=soon_s)
    first = expiry_ms("r")
    assert soon_s * 1_000 < first < FOREVER
    put(store, row("2", run_id="s"), expires_at_s=soon_s + 1)  # within the margin: r is left as it is
    assert expiry_ms("r") == first
    put(store, row("3", run_id="s"), expires_at_s=soon_s + 50_000)
    assert expiry_ms("r") > (soon_s + 50_000) * 1_000
    store.touch("t", expires_at_s=soon_s + 500_000)
    assert min(expiry_ms("r"), expiry_ms("s")) > (soon_s + 500_000) * 1_000
    put(store, row("1", run_id="r"), thread_id="u")
    assert expiry_ms("r") == FOREVER
    put(store, row("4", run_id="r"), expires_at_s=soon_s + 5_000_000)
    assert expiry_ms("r") == FOREVER
    put(store, row("5"))
    assert expiry_ms("s") == FOREVER


def test_names_of_threads_that_are_gone_are_dropped(store: RedisStore, client: redis.Redis) -> None:
    filled(store)
    client.sadd(THREADS_KEY, "ghost", "ghost2")
    assert list(store.threads()) == ["t"]
    assert client.smembers(THREADS_KEY) == {b"t"}
    client.sadd(THREADS_KEY, "ghost")
    assert store.expire(now_s=time.time()) == 0
    assert client.smembers(THREADS_KEY) == {b"t"}


def test_a_name_that_was_dropped_while_the_thread_came_back_is_restored(store: RedisStore) -> None:
    filled(store)
    store._registry.remove("t", ["r"])
    assert list(store.threads()) == ["t"]
    assert list(store.threads_of_run("r")) == ["t"]


# -- lost parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["rows", "index", "writes"])
def test_a_lost_key_is_reported_and_not_read_as_an_empty_thread(
    store: RedisStore, client: redis.Redis, lost: str
) -> None:
    filled(store)
    client.delete(getattr(thread_keys("t"), lost))
    with pytest.raises(CorruptCheckpoint, match="parts of thread 't' are gone"):
        store.read_thread("t")
    with pytest.raises(CorruptCheckpoint, match="gone"):
        store.rewrite_thread("t", lambda _: Removal(frozenset(), frozenset(), frozenset()))
    if lost != "writes":
        with pytest.raises(CorruptCheckpoint, match="noeviction"):
            listed(store)
        with pytest.raises(CorruptCheckpoint, match="noeviction"):
            store.get_checkpoint("t", "", None)
    if lost == "rows":
        with pytest.raises(CorruptCheckpoint, match="noeviction"):
            store.get_checkpoint("t", "", "1")
    else:
        with pytest.raises(CorruptCheckpoint, match="noeviction"):
            store.get_writes("t", Spot("", "2"))
    store.delete_thread("t", deletion_id="5")
    assert listed(store) == []


def test_a_thread_that_lost_its_rows_is_still_named(store: RedisStore, client: redis.Redis) -> None:
    filled(store)
    put(store, row("1", run_id="r"), thread_id="u")
    for thread_id in ("t", "u"):
        client.delete(thread_keys(thread_id).rows)
    assert sorted(store.threads()) == ["t", "u"]
    put_writes(store, write("2", 1))
    assert expiries_ms(client) == {-1}


def flip_mark(client: redis.Redis, checkpoint_id: str) -> None:
    """Flip the one bit of a row that says whether it is hidden."""
    rows, field = thread_keys("t").rows, b"\x00" + checkpoint_id.encode()
    data = client.hget(rows, field)
    body = b"\xc4\x04body"
    assert data is not None
    head = data.removesuffix(body)
    assert head[-1] in (0xC2, 0xC3)
    client.hset(rows, field, head[:-1] + bytes([head[-1] ^ 1]) + body)


@pytest.mark.parametrize("flipped", ["1", "2", "3"])
def test_a_damaged_mark_as_hidden_is_reported(store: RedisStore, client: redis.Redis, flipped: str) -> None:
    filled(store)
    put(store, row("3"))
    flip_mark(client, flipped)
    with pytest.raises(CorruptCheckpoint, match=f"checkpoint {flipped}: the row's mark as hidden is damaged"):
        store.get_checkpoint("t", "", flipped)
    with pytest.raises(CorruptCheckpoint):
        store.read_thread("t")
    if flipped != "1":
        with pytest.raises(CorruptCheckpoint, match="mark as hidden"):
            listed(store)
    if flipped == "3":
        with pytest.raises(CorruptCheckpoint, match="mark as hidden"):
            store.get_checkpoint("t", "", None)
    flip_mark(client, flipped)
    assert listed(store) == ["3", "2"]
    assert len(store.read_thread("t").rows) == 3


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_row_that_is_hidden_between_two_questions_is_not_damaged(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, is_exact: bool
) -> None:
    put(store, row("1"))
    put(store, row("2", "1"))
    original, first = layout.unpack_row, iter([True])

    def unpack(field: bytes, data: bytes) -> CheckpointRow:
        found = original(field, data)
        return replace(found, is_hidden=True) if next(first, False) else found  # as one sees it that asks too early

    monkeypatch.setattr(layout, "unpack_row", unpack)
    if is_exact:
        assert store.get_checkpoint("t", "", "2") == row("2", "1")
    else:
        assert listed(store) == ["2", "1"]


def test_a_damaged_row_is_reported(store: RedisStore, client: redis.Redis) -> None:
    filled(store)
    keys = thread_keys("t")
    for data, error in ((b"\xc1", CorruptCheckpoint), (b"\x01", CorruptCheckpoint), (b"\x91\x01", CorruptCheckpoint)):
        client.hset(keys.rows, b"\x002", data)
        with pytest.raises(error):
            store.get_checkpoint("t", "", "2")
    client.hset(keys.rows, b"\x002", b"\x95\x02\x01\x01\x01\x01")
    with pytest.raises(SchemaMismatch, match="format 2"):
        store.get_checkpoint("t", "", "2")


def test_a_later_format_of_the_database_is_refused(client: redis.Redis, store: RedisStore) -> None:
    client.set(FORMAT_KEY, "2")
    with pytest.raises(SchemaMismatch, match="another database number"):
        listed(store)
    assert client.keys() == [FORMAT_KEY]


def test_a_key_of_another_program_is_refused(client: redis.Redis, store: RedisStore) -> None:
    client.set(thread_keys("t").rows, "text")
    with pytest.raises(SchemaMismatch, match="something else"):
        listed(store)
    with pytest.raises(SchemaMismatch, match="something else"):
        put(store, row("1"))


# -- at the same time -------------------------------------------------------------------------------------------------


def test_parallel_puts_of_one_thread_do_not_get_into_each_others_way(store: RedisStore, client: redis.Redis) -> None:
    put(store, row("0", run_id="r"))
    client.config_resetstat()

    def work(number: int) -> None:
        for step in range(25):
            put(store, row(f"{number}-{step}", run_id="r"), needs=Spot("", "0"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    stats = client.info("commandstats")
    assert stats["cmdstat_exec"]["calls"] == 200  # each went through with the first attempt
    assert "cmdstat_pexpireat" not in stats


def test_a_put_is_made_again_when_its_need_is_removed_in_between(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, row("1"))
    put(store, row("2"))
    original, first = Membership.commands, iter([True])

    def commands(self: Membership, *args: Any) -> Any:
        if next(first, False):
            store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "1")}), frozenset(), frozenset()))
        return original(self, *args)

    monkeypatch.setattr(Membership, "commands", commands)
    with pytest.raises(StaleNeed):
        put(store, row("3"), needs=Spot("", "1"))
    assert listed(store) == ["2"]


@pytest.mark.parametrize("how", ["delete", "write"])
def test_a_put_notices_a_thread_replaced_in_between(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    put(store, row("1"))
    original, first = Membership.commands, iter([True])

    def commands(self: Membership, *args: Any) -> Any:
        if next(first, False):
            if how == "delete":
                store.delete_thread("t", deletion_id="5")
            else:
                store.write_thread("t", ThreadContent((row("2"),), (), {}), expires_at_s=None)
        return original(self, *args)

    monkeypatch.setattr(Membership, "commands", commands)
    with pytest.raises(StaleNeed if how == "write" else Exception, match=None if how == "write" else "deleted"):
        put(store, row("3", "1"), needs=Spot("", "1"))
    assert listed(store) == ([] if how == "delete" else ["2"])


def test_a_rewrite_decides_again_when_others_wrote_meanwhile(store: RedisStore) -> None:
    filled(store)
    seen: list[int] = []

    def decide(content: ThreadContent) -> Removal:
        seen.append(len(content.rows))
        if len(seen) <= 3:
            put(store, row(f"{len(seen) + 2}"))
        return Removal(frozenset({Spot("", "1")}), frozenset(), frozenset())

    store.rewrite_thread("t", decide)
    assert seen == [2, 3, 4, 5]
    assert {each.spot.checkpoint_id for each in store.read_thread("t").rows} == {"2", "3", "4", "5"}


def test_a_rewrite_gives_up_when_others_never_stop(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pancake_langgraph.checkpoint.redis_store._ATTEMPTS", 4)
    filled(store)
    seen: list[int] = []

    def decide(content: ThreadContent) -> Removal:
        seen.append(len(content.rows))
        put(store, row(f"{len(seen) + 2}"))
        return Removal(frozenset({Spot("", "1")}), frozenset(), frozenset())

    with pytest.raises(StoreUnavailable, match="changed during each of 4 attempts"):
        store.rewrite_thread("t", decide)
    assert seen == [2, 3, 4, 5]
    assert store.get_checkpoint("t", "", "1") is not None


def test_a_fork_gets_its_own_connections(valkey_url: str, client: redis.Redis) -> None:
    code = """
import os, sys
from pancake_langgraph.checkpoint.redis_store import RedisStore
from pancake_langgraph.checkpoint.rows import CheckpointRow, PutCheckpoint, Spot

def put(store, name, number):
    row = CheckpointRow(Spot("", f"{name}{number:03}"), None, "", b"body")
    store.put_checkpoint(PutCheckpoint("t", row), expires_at_s=None)

store = RedisStore(sys.argv[1], timeout_s=60.0)
put(store, "parent", 0)
pid = os.fork()
name = "parent" if pid else "child"
for number in range(1, 101):
    put(store, name, number)
    found = store.get_checkpoint("t", "", f"{name}{number:03}")
    assert found is not None and found.spot.checkpoint_id == f"{name}{number:03}", found
store.close()
if pid:
    _, status = os.waitpid(pid, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", code, valkey_url], check=False).returncode == 0
    assert client.hlen(thread_keys("t").rows) == 201
