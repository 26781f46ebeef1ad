"""What the runtime teaches the forecast about real graphs: each transition once, from the branch that caused it."""

import asyncio
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START
from langgraph.types import Command, RetryPolicy, Send, interrupt

from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.forecast.transitions import TransitionForecaster
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.runtime.trail import MAX_CLUES
from pancake_langgraph.runtime.trails import MAX_EQUAL_SOURCES


def load_shapes() -> ModuleType:
    name = "pancake_graph_shapes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "graph_shapes.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by imports of the libraries, not by us
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


shapes = load_shapes()
S, E = "__start__", "__end__"


class Diary(TransitionForecaster):
    """Writes down what it is taught."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self.contexts: dict[tuple[str, str], tuple[str, ...]] = {}
        self.waits: dict[tuple[str, str], float] = {}

    def observe_transition(self, graph_id: str, source: str, target: str, **more: Any) -> None:
        self.seen.append((source, target))
        self.contexts[source, target] = tuple(more["context"])
        self.waits[source, target] = more["elapsed_s"]
        super().observe_transition(graph_id, source, target, **more)


@contextmanager
def watched(graph: Any) -> Iterator[tuple[Any, Diary, Runtime]]:
    diary = Diary()
    with Runtime(RuntimeSettings(engine="null"), forecaster=diary) as runtime:
        yield attach(graph, runtime=runtime), diary, runtime
        assert runtime.wait_idle()
        assert runtime.statistics().failed_signals == 0


def taught(graph: Any, inputs: Any = None, *, thread: str = "t") -> Diary:
    with watched(graph) as (attached, diary, runtime):
        attached.invoke(inputs or {"seen": []}, {"configurable": {"thread_id": thread}})
        assert runtime.wait_idle()
    return diary


CONFIG: Any = {"configurable": {"thread_id": "t"}}

EXPECTED: dict[str, set[tuple[str, str]]] = {
    "chain": {(S, "n0"), ("n0", "n1"), ("n1", "n2"), ("n2", E)},
    "join": {(S, "a"), (S, "b"), ("b", "b2"), ("a", "c"), ("b2", "c"), ("c", E)},
    "deferred": {(S, "a"), (S, "b"), ("b", "b2"), ("a", "last"), ("b2", "last"), ("last", E)},
    "path_map": {(S, "a"), ("a", "c"), ("c", E)},
    "nested": {
        (S, "a"),
        ("a", "sub|a"),
        ("sub|a", "sub|inner|a"),
        ("sub|inner|a", "sub|inner|b"),
        ("sub|inner|b", "c"),
        ("c", E),
    },
    "nested_parent_command": {(S, "sub|leave"), ("sub|leave", "c"), ("c", E)},
    "edge_and_command": {(S, "a"), ("a", "b"), ("a", "c"), ("b", E), ("c", E)},
    "command_in_helper": {(S, "a"), ("a", "b"), ("b", E)},
    "agent": {(S, "model"), ("model", "tools"), ("tools", "model"), ("model", E)},
    "supervisor": {
        (S, "supervisor|agent"),
        ("supervisor|agent", "supervisor|tools"),
        ("supervisor|tools", "math|model"),
        ("math|model", "math|tools"),
        ("math|tools", "math|model"),
        ("math|model", "supervisor|agent"),
        ("supervisor|agent", E),
    },
    "swarm": {
        (S, "Alice|model"),
        ("Alice|model", "Alice|tools"),
        ("Alice|tools", "Bob|model"),
        ("Bob|model", E),
    },
    "functional": {(S, "flow"), ("flow", "flow|work"), ("flow|work", E)},
    "no_path_map": {(S, "a"), ("a", "b"), ("b", E)},
}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_each_shape_teaches_exactly_its_transitions_and_each_once(name: str) -> None:
    shape = shapes.SHAPES[name]
    diary = taught(shape.build(), shape.inputs)
    assert set(diary.seen) == EXPECTED[name]
    assert len(diary.seen) == len(EXPECTED[name])


def test_each_worker_of_a_fan_out_leads_on_itself_and_is_one_target_of_the_plan() -> None:
    diary = taught(shapes.send())
    assert sorted(diary.seen) == sorted([(S, "plan"), ("plan", "work"), *[("work", "merge")] * 3, ("merge", E)])


def test_a_wide_fan_out_teaches_a_bounded_number_of_transitions() -> None:
    graph = shapes.builder("plan", "work", "merge").add_edge(START, "plan").add_edge("work", "merge")
    graph.add_conditional_edges("plan", lambda _: [Send("work", {"seen": []}) for _ in range(40)], ["work"])
    assert taught(graph.compile()).seen.count(("work", "merge")) == MAX_EQUAL_SOURCES


def test_parallel_branches_do_not_mix() -> None:
    graph = shapes.builder("a", "a2", "a3", "b", "b2", "b3")
    for source, target in [(START, "a"), ("a", "a2"), ("a2", "a3"), (START, "b"), ("b", "b2"), ("b2", "b3")]:
        graph.add_edge(source, target)
    diary = taught(graph.compile())
    assert set(diary.seen) == {
        (S, "a"),
        (S, "b"),
        ("a", "a2"),
        ("a2", "a3"),
        ("b", "b2"),
        ("b2", "b3"),
        ("a3", E),
        ("b3", E),
    }
    assert diary.contexts["a2", "a3"] == (S, "a")
    assert diary.contexts["b2", "b3"] == (S, "b")


@pytest.mark.parametrize("ways", [("x", "y"), ("y", "x"), ("x", "x")])
def test_of_two_parallel_routers_with_the_same_targets_each_is_taught_its_own_way(ways: tuple[str, str]) -> None:
    graph = shapes.builder("a", "b", "x", "y").add_edge(START, "a").add_edge(START, "b")
    graph.add_conditional_edges("a", lambda _: ways[0], {"x": "x", "y": "y"})
    graph.add_conditional_edges("b", lambda _: ways[1], {"x": "x", "y": "y"})
    diary = taught(graph.compile())
    assert {pair for pair in diary.seen if pair[0] in ("a", "b")} == {("a", ways[0]), ("b", ways[1])}


def test_two_commands_in_parallel_are_told_apart_too() -> None:
    def going(target: str) -> Any:
        def node(state: Any) -> Command[Literal["x", "y"]]:
            return Command(goto=target)

        return node

    graph = shapes.builder("x", "y").add_node("a", going("x")).add_node("b", going("y"))
    diary = taught(graph.add_edge(START, "a").add_edge(START, "b").compile())
    assert {pair for pair in diary.seen if pair[0] in ("a", "b")} == {("a", "x"), ("b", "y")}


@pytest.mark.parametrize("when", ["interrupt_before", "interrupt_after"])
def test_a_static_interrupt_is_no_end_and_the_resumed_run_goes_on_from_there(when: str) -> None:
    stop = "n1" if when == "interrupt_before" else "n0"
    graph = shapes.chain().builder.compile(checkpointer=InMemorySaver(), **{when: [stop]})
    with watched(graph) as (attached, diary, runtime):
        attached.invoke({"seen": []}, CONFIG)
        assert runtime.wait_idle()
        assert diary.seen == [(S, "n0")]
        attached.invoke(None, CONFIG)
        assert runtime.wait_idle()
    assert diary.seen == [(S, "n0"), ("n0", "n1"), ("n1", "n2"), ("n2", E)]
    # How long a person took to answer says nothing about the graph.
    assert diary.waits["n0", "n1"] != diary.waits["n0", "n1"]


def test_an_interrupt_inside_a_sub_graph_goes_on_inside_it() -> None:
    inner = shapes.builder("x").add_node("ask", lambda _: {"seen": [interrupt("sure?")]})
    inner.add_edge(START, "x").add_edge("x", "ask")
    graph = shapes.builder("a", "z").add_node("sub", inner.compile())
    graph.add_edge(START, "a").add_edge("a", "sub").add_edge("sub", "z")
    with watched(graph.compile(checkpointer=InMemorySaver())) as (attached, diary, runtime):
        attached.invoke({"seen": []}, CONFIG)
        assert runtime.wait_idle()
        before = list(diary.seen)
        attached.invoke(Command(resume="yes"), CONFIG)
        assert runtime.wait_idle()
    assert before == [(S, "a"), ("a", "sub|x"), ("sub|x", "sub|ask")]
    assert diary.seen[3:] == [("sub|ask", "z"), ("z", E)]


def test_a_resumed_run_whose_beginning_was_not_seen_teaches_nothing_about_the_start() -> None:
    graph = shapes.chain().builder.compile(checkpointer=InMemorySaver(), interrupt_before=["n1"])
    graph.invoke({"seen": []}, CONFIG)
    with watched(graph) as (attached, diary, runtime):
        attached.invoke(None, CONFIG)
        assert runtime.wait_idle()
    assert diary.seen == [("n1", "n2"), ("n2", E)]


def test_a_new_input_after_an_interrupt_starts_anew() -> None:
    graph = shapes.chain().builder.compile(checkpointer=InMemorySaver(), interrupt_before=["n1"])
    with watched(graph) as (attached, diary, runtime):
        for _ in range(2):
            attached.invoke({"seen": []}, CONFIG)
            assert runtime.wait_idle()
    assert diary.seen == [(S, "n0"), (S, "n0")]


def test_a_retried_node_counts_once() -> None:
    tries = []

    def flaky(state: Any) -> dict[str, list[str]]:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError
        return {"seen": ["flaky"]}

    graph = shapes.builder("a", "z").add_node("flaky", flaky, retry_policy=RetryPolicy(initial_interval=0.001))
    diary = taught(graph.add_edge(START, "a").add_edge("a", "flaky").add_edge("flaky", "z").compile())
    assert len(tries) == 3
    assert diary.seen == [(S, "a"), ("a", "flaky"), ("flaky", "z"), ("z", E)]


def test_a_failed_run_ends_nowhere_and_counts_once_when_it_is_taken_up_again() -> None:
    broken = [True]

    def fails(state: Any) -> dict[str, list[str]]:
        if broken[0]:
            raise ValueError("broken")
        return {"seen": ["fails"]}

    graph = shapes.builder("a").add_node("fails", fails).add_edge(START, "a").add_edge("a", "fails")
    with watched(graph.compile(checkpointer=InMemorySaver())) as (attached, diary, runtime):
        with pytest.raises(ValueError, match="broken"):
            attached.invoke({"seen": []}, CONFIG)
        assert runtime.wait_idle()
        assert diary.seen == [(S, "a"), ("a", "fails")]
        broken[0] = False
        attached.invoke(None, CONFIG)
        assert runtime.wait_idle()
    assert diary.seen == [(S, "a"), ("a", "fails"), ("fails", E)]


async def test_a_cancelled_run_teaches_no_end() -> None:
    inside = asyncio.Event()

    async def stuck(state: Any) -> dict[str, list[str]]:
        inside.set()
        await asyncio.Event().wait()
        return {}

    graph = shapes.builder("a").add_node("stuck", stuck).add_edge(START, "a").add_edge("a", "stuck").compile()
    with watched(graph) as (attached, diary, runtime):
        run = asyncio.create_task(attached.ainvoke({"seen": []}))
        await asyncio.wait_for(inside.wait(), 20)
        run.cancel()
        await asyncio.wait([run])
        assert await asyncio.to_thread(runtime.wait_idle)
    assert diary.seen == [(S, "a"), ("a", "stuck")]


def test_a_run_that_hits_the_recursion_limit_teaches_no_end() -> None:
    from langgraph.errors import GraphRecursionError

    with watched(shapes.endless_loop()) as (attached, diary, runtime):
        with pytest.raises(GraphRecursionError):
            attached.invoke({"seen": []}, {**CONFIG, "recursion_limit": 6})
        assert runtime.wait_idle()
    assert E not in {target for _, target in diary.seen}
    assert diary.seen[:3] == [(S, "a"), ("a", "b"), ("b", "a")]


def test_tasks_of_the_functional_api_follow_one_another() -> None:
    @task
    def first(value: int) -> int:
        return value + 1

    @task
    def second(value: int) -> int:
        return value * 2

    @entrypoint()
    def flow(value: int) -> int:
        return second(first(value).result()).result()

    diary = taught(flow, 1)
    assert diary.seen == [
        (S, "flow"),
        ("flow", "flow|first"),
        ("flow|first", "flow|second"),
        ("flow|second", E),
    ]


def test_equal_node_names_in_two_sub_graphs_are_kept_apart() -> None:
    def inner() -> Any:
        return shapes.builder("a", "b").add_edge(START, "a").add_edge("a", "b").compile()

    graph = shapes.builder("a").add_node("one", inner()).add_node("two", inner())
    graph.add_edge(START, "a").add_edge("a", "one").add_edge("a", "two")
    diary = taught(graph.compile())
    assert set(diary.seen) == {
        (S, "a"),
        ("a", "one|a"),
        ("a", "two|a"),
        ("one|a", "one|b"),
        ("two|a", "two|b"),
        ("one|b", E),
        ("two|b", E),
    }


def test_trails_are_bounded_in_runs_and_clues() -> None:
    from uuid import UUID

    from pancake_langgraph._types import ThreadId
    from pancake_langgraph.forecast import Clue
    from pancake_langgraph.ledger import SpanKind, SpanStatus
    from pancake_langgraph.runtime.signals import Closed, Opened
    from pancake_langgraph.runtime.trails import Trails

    trails = Trails(TransitionForecaster(), {}, max_runs=4)

    def opened(number: int, kind: SpanKind, namespace: str = "") -> Opened:
        return Opened(0.0, UUID(int=number), None, kind, "n", ThreadId(f"t{number}"), namespace, step=1)

    for number in range(50):
        run, node = opened(2 * number, SpanKind.RUN), opened(2 * number + 1, SpanKind.NODE, "n:1")
        trails.run_started(run)
        trails.node_started(node, run.run_id)
        for value in range(100):
            trails.call_wrote(run.run_id, "n:1", [Clue("tool", "field", str(value))])
        situation = trails.situation(run.run_id, "n:1")
        assert situation is not None
        assert len(situation.clues) == MAX_CLUES
        if number % 2:
            trails.run_ended(run, Closed(1.0, run.run_id, SpanStatus.ERROR))
        assert len(trails) <= 8
    assert len(trails) == 7  # three that run, four that were cut


def test_one_endless_run_is_bounded_in_levels_executions_and_waiting_branches() -> None:
    from uuid import UUID

    from pancake_langgraph._types import ThreadId
    from pancake_langgraph.ledger import SpanKind, SpanStatus
    from pancake_langgraph.runtime.signals import Closed, Opened
    from pancake_langgraph.runtime.trail import MAX_LEVELS, MAX_TASKS, MAX_WAITING
    from pancake_langgraph.runtime.trails import Trails

    trails = Trails(TransitionForecaster(), {}, max_runs=4)
    run = Opened(0.0, UUID(int=1), None, SpanKind.RUN, "run", ThreadId("t"))
    trails.run_started(run)
    trail = trails._trails[run.run_id]

    def node(namespace: str, step: int, *, ends: bool) -> None:
        opened = Opened(0.0, UUID(int=2), None, SpanKind.NODE, "n", ThreadId("t"), namespace, step=step)
        trails.node_started(opened, run.run_id)
        if ends:
            trails.node_ended(opened, Closed(1.0, opened.run_id, SpanStatus.OK), run.run_id)

    for number in range(MAX_TASKS + 50):
        node(f"n:{number}", 1, ends=False)
    assert len(trail.open) == MAX_TASKS
    assert len(trail.levels[""].steps[1]) == MAX_TASKS
    assert trail.running["n"] == MAX_TASKS
    for step in range(2, 600, 2):  # steps in between are missing: nothing follows
        node(f"n:s{step}", step, ends=True)
    assert len(trail.levels[""].waiting) == MAX_WAITING
    assert len(trail.levels[""].steps) <= 2
    for number in range(MAX_LEVELS + 50):
        node(f"outer:{number}|n:1", 1, ends=True)
    assert len(trail.levels) == MAX_LEVELS
