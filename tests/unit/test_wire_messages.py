"""Repairs of message lists: deterministic, minimal, stable at the front."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.wire.messages import (
    INVALID,
    NOT_RUN,
    pair_tool_calls,
    short_id,
    short_tool_call_ids,
    strict_roles,
)


def msg(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "t", "arguments": arguments}}


def asks(*ids: str) -> dict[str, Any]:
    return msg("assistant", None, tool_calls=[call(i) for i in ids])


def result(call_id: str, content: str = "done") -> dict[str, Any]:
    return msg("tool", content, tool_call_id=call_id)


turns = st.one_of(
    st.builds(msg, st.sampled_from(["user", "assistant"]), st.text(max_size=5)),
    st.builds(asks, st.sampled_from("abc")),
    st.builds(result, st.sampled_from("abc")),
)
histories = st.lists(turns, max_size=12)
roles = st.lists(st.builds(msg, st.sampled_from(["system", "user", "assistant"]), st.text(max_size=5)), max_size=12)


def test_leading_system_messages_become_one() -> None:
    fitted = strict_roles([msg("system", "a"), msg("system", "b"), msg("user", "c")])
    assert fitted == [msg("system", "a\n\nb"), msg("user", "c")]


def test_a_later_system_message_joins_the_users_turn_where_it_stands() -> None:
    history = [msg("system", "a"), msg("user", "b"), msg("assistant", "c"), msg("system", "note"), msg("user", "d")]
    assert strict_roles(history) == [*history[:3], msg("user", "note\n\nd")]


def test_content_of_several_parts_is_joined_as_parts() -> None:
    part = {"type": "text", "text": "b"}
    assert strict_roles([msg("user", "a"), msg("user", [part])]) == [msg("user", [{"type": "text", "text": "a"}, part])]


def test_tool_results_stay_apart() -> None:
    history = [msg("user"), asks("a", "b"), result("a"), result("b")]
    assert strict_roles(history) == history


@given(roles)
def test_a_strict_template_accepts_what_comes_out(history: list[dict[str, Any]]) -> None:
    fitted = strict_roles(history)
    assert all(message["role"] != "system" for message in fitted[1:])
    assert all(a["role"] != b["role"] for a, b in itertools.pairwise(fitted))
    assert strict_roles(fitted) == fitted


@given(roles, roles)
def test_fitting_a_longer_history_keeps_what_was_answered(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    answered = [*before, msg("user", "q"), msg("assistant", "r")]
    fitted = strict_roles(answered)
    assert strict_roles([*answered, msg("user", "next"), *after])[: len(fitted)] == fitted


def test_an_open_call_gets_a_result_that_says_so() -> None:
    repaired = pair_tool_calls([msg("user"), asks("a", "b"), result("b"), msg("user")])
    assert repaired == [msg("user"), asks("a", "b"), result("a", NOT_RUN), result("b"), msg("user")]


def test_an_orphan_result_is_dropped() -> None:
    assert pair_tool_calls([result("a"), msg("user")]) == [msg("user")]


def test_a_second_result_of_one_call_is_dropped() -> None:
    history = [asks("a"), result("a", "one"), result("a", "two")]
    assert pair_tool_calls(history) == history[:2]


def test_ids_used_again_in_a_later_turn_are_kept_apart() -> None:
    history = [asks("a"), result("a", "one"), msg("user"), asks("a"), result("a", "two")]
    assert pair_tool_calls(history) == history


def test_a_result_moves_to_its_call() -> None:
    assert pair_tool_calls([asks("a"), asks("b"), result("a"), result("b")]) == [
        asks("a"),
        result("a"),
        asks("b"),
        result("b"),
    ]


def test_arguments_that_are_no_json_are_wrapped_so_that_the_thread_stays_usable() -> None:
    broken = msg("assistant", None, tool_calls=[call("a", '{"x": ')])
    repaired = pair_tool_calls([broken])
    assert repaired[0]["tool_calls"][0]["function"]["arguments"] == '{"unparsed": "{\\"x\\": "}'
    assert repaired[1]["content"] == INVALID


@given(histories)
def test_every_call_has_its_result_directly_behind_it(history: list[dict[str, Any]]) -> None:
    repaired = pair_tool_calls(history)
    waiting: list[str] = []
    for message in repaired:
        if message["role"] == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
        else:
            assert not waiting
            waiting = [c["id"] for c in message.get("tool_calls") or ()]
    assert not waiting
    assert pair_tool_calls(repaired) == repaired


@given(st.text(max_size=60))
def test_a_short_id_is_legal_and_stable(text: str) -> None:
    made = short_id(text)
    assert len(made) == 9
    assert made.isascii()
    assert made.isalnum()
    assert short_id(text) == made == short_id(made)


def test_long_ids_are_mapped_in_calls_and_results_alike() -> None:
    long = "chatcmpl-tool-" + "0" * 32
    mapped = short_tool_call_ids([asks(long), result(long), msg("user")])
    assert mapped[0]["tool_calls"][0]["id"] == mapped[1]["tool_call_id"] == short_id(long)
    assert len(long) == 46


def test_different_ids_stay_different() -> None:
    assert len({short_id(f"call_{k}") for k in range(5000)}) == 5000
