"""Chooses a store by its address."""

from __future__ import annotations

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.checkpoint.sqlite_store import SqliteStore
from pancake_langgraph.checkpoint.store import Store

REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://")


def create_store(where: str) -> Store:
    """Return a store; nothing is opened.

    Args:
        where: A path, `:memory:`, or a URL with one of `REDIS_SCHEMES`.

    Raises:
        ConfigError: if the address is none of these.
    """
    if where.startswith(REDIS_SCHEMES):
        from pancake_langgraph.checkpoint.redis_store import RedisStore

        return RedisStore(where)
    if "://" in where or not where:
        scheme = where.partition("://")[0] or "nothing"
        raise ConfigError(
            f"where: got {scheme!r}, allowed are a file, ':memory:', or a URL with {', '.join(REDIS_SCHEMES)}"
        )
    return SqliteStore(where)
