"""Turns signals into ledger spans and remembers which run each belongs to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from pancake_langgraph._types import SpanId, Usage
from pancake_langgraph.ledger import Event, MarkKind, SpanEnded, SpanKind, SpanMarked, SpanStarted
from pancake_langgraph.prompts.outlook import Spot
from pancake_langgraph.runtime.signals import Closed, FirstPiece, Measured, Opened, ToolNamed

_MAX_OPEN_SPANS = 65_536


@dataclass(slots=True)
class OpenSpan:
    """A span that has not ended.

    `root_id` is the run at the top of its chain, `spot` where a node's runs; `is_choice` says that a node is expected
    to lead to one of its successors only.
    """

    opened: Opened
    root_id: UUID
    usage: Usage | None = None
    spot: Spot | None = None
    is_choice: bool = False
    span_id: SpanId = field(init=False)

    def __post_init__(self) -> None:
        """Write the id out once: it stands in every event of the span and of those inside."""
        self.span_id = SpanId(self.opened.run_id.hex)


class SpanBook:
    """Open spans by run id, bounded.  Not thread-safe."""

    def __init__(self, record: Callable[[Event], None]) -> None:
        """Write to `record`."""
        self._record = record
        self._open: OrderedDict[UUID, OpenSpan] = OrderedDict()
        self._nodes: OrderedDict[tuple[str, str], UUID] = OrderedDict()

    def open(self, signal: Opened) -> OpenSpan:
        """Book a start; return the span."""
        parent = self._parent_of(signal)
        span = OpenSpan(signal, parent.root_id if parent else signal.run_id)
        self._open[signal.run_id] = span
        if len(self._open) > _MAX_OPEN_SPANS:
            self._open.popitem(last=False)
        if signal.kind is SpanKind.NODE:
            self._nodes[signal.thread_id, signal.checkpoint_ns] = signal.run_id
            if len(self._nodes) > _MAX_OPEN_SPANS:
                self._nodes.popitem(last=False)
        self._record(
            SpanStarted(
                at_s=signal.at_s,
                span_id=span.span_id,
                kind=signal.kind,
                name=signal.name,
                thread_id=signal.thread_id or None,
                parent_id=parent.span_id if parent else None,
            )
        )
        return span

    def get(self, run_id: UUID) -> OpenSpan | None:
        """Return an open span."""
        return self._open.get(run_id)

    def node_at(self, thread_id: str, checkpoint_ns: str) -> OpenSpan | None:
        """Return the open node that runs under exactly this namespace."""
        run_id = self._nodes.get((thread_id, checkpoint_ns))
        return self._open.get(run_id) if run_id else None

    def run_of(self, thread_id: str) -> OpenSpan | None:
        """Return the open run of a thread that began last."""
        for span in reversed(self._open.values()):
            if span.opened.kind is SpanKind.RUN and span.opened.thread_id == thread_id:
                return span
        return None

    def _parent_of(self, signal: Opened) -> OpenSpan | None:
        """Return the nearest open ancestor: by run id, or by namespace where runs in between were not reported."""
        if signal.parent_id is None:
            return None
        if (parent := self._open.get(signal.parent_id)) is not None:
            return parent
        namespace = signal.checkpoint_ns
        if signal.kind is SpanKind.NODE:
            namespace = namespace.rpartition("|")[0]
        while namespace:
            if (node := self.node_at(signal.thread_id, namespace)) is not None:
                return node
            namespace = namespace.rpartition("|")[0]
        return None

    def mark(self, signal: FirstPiece | ToolNamed) -> None:
        """Book an instant."""
        named = isinstance(signal, ToolNamed)
        span = self._open.get(signal.run_id)
        self._record(
            SpanMarked(
                at_s=signal.at_s,
                span_id=span.span_id if span is not None else SpanId(signal.run_id.hex),
                mark=MarkKind.FIRST_TOOL_NAME if named else MarkKind.FIRST_TOKEN,
                value=signal.tool_name if isinstance(signal, ToolNamed) else "",
            )
        )

    def measure(self, signal: Measured) -> None:
        """Keep the token counts for the end of the span."""
        if (span := self._open.get(signal.run_id)) is not None:
            span.usage = signal.usage

    def close(self, signal: Closed) -> OpenSpan | None:
        """Book an end; return the span, or `None` when its start was not seen."""
        span = self._open.pop(signal.run_id, None)
        if span is None:
            return None
        opened = span.opened
        if opened.kind is SpanKind.NODE:
            self._nodes.pop((opened.thread_id, opened.checkpoint_ns), None)
        usage = span.usage
        self._record(
            SpanEnded(
                at_s=signal.at_s,
                span_id=span.span_id,
                status=signal.status,
                prompt_tokens=usage.prompt_tokens if usage else None,
                cached_tokens=usage.cached_tokens if usage else None,
                completion_tokens=usage.completion_tokens if usage else None,
            )
        )
        return span

    def num_open(self, kind: SpanKind) -> int:
        """Return how many spans of a kind are open."""
        return sum(1 for span in self._open.values() if span.opened.kind is kind)
