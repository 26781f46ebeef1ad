"""Checkpoints in one SQLite file (or in memory), for any number of threads and processes.

Write-ahead logging lets readers go on while one writes; every acknowledged write is on disk (`synchronous=FULL`).  One
connection per store, used under a lock that no method holds when it returns.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from pancake_langgraph._errors import ThreadDeleted
from pancake_langgraph.checkpoint.rows import (
    CheckpointRow,
    PutCheckpoint,
    PutWrites,
    Removal,
    Spot,
    ThreadContent,
    WriteRow,
)
from pancake_langgraph.checkpoint.sqlite_link import SqliteLink
from pancake_langgraph.checkpoint.store import DELETION_KEPT_S, StaleNeed, late_put, late_writes, orphans_expire_at_s

_PAGE: Final = 500
_CONTENT_TABLES: Final = ("checkpoints", "writes", "elements")
_ROW: Final = "checkpoint_ns, checkpoint_id, parent_id, run_id, is_hidden, body"
_WRITE: Final = "checkpoint_ns, checkpoint_id, task_path, task_id, idx, channel, body"
_HAS_CHECKPOINTS: Final = "EXISTS (SELECT 1 FROM checkpoints c WHERE c.thread = t.thread)"


class SqliteStore:
    """The port `Store` over SQLite.  `path` is a file, made when missing, or `:memory:`."""

    def __init__(self, path: str) -> None:
        """Remember the path; nothing is opened."""
        self._link = SqliteLink(path)

    def open(self) -> None:
        """See `Store.open`."""
        with self._link.session():
            pass

    def close(self) -> None:
        """See `Store.close`.  Content of `:memory:` is gone."""
        self._link.close()

    # -- writing --------------------------------------------------------------------------------------------------

    def put_checkpoint(self, put: PutCheckpoint, *, expires_at_s: float | None) -> None:
        """See `Store.put_checkpoint`."""
        row = put.row
        refused: ThreadDeleted | None = None
        with self._link.writing() as connection:
            thread, deletion_id = _thread(connection, put.thread_id)
            if deletion_id is not None:
                parent = row.parent_id is None or _exists(
                    connection, thread, row.spot._replace(checkpoint_id=row.parent_id)
                )
                if not parent or row.spot.checkpoint_id <= deletion_id:
                    connection.execute("INSERT OR IGNORE INTO dead VALUES (?, ?)", (thread, row.spot.checkpoint_id))
                    connection.execute(
                        "DELETE FROM writes WHERE thread = ? AND checkpoint_id = ?", (thread, row.spot.checkpoint_id)
                    )
                    refused = late_put(put.thread_id, row.spot)
            if refused is None:
                if put.needs is not None and not _exists(connection, thread, put.needs):
                    raise StaleNeed
                _set_expiry(connection, thread, expires_at_s)
                _insert(connection, thread, put.elements)
                connection.execute(
                    f"INSERT OR REPLACE INTO checkpoints (thread, {_ROW}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (thread, *row.spot, row.parent_id, row.run_id, row.is_hidden, row.body),
                )
        if refused is not None:
            raise refused

    def put_writes(self, put: PutWrites, *, expires_at_s: float | None) -> None:
        """See `Store.put_writes`."""
        with self._link.writing() as connection:
            thread, deletion_id = _thread(connection, put.thread_id)
            for spot in {row.spot for row in put.rows} if deletion_id is not None else ():
                dead = "SELECT 1 FROM dead WHERE thread = ? AND checkpoint_id = ?"
                is_dead = (
                    spot.checkpoint_id <= (deletion_id or "")
                    or connection.execute(dead, (thread, spot.checkpoint_id)).fetchone()
                )
                if is_dead and not _exists(connection, thread, spot):
                    raise late_writes(put.thread_id, spot)
            if not _has_checkpoints(connection, thread):
                expires_at_s = orphans_expire_at_s(expires_at_s)
            _set_expiry(connection, thread, expires_at_s)
            _insert(connection, thread, put.elements)
            for verb, rows in (
                ("INSERT OR REPLACE", [row for row in put.rows if row.idx < 0]),
                ("INSERT OR IGNORE", [row for row in put.rows if row.idx >= 0]),
            ):
                connection.executemany(
                    f"{verb} INTO writes (thread, {_WRITE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [(thread, *w.spot, w.task_path, w.task_id, w.idx, w.channel, w.body) for w in rows],
                )

    def delete_thread(self, thread_id: str, *, deletion_id: str) -> None:
        """See `Store.delete_thread`."""
        with self._link.writing() as connection:
            thread, _ = _thread(connection, thread_id)
            _clear(connection, thread)
            connection.execute(
                "UPDATE threads SET expires_at_s = NULL, deletion_id = ?, deleted_at_s = ? WHERE thread = ?",
                (deletion_id, time.time(), thread),
            )

    def rewrite_thread(self, thread_id: str, decide: Callable[[ThreadContent], Removal]) -> None:
        """See `Store.rewrite_thread`."""
        with self._link.writing() as connection:
            thread = _find(connection, thread_id)
            if thread is None or not _has_checkpoints(connection, thread):
                return
            removal = decide(_content(connection, thread))
            for table in ("checkpoints", "writes"):
                connection.executemany(
                    f"DELETE FROM {table} WHERE thread = ? AND checkpoint_ns = ? AND checkpoint_id = ?",
                    [(thread, *spot) for spot in removal.checkpoints],
                )
            connection.executemany(
                "UPDATE checkpoints SET is_hidden = 1 WHERE thread = ? AND checkpoint_ns = ? AND checkpoint_id = ?",
                [(thread, *spot) for spot in removal.hide],
            )
            connection.executemany(
                "DELETE FROM elements WHERE thread = ? AND hash = ?", [(thread, digest) for digest in removal.elements]
            )
            if not _has_checkpoints(connection, thread):  # writes whose checkpoint is still to come may be left
                bound = "UPDATE threads SET expires_at_s = min(coalesce(expires_at_s, 9e99), ?) WHERE thread = ?"
                connection.execute(bound, (orphans_expire_at_s(None), thread))

    def write_thread(self, thread_id: str, content: ThreadContent, *, expires_at_s: float | None) -> None:
        """See `Store.write_thread`."""
        with self._link.writing() as connection:
            thread, _ = _thread(connection, thread_id)
            _clear(connection, thread)
            connection.execute(
                "UPDATE threads SET expires_at_s = ?, deletion_id = NULL, deleted_at_s = NULL WHERE thread = ?",
                (expires_at_s, thread),
            )
            if not content.rows:
                return
            _insert(connection, thread, content.elements)
            connection.executemany(
                f"INSERT INTO checkpoints (thread, {_ROW}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(thread, *r.spot, r.parent_id, r.run_id, r.is_hidden, r.body) for r in content.rows],
            )
            connection.executemany(
                f"INSERT INTO writes (thread, {_WRITE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(thread, *w.spot, w.task_path, w.task_id, w.idx, w.channel, w.body) for w in content.writes],
            )

    def touch(self, thread_id: str, *, expires_at_s: float) -> None:
        """See `Store.touch`."""
        with self._link.writing() as connection:
            connection.execute("UPDATE threads SET expires_at_s = ? WHERE thread_id = ?", (expires_at_s, thread_id))

    def expire(self, *, now_s: float) -> int:
        """See `Store.expire`.  Also forgets deletions of long ago."""
        with self._link.writing() as connection:
            query = f"SELECT thread, {_HAS_CHECKPOINTS} FROM threads t WHERE expires_at_s <= ?"
            due = connection.execute(query, (now_s,)).fetchall()
            for thread, _ in due:
                _expire(connection, thread, now_s)
            # What has an expiry waits for that: writes may be there, and their checkpoint be under way.
            query = f"""SELECT thread FROM threads t
                WHERE deleted_at_s <= ? AND expires_at_s IS NULL AND NOT {_HAS_CHECKPOINTS}"""
            for (thread,) in connection.execute(query, (now_s - DELETION_KEPT_S,)).fetchall():
                _forget(connection, thread)
        return sum(has_checkpoints for _, has_checkpoints in due)

    # -- reading --------------------------------------------------------------------------------------------------

    def get_checkpoint(self, thread_id: str, checkpoint_ns: str, checkpoint_id: str | None) -> CheckpointRow | None:
        """See `Store.get_checkpoint`."""
        with self._link.session() as connection:
            thread = _find(connection, thread_id)
            if thread is None:
                return None
            query = f"SELECT {_ROW} FROM checkpoints WHERE thread = ? AND checkpoint_ns = ?"
            if checkpoint_id is None:
                query += " AND is_hidden = 0 ORDER BY checkpoint_id DESC LIMIT 1"
                found = connection.execute(query, (thread, checkpoint_ns)).fetchone()
            else:
                query += " AND checkpoint_id = ?"
                found = connection.execute(query, (thread, checkpoint_ns, checkpoint_id)).fetchone()
            return None if found is None else _row(found)

    def get_writes(self, thread_id: str, spot: Spot) -> tuple[WriteRow, ...]:
        """See `Store.get_writes`."""
        with self._link.session() as connection:
            thread = _find(connection, thread_id)
            if thread is None:
                return ()
            found = connection.execute(
                f"SELECT {_WRITE} FROM writes WHERE thread = ? AND checkpoint_ns = ? AND checkpoint_id = ?"
                " ORDER BY task_path, task_id, idx",
                (thread, *spot),
            ).fetchall()
            return tuple(_write(values) for values in found)

    def get_elements(self, thread_id: str, hashes: Collection[bytes]) -> Mapping[bytes, bytes]:
        """See `Store.get_elements`."""
        wanted = list(hashes)
        found: dict[bytes, bytes] = {}
        with self._link.session() as connection:
            thread = _find(connection, thread_id)
            if thread is None:
                return found
            for start in range(0, len(wanted), _PAGE):
                page = wanted[start : start + _PAGE]
                marks = ", ".join("?" * len(page))
                query = f"SELECT hash, data FROM elements WHERE thread = ? AND hash IN ({marks})"
                found.update(connection.execute(query, (thread, *page)))
        return found

    def list_checkpoints(
        self, thread_id: str, checkpoint_ns: str | None, *, before_id: str | None, limit: int
    ) -> Sequence[CheckpointRow]:
        """See `Store.list_checkpoints`."""
        with self._link.session() as connection:
            thread = _find(connection, thread_id)
            if thread is None:
                return ()
            values: list[object] = [thread]
            query = f"SELECT {_ROW} FROM checkpoints WHERE thread = ? AND is_hidden = 0"
            if checkpoint_ns is not None:
                query += " AND checkpoint_ns = ?"
                values.append(checkpoint_ns)
            if before_id is not None:
                query += " AND checkpoint_id < ?"
                values.append(before_id)
            query += " ORDER BY checkpoint_id DESC, checkpoint_ns LIMIT ?"
            return tuple(_row(found) for found in connection.execute(query, (*values, limit)))

    def threads(self) -> Iterator[str]:
        """See `Store.threads`."""
        last = 0
        while True:
            with self._link.session() as connection:
                page = connection.execute(
                    f"""SELECT thread, thread_id FROM threads t WHERE thread > ? AND coalesce(expires_at_s, 9e99) > ?
                    AND {_HAS_CHECKPOINTS} ORDER BY thread LIMIT ?""",
                    (last, time.time(), _PAGE),
                ).fetchall()
            if not page:
                return
            last = page[-1][0]
            yield from (thread_id for _, thread_id in page)

    def threads_of_run(self, run_id: str) -> Sequence[str]:
        """See `Store.threads_of_run`."""
        with self._link.session() as connection:
            query = """SELECT DISTINCT thread_id FROM threads JOIN checkpoints USING (thread)
                WHERE run_id = ? AND run_id <> '' ORDER BY thread_id"""
            return tuple(thread_id for (thread_id,) in connection.execute(query, (run_id,)))

    def read_thread(self, thread_id: str) -> ThreadContent:
        """See `Store.read_thread`."""
        with self._link.reading() as connection:
            thread = _find(connection, thread_id)
            if thread is None or not _has_checkpoints(connection, thread):
                return ThreadContent((), (), {})
            return _content(connection, thread)


def _find(connection: sqlite3.Connection, thread_id: str) -> int | None:
    """Return the thread's number; `None` if it is not known, or its time has come."""
    query = "SELECT thread FROM threads WHERE thread_id = ? AND coalesce(expires_at_s, 9e99) > ?"
    found = connection.execute(query, (thread_id, time.time())).fetchone()
    return None if found is None else int(found[0])


