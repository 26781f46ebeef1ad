"""The chat model on real vLLM: what a model of 135 million parameters can be asked to do."""

import asyncio
import json
import time
import uuid
from typing import Any, ClassVar, Literal

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_tests.integration_tests import ChatModelIntegrationTests
from pydantic import BaseModel, Field

from pancake_langgraph._errors import ContextOverflow, EngineRejected, ModelNotFound, StructuredOutputError
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.launch import Stack

pytestmark = pytest.mark.real

_FREE = "needs a model that chooses a tool, or fills in its arguments, by understanding the question"
_SCHEMA = "forces a call without a strict schema; the engine then lets a small model write arguments that are no object"

#: Tests of LangChain's own suite that a model of this size cannot pass, and why.
CANNOT: dict[str, str] = {
    "test_tool_calling": _FREE,
    "test_tool_calling_async": _FREE,
    "test_bind_runnables_as_tools": _FREE,
    "test_tool_calling_with_no_arguments": _SCHEMA,
    "test_tool_choice": _SCHEMA,
    "test_unicode_tool_call_integration": _FREE,
    "test_agent_loop": _FREE,
    "test_json_mode": "names the keys in the prompt only; nothing but the model's understanding would enforce them",
}


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Oslo"]
    degrees: int = Field(ge=0, le=9)


@tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
def chat(smol_stack: Stack) -> PancakeChatModel:
    return PancakeChatModel(
        model=smol_stack.served_model_name, base_url=smol_stack.base_url, temperature=0, max_tokens=24, timeout=120
    )


def running(stack: Stack) -> float:
    """Return how many requests the engine works on."""
    text = httpx.get(f"{stack.base_url.removesuffix('/v1')}/metrics", timeout=10).text
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{")
    )


def wait_until_idle(stack: Stack, *, limit_s: float = 3.0) -> bool:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if running(stack) == 0:
            return True
        time.sleep(0.05)
    return False


def test_chat_and_stream_say_the_same(chat: PancakeChatModel) -> None:
    whole = chat.invoke("Say hello.", cache_salt="same")
    chunks = list(chat.stream("Say hello.", cache_salt="same2"))
    assert whole.content
    assert "".join(chunk.text for chunk in chunks) == whole.content
    assert len([chunk for chunk in chunks if chunk.content]) > 3
    assert chunks[-1].chunk_position == "last"


async def test_async_and_batch(chat: PancakeChatModel) -> None:
    answers = [await chat.ainvoke("Say hello."), *(await chat.abatch(["One?", "Two?"])), *chat.batch(["One?"])]
    streamed = [chunk async for chunk in chat.astream("Say hello.")]
    assert all(answer.content for answer in answers)
    assert any(chunk.content for chunk in streamed)


def test_usage_and_cached_tokens(chat: PancakeChatModel) -> None:
    prompt = [SystemMessage(f"{uuid.uuid4()} " + "You are helpful. " * 60), HumanMessage("Hi.")]
    cold, warm = chat.invoke(prompt), chat.invoke(prompt)
    assert cold.usage_metadata is not None
    assert warm.usage_metadata is not None
    assert cold.usage_metadata["input_tokens"] == chat.get_num_tokens_from_messages(prompt)
    assert cold.usage_metadata["input_token_details"]["cache_read"] == 0
    assert warm.usage_metadata["input_token_details"]["cache_read"] >= 64


def test_a_salt_keeps_prefixes_apart(chat: PancakeChatModel) -> None:
    prompt = [SystemMessage(f"{uuid.uuid4()} " + "You are helpful. " * 60), HumanMessage("Hi.")]
    chat.invoke(prompt, cache_salt="a")
    other, same = chat.invoke(prompt, cache_salt="b"), chat.invoke(prompt, cache_salt="a")
    assert other.usage_metadata is not None
    assert same.usage_metadata is not None
    assert other.usage_metadata["input_token_details"]["cache_read"] == 0
    assert same.usage_metadata["input_token_details"]["cache_read"] >= 64


def test_stop_ends_the_answer(chat: PancakeChatModel) -> None:
    message = chat.invoke("Say hello.", stop=["e"])
    assert "e" not in message.text
    assert message.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("schema", [Weather, Weather.model_json_schema()], ids=["pydantic", "dict"])
async def test_structured_output_by_guided_decoding(chat: PancakeChatModel, schema: Any) -> None:
    structured = chat.model_copy(update={"max_tokens": 200}).with_structured_output(schema)
    values = [
        structured.invoke("Weather?"),
        await structured.ainvoke("Weather?"),
        list(structured.stream("Weather?"))[-1],
    ]
    for value in values:
        Weather.model_validate(value if isinstance(value, dict) else value.model_dump())


def test_structured_output_that_is_cut_short_is_a_typed_error(chat: PancakeChatModel) -> None:
    with pytest.raises(StructuredOutputError, match="length"):
        chat.model_copy(update={"max_tokens": 3}).with_structured_output(Weather).invoke("Weather?")


