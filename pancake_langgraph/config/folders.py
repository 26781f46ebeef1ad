"""Where this package keeps files of its own: models, run logs, the state of `pancake up`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ENV_CACHE_DIR: Final = "PANCAKE_CACHE_DIR"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's cache folder for this package; it is not created.

    `PANCAKE_CACHE_DIR` wins; then `$XDG_CACHE_HOME/pancake`; then the platform's own place.
    """
    source = os.environ if environ is None else environ
    if chosen := source.get(ENV_CACHE_DIR, "").strip():
        return Path(chosen).expanduser()
    if xdg := source.get("XDG_CACHE_HOME", "").strip():
        return Path(xdg).expanduser() / "pancake"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pancake"
    return Path.home() / ".cache" / "pancake"
