"""`pancake explain`: the graph in words, as Mermaid and as JSON; typed errors with the remedy."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.cli.explain import explain, load_graph
from pancake_langgraph.plan import CompiledPlan

APP = """
from typing import Literal, TypedDict
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command


class State(TypedDict):
    n: int


def a(state: State) -> Command[Literal["c"]]:
    return Command(goto="c")


def route(state: State):
    return "b" if state["n"] else END


def make():
    builder = StateGraph(State)
    builder.add_node("a", a).add_node("b", lambda state: {"n": 1}).add_node("c", lambda state: {"n": 2})
    builder.add_edge(START, "a").add_edge("a", "b").add_conditional_edges("b", route)
    return builder.compile(name="app")


def needs(argument):
    return make()


async def later():
    return make()


def broken():
    raise RuntimeError("no model")


graph = make()
builder = StateGraph(State)
number = 3
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "explained_app.py").write_text(APP)
    return "explained_app.py"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(explain, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def fail(*arguments: str) -> str:
    result = CliRunner().invoke(explain, list(arguments))
    assert result.exit_code == 1, result.output
    assert result.output.startswith("Error: ")
    return result.output


@pytest.mark.parametrize("spec", ["explained_app.py:graph", "explained_app.py:make", "explained_app:graph"])
def test_graphs_are_found_by_file_module_and_factory(app, spec):
    assert "Graph app: 3 nodes" in run(spec)


def test_words_say_what_is_certain_what_is_open_and_what_is_odd(app):
    said = run(f"{app}:graph")
    assert "then always b" in said
    assert "may jump to c" in said
    assert "expect b in 1 step(s), p=1.00 (fixed edge)" in said
    assert "may jump elsewhere: its targets are not declared" in said
    assert "both run" in said
    assert "flowchart TD" in said


def test_mermaid_output_is_only_mermaid(app):
    drawing = run(f"{app}:graph", "--format", "mermaid")
    assert drawing.startswith("flowchart TD\n")
    assert '{"?"}' in drawing


def test_json_output_has_topology_forecast_and_notes(app):
    said = json.loads(run(f"{app}:graph", "--format", "json"))
    assert [node["id"] for node in said["nodes"]] == ["a", "b", "c"]
    assert said["unknown_sources"] == ["b"]
    assert said["entry"] == ["a"]
    assert said["forecast"]["__start__"][0] == {"node": "a", "p_next": 1.0, "steps": 1, "reason": "fixed edge"}
    assert [note["code"] for note in said["notes"]] == ["edge-and-command"]


PHASED = """
from typing import TypedDict
from langgraph.graph import START, StateGraph
from pancake_langgraph import phase


class State(TypedDict):
    n: int


@phase(kind="io", expect_s=3, may_need=["c"])
def a(state: State):
    return {"n": 1}


builder = StateGraph(State)
builder.add_node("a", a)
builder.add_node("b", lambda state: {"n": 2}, metadata={"pancake": {"kind": "quick"}})
builder.add_node("c", lambda state: {"n": 3})
builder.add_edge(START, "a").add_conditional_edges("a", lambda state: "b", ["b", "c"])
graph = builder.compile()
"""


def test_the_plan_is_told_in_words_and_drawn(app, tmp_path):
    (tmp_path / "phased_app.py").write_text(PHASED)
    said = run("phased_app.py:graph")
    assert "Plan: 3 steps, 0 ways back" in said
    assert "1. a: io (declared), 3.0 s (declared)" in said
    assert "   may need c (declared)" in said
    assert "expect c in 1 step(s), p=0.83 (declared: a may need it)" in said
    assert "b: cannot declare a phase: got kind='quick'" in said
    assert "The plan as Mermaid:\nflowchart TD\n" in said


def test_the_plan_is_in_the_json_and_in_a_file_of_its_own(app, tmp_path):
    (tmp_path / "phased_app.py").write_text(PHASED)
    said = json.loads(run("phased_app.py:graph", "--format", "json", "--plan", "plan.json"))
    written = json.loads((tmp_path / "plan.json").read_text())
    assert said["plan"] == written
    plan = CompiledPlan.from_json(written)
    assert plan.fingerprint == said["fingerprint"]
    assert plan.step("a").seconds.p50_s == 3.0


RICH = """
from typing import Literal, TypedDict
from langchain_core.tools import tool
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send, interrupt


class State(TypedDict):
    messages: list


@tool
def look_up(word: str) -> str:
    "Look up."
    return word


def leave(state: State):
    return Command(goto="last", graph=Command.PARENT)


def ask(state: State):
    interrupt("go on?")


def spread(state: State):
    return [Send("work", state)]


def jump(state: State):
    return Command(goto="last")


def same(state: State):
    return {}


inner = StateGraph(State).add_node("leave", leave).add_edge(START, "leave").compile()
builder = StateGraph(State)
for name in ("left", "right", "work", "check", "last"):
    builder.add_node(name, same, defer=name == "last")
builder.add_node("merge", same).add_node("tools", ToolNode([look_up])).add_node("ask", ask)
builder.add_node("jump", jump).add_node("team", inner)
builder.add_edge(START, "left").add_edge(START, "right").add_edge(["left", "right"], "merge")
builder.add_conditional_edges("merge", spread, ["work"]).add_edge("work", "tools").add_edge("tools", "check")
builder.add_conditional_edges("check", lambda state: "tools", ["tools", "ask"]).add_edge("ask", "jump")
builder.add_conditional_edges("left", lambda state: END)
graph = builder.compile(interrupt_before=["merge"], interrupt_after=["check"])


@entrypoint()
def flow(value: int) -> int:
    return value
"""


@pytest.fixture
def rich(app: str, tmp_path: Path) -> str:
    (tmp_path / "rich_app.py").write_text(RICH)
    return "rich_app.py:graph"


def about(said: str, node: str) -> str:
    """Return the paragraph of one node."""
    return next(part for part in said.split("\n\n") if part.startswith(f"{node} ("))


def test_the_first_lines_sum_up_stops_loops_joins_and_fan_outs(rich):
    first = run(rich).split("\n\n")[0].splitlines()
    assert "Starts with: left, right" in first
    assert "Tools: look_up" in first
    assert "May stop for a person: ask (inside), check (after), merge (before)" in first
    assert "Loop 1: check, tools (2 nodes); left from check to ask" in first
    assert "Joins: merge" in first
    assert "Deferred: last" in first
    assert "Fan-outs: merge to work" in first
    assert "Undeclared jumps: jump, left, team|leave" in first


def test_every_node_says_what_it_calls_where_it_stops_and_what_it_waits_for(rich):
    said = run(rich)
    assert "calls tools look_up" in about(said, "tools")
    assert "in loop 1, of 2 node(s)" in about(said, "tools")
    assert "may stop before it" in about(said, "merge")
    assert "starts once left, right are done" in about(said, "merge")
    assert "may fan out to work, any number at once" in about(said, "merge")
    assert "may stop inside it, its code calls interrupt" in about(said, "ask")
    assert "may stop after it" in about(said, "check")
    assert "deferred: waits until all others are done" in about(said, "last")


@pytest.mark.parametrize(
    ("node", "why", "remedy"),
    [
        ("left", "a conditional edge without a path map", "add_conditional_edges(NODE, router,"),
        ("jump", "may return a Command with goto", 'Command[Literal["x", "y"]]'),
        ("team|leave", "jump out of its sub-graph by Command.PARENT", "where the sub-graph is added"),
    ],
)
def test_an_undeclared_jump_says_why_it_is_unknown_and_how_to_declare_it(rich, node, why, remedy):
    said = about(run(rich), node)
    assert why in said
    assert remedy in said


def test_the_functional_api_is_said_to_declare_nothing(rich):
    assert "why: the functional API declares no edges" in run("rich_app.py:flow")


def test_json_has_all_of_it(rich):
    said = json.loads(run(rich, "--format", "json"))
    nodes = {node["id"]: node for node in said["nodes"]}
    assert nodes["tools"]["calls"] == ["tools"]
    assert nodes["merge"]["stops"] == ["before"]
    assert nodes["merge"]["waits_for"] == ["left", "right"]
    assert nodes["merge"]["sends_to"] == ["work"]
    assert said["loops"] == [
        {"nodes": ["check", "tools"], "exits": [{"source": "check", "target": "ask"}], "open_nodes": []}
    ]
    assert (nodes["tools"]["loop"], nodes["ask"]["loop"]) == (0, None)
    assert [jump["reason"] for jump in said["unknown"]["left"]] == ["a conditional edge without a path map decides"]
    assert said["least_steps"] is None or said["least_steps"] >= 1


def test_the_chart_marks_stops_tools_loops_fan_outs_and_why_a_jump_is_open(rich):
    drawing = run(rich, "--format", "mermaid")
    assert '"tools<br/>tools<br/>look_up"' in drawing
    assert '"merge<br/>may stop before"' in drawing
    assert '|"sends p=' in drawing
    assert '-.->|"no path map"| unknown' in drawing
    assert "classDef cycle" in drawing


BIG = """
from typing import TypedDict
from langgraph.graph import END, START, StateGraph


class State(TypedDict):
    n: int


builder = StateGraph(State)
names = [f"n{number:03}" for number in range(500)]
for name in names:
    builder.add_node(name, lambda state: state)
builder.add_edge(START, names[0])
builder.add_conditional_edges(names[0], lambda state: names[1], names[1:])
graph = builder.compile()
"""


def test_a_graph_of_500_nodes_stays_readable(app, tmp_path):
    (tmp_path / "big_app.py").write_text(BIG)
    said = run("big_app.py:graph")
    assert len(said.split("\n\n")[0].splitlines()) < 12
    assert max(len(line) for line in said.splitlines()) < 200
    hub = about(said, "n000").splitlines()
    assert len(hub) < 24
    assert any("and 491 more ways" in line for line in hub)
    assert "Not drawn here, with over 100 nodes" in said
    assert "flowchart" not in said
    assert run("big_app.py:graph", "--format", "mermaid").count("-.->") == 499


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("graph", "allowed are module:attr"),
        (":graph", "allowed are module:attr"),
        ("absent.py:graph", "no file absent.py"),
        ("no_such_module_here:graph", "ModuleNotFoundError"),
        ("explained_app.py:absent", "It defines: "),
        ("explained_app.py:needs", "needs arguments (argument)"),
        ("explained_app.py:later", "is asynchronous"),
        ("explained_app.py:broken", "RuntimeError: no model"),
        ("explained_app.py:builder", "Pass builder.compile()"),
        ("explained_app.py:number", "got a builtins.int"),
    ],
)
def test_what_cannot_be_explained_is_said_with_the_remedy(app, spec, expected):
    assert expected in fail(spec)


def test_code_that_raises_is_told_with_file_and_line(app, tmp_path):
    (tmp_path / "raises.py").write_text("x = 1\nraise ValueError('bad')\n")
    with pytest.raises(ConfigError, match=r"ValueError: bad \(.*raises.py, line 2\)"):
        load_graph("raises.py:graph")
