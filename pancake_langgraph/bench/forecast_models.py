"""Routes that a model makes: shapes in which it has to say where to go, and a model that has to say it.

A small model left to itself hardly ever calls a tool.  Made to choose (a tool has to be called, or the answer has to
fit a schema) it chooses anything, and the route is what it is.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypedDict

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AnyMessage, SystemMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send

from pancake_langgraph._types import Prompt
from pancake_langgraph.bench.forecast_shapes import (
    TOPICS,
    Parts,
    Shape,
    agent_of,
    num_answers,
    one_message,
    speaker,
    system_prompt,
)
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.engines.fake_text import FakeAnswer, FakeToolCall, text_of

#: Tokens of an answer that says where to go: more than any call or schema here takes, so that none is cut.
ROUTE_TOKENS: Final = 96
_WORDS_TOKENS: Final = 12
_MAX_CALLS: Final = 3
_MAX_ROUNDS: Final = 4
_TOOL_S: Final = 1.5
_STEPS: Final = ("search", "count", "write", "check")


class RoutingModel(PancakeChatModel):
    """Has to call one of its tools, three times in a conversation, and to fill in the schema it is given.

    vLLM is held to a regular expression: its own schemas leave room for white space, in which a small model may go on
    until its answer is cut.  Any other answer is cut to a few words.
    """

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        functions = [tool["function"] for tool in payload.get("tools") or ()]
        asked = payload.pop("response_format", None)
        if asked is not None:
            expression = pattern_of(asked["json_schema"]["schema"])
        elif _num_calls(payload["messages"], {function["name"] for function in functions}) < _MAX_CALLS and functions:
            expression = f"<tool_call>\\n({'|'.join(map(_call_of, functions))})\\n</tool_call>"
        else:
            choice = {"tool_choice": "none"} if functions else {}
            return {**payload, **choice, "max_tokens": _WORDS_TOKENS}
        extra = {**(payload.get("extra_body") or {}), "structured_outputs": {"regex": expression}}
        return {**payload, "extra_body": extra}


def pattern_of(schema: Mapping[str, Any]) -> str:
    """Return a regular expression of the JSON texts that fit a schema of objects, lists, choices and short texts."""
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum") or [schema["const"]]
        return f"({'|'.join(_escaped(json.dumps(choice)) for choice in choices)})"
    if schema.get("type") == "array":
        item = pattern_of(schema["items"])
        return rf"\[{item}(, {item}){{{schema['minItems'] - 1},{schema['maxItems'] - 1}}}\]"
    if schema.get("type") == "object":
        fields = (f"{_escaped(json.dumps(name))}: {pattern_of(of)}" for name, of in schema["properties"].items())
        return rf"\{{{', '.join(fields)}\}}"
    return '"[a-z0-9 ]{1,24}"'


def _call_of(function: Mapping[str, Any]) -> str:
    name = _escaped(json.dumps(function["name"]))
    return rf'\{{"name": {name}, "arguments": {pattern_of(function["parameters"])}\}}'


def _escaped(text: str) -> str:
    """Escape what means something; `re.escape` escapes more, which not every dialect takes."""
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)


def _num_calls(messages: Sequence[Mapping[str, Any]], names: set[str]) -> int:
    return sum(call["function"]["name"] in names for message in messages for call in message.get("tool_calls") or ())


# -- structured output ------------------------------------------------------------------------------------------------


class _Judged(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    verdict: str


class Verdict(TypedDict):
    """What becomes of the text."""

    verdict: Literal["revise", "accept"]


def judged_loop(parts: Parts) -> Any:
    """A judge sends the writer back in structured output, at most three times."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(_Judged)
    judging = parts.model.with_structured_output(Verdict, method="json_schema")
    system = SystemMessage(system_prompt("judge"))

    async def judge(state: _Judged) -> dict[str, Any]:
        found: Any = await judging.ainvoke([system, *state["messages"]])
        return {"verdict": found["verdict"]}

    builder.add_node("write", speaker(parts, "write"))
    builder.add_node("judge", judge)
    builder.add_node("publish", speaker(parts, "publish"))
    builder.add_edge(START, "write")
    builder.add_edge("write", "judge")
    builder.add_conditional_edges("judge", _after_judge, ["write", "publish"])
    builder.add_edge("publish", END)
    return builder.compile(checkpointer=parts.saver)


def _after_judge(state: _Judged) -> str:
    again = state["verdict"] == "revise" and num_answers(state["messages"]) < _MAX_ROUNDS
    return "write" if again else "publish"


def _judge(prompt: Prompt) -> str | None:
    if agent_of(prompt) != "judge":
        return None
    num_texts = sum(message.get("role") == "assistant" for message in prompt.messages)
    drawn = random.Random(f"{_asked(prompt)} {num_texts}").random()
    return f'{{"verdict": "{"revise" if drawn < 0.5 and num_texts < _MAX_ROUNDS else "accept"}"}}'


