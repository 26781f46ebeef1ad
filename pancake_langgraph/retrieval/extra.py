"""The extra `retrieval`: which packages it brings, and what is said where they are not installed.  Imports nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pancake_langgraph._errors import ConfigError

INSTALL: Final = 'pip install "pancake-langgraph[retrieval]"'
#: Module -> distribution.
PACKAGES: Final[Mapping[str, str]] = MappingProxyType({"numpy": "numpy", "faiss": "faiss-cpu"})


def lacking(error: ImportError) -> ConfigError | None:
    """Return what to raise when an import failed for want of this extra; `None` when it failed for something else."""
    module = (error.name or "").partition(".")[0]
    # A package that is there and does not load is another matter, whose own message says more.
    return _missing(module) if module in PACKAGES and not _is_installed(module) else None


def require_retrieval() -> None:
    """Check that what indexes on disk need is installed.

    Raises:
        ConfigError: if not; the message names the package and the extra.
    """
    for module in PACKAGES:
        if not _is_installed(module):
            raise _missing(module)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _missing(module: str) -> ConfigError:
    return ConfigError(
        f"agent memory and indexes need the package {PACKAGES[module]}, which is not installed; {INSTALL}"
    )
