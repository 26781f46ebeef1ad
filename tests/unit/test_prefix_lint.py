"""Where a prompt stops being an extension of the one before, who put the break there, what it cost."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph._types import Prompt
from pancake_langgraph.prompts.lint import lint_prefix
from pancake_langgraph.prompts.lint_kinds import BreakKind, PrefixBreak

K = BreakKind
RULES = "You keep the accounts of a small bakery, and you answer in one short sentence. "


def sys(text: str = RULES) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ai(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(call_id: str, city: str = "Paris") -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    function = {"name": "weather", "arguments": arguments}
    return ai("", tool_calls=[{"id": call_id, "type": "function", "function": function}])


def result(call_id: str, text: str = "sunny") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def tool(name: str, description: str = "Does it.", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {"q": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TALK = [user("How many rolls?"), ai("Forty."), user("And loaves?"), ai("Twelve."), user("And cakes?")]
MORE = [*TALK, ai("Three."), user("Thanks. Anything else to note?")]


def lint(old: list[Any], new: list[Any], tools: Any = (), now_tools: Any = None, **how: Any) -> PrefixBreak | None:
    found = lint_prefix(Prompt.of(old, tools), Prompt.of(new, tools if now_tools is None else now_tools), **how)
    again = lint_prefix(
        Prompt.of(copy.deepcopy(old), copy.deepcopy(tools)),
        Prompt.of(copy.deepcopy(new), copy.deepcopy(tools if now_tools is None else now_tools)),
        **how,
    )
    assert found == again, "the same for equal prompts, whatever objects they are"
    return found


def changed_system(old: str, new: str) -> PrefixBreak:
    found = lint([sys(RULES + old), *TALK], [sys(RULES + new), *MORE])
    assert found is not None
    assert (found.place.where, found.place.index, found.place.role) == ("message", 0, "system")
    assert found.place.field == "content"
    return found


# -- no break -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([sys(), *TALK], [sys(), *MORE]),
        ([sys(), *TALK], [sys(), *TALK]),
        ([sys(), *MORE], [sys(), *TALK]),
        ([], [sys(), *TALK]),
        ([sys(), user("x"), call("a")], [sys(), user("x"), {**call("a"), "content": None}, result("a")]),
    ],
    ids=["longer", "the same", "a step back", "the first", "another form of one message"],
)
def test_no_break_is_found(old: list[Any], new: list[Any]) -> None:
    assert lint(old, new, [tool("a")]) is None


# -- clocks, ids, counters ----------------------------------------------------------------------------------------

CLOCKS = {
    "date and time": ("Now: 2026-07-29T10:15:02Z.", "Now: 2026-07-29T10:16:40Z."),
    "date": ("Today is 2026-07-29.", "Today is 2026-07-30."),
    "date by points": ("Today is 29.07.2026.", "Today is 30.07.2026."),
    "date in words": ("Today is July 29, 2026.", "Today is July 30, 2026."),
    "another month": ("Today is 31 July 2026.", "Today is 1 August 2026."),
    "weekday": ("It is Wednesday.", "It is Thursday."),
    "time of day": ("It is 9:59 in Paris.", "It is 10:00 in Paris."),
    "time with halves": ("It is 11:59 AM.", "It is 12:01 PM."),
    "epoch time": ("ts=1785312000", "ts=1785312071"),
    "epoch milliseconds": ("ts=1785312000123", "ts=1785312071999"),
    "compact date": ("run 20260729T101502", "run 20260730T080000"),
    "time span": ("Last seen 5 minutes ago.", "Last seen 12 minutes ago."),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_a_clock_in_the_system_prompt(name: str) -> None:
    old, new = CLOCKS[name]
    found = changed_system(old + " Be kind.", new + " Be kind.")
    assert found.kind is K.CLOCK
    char = len(RULES) + next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    assert found.place.char == char


IDS = {
    "uuid": ("session 6f1c2e9a-3b44-4c0e-9a51-0d5b7e1f2a3c", "session 0e9b7c55-1a2b-4d3c-8e4f-5a6b7c8d9e0f"),
    "hexadecimal id": ("trace 9f86d081884c7d65", "trace 2c26b46b68ffc68f"),
    "ulid": ("run 01J3Z8QK7V5N2M4P6R8T0W1X3Y", "run 01J3Z8QM2C9D4F6G8H1J3K5M7N"),
    "nanoid": ("req V1StGXR8_Z5jdHi6B-myT", "req k2LmN9pQ4rS7tUv1WxY0z"),
    "prefixed": ("run_a8Kd93hT2xPq", "run_Zq71mBv04RtY"),
}


@pytest.mark.parametrize("name", IDS)
def test_an_id_made_anew(name: str) -> None:
    old, new = IDS[name]
    assert changed_system(old + ". Be kind.", new + ". Be kind.").kind is K.RANDOM_ID


def test_a_counter() -> None:
    found = changed_system("This is step 3 of the plan.", "This is step 4 of the plan.")
    assert (found.kind, found.detail) == (K.COUNTER, "number")


@pytest.mark.parametrize(
    ("old", "new"),
    [("Answer in French.", "Answer in German."), ("Use model-alpha-one.", "Use model-gamma-two."), ("Ask.", "Tell.")],
)
def test_words_are_no_clock_and_no_id(old: str, new: str) -> None:
    assert changed_system(old, new).kind is K.SYSTEM


def test_an_equal_date_beside_the_break_is_not_blamed() -> None:
    assert changed_system("On 2026-07-29. Ask.", "On 2026-07-29, ask.").kind is K.SYSTEM


def test_a_clock_in_a_past_user_message() -> None:
    old = [sys(), user("(09:15) How many rolls?"), ai("Forty."), user("Why?")]
    new = [sys(), user("(09:16) How many rolls?"), ai("Forty."), user("Why?"), ai("Sunday."), user("Ah.")]
    found = lint(old, new)
    assert found is not None
    assert (found.kind, found.place.index, found.place.role, found.place.char) == (K.CLOCK, 1, "user", 5)


def test_tool_call_ids_made_anew() -> None:
    old = [sys(), user("x"), call("call_1a2b"), result("call_1a2b"), user("y")]
    new = [sys(), user("x"), call("call_9z8y"), result("call_9z8y"), user("y"), ai("z")]
    found = lint(old, new)
    assert found is not None
    assert (found.kind, found.detail, found.place.field) == (K.RANDOM_ID, "tool call id", "tool_calls[0].id")


# -- tools --------------------------------------------------------------------------------------------------------


def tools_broken(old: list[Any], new: list[Any]) -> PrefixBreak:
    found = lint([sys(), *TALK], [sys(), *MORE], old, new)
    assert found is not None
    assert found.place.where == "tool"
    return found


def test_tools_in_another_order() -> None:
    found = tools_broken([tool("a"), tool("b"), tool("c")], [tool("a"), tool("c"), tool("b")])
    assert (found.kind, found.place.index, found.place.role) == (K.TOOL_ORDER, 1, "c")


def test_keys_of_a_schema_in_another_order() -> None:
    one = tool("a", x={"type": "string"}, y={"type": "number"})
    two = tool("a", y={"type": "number"}, x={"type": "string"})
    found = tools_broken([one], [two])
    assert (found.kind, found.place.field) == (K.TOOL_ORDER, "function.parameters.properties")
    assert found.detail == "other order of keys"


def test_a_field_of_a_schema_changes() -> None:
    old, new = tool("a", x={"type": "string", "enum": ["p", "q"]}), tool("a", x={"type": "string", "enum": ["p", "r"]})
    found = tools_broken([tool("z"), old], [tool("z"), new])
    assert (found.kind, found.place.index, found.place.role) == (K.TOOL_SCHEMA, 1, "a")
    assert found.place.field == "function.parameters.properties.x.enum[1]"


def test_a_clock_in_a_tool_description() -> None:
    found = tools_broken([tool("a", "Orders until 2026-07-29.")], [tool("a", "Orders until 2026-07-30.")])
    assert (found.kind, found.place.field, found.place.char) == (K.CLOCK, "function.description", 21)


@pytest.mark.parametrize(
    ("old", "new", "detail"),
    [
        (["a", "b"], ["a"], "without b"),
        (["a"], ["a", "b"], "with new b"),
        ([], ["a"], "with new a"),
        (["a", "b"], ["a", "c"], "without b; with new c"),
    ],
)
def test_tools_come_and_go(old: list[str], new: list[str], detail: str) -> None:
    found = tools_broken([tool(n) for n in old], [tool(n) for n in new])
    assert (found.kind, found.detail) == (K.TOOL_SET, detail)


def test_the_system_prompt_stands_before_the_tools_and_they_before_the_history() -> None:
    turned = [tool("b"), tool("a")]
    head = lint([sys("A" + RULES), *TALK], [sys("B" + RULES), *TALK], turned[::-1], turned)
    history = lint([sys(), *TALK], [sys(), user("Other"), *TALK], turned[::-1], turned)
    assert head is not None
    assert history is not None
    assert (head.kind, history.kind) == (K.SYSTEM, K.TOOL_ORDER)


# -- the history --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "old", "new", "index"),
    [
        (K.TRIMMED, [sys(), *MORE], [sys(), *MORE[2:], ai("No."), user("Bye")], 1),
        (K.TRIMMED, [sys(), *MORE], [sys(), MORE[0], *MORE[3:], ai("No.")], 2),
        (K.TRIMMED, MORE, MORE[4:], 0),
        (K.REMOVED, [sys(), *MORE], [sys(), *MORE[:4], *MORE[6:], ai("No.")], 5),
        (K.SUMMARIZED, [sys(), *MORE], [sys(), user("Summary: all is counted."), *MORE[4:], ai("No.")], 1),
        (K.SUMMARIZED, [sys(), *MORE], [sys(RULES + "Summary: counted."), *MORE[4:], ai("No.")], 0),
        (K.SUMMARIZED, [sys(), *MORE], [sys(), user("Summary of what was said"), user("new")], 1),
        (K.INSERTED, [sys(), *TALK], [sys(), sys("Found: prices of flour."), *MORE], 1),
        (K.INSERTED, [sys(), *TALK], [sys(), user("Memory: likes rye."), ai("Noted."), *MORE], 1),
        (K.EDITED, [sys(), *TALK], [sys(), user("How many buns?"), *MORE[1:]], 1),
        (K.EDITED, [sys(), user("x"), call("a"), result("a", "long text"), user("y")],
         [sys(), user("x"), call("a"), result("a", "[cleared]"), user("y"), ai("z")], 3),
        (K.EDITED, [sys(), user("Why?\n\nContext: flour is dear")], [sys(), user("Why?"), ai("So."), user("Ah")], 1),
        (K.REMOVED, [sys(), *TALK, sys("Reminder: be brief")], [sys(), *MORE, sys("Reminder: be brief")], 6),
        (K.SYSTEM, [sys(), *TALK], [sys("Something else altogether, of another agent."), *MORE], 0),
        (K.SYSTEM, [sys(RULES + "Docs: flour"), *TALK], [sys(RULES + "Docs: sugar and salt"), *MORE], 0),
        (K.OTHER, [sys(), user("x")], [sys(), ai("y"), result("q")], 1),
        (K.OTHER, [sys(), *TALK], [sys(), ai("Hm"), user("So"), user("Go"), *MORE[1:]], 1),
    ],
    ids=lambda value: value.value if isinstance(value, K) else "",
)  # fmt: skip
def test_what_was_done_to_the_history(kind: K, old: list[Any], new: list[Any], index: int) -> None:
    found = lint(old, new)
    assert found is not None
    assert (found.kind, found.place.index) == (kind, index)
    assert found.is_estimate
    assert found.mend.endswith(".")


def test_trimming_is_not_taken_for_a_counter_where_the_turns_look_alike() -> None:
    turns = [user(f"Task number {n}: {RULES}") for n in range(7)]
    found = lint([sys(), *turns[:6]], [sys(), *turns[2:]])
    assert found is not None
    assert (found.kind, found.detail) == (K.TRIMMED, "2 messages gone")


def test_a_clock_in_the_system_prompt_comes_before_a_trimmed_history() -> None:
    found = lint([sys(RULES + "It is 10:15. Go."), *MORE], [sys(RULES + "It is 10:16. Go."), *MORE[2:]])
    assert found is not None
    assert found.kind is K.CLOCK


# -- thinking and templates ---------------------------------------------------------------------------------------

THOUGHT = {"reasoning_content": "Count the trays: five of eight.", "reasoning": "Count the trays: five of eight."}


def test_reasoning_is_sent_no_more() -> None:
    old = [sys(), user("How many?"), ai("Forty.", **THOUGHT), user("Sure?")]
    new = [sys(), user("How many?"), ai("Forty."), user("Sure?"), ai("Yes."), user("Good")]
    found = lint(old, new)
    assert found is not None
    assert (found.kind, found.place.index, found.place.field) == (K.REASONING, 2, "reasoning_content")


def test_thinking_is_cut_out_of_the_content_of_all_turns() -> None:
    old = [sys(), user("a"), ai("<think>hm</think>\n\nA."), user("b"), ai("<think>so</think>\n\nB."), user("c")]
    new = [sys(), user("a"), ai("A."), user("b"), ai("B."), user("c"), ai("<think>x</think>C."), user("d")]
    found = lint(old, new)
    assert found is not None
    assert (found.kind, found.place.index) == (K.REASONING, 2)


def render(prompt: Prompt) -> tuple[int, ...]:
    """Write as Qwen3's template does: thinking only behind the last real question."""
    asked = max(i for i, m in enumerate(prompt.messages) if m["role"] == "user")
    text = ""
    for index, message in enumerate(prompt.messages):
        thinking = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if message.get("reasoning_content") else ""
        calls = json.dumps(message["tool_calls"][0]["function"]) if message.get("tool_calls") else ""
        text += (
            f"<|im_start|>{message['role']}\n{thinking if index > asked else ''}{message['content']}{calls}<|im_end|>\n"
        )
    return tuple(map(ord, text + "<|im_start|>assistant\n"))