class _Spread(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    workers: int


class Width(TypedDict):
    """How many work on it."""

    workers: Literal[1, 2, 3, 4]


def chosen_width(parts: Parts) -> Any:
    """A model says in structured output how many workers are sent."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(_Spread)
    choosing = parts.model.with_structured_output(Width, method="json_schema")
    system = SystemMessage(system_prompt("planner"))

    async def planner(state: _Spread) -> dict[str, Any]:
        found: Any = await choosing.ainvoke([system, *state["messages"]])
        return {"workers": found["workers"]}

    builder.add_node("planner", planner)
    builder.add_node("worker", speaker(parts, "worker"))
    builder.add_node("gather", speaker(parts, "gather"))
    builder.add_edge(START, "planner")
    builder.add_conditional_edges(
        "planner", lambda s: [Send("worker", _part(s, number)) for number in range(s["workers"])], ["worker"]
    )
    builder.add_edge("worker", "gather")
    builder.add_edge("gather", END)
    return builder.compile(checkpointer=parts.saver)


def _part(state: _Spread, number: int) -> dict[str, Any]:
    return {"messages": [*state["messages"], ("user", f"Take part {number}.")]}


def _choose_width(prompt: Prompt) -> str | None:
    if agent_of(prompt) != "planner":
        return None
    return f'{{"workers": {random.Random(_asked(prompt)).randint(1, 4)}}}'


_PLAN: Final = {
    "title": "Plan",
    "description": "The steps in their order.",
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"enum": list(_STEPS)}, "minItems": 1, "maxItems": 4}},
    "required": ["steps"],
    "additionalProperties": False,
}


class _Planned(MessagesState):
    steps: list[str]


def planned_steps(parts: Parts) -> Any:
    """Plan and execute: a planner writes a list of steps, a worker does one after the other, a reporter ends."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(_Planned)
    planning = parts.model.with_structured_output(_PLAN, method="json_schema")
    system = SystemMessage(system_prompt("planner"))

    async def planner(state: _Planned) -> dict[str, Any]:
        found: Any = await planning.ainvoke([system, *state["messages"]])
        return {"steps": found["steps"]}

    builder.add_node("planner", planner)
    builder.add_node("execute", speaker(parts, "execute"))
    builder.add_node("report", speaker(parts, "report"))
    builder.add_edge(START, "planner")
    builder.add_edge("planner", "execute")
    builder.add_conditional_edges(
        "execute",
        lambda s: "execute" if num_answers(s["messages"]) < len(s["steps"]) else "report",
        ["execute", "report"],
    )
    builder.add_edge("report", END)
    return builder.compile(checkpointer=parts.saver)


def _plan(prompt: Prompt) -> str | None:
    return '{"steps": ["search", "count", "write"]}' if agent_of(prompt) == "planner" else None


# -- tools ------------------------------------------------------------------------------------------------------------


def closing_agent(parts: Parts) -> Any:
    """`create_agent` with two tools to work with and one that ends the run."""
    from langchain.agents import create_agent

    return create_agent(
        parts.model,
        [_work_tool(parts, "search"), _work_tool(parts, "count"), _finish()],
        system_prompt=system_prompt("clerk"),
        checkpointer=parts.saver,
        name="clerk",
    )


def _work_tool(parts: Parts, name: str) -> BaseTool:
    async def work(shelf: Literal["maps", "letters", "ledgers"]) -> str:
        parts.work(_TOOL_S)
        return f"{name}: seven {shelf}"

    return StructuredTool.from_function(coroutine=work, name=name, description=f"Go to a shelf and {name} there.")


def _finish() -> BaseTool:
    async def finish(state: Literal["done", "stuck"]) -> str:
        return f"ended: {state}"

    return StructuredTool.from_function(
        coroutine=finish, name="finish", description="End the work.", return_direct=True
    )


def _close(prompt: Prompt) -> FakeAnswer:
    asked = _num_calls(prompt.messages, {"search", "count"})
    tool, given = (("search", "maps"), ("count", "ledgers"), ("finish", "done"))[min(asked, 2)]
    return FakeAnswer(tool_calls=(FakeToolCall(tool, {"state" if tool == "finish" else "shelf": given}),))


def _asked(prompt: Prompt) -> str:
    return next((text_of(message) for message in prompt.messages if message.get("role") == "user"), TOPICS[0])


def _shape(build: Any, family: str, script: Any, packages: tuple[str, ...] = ()) -> Shape:
    name = build.__name__.replace("_", "-")
    return Shape(name, family, build, one_message, script, routes_by_model=True, packages=packages)


MODEL_SHAPES: Final[tuple[Shape, ...]] = (
    _shape(judged_loop, "loop", _judge),
    _shape(chosen_width, "fan-out", _choose_width),
    _shape(planned_steps, "loop", _plan),
    _shape(closing_agent, "agent", _close, ("langchain",)),
)
