"""Telling observers about one call, whatever way LangChain started it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler

from pancake_langgraph._types import Usage
from pancake_langgraph.wire.bodies import deep_merge
from pancake_langgraph.wire.observer import CallObserver, FieldObserver

logger = logging.getLogger(__name__)


class RunProbe(BaseCallbackHandler):
    """Learns the run id of a call and carries its observers, where LangChain does not hand over the run manager."""

    run_inline = True

    def __init__(self, handlers: Iterable[Any] = ()) -> None:
        """Keep those of `handlers` that are observers."""
        self.run_id: UUID | None = None
        self.observers = tuple(handler for handler in handlers if isinstance(handler, CallObserver))

    def on_chat_model_start(self, serialized: dict[str, Any], messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Remember the run id."""
        self.run_id = run_id

    @classmethod
    def of(cls, run_manager: Any) -> RunProbe:
        """Return a probe for a run manager that is at hand; `None` gives one without observers."""
        probe = cls(run_manager.handlers if run_manager is not None else ())
        probe.run_id = run_manager.run_id if run_manager is not None else None
        return probe


class Watch:
    """Calls the observers of one model call in order, each event once; an observer that raises is left out."""

    failures = 0  # over the life of the process

    def __init__(self, probe: RunProbe) -> None:
        """Watch the call that `probe` belongs to."""
        self.run_id = probe.run_id or uuid4()
        self._observers = list(probe.observers)
        self.wants_fields = any(isinstance(observer, FieldObserver) for observer in self._observers)
        self._first = self._ended = False

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Show the body and return it with what the observers want to add."""
        for extra in self._tell("on_wire_request", body):
            if isinstance(extra, Mapping):
                body = deep_merge(body, extra)
        return body

    def first_piece(self, prompt_token_ids: tuple[int, ...] | None) -> None:
        """Tell of the first piece, once."""
        if not self._first:
            self._first = True
            self._tell("on_wire_first_piece", prompt_token_ids)

    def tool_name(self, name: str) -> None:
        """Tell of a tool name."""
        self._tell("on_wire_tool_name", name)

    def field(self, tool: str, name: str, value: str) -> None:
        """Tell those who want to know of a field that is completely written."""
        if self.wants_fields:
            self._tell("on_wire_field", tool, name, value)

    def wanted_drafts(self) -> frozenset[str]:
        """Return of which tools somebody wants to see the first words; an empty name stands for the answer itself."""
        told = self._tell("wanted_wire_drafts")
        return frozenset[str]().union(*(names for names in told if isinstance(names, frozenset)))

    def draft(self, tool: str, text: str) -> None:
        """Tell of a text that is being written."""
        self._tell("on_wire_draft", tool, text)

    def end(self, usage: Usage | None, finish_reason: str | None) -> None:
        """Tell of the end, once."""
        if not self._ended:
            self._ended = True
            self._tell("on_wire_end", usage, finish_reason)

    def _tell(self, method: str, *args: Any) -> list[Any]:
        answers = []
        for observer in list(self._observers):
            if not hasattr(observer, method):
                continue  # seeing fields and drafts is optional
            try:
                answers.append(getattr(observer, method)(self.run_id, *args))
            except Exception:  # hints fail open: the call matters more than who watches it
                self._observers.remove(observer)
                Watch.failures += 1
                if Watch.failures == 1:
                    logger.debug("an observer raised in %s and is left out of this call", method, exc_info=True)
        return answers
