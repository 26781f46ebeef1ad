"""What servers do wrong, and what the chat model makes of it."""

import asyncio
import contextlib
import importlib
import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from pancake_langgraph._errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    EngineFault,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    MalformedStream,
    ModelNotFound,
    StructuredOutputError,
    Unsupported,
)
from pancake_langgraph._types import Usage
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.testing.wire_replies import Act, Recording, Reply, Step, event, text_stream, tool_delta
from pancake_langgraph.testing.wire_server import WireServer
from pancake_langgraph.wire.messages import NOT_RUN, short_id
from pancake_langgraph.wire.observer import CallObserver

RECORDING = Recording.load(Path(__file__).parents[1] / "data" / "vllm_answers.json")
ROLE = event({"role": "assistant", "content": ""})


@tool
def set_volume(volume: int) -> str:
    """Set the volume."""
    return str(volume)


@tool
def ping() -> str:
    """Ping."""
    return "pong"


class City(BaseModel):
    city: str
    degrees: int


def model(server: WireServer, **fields: Any) -> PancakeChatModel:
    return PancakeChatModel(**{"model": "small", "base_url": server.base_url, **fields})


def answer(*steps: Step, **fields: Any) -> tuple[AIMessage, AIMessageChunk]:
    """Return the answer as `invoke` and as `stream` give it."""
    with WireServer([Reply.stream(*steps)] * 2) as server:
        chat = model(server, **fields).bind_tools([set_volume, ping])
        whole = chat.invoke("hi")
        streamed = add(chat.stream("hi"))
    return whole, streamed


def add(chunks: Iterator[Any]) -> AIMessageChunk:
    first, *rest = list(chunks)
    return first + rest if rest else first


def calls(*deltas: list[dict[str, Any]], reason: str = "tool_calls") -> tuple[Step, ...]:
    return (ROLE, *(event({"tool_calls": delta}) for delta in deltas), event({}, finish_reason=reason))


# -- A1 tool-call deltas --------------------------------------------------------------------------------------------

TWO_CALLS = {
    "ids repeated, no index": calls(
        [tool_delta('{"vol', index=None, call_id="a", name="set_volume")],
        [tool_delta("{", index=None, call_id="b", name="ping")],
        [tool_delta('ume": 3', index=None, call_id="a")],
        [tool_delta("}", index=None, call_id="b")],
        [tool_delta("0}", index=None, call_id="a")],
    ),
    "ids once": calls(
        [tool_delta('{"volume": 3', index=0, call_id="a", name="set_volume")],
        [tool_delta(index=1, call_id="b", name="ping")],
        [tool_delta("0}", index=0)],
    ),
    "names repeated": calls(
        [tool_delta('{"volume"', index=0, call_id="a", name="set_volume")],
        [tool_delta(": 30}", index=0, call_id="a", name="set_volume")],
        [tool_delta("{}", index=1, call_id="b", name="ping")],
    ),
    "index 0 for both": calls(
        [tool_delta('{"volume": 30}', index=0, call_id="a", name="set_volume")],
        [tool_delta(index=0, call_id="b", name="ping")],
    ),
}


@pytest.mark.parametrize("shape", TWO_CALLS)
def test_two_calls_come_out_in_every_shape(shape: str) -> None:
    for message in answer(*TWO_CALLS[shape]):
        assert [(c["name"], c["args"], c["id"]) for c in message.tool_calls] == [
            ("set_volume", {"volume": 30}, "a"),
            ("ping", {}, "b"),
        ]
        assert not message.invalid_tool_calls


def test_pieces_that_cannot_be_joined_raise() -> None:
    steps = calls([tool_delta('{"volume"', call_id="a", name="set_volume")], [tool_delta("x", name="ping")])
    with pytest.raises(MalformedStream):
        answer(*steps)


@pytest.mark.parametrize("piece_bytes", [1, 3, 7])
def test_network_pieces_inside_characters_do_no_harm(piece_bytes: int) -> None:
    words = ["añ", "你好", "🙂", "line\u2028separator"]
    raw = [f"data: {json.dumps(event({'content': word}), ensure_ascii=False)}\n\n".encode() for word in words]
    reply = Reply.stream(*raw, event({}, finish_reason="stop"), piece_bytes=piece_bytes)
    with WireServer([reply]) as server:
        assert model(server).invoke("hi").content == "".join(words)


