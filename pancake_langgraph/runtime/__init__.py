"""Hooks, the act loop, and what ties them together."""

from pancake_langgraph.runtime.attach import attach, runtime_of
from pancake_langgraph.runtime.runtime import Runtime, RuntimeStatistics

__all__ = ["Runtime", "RuntimeStatistics", "attach", "runtime_of"]
