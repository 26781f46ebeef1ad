"""One child process with its whole tree: started, watched, frozen, ended, and never left behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from pancake_langgraph._errors import LaunchError

logger = logging.getLogger(__name__)

#: Called with a step's name and the seconds it has taken so far, about every two seconds, never before two seconds.
ProgressFn = Callable[[str, float], None]

PROGRESS_EVERY_S: Final = 2.0
_POLL_S: Final = 0.2
_GUARD: Final = Path(__file__).with_name("_guard.py")
_TAIL_BYTES: Final = 64 * 1024
_MAX_LINES: Final = 5
_PROBLEM: Final = re.compile(r"\b(\w*(?:Error|Exception)|ERROR|CRITICAL|FATAL|Killed)\b")
_TERMINAL_CODES: Final = re.compile(r"\x1b\[[0-9;]*m")

#: What third-party servers say when they die at start -> what mends it.
_FIXES: Final[tuple[tuple[str, str], ...]] = (
    ("address already in use", "end the other process or choose another port"),
    ("operator torchvision::nms", "pip uninstall torchvision torchaudio torchcodec (they do not fit the CPU torch)"),
    ("No common block size", "give a block size that is a multiple of 32"),
    ("KV cache is needed", "raise kv_pool_bytes or lower max_model_len_tokens"),
    ("Failed to infer device type", "install exactly one of the extras `cpu` and `gpu`"),
    ("No module named", "install the extra `cpu` or `gpu`, then run `pancake doctor`"),
    ("Cannot allocate memory", "free memory, or lower kv_pool_bytes and l1_bytes"),
    ("No space left on device", "free space in the log, tier and shared-memory folders"),
    ("out of memory", "free memory, or lower kv_pool_bytes and l1_bytes"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: arguments, and environment variables on top of this process's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What the command leaves lying about: shared-memory names, and folders that go when the owner dies unheard."""

    shm_names: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()


