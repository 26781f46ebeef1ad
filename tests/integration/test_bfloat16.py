"""In bfloat16: the plain engine's words at the same cached length, and its own difference between cold and hit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import SecretStr

from pancake_langgraph.bench.text import passages
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.launch import Stack
from pancake_langgraph.runtime import Runtime, attach

pytestmark = pytest.mark.real

QUESTIONS = ("What is this about?", "Say more.", "What comes next?", "And in one word?", "Why?", "Are you sure?")
SYSTEM = SystemMessage(f"You are a reader. {passages(500, seed=11)}")


def plain(stack: Stack, salt: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=stack.served_model_name,
        base_url=stack.base_url,
        api_key=SecretStr("EMPTY"),
        temperature=0.0,
        max_completion_tokens=16,
        stream_usage=True,
        streaming=True,
        extra_body={"cache_salt": salt},
    )


def ours(stack: Stack, salt: str) -> PancakeChatModel:
    return PancakeChatModel(
        model=stack.served_model_name,
        base_url=stack.base_url,
        temperature=0.0,
        max_tokens=16,
        extra_body={"cache_salt": salt},
    )


def build(model: BaseChatModel) -> Any:
    async def read(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([SYSTEM, *state["messages"]])]}

    builder = StateGraph(MessagesState)
    builder.add_node("read", read)
    builder.add_edge(START, "read")
    builder.add_edge("read", END)
    return builder.compile(checkpointer=InMemorySaver())


async def converse(graph: Any) -> list[AIMessage]:
    answers = []
    for question in QUESTIONS:
        state = await graph.ainvoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "t"}})
        answers.append(state["messages"][-1])
    return answers


def cached(answer: AIMessage) -> int | None:
    details = (answer.usage_metadata or {}).get("input_token_details") or {}
    return details.get("cache_read")


async def test_words_equal_the_plain_engines_at_the_same_cached_length(
    smol_stack: Stack, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = await converse(build(plain(smol_stack, "bf16-plain")))
    settings = RuntimeSettings(
        engine="vllm",
        base_url=smol_stack.base_url,
        model=smol_stack.served_model_name,
        kv_events_endpoint=smol_stack.kv_events_endpoint,
        kv_replay_endpoint=smol_stack.kv_replay_endpoint,
        tier_url=smol_stack.tier_url,
        tier_model=smol_stack.model_key,
    )
    with Runtime(settings) as runtime:
        runtime.start()
        answers = await converse(attach(build(ours(smol_stack, "bf16-ours")), runtime=runtime))
        assert runtime.statistics().calls == len(QUESTIONS)
    compared = 0
    for mine, theirs in zip(answers, expected, strict=True):
        if cached(mine) != cached(theirs):
            break  # from here on the prompts may differ as well
        assert mine.content == theirs.content
        compared += 1
    assert compared >= 2
    floor = await cold_and_hit(smol_stack, expected)
    record_property("bfloat16", {"equal_at_same_cached_length": compared, **floor})
    with capsys.disabled():
        print(f"\nbfloat16: {json.dumps({'equal_at_same_cached_length': compared, **floor})}")


async def cold_and_hit(stack: Stack, expected: list[AIMessage]) -> dict[str, int]:
    """Ask the plain engine every prompt of the conversation cold, and again; count the pairs that differ."""
    differing = 0
    prompt: list[BaseMessage] = [SYSTEM]
    for number, (question, answer) in enumerate(zip(QUESTIONS, expected, strict=True)):
        prompt.append(HumanMessage(question))
        model = plain(stack, f"bf16-floor-{number}")
        cold, hit = [await model.ainvoke(prompt) for _ in range(2)]
        assert (cached(hit) or 0) > (cached(cold) or 0)
        differing += cold.content != hit.content
        prompt.append(AIMessage(answer.content))
    return {"prompts": len(QUESTIONS), "plain_differs_cold_from_hit": differing}
