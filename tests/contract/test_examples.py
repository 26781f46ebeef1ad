"""Every example runs to its end, the same way every time, with `invoke` and with `ainvoke`."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from examples.fan_out import app as fan_out
from examples.handoff import app as handoff
from examples.research_team import app as research_team
from examples.research_team.corpus import Corpus, Document
from examples.subgraph import app as subgraph
from examples.tool_loop import app as tool_loop
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.testing.fake_server import FakeEngineServer

CORPUS = Corpus(
    [
        Document("d1", "warm.md", ("A warm-up whose agent never runs is settled as wasted.", "Each has a reason.")),
        Document("d2", "other.md", ("Tools take time; contexts wait.",)),
    ]
)


class ScriptedModel(BaseChatModel):
    """Answers with words made from the prompt; obeys `tool_choice` with arguments made from the schema."""

    cut_tool_calls: bool = False
    seen: list[dict[str, Any]] = []  # noqa: RUF012 - a pydantic field, copied per instance

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | None = None, strict: bool | None = None, **kwargs: Any
    ) -> Runnable[Any, AIMessage]:
        wire = [convert_to_openai_tool(each, strict=strict) for each in tools]
        return self.bind(tools=wire, tool_choice=tool_choice, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        tool_choice: str | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self.seen.append({"messages": list(messages), "tool_choice": tool_choice, "max_tokens": max_tokens})
        text = "\n".join(f"{message.type}:{message.content}" for message in messages)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        answer = AIMessage(f"words {digest}")
        chosen = [each["function"] for each in tools if each["function"]["name"] == tool_choice]
        if chosen and not self.cut_tool_calls:
            assert chosen[0]["strict"] is True
            arguments = {name: _value(schema) for name, schema in chosen[0]["parameters"]["properties"].items()}
            answer = AIMessage("", tool_calls=[tool_call(name=tool_choice or "", args=arguments, id=f"call-{digest}")])
        return ChatResult(generations=[ChatGeneration(message=answer)])


def _value(schema: dict[str, Any]) -> str:
    return schema["enum"][0] if "enum" in schema else "warm-up"[: schema.get("maxLength", 100)]


Build = Callable[..., Any]

EXAMPLES: dict[str, tuple[Build, Callable[[], Any], list[str]]] = {
    "tool_loop": (tool_loop.build_graph, tool_loop.inputs, ["agent", "tools", "agent"]),
    "handoff": (handoff.build_graph, handoff.inputs, ["front_desk", "repairs"]),
    "fan_out": (fan_out.build_graph, fan_out.inputs, ["worker", "worker", "worker", "join"]),
    "subgraph": (subgraph.build_graph, subgraph.inputs, ["desk", "publisher"]),
    "research_team": (
        lambda model, **options: research_team.build_graph(model, CORPUS, **options),
        research_team.inputs,
        ["planner", "researcher", "tools", "researcher", "tools", "researcher", "critic", "writer"],
    ),
}


def plain(value: Any) -> Any:
    """Return a state without the random ids that LangChain puts on messages."""
    if isinstance(value, BaseMessage):
        calls = [(call["name"], call["args"]) for call in value.tool_calls] if isinstance(value, AIMessage) else None
        return (value.type, value.name, value.content, calls)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


MakeModel = Callable[[], BaseChatModel]


@pytest.fixture(params=["scripted", "ChatOpenAI", "PancakeChatModel"])
def make_model(request: pytest.FixtureRequest) -> Iterator[MakeModel]:
    """Give every chat model: one without a server, and both real ones on the fake engine's server."""
    if request.param == "scripted":
        yield ScriptedModel
        return
    with FakeEngineServer(FakeEngine(FakeEngineSettings(prefill_s_per_token=0.0, decode_s_per_token=0.0))) as server:
        options = {"model": "fake", "base_url": server.base_url, "api_key": "none", "temperature": 0.0}
        made: list[BaseChatModel] = []

        def make() -> BaseChatModel:
            if not made:
                made.append(ChatOpenAI(**options) if request.param == "ChatOpenAI" else PancakeChatModel(**options))
            return made[0]

        yield make


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_walks_its_path(name: str, make_model: MakeModel):
    build, inputs, path = EXAMPLES[name]
    walked = [node for update in build(make_model()).stream(inputs(), stream_mode="updates") for node in update]
    assert walked == path


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_ends_the_same_way_every_time_sync_and_async(name: str, make_model: MakeModel):
    build, inputs, _ = EXAMPLES[name]
    graph = build(make_model())
    first = plain(await asyncio.to_thread(graph.invoke, inputs()))
    assert plain(await asyncio.to_thread(graph.invoke, inputs())) == first
    assert plain(await graph.ainvoke(inputs())) == first


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_keeps_its_history_with_a_checkpointer(name: str):
    build, inputs, _ = EXAMPLES[name]
    graph = build(ScriptedModel(), checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    final = graph.invoke(inputs(), config)
    history = list(graph.get_state_history(config))
    assert plain(history[0].values) == plain(final)
    assert history[0].next == ()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_answer_is_bounded(name: str):
    build, inputs, _ = EXAMPLES[name]
    model = ScriptedModel()
    build(model).invoke(inputs())
    assert model.seen
    for call in model.seen:
        assert 24 <= call["max_tokens"] <= (48 if call["tool_choice"] in (None, "none") else 80)


@pytest.mark.parametrize("name", ["tool_loop", "handoff", "research_team"])
def test_a_cut_tool_call_does_not_stop_an_example(name: str):
    build, inputs, _ = EXAMPLES[name]
    final = build(ScriptedModel(cut_tool_calls=True)).invoke(inputs())
    assert not any(isinstance(message, ToolMessage) for message in final["messages"])
    assert final["messages"][-1].content.startswith("words")


def test_the_researcher_searches_reads_and_then_writes_notes():
    model = ScriptedModel()
    final = research_team.build_graph(model, CORPUS).invoke(research_team.inputs())
    choices = [call["tool_choice"] for call in model.seen]
    assert choices == [None, "search", "read", "none", None, None]
    answers = [message.content for message in final["messages"] if isinstance(message, ToolMessage)]
    assert answers[0].startswith("[d1] warm.md: A warm-up")
    assert answers[1].startswith("[d1] warm.md\n")


def test_a_question_that_the_corpus_knows_nothing_about_goes_straight_to_the_writer():
    graph = research_team.build_graph(ScriptedModel(), CORPUS)
    question = research_team.inputs("Zebra?")
    walked = [node for update in graph.stream(question, stream_mode="updates") for node in update]
    assert walked == ["planner", "writer"]


def test_the_critic_sends_the_researcher_back_until_the_rounds_are_used_up():
    graph = research_team.build_graph(ScriptedModel(), CORPUS, max_rounds=3)
    walked = [node for update in graph.stream(research_team.inputs(), stream_mode="updates") for node in update]
    assert walked.count("critic") == 3
    assert walked.count("tools") == 6
    assert walked[-1] == "writer"


def test_the_prompts_of_one_agent_grow_at_the_end_only():
    model = ScriptedModel()
    research_team.build_graph(model, CORPUS).invoke(research_team.inputs())
    calls = [[plain(message) for message in call["messages"]] for call in model.seen if call["tool_choice"]]
    for earlier, later in itertools.pairwise(calls):
        assert later[: len(earlier)] == earlier


def test_bounds_that_make_no_sense_are_refused():
    for options in ({"max_rounds": 0}, {"max_tokens": 0}, {"tool_delay_s": -1.0}):
        with pytest.raises(ValueError, match="got"):
            research_team.build_graph(ScriptedModel(), CORPUS, **options)
