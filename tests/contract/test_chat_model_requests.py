"""What the chat model sends: histories, sizes, fields, headers."""

import asyncio
import importlib
import json
import logging
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from pancake_langgraph._errors import (
    ConfigError,
    ContextOverflow,
    EngineRejected,
    EngineUnavailable,
    Unsupported,
)
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.testing.wire_replies import text_stream, tool_delta
from pancake_langgraph.testing.wire_server import WireServer
from pancake_langgraph.wire.messages import NOT_RUN, short_id
from tests.contract.chat_model_wire import (
    RECORDING,
    answer,
    ask_all_ways,
    calls,
    model,
    ping,
    set_volume,
)

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


def test_the_codec_of_an_agents_kv_is_part_of_its_salt() -> None:
    with WireServer() as server:
        model(server).invoke("hi")
        model(server, cache_salt="s", kv_codec="int4").invoke("hi")
        model(server, kv_codec="int4").invoke("hi", kv_codec="exact")
        model(server, kv_codec="int8").invoke("hi", extra_body={"cache_salt": "t"})
        with pytest.raises(ConfigError, match="exact, int8, int4"):
            model(server).invoke("hi", kv_codec="fp8")
        with pytest.raises(ValueError, match="kv_codec"):
            model(server, kv_codec="int2")
        bodies = [request.body for request in server.chats]
    assert [body.get("cache_salt") for body in bodies] == [None, "s!int4", "!exact", "t!int8"]
    assert not any("kv_codec" in body for body in bodies)


def test_every_call_streams_and_asks_for_usage() -> None:
    with WireServer() as server:
        model(server).invoke("hi")
        model(server, stream_usage=False).invoke("hi")
        first, second = [request.body for request in server.chats]
    assert first["stream"] is second["stream"] is True
    assert first["stream_options"] == {"include_usage": True}
    assert "stream_options" not in second


def test_tools_go_out_sorted_or_as_they_were_bound_where_the_app_asks_for_it() -> None:
    with WireServer() as server:
        for tools in ([ping, set_volume], [set_volume, ping]):
            model(server, tool_order="sorted").bind_tools(tools).invoke("hi")
        model(server, tool_order="as_bound").bind_tools([set_volume, ping]).invoke("hi")
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


def test_token_ids_are_asked_for_only_when_told_and_never_kept() -> None:
    with WireServer([RECORDING.reply("chat"), RECORDING.reply("chat_token_ids")]) as server:
        model(server).invoke("hi")
        message = model(server, return_token_ids=True).invoke("hi")
        assert "return_token_ids" not in server.chats[0].body
        assert server.chats[1].body["return_token_ids"] is True
    assert message.response_metadata["pancake"]["num_prompt_token_ids"] == 37
    assert "9690" not in message.model_dump_json()


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
