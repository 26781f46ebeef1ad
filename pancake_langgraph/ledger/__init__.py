"""The append-only record of what happened and what was decided.  The runtime writes it; everything else only reads."""

from pancake_langgraph.ledger.events import (
    ActionRecorded,
    ActionState,
    BreakerChanged,
    Event,
    HintAnswered,
    MarkKind,
    SpanEnded,
    SpanKind,
    SpanMarked,
    SpanStarted,
    SpanStatus,
)
from pancake_langgraph.ledger.ledger import Ledger, LedgerStatistics

__all__ = [
    "ActionRecorded",
    "ActionState",
    "BreakerChanged",
    "Event",
    "HintAnswered",
    "Ledger",
    "LedgerStatistics",
    "MarkKind",
    "SpanEnded",
    "SpanKind",
    "SpanMarked",
    "SpanStarted",
    "SpanStatus",
]
