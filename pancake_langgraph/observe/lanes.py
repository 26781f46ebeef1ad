"""Lays spans out in lanes, so that slices on one lane nest or follow each other but never cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pancake_langgraph._types import SpanId
from pancake_langgraph.ledger import SpanKind
from pancake_langgraph.observe.spans import Span

_RANK = {SpanKind.RUN: 0, SpanKind.NODE: 1, SpanKind.CALL: 2, SpanKind.TOOL: 2, SpanKind.WARM: 2}


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of time with whole microseconds; `[start_us, end_us)`."""

    start_us: int
    end_us: int


def span_lanes(spans: Sequence[tuple[Span, Slice]]) -> dict[SpanId, int]:
    """Give every span a lane number, counted from 0.

    A span shares a lane with another one at the same time only when it lies inside it *and* descends from it: parallel
    workers go to lanes of their own instead of looking nested.  All spans should be of one thread.
    """
    by_id = {span.span_id: span for span, _ in spans}
    stacks: list[list[tuple[Span, Slice]]] = []
    lanes: dict[SpanId, int] = {}
    for span, piece in sorted(spans, key=lambda entry: (entry[1].start_us, _RANK[entry[0].kind], -entry[1].end_us)):
        lane = _first_fit(span, piece, stacks, by_id, preferred=lanes.get(span.parent_id) if span.parent_id else None)
        if lane == len(stacks):
            stacks.append([])
        stacks[lane].append((span, piece))
        lanes[span.span_id] = lane
    return lanes


def _first_fit(
    span: Span,
    piece: Slice,
    stacks: list[list[tuple[Span, Slice]]],
    by_id: Mapping[SpanId, Span],
    *,
    preferred: int | None,
) -> int:
    order = list(range(len(stacks)))
    if preferred is not None:
        order.remove(preferred)
        order.insert(0, preferred)
    for lane in order:
        stack = stacks[lane]
        while stack and stack[-1][1].end_us <= piece.start_us and not _holds(stack[-1], span, piece, by_id):
            stack.pop()
        if not stack or _holds(stack[-1], span, piece, by_id):
            return lane
    return len(stacks)


def _holds(outer: tuple[Span, Slice], span: Span, piece: Slice, by_id: Mapping[SpanId, Span]) -> bool:
    if outer[1].end_us < piece.end_us:
        return False
    if span.parent_id is None or span.parent_id not in by_id:  # the parent is no recorded span: go by kind
        return _RANK[outer[0].kind] < _RANK[span.kind]
    return _descends(span, outer[0].span_id, by_id)


def _descends(span: Span, ancestor_id: SpanId, by_id: Mapping[SpanId, Span]) -> bool:
    seen: set[SpanId] = set()
    parent_id = span.parent_id
    while parent_id is not None and parent_id not in seen:
        if parent_id == ancestor_id:
            return True
        seen.add(parent_id)
        parent = by_id.get(parent_id)
        parent_id = parent.parent_id if parent else None
    return False


def free_lanes(pieces: Sequence[Slice]) -> list[int]:
    """Give pieces that have nothing to do with each other lanes on which they never overlap, in input order."""
    lanes = [0] * len(pieces)
    busy_until_us: list[int] = []
    for index in sorted(range(len(pieces)), key=lambda position: pieces[position].start_us):
        piece = pieces[index]
        lane = next((at for at, end_us in enumerate(busy_until_us) if end_us <= piece.start_us), len(busy_until_us))
        if lane == len(busy_until_us):
            busy_until_us.append(0)
        busy_until_us[lane] = max(piece.end_us, piece.start_us + 1)
        lanes[index] = lane
    return lanes