def _thread(connection: sqlite3.Connection, thread_id: str) -> tuple[int, str | None]:
    """Return the number of a thread to write to, made when missing, and the id minted at its deletion, if any."""
    query = "SELECT thread, deletion_id, expires_at_s FROM threads WHERE thread_id = ?"
    found, now_s = connection.execute(query, (thread_id,)).fetchone(), time.time()
    if found is not None and found[2] is not None and found[2] <= now_s:
        _expire(connection, found[0], now_s)
        found = connection.execute(query, (thread_id,)).fetchone()
    if found is None:
        return int(connection.execute("INSERT INTO threads (thread_id) VALUES (?)", (thread_id,)).lastrowid or 0), None
    return int(found[0]), found[1]


def _set_expiry(connection: sqlite3.Connection, thread: int, expires_at_s: float | None) -> None:
    """Move a thread's expiry; a row that has it already is not written again."""
    update = "UPDATE threads SET expires_at_s = ? WHERE thread = ? AND expires_at_s IS NOT ?"
    connection.execute(update, (expires_at_s, thread, expires_at_s))


def _expire(connection: sqlite3.Connection, thread: int, now_s: float) -> None:
    """Remove all that a thread holds; the memory of its deletion stays for as long as it has to."""
    query = "SELECT 1 FROM threads WHERE thread = ? AND deleted_at_s > ?"
    if connection.execute(query, (thread, now_s - DELETION_KEPT_S)).fetchone() is None:
        _forget(connection, thread)
        return
    _clear_content(connection, thread)
    _set_expiry(connection, thread, None)


