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