def test_an_emoji_escaped_in_halves_is_whole() -> None:
    halves = [b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\n']
    halves.append(b'data: {"choices":[{"index":0,"delta":{"content":"\\ude42"}}]}\n\n')
    assert answer(*halves, event({}, finish_reason="stop"))[0].content == "🙂"


# -- A2 calls written as text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["content", "reasoning"])
def test_a_call_written_as_text_is_flagged_and_not_executed(field: str, caplog: pytest.LogCaptureFixture) -> None:
    text = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    with caplog.at_level(logging.WARNING, logger="pancake_langgraph"):
        whole, streamed = answer(ROLE, event({field: text}), event({}, finish_reason="stop"))
    for message in (whole, streamed):
        assert message.response_metadata["pancake"]["unparsed_tool_call"] is True
        assert not message.tool_calls
    assert "tool-call-parser" in caplog.text
    assert "ping" not in caplog.text


def test_ordinary_text_is_not_flagged() -> None:
    whole, _ = answer(ROLE, event({"content": "hello"}), event({}, finish_reason="stop"))
    assert "unparsed_tool_call" not in whole.response_metadata["pancake"]


# -- A3 reasoning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_apart_from_the_answer(field: str) -> None:
    steps = (ROLE, event({field: "Let me "}), event({field: "think."}), event({"content": "42"}))
    for message in answer(*steps, event({}, finish_reason="stop")):
        assert message.content == "42"
        assert message.additional_kwargs["reasoning_content"] == "Let me think."
        assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]


def test_reasoning_under_both_names_is_taken_once() -> None:
    both = event({"reasoning": "think", "reasoning_content": "think"})
    assert answer(ROLE, both, event({}, finish_reason="stop"))[0].additional_kwargs["reasoning_content"] == "think"


@pytest.mark.parametrize("send", [False, True])
def test_reasoning_goes_back_only_when_wanted(send: bool) -> None:
    past = AIMessage("42", additional_kwargs={"reasoning_content": "think"})
    with WireServer() as server:
        model(server, send_reasoning_back=send).invoke([HumanMessage("q"), past, HumanMessage("again")])
        sent = server.chats[0].body["messages"][1]
    assert sent.get("reasoning_content") == ("think" if send else None)
    assert sent["content"] == "42"


# -- A4, B6 usage ---------------------------------------------------------------------------------------------------


