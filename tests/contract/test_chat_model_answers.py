"""What servers answer, in all its shapes, and what the chat model makes of it."""

import json
import logging
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from pancake_langgraph._errors import (
    MalformedStream,
    StructuredOutputError,
)
from pancake_langgraph.testing.wire_replies import Reply, event, tool_delta
from pancake_langgraph.testing.wire_server import WireServer
from tests.contract.chat_model_wire import RECORDING, ROLE, TWO_CALLS, City, answer, calls, model, ping, set_volume

# -- A1 tool-call deltas --------------------------------------------------------------------------------------------


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


# -- recorded answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat", "stop", "length", "tool_named", "tool_required", "json_schema", "choice"])
def test_recorded_answers_of_vllm_are_read(name: str) -> None:
    with WireServer([RECORDING.reply(name)]) as server:
        message = model(server).invoke("hi")
    assert message.response_metadata["model_name"] == "small"
    assert message.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")
    assert message.usage_metadata is not None
    assert message.content or message.tool_calls or message.invalid_tool_calls


def test_what_an_engine_answers_to_hints_stays_out_of_the_message() -> None:
    told = {"pancake": {"version": 1, "answers": []}}
    for params, kept in ((told, None), ({**told, "remote": 1}, {"remote": 1})):
        last = event({}, finish_reason="stop", kv_transfer_params=params)
        for message in answer(ROLE, event({"content": "hello"}), last):
            assert message.response_metadata["pancake"].get("kv_transfer_params") == kept
