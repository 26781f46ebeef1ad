"""Folders of one run: logs in the cache folder (bounded in number), sockets in a short private one."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from pancake_langgraph.config.folders import cache_dir

MAX_RUNS: Final = 20
_MIN_AGE_S: Final = 3600.0
_counter = itertools.count()


def new_run_dir(root: Path | None = None) -> Path:
    """Make a folder for one run's logs under `root` (default: `runs` in the cache folder).

    Of earlier runs, the newest `MAX_RUNS` stay, and all that are less than an hour old.
    """
    runs = (root or cache_dir()) / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    old = sorted((path for path in runs.iterdir() if path.is_dir()), key=lambda path: path.name)
    for path in old[: max(0, len(old) - MAX_RUNS + 1)]:
        if time.time() - path.stat().st_mtime > _MIN_AGE_S:
            shutil.rmtree(path, ignore_errors=True)
    run = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_counter)}"
    run.mkdir(mode=0o700)
    return run


def new_socket_dir() -> Path:
    """Make an empty folder for Unix sockets: short path, readable by this user only."""
    return Path(tempfile.mkdtemp(prefix="pk-"))
