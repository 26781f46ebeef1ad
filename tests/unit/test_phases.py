"""Declaring phases: nothing about the decorated object changes, bad values are refused where they stand."""

import asyncio
import functools
import importlib
import inspect
import math
import typing
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool, tool
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import InjectedState
from langgraph.types import Command

import pancake_langgraph
from pancake_langgraph import Phase, phase
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.phases import MAX_NEEDS, phase_of


class State(TypedDict):
    n: int


def test_the_name_stays_the_decorator_when_the_module_was_imported_too():
    importlib.import_module("pancake_langgraph.phases")
    assert callable(pancake_langgraph.phase)
    assert pancake_langgraph.phase is phase
    assert {"phase", "Phase"} <= set(dir(pancake_langgraph))


def test_a_function_comes_back_as_itself_with_signature_and_annotations():
    def node(state: State) -> Command[Literal["b", "c"]]:
        """Say."""
        return Command(goto="b")

    before = (inspect.signature(node), typing.get_type_hints(node, localns=locals()), node.__doc__, node.__name__)
    marked = phase(kind="reasoning", may_need=["b"], expect_s=2)(node)
    assert marked is node
    after = (inspect.signature(node), typing.get_type_hints(node, localns=locals()), node.__doc__, node.__name__)
    assert after == before
    assert node.__pancake_phase__ == Phase("reasoning", None, 2.0, ("b",))


def test_langgraph_still_reads_the_targets_of_a_marked_node():
    @phase(kind="action")
    def a(state: State) -> Command[Literal["b"]]:
        return Command(goto="b", update={"n": state["n"] + 1})

    graph = StateGraph(State).add_node("a", a).add_node("b", lambda state: {"n": state["n"] * 2})
    compiled = graph.add_edge(START, "a").add_edge("b", END).compile()
    assert graph.nodes["a"].ends == ("b",)
    assert compiled.invoke({"n": 1}) == {"n": 4}


async def test_async_functions_stay_coroutine_functions():
    @phase(kind="io", blocking=False)
    async def node(state: State) -> dict[str, int]:
        await asyncio.sleep(0)
        return {"n": 5}

    assert inspect.iscoroutinefunction(node)
    assert await node({"n": 0}) == {"n": 5}
    assert phase_of(node) == Phase("io", blocking=False)


class Callable_:
    def __call__(self, state: State) -> dict[str, int]:
        return {"n": 7}

    def method(self, state: State) -> dict[str, int]:
        return {"n": 8}


class Slotted:
    __slots__ = ()

    def __call__(self, state: State) -> dict[str, int]:
        return {"n": 9}


@phase(kind="io")
class MarkedClass:
    def __call__(self, state: State) -> dict[str, int]:
        return {"n": 1}


class MarkedMethod:
    __slots__ = ()

    @phase(kind="io")
    def __call__(self, state: State) -> dict[str, int]:
        return {"n": 1}

    @phase(kind="action")
    def other(self, state: State) -> dict[str, int]:
        return {"n": 2}


def test_callable_objects_classes_methods_partials_and_runnables_are_marked():
    mark = phase(kind="io")
    assert phase_of(mark(Callable_())).kind == "io"
    assert phase_of(Callable_()) is None  # the mark was on one object
    assert phase_of(MarkedClass()).kind == "io"
    assert phase_of(MarkedMethod()).kind == "io"
    assert phase_of(MarkedMethod().other).kind == "action"
    assert phase_of(functools.partial(mark(lambda state: state))).kind == "io"
    assert phase_of(mark(functools.partial(int))).kind == "io"
    lambda_ = mark(RunnableLambda(lambda state: {"n": 3}))
    assert phase_of(lambda_).kind == "io"
    assert lambda_.invoke({}) == {"n": 3}
    chain = RunnableLambda(lambda state: "hi") | FakeListChatModel(responses=["a"])
    assert phase_of(phase(kind="generation")(chain)).kind == "generation"
    assert chain.invoke({}).content == "a"
    with_retry = mark(RunnableLambda(lambda state: 1)).with_retry()
    assert phase_of(with_retry).kind == "io"


def test_a_wrapper_that_keeps_names_keeps_the_mark():
    @phase(kind="io")
    def inner(state: State) -> State:
        return state

    @functools.wraps(inner)
    def outer(state: State) -> State:
        return inner(state)

    assert phase_of(outer).kind == "io"


def lookup(q: str, state: Annotated[dict[str, Any], InjectedState]) -> str:
    """Look up."""
    return q.upper()


class Own(BaseTool):
    name: str = "own"
    description: str = "Own."

    def _run(self, q: str) -> str:
        return q


