"""Shows a team of four agents with long, different system prompts over a folder of real text.

    START -> planner -> (researcher <-> tools) -> critic -> writer -> END

A question on which the corpus has nothing goes from the planner straight to the writer.
The researcher calls `search`, then `read`, then notes down what it found; the critic may send it back for another
round.  Calls of tools are asked for by name (`tool_choice`) with a strict schema, so that also a very small model takes
part; every answer is short and greedy, so a run is bounded and can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode

from examples.research_team.corpus import Corpus
from examples.research_team.prompts import Role, system_prompt
from examples.research_team.tools import research_tools

DEFAULT_QUESTION = "What happens to a warm-up whose agent never runs?"

#: What an agent is told last, after the conversation; the researcher in its tool loop is told nothing.
_CLOSING: dict[Role, str] = {
    Role.PLANNER: "Write the plan now.",
    Role.CRITIC: "Give your verdict on the notes now.",
    Role.WRITER: "Write the answer now.",
}
_STEPS = ("search", "read")
#: The strict schema ends a tool call by itself; this is for its longest arguments and the marks around them.
_CALL_TOKENS = 80
_ENOUGH_DOCUMENTS = 2


class TeamState(TypedDict):
    """The conversation.  Messages of the planner, the critic and the writer carry their name."""

    messages: Annotated[list[AnyMessage], add_messages]


def build_graph(
    model: BaseChatModel,
    corpus: Corpus,
    *,
    max_rounds: int = 1,
    tool_delay_s: float = 0.0,
    max_tokens: int = 48,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
) -> CompiledStateGraph[TeamState, None, TeamState, TeamState]:
    """Build the graph around `model`, which must be able to bind tools.

    A run makes at most `2 + 4 * max_rounds` model calls, and just 2 when the corpus has nothing on the question.
    `max_tokens` bounds every answer in words; calls of tools are bounded by their schema.  Works with `invoke` and
    `ainvoke`.

    Raises:
        ValueError: if `max_rounds` or `max_tokens` is less than 1, or `tool_delay_s` is negative.
    """
    if max_rounds < 1 or max_tokens < 1:
        raise ValueError(f"got max_rounds {max_rounds} and max_tokens {max_tokens}, allowed: 1 or more")
    tools = research_tools(corpus, delay_s=tool_delay_s)

    def next_after_planner(state: TeamState) -> Literal["researcher", "writer"]:
        question = str(state["messages"][0].content)
        return "researcher" if corpus.search(question, limit=1) else "writer"

    def next_after_critic(state: TeamState) -> Literal["researcher", "writer"]:
        rounds = sum(message.name == Role.CRITIC for message in state["messages"])
        read = {str(message.content) for message in state["messages"] if message.name == "read"}
        return "researcher" if rounds < max_rounds and len(read) < _ENOUGH_DOCUMENTS else "writer"

    graph = StateGraph(TeamState)
    for role in (Role.PLANNER, Role.CRITIC, Role.WRITER):
        graph.add_node(role.value, _agent(role, corpus, model.bind(max_tokens=max_tokens)))
    graph.add_node(Role.RESEARCHER.value, _researcher(model, corpus, tools, max_tokens=max_tokens))
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "planner")
    graph.add_conditional_edges("planner", next_after_planner)
    graph.add_conditional_edges("researcher", _next_after_researcher)
    graph.add_edge("tools", "researcher")
    graph.add_conditional_edges("critic", next_after_critic)
    graph.add_edge("writer", END)
    return graph.compile(checkpointer=checkpointer)


def inputs(question: str = DEFAULT_QUESTION) -> TeamState:
    """Return an input for one run."""
    return {"messages": [HumanMessage(question, id="question")]}


def _agent(role: Role, corpus: Corpus, model: Runnable[Any, Any]) -> Runnable[TeamState, dict[str, Any]]:
    """Make an agent that reads the whole conversation and adds one message under its name."""
    system = SystemMessage(system_prompt(role, corpus))
    closing = HumanMessage(_CLOSING[role])

    def prompt(state: TeamState) -> list[AnyMessage]:
        return [system, *state["messages"], closing]

    def signed(message: AIMessage) -> dict[str, Any]:
        return {"messages": [message.model_copy(update={"name": role.value})]}

    return RunnableLambda(prompt) | model | RunnableLambda(signed)


def _researcher(
    model: BaseChatModel, corpus: Corpus, tools: Sequence[BaseTool], *, max_tokens: int
) -> Runnable[TeamState, dict[str, Any]]:
    """Make the agent with the tool loop: the tools of `_STEPS` one after the other, then the notes.

    Every call has the same tools, so the beginning of the prompt stays the same.
    """
    system = SystemMessage(system_prompt(Role.RESEARCHER, corpus))

    def prompt(state: TeamState) -> list[AnyMessage]:
        return [system, *state["messages"]]

    def added(message: AIMessage) -> dict[str, Any]:
        return {"messages": [message]}

    def step(choice: str) -> Runnable[TeamState, dict[str, Any]]:
        limit = max_tokens if choice == "none" else _CALL_TOKENS
        bound = model.bind_tools(tools, tool_choice=choice, strict=True).bind(max_tokens=limit)
        return RunnableLambda(prompt) | bound | RunnableLambda(added)

    steps = {name: step(name) for name in (*_STEPS, "none")}

    def choose(state: TeamState) -> Runnable[TeamState, dict[str, Any]]:
        done = _tool_answers_this_round(state["messages"])
        return steps[_STEPS[done] if done < len(_STEPS) else "none"]

    return RunnableLambda(choose)


def _tool_answers_this_round(messages: Sequence[AnyMessage]) -> int:
    """Count the tools' answers since somebody other than the researcher spoke."""
    count = 0
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            count += 1
        elif message.name is not None:
            break
    return count


def _next_after_researcher(state: TeamState) -> Literal["tools", "critic"]:
    """Go to the tools as long as the researcher calls one."""
    last = state["messages"][-1]
    return "tools" if isinstance(last, AIMessage) and last.tool_calls else "critic"
