"""The store over a cluster of Redis servers."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from redis.crc import key_slot

from pancake_langgraph._errors import StoreUnavailable
from pancake_langgraph.checkpoint.redis_keys import thread_keys
from pancake_langgraph.checkpoint.redis_store import RedisStore
from pancake_langgraph.checkpoint.rows import Spot
from tests.contract.redis_kit import LONG_S, listed, put, row
from tests.valkey_servers import RunningCluster, RunningServer, closing_all, free_ports


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


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


# -- a node that is lost --------------------------------------------------------------------------------------------

NAMES = [f"thread-{number}" for number in range(30)]


def has_checkpoint(store: RedisStore, thread_id: str, checkpoint_id: str) -> bool:
    return store.get_checkpoint(thread_id, "", checkpoint_id) == row(checkpoint_id)


def is_down(action: Callable[[], object]) -> bool:
    """Say whether a call gets the typed error; other errors go up."""
    try:
        action()
    except StoreUnavailable:
        return True
    return False


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., RunningCluster]]:
    """Starts clusters that keep what they acknowledge."""
    with closing_all() as clusters:

        def start(**config: Any) -> RunningCluster:
            cluster = RunningCluster(free_ports(6), appendonly="yes", appendfsync="always", **config)
            clusters.append(cluster)
            return cluster

        yield start


def put_all(store: RedisStore, names: list[str], checkpoint_id: str) -> None:
    for name in names:
        put(store, row(checkpoint_id), thread_id=name)


def split(cluster: RunningCluster, lost: RunningServer) -> tuple[list[str], list[str]]:
    """Return the threads that lie on a node, and the others."""
    is_on = {name: cluster.node_of(thread_keys(name).rows) is lost for name in NAMES}
    return [name for name in NAMES if is_on[name]], [name for name in NAMES if not is_on[name]]


def test_a_killed_node_costs_only_its_own_threads_where_the_cluster_allows_that(start_cluster: Any) -> None:
    cluster = start_cluster(**{"cluster-require-full-coverage": "no"})
    store = RedisStore(cluster.url, timeout_s=LONG_S)
    put_all(store, NAMES, "0")
    for step, lost in enumerate(cluster.nodes, start=1):
        down, up = split(cluster, lost)
        lost.kill()
        for name in down:
            for action in (partial(put_all, store, [name], f"{step}"), partial(store.get_checkpoint, name, "", None)):
                with pytest.raises(StoreUnavailable, match="no connection"):
                    action()
        put_all(store, up, f"{step}")
        assert all(has_checkpoint(store, name, f"{step}") for name in up)
        with pytest.raises(StoreUnavailable):  # one of them, or the set of all, lies on that node
            put_all(store, [f"new-{step}-{number}" for number in range(30)], "0")
        lost.start()
        while is_down(partial(put_all, store, down, f"{step}")):
            time.sleep(0.02)
        for name in NAMES:
            assert all(has_checkpoint(store, name, f"{number}") for number in range(step + 1))
        assert set(NAMES) <= set(store.threads())
    store.close()


def test_a_node_that_hangs_is_a_typed_error_in_bounded_time_for_its_own_threads(start_cluster: Any) -> None:
    cluster = start_cluster(**{"cluster-require-full-coverage": "no"})
    patient, impatient = RedisStore(cluster.url, timeout_s=LONG_S), RedisStore(cluster.url, timeout_s=0.2)
    lost = cluster.nodes[0]  # the one that the URL names
    down, up = (names[:3] for names in split(cluster, lost))
    put_all(patient, [*down, *up], "0")
    while is_down(lambda: [impatient.get_checkpoint(name, "", None) for name in (*down, *up)]):
        time.sleep(0.02)  # on a machine with much else to do this may take longer, too
    os.kill(lost.pid, signal.SIGSTOP)
    try:
        for name in down:
            with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.2 s|none of its nodes answers"):
                impatient.get_checkpoint(name, "", None)
        put_all(patient, up, "1")
        while is_down(partial(put_all, impatient, up, "2")):
            time.sleep(0.02)
    finally:
        os.kill(lost.pid, signal.SIGCONT)
    put_all(patient, down, "2")
    assert all(has_checkpoint(patient, name, number) for name in (*down, *up) for number in "02")
    patient.close()
    impatient.close()


def test_a_lost_node_is_a_typed_error_for_all_where_the_cluster_wants_every_slot(start_cluster: Any) -> None:
    cluster = start_cluster(**{"cluster-node-timeout": 1_000})
    store = RedisStore(cluster.url, timeout_s=LONG_S)
    for name in NAMES:
        put(store, row("0"), thread_id=name)
    cluster.nodes[1].kill()
    for name in NAMES:
        while not is_down(partial(put_all, store, [name], "1")):
            time.sleep(0.02)  # until the others have noticed
    with pytest.raises(StoreUnavailable):
        list(store.threads())
    cluster.nodes[1].start()
    for name in NAMES:
        while is_down(partial(put_all, store, [name], "2")):
            time.sleep(0.02)
        assert has_checkpoint(store, name, "0")
        assert has_checkpoint(store, name, "2")
    assert sorted(store.threads()) == sorted(NAMES)
    store.close()
