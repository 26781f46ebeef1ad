"""A chat model on the scripted wire server, for the suites on what servers do."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import tool
from pydantic import BaseModel

from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.testing.wire_replies import Recording, Reply, Step, event, tool_delta
from pancake_langgraph.testing.wire_server import WireServer

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
