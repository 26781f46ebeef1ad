"""A field takes up what nodes write to it as LangGraph does."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AnyMessage, HumanMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages

from pancake_langgraph.prompts.reducers import Reducer, reduced

NAMES = st.sampled_from("abcdef")


def said(name: str, text: str) -> AnyMessage:
    return HumanMessage(text, id=name)


OLD = st.lists(NAMES, unique=True).map(lambda names: [said(name, name) for name in names])
NEW = st.lists(
    st.one_of(
        st.builds(said, NAMES, st.sampled_from(["x", "y"])),
        NAMES.map(lambda name: RemoveMessage(id=name)),
        st.just(RemoveMessage(id=REMOVE_ALL_MESSAGES)),
    ),
    max_size=6,
)


@given(old=OLD, new=NEW)
def test_messages_are_joined_as_langgraph_joins_them(old: list[Any], new: list[Any]) -> None:
    try:
        wanted = add_messages(list(old), list(new))
    except ValueError:
        return  # it removes what is not there: the step fails, and nobody reads what it wrote
    value, grew = reduced(old, new, Reducer.MESSAGES)
    assert isinstance(value, list)
    assert isinstance(wanted, list)
    assert [(message.id, message.content) for message in value] == [(one.id, one.content) for one in wanted]
    begins = [message.content for message in wanted[: len(old)]] == [message.content for message in old]
    assert begins or not grew


def test_messages_without_ids_are_all_new() -> None:
    old = [said("a", "a")]
    value, grew = reduced(old, [HumanMessage("b"), HumanMessage("b"), ("user", "c")], Reducer.MESSAGES)
    assert [message.content for message in value] == ["a", "b", "b", "c"]  # type: ignore[attr-defined]
    assert grew
