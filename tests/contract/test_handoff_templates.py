"""Hand-offs of a supervisor against a template that allows one system message first and no two equal roles in a row."""

from __future__ import annotations

import warnings
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph_supervisor import create_supervisor

from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.testing.wire_replies import Reply, event, tool_delta
from pancake_langgraph.testing.wire_server import WireServer


def says(text: str) -> Reply:
    return Reply.stream(event({"role": "assistant", "content": text}), event({}, finish_reason="stop"))


def hands_over(name: str, call_id: str) -> Reply:
    return Reply.stream(
        event({"role": "assistant", "content": ""}),
        event({"tool_calls": [tool_delta("{}", call_id=call_id, name=f"transfer_to_{name}")]}),
        event({}, finish_reason="tool_calls"),
    )


def team(server: WireServer) -> Any:
    model = PancakeChatModel(model="small", base_url=server.base_url, strict_roles=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the supervisor package is built on a deprecated agent
        from langgraph.prebuilt import create_react_agent

        workers = [create_react_agent(model, [], name=name, prompt=f"You are {name}.") for name in ("alice", "bob")]
        return create_supervisor(workers, model=model, prompt="You lead.").compile(checkpointer=InMemorySaver())


async def test_each_hand_over_of_a_supervisor_reaches_a_strict_template_once() -> None:
    replies = [hands_over("alice", "c1"), says("from alice"), hands_over("bob", "c2"), says("from bob"), says("done")]
    with WireServer(replies, strict_roles=True) as server:
        state = await team(server).ainvoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": "t"}})
        requests = [chat.body["messages"] for chat in server.chats]
    assert len(requests) == 5
    last = state["messages"][-1]
    assert isinstance(last, AIMessage)
    assert last.content == "done"
    for sent in requests:
        roles = [message["role"] for message in sent]
        assert "system" not in roles[1:]
        assert all(message.get("content") or message.get("tool_calls") for message in sent)
    for name, call_id in (("alice", "c1"), ("bob", "c2")):
        asked = [
            call["id"] for message in requests[-1] for call in message.get("tool_calls") or () if call["id"] == call_id
        ]
        told = [m for m in requests[-1] if f"transferred to {name}" in str(m.get("content"))]
        assert len(asked) == 1
        assert len(told) == 1
