"""Where threads come from: SqliteSaver's file, or any LangGraph checkpointer that can list."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint, StoreUnavailable
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.foreign import ForeignCheckpoint, ForeignWrite, Source, of_other_saver
from pancake_langgraph.checkpoint.foreign_redis import RedisSource
from pancake_langgraph.checkpoint.foreign_serde import StrictSerializer, allowed_by, strict_serializer
from pancake_langgraph.checkpoint.observed import ObservedSaver
from pancake_langgraph.checkpoint.registry import REDIS_SCHEMES
from pancake_langgraph.checkpoint.rows import Spot

POSTGRES_SCHEMES: Final = ("postgresql://", "postgres://")
#: Where langgraph-checkpoint-redis keeps its savers.
_REDIS_PACKAGE: Final = "langgraph.checkpoint.redis"


# -- any saver ------------------------------------------------------------------------------------------------------


class SaverSource:
    """A LangGraph checkpointer that can list.  Values are read through its own serializer, made strict.

    The saver itself is left as it is.  A saver that does not read through its `serde` decides itself what it makes.
    """

    def __init__(self, saver: BaseCheckpointSaver[Any], codec: Codec) -> None:
        """Read from a copy of `saver`.

        Args:
            saver: The saver; it has to implement `list`.
            codec: Says which types may come in.

        Raises:
            ConfigError: if its serializer is not known.
        """
        serde, self._strict = strict_serializer(saver.serde, allowed_by(codec))
        self._saver: Any = copy.copy(saver)
        self._saver.serde = serde

    def threads(self) -> Iterable[str]:
        """See `Source.threads`."""
        return dict.fromkeys(str(found.config["configurable"]["thread_id"]) for found in self._list(None))

    def checkpoints(self, thread_id: str) -> Iterator[ForeignCheckpoint]:
        """See `Source.checkpoints`."""
        for found in self._list({"configurable": {"thread_id": thread_id}}):
            where = found.config["configurable"]
            if str(where["thread_id"]) != thread_id:  # a search that takes similar ids for the same
                continue
            parent = (found.parent_config or {}).get("configurable", {}).get("checkpoint_id")
            yield ForeignCheckpoint(
                Spot(where.get("checkpoint_ns") or "", where["checkpoint_id"]),
                parent,
                found.checkpoint,
                found.metadata,
                numbered(found.pending_writes or []),
            )

    def _list(self, config: RunnableConfig | None) -> Iterator[CheckpointTuple]:
        self._strict.refusal = None
        with of_other_saver():
            for found in self._saver.list(config):
                if self._strict.refusal is not None:  # swallowed by the saver
                    raise self._strict.refusal
                yield found
            if self._strict.refusal is not None:
                raise self._strict.refusal


def numbered(writes: Iterable[tuple[str, str, Any]]) -> tuple[ForeignWrite, ...]:
    """Give pending writes, which come in order, the numbers they had, and paths that keep the order of their tasks."""
    counts: dict[str, int] = {}
    tasks: dict[str, list[ForeignWrite]] = {}
    for task_id, channel, value in writes:
        idx = WRITES_IDX_MAP.get(channel)
        if idx is None:
            idx = counts.get(task_id, 0)
            counts[task_id] = idx + 1
        tasks.setdefault(task_id, []).append(ForeignWrite("", task_id, idx, channel, value))
    is_sorted = list(tasks) == sorted(tasks)
    return tuple(
        replace(write, task_path="" if is_sorted else f"{number:06d}")
        for number, task in enumerate(tasks.values())
        for write in task
    )


def open_source(
    other: BaseCheckpointSaver[Any] | str | os.PathLike[str], codec: Codec
) -> contextlib.AbstractContextManager[Source]:
    """Open another saver, or what it stored: a file of SqliteSaver, or a URL of Postgres or Redis.

    Raises:
        ConfigError: if it is none of these.
    """
    while isinstance(other, ObservedSaver):
        other = other.inner
    if isinstance(other, BaseCheckpointSaver):
        return contextlib.nullcontext(_saver_source(other, codec))
    if not isinstance(other, str | os.PathLike):
        raise ConfigError(
            f"cannot import from a {type(other).__name__}: pass a LangGraph checkpointer, a file or a URL"
        )
    where = os.fspath(other)
    if where.startswith(POSTGRES_SCHEMES):
        return postgres_source(where, codec)
    if where.startswith(REDIS_SCHEMES):
        return redis_source(where, codec)
    return sqlite_source(Path(where), codec)


def _saver_source(saver: BaseCheckpointSaver[Any], codec: Codec) -> Source:
    names = {
        kind.__name__ for kind in type(saver).__mro__ if kind.__module__.split(".")[:3] == _REDIS_PACKAGE.split(".")
    }
    if not names:
        return SaverSource(saver, codec)
    if any(name.startswith("Async") for name in names):
        raise ConfigError(
            f"cannot import from a {type(saver).__name__}: its connection belongs to an event loop; pass the URL in "
            "place of the saver"
        )
    return RedisSource(saver, codec)


# -- PostgresSaver and langgraph-checkpoint-redis --------------------------------------------------------------------


class PostgresSource(SaverSource):
    """What langgraph-checkpoint-postgres stored."""

    def threads(self) -> Iterable[str]:
        """See `Source.threads`.  Its `list` would fetch all values of all threads at once."""
        query = "SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id"
        with of_other_saver():
            return [str(row["thread_id"]) for row in self._saver.conn.execute(query)]


@contextlib.contextmanager
def postgres_source(dsn: str, codec: Codec) -> Iterator[PostgresSource]:
    """Connect to what langgraph-checkpoint-postgres stored.

    Raises:
        ConfigError: if that package is missing.
        StoreUnavailable: if the server does not answer.
    """
    module = _package("langgraph.checkpoint.postgres", "langgraph-checkpoint-postgres 'psycopg[binary]'")
    with contextlib.ExitStack() as stack:
        with of_other_saver():
            saver = stack.enter_context(module.PostgresSaver.from_conn_string(dsn))
        yield PostgresSource(saver, codec)


@contextlib.contextmanager
def redis_source(url: str, codec: Codec) -> Iterator[RedisSource]:
    """Connect to what langgraph-checkpoint-redis stored.

    Raises:
        ConfigError: if that package is missing.
        StoreUnavailable: if the server does not answer.
    """
    module = _package(_REDIS_PACKAGE, "langgraph-checkpoint-redis")
    with contextlib.ExitStack() as stack:
        with of_other_saver():
            saver = stack.enter_context(module.RedisSaver.from_conn_string(url))
        yield RedisSource(saver, codec)


def _package(name: str, requirement: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(f"importing from there needs `pip install {requirement}` ({exc})") from exc


# -- SqliteSaver's file ---------------------------------------------------------------------------------------------


class SqliteSource:
    """A file of langgraph-checkpoint-sqlite (SqliteSaver or AsyncSqliteSaver), read only, as of when it was opened."""

    def __init__(self, connection: sqlite3.Connection, serde: StrictSerializer, *, has_paths: bool) -> None:
        """Read from `connection`; `has_paths` says whether writes have a column `task_path`."""
        self._connection = connection
        self._serde = serde
        self._path = "task_path" if has_paths else "''"

    def threads(self) -> Iterable[str]:
        """See `Source.threads`."""
        query = "SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id"
        with _of_file():
            return [str(thread_id) for (thread_id,) in self._connection.execute(query)]

    def checkpoints(self, thread_id: str) -> Iterator[ForeignCheckpoint]:
        """See `Source.checkpoints`."""
        query = """SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata
            FROM checkpoints WHERE thread_id = ? ORDER BY checkpoint_id DESC"""
        with _of_file():
            found = self._connection.execute(query, (thread_id,))
        while True:
            with _of_file():
                row = found.fetchone()
            if row is None:
                return
            checkpoint_ns, checkpoint_id, parent_id, kind, checkpoint, metadata = row
            spot = Spot(checkpoint_ns, checkpoint_id)
            yield ForeignCheckpoint(
                spot,
                parent_id or None,
                cast("Checkpoint", self._serde.loads_typed((kind, checkpoint))),
                _metadata(metadata),
                tuple(self._writes(thread_id, spot)),
            )

    def _writes(self, thread_id: str, spot: Spot) -> Iterator[ForeignWrite]:
        query = f"""SELECT {self._path}, task_id, idx, channel, type, value FROM writes
            WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? ORDER BY 1, 2, 3"""  # noqa: S608 - a column
        with _of_file():
            rows = self._connection.execute(query, (thread_id, *spot)).fetchall()
        for task_path, task_id, idx, channel, kind, value in rows:
            yield ForeignWrite(task_path, task_id, idx, channel, self._serde.loads_typed((kind, value)))


@contextlib.contextmanager
def sqlite_source(path: Path, codec: Codec) -> Iterator[SqliteSource]:
    """Open a file of langgraph-checkpoint-sqlite; that package is not needed.

    Raises:
        ConfigError: if there is no file, or it holds no checkpoints of that kind.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; name the one that SqliteSaver wrote")
    with contextlib.ExitStack() as stack:
        with _of_file():
            address = f"{path.resolve().as_uri()}?mode=ro"
            connection = stack.enter_context(
                contextlib.closing(sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None))
            )
            connection.execute("BEGIN")
            columns = {
                table: {name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}
                for table in ("checkpoints", "writes")
            }
        if not {"thread_id", "parent_checkpoint_id"} <= columns["checkpoints"] or "task_id" not in columns["writes"]:
            raise ConfigError(
                f"{path} is no file of SqliteSaver; for one of PancakeSaver use `pancake threads export` and `import`"
            )
        serde = StrictSerializer(allowed_by(codec))
        yield SqliteSource(connection, serde, has_paths="task_path" in columns["writes"])


def _metadata(data: bytes | str | None) -> CheckpointMetadata:
    try:
        found = {} if data is None else json.loads(data)
    except ValueError as exc:
        raise CorruptCheckpoint("the metadata of a checkpoint is damaged") from exc
    return cast("CheckpointMetadata", found)


@contextlib.contextmanager
def _of_file() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as exc:
        raise StoreUnavailable(f"the file cannot be read as SqliteSaver's ({exc}); check the path") from exc
