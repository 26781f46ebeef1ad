"""Records every model call of one arm in the same way, whatever chat model makes it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import LLMResult


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call.  `label` says which (thread and turn); `cached_tokens` is `None` where the server did not say.

    `ttft_s` runs from the callback at the start of the call to the first piece of the answer; `tpot_s` is the time per
    output token after the first.  `text` is the answer and its tool calls, for comparison between arms.
    """

    label: str
    started_s: float
    ttft_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    text: str

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; `None` for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.ended_s - self.started_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens the engine had to compute."""
        return self.prompt_tokens - (self.cached_tokens or 0)


class CallRecorder(BaseCallbackHandler):
    """Collects `CallRecord`s.  One recorder per arm run; calls are labelled `thread/turn` in the order they start."""

    run_inline = True

    def __init__(self) -> None:
        """Start empty."""
        self.records: list[CallRecord] = []
        self._open: dict[UUID, tuple[str, float]] = {}
        self._first: dict[UUID, float] = {}
        self._turns: dict[str, int] = {}

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, metadata: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Take the start time."""
        thread = str((metadata or {}).get("thread_id", ""))
        turn = self._turns.get(thread, 0)
        self._turns[thread] = turn + 1
        self._open[run_id] = f"{thread}/{turn}", time.perf_counter()

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Take the time of the first piece."""
        self._first.setdefault(run_id, time.perf_counter())

    # ChatOpenAI calls back for the first piece even when it is empty; PancakeChatModel tells it on the wire.

    def on_wire_request(self, run_id: UUID, payload: Any) -> None:
        """Add nothing to the request."""

    def on_wire_first_piece(self, run_id: UUID, prompt_token_ids: tuple[int, ...] | None) -> None:
        """Take the time of the first piece."""
        self._first.setdefault(run_id, time.perf_counter())

    def on_wire_tool_name(self, run_id: UUID, tool_name: str) -> None:
        """Do nothing."""

    def on_wire_end(self, run_id: UUID, usage: Any, finish_reason: str | None) -> None:
        """Do nothing."""

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Close the record."""
        ended_s = time.perf_counter()
        opened = self._open.pop(run_id, None)
        if opened is None:
            return
        label, started_s = opened
        first_s = self._first.pop(run_id, ended_s)
        message = getattr(response.generations[0][0], "message", None)
        if not isinstance(message, AIMessage):
            return
        usage = message.usage_metadata
        cached = usage.get("input_token_details", {}).get("cache_read") if usage else None
        self.records.append(
            CallRecord(
                label=label,
                started_s=started_s,
                ttft_s=first_s - started_s,
                ended_s=ended_s,
                prompt_tokens=usage["input_tokens"] if usage else 0,
                cached_tokens=cached,
                output_tokens=usage["output_tokens"] if usage else 0,
                text=_comparable(message),
            )
        )

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a failed call."""
        self._open.pop(run_id, None)
        self._first.pop(run_id, None)


def _comparable(message: AIMessage) -> str:
    """Return what the model said, without ids that are random by design."""
    calls = [(call["name"], sorted(call["args"].items())) for call in message.tool_calls]
    return f"{message.text}|{calls}"


def concurrency(records: list[CallRecord]) -> float:
    """Return the mean number of calls under way between the first start and the last end."""
    if not records:
        return 0.0
    span_s = max(r.ended_s for r in records) - min(r.started_s for r in records)
    return sum(r.ended_s - r.started_s for r in records) / span_s if span_s > 0 else 0.0
