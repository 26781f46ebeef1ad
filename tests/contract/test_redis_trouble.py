"""The store over Redis when the server is gone, full, of another kind, or allows too little."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from pancake_langgraph._errors import CorruptCheckpoint, StoreUnavailable
from pancake_langgraph.checkpoint.redis_keys import thread_keys
from pancake_langgraph.checkpoint.redis_link import CONNECT_COMMANDS, POLICY_COMMANDS
from pancake_langgraph.checkpoint.redis_store import COMMANDS, RedisStore
from pancake_langgraph.checkpoint.rows import Removal, Spot
from pancake_langgraph.checkpoint.store import StaleNeed
from tests.contract.redis_kit import LONG_S, filled, listed, put, put_writes, row, write


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
