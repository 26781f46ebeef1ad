"""The graph shapes of `pancake bench forecast`, and what they are built from."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, SystemMessage
from langgraph.checkpoint.base import BaseCheckpointSaver

from pancake_langgraph._types import Prompt
from pancake_langgraph.bench.text import passages
from pancake_langgraph.engines.fake_text import FakeAnswer, text_of

#: Words of an agent's system prompt.
PROMPT_WORDS = 160
_AGENT = re.compile(r"You are (\w+)\.")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a shape is built from: one model for all agents, a checkpointer, and how to let time pass, in seconds."""

    model: BaseChatModel
    saver: BaseCheckpointSaver[Any]
    work: Callable[[float], None]
    seed: int


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of graph.

    `inputs` gives the input of run n, `script` the scripted model's answer to a prompt (`None`: some words).  `odds`
    are the true chances after nodes that draw lots; a shape without any can be learnt.  `family` groups shapes; a
    shape that `routes_by_model` may also run with a real model.  `packages` have to be installed beside this one.
    """

    name: str
    family: str
    build: Callable[[Parts], Any]
    inputs: Callable[[int], Any]
    script: Callable[[Prompt], FakeAnswer | str | None]
    odds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    routes_by_model: bool = False
    packages: tuple[str, ...] = ()


def no_script(prompt: Prompt) -> None:
    """Answer with some words."""


TOPICS = ("rivers", "glaciers", "harbors", "bridges", "lighthouses", "orchards", "markets")


def one_message(number: int) -> dict[str, Any]:
    """Return the usual input of run `number`: one message of the user."""
    return {"messages": [("user", f"Report {number}: write about {TOPICS[number % len(TOPICS)]}.")]}


@functools.cache
def system_prompt(agent: str) -> str:
    """Return an agent's system prompt; it begins with the agent's name."""
    return f"You are {agent}. {passages(PROMPT_WORDS, seed=sum(agent.encode()))}"


def agent_of(prompt: Prompt) -> str:
    """Return the name of the agent that a prompt belongs to; empty if it is none of `system_prompt`."""
    for message in prompt.messages[:1]:
        if found := _AGENT.match(text_of(message)):
            return found[1]
    return ""


def speaker(parts: Parts, agent: str) -> Any:
    """Return a node, an async function, in which `agent` reads all messages and adds its answer."""
    system = SystemMessage(system_prompt(agent))

    async def speak(state: Any) -> dict[str, Any]:
        return {"messages": [await parts.model.ainvoke([system, *state["messages"]])]}

    return speak


def num_answers(messages: Sequence[AnyMessage]) -> int:
    """Return how many messages of a state were written by models."""
    return sum(message.type == "ai" for message in messages)


def every_shape() -> tuple[Shape, ...]:
    """Return all shapes in the order they are run."""
    from pancake_langgraph.bench.forecast_agents import AGENT_SHAPES
    from pancake_langgraph.bench.forecast_joins import JOIN_SHAPES
    from pancake_langgraph.bench.forecast_models import MODEL_SHAPES
    from pancake_langgraph.bench.forecast_routes import ROUTE_SHAPES

    return (*ROUTE_SHAPES, *JOIN_SHAPES, *AGENT_SHAPES, *MODEL_SHAPES)
