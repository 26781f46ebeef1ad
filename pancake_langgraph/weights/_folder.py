"""A folder of model files that is whole or not there: built aside, renamed, listed by digest, verified on use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

from pancake_langgraph._errors import LaunchError, ModelFilesError
from pancake_langgraph.launch.process import PROGRESS_EVERY_S, ChildProcess, Command, ProgressFn

logger = logging.getLogger(__name__)

#: `fast` believes a file whose size and modification time are as recorded; `full` reads every byte.
Verify = Literal["fast", "full"]

MANIFEST: Final = "pancake-manifest.json"
_LOCK_TIMEOUT_S: Final = 900.0
_BUILD_TIMEOUT_S: Final = 900.0


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def folder_lock(path: Path, *, on_progress: ProgressFn | None = None) -> Iterator[None]:
    """Hold an exclusive lock between processes on `path` (a lock file, created when missing).

    Raises:
        ModelFilesError: if another process holds it for more than 15 minutes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    started_s, reported_s = time.monotonic(), 0.0
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                elapsed_s = time.monotonic() - started_s
                if elapsed_s > _LOCK_TIMEOUT_S:
                    raise ModelFilesError(
                        f"another process has held {path} for {elapsed_s:.0f} s; end it and try again"
                    ) from None
                if on_progress is not None and elapsed_s - reported_s >= PROGRESS_EVERY_S:
                    reported_s = elapsed_s
                    on_progress("waiting for another process that prepares the model", elapsed_s)
                time.sleep(0.1)
        yield


def write_manifest(folder: Path, *, recipe: str) -> None:
    """Record every file's size, digest and modification time, and the recipe that made them."""
    files = {
        path.name: {
            "size_bytes": path.stat().st_size,
            "sha256": file_sha256(path),
            "mtime_ns": path.stat().st_mtime_ns,
        }
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps({"recipe": recipe, "files": files}, indent=1))


def damage(folder: Path, *, recipe: str, verify: Verify) -> str | None:
    """Say what is wrong with `folder` in a few words; `None` when it is whole and made by `recipe`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["recipe"] != recipe:
            return "made in another way"
        for name, recorded in manifest["files"].items():
            path = folder / name
            found = path.stat()
            if found.st_size != recorded["size_bytes"]:
                return f"{name} has {found.st_size} bytes, recorded are {recorded['size_bytes']}"
            touched = found.st_mtime_ns != recorded["mtime_ns"]
            if (touched or verify == "full") and file_sha256(path) != recorded["sha256"]:
                return f"the digest of {name} is not the recorded one"
    except FileNotFoundError as exc:
        return f"{Path(str(exc.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        return f"unreadable ({type(exc).__name__})"
    return None


def ensure_folder(
    folder: Path,
    *,
    recipe: str,
    verify: Verify,
    build: Callable[[Path], None],
    on_progress: ProgressFn | None = None,
) -> Path:
    """Return `folder`, whole; build it where it is missing or damaged.  Safe between processes.

    Raises:
        ModelFilesError: if it cannot be built, or another process holds the lock too long.
    """
    with folder_lock(folder.with_name(f".{folder.name}.lock"), on_progress=on_progress):
        wrong = damage(folder, recipe=recipe, verify=verify)
        if wrong is None:
            return folder
        if folder.exists():
            logger.warning("model files in %s are not usable (%s); making them again", folder, wrong)
        for stale in folder.parent.glob(f".{folder.name}.new-*"):
            shutil.rmtree(stale, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
        try:
            build(fresh)
            write_manifest(fresh, recipe=recipe)
            if folder.exists():
                shutil.rmtree(folder)
            fresh.chmod(0o755)
            fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def run_converter(args: tuple[str, ...], *, step: str, on_progress: ProgressFn | None) -> None:
    """Run `_convert` in a child process.

    Raises:
        ModelFilesError: if it fails; the message holds the last lines of its output that name an error.
    """
    # Started by path, since a child must find this package wherever it was imported from.
    root = Path(__file__).resolve().parents[2]
    python_path = os.pathsep.join(part for part in (str(root), os.environ.get("PYTHONPATH", "")) if part)
    env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path, "TOKENIZERS_PARALLELISM": "false"}
    command = Command((sys.executable, "-m", "pancake_langgraph.weights._convert", *args), env)
    with tempfile.TemporaryDirectory(prefix="pk-convert-") as logs:
        child = ChildProcess("model conversion", command, log_path=Path(logs) / "convert.log")
        try:
            child.start()
            code = child.wait(timeout_s=_BUILD_TIMEOUT_S, step=step, on_progress=on_progress)
        except LaunchError as exc:
            raise ModelFilesError(str(exc)) from exc
        finally:
            child.terminate()
        if code != 0:
            raise ModelFilesError(f"{step} failed (exit code {code}): {child.log_problem()}")
