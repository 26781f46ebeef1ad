"""Writes a ledger's events as a trace file that Perfetto (ui.perfetto.dev) and `chrome://tracing` open.

Two groups of tracks come out.  The first has one track per LangGraph thread with nested slices run > node > model call
(with `prefill` until the first token and `decode` after it) > tool; work that runs in parallel inside one thread gets
further lanes.  The second has the warm-ups and prefetches, each named by its outcome, with the reason in its
arguments, an arrow to the model call that it served, and counters of what is open.  Nothing of a prompt is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pancake_langgraph._types import Outcome, SpanId, ThreadId
from pancake_langgraph.ledger import Event, SpanKind
from pancake_langgraph.observe.lanes import Slice, free_lanes, span_lanes
from pancake_langgraph.observe.spans import Action, Span, Story, agent_matches, read_story

_THREADS_PID = 1
_ACTIONS_PID = 2
_MAX_NAME_CHARS = 120
_NO_THREAD = ThreadId("")

#: Colour names that trace viewers know; Perfetto itself colours by slice name, which begins with the outcome.
_COLORS = {
    Outcome.USED: "good",
    Outcome.LATE: "bad",
    Outcome.WASTED: "terrible",
    Outcome.FAILED: "black",
    Outcome.REJECTED: "grey",
}

TraceEvent = dict[str, Any]


def write_trace(events: Iterable[Event], path: Path | str, *, process_name: str) -> int:
    """Write `events` to `path` and return how many trace events that made.

    May be called while the run still goes on: what has not ended yet is closed at the last time stamp and carries
    `"open": true`.  An existing file is replaced.

    Raises:
        OSError: if the file cannot be written.
    """
    trace = build_trace(events, process_name=process_name)
    Path(path).write_text(json.dumps(trace, separators=(",", ":")) + "\n", encoding="utf-8")
    return len(trace["traceEvents"])


def build_trace(events: Iterable[Event], *, process_name: str) -> dict[str, Any]:
    """Return the trace as a JSON object.  Time stamps are whole microseconds since the first event, in order."""
    builder = _TraceBuilder(read_story(events), process_name)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"producer": "pancake-langgraph", "process": process_name},
        "traceEvents": builder.build(),
    }


class _TraceBuilder:
    """Collects the trace events of one story."""

    def __init__(self, story: Story, process_name: str) -> None:
        self._story = story
        self._process_name = process_name
        self._metadata: list[TraceEvent] = []
        self._timed: list[TraceEvent] = []
        self._call_tracks: dict[SpanId, int] = {}
        self._num_flows = 0

    def build(self) -> list[TraceEvent]:
        self._name_process(_THREADS_PID, self._process_name)
        self._name_process(_ACTIONS_PID, f"{self._process_name}: warm-ups")
        self._add_threads()
        self._add_actions()
        self._add_warm_spans()
        self._add_breakers()
        self._add_counters()
        # A stable sort keeps parents before children that begin in the same microsecond.
        return self._metadata + sorted(self._timed, key=lambda event: int(event["ts"]))

    def _us(self, at_s: float) -> int:
        return max(0, round((at_s - self._story.start_s) * 1e6))

    def _piece(self, start_s: float, end_s: float) -> Slice:
        start_us = self._us(start_s)
        return Slice(start_us, max(start_us, self._us(end_s)))

    def _name_process(self, pid: int, name: str) -> None:
        self._metadata.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        sort = {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        self._metadata.append(sort)

    def _name_track(self, pid: int, tid: int, name: str) -> None:
        self._metadata.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        sort = {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        self._metadata.append(sort)

    def _slice(self, pid: int, tid: int, name: str, category: str, piece: Slice, **extra: Any) -> None:
        event = {"ph": "X", "name": _short(name), "cat": category, "pid": pid, "tid": tid, "ts": piece.start_us}
        self._timed.append(event | {"dur": piece.end_us - piece.start_us} | extra)

    def _instant(self, pid: int, tid: int, name: str, category: str, at_s: float, scope: str, **extra: Any) -> None:
        event = {"ph": "i", "name": _short(name), "cat": category, "pid": pid, "tid": tid, "s": scope}
        self._timed.append(event | {"ts": self._us(at_s)} | extra)

    # -- threads --------------------------------------------------------------------------------------------------

    def _add_threads(self) -> None:
        by_thread: dict[ThreadId, list[Span]] = {}
        for span in self._story.spans:
            if span.kind is not SpanKind.WARM:
                by_thread.setdefault(span.thread_id or _NO_THREAD, []).append(span)
        next_tid = 1
        for thread_id, spans in by_thread.items():
            pieces = [(span, self._piece(span.start_s, span.end_s)) for span in spans]
            lanes = span_lanes(pieces)
            width = max(lanes.values()) + 1
            label = f"thread {thread_id}" if thread_id else "no thread id"
            for lane in range(width):
                self._name_track(_THREADS_PID, next_tid + lane, label if lane == 0 else f"{label} (lane {lane + 1})")
            for span, piece in sorted(pieces, key=lambda entry: (entry[1].start_us, -entry[1].end_us)):
                self._add_span(span, piece, next_tid + lanes[span.span_id])
            next_tid += width

    def _add_span(self, span: Span, piece: Slice, tid: int) -> None:
        args: dict[str, Any] = {"status": span.status.value if span.status else "open"}
        if span.is_open:
            args["open"] = True
        if span.kind is SpanKind.CALL:
            self._call_tracks[span.span_id] = tid
            args |= {
                "prompt_tokens": _or_unknown(span.prompt_tokens),
                "cached_tokens": _or_unknown(span.cached_tokens),
                "completion_tokens": _or_unknown(span.completion_tokens),
            }
            if span.first_token_s is not None:
                args["ttft_ms"] = round((span.first_token_s - span.start_s) * 1e3, 3)
        self._slice(_THREADS_PID, tid, span.name, span.kind.value, piece, args=args)
        if span.kind is SpanKind.CALL:
            self._add_phases(span, piece, tid)
        if span.first_tool is not None:
            at_s, tool = span.first_tool
            within_s = min(max(at_s, span.start_s), span.end_s)
            self._instant(_THREADS_PID, tid, f"tool named: {tool}", "mark", within_s, "t", args={"tool": _short(tool)})

    def _add_phases(self, span: Span, piece: Slice, tid: int) -> None:
        if span.first_token_s is None:
            self._slice(_THREADS_PID, tid, "prefill", "phase", piece)
            return
        first_us = min(max(self._us(span.first_token_s), piece.start_us), piece.end_us)
        self._slice(_THREADS_PID, tid, "prefill", "phase", Slice(piece.start_us, first_us))
        self._slice(_THREADS_PID, tid, "decode", "phase", Slice(first_us, piece.end_us))

    # -- actions --------------------------------------------------------------------------------------------------

    def _add_actions(self) -> None:
        actions = self._story.actions
        pieces = [self._piece(action.planned_s, action.end_s) for action in actions]
        taken = [index for index, action in enumerate(actions) if action.outcome is not Outcome.REJECTED]
        lanes = free_lanes([pieces[index] for index in taken])
        for lane in range(max(lanes, default=-1) + 1):
            self._name_track(_ACTIONS_PID, lane + 2, f"actions {lane + 1}")
        for index, lane in zip(taken, lanes, strict=True):
            self._add_action(actions[index], pieces[index], lane + 2)
        if len(taken) < len(actions):
            self._name_track(_ACTIONS_PID, 1, "rejected")
        for action in actions:
            if action.outcome is Outcome.REJECTED:
                name = f"rejected: {action.kind.value} {action.agent}"
                self._instant(_ACTIONS_PID, 1, name, "action", action.end_s, "t", args=_action_args(action))

    def _add_action(self, action: Action, piece: Slice, tid: int) -> None:
        state = action.outcome.value if action.outcome else "open"
        extra: dict[str, Any] = {"args": _action_args(action)}
        if action.outcome:
            extra["cname"] = _COLORS[action.outcome]
        self._slice(_ACTIONS_PID, tid, f"{state}: {action.kind.value} {action.agent}", "action", piece, **extra)
        if action.submitted_s is not None:
            submitted_us = min(max(self._us(action.submitted_s), piece.start_us), piece.end_us)
            self._slice(_ACTIONS_PID, tid, "submitted", "action", Slice(submitted_us, piece.end_us))
        served = self._served_call(action)
        if served is not None:
            self._num_flows += 1  # viewers read flow ids as numbers
            flow = {"name": "serves", "cat": "flow", "id": self._num_flows}
            start = flow | {"ph": "s", "pid": _ACTIONS_PID, "tid": tid, "ts": piece.start_us}
            call_us = self._us(served.start_s)
            end = flow | {"ph": "f", "bp": "e", "pid": _THREADS_PID, "tid": self._call_tracks[served.span_id]}
            self._timed += [start, end | {"ts": call_us}]

    def _served_call(self, action: Action) -> Span | None:
        """Return the first call of the action's agent and thread that began after the plan, if the action helped."""
        if action.outcome not in (Outcome.USED, Outcome.LATE):
            return None
        calls = (
            span
            for span in self._story.spans
            if span.kind is SpanKind.CALL
            and span.start_s >= action.planned_s
            and (not action.thread_id or span.thread_id == action.thread_id)
            and agent_matches(action.agent, span.name)
        )
        return min(calls, key=lambda span: span.start_s, default=None)

    def _add_warm_spans(self) -> None:
        spans = [span for span in self._story.spans if span.kind is SpanKind.WARM]
        pieces = [self._piece(span.start_s, span.end_s) for span in spans]
        lanes = free_lanes(pieces)
        for lane in range(max(lanes, default=-1) + 1):
            self._name_track(_ACTIONS_PID, 1000 + lane, f"requests {lane + 1}")
        for span, piece, lane in zip(spans, pieces, lanes, strict=True):
            args = {"status": span.status.value} if span.status else {"status": "open", "open": True}
            self._slice(_ACTIONS_PID, 1000 + lane, f"request: {span.name}", "warm", piece, args=args)

    def _add_breakers(self) -> None:
        for change in self._story.breaker_changes:
            name = f"breaker of the {change.part} {'opened' if change.is_open else 'closed'}"
            self._instant(_ACTIONS_PID, 0, name, "breaker", change.at_s, "g", args={"reason": _short(change.reason)})

    def _add_counters(self) -> None:
        steps: list[tuple[int, int, int]] = []
        for action in self._story.actions:
            steps.append((self._us(action.planned_s), 1, action.num_tokens))
            if action.outcome is not None:
                steps.append((self._us(action.end_s), -1, -action.num_tokens))
        num_open = tokens = 0
        totals: dict[int, tuple[int, int]] = {}
        for at_us, delta, delta_tokens in sorted(steps):
            num_open, tokens = num_open + delta, tokens + delta_tokens
            totals[at_us] = (num_open, tokens)
        for at_us, (actions, open_tokens) in totals.items():
            counter = {"ph": "C", "pid": _ACTIONS_PID, "tid": 0, "ts": at_us}
            self._timed.append(counter | {"name": "open actions", "args": {"actions": actions}})
            self._timed.append(counter | {"name": "open action tokens", "args": {"tokens": open_tokens}})


def _action_args(action: Action) -> dict[str, Any]:
    args: dict[str, Any] = {
        "agent": _short(action.agent),
        "thread": action.thread_id or "",
        "planned_because": _short(action.plan_reason),
        "reason": _short(action.reason),
        "tokens": action.num_tokens,
        "computed_tokens": _or_unknown(action.computed_tokens),
        "outcome": action.outcome.value if action.outcome else "open",
    }
    return args if action.outcome else args | {"open": True}


def _or_unknown(count: int | None) -> int | str:
    return "unknown" if count is None else count


def _short(text: str) -> str:
    return text if len(text) <= _MAX_NAME_CHARS else text[: _MAX_NAME_CHARS - 1] + "…"