def test_usage_in_every_piece_counts_once() -> None:
    counts = [{"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n} for n in (1, 2)]
    steps = (ROLE, event({"content": "a"}, usage=counts[0]), event({}, finish_reason="stop", usage=counts[1]))
    for message in answer(*steps, event(usage=counts[1])):
        assert message.usage_metadata == {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9}


def test_absent_usage_is_unknown() -> None:
    for message in answer(ROLE, event({"content": "a"}), event({}, finish_reason="stop")):
        assert message.usage_metadata is None


@pytest.mark.parametrize(("cached", "seen"), [(None, None), (0, 0), (512, 512)])
def test_cached_tokens_are_a_number_only_when_the_server_gives_one(cached: int | None, seen: int | None) -> None:
    usage = {"prompt_tokens": 600, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    for message in answer(ROLE, event({"content": "a"}, finish_reason="stop"), event(usage=usage)):
        assert message.usage_metadata is not None
        assert message.usage_metadata.get("input_token_details", {}).get("cache_read") == seen


# -- A5, A6, A14 histories ------------------------------------------------------------------------------------------

ASKED = AIMessage("", tool_calls=[{"name": "ping", "args": {}, "id": "call-" + "0" * 40}])


def test_strict_templates_are_satisfied_on_request() -> None:
    history = [SystemMessage("a"), HumanMessage("b"), AIMessage("c"), SystemMessage("note"), HumanMessage("d")]
    with WireServer(strict_roles=True) as server:
        with pytest.raises(EngineRejected, match="strict_roles=True"):
            model(server).invoke(history)
        model(server, strict_roles=True).invoke(history)
        sent = server.chats[-1].body["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "user"]
    assert sent[3]["content"] == "note\n\nd"


def test_an_open_call_and_an_orphan_result_do_not_stick() -> None:
    history = [ToolMessage("lost", tool_call_id="gone"), HumanMessage("a"), ASKED, HumanMessage("b")]
    with WireServer() as server:
        model(server).invoke(history)
        sent = server.chats[0].body["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "user"]
    assert sent[2]["content"] == NOT_RUN


def test_call_ids_are_mapped_to_a_legal_stable_form() -> None:
    history = [HumanMessage("a"), ASKED, ToolMessage("pong", tool_call_id=ASKED.tool_calls[0]["id"])]
    with WireServer() as server:
        for _ in range(2):
            model(server, tool_call_id_style="alnum9").invoke(history)
        first, second = [chat.raw for chat in server.chats]
        sent = server.chats[0].body["messages"]
    assert first == second
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == short_id(ASKED.tool_calls[0]["id"] or "")


def test_a_cut_short_call_can_be_sent_back() -> None:
    whole, streamed = answer(*calls([tool_delta('{"volume": 3', call_id="a", name="set_volume")], reason="length"))
    with WireServer() as server:
        for message in (whole, streamed):
            model(server).invoke([HumanMessage("a"), message, HumanMessage("b")])
        for chat in server.chats:
            assistant, result = chat.body["messages"][1:3]
            assert isinstance(json.loads(assistant["tool_calls"][0]["function"]["arguments"]), dict)
            assert result["role"] == "tool"


# -- A7 structured output -------------------------------------------------------------------------------------------

GOOD = '{"city": "Oslo", "degrees": 3}'
SHAPES = {
    "plain": [{"content": GOOD}],
    "fenced": [{"content": f"```json\n{GOOD}\n```"}],
    "after thinking in text": [{"content": "<think>{hm"}, {"content": "m}</think>\n"}, {"content": GOOD}],
    "after reasoning": [{"reasoning": "hm"}, {"content": GOOD}],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schema", [City, City.model_json_schema()], ids=["pydantic", "dict"])
def test_structured_output_is_parsed(shape: str, schema: Any) -> None:
    reply = Reply.stream(ROLE, *map(event, SHAPES[shape]), event({}, finish_reason="stop"))
    with WireServer([reply] * 2) as server:
        chat = model(server).with_structured_output(schema)
        values = [chat.invoke("q"), list(chat.stream("q"))[-1]]
    assert [value if isinstance(value, dict) else value.model_dump() for value in values] == [json.loads(GOOD)] * 2


BAD = {
    "null and length": ([{"content": None}], "length"),
    "cut short": ([{"content": GOOD[:15]}], "length"),
    "no json": ([{"content": "I cannot."}], "stop"),
    "only reasoning": ([{"reasoning": "hm"}], "stop"),
    "thinking without end": ([{"content": "<think>hm"}], "length"),
}


@pytest.mark.parametrize("shape", BAD)
@pytest.mark.parametrize("schema", [City, City.model_json_schema()], ids=["pydantic", "dict"])
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
async def test_no_structured_output_is_a_typed_error_that_names_the_reason(
    shape: str, schema: Any, method: Any
) -> None:
    deltas, reason = BAD[shape]
    reply = Reply.stream(ROLE, *map(event, deltas), event({}, finish_reason=reason))
    with WireServer([reply] * 3) as server:
        chat = model(server).with_structured_output(schema, method=method)
        with pytest.raises(StructuredOutputError, match=reason):
            chat.invoke("q")
        with pytest.raises(StructuredOutputError, match=reason):
            await chat.ainvoke("q")
        with pytest.raises(StructuredOutputError, match=reason):
            list(chat.stream("q"))


def test_an_answer_that_does_not_fit_the_schema_is_a_typed_error() -> None:
    reply = Reply.stream(event({"content": '{"city": 1}'}, finish_reason="stop"))
    with WireServer([reply]) as server, pytest.raises(StructuredOutputError, match="does not fit"):
        model(server).with_structured_output(City).invoke("q")


def test_include_raw_hands_the_error_over() -> None:
    with WireServer([Reply.stream(event({"content": "no"}, finish_reason="stop"))]) as server:
        result = model(server).with_structured_output(City, include_raw=True).invoke("q")
    assert result["raw"].content == "no"
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], StructuredOutputError)


# -- A8 the window --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "sent"), [("auto", 0), ("always", 0), ("never", 1)])
async def test_an_overflow_is_counted_before_sending(mode: Any, sent: int) -> None:
    with WireServer(window_tokens=4096) as server:
        chat = model(server, max_tokens=200, check_context=mode)
        with pytest.raises(ContextOverflow, match=r"400[12].*4096"):
            chat.invoke("word " * 4000)
        with pytest.raises(ContextOverflow, match=r"400[12].*4096"):
            await chat.ainvoke("word " * 4000)
        assert len(server.chats) == 2 * sent  # never sent twice


def test_a_small_prompt_costs_no_extra_request() -> None:
    with WireServer() as server:
        model(server, max_tokens=200).invoke("hi")
        assert [request.path for request in server.requests] == ["/v1/chat/completions"]


def test_a_window_that_nobody_knows_does_not_stop_the_call() -> None:
    with WireServer(window_tokens=None) as server:
        model(server, max_tokens=200, check_context="always").invoke("word " * 4000)
        assert len(server.chats) == 1


def test_tokens_are_counted_by_the_server() -> None:
    with WireServer() as server:
        chat = model(server)
        assert chat.get_num_tokens("three small words") == 3
        assert len(chat.get_token_ids("three small words")) == 3
        assert chat.get_num_tokens_from_messages([HumanMessage("a b")], tools=[ping]) == 3
        assert server.requests[-1].body["tools"][0]["function"]["name"] == "ping"


async def test_tokens_are_counted_without_blocking_a_loop() -> None:
    with WireServer() as server:
        assert await model(server).aget_num_tokens("a b") == 2
        assert await model(server).aget_num_tokens_from_messages([HumanMessage("a b")]) == 3


def test_without_a_tokenizer_an_estimate_is_given_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with WireServer(tokenizer=False) as server, caplog.at_level(logging.WARNING, logger="pancake_langgraph"):
        chat = model(server)
        assert [chat.get_num_tokens("x" * 40) for _ in range(3)] == [10] * 3
        assert chat.get_num_tokens_from_messages([HumanMessage("x" * 40)]) == 10
        assert sum(request.path == "/tokenize" for request in server.requests) == 1
        with pytest.raises(Unsupported, match="/tokenize"):
            chat.get_token_ids("x")
    assert len(caplog.records) == 1


def test_the_profile_learns_the_window_when_it_is_read() -> None:
    with WireServer(window_tokens=1234) as server:
        chat = model(server)
        assert not server.requests
        assert chat.profile is not None
        assert chat.profile["tool_calling"]
        assert chat.profile["structured_output"]
        assert not server.requests
        assert "max_input_tokens" in chat.profile
        assert chat.profile.get("max_input_tokens") == chat.profile["max_input_tokens"] == 1234


async def test_the_profile_does_not_block_a_loop() -> None:
    with WireServer(window_tokens=1234) as server:
        chat = model(server, max_tokens=5, check_context="always")
        assert chat.profile is not None
        assert chat.profile.get("max_input_tokens") is None
        assert not server.requests
        await chat.ainvoke("hi")
        assert chat.profile.get("max_input_tokens") == 1234


# -- A9 cancellation ------------------------------------------------------------------------------------------------


def endless(path: str, body: Mapping[str, Any]) -> Reply:
    words = (part for _ in range(400) for part in (event({"content": "x"}), 0.002))
    return Reply.stream(ROLE, *words)


def all_hung_up(server: WireServer, count: int) -> Callable[[], bool]:
    return lambda: len(server.chats) == count and all(chat.hung_up_s is not None for chat in server.chats)


def test_closing_a_stream_is_seen_by_the_server() -> None:
    with WireServer(endless) as server:
        chunks = model(server).stream("hi")
        next(chunks)
        chunks.close()
        assert server.wait_for(all_hung_up(server, 1), timeout_s=1.0)


async def test_cancelling_an_invoke_is_seen_by_the_server() -> None:
    with WireServer([Reply.stream(ROLE, Act.HANG)]) as server:
        task = asyncio.create_task(model(server).ainvoke("hi"))
        await asyncio.to_thread(server.wait_for, lambda: len(server.chats) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.wait_for, all_hung_up(server, 1), timeout_s=1.0)


async def test_two_hundred_cancelled_streams_leave_no_socket_and_no_harm() -> None:
    with WireServer(endless) as server:
        chat = model(server)
        for _ in range(200):
            chunks = chat.astream("hi")
            await anext(chunks)
            await chunks.aclose()
        assert await asyncio.to_thread(server.wait_for, all_hung_up(server, 200), timeout_s=2.0)
        assert await asyncio.to_thread(server.wait_for, lambda: server.num_open == 0, timeout_s=2.0)
        server._brain = None
        assert (await chat.ainvoke("hi")).content == "Hello there."


async def test_an_abandoned_stream_is_closed() -> None:
    with WireServer(endless) as server:

        async def one() -> None:
            async for _ in model(server).astream("hi"):
                break

        await one()
        assert await asyncio.to_thread(server.wait_for, all_hung_up(server, 1), timeout_s=1.0)


# -- A11, A12, A13 --------------------------------------------------------------------------------------------------


def test_parallel_calls_that_were_switched_off_are_flagged() -> None:
    steps = TWO_CALLS["ids once"]
    with WireServer([Reply.stream(*steps)]) as server:
        message = model(server).bind_tools([set_volume, ping], parallel_tool_calls=False).invoke("hi")
    assert len(message.tool_calls) == 2
    assert message.response_metadata["pancake"]["parallel_tool_calls_ignored"] is True


@pytest.mark.parametrize("arguments", ['{"volume": 3', '{"vol', "{", ""])
async def test_a_cut_short_call_is_invalid_whatever_way_it_is_read(arguments: str) -> None:
    steps = calls([tool_delta(arguments, call_id="a", name="set_volume")], reason="length")
    whole, streamed = answer(*steps)
    with WireServer([Reply.stream(*steps)] * 3) as server:
        chat = model(server).bind_tools([set_volume])
        more = [await chat.ainvoke("hi"), model(server, output_version="v1").bind_tools([set_volume]).invoke("hi")]
        stream = model(server).stream_events("hi", version="v3", tools=[])
        list(stream)
        more.append(stream.output)
    for message in (whole, streamed, *more):
        assert message.tool_calls == []
        assert len(message.invalid_tool_calls) == 1
        assert message.response_metadata["finish_reason"] == "length"
        assert "cut short" in message.response_metadata["pancake"]["invalid_tool_calls"]["a"]
    assert whole.invalid_tool_calls[0]["args"] == arguments
    assert "cut short" in str(whole.invalid_tool_calls[0]["error"])


def test_a_stop_string_inside_the_reasoning_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    reply = Reply.stream(event({"reasoning": "hm"}), event({}, finish_reason="stop"))
    with WireServer([reply]) as server, caplog.at_level(logging.WARNING, logger="pancake_langgraph"):
        message = model(server, stop=["x"]).invoke("hi")
    assert message.response_metadata["pancake"]["empty_after_reasoning"] is True
    assert "stop string" in caplog.text


# -- wrong addresses, refusals, faults, cut streams -----------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def ask_all_ways(chat: PancakeChatModel, text: str = "hi") -> AsyncIterator[BaseException]:
    for way in ("invoke", "stream", "ainvoke", "astream"):
        try:
            if way == "invoke":
                chat.invoke(text)
            elif way == "stream":
                list(chat.stream(text))
            elif way == "ainvoke":
                await chat.ainvoke(text)
            else:
                async for _ in chat.astream(text):
                    pass
        except Exception as exc:
            yield exc
        else:
            raise AssertionError(f"{way} did not fail")


async def test_nobody_listening_names_the_address_and_the_remedy() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    async for error in ask_all_ways(PancakeChatModel(model="small", base_url=url)):
        assert isinstance(error, EngineUnavailable)
        assert url in str(error)
        assert "pancake up" in str(error)
        assert isinstance(error.__cause__, httpx.HTTPError)


async def test_an_unknown_model_names_the_served_ones() -> None:
    with WireServer(served=("small", "large")) as server:
        async for error in ask_all_ways(model(server, model="none")):
            assert isinstance(error, ModelNotFound)
            assert "'small', 'large'" in str(error)


async def test_a_root_without_v1_is_explained() -> None:
    with WireServer() as server:
        async for error in ask_all_ways(model(server, base_url=server.root_url)):
            assert isinstance(error, EngineRejected)
            assert "/v1" in str(error)


async def test_a_web_page_is_no_answer() -> None:
    page = Reply.text("<html></html>", content_type="text/html")
    with WireServer([page] * 4) as server:
        async for error in ask_all_ways(model(server)):
            assert isinstance(error, MalformedStream)
            assert "web page" in str(error)


REFUSALS = dict.fromkeys((400, 401, 422, 429), EngineRejected) | dict.fromkeys((500, 502, 503), EngineFault)


@pytest.mark.parametrize(("status", "kind"), [*REFUSALS.items(), (504, EngineTimeout)])
async def test_refusals_and_faults_are_typed_and_sent_once(status: int, kind: type[EngineError]) -> None:
    with WireServer([Reply.error(status, "no")] * 4) as server:
        async for error in ask_all_ways(model(server)):
            assert isinstance(error, kind)
            assert str(status) in str(error)
        assert len(server.chats) == 4


def test_langchains_middleware_recognizes_an_overflow() -> None:
    with WireServer([RECORDING.reply("overflow")]) as server, pytest.raises(ContextOverflowError):
        model(server).invoke("hi")
    with WireServer(window_tokens=100) as server, pytest.raises(ContextOverflowError):
        model(server, max_tokens=90, check_context="always").invoke("word " * 20)


@pytest.mark.parametrize("name", ["overflow", "overflow_prompt"])
async def test_recorded_overflows_are_typed_and_sent_once(name: str) -> None:
    with WireServer([RECORDING.reply(name)] * 4) as server:
        async for error in ask_all_ways(model(server, max_retries=3)):
            assert isinstance(error, ContextOverflow)
        assert len(server.chats) == 4


def test_a_missing_tool_parser_is_explained() -> None:
    words = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    with WireServer([Reply.error(400, words)]) as server, pytest.raises(Unsupported, match="--enable-auto-tool-choice"):
        model(server).bind_tools([ping]).invoke("hi")


@pytest.mark.parametrize(
    "steps",
    [
        (ROLE, event({"content": "a"}), Act.CUT),
        (Act.CUT,),
        (ROLE, event({"content": "a"})),
    ],
    ids=["in the middle", "before the first piece", "without an end"],
)
async def test_a_cut_stream_is_typed(steps: tuple[Step, ...]) -> None:
    with WireServer([Reply.stream(*steps, done=False)] * 4) as server:
        async for error in ask_all_ways(model(server)):
            assert isinstance(error, EngineUnavailable)
            assert "before it was complete" in str(error)


@pytest.mark.parametrize(
    "step",
    [
        b"data: {broken\n\n",
        b"data: [1]\n\n",
        b"data: \xff\n\n",
        event({"content": 3}),
        event({"tool_calls": 3}),
        event({"tool_calls": ["x"]}),
        {"choices": 3},
        {"choices": [3]},
        {"choices": [{"index": 0, "delta": 3}]},
    ],
)
async def test_malformed_events_are_typed(step: Step) -> None:
    with WireServer([Reply.stream(ROLE, step)] * 4) as server:
        async for error in ask_all_ways(model(server)):
            assert isinstance(error, MalformedStream)


async def test_an_answer_without_any_choice_is_typed() -> None:
    with WireServer([Reply.stream()] * 4) as server:
        async for error in ask_all_ways(model(server)):
            assert isinstance(error, MalformedStream)


async def test_an_error_inside_the_stream_is_typed() -> None:
    inside = {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}
    with WireServer([Reply.stream(ROLE, inside)] * 4) as server:
        async for error in ask_all_ways(model(server)):
            assert isinstance(error, EngineFault)


async def test_silence_is_a_timeout() -> None:
    with WireServer([Reply.stream(ROLE, Act.HANG)] * 4) as server:
        async for error in ask_all_ways(model(server, timeout=0.05)):
            assert isinstance(error, EngineTimeout)


def test_a_server_that_does_not_stream_is_understood() -> None:
    with WireServer([RECORDING.reply("chat_unstreamed")]) as server:
        message = model(server).invoke("hi")
    assert message.content.startswith("I'm glad")
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_token_details"] == {"cache_read": 0}


def test_a_busy_server_is_asked_again_when_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pancake_langgraph.chat.call._BACKOFF_S", 0.001)
    with WireServer([Reply.error(503, "busy"), Reply.error(429, "busy"), text_stream(["ok"])]) as server:
        assert model(server, max_retries=2).invoke("hi").content == "ok"


async def test_a_stream_that_has_begun_is_never_sent_again() -> None:
    with WireServer([Reply.stream(ROLE, event({"content": "a"}), Act.CUT)] * 4) as server:
        async for error in ask_all_ways(model(server, max_retries=3)):
            assert isinstance(error, EngineUnavailable)
        assert len(server.chats) == 4


async def test_no_prompt_text_gets_into_messages_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    secret = "the code of the safe is 0815-4711"

    def echo(path: str, body: Mapping[str, Any]) -> Reply:
        return Reply.error(next(statuses), f"cannot read {body['messages'][0]['content']!r}")

    statuses = itertools.cycle((400, 422, 500, 503))
    with WireServer(echo) as server, caplog.at_level(logging.DEBUG, logger="pancake_langgraph"):
        async for error in ask_all_ways(model(server), secret):
            assert "0815" not in str(error)
    assert "0815" not in caplog.text


# -- requests -------------------------------------------------------------------------------------------------------


def test_extra_body_is_merged_from_model_and_call() -> None:
    with WireServer() as server:
        chat = model(server, extra_body={"vllm_xargs": {"a": 1}}, cache_salt="s", priority=3)
        chat.invoke("hi", extra_body={"vllm_xargs": {"b": 2}})
        chat.invoke("hi", cache_salt="t")
        first, second = [request.body for request in server.chats]
    assert first["vllm_xargs"] == {"a": 1, "b": 2}
    assert (first["cache_salt"], first["priority"], second["cache_salt"]) == ("s", 3, "t")
    assert "extra_body" not in first


def test_every_call_streams_and_asks_for_usage() -> None:
    with WireServer() as server:
        model(server).invoke("hi")
        model(server, stream_usage=False).invoke("hi")
        first, second = [request.body for request in server.chats]
    assert first["stream"] is second["stream"] is True
    assert first["stream_options"] == {"include_usage": True}
    assert "stream_options" not in second


def test_tools_go_out_as_they_were_bound_and_sorted_where_the_app_asks_for_it() -> None:
    with WireServer() as server:
        for tools in ([ping, set_volume], [set_volume, ping]):
            model(server, keep_tool_order=False).bind_tools(tools).invoke("hi")
        model(server).bind_tools([set_volume, ping]).invoke("hi")
        stable, again, kept = list(server.chats)
    assert stable.raw == again.raw
    assert [t["function"]["name"] for t in stable.body["tools"]] == ["ping", "set_volume"]
    assert [t["function"]["name"] for t in kept.body["tools"]] == ["set_volume", "ping"]


def test_no_variable_of_another_provider_redirects_or_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_BASE", "OPENAI_BASE_URL", "OPENAI_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/v1")
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "leaked")
    with WireServer() as server:
        model(server).invoke("hi")
        headers = server.chats[0].headers
    assert headers["Authorization"] == "Bearer EMPTY"
    assert "leaked" not in str(headers)


def test_the_key_is_masked() -> None:
    chat = PancakeChatModel(model="small", base_url="http://127.0.0.1:1/v1", api_key="very-secret")
    assert "very-secret" not in f"{chat!r} {chat.facts.link.config!r}"


def test_model_names_of_other_providers_get_no_special_treatment() -> None:
    with WireServer(any_model=True) as server:
        for name in ("gpt-5-pro", "o1-mini", "codex-x", "gpt-6"):
            model(server, model=name, temperature=0.3).invoke("hi")
        assert {(chat.path, chat.body["temperature"]) for chat in server.chats} == {("/v1/chat/completions", 0.3)}


@pytest.mark.parametrize(
    "fields", [{"model": ""}, {"model": "m", "n": 2}, {"model": "m", "use_responses_api": True}], ids=str
)
def test_what_this_wire_cannot_do_is_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed is"):
        PancakeChatModel(base_url="http://127.0.0.1:1/v1", **fields)


def test_an_async_key_function_works_where_it_can() -> None:
    async def key() -> str:
        return "made"

    with WireServer() as server:
        chat = model(server, api_key=key)
        asyncio.run(chat.ainvoke("hi"))
        assert server.chats[0].headers["Authorization"] == "Bearer made"
        with pytest.raises(ConfigError, match="async function"):
            chat.invoke("hi")


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_the_applications_own_clients_are_used(library: str) -> None:
    """LangChain's OpenAI package brings a second client library with errors of its own."""
    clients = importlib.import_module(library)
    with WireServer([text_stream(["a"])] * 2) as server, clients.Client(headers={"x-mine": "1"}) as own:
        async with clients.AsyncClient(headers={"x-mine": "2"}) as own_async:
            chat = model(server, http_client=own, http_async_client=own_async)
            chat.invoke("hi")
            await chat.ainvoke("hi")
            assert [request.headers["x-mine"] for request in server.chats] == ["1", "2"]
            server.stop()
            async for error in ask_all_ways(chat):
                assert isinstance(error, EngineUnavailable)


def test_response_headers_are_kept_on_request() -> None:
    with WireServer() as server:
        message = model(server, include_response_headers=True).invoke("hi")
    assert "content-type" in message.response_metadata["headers"]


# -- loops and threads ----------------------------------------------------------------------------------------------


def test_one_model_serves_many_loops_and_threads() -> None:
    with WireServer() as server:
        chat = model(server)
        for _ in range(3):
            asyncio.run(chat.ainvoke("hi"))
            assert chat.facts.link.num_loops == 0
        threads = [threading.Thread(target=lambda: asyncio.run(chat.ainvoke("hi"))) for _ in range(4)]
        threads += [threading.Thread(target=lambda: chat.invoke("hi")) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(server.chats) == 11
        assert not server.faults


def test_one_loop_keeps_one_connection() -> None:
    with WireServer() as server:
        chat = model(server)

        async def talk() -> None:
            for _ in range(5):
                await chat.ainvoke("hi")

        asyncio.run(talk())
        assert len(server.connections) == 1
        assert server.wait_for(lambda: server.num_open == 0)


# -- observers ------------------------------------------------------------------------------------------------------


class Watcher(BaseCallbackHandler):
    def __init__(self, extra: Mapping[str, Any] | None = None) -> None:
        self.extra = extra
        self.seen: list[tuple[Any, ...]] = []
        self.started: list[UUID] = []
        self.tokens: list[Any] = []

    def on_chat_model_start(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        self.started.append(run_id)

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        self.tokens.append(chunk)

    def on_wire_request(self, run_id: UUID, payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
        self.seen.append(("request", run_id, payload["messages"][0]["content"]))
        return self.extra

    def on_wire_first_piece(self, run_id: UUID, prompt_token_ids: tuple[int, ...] | None) -> None:
        self.seen.append(("first", run_id, prompt_token_ids))

    def on_wire_tool_name(self, run_id: UUID, tool_name: str) -> None:
        self.seen.append(("tool", run_id, tool_name))

    def on_wire_end(self, run_id: UUID, usage: Usage | None, finish_reason: str | None) -> None:
        self.seen.append(("end", run_id, usage, finish_reason))


async def run_way(chat: Any, way: str, config: Any) -> None:
    if way == "invoke":
        chat.invoke("hi", config)
    elif way == "stream":
        list(chat.stream("hi", config))
    elif way == "ainvoke":
        await chat.ainvoke("hi", config)
    elif way == "astream":
        async for _ in chat.astream("hi", config):
            pass
    else:
        list(chat.stream_events("hi", config, version="v3"))


WAYS = ["invoke", "stream", "ainvoke", "astream", "events"]


@pytest.mark.parametrize("way", WAYS)
async def test_an_observer_sees_each_event_once_whatever_way_the_call_is_made(way: str) -> None:
    watcher = Watcher({"return_token_ids": True})
    assert isinstance(watcher, CallObserver)
    named = RECORDING.reply("tool_required")
    with WireServer([named, RECORDING.reply("chat_token_ids")]) as server:
        await run_way(model(server), way, {"callbacks": [watcher]})
        kinds = [entry[0] for entry in watcher.seen]
        assert kinds == ["request", "first", "tool", "end"]
        assert {entry[1] for entry in watcher.seen} == set(watcher.started)
        assert watcher.seen[2][2] == "get_weather"
        assert watcher.seen[3][2].prompt_tokens == 37
        assert server.chats[0].body["return_token_ids"] is True
        watcher.seen.clear()
        await run_way(model(server), way, {"callbacks": [watcher]})
    ids = watcher.seen[1][2]
    assert ids is not None
    assert len(ids) == 37


@pytest.mark.parametrize("way", WAYS)
async def test_an_observer_sees_the_end_of_a_failed_call(way: str) -> None:
    watcher = Watcher()
    with WireServer([Reply.stream(ROLE, Act.CUT)]) as server, contextlib.suppress(EngineUnavailable):
        await run_way(model(server), way, {"callbacks": [watcher]})
    assert watcher.seen[-1][0] == "end"
    assert watcher.seen[-1][2:] == (None, None)


async def test_an_observer_sees_the_end_of_a_cancelled_call() -> None:
    watcher = Watcher()
    with WireServer([Reply.stream(ROLE, Act.HANG)]) as server:
        task = asyncio.create_task(model(server).ainvoke("hi", {"callbacks": [watcher]}))
        await asyncio.to_thread(server.wait_for, lambda: len(server.chats) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert watcher.seen[-1][2:] == (None, None)


def test_an_observer_that_raises_does_no_harm() -> None:
    class Broken(Watcher):
        def on_wire_request(self, run_id: UUID, payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
            raise RuntimeError("broken")

    good = Watcher({"priority": 7})
    with WireServer() as server:
        assert model(server).invoke("hi", {"callbacks": [Broken(), good]}).content == "Hello there."
        assert server.chats[0].body["priority"] == 7
    assert good.seen[-1][0] == "end"


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_callbacks_see_the_tool_name_while_the_answer_is_still_coming(way: str) -> None:
    named_at: list[float] = []

    class Timed(Watcher):
        def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
            if any(piece["name"] for piece in chunk.message.tool_call_chunks):
                named_at.append(time.monotonic())

    steps = calls([tool_delta("", call_id="a", name="ping")], [tool_delta("{}")])
    with WireServer([Reply.stream(*steps[:2], 0.03, *steps[2:])]) as server:
        await run_way(model(server).bind_tools([ping]), way, {"callbacks": [Timed()]})
        ended_s = server.chats[0].ended_s
    assert ended_s is not None
    assert len(named_at) == 1
    assert named_at[0] < ended_s


async def test_the_message_stream_of_a_graph_shows_each_message_once() -> None:
    from langgraph.graph import MessagesState, StateGraph

    watcher = Watcher()
    with WireServer() as server:
        chat = model(server)

        async def talk(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await chat.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState).add_node("talk", talk).add_edge("__start__", "talk").compile()
        streamed = [
            part
            async for part, _ in graph.astream(
                {"messages": [HumanMessage("hi")]}, {"callbacks": [watcher]}, stream_mode="messages"
            )
        ]
    assert "".join(str(part.content) for part in streamed) == "Hello there."
    assert len({part.id for part in streamed}) == 1
    assert [entry[0] for entry in watcher.seen] == ["request", "first", "end"]


def test_token_ids_are_asked_for_only_when_told_and_never_kept() -> None:
    with WireServer([RECORDING.reply("chat"), RECORDING.reply("chat_token_ids")]) as server:
        model(server).invoke("hi")
        message = model(server, return_token_ids=True).invoke("hi")
        assert "return_token_ids" not in server.chats[0].body
        assert server.chats[1].body["return_token_ids"] is True
    assert message.response_metadata["pancake"]["num_prompt_token_ids"] == 37
    assert "9690" not in message.model_dump_json()


@pytest.mark.parametrize("name", ["chat", "stop", "length", "tool_named", "tool_required", "json_schema", "choice"])
def test_recorded_answers_of_vllm_are_read(name: str) -> None:
    with WireServer([RECORDING.reply(name)]) as server:
        message = model(server).invoke("hi")
    assert message.response_metadata["model_name"] == "small"
    assert message.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")
    assert message.usage_metadata is not None
    assert message.content or message.tool_calls or message.invalid_tool_calls


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_a_saved_model_is_loaded_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_core.load import dumps, loads

    monkeypatch.setenv("PANCAKE_API_KEY", "k-4711")
    saved = dumps(PancakeChatModel(model="small", base_url="http://127.0.0.1:1/v1", cache_salt="s"))
    assert "k-4711" not in saved
    loaded = loads(
        saved, allowed_objects=[PancakeChatModel], valid_namespaces=["pancake_langgraph"], secrets_from_env=True
    )
    assert isinstance(loaded, PancakeChatModel)
    assert (loaded.model_name, loaded.openai_api_base, loaded.cache_salt) == ("small", "http://127.0.0.1:1/v1", "s")
