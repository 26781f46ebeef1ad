"""Tools on the wire: one order for the life of the process, and what the forecast makes of it."""

import itertools
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from pydantic import ValidationError

from pancake_langgraph._types import Prompt
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.prompts.agent_code import prompts_of
from pancake_langgraph.prompts.tool_order import TOOL_ORDERS, ToolOrders, expected_tools
from pancake_langgraph.testing.wire_server import WireServer
from tests.contract.chat_model_wire import model


@pytest.fixture(autouse=True)
def fresh_memo() -> Iterator[None]:
    TOOL_ORDERS.clear()
    yield
    TOOL_ORDERS.clear()


def schema(name: str, **properties: str) -> dict[str, Any]:
    fields = {key: {"type": kind, "description": f"the {key}"} for key, kind in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": fields}}}


def turned(value: Any) -> Any:
    """Return an equal value whose objects have their keys the other way round."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


SEARCH, OPEN, CLOSE = schema("search", query="string", limit="integer"), schema("open", path="string"), schema("close")


def sent(server: WireServer) -> list[str]:
    return [json.dumps(chat.body["tools"]) for chat in server.chats]


def test_a_shuffled_set_goes_out_in_the_order_of_its_first_time() -> None:
    shuffled = list(itertools.permutations([SEARCH, OPEN, CLOSE]))
    random.Random(7).shuffle(shuffled)
    with WireServer() as server:
        chat = model(server)
        for order in shuffled:
            chat.bind_tools(order).invoke("hi")
            chat.bind_tools([turned(t) for t in order]).invoke("hi")
        bodies = sent(server)
    assert len(bodies) == 12
    assert len(set(bodies)) == 1
    assert [t["function"]["name"] for t in json.loads(bodies[0])] == [t["function"]["name"] for t in shuffled[0]]


def test_a_constant_order_goes_out_as_it_was_bound() -> None:
    with WireServer() as server:
        bound = model(server).bind_tools([SEARCH, CLOSE, OPEN])
        for _ in range(3):
            bound.invoke("hi")
        assert sent(server) == [json.dumps([SEARCH, CLOSE, OPEN])] * 3


def test_sets_of_equal_names_and_different_schemas_are_two_sets() -> None:
    other = schema("search", query="string")
    with WireServer() as server:
        for tools in ([SEARCH, OPEN], [OPEN, other], [OPEN, SEARCH], [other, OPEN]):
            model(server).bind_tools(tools).invoke("hi")
        assert sent(server) == [json.dumps(t) for t in ([SEARCH, OPEN], [OPEN, other], [SEARCH, OPEN], [OPEN, other])]


def test_models_and_threads_share_one_order() -> None:
    orders = list(itertools.permutations([SEARCH, OPEN, CLOSE]))
    with WireServer() as server:
        ready = threading.Barrier(len(orders))

        def call(order: tuple[dict[str, Any], ...]) -> None:
            chat = model(server).bind_tools(order)
            ready.wait()
            chat.invoke("hi")

        threads = [threading.Thread(target=call, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bodies = sent(server)
    assert len(bodies) == len(orders)
    assert len(set(bodies)) == 1


def test_counting_tokens_sends_nothing_and_settles_no_order() -> None:
    with WireServer() as server:
        chat = model(server)
        chat.get_num_tokens_from_messages([("user", "hi")], tools=[OPEN, SEARCH])
        chat.bind_tools([SEARCH, OPEN]).invoke("hi")
        assert sent(server) == [json.dumps([SEARCH, OPEN])]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValidationError, match="first_seen"):
        PancakeChatModel(model="m", base_url="http://127.0.0.1:1/v1", tool_order="random")


def test_the_memo_forgets_the_set_that_was_not_used_for_longest() -> None:
    orders = ToolOrders(max_sets=2)
    sets = [[schema(f"a{n}"), schema(f"b{n}")] for n in range(3)]
    orders.settle(sets[0])
    orders.settle(sets[1])
    orders.settle(sets[0][::-1])  # used again
    orders.settle(sets[2])
    assert len(orders) == 2
    assert orders.settle(sets[0][::-1]) == sets[0]
    assert orders.settle(sets[1][::-1]) == sets[1][::-1]  # forgotten: this is its first time


def test_the_memo_is_bounded_in_characters() -> None:
    orders = ToolOrders(max_chars=1000)
    for number in range(50):
        orders.settle([schema(f"tool{number}", text="string")])
    assert 0 < len(orders) < 10
    orders.settle([schema("x" * 2000)])
    assert len(orders) == 0


def test_what_comes_back_can_be_changed_without_harm() -> None:
    orders = ToolOrders()
    orders.settle([SEARCH, OPEN])
    orders.settle([OPEN, SEARCH])[0]["function"]["name"] = "changed"
    assert orders.settle([OPEN, SEARCH]) == [SEARCH, OPEN]


def test_tools_that_are_no_json_are_left_alone() -> None:
    odd = [{"function": {"name": "b", "parameters": object()}}, {"function": {"name": "a"}}]
    assert ToolOrders().settle(odd) == odd


def test_the_forecast_of_a_created_agent_has_the_order_that_will_be_sent() -> None:
    @tool
    def first(q: str) -> str:
        """First."""
        return q

    @tool
    def second(q: str) -> str:
        """Second."""
        return q

    with WireServer() as server:
        for order in ("first_seen", "sorted", "as_bound"):
            chat = model(server, tool_order=order)
            agent = create_agent(chat, [second, first], system_prompt="Work.")
            [known] = prompts_of(agent)
            assert len(TOOL_ORDERS) == (0 if order == "first_seen" else 1), "reading settles nothing"
            if order == "first_seen":  # another agent sends the set first, after this one was read
                assert [t["function"]["name"] for t in known.tools or ()] == ["second", "first"]
                chat.bind_tools([first, second]).invoke("hi")
            agent.invoke({"messages": [("user", "go")]})
            assert json.dumps(list(known.tools or ())) == sent(server)[-1]


def test_an_expected_order_is_not_a_sent_one() -> None:
    assert expected_tools([OPEN, SEARCH], "first_seen") == [OPEN, SEARCH]
    assert Prompt.of([], expected_tools([SEARCH, OPEN], "sorted")).tools[0]["function"]["name"] == "open"
    assert len(TOOL_ORDERS) == 0