def by_ids(old: list[Any], new: list[Any]) -> PrefixBreak | None:
    ids = render(Prompt.of(old)), render(Prompt.of(new))
    return lint_prefix(Prompt.of(old), Prompt.of(new), token_ids=ids)


def test_a_template_drops_thinking_once_a_new_question_stands_behind_it() -> None:
    loop = [sys(), user("Weather?"), {**call("a"), **THOUGHT}, result("a")]
    inside = [*loop, {**call("b", "Rome"), **THOUGHT}, result("b")]
    assert by_ids(loop, inside) is None, "inside the tool loop thinking stays"
    found = by_ids(inside, [*inside, ai("Both sunny."), user("And tomorrow?")])
    assert found is not None
    assert (found.kind, found.place.index, found.place.field) == (K.TEMPLATE, 2, "reasoning_content")
    assert not found.is_estimate
    old, new = render(Prompt.of(inside)), render(Prompt.of([*inside, ai("Both sunny."), user("And tomorrow?")]))
    common = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    assert found.lost_tokens == min(len(old), len(new)) - common


def test_a_date_that_the_template_writes_itself() -> None:
    prompts = Prompt.of([sys(), *TALK]), Prompt.of([sys(), *MORE])
    ids = (1, 2, 29, *range(100, 200)), (1, 2, 30, *range(100, 250))
    found = lint_prefix(*prompts, token_ids=ids)
    assert found is not None
    assert (found.kind, found.place.where, found.place.index, found.lost_tokens) == (K.TEMPLATE, "token", 2, 101)