def test_a_choice_is_enforced(chat: PancakeChatModel) -> None:
    message = chat.invoke("Yes or no?", extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert message.content in ("yes", "no")


@pytest.mark.parametrize("choice", ["any", "get_weather"])
async def test_a_forced_tool_is_called(chat: PancakeChatModel, choice: str) -> None:
    bound = chat.model_copy(update={"max_tokens": 100}).bind_tools([get_weather], tool_choice=choice, strict=True)
    names: list[str] = []
    whole: AIMessageChunk | None = None
    for chunk in bound.stream("What is the weather in Paris?"):
        assert isinstance(chunk, AIMessageChunk)
        names += [piece["name"] for piece in chunk.tool_call_chunks if piece["name"]]
        whole = chunk if whole is None else whole + chunk
    for message in (bound.invoke("Weather in Paris?"), await bound.ainvoke("Weather in Paris?"), whole):
        assert isinstance(message, AIMessage)
        [call] = message.tool_calls
        assert call["name"] == "get_weather"
        assert call["args"]["city"] in ("Paris", "Oslo")
    assert names == ["get_weather"]


def test_a_tool_turn_is_answered(chat: PancakeChatModel) -> None:
    asked = AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "Oslo"}, "id": "a"}])
    history = [HumanMessage("Weather in Oslo?"), asked, ToolMessage("sunny in Oslo", tool_call_id="a")]
    assert chat.bind_tools([get_weather]).invoke(history).usage_metadata is not None
    interrupted = [*history[:2], HumanMessage("Never mind. Say hello.")]
    assert chat.bind_tools([get_weather]).invoke(interrupted).usage_metadata is not None


def test_tokens_are_counted_as_the_engine_counts(chat: PancakeChatModel) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage("What is 2 + 2?")]
    answer = chat.bind_tools([get_weather]).invoke(messages)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == chat.get_num_tokens_from_messages(messages, tools=[get_weather])
    assert chat.get_num_tokens("hello world") == len(chat.get_token_ids("hello world")) == 2


def test_the_profile_knows_the_window(chat: PancakeChatModel) -> None:
    assert chat.profile is not None
    assert chat.profile.get("max_input_tokens", 0) >= 1024


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_an_overflow_is_typed_before_and_after_sending(chat: PancakeChatModel, mode: str) -> None:
    with pytest.raises(ContextOverflow, match="tokens"):
        chat.model_copy(update={"check_context": mode}).invoke("word " * 20_000)


def test_an_unknown_model_names_the_served_one(chat: PancakeChatModel) -> None:
    with pytest.raises(ModelNotFound, match=chat.model_name):
        chat.invoke("hi", model="no-such-model")


def test_a_refused_request_is_typed(chat: PancakeChatModel) -> None:
    with pytest.raises(EngineRejected, match="400"):
        chat.invoke("hi", temperature=-3)


def test_closing_a_stream_stops_the_engine(chat: PancakeChatModel, smol_stack: Stack) -> None:
    chunks = chat.model_copy(update={"max_tokens": 600}).stream("Tell a long story.", extra_body={"ignore_eos": True})
    next(chunks)
    assert running(smol_stack) == 1
    chunks.close()
    assert wait_until_idle(smol_stack)


async def test_cancelling_a_call_stops_the_engine(chat: PancakeChatModel, smol_stack: Stack) -> None:
    long = chat.model_copy(update={"max_tokens": 600})
    task = asyncio.create_task(long.ainvoke("Tell a long story.", extra_body={"ignore_eos": True}))
    while await asyncio.to_thread(running, smol_stack) == 0:
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(wait_until_idle, smol_stack)


def test_token_ids_are_those_of_the_tokenizer(chat: PancakeChatModel, smol_stack: Stack) -> None:
    message = chat.invoke("hi", return_token_ids=True)
    assert message.usage_metadata is not None
    pancake = message.response_metadata["pancake"]
    assert pancake["num_prompt_token_ids"] == message.usage_metadata["input_tokens"]
    assert len(json.dumps(pancake)) < 500


class Running:
    """The suite asks for parameters where no fixture can be passed."""

    params: ClassVar[dict[str, Any]] = {"model": "small", "base_url": "http://127.0.0.1:9/v1"}


@pytest.fixture(autouse=True)
def _stack_for_the_suite(request: pytest.FixtureRequest) -> None:
    """Point the suite at the engine, except for its recorded timing test, which lets no real request through."""
    if request.node.get_closest_marker("vcr") is not None:
        return
    stack: Stack = request.getfixturevalue("smol_stack")
    Running.params = {
        "model": stack.served_model_name,
        "base_url": stack.base_url,
        "temperature": 0,
        "max_tokens": 400 if "structured_output" in request.node.name else 32,
        "timeout": 120,
        # Greedy decoding of open text can go round in circles; this lets every answer end.
        "extra_body": {"repetition_penalty": 1.3},
    }


class TestPancakeChatModelVllm(ChatModelIntegrationTests):
    """LangChain's own suite, without what `CANNOT` names."""

    @pytest.fixture(autouse=True)
    def _within_reach(self, request: pytest.FixtureRequest) -> None:
        reason = CANNOT.get(request.node.originalname)
        if reason is not None:
            pytest.skip(f"beyond a 135M model: {reason}")

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return PancakeChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return Running.params

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return str(Running.params["model"])
