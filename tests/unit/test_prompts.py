"""Prompt shapes, predictions, identities."""

from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from pancake_langgraph._types import Prompt, ThreadId
from pancake_langgraph.prompts import PromptBook, agent_key, cut_at_block_edge, strip_task_ids
from pancake_langgraph.prompts.book import Source
from pancake_langgraph.prompts.identity import canonical, parent_namespace
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.prompts.wire_form import wire_form

SYSTEM = {"role": "system", "content": "You are the writer."}
HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
T1, T2 = ThreadId("1"), ThreadId("2")


def prompt(*messages: dict[str, object]) -> Prompt:
    return Prompt.of(messages)


def key(text: str = "You are the writer.", node: str = "writer:1"):
    return agent_key(node, None, prompt({"role": "system", "content": text}))


def test_namespaces_lose_their_task_ids() -> None:
    assert strip_task_ids("team:1a|writer:2b") == "team|writer"
    assert strip_task_ids("") == ""
    assert parent_namespace("team:1a|writer:2b") == "team:1a"
    assert parent_namespace("writer:2b") == ""


def test_one_node_with_two_system_prompts_is_two_agents() -> None:
    assert key("a") != key("b")
    assert key("a", "writer:1") == key("a", "writer:2")


def test_wire_forms_of_one_message_are_equal_whatever_was_left_out() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    spaced = {"id": "1", "function": {"name": "f", "arguments": '{ "a":1 }'}}
    left = {"role": "assistant", "content": None, "tool_calls": [call]}
    right = {"role": "assistant", "content": "", "tool_calls": [spaced], "name": "writer"}
    assert canonical(left) == canonical(right)
    assert canonical(left) != canonical({**left, "content": "x"})


def test_langchain_messages_take_the_form_that_the_chat_model_sends() -> None:
    wire = wire_form(
        [
            HumanMessage("q"),
            AIMessage("", tool_calls=[{"name": "f", "args": {"a": 1}, "id": "1"}]),
            ToolMessage("r", tool_call_id="1", name="f"),
        ]
    )
    assert wire is not None
    assert [m["role"] for m in wire] == ["user", "assistant", "tool"]
    assert wire[1]["content"] is None
    assert "name" not in wire[2]


def test_an_unknown_agent_gives_no_prediction() -> None:
    assert PromptBook(max_entries=8).predict("writer", T1, None) is None


def test_the_last_prompt_of_the_thread_comes_back() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), None)
    found = book.predict("writer", T1, None)
    assert found is not None
    assert (found.source, found.prompt.messages) == (Source.THREAD, (SYSTEM, HI))


def test_another_thread_gets_the_head_only() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), None)
    found = book.predict("writer", T2, None)
    assert found is not None
    assert (found.source, found.prompt.messages) == (Source.HEAD, (SYSTEM,))


def test_a_prompt_that_follows_the_state_is_predicted_from_the_state() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), (HI,))
    found = book.predict("writer", T2, (HI, YES))
    assert found is not None
    assert (found.source, found.prompt.messages) == (Source.STATE, (SYSTEM, HI, YES))


def test_a_shape_that_was_wrong_is_forgotten() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), (HI,))
    book.observe(key(), T1, prompt(SYSTEM, YES), (HI,))
    found = book.predict("writer", T2, (HI, YES))
    assert found is not None
    assert found.source is Source.HEAD


def test_an_agent_that_rewrites_its_history_is_not_taken_at_its_last_word() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), None)
    book.observe(key(), T1, prompt(SYSTEM, YES), None)
    found = book.predict("writer", T1, None)
    assert found is not None
    assert found.prompt.messages == (SYSTEM,)


def test_the_book_learns_new_agents_at_its_bound() -> None:
    book = PromptBook(max_entries=16)
    for number in range(100):
        book.observe(key(f"agent {number}", f"node{number}:1"), T1, prompt(SYSTEM, HI), None)
    assert book.predict("node99", T1, None) is not None
    assert book.predict("node0", T1, None) is None


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_the_common_prefix_is_the_longest_one(left: list[int], right: list[int]) -> None:
    shared = common_prefix_tokens(left, right)
    assert left[:shared] == right[:shared]
    assert shared == min(len(left), len(right)) or left[shared] != right[shared]


@given(st.integers(0, 10_000), st.sampled_from([16, 32, 64]))
def test_the_cut_is_at_the_last_whole_block(tokens: int, block: int) -> None:
    edge = cut_at_block_edge(tokens, block)
    assert edge % block == 0
    assert edge <= tokens < edge + block
