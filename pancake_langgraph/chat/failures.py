"""Errors of ours that LangChain also knows under a name of its own."""

from __future__ import annotations

from langchain_core.exceptions import ContextOverflowError

from pancake_langgraph._errors import ContextOverflow, EngineError


class ChatContextOverflow(ContextOverflow, ContextOverflowError):
    """A context overflow that LangChain's middleware recognizes, to summarize and try once more."""


def for_langchain(error: EngineError) -> EngineError:
    """Return `error`, in the form that LangChain's middleware recognizes where there is one."""
    if type(error) is ContextOverflow:
        return ChatContextOverflow(str(error), status_code=error.status_code)
    return error
