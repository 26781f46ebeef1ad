"""The connection to a SQLite file: its schema, its transactions, its errors as ours."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from typing import Final

from pancake_langgraph._errors import CorruptCheckpoint, SchemaMismatch, StoreUnavailable

#: "PCKS": tells a file of ours from any other.
APPLICATION_ID: Final = 0x50434B53
SCHEMA_VERSION: Final = 1
BUSY_TIMEOUT_S: Final = 30.0
_SWITCH_PAUSE_S: Final = 0.01
#: Pages of the file that may stay in memory; with SQLite's 2 MB, reading one long thread drops what the next put needs.
_CACHE_KIB: Final = 16_384

_SCHEMA: Final = (
    """CREATE TABLE threads (
        thread INTEGER PRIMARY KEY, thread_id TEXT NOT NULL UNIQUE, expires_at_s REAL,
        deletion_id TEXT, deleted_at_s REAL)""",
    """CREATE TABLE checkpoints (
        thread INTEGER NOT NULL, checkpoint_ns TEXT NOT NULL, checkpoint_id TEXT NOT NULL, parent_id TEXT,
        run_id TEXT NOT NULL, is_hidden INTEGER NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (thread, checkpoint_ns, checkpoint_id))""",
    "CREATE INDEX checkpoints_by_id ON checkpoints (thread, checkpoint_id)",
    "CREATE INDEX checkpoints_by_run ON checkpoints (run_id) WHERE run_id <> ''",
    """CREATE TABLE writes (
        thread INTEGER NOT NULL, checkpoint_ns TEXT NOT NULL, checkpoint_id TEXT NOT NULL, task_id TEXT NOT NULL,
        idx INTEGER NOT NULL, task_path TEXT NOT NULL, channel TEXT NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (thread, checkpoint_ns, checkpoint_id, task_id, idx)) WITHOUT ROWID""",
    """CREATE TABLE elements (
        thread INTEGER NOT NULL, hash BLOB NOT NULL, data BLOB NOT NULL, PRIMARY KEY (thread, hash))""",
    """CREATE TABLE dead (
        thread INTEGER NOT NULL, checkpoint_id TEXT NOT NULL, PRIMARY KEY (thread, checkpoint_id)) WITHOUT ROWID""",
)


class SqliteLink:
    """One connection under a lock; opened with the first use, in each process anew."""

    def __init__(self, path: str) -> None:
        """Remember the path; nothing is opened."""
        self.path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0

    def close(self) -> None:
        """Close the connection.  Idempotent; content of `:memory:` is gone."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def session(self) -> Iterator[sqlite3.Connection]:
        """Hold the lock and yield the connection; turn SQLite's errors into ours."""
        with self._lock:
            try:
                if self._connection is None or self._pid != os.getpid():  # a fork must not share the parent's
                    self._connection, self._pid = self._connect(), os.getpid()
                yield self._connection
            except sqlite3.Error as exc:
                raise self._translated(exc) from exc

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection inside one write transaction."""
        with self.session() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection inside one consistent view."""
        with self.session() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("COMMIT")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN")  # one view: another process may be making the schema just now
        is_ours = self._is_ours(connection)
        connection.execute("COMMIT")
        if not is_ours:
            connection.execute("BEGIN IMMEDIATE")
            if not self._is_ours(connection):  # else another process was faster
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute("COMMIT")
        _switch_to_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")

    def _is_ours(self, connection: sqlite3.Connection) -> bool:
        """Say whether the schema is there.

        Raises:
            SchemaMismatch: if the file is something else, or of a later version.
        """
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application == APPLICATION_ID:
            if version != SCHEMA_VERSION:
                raise SchemaMismatch(
                    f"{self.path} has schema version {version}, this package reads {SCHEMA_VERSION}; "
                    "install the version of pancake-langgraph that wrote it, or a later one"
                )
            return True
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application or version or tables:
            raise SchemaMismatch(
                f"{self.path} was made by another program ({tables} tables, application id {application:#x}); "
                "name a new file, and bring threads over with `pancake threads import`"
            )
        return False

    def _translated(self, exc: sqlite3.Error) -> Exception:
        text = str(exc)
        if "not a database" in text:
            return SchemaMismatch(f"{self.path} is not a SQLite database; name a new file")
        if "malformed" in text:
            return CorruptCheckpoint(f"{self.path} is damaged ({text}); restore it from a copy")
        remedy = {
            "readonly": "make the file and its folder writable",
            "full": "free some space; the thread can be resumed then",
            "unable to open": "the folder has to exist and to be writable",
            "locked": f"another process held it for {BUSY_TIMEOUT_S:g} s; end that one",
        }
        hint = next((fix for key, fix in remedy.items() if key in text), "nothing of this step was stored")
        return StoreUnavailable(f"{self.path}: {text}; {hint}")


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Bring the file into WAL mode.

    Unlike any other statement this one does not wait for a lock: SQLite answers "locked" at once if another connection
    is opening or switching the file, so the waiting is done here.
    """
    if connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
        return
    give_up_at = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= give_up_at:
                raise
            time.sleep(_SWITCH_PAUSE_S)
        else:
            return
