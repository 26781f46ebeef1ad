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
    from pancake_langgraph._errors import (
        CheckpointError,
        ConfigError,
        ContextOverflow,
        CorruptCheckpoint,
        CorruptIndex,
        DeviceFull,
        EmbedderMismatch,
        EmbeddingError,
        EngineError,
        EngineFault,
        EngineRejected,
        EngineTimeout,
        EngineUnavailable,
        IndexLocked,
        InvalidItem,
        InvalidQuery,
        InvariantError,
        LaunchError,
        MalformedStream,
        ModelFilesError,
        ModelNotFound,
        PancakeError,
        RetrievalError,
        RetrievalOverloaded,
        RetrievalTimeout,
        RuntimeClosed,
        SchemaMismatch,
        StateTypeError,
        StoreUnavailable,
        StructuredOutputError,
        ThreadDeleted,
        TierError,
        TopologyError,
        Unsupported,
    )
    from pancake_langgraph.chat_model import PancakeChatModel
    from pancake_langgraph.config import RuntimeSettings
    from pancake_langgraph.ledger import Ledger
    from pancake_langgraph.memory_store import PancakeStore
    from pancake_langgraph.phases import Phase, phase
    from pancake_langgraph.retrieval.device_budget import DeviceBudget
    from pancake_langgraph.runtime import Runtime, attach, runtime_of
    from pancake_langgraph.saver import PancakeSaver
    from pancake_langgraph.vector_store import PancakeVectorStore

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextOverflow",
    "CorruptCheckpoint",
    "CorruptIndex",
    "DeviceBudget",
    "DeviceFull",
    "EmbedderMismatch",
    "EmbeddingError",
    "EngineError",
    "EngineFault",
    "EngineRejected",
    "EngineTimeout",
    "EngineUnavailable",
    "IndexLocked",
    "InvalidItem",
    "InvalidQuery",
    "InvariantError",
    "LaunchError",
    "Ledger",
    "MalformedStream",
    "ModelFilesError",
    "ModelNotFound",
    "PancakeChatModel",
    "PancakeError",
    "PancakeSaver",
    "PancakeStore",
    "PancakeVectorStore",
    "Phase",
    "RetrievalError",
    "RetrievalOverloaded",
    "RetrievalTimeout",
    "Runtime",
    "RuntimeClosed",
    "RuntimeSettings",
    "SchemaMismatch",
    "StateTypeError",
    "StoreUnavailable",
    "StructuredOutputError",
    "ThreadDeleted",
    "TierError",
    "TopologyError",
    "Unsupported",
    "attach",
    "phase",
    "runtime_of",
]

#: Where a public name is defined; those that are not here are errors.
_HOMES = {
    "DeviceBudget": "pancake_langgraph.retrieval.device_budget",
    "Ledger": "pancake_langgraph.ledger",
    "PancakeChatModel": "pancake_langgraph.chat_model",
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
_ERRORS = "pancake_langgraph._errors"


if not TYPE_CHECKING:  # type checkers know the names from above, and shall find out about all others

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used.

        Raises:
            ConfigError: if it needs an extra that is not installed; the message names it.
        """
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(_HOMES.get(name, _ERRORS)), name)
        except ImportError as exc:
            from pancake_langgraph.retrieval.extra import lacking

            if (error := lacking(exc)) is None:
                raise
            raise error from exc


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
