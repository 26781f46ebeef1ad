"""Runs one command and sees to it that nothing of it outlives the process that wanted it.

This file is run as a script by `ChildProcess`, with the standard library alone; it is not imported there.  It sits
between the owner and the command:

    owner ──control pipe──▶ guard (own session, sub-reaper) ──▶ command ──▶ its children, and theirs

The end of the control pipe means "stop": either the owner closed it, or the owner is gone, however it went.  The guard
then ends the whole tree: SIGTERM, a grace period, SIGKILL.  Orphans of the tree fall to the guard (it is their
sub-reaper), so children that left the process group are found too.  Should the guard itself be killed, the kernel
ends the command (PR_SET_PDEATHSIG; the guard has one thread, so the signal cannot come early).

The guard reports on the status pipe, one line each: `pid N`, then `exit CODE` or `error TEXT`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHM_DIR = Path("/dev/shm")  # noqa: S108 -- the fixed mount point of POSIX shared memory
_OWN_SHM_PREFIXES = ("psm_", "sem.mp-", "vllm_offload_")
_POLL_S = 0.1
_SHM_SCAN_S = 15.0
_ORDERLY = b"q"


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _parents() -> dict[int, int]:
    """Map each process id to its parent's, leaving out the dead that were not waited for."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(entry.name)] = int(parent)
    return found


def _descendants(root: int) -> list[int]:
    """Return all living descendants of `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = list(children.get(root, ()))
    while todo:
        pid = todo.pop(0)
        found.append(pid)
        todo.extend(children.get(pid, ()))
    return found


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _is_tracker(pid: int) -> bool:
    """Say whether this is the helper process of Python's `multiprocessing` that removes named resources."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class _Guard:
    def __init__(self, spec: dict[str, object]) -> None:
        self.control: int = int(str(spec["control_fd"]))
        self.status: int = int(str(spec["status_fd"]))
        self.grace_s = float(str(spec["grace_s"]))
        self.argv = [str(part) for part in list(spec["argv"])]  # type: ignore[call-overload]
        self.shm_names = {str(name) for name in list(spec["shm_names"])}  # type: ignore[call-overload]
        self.folders = [Path(str(name)) for name in list(spec["folders"])]  # type: ignore[call-overload]
        self.started_s = time.time()
        self.mapped: set[str] = set()
        self.child = 0
        self.exit_code: int | None = None
        self.owner_gone = False

    def run(self) -> int:
        """Start the command, wait for its end or the owner's word, clean up; return the exit code."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        stop_asked = False

        def _stop(*_: object) -> None:
            nonlocal stop_asked
            stop_asked = True

        signal.signal(signal.SIGTERM, _stop)
        if not self._spawn():
            return 127
        next_scan_s = time.monotonic() + 1.0
        while not stop_asked and not self._reap():
            stop_asked = self._owner_says_stop()
            if time.monotonic() >= next_scan_s:
                self._note_shm()
                next_scan_s = time.monotonic() + _SHM_SCAN_S
        self._end_tree()
        self._remove_leftovers()
        code = 128 if self.exit_code is None else self.exit_code
        self._report(f"exit {code}")
        return code

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self.status, f"{line}\n".encode())

    def _spawn(self) -> bool:
        guard_pid = os.getpid()
        error_read, error_write = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            try:
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != guard_pid:
                    os._exit(127)
                for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                os.close(self.control)
                os.close(self.status)
                os.execvpe(self.argv[0], self.argv, os.environ)  # noqa: S606 -- a list, no shell
            except OSError as exc:
                os.write(error_write, str(exc).encode())
            os._exit(127)
        os.close(error_write)
        problem = os.read(error_read, 4096).decode()
        os.close(error_read)
        self._report(f"error {problem}" if problem else f"pid {self.child}")
        return not problem

    def _owner_says_stop(self) -> bool:
        if not select.select([self.control], [], [], _POLL_S)[0]:
            return False
        said = os.read(self.control, 16)
        self.owner_gone = said != _ORDERLY
        return True

    def _reap(self) -> bool:
        """Collect the dead; return whether the command itself is among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self.exit_code is not None
            if pid == 0:
                return self.exit_code is not None
            if pid == self.child:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code

    def _note_shm(self) -> None:
        """Remember which shared-memory files of the tree's own making it maps now."""
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    _, mark, name = line.partition(f"{_SHM_DIR}/")
                    if mark and name.startswith(_OWN_SHM_PREFIXES):
                        self.mapped.add(name.split()[0])

    def _end_tree(self) -> None:
        if self.exit_code is None:
            self._note_shm()
            # The command ends its own children; a frozen one must run to hear of it.
            _signal_all([self.child], signal.SIGTERM)
            _signal_all([self.child, *_descendants(self.child)], signal.SIGCONT)
            deadline_s = time.monotonic() + self.grace_s
            while not self._reap() and time.monotonic() < deadline_s:
                time.sleep(_POLL_S / 4)
        _signal_all(_descendants(os.getpid()), signal.SIGTERM)
        self._wait_for_none(lambda pid: True, min(self.grace_s, 2.0))
        # A resource tracker removes its family's semaphores and shared memory once the others are gone: it goes last.
        self._wait_for_none(lambda pid: not _is_tracker(pid), 5.0, kill=True)
        self._wait_for_none(lambda pid: True, 1.0)
        self._wait_for_none(lambda pid: True, 5.0, kill=True)
        if sys.platform != "linux" and self.exit_code is None:
            _signal_all([self.child], signal.SIGKILL)
            time.sleep(_POLL_S)
            self._reap()

    def _wait_for_none(self, counts: Callable[[int], bool], limit_s: float, *, kill: bool = False) -> None:
        """Wait until no descendant that counts is left, at most `limit_s`; with `kill`, kill them on the way."""
        deadline_s = time.monotonic() + limit_s
        while (left := [pid for pid in _descendants(os.getpid()) if counts(pid)]) and time.monotonic() < deadline_s:
            if kill:
                _signal_all(left, signal.SIGKILL)
            time.sleep(_POLL_S / 4)
            self._reap()

    def _remove_leftovers(self) -> None:
        if _SHM_DIR.is_dir():
            for name in self.shm_names | self.mapped:
                path = _SHM_DIR / Path(name).name
                with contextlib.suppress(OSError):
                    if name in self.shm_names or path.stat().st_ctime >= self.started_s - 1.0:
                        path.unlink()
        if self.owner_gone:
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(_Guard(json.loads(sys.argv[1])).run())