class ChildProcess:
    """A command that runs under a guard process; see `_guard.py` for what the guard promises.

    Usable from any thread, by one thread at a time.  `start` and `terminate` may alternate; `terminate` is idempotent
    and bounded by `grace_s` plus fifteen seconds.  As a context manager it terminates on the way out.
    """

    def __init__(
        self,
        name: str,
        command: Command,
        *,
        log_path: Path,
        leftovers: Leftovers | None = None,
        grace_s: float = 10.0,
    ) -> None:
        """Describe the child; nothing is started.  Output is appended to `log_path`."""
        self.name = name
        self.log_path = log_path
        self._command = command
        self._leftovers = leftovers or Leftovers()
        self._grace_s = grace_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._control_fd: int | None = None
        self._pid: int | None = None
        self._exit_code: int | None = None
        self._log_start = 0

    def __enter__(self) -> ChildProcess:
        """Start when not started yet."""
        if not self.alive:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Terminate."""
        self.terminate()

    @property
    def pid(self) -> int:
        """Process id of the command itself (not of its guard).

        Raises:
            LaunchError: if it was never started.
        """
        if self._pid is None:
            raise LaunchError(f"{self.name} has not been started; call start() first")
        return self._pid

    @property
    def alive(self) -> bool:
        """Whether the command runs (a frozen one does)."""
        if self._guard is None or self._pid is None or self._guard.poll() is not None:
            return False
        try:
            return psutil.Process(self._pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def start(self) -> None:
        """Start the command; returns once it runs, not once it is ready.

        Raises:
            LaunchError: if it already runs, or cannot be executed.
        """
        if self.alive:
            raise LaunchError(f"{self.name} already runs as process {self.pid}; terminate it first")
        self.terminate()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        control_read, control_write = os.pipe()
        status_read, status_write = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._log_start = log.tell()
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_GUARD), self._spec(control_read, status_write)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._command.env},
                    pass_fds=(control_read, status_write),
                    start_new_session=True,
                )
        except BaseException:
            os.close(control_write)
            os.close(status_read)
            raise
        finally:
            os.close(control_read)
            os.close(status_write)
        self._control_fd = control_write
        with os.fdopen(status_read, "rb") as status:
            kind, _, rest = status.readline().decode().strip().partition(" ")
        if kind != "pid":
            self.terminate()
            raise LaunchError(f"{self.name}: cannot run {self._command.argv[0]!r}: {rest or self.log_problem()}")
        self._pid, self._exit_code = int(rest), None
        logger.info("%s started as process %d", self.name, self._pid)

    def wait_ready(
        self, check: Callable[[], bool], *, timeout_s: float, on_progress: ProgressFn | None = None
    ) -> float:
        """Call `check` until it returns true; return the seconds it took.

        Raises:
            LaunchError: if the command ends first, or `timeout_s` passes; the command is then ended.
        """
        started_s = time.monotonic()
        reported_s = 0.0
        while True:
            if not self.alive:
                self.terminate()
                raise LaunchError(
                    f"{self.name} ended before it was ready (exit code {self._exit_code}): {self.log_problem()}"
                )
            if check():
                return time.monotonic() - started_s
            elapsed_s = time.monotonic() - started_s
            if elapsed_s >= timeout_s:
                self.terminate()
                raise LaunchError(
                    f"{self.name} was not ready after {timeout_s:.0f} s: {self.log_problem()}; "
                    "give more time, or free CPU and memory"
                )
            if on_progress is not None and elapsed_s - reported_s >= PROGRESS_EVERY_S:
                reported_s = elapsed_s
                on_progress(f"starting {self.name}", elapsed_s)
            time.sleep(min(_POLL_S, timeout_s))

    def wait(self, *, timeout_s: float, step: str, on_progress: ProgressFn | None = None) -> int:
        """Wait for the command to end by itself; return its exit code (128 + N after signal N).

        Raises:
            LaunchError: if it runs longer than `timeout_s`; it is then ended.
        """
        started_s = time.monotonic()
        reported_s = 0.0
        while self.alive:
            elapsed_s = time.monotonic() - started_s
            if elapsed_s >= timeout_s:
                self.terminate()
                raise LaunchError(f"{self.name} took longer than {timeout_s:.0f} s: {self.log_problem()}")
            if on_progress is not None and elapsed_s - reported_s >= PROGRESS_EVERY_S:
                reported_s = elapsed_s
                on_progress(step, elapsed_s)
            time.sleep(min(_POLL_S, timeout_s))
        self.terminate()
        return 0 if self._exit_code is None else self._exit_code

    def terminate(self) -> None:
        """End the whole tree, gracefully first; idempotent, bounded, callable while frozen."""
        guard = self._guard
        if guard is None:
            return
        self._guard = None
        if self._control_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._control_fd, b"q")
            os.close(self._control_fd)
            self._control_fd = None
        tree = self._tree()
        try:
            self._exit_code = guard.wait(self._grace_s + 14.0)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end in time; killing process group %d", self.name, guard.pid)
            self._signal(tree, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(guard.pid, signal.SIGKILL)
            self._exit_code = guard.wait()
        logger.info("%s ended with exit code %s", self.name, self._exit_code)

    def restart(self) -> None:
        """Terminate and start again with the same command, hence on the same ports."""
        self.terminate()
        self.start()

    def kill(self) -> None:
        """End the whole tree with SIGKILL, as a crash would; returns when the command is gone.

        Python's resource trackers are left to the guard, as a crash leaves them: they remove named semaphores.
        """
        tree = [process for process in self._tree() if not _is_tracker(process)]
        self._signal(tree, signal.SIGKILL)
        psutil.wait_procs(tree, timeout=5.0)
        if self._guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(14.0)

    def freeze(self) -> None:
        """Stop the whole tree (SIGSTOP), as a hang would."""
        self._signal(self._tree(), signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen tree go on (SIGCONT)."""
        self._signal(self._tree(), signal.SIGCONT)

    def rss_bytes(self) -> int:
        """Resident memory of the whole tree in bytes; 0 when it does not run."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                total += int(process.memory_info().rss)
        return total

    def log_problem(self) -> str:
        """Return the last lines of this start's log that name an error, and the fix where it is a known one."""
        try:
            with self.log_path.open("rb") as log:
                size_bytes = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size_bytes - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return f"no log at {self.log_path}"
        lines = [_TERMINAL_CODES.sub("", line).strip() for line in text.splitlines()]
        named = [line[:400] for line in lines if _PROBLEM.search(line)] or [line[:400] for line in lines if line]
        summary = " / ".join(named[-_MAX_LINES:]) or "it wrote nothing"
        fix = next((fix for sign, fix in _FIXES if sign.lower() in text.lower()), None)
        return f"{summary} (log: {self.log_path})" + (f"; to mend: {fix}" if fix else "")

    def _spec(self, control_fd: int, status_fd: int) -> str:
        return json.dumps(
            {
                "argv": self._command.argv,
                "control_fd": control_fd,
                "status_fd": status_fd,
                "grace_s": self._grace_s,
                "shm_names": self._leftovers.shm_names,
                "folders": [str(folder) for folder in self._leftovers.folders],
            }
        )

    def _tree(self) -> list[psutil.Process]:
        if self._pid is None:
            return []
        try:
            root = psutil.Process(self._pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    @staticmethod
    def _signal(tree: Sequence[psutil.Process], number: signal.Signals) -> None:
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


class TerminationSignals:
    """While open, SIGTERM raises `KeyboardInterrupt` in the main thread, so that `finally` blocks and `with` run.

    In any other thread it does nothing, since only the main one may set handlers.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._previous: object = None

    def __enter__(self) -> TerminationSignals:
        """Install the handler."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        """Put back what was there."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)  # type: ignore[arg-type]  # what signal.signal returned
            self._previous = None

    @staticmethod
    def _interrupt(*_: object) -> None:
        raise KeyboardInterrupt
