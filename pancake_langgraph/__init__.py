"""Pancake: knows what comes next in a LangGraph app and has it ready on the models you host yourself.

    from pancake_langgraph import PancakeChatModel, attach

    model = PancakeChatModel(model="small", base_url="http://127.0.0.1:8000/v1")
    graph = attach(builder.compile(checkpointer=saver))

Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pancake_langgraph._errors import PancakeError
    from pancake_langgraph.chat_model import PancakeChatModel
    from pancake_langgraph.config import RuntimeSettings
    from pancake_langgraph.ledger import Ledger
    from pancake_langgraph.memory_store import PancakeStore
    from pancake_langgraph.phases import Phase, phase
    from pancake_langgraph.runtime import Runtime, attach, runtime_of
    from pancake_langgraph.saver import PancakeSaver
    from pancake_langgraph.vector_store import PancakeVectorStore

__all__ = [
    "Ledger",
    "PancakeChatModel",
    "PancakeError",
    "PancakeSaver",
    "PancakeStore",
    "PancakeVectorStore",
    "Phase",
    "Runtime",
    "RuntimeSettings",
    "attach",
    "phase",
    "runtime_of",
]

_HOMES = {
    "Ledger": "pancake_langgraph.ledger",
    "PancakeChatModel": "pancake_langgraph.chat_model",
    "PancakeError": "pancake_langgraph._errors",
    "PancakeSaver": "pancake_langgraph.saver",
    "PancakeStore": "pancake_langgraph.memory_store",
    "PancakeVectorStore": "pancake_langgraph.vector_store",
    "Phase": "pancake_langgraph.phases",
    "Runtime": "pancake_langgraph.runtime",
    "RuntimeSettings": "pancake_langgraph.config",
    "attach": "pancake_langgraph.runtime",
    "phase": "pancake_langgraph.phases",
    "runtime_of": "pancake_langgraph.runtime",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
