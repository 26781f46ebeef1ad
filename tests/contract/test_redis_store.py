"""What is special about the store over Redis: keys, expiry, trouble with the server, rights, clusters."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint, SchemaMismatch, StoreUnavailable
from pancake_langgraph.checkpoint.redis_commands import Membership
from pancake_langgraph.checkpoint.redis_keys import FORMAT_KEY, THREADS_KEY, run_key, thread_keys
from pancake_langgraph.checkpoint.redis_link import CONNECT_COMMANDS, POLICY_COMMANDS, shown
from pancake_langgraph.checkpoint.redis_store import COMMANDS, DELETION_KEPT_S, RedisStore
from pancake_langgraph.checkpoint.rows import (
    CheckpointRow,
    PutCheckpoint,
    PutWrites,
    Removal,
    Spot,
    ThreadContent,
    WriteRow,
)
from pancake_langgraph.checkpoint.store import StaleNeed

FOREVER = 10**13
LONG_S = 60.0


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


def row(
    checkpoint_id: str, parent_id: str | None = None, *, ns: str = "", run_id: str = "", hidden: bool = False
) -> CheckpointRow:
    return CheckpointRow(Spot(ns, checkpoint_id), parent_id, run_id, b"body", is_hidden=hidden)


def write(checkpoint_id: str, idx: int = 0) -> WriteRow:
    return WriteRow(Spot("", checkpoint_id), "", "task", idx, "channel", b"write")


def put(
    store: RedisStore,
    what: CheckpointRow,
    *,
    thread_id: str = "t",
    needs: Spot | None = None,
    expires_at_s: float | None = None,
) -> None:
    digest = what.spot.checkpoint_id.encode().rjust(20)
    store.put_checkpoint(PutCheckpoint(thread_id, what, {digest: b"element"}, needs), expires_at_s=expires_at_s)


def put_writes(store: RedisStore, *rows: WriteRow, expires_at_s: float | None = None) -> None:
    store.put_writes(PutWrites("t", rows), expires_at_s=expires_at_s)


def listed(store: RedisStore) -> list[str]:
    return [each.spot.checkpoint_id for each in store.list_checkpoints("t", None, before_id=None, limit=1_000)]


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


def filled(store: RedisStore, *, expires_at_s: float | None = None) -> None:
    put(store, row("1", hidden=True, run_id="r"), expires_at_s=expires_at_s)
    put(store, row("2", run_id="r"), expires_at_s=expires_at_s)
    put_writes(store, write("2"), expires_at_s=expires_at_s)


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


# -- trouble ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster"])
def test_no_server_is_a_typed_error_without_the_password(unused_port: int, scheme: str) -> None:
    store = RedisStore(f"{scheme}://ann:hush@127.0.0.1:{unused_port}", timeout_s=LONG_S)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=f"{unused_port}") as caught:
            put(store, row("1"))
        assert "hush" not in str(caught.value)
        assert f"ann@127.0.0.1:{unused_port}" in str(caught.value)
    store.close()


def test_no_socket_is_a_typed_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = RedisStore("unix:///nowhere/redis.sock")
    with pytest.raises(StoreUnavailable, match="no connection"):
        store.get_checkpoint("t", "", None)


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_a_server_that_never_answers_is_a_typed_error_in_bounded_time(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = RedisStore(f"{scheme}://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(StoreUnavailable, match=r"did not answer within 0.05 s|none of its nodes answers"):
            put(store, row("1"))
        store.close()


def test_what_was_acknowledged_is_there_after_a_restart(start_valkey: Any) -> None:
    server = start_valkey(appendonly="yes", appendfsync="always")
    store = RedisStore(server.url, timeout_s=LONG_S)
    put(store, row("1"))
    server.stop()
    for action in (lambda: put(store, row("2")), lambda: listed(store), lambda: list(store.threads())):
        with pytest.raises(StoreUnavailable):
            action()
    server.start()
    assert listed(store) == ["1"]
    put(store, row("2"), needs=Spot("", "1"))
    assert listed(store) == ["2", "1"]
    store.close()
    server.close()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(valkey_url: str, client: redis.Redis) -> None:
    store = RedisStore(valkey_url, timeout_s=1.0)
    put(store, row("1"))
    client.client_pause(1_000_000, all=False)  # writes only
    try:
        with pytest.raises(StoreUnavailable, match="did not answer within 1 s"):
            put(store, row("2"))
    finally:
        client.client_unpause()
    assert store.get_checkpoint("t", "", "1") == row("1")
    put(store, row("3"), needs=Spot("", "1"))
    assert store.get_checkpoint("t", "", None) == row("3")
    store.close()


def test_a_full_server_is_a_typed_error_and_the_thread_goes_on_later(store: RedisStore, client: redis.Redis) -> None:
    put(store, row("1"))
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreUnavailable, match="out of memory"):
            put(store, row("2"))
        with pytest.raises(StoreUnavailable, match="out of memory"):
            put_writes(store, write("1"))
        assert listed(store) == ["1"]
    finally:
        client.config_set("maxmemory", 0)
    put(store, row("2"), needs=Spot("", "1"))
    assert store.get_writes("t", Spot("", "1")) == ()


def test_a_replica_is_named_as_such(start_valkey: Any, unused_port: int) -> None:
    server = start_valkey(replicaof=f"127.0.0.1 {unused_port}")
    store = RedisStore(server.url, timeout_s=LONG_S)
    with pytest.raises(StoreUnavailable, match="is a replica"):
        put(store, row("1"))
    store.close()
    server.close()


def test_a_command_that_is_not_there_is_named(start_valkey: Any) -> None:
    server = start_valkey(**{"rename-command": 'HSETNX ""'})
    store = RedisStore(server.url, timeout_s=LONG_S)
    with pytest.raises(StoreUnavailable, match="does not know the command HSETNX; use Redis 6") as caught:
        put(store, row("1"))
    assert "\n" not in str(caught.value)
    assert "element" not in str(caught.value)
    assert listed(store) == []
    store.close()
    server.close()


# -- rights -----------------------------------------------------------------------------------------------------------


def user_url(client: redis.Redis, valkey_url: str, *rules: str) -> str:
    client.execute_command("ACL", "SETUSER", "ann", "reset", "on", ">hush", *rules)
    return valkey_url.replace("unix://", "unix://ann@") + "?password=hush"


@pytest.mark.parametrize("missing", ["watch", "multi", "exec", "hset", "hsetnx", "zadd", "persist", "sadd", "get"])
def test_a_forbidden_command_is_named_in_one_line(valkey_url: str, client: redis.Redis, missing: str) -> None:
    rights = [f"+{command}" for command in COMMANDS if command != missing]
    with_right = RedisStore(user_url(client, valkey_url, "~pancake:*", *rights), timeout_s=LONG_S)
    with pytest.raises(StoreUnavailable, match=f"may not call {missing.upper()}; allow it: .{missing}") as caught:
        put(with_right, row("1"))
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)
    with_right.close()
    assert not client.exists(thread_keys("t").rows)


def test_forbidden_keys_are_named(valkey_url: str, client: redis.Redis) -> None:
    store = RedisStore(user_url(client, valkey_url, "~other:*", "+@all"), timeout_s=LONG_S)
    with pytest.raises(StoreUnavailable, match="allow them: ~pancake:"):
        put(store, row("1"))
    store.close()


def test_a_wrong_password_is_a_typed_error(valkey_url: str, client: redis.Redis) -> None:
    url = user_url(client, valkey_url, "~*", "+@all").replace("hush", "wrong")
    store = RedisStore(url, timeout_s=LONG_S)
    with pytest.raises(StoreUnavailable, match="refused the name or password") as caught:
        put(store, row("1"))
    assert "wrong" not in str(caught.value)
    store.close()


def test_no_command_is_called_that_is_not_listed_and_none_is_listed_in_vain(
    store: RedisStore, client: redis.Redis
) -> None:
    client.config_resetstat()
    at_s = time.time() + 1_000
    filled(store)
    filled(store, expires_at_s=at_s)
    put_writes(store, write("2", -1))
    put(store, row("3", run_id="r"), needs=Spot("", "2"), expires_at_s=at_s)
    put(store, row("4", run_id="s"), expires_at_s=at_s)
    store.touch("t", expires_at_s=at_s + 1_000_000)
    listed(store)
    store.get_checkpoint("t", "", "2")
    store.get_writes("t", Spot("", "2"))
    store.get_elements("t", [b"2".rjust(20)])
    list(store.threads())
    store.threads_of_run("r")
    removal = Removal(frozenset({Spot("", "1")}), frozenset({Spot("", "2")}), frozenset({b"1".rjust(20)}))
    store.rewrite_thread("t", lambda _: removal)
    store.write_thread("u", store.read_thread("t"), expires_at_s=None)
    store.delete_thread("t", deletion_id="5")
    with pytest.raises(Exception, match="deleted"):
        put(store, row("6", "1"))
    with pytest.raises(Exception, match="deleted"):
        put_writes(store, write("6"))
    with pytest.raises(StaleNeed):
        put(store, row("7"), needs=Spot("", "1"))
    client.delete(thread_keys("u").rows)
    with pytest.raises(CorruptCheckpoint):
        store.get_checkpoint("u", "", None)
    used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    ours = {*COMMANDS, *POLICY_COMMANDS}
    assert used - {"config|resetstat", "del"} <= ours  # those two are this test's own
    assert set(COMMANDS) <= used
    assert set(CONNECT_COMMANDS) == {"select"}


# -- eviction ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def evicting(client: redis.Redis) -> Iterator[None]:
    client.config_set("maxmemory-policy", "allkeys-lru")
    yield
    client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.usefixtures("evicting")
@pytest.mark.parametrize("right", POLICY_COMMANDS)
def test_a_server_that_may_evict_is_warned_about_once(
    valkey_url: str, client: redis.Redis, caplog: pytest.LogCaptureFixture, right: str
) -> None:
    rights = [f"+{command}" for command in (*COMMANDS, right)]
    store = RedisStore(user_url(client, valkey_url, "~pancake:*", *rights), timeout_s=LONG_S)
    with caplog.at_level(logging.WARNING):
        put(store, row("1"))
        put(store, row("2"))
        store.open()
    store.close()
    [record] = caplog.records
    assert "maxmemory-policy allkeys-lru" in record.getMessage()
    assert "hush" not in record.getMessage()


@pytest.mark.usefixtures("evicting")
def test_nothing_is_said_where_the_policy_may_not_be_known(
    valkey_url: str, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    rights = [f"+{command}" for command in COMMANDS]
    store = RedisStore(user_url(client, valkey_url, "~pancake:*", *rights), timeout_s=LONG_S)
    with caplog.at_level(logging.INFO):
        put(store, row("1"))
    store.close()
    assert caplog.records == []


def test_nothing_is_said_about_a_server_that_keeps_what_it_has(
    store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        put(store, row("1"))
    assert caplog.records == []


# -- clusters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thread_id", ["", "a", "{a}", "}{", "a}b", "{}", "x" * 2_000, "ä", "{{}}", "%"])
def test_all_keys_of_a_thread_are_in_one_slot(thread_id: str) -> None:
    keys = thread_keys(thread_id)
    assert len({key_slot(key) for key in (*keys.data, keys.state, keys.dead)}) == 1
    assert len({*keys.data, keys.state, keys.dead}) == 7
    tag = keys.rows[keys.rows.index(b"{") + 1 : keys.rows.index(b"}")]
    assert tag
    assert key_slot(keys.rows) == key_slot(tag)


@pytest.fixture
def cluster_store(valkey_cluster: Any) -> Iterator[RedisStore]:
    valkey_cluster.reset()
    store = RedisStore(valkey_cluster.url, timeout_s=LONG_S)
    yield store
    store.close()


def test_threads_spread_over_the_nodes_of_a_cluster(cluster_store: RedisStore, valkey_cluster: Any) -> None:
    names = [f"thread-{number}" for number in range(40)]
    for name in names:
        put(cluster_store, row("1", run_id="r"), thread_id=name)
    assert sorted(cluster_store.threads()) == sorted(names)
    assert sorted(cluster_store.threads_of_run("r")) == sorted(names)
    for node in valkey_cluster.nodes:
        with node.client() as client:
            assert client.dbsize() > 4


def test_a_slot_that_moved_is_followed(cluster_store: RedisStore) -> None:
    put(cluster_store, row("1"))
    slots = cluster_store._link._client.nodes_manager.slots_cache
    wrong = {slot: slots[(slot + 6_000) % 16_384] for slot in range(16_384)}
    for action in (lambda: put(cluster_store, row("2"), needs=Spot("", "1")), lambda: listed(cluster_store)):
        slots = cluster_store._link._client.nodes_manager.slots_cache
        slots.update(wrong)
        action()
    assert listed(cluster_store) == ["2", "1"]


def test_a_node_of_a_cluster_under_a_plain_url_is_named_as_such(valkey_cluster: Any) -> None:
    valkey_cluster.reset()
    errors = []
    for node in valkey_cluster.nodes:
        store = RedisStore(node.url, timeout_s=LONG_S)
        try:
            put(store, row("1"))
        except StoreUnavailable as exc:
            errors.append(str(exc))
        store.close()
    assert errors
    assert all("redis+cluster://" in error for error in errors)


def test_a_lone_server_under_a_cluster_url_is_named_as_such(start_valkey: Any, unused_port: int) -> None:
    server = start_valkey(port=unused_port)
    store = RedisStore(server.url.replace("redis://", "redis+cluster://"), timeout_s=LONG_S)
    with pytest.raises(StoreUnavailable, match="is no cluster"):
        put(store, row("1"))
    store.close()
    server.close()
