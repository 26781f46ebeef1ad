"""The saver under a LangGraph server (`langgraph dev` and its siblings), which brings a checkpointer of its own.

Either let the server use this one, in `langgraph.json`:

    {"checkpointer": {"path": "pancake_langgraph.served.make_saver"}}

or keep the app's own saver for other times and let the server drop it:

    graph = builder.compile(checkpointer=unless_served(saver))
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from langgraph.checkpoint.base import BaseCheckpointSaver

from pancake_langgraph.config.env import saver_from_env, under_langgraph_server
from pancake_langgraph.saver import PancakeSaver

_S = TypeVar("_S", bound=BaseCheckpointSaver[Any])


@asynccontextmanager
async def make_saver() -> AsyncIterator[PancakeSaver]:
    """Open a saver as `PANCAKE_SAVER`, `PANCAKE_SAVER_ALLOW` and `PANCAKE_SAVER_TTL_S` say; close it at the end.

    Raises:
        ConfigError: if one of them cannot be used.
        CheckpointError: if the store cannot be opened.
    """
    where, allow, ttl_s = saver_from_env()
    async with PancakeSaver(where, allow=allow, ttl_s=ttl_s) as saver:
        yield saver


def unless_served(saver: _S) -> _S | None:
    """Return `saver`, or `None` under a LangGraph server: a graph with a saver of its own would be refused there."""
    return None if under_langgraph_server() else saver
