"""Phases in a running app: attaching reads them, runs correct them, and the graph does what it did."""

import importlib.util
import logging
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from pancake_langgraph import attach, phase
from pancake_langgraph._clock import VirtualClock
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.forecast import TransitionForecaster
from pancake_langgraph.runtime import Runtime
from pancake_langgraph.runtime import phases as runtime_phases
from pancake_langgraph.topology import read_topology


def load_shapes() -> ModuleType:
    path = Path(__file__).parents[1] / "graph_shapes.py"
    if "pancake_graph_shapes" not in sys.modules:
        spec = importlib.util.spec_from_file_location("pancake_graph_shapes", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by imports of the libraries, not by us
            spec.loader.exec_module(module)
    return sys.modules["pancake_graph_shapes"]


shapes = load_shapes()


def tool_loop(clock: VirtualClock, *, tool_s: float, node_s: float, marked: bool = True) -> Any:
    """An agent that calls one slow tool and then writes, declared to be far slower than it is."""

    @tool
    def look(q: str) -> str:
        """Look."""
        clock.advance(tool_s)
        return "found"

    declare = phase if marked else lambda **_: lambda target: target
    declare(kind="io", expect_s=10)(look)

    @declare(kind="reasoning", expect_s=10, may_need=["report"])
    def agent(state: MessagesState) -> dict[str, Any]:
        clock.advance(node_s)
        asked = any(message.type == "tool" for message in state["messages"])
        return {"messages": [("ai", "done") if asked else shapes.call_of("look", q="a")]}

    graph = StateGraph(MessagesState).add_node("agent", agent).add_node("tools", ToolNode([look]))
    graph.add_node("report", lambda state: {}, metadata={"pancake": {"kind": "generation"}})
    graph.add_edge(START, "agent").add_edge("tools", "agent").add_edge("report", END)
    graph.add_conditional_edges("agent", tools_condition, {"tools": "tools", END: "report"})
    return graph.compile(checkpointer=InMemorySaver())


def run(graph: Any, runtime: Runtime | None = None, thread: str = "t") -> list[tuple[str, str]]:
    result = graph.invoke({"messages": [("user", "go")]}, {"configurable": {"thread_id": thread}})
    if runtime is not None:
        assert runtime.wait_idle()
    return [(message.type, message.text) for message in result["messages"]]


def test_durations_start_as_declared_and_converge_to_what_is_measured() -> None:
    clock = VirtualClock(1.0)
    forecaster = TransitionForecaster()
    with Runtime(RuntimeSettings(engine="null"), clock=clock, forecaster=forecaster) as runtime:
        graph = attach(tool_loop(clock, tool_s=0.1, node_s=0.2), runtime=runtime)
        graph_id = read_topology(graph).fingerprint
        first = runtime.plan(graph)
        assert (first.step("tools").tools[0].seconds.p50_s, first.step("agent").seconds.p50_s) == (10.0, 10.0)
        assert forecaster.tool_seconds(graph_id, "look").p50_s == 10.0
        for number in range(20):
            run(graph, runtime, thread=str(number))
        plan = runtime.plan(graph)
        look = plan.step("tools").tools[0]
        assert (look.seconds.source, look.seconds.num_samples) == ("learnt", 20)
        assert look.seconds.p50_s == pytest.approx(0.1, rel=0.2)
        assert plan.step("agent").seconds.p50_s == pytest.approx(0.2, rel=0.2)
        assert forecaster.tool_seconds(graph_id, "look").p50_s == pytest.approx(0.1, rel=0.2)
        assert (plan.step("agent").kind_source, look.kind) == ("declared", "io")
        assert runtime.statistics().failed_signals == 0


def test_a_declared_need_is_forecast_with_its_reason() -> None:
    clock, forecaster = VirtualClock(), TransitionForecaster()
    with Runtime(RuntimeSettings(engine="null"), forecaster=forecaster) as runtime:
        graph_id = read_topology(attach(tool_loop(clock, tool_s=0, node_s=0), runtime=runtime)).fingerprint
        found = {c.node: c for c in forecaster.candidates(graph_id, "agent", horizon_steps=1)}
        assert found["report"].reason == "declared: agent may need it"
        assert found["report"].p_next > found["tools"].p_next


def test_a_marked_graph_does_what_the_unmarked_one_does() -> None:
    clock = VirtualClock()
    plain, marked = (tool_loop(clock, tool_s=0, node_s=0, marked=marked) for marked in (False, True))
    expected = run(plain)
    with Runtime(RuntimeSettings(engine="null")) as runtime:
        assert run(attach(marked, runtime=runtime), runtime) == expected
        assert runtime.statistics().failed_signals == 0
    config = {"configurable": {"thread_id": "t"}}
    steps = [[state.next for state in graph.get_state_history(config)] for graph in (plain, marked)]
    assert steps[0] == steps[1]


def test_whether_a_model_node_decides_or_writes_is_learnt_from_its_answers() -> None:
    def graph_of(answer: str) -> Any:
        model = FakeListChatModel(responses=[answer])

        def write(state: MessagesState) -> dict[str, Any]:
            return {"messages": [model.invoke(state["messages"])]}

        def again(state: MessagesState) -> str:
            return END

        graph = StateGraph(MessagesState).add_node("write", write).add_edge(START, "write")
        return graph.add_conditional_edges("write", again, [END]).compile()

    with Runtime(RuntimeSettings(engine="null")) as runtime:
        graph = attach(graph_of("word " * 200), runtime=runtime)
        assert runtime.plan(graph).step("write").kind_source == "topology"
        run(graph, runtime)
        assert [(s.kind, s.kind_source) for s in runtime.plan(graph).steps] == [("generation", "learnt")]
    with Runtime(RuntimeSettings(engine="null")) as runtime:
        graph = attach(graph_of("go left"), runtime=runtime)
        run(graph, runtime)
        assert [(s.kind, s.kind_source) for s in runtime.plan(graph).steps] == [("reasoning", "learnt")]


def test_bad_declarations_are_logged_when_a_graph_is_attached_and_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    graph = StateGraph(shapes.Trail)
    graph.add_node("a", shapes.step("a"), metadata={"pancake": {"expect_s": -1, "prompt": "a secret"}})
    graph.add_node("b", shapes.step("b"), metadata={"pancake": {"may_need": ["nobody"]}})
    compiled = graph.add_edge(START, "a").add_edge("a", "b").compile()
    with caplog.at_level(logging.WARNING), Runtime(RuntimeSettings(engine="null")) as runtime:
        attached = attach(compiled, runtime=runtime)
        assert attached.invoke({"seen": []}) == {"seen": ["a", "b"]}
    told = [record.getMessage() for record in caplog.records if "declared phase" in record.getMessage()]
    assert len(told) == 2
    assert "a: cannot declare a phase: got expect_s=-1" in told[0]
    assert "may_need names 'nobody'" in told[1]
    assert "secret" not in caplog.text


def test_calls_that_never_end_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from uuid import uuid4

    from pancake_langgraph._types import ThreadId
    from pancake_langgraph.ledger import SpanKind
    from pancake_langgraph.runtime.signals import Opened

    monkeypatch.setattr(runtime_phases, "_MAX_OPEN_CALLS", 16)
    watch = runtime_phases.PhaseWatch(TransitionForecaster())
    for number in range(100):
        watch.opened(
            Opened(
                at_s=float(number),
                run_id=uuid4(),
                parent_id=None,
                kind=SpanKind.CALL,
                name="write",
                thread_id=ThreadId("t"),
                checkpoint_ns="write:1",
                graph_id="g",
            )
        )
    assert watch.num_open == 16
