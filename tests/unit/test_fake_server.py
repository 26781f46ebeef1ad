"""The fake engine's port, seen by a client that knows nothing of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from langchain_openai import ChatOpenAI

from pancake_langgraph.engines.fake import FakeAnswer, FakeEngine, FakeEngineSettings, FakeToolCall
from pancake_langgraph.testing.fake_server import FakeEngineServer


@pytest.fixture
def server() -> Iterator[FakeEngineServer]:
    script = {"use it": FakeAnswer("", (FakeToolCall("look", {"at": "sky"}), FakeToolCall("look", {"at": "sea"})))}
    with FakeEngineServer(FakeEngine(FakeEngineSettings(script=script | {"hello": "hello to you"}))) as running:
        yield running


@pytest.fixture
def client(server: FakeEngineServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.root_url, timeout=10, trust_env=False) as made:
        yield made


def body(text: str, **more) -> dict:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 50, **more}


def look(at: str) -> str:
    """Look at something."""
    return at


async def test_a_stock_client_chats_streams_and_calls_tools(server: FakeEngineServer) -> None:
    model = ChatOpenAI(model="fake", base_url=server.base_url, api_key="none", max_retries=0, stream_usage=True)
    plain = await model.ainvoke("hello")
    assert plain.content == "hello to you"
    assert plain.usage_metadata is not None
    chunks = [chunk async for chunk in model.astream("hello")]
    assert "".join(str(chunk.content) for chunk in chunks) == "hello to you"
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
    bound = model.bind_tools([look])
    calls = [{"name": "look", "args": {"at": "sky"}}, {"name": "look", "args": {"at": "sea"}}]
    answer = await bound.ainvoke("use it")
    assert [{"name": call["name"], "args": call["args"]} for call in answer.tool_calls] == calls
    streamed = None
    async for chunk in bound.astream("use it"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [{"name": call["name"], "args": call["args"]} for call in streamed.tool_calls] == calls
    assert len({call["id"] for call in streamed.tool_calls}) == 2


def test_streamed_and_whole_answers_say_the_same(client: httpx.Client) -> None:
    whole = client.post("/v1/chat/completions", json=body("hello", return_token_ids=True)).json()
    lines = client.post(
        "/v1/chat/completions",
        json=body("hello", stream=True, stream_options={"include_usage": True}, return_token_ids=True),
    ).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_cached_tokens_show_and_a_reset_takes_them_away(client: httpx.Client) -> None:
    request = {"model": "fake", "prompt": list(range(500, 540)), "max_tokens": 1}
    cached = []
    for _ in range(2):
        answer = client.post("/v1/completions", json=request).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    answer = client.post("/v1/completions", json=request).json()
    assert [*cached, answer["usage"]["prompt_tokens_details"]["cached_tokens"]] == [0, 32, 0]


@pytest.mark.parametrize(
    ("path", "request_body", "status"),
    [
        ("/v1/chat/completions", {"model": "nope", "messages": [{"role": "user", "content": "x"}]}, 404),
        ("/v1/chat/completions", {"model": "fake"}, 400),
        ("/v1/chat/completions", body("x", n=2), 400),
        ("/v1/chat/completions", body("x") | {"max_tokens": 100_000}, 400),
        ("/v1/chat/completions", body("x", stream=True) | {"max_tokens": 100_000}, 400),
        ("/v1/completions", {"model": "fake", "prompt": "text", "max_tokens": 1}, 400),
        ("/v1/completions", {"model": "fake", "prompt": [1], "max_tokens": 2}, 400),
        ("/nowhere", {}, 404),
    ],
)
def test_wrong_requests_are_refused(client: httpx.Client, path: str, request_body: dict, status: int) -> None:
    assert client.post(path, json=request_body).status_code == status


def test_it_serves_the_small_routes(client: httpx.Client, server: FakeEngineServer) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/version").json() == {"version": "0.32.0"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "fake"
    tokens = client.post("/tokenize", json=body("hello")).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert "vllm:num_requests_running" in client.get("/metrics").text
    assert server.base_url == f"{server.root_url}/v1"