def test_what_the_template_does_not_write_is_no_break() -> None:
    old, new = [sys(), call("a"), result("a"), user("b")], [sys(), call("z"), result("z"), user("b"), ai("c")]
    assert lint_prefix(Prompt.of(old), Prompt.of(new), token_ids=(range(200), range(300))) is None


def test_another_beginning_of_the_answer_is_no_break() -> None:
    ids = (*range(200), 7, 8, 9), (*range(200), 1, 2, 3, 4)
    assert lint_prefix(Prompt.of([sys(), *TALK]), Prompt.of([sys(), *MORE]), token_ids=ids) is None


# -- what it costs ------------------------------------------------------------------------------------------------


def test_the_loss_is_what_stood_behind_the_break_in_both() -> None:
    old, new = [sys("A" * 400), user("B" * 400)], [sys("A" * 200 + "x" * 200), user("B" * 400), user("C" * 4000)]
    estimated, counted = lint(old, new), lint(old, new, count_tokens=len)
    assert estimated is not None
    assert counted is not None
    assert counted.lost_tokens == 200 + len("\nuser\n") + 400
    assert estimated.lost_tokens == -(-counted.lost_tokens // 4)
    assert (estimated.is_estimate, counted.is_estimate) == (True, False)


def test_a_break_in_the_tools_costs_them_and_the_history_but_not_the_system_prompt() -> None:
    tools = [tool("a"), tool("b")]
    found = lint(
        [sys("S" * 1000), user("U" * 100)], [sys("S" * 1000), user("U" * 100)], tools, tools[::-1], count_tokens=len
    )
    assert found is not None
    assert found.lost_tokens == sum(len(json.dumps(t)) for t in tools) + len("\nuser\n") + 100


def test_a_trimmed_history_costs_what_is_read_anew() -> None:
    found = lint([sys(), *MORE], [sys(), MORE[-1]], count_tokens=len)
    assert found is not None
    assert found.lost_tokens == len("\nuser\n" + MORE[-1]["content"])


# -- whatever comes -----------------------------------------------------------------------------------------------

CONTENT = st.one_of(
    st.none(), st.text(max_size=12), st.lists(st.dictionaries(st.sampled_from(["type", "text"]), st.text(max_size=5)))
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", ""]), "content": CONTENT},
        optional={"tool_call_id": st.text(max_size=3), "reasoning": st.text(max_size=3), "name": st.integers()},
    ),
    max_size=6,
)
TOOLS = st.lists(st.sampled_from([tool("a"), tool("b"), tool("a", "Other."), {}, {"function": None}]), max_size=3)


@given(MESSAGES, MESSAGES, TOOLS, TOOLS)
def test_any_two_prompts_can_be_compared(old: Any, new: Any, tools: Any, others: Any) -> None:
    found = lint_prefix(Prompt.of(old, tools), Prompt.of(new, others))
    if old == new and tools == others:
        assert found is None
    if found is not None:
        assert found.lost_tokens >= 0
        assert str(found.place)
        json.dumps(found.to_json())
