"""Settings: what was asked for, where it came from, and what will run."""

from pancake_langgraph.config.env import settings_from_env
from pancake_langgraph.config.resolve import EngineFacts, Resolved, resolve
from pancake_langgraph.config.settings import RuntimeSettings

__all__ = ["EngineFacts", "Resolved", "RuntimeSettings", "resolve", "settings_from_env"]
