"""`PANCAKE_RUNTIME=1`: every run in the process is watched, with no line of code.

LangChain's configure hooks make a handler for each new run while an environment variable is set; that is the public way
in.  Topology is not read here (no graph is at hand): routes are learned from runs.
"""

from __future__ import annotations

import os
import threading
from contextvars import ContextVar
from typing import Any

from langchain_core.tracers.context import register_configure_hook

from pancake_langgraph._clock import MonotonicClock
from pancake_langgraph.config.env import ENV_RUNTIME, runtime_requested, settings_from_env
from pancake_langgraph.runtime.handler import RuntimeHandler
from pancake_langgraph.runtime.runtime import Runtime

_HANDLER: ContextVar[RuntimeHandler | None] = ContextVar("pancake_runtime_handler", default=None)
_lock = threading.Lock()
_shared: tuple[int, Runtime] | None = None  # with the process it was made in
_registered = False


class _CountsAttached(type):
    """Lets LangChain see an attached graph's handler as one of this kind, so that no run is watched twice."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(RuntimeHandler, instance)


class EnvironmentHandler(RuntimeHandler, metaclass=_CountsAttached):
    """A handler of the process-wide runtime; takes no arguments, as configure hooks want."""

    def __init__(self) -> None:
        """Report to the runtime made from `PANCAKE_*` variables.

        Raises:
            ConfigError: if a variable holds something unusable.
        """
        runtime = environment_runtime()
        super().__init__(runtime.post, clock=MonotonicClock(), wire_extras=runtime.wire_extras, runtime=runtime)


def environment_runtime() -> Runtime:
    """Return the process-wide runtime, made at the first call, and anew in a forked process.  Thread-safe."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid():
            _shared = os.getpid(), Runtime(settings_from_env())
        return _shared[1]


def watch_environment() -> bool:
    """Register the hook if `PANCAKE_RUNTIME` asks for it; return whether it is registered.  Idempotent.

    Raises:
        ConfigError: if the variable holds something that is no switch.
    """
    global _registered
    if not runtime_requested():
        return _registered
    with _lock:
        if not _registered:
            hook: Any = EnvironmentHandler
            register_configure_hook(_HANDLER, inheritable=True, handle_class=hook, env_var=ENV_RUNTIME)
            _registered = True
    return _registered
