"""What goes wrong between the chat model and a server: hang-ups, wrong addresses, refusals, faults, cut streams."""

import asyncio
import itertools
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from langchain_core.exceptions import ContextOverflowError

from pancake_langgraph._errors import (
    ContextOverflow,
    EngineError,
    EngineFault,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    MalformedStream,
    ModelNotFound,
    Unsupported,
)
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.testing.wire_replies import Act, Reply, Step, event, text_stream
from pancake_langgraph.testing.wire_server import WireServer
from tests.contract.chat_model_wire import (
    RECORDING,
    ROLE,
    ask_all_ways,
    model,
    ping,
)

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


# -- wrong addresses, refusals, faults, cut streams -----------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
