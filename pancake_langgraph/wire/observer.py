"""What a watcher of model calls may implement to see the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

from pancake_langgraph._types import Usage


@runtime_checkable
class CallObserver(Protocol):
    """Sees one model call on the wire.

    A LangChain callback handler that also has these methods is found among the handlers of the run and told.  Order
    per `run_id`: `on_wire_request` once, then at most one `on_wire_first_piece`, then any `on_wire_tool_name`, then
    `on_wire_end` exactly once, also after an error or a cancellation.  All methods are called on the thread (and
    loop) of the call, must be quick and must not raise; if one does, the call goes on without it.
    """

    def on_wire_request(self, run_id: UUID, payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """See the final JSON body just before it is sent; do not change it.

        Returns:
            What to merge into the request body, or `None`.
        """
        ...

    def on_wire_first_piece(self, run_id: UUID, prompt_token_ids: tuple[int, ...] | None) -> None:
        """See the first piece arrive, with the prompt's token ids where the server returns them."""
        ...

    def on_wire_tool_name(self, run_id: UUID, tool_name: str) -> None:
        """See a tool call's name, as soon as it is known."""
        ...

    def on_wire_end(self, run_id: UUID, usage: Usage | None, finish_reason: str | None) -> None:
        """See the end; both are `None` after an error or a cancellation."""
        ...


@runtime_checkable
class FieldObserver(Protocol):
    """Sees values that a model has completely written while its answer still streams.

    A `CallObserver` may also have this.  At most a few calls per answer, between `on_wire_first_piece` and
    `on_wire_end`: top-level texts and switches of a tool call's arguments, or of an answer that is a JSON object
    itself (`tool` is then empty), names and values of at most 64 characters.
    """

    def on_wire_field(self, run_id: UUID, tool: str, field: str, value: str) -> None:
        """See one field."""
        ...


@runtime_checkable
class DraftObserver(Protocol):
    """Sees the first words of texts while a model still writes them.

    A `CallObserver` may also have these.  It is asked once per call, between `on_wire_request` and
    `on_wire_first_piece`, and told of each text again whenever it has twice as many words, and when a text in the
    arguments of a tool call has ended; up to some thousand characters of it.
    """

    def wanted_wire_drafts(self, run_id: UUID) -> frozenset[str]:
        """Return the names of the tools whose arguments are wanted; the empty name asks for the answer's own text."""
        ...

    def on_wire_draft(self, run_id: UUID, tool: str, text: str) -> None:
        """See what is written so far of one text in the arguments of `tool`, or of the answer where that is empty."""
        ...
