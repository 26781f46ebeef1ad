"""The timeline file against the rules of the JSON trace event format, checked strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph._types import ActionId, ActionKind, Outcome, SpanId, ThreadId
from pancake_langgraph.ledger import (
    ActionRecorded,
    ActionState,
    BreakerChanged,
    Event,
    Ledger,
    MarkKind,
    SpanEnded,
    SpanKind,
    SpanMarked,
    SpanStarted,
    SpanStatus,
)
from pancake_langgraph.observe import build_trace, summarize, write_trace

REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Fail on anything that a viewer may drop or draw wrongly."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    events = trace["traceEvents"]
    flows: dict[int, list[dict[str, Any]]] = {}
    stacks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    last_us = 0
    for event in events:
        missing = REQUIRED[event["ph"]] - event.keys()
        assert not missing, (event, missing)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] in processes
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= last_us, "time stamps must not go back"
        last_us = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named, event
            stack = stacks.setdefault((event["pid"], event["tid"]), [])
            end_us = event["ts"] + event["dur"]
            while stack and stack[-1][1] <= event["ts"] and stack[-1][1] < end_us:
                stack.pop()
            assert not stack or end_us <= stack[-1][1], f"slices cross on one track: {event}"
            stack.append((event["ts"], end_us))
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        elif event["ph"] in ("s", "f"):
            assert isinstance(event["id"], int)
            flows.setdefault(event["id"], []).append(event)
        elif event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
    slices = [event for event in events if event["ph"] == "X"]
    for pair in flows.values():
        assert [event["ph"] for event in pair] == ["s", "f"], "each arrow has one start and then one end"
        for event in pair:
            assert any(
                piece["pid"] == event["pid"]
                and piece["tid"] == event["tid"]
                and piece["ts"] <= event["ts"] <= piece["ts"] + piece["dur"]
                for piece in slices
            ), "an arrow must touch a slice"
    return events


class Script:
    """Writes events with little text."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def start(self, at_s: float, span: str, kind: SpanKind, name: str, parent: str | None, thread: str = "t1") -> None:
        parent_id = SpanId(parent) if parent else None
        self.events.append(SpanStarted(at_s, SpanId(span), kind, name, ThreadId(thread), parent_id))

    def end(self, at_s: float, span: str, status: SpanStatus = SpanStatus.OK, **tokens: int) -> None:
        self.events.append(SpanEnded(at_s, SpanId(span), status, **tokens))

    def mark(self, at_s: float, span: str, mark: MarkKind, value: str = "") -> None:
        self.events.append(SpanMarked(at_s, SpanId(span), mark, value))

    def action(self, at_s: float, action: str, state: ActionState, outcome: Outcome | None = None, **over: Any) -> None:
        fields: dict[str, Any] = {"kind": ActionKind.WARM, "agent": "writer", "thread_id": ThreadId("t1")}
        fields |= {"num_tokens": 1024, "reason": "certain successor"} | over
        self.events.append(ActionRecorded(at_s, ActionId(action), state, outcome=outcome, **fields))


def one_run() -> list[Event]:
    script = Script()
    script.start(100.0, "r", SpanKind.RUN, "LangGraph", None)
    script.start(100.1, "n1", SpanKind.NODE, "researcher", "r")
    script.start(100.1, "c1", SpanKind.CALL, "researcher", "n1")
    script.action(100.2, "a1", ActionState.PLANNED)
    script.action(100.3, "a1", ActionState.SUBMITTED)
    script.mark(100.6, "c1", MarkKind.FIRST_TOKEN)
    script.mark(100.7, "c1", MarkKind.FIRST_TOOL_NAME, "search")
    script.end(100.9, "c1", prompt_tokens=1500, cached_tokens=128, completion_tokens=8)
    script.start(100.9, "t1", SpanKind.TOOL, "search", "n1")
    script.end(101.5, "t1")
    script.end(101.5, "n1")
    script.start(101.5, "n2", SpanKind.NODE, "writer", "r")
    script.start(101.6, "c2", SpanKind.CALL, "writer", "n2")
    script.action(101.7, "a1", ActionState.SETTLED, Outcome.USED, reason="real call came", computed_tokens=896)
    script.mark(101.7, "c2", MarkKind.FIRST_TOKEN)
    script.end(102.0, "c2", prompt_tokens=1600)
    script.end(102.0, "n2")
    script.end(102.1, "r")
    script.events.append(BreakerChanged(102.1, "tier", True, "three time-outs in a row"))
    return script.events


