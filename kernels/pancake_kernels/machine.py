"""Facts about the machine a measurement was made on: enough to compare, nothing that names it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path


def machine_line(packages: tuple[str, ...]) -> str:
    """Return processor, cores this process may use, memory, system, Python and package versions in one line."""
    parts = [_cpu_model(), f"{_usable_cores()} cores"]
    if (gib := _memory_gib()) is not None:
        parts.append(f"{gib:.1f} GiB")
    parts += [f"{platform.system()} {platform.machine()}", f"Python {platform.python_version()}"]
    return ", ".join(parts + [f"{name} {version}" for name in packages if (version := _version(name))])


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