def test_tools_are_marked_above_and_below_their_decorator_and_stay_the_same():
    plain = tool(lookup)
    above = phase(kind="io", expect_s=3)(tool(lookup))
    below = tool(phase(kind="io", expect_s=3)(lookup))
    try:
        for marked in (above, below):
            assert isinstance(marked, StructuredTool)
            assert phase_of(marked) == Phase("io", expect_s=3.0)
            assert marked.args == plain.args
            assert marked.tool_call_schema.model_json_schema() == plain.tool_call_schema.model_json_schema()
            assert marked.model_dump(exclude={"func", "args_schema"}) == plain.model_dump(
                exclude={"func", "args_schema"}
            )
            assert repr(marked) == repr(plain)
            assert marked.invoke({"q": "a", "state": {}}) == "A"
        assert phase_of(above.model_copy()).kind == "io"
    finally:
        del lookup.__pancake_phase__
    own = phase(kind="action")(Own())
    assert phase_of(own).kind == "action"
    assert own.invoke({"q": "x"}) == "x"
    assert phase_of(Own()) is None


def test_marks_on_top_of_each_other_are_merged_and_the_outer_one_wins():
    @phase(kind="reasoning", expect_s=1)
    @phase(kind="io", may_need=["x"])
    def node(state: State) -> State:
        return state

    assert phase_of(node) == Phase("reasoning", None, 1.0, ("x",))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "got no argument"),
    ({"kind": "thinking"}, "got kind='thinking', allowed is one of reasoning, action, generation, io"),
    ({"kind": ["io"]}, "got kind="),
    ({"blocking": "yes"}, "got blocking='yes', allowed is True or False"),
    ({"blocking": 1}, "got blocking=1"),
    ({"expect_s": 0}, "got expect_s=0, allowed is seconds over 0"),
    ({"expect_s": -1.0}, "got expect_s=-1.0"),
    ({"expect_s": math.nan}, "got expect_s=nan"),
    ({"expect_s": math.inf}, "got expect_s=inf"),
    ({"expect_s": True}, "got expect_s=True"),
    ({"expect_s": "2"}, "got expect_s='2'"),
    ({"expect_s": 10**400}, "got expect_s=1000"),
    ({"may_need": "writer"}, "got may_need='writer', allowed is a list of at most"),
    ({"may_need": [1]}, "got may_need=[1]"),
    ({"may_need": [" "]}, "got may_need=[' ']"),
    ({"may_need": {"a"}}, "got may_need={'a'}"),
    ({"may_need": [str(i) for i in range(MAX_NEEDS + 1)]}, "got may_need="),
    ({"prompt": 3}, "got prompt of type int"),
    ({"prompt": "  "}, "got prompt of type str"),
    ({"prompt": []}, "got prompt of type list"),
]


@pytest.mark.parametrize(("fields", "expected"), REFUSED, ids=lambda value: str(value)[:30])
def test_bad_values_are_refused_at_decoration_with_what_is_allowed(fields, expected):
    with pytest.raises(ConfigError) as caught:
        phase(**fields)
    assert expected in str(caught.value)
    assert "allowed" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("target", [3, "text", None])
def test_what_is_no_node_and_no_tool_is_refused(target):
    with pytest.raises(ConfigError, match="got target="):
        phase(kind="io")(target)


@pytest.mark.parametrize("target", [Slotted(), len, Callable_().method], ids=["slots", "builtin", "bound"])
def test_what_cannot_carry_a_mark_is_told_where_to_say_it_instead(target):
    with pytest.raises(ConfigError, match=r"takes no attributes.*metadata="):
        phase(kind="io")(target)


def prompt_of(state: State) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("You write.", "You write."),
        (prompt_of, prompt_of),
        ([HumanMessage("a")], (HumanMessage("a"),)),
        ([{"role": "system", "content": "a"}], ({"role": "system", "content": "a"},)),
    ],
)
def test_prompts_are_kept_and_not_shown(given, kept):
    found = Phase(prompt=given)
    assert found.prompt == kept
    assert "prompt" not in repr(found)
    assert not found.is_empty


def test_prompt_templates_are_prompts():
    template = ChatPromptTemplate.from_messages([("system", "You write.")])
    assert Phase(prompt=template).prompt is template


def test_metadata_says_the_same_and_a_phase_is_metadata_too():
    assert Phase.of_metadata({"kind": "io", "may_need": ["a", "a"]}) == Phase("io", may_need=("a",))
    assert Phase.of_metadata(Phase("io")) == Phase("io")
    with pytest.raises(ConfigError, match=r"unknown key kinds .*allowed are kind, blocking"):
        Phase.of_metadata({"kinds": "io"})
    with pytest.raises(ConfigError, match="a mapping such as"):
        Phase.of_metadata("io")


class Proxy:
    """Whatever is asked of it raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not now")


class Endless:
    """Has every attribute, and a new one each time."""

    def __getattr__(self, name: str) -> "Endless":
        raise AssertionError("it was asked")


@pytest.mark.parametrize("kind", [Proxy, Endless, int, object])
def test_looking_for_a_mark_never_raises_and_asks_nothing_of_the_object(kind):
    assert phase_of(kind()) is None


def test_looking_for_a_mark_ends_in_a_circle():
    class Circle:
        def __init__(self) -> None:
            self.func = self

    assert phase_of(Circle()) is None