def slices(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def test_a_run_nests_node_call_phases_and_tool_on_one_track():
    events = check_trace(build_trace(one_run(), process_name="demo"))
    track = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X" and e["pid"] == 1}
    assert len(track) == 1
    (prefill, second) = slices(events, "prefill")
    assert (prefill["ts"], prefill["dur"]) == (100_000, 500_000)
    assert second["dur"] == 100_000
    assert [piece["dur"] for piece in slices(events, "decode")] == [300_000, 300_000]
    assert slices(events, "search")[0]["dur"] == 600_000


def test_an_action_is_named_by_outcome_and_points_to_the_call_it_served():
    events = check_trace(build_trace(one_run(), process_name="demo"))
    (warm,) = slices(events, "used: warm writer")
    assert warm["args"]["reason"] == "real call came"
    assert warm["args"]["planned_because"] == "certain successor"
    assert warm["cname"] == "good"
    (end,) = [event for event in events if event["ph"] == "f"]
    writer_call = slices(events, "writer")[1]
    assert (end["tid"], end["ts"]) == (writer_call["tid"], writer_call["ts"])
    counters = [event["args"]["actions"] for event in events if event["name"] == "open actions"]
    assert counters == [1, 0]


def test_marks_and_breakers_are_instants():
    events = check_trace(build_trace(one_run(), process_name="demo"))
    instants = {event["name"]: event for event in events if event["ph"] == "i"}
    assert instants["tool named: search"]["ts"] == 700_000
    assert instants["breaker of the tier opened"]["args"] == {"reason": "three time-outs in a row"}


def test_unknown_token_counts_are_said_to_be_unknown():
    events = check_trace(build_trace(one_run(), process_name="demo"))
    args = [event["args"] for event in events if event.get("cat") == "call"]
    assert [piece["cached_tokens"] for piece in args] == [128, "unknown"]


def test_what_is_still_open_is_closed_at_the_last_time_stamp_and_marked():
    events = check_trace(build_trace(one_run()[:9], process_name="demo"))
    (tool,) = slices(events, "search")
    assert tool["args"]["open"] is True
    (run,) = slices(events, "LangGraph")
    assert run["args"]["open"] is True
    assert run["dur"] == 900_000
    assert slices(events, "open: warm writer")[0]["args"]["open"] is True


def test_parallel_workers_of_one_thread_get_lanes_of_their_own():
    script = Script()
    script.start(0.0, "r", SpanKind.RUN, "LangGraph", None)
    for index in range(3):
        script.start(0.1 + index / 100, f"n{index}", SpanKind.NODE, "worker", "r")
        script.start(0.2 + index / 100, f"c{index}", SpanKind.CALL, "worker", f"n{index}")
    for index in reversed(range(3)):
        script.end(1.0 - index / 100, f"c{index}")
        script.end(1.1 - index / 100, f"n{index}")
    script.end(2.0, "r")
    events = check_trace(build_trace(script.events, process_name="demo"))
    tids = [event["tid"] for event in events if event.get("cat") == "call"]
    assert len(set(tids)) == 3


def test_threads_have_tracks_named_after_them():
    script = Script()
    for thread in ("alpha", "beta"):
        script.start(0.0, f"r-{thread}", SpanKind.RUN, "LangGraph", None, thread)
        script.end(1.0, f"r-{thread}")
    events = check_trace(build_trace(script.events, process_name="demo"))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["thread alpha", "thread beta"]


def test_a_rejected_action_is_an_instant_not_a_slice():
    script = Script()
    script.action(1.0, "a1", ActionState.PLANNED)
    script.action(1.0, "a1", ActionState.SETTLED, Outcome.REJECTED, reason="no free pool")
    events = check_trace(build_trace(script.events, process_name="demo"))
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert instant["name"] == "rejected: warm writer"
    assert instant["args"]["reason"] == "no free pool"


def test_a_beginning_that_fell_out_of_the_ledger_does_no_harm():
    for cut in range(len(one_run()) + 1):
        check_trace(build_trace(one_run()[cut:], process_name="demo"))


def test_the_file_is_one_json_object(tmp_path: Path):
    path = tmp_path / "trace.json"
    count = write_trace(one_run(), path, process_name="demo")
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert len(check_trace(trace)) == count
    assert write_trace([], path, process_name="demo") > 0
    check_trace(json.loads(path.read_text(encoding="utf-8")))


def test_a_missing_folder_is_an_os_error(tmp_path: Path):
    with pytest.raises(OSError, match="No such file"):
        write_trace([], tmp_path / "none" / "trace.json", process_name="demo")


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Spans with any parents and times, actions in any state: also what a correct runtime would not write."""
    script = Script()
    moments = st.integers(0, 40).map(lambda tick: tick / 8)
    for index in range(draw(st.integers(0, 9))):
        parent = draw(st.none() | st.integers(0, 9).map(lambda number: f"s{number}"))
        kind = draw(st.sampled_from(list(SpanKind)))
        at_s = draw(moments)
        script.start(at_s, f"s{index}", kind, draw(st.sampled_from("abc")), parent, draw(st.sampled_from(["t", "u"])))
        if draw(st.booleans()):
            script.mark(draw(moments), f"s{index}", MarkKind.FIRST_TOKEN)
        if draw(st.booleans()):
            script.end(draw(moments), f"s{index}")
    for index in range(draw(st.integers(0, 5))):
        script.action(draw(moments), f"a{index}", ActionState.PLANNED, agent="a", thread_id=ThreadId("t"))
        outcome = draw(st.none() | st.sampled_from(list(Outcome)))
        if outcome:
            script.action(draw(moments), f"a{index}", ActionState.SETTLED, outcome, agent="a", thread_id=ThreadId("t"))
    return draw(st.permutations(script.events)) if draw(st.booleans()) else script.events


@given(histories())
def test_any_history_makes_a_valid_trace(history: list[Event]):
    check_trace(build_trace(history, process_name="demo"))


def test_the_summary_counts_what_the_ledger_holds():
    ledger = Ledger()
    for event in one_run():
        ledger.append(event)
    for number, outcome in enumerate((Outcome.WASTED, Outcome.REJECTED)):
        script = Script()
        script.action(103.0, f"b{number}", ActionState.PLANNED)
        script.action(103.0, f"b{number}", ActionState.SETTLED, outcome)
        for event in script.events:
            ledger.append(event)
    summary = summarize(ledger)
    assert (summary.runs, summary.calls, summary.tools) == (1, 2, 1)
    assert summary.ttft_s_by_agent["researcher"] == pytest.approx((0.5,))
    assert summary.outcomes[Outcome.USED] == 1
    assert summary.outcomes[Outcome.LATE] == 0
    assert (summary.prompt_tokens, summary.cached_tokens) == (3100, 128)
    assert (summary.warm_tokens, summary.warm_computed_tokens) == (1024, 896)
    assert summary.waste_ratio == pytest.approx(0.5)
    assert summary.breaker_openings == 1


def test_an_empty_summary_knows_nothing_and_says_so():
    summary = summarize(Ledger())
    assert summary.cached_tokens is None
    assert summary.waste_ratio is None
    assert summary.calls == 0


def test_the_summary_prints_as_tables():
    from rich.console import Console

    from pancake_langgraph.cli.report import summary_tables

    ledger = Ledger()
    for event in one_run():
        ledger.append(event)
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        for table in summary_tables(summarize(ledger)):
            console.print(table)
        text = console.export_text()
    assert "researcher" in text
    assert "used" in text