def _forget(connection: sqlite3.Connection, thread: int) -> None:
    _clear(connection, thread)
    connection.execute("DELETE FROM threads WHERE thread = ?", (thread,))


def _clear(connection: sqlite3.Connection, thread: int) -> None:
    _clear_content(connection, thread)
    connection.execute("DELETE FROM dead WHERE thread = ?", (thread,))


def _clear_content(connection: sqlite3.Connection, thread: int) -> None:
    for table in _CONTENT_TABLES:
        connection.execute(f"DELETE FROM {table} WHERE thread = ?", (thread,))


def _has_checkpoints(connection: sqlite3.Connection, thread: int) -> bool:
    return connection.execute("SELECT 1 FROM checkpoints WHERE thread = ?", (thread,)).fetchone() is not None


def _exists(connection: sqlite3.Connection, thread: int, spot: Spot) -> bool:
    query = "SELECT 1 FROM checkpoints WHERE thread = ? AND checkpoint_ns = ? AND checkpoint_id = ?"
    return connection.execute(query, (thread, *spot)).fetchone() is not None


def _insert(connection: sqlite3.Connection, thread: int, elements: Mapping[bytes, bytes]) -> None:
    connection.executemany(
        "INSERT OR IGNORE INTO elements VALUES (?, ?, ?)", [(thread, digest, data) for digest, data in elements.items()]
    )


def _content(connection: sqlite3.Connection, thread: int) -> ThreadContent:
    rows = connection.execute(f"SELECT {_ROW} FROM checkpoints WHERE thread = ? ORDER BY checkpoint_id", (thread,))
    writes = connection.execute(f"SELECT {_WRITE} FROM writes WHERE thread = ? ORDER BY checkpoint_id", (thread,))
    elements = connection.execute("SELECT hash, data FROM elements WHERE thread = ?", (thread,))
    return ThreadContent(
        tuple(_row(found) for found in rows), tuple(_write(found) for found in writes), dict(elements.fetchall())
    )


def _row(found: tuple[str, str, str | None, str, int, bytes]) -> CheckpointRow:
    checkpoint_ns, checkpoint_id, parent_id, run_id, is_hidden, body = found
    return CheckpointRow(Spot(checkpoint_ns, checkpoint_id), parent_id, run_id, body, is_hidden=bool(is_hidden))


def _write(found: tuple[str, str, str, str, int, str, bytes]) -> WriteRow:
    checkpoint_ns, checkpoint_id, task_path, task_id, idx, channel, body = found
    return WriteRow(Spot(checkpoint_ns, checkpoint_id), task_path, task_id, idx, channel, body)
