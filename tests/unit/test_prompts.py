"""Prompt shapes, predictions, identities."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from pancake_langgraph._types import Prompt, ThreadId
from pancake_langgraph.prompts import (
    Prediction,
    PromptBook,
    Source,
    Unknown,
    agent_key,
    begins_with,
    cut_at_block_edge,
    strip_task_ids,
)
from pancake_langgraph.prompts.align import separator_in, shapes_of
from pancake_langgraph.prompts.book import MAX_AGENTS_PER_NODE, NEVER_CALLED
from pancake_langgraph.prompts.declared import DeclaredPrompt
from pancake_langgraph.prompts.fields import MAX_FIELDS, NO_FORM, WireMemo, fields_of, texts_in
from pancake_langgraph.prompts.identity import canonical, parent_namespace
from pancake_langgraph.prompts.learner import MAX_READINGS, ShapeLearner
from pancake_langgraph.prompts.parts import Keep, Known, Slice, render
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


def test_arguments_nested_too_deeply_to_be_read_are_compared_as_text() -> None:
    def message(depth: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": "[" * depth}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}

    assert canonical(message(100_000)) == canonical(message(100_000))
    assert canonical(message(100_000)) != canonical(message(100_001))


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


def exact(*messages: Any, **fields: Any) -> Known:
    return Known({"messages": list(messages), **fields})


def told(book: PromptBook, thread: ThreadId = T2, known: Known | None = None, **more: Any) -> Prediction:
    found = book.predict("writer", thread, known, **more)
    assert isinstance(found, Prediction), found
    return found


def teach(book: PromptBook, thread: str, messages: list[dict[str, Any]], known: Known | None, text: str = "") -> None:
    book.observe(key(text or str(SYSTEM["content"])), ThreadId(thread), prompt(*messages), known)


HUMAN, AI = HumanMessage("hi"), AIMessage("yes")


def test_an_unknown_agent_gives_no_prediction_and_the_reason() -> None:
    found = PromptBook(max_entries=8).predict("writer", T1, None)
    assert isinstance(found, Unknown)
    assert not found.seen
    assert "no call was seen" in found.reason


def test_the_last_prompt_of_the_thread_comes_back() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), None)
    found = told(book, T1)
    assert (found.source, found.prompt.messages) == (Source.THREAD, (SYSTEM, HI))


def test_another_thread_gets_the_head_only() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), None)
    found = told(book)
    assert (found.source, found.prompt.messages) == (Source.HEAD, (SYSTEM,))
    assert found.stop


def test_a_prompt_that_follows_the_state_is_predicted_from_the_state() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), exact(HUMAN))
    found = told(book, T2, exact(HUMAN, AI))
    assert (found.source, found.prompt.messages) == (Source.STATE, (SYSTEM, HI, YES))
    assert found.stop == ""


def test_messages_that_may_still_come_end_the_prediction_behind_those_that_are_there() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), exact(HUMAN))
    found = told(book, T2, Known({"messages": [HUMAN]}, growing=frozenset({"messages"})))
    assert (found.prompt.messages, found.stop) == ((SYSTEM, HI), "messages may still grow")


def test_a_field_that_may_still_change_ends_the_prediction_inside_its_message() -> None:
    book = PromptBook(max_entries=8)
    for thread, plan in (("1", "walk slowly"), ("3", "run quickly")):
        teach(book, thread, [SYSTEM, {"role": "user", "content": f"The plan: {plan}. Go!"}], Known({"plan": plan}))
    whole = told(book, T2, Known({"plan": "sit down now"}))
    assert whole.prompt.messages[-1]["content"] == "The plan: sit down now. Go!"
    part = told(book, T2, Known({"plan": "sit down now"}, unsure=frozenset({"plan"})))
    assert part.prompt.messages[-1]["content"] == "The plan: "
    assert part.is_cut
    assert begins_with(whole.prompt, part.prompt, is_cut=True)


def test_a_wrong_shape_is_forgotten_and_another_one_learned() -> None:
    book = PromptBook(max_entries=8)
    teach(book, "1", [SYSTEM, HI, YES], exact(HUMAN, AI))
    teach(book, "3", [SYSTEM, YES], exact(HUMAN, AI))  # from now on only the last message
    assert told(book, T2, exact(HUMAN, AI)).prompt.messages == (SYSTEM,)
    teach(book, "4", [SYSTEM, HI], exact(HUMAN, AI, HUMAN))
    assert told(book, T2, exact(AI, HUMAN, AI)).prompt.messages == (SYSTEM, YES)


def test_a_reading_that_was_not_looked_at_for_a_while_has_to_earn_trust_anew() -> None:
    learner, memo = ShapeLearner(literal_head=1), WireMemo()

    def call(number: int, messages: list[BaseMessage], *read: BaseMessage) -> None:
        wired = memo.wire(read)
        learner.observe((SYSTEM, *wired), exact(messages=messages), f"thread {number}", memo)

    for number in range(5):  # all that there is, and the last that there is, are the same
        one = HumanMessage(f"only {number}")
        call(number, [one], one)
    for number in range(5, 8):
        many: list[BaseMessage] = [HumanMessage(f"{number}, {n}") for n in range(5)]
        call(number, many, *many)
    odd: list[BaseMessage] = [HumanMessage(f"odd {n}") for n in range(3)]
    call(8, odd, odd[-1])
    best = learner.best()
    rendered = render(best.shape.parts, exact(messages=odd), memo).messages if best is not None else ()
    assert rendered in ((), (SYSTEM,))


def test_what_is_the_same_in_one_thread_only_is_not_taken_for_the_agents_own() -> None:
    book = PromptBook(max_entries=8)
    for _ in range(4):
        teach(book, "1", [SYSTEM, HI, YES], Known({"other": 1}))
    assert told(book, T2).prompt.messages == (SYSTEM,)
    teach(book, "3", [SYSTEM, HI, YES], Known({"other": 1}))
    assert told(book, T2).prompt.messages == (SYSTEM, HI, YES)


def test_an_agent_that_rewrites_its_history_is_not_taken_at_its_last_word() -> None:
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), None)
    book.observe(key(), T1, prompt(SYSTEM, YES), None)
    assert told(book, T1).prompt.messages == (SYSTEM,)
    for count in (2, 3):
        book.observe(key(), T1, prompt(SYSTEM, *[YES] * count), None)
    assert told(book, T1).prompt.messages == (SYSTEM, YES, YES, YES)  # right twice in a row: believed again


def test_prompts_made_anew_in_each_call_are_known_up_to_what_they_share() -> None:
    book = PromptBook(max_entries=64)
    for number in range(6):
        text = f"You are the writer of {number * 7919:05d}"
        teach(book, str(number), [{"role": "system", "content": text}, HI], exact(HUMAN), text)
    found = told(book)
    assert (found.source, found.is_cut) == (Source.NODE, True)
    assert found.prompt.messages[-1]["content"].startswith("You are the writer of ")


def test_a_template_that_renders_earlier_messages_differently_shortens_predictions_for_a_while() -> None:
    book = PromptBook(max_entries=8)
    lengths = []
    for number in range(12):
        teach(book, str(number), [SYSTEM, HI], exact(HUMAN))
        found = told(book, T2, exact(HUMAN))
        lengths.append(len(found.prompt.messages))
        if lengths[-1] == 2:
            book.note_tokens("writer", right=False)
    assert lengths == [2, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1]


def test_an_agent_that_comes_back_is_expected_to_read_less_after_each_mistake() -> None:
    book = PromptBook(max_entries=8)
    teach(book, "1", [SYSTEM, HI], None)
    read = prompt(SYSTEM, HI)
    seen = [book.resumed(key(), read, YES)[1].messages]
    for _ in range(2):
        book.note_tokens("writer", right=False)
        seen.append(book.resumed(key(), read, YES)[1].messages)
    assert seen == [(SYSTEM, HI, YES), (SYSTEM, HI), (SYSTEM,)]
    for _ in range(4):
        teach(book, "1", [SYSTEM, HI], None)
    assert book.resumed(key(), read, YES)[1].messages == (SYSTEM, HI, YES)
    book.note_resume(key(), key(), right=False)
    assert book.resumed(key(), read, YES)[1].messages == (SYSTEM,)


def test_reasoning_is_predicted_where_it_is_sent_back_and_only_there() -> None:
    thought = AIMessage("yes", additional_kwargs={"reasoning_content": "hm"})
    sent = {**YES, "reasoning_content": "hm", "reasoning": "hm"}
    for last, expected in (({**YES}, YES), (sent, sent)):
        book = PromptBook(max_entries=8)
        teach(book, "1", [SYSTEM, HI, last], exact(HUMAN, thought))
        assert told(book, T2, exact(HUMAN, thought)).prompt.messages == (SYSTEM, HI, expected)


def test_pictures_and_messages_without_wire_form_end_a_prediction() -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    book = PromptBook(max_entries=8)
    book.observe(key(), T1, prompt(SYSTEM, HI), exact(HUMAN))
    found = told(book, T2, exact(HUMAN, HumanMessage(picture), HUMAN))
    assert (found.prompt.messages, found.stop) == ((SYSTEM, HI), "a message with other parts than text")
    found = told(book, T2, exact(HUMAN, HumanMessage([{"type": "what"}]), HUMAN))
    assert found.prompt.messages[:2] == (SYSTEM, HI)


def test_a_declared_prompt_wins_until_it_is_wrong_and_again_when_it_is_right() -> None:
    declared = DeclaredPrompt("writer", Source.DECLARED, prompt=lambda s: [("system", "Declared"), *s["messages"]])
    book = PromptBook(max_entries=8)
    book.declare("g", [declared])
    head = {"role": "system", "content": "Declared"}

    def call(text: str) -> None:
        messages = [{"role": "system", "content": text}, HI]
        book.observe(key(text), T1, prompt(*messages), exact(HUMAN), graph_id="g")

    call("Declared")
    found = told(book, T2, exact(AI), graph_id="g")
    assert (found.source, found.prompt.messages) == (Source.DECLARED, (head, YES))
    sources = []
    for text in ("Another", "Declared", "Declared"):
        call(text)
        sources.append(getattr(book.predict("writer", T2, exact(AI), graph_id="g"), "source", None))
    assert [source is Source.DECLARED for source in sources] == [False, False, True]


def test_a_declared_prompt_is_rendered_as_far_as_the_state_is_certain() -> None:
    memo = WireMemo()
    follows = DeclaredPrompt("writer", Source.DECLARED, prompt=lambda s: [("system", "A"), *s["messages"]])
    growing = Known({"messages": [HUMAN]}, growing=frozenset({"messages"}))
    rendering = follows.render(growing, memo)
    assert [m["content"] for m in rendering.messages] == ["A", "hi"]
    assert rendering.stop == "messages may still grow"
    wants = DeclaredPrompt("writer", Source.DECLARED, prompt=lambda s: f"Plan {s['plan']}")
    assert wants.render(Known({}, all_unsure=True), memo).stop == "plan is not certain yet"
    assert wants.render(Known({"plan": "x"}), memo).messages == ({"role": "system", "content": "Plan x"},)


def test_a_declared_prompt_that_raises_is_told_once_and_renders_nothing(caplog: pytest.LogCaptureFixture) -> None:
    broken = DeclaredPrompt("writer", Source.DECLARED, prompt=lambda s: 1 / 0)
    for _ in range(3):
        assert broken.render(Known({}), WireMemo()).stop == "the declared prompt raised ZeroDivisionError"
    assert [record.message for record in caplog.records] == [
        "the prompt declared for writer raised ZeroDivisionError; it is not used then"
    ]


def test_the_book_learns_new_agents_at_its_bound() -> None:
    book = PromptBook(max_entries=16)
    for number in range(100):
        book.observe(key(f"agent {number}", f"node{number}:1"), T1, prompt(SYSTEM, HI), None)
    assert isinstance(book.predict("node99", T1, None), Prediction)
    assert isinstance(book.predict("node0", T1, None), Unknown)
    for table in (book._agents, book._last, book._nodes):
        assert len(table) == 16


def test_everything_learned_of_one_node_is_bounded() -> None:
    book = PromptBook(max_entries=16)
    for number in range(200):
        text = f"{number} random {number * 7919}"
        messages = [{"role": "system", "content": text}, {"role": "user", "content": f"plan{number} of {number}"}]
        teach(book, str(number), messages, Known({f"f{number}": f"plan{number}", "messages": [HUMAN]}), text)
    node = book._nodes["writer"]
    assert len(node.agents) <= MAX_AGENTS_PER_NODE
    assert len(node.openers) <= MAX_AGENTS_PER_NODE
    assert len(node.learner) <= MAX_READINGS


def test_wire_forms_are_remembered_while_a_message_stays_as_it_is() -> None:
    memo = WireMemo()
    message = HumanMessage("one")
    first = memo.wire([message])
    assert memo.wire([message])[0] is first[0]
    message.content = "two"
    assert memo.wire([message])[0]["content"] == "two"
    memo.wire([HumanMessage(str(number)) for number in range(3000)])
    for _ in range(4):
        memo.wire([HumanMessage(str(number)) for number in range(3000)])
    assert len(memo) <= 8192


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage("one", id="1"),
        SystemMessage("be brief"),
        ToolMessage("found", tool_call_id="c1", name="look_up", status="error", artifact=[1], id="2"),
        ToolMessage("found", tool_call_id="c1", additional_kwargs={"more": 1}),
        ToolMessage([{"type": "text", "text": "found"}], tool_call_id="c1"),
        AIMessage("found it", id="3"),
        AIMessage("", tool_calls=[{"name": "look_up", "args": {"query": "Flüsse", "at": [1, None]}, "id": "c1"}]),
        AIMessage(
            "let me see", tool_calls=[{"name": name, "args": {}, "id": None, "type": "tool_call"} for name in "ab"]
        ),
        AIMessage("", tool_calls=[{"name": "look_up", "args": {"query": object()}, "id": "c1"}]),
        AIMessage("", invalid_tool_calls=[{"name": "look_up", "args": "{", "id": "c1", "error": "cut"}]),
        AIMessage("", name="scout", tool_calls=[{"name": "look_up", "args": {}, "id": "c1"}]),
    ],
)
def test_the_short_way_to_a_wire_form_leads_to_the_same_one(message: BaseMessage) -> None:
    assert WireMemo().wire([message]) == (wire_form([message]) or (NO_FORM,))


def test_an_agent_that_called_before_is_known_without_hashing_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    book = PromptBook(max_entries=16)
    tools = ({"type": "function", "function": {"name": "look"}},)
    prompts = [Prompt((SYSTEM, HI), tools), Prompt((SYSTEM, HI)), Prompt(({**SYSTEM, "content": "Other."}, HI), tools)]
    keys = [book.agent_of("writer:1", name, each) for each in prompts for name in (None, "ann")]
    assert keys == [agent_key("writer:1", name, each) for each in prompts for name in (None, "ann")]
    for agent, (each, _) in zip(keys, itertools.product(prompts, (None, "ann")), strict=True):
        book.observe(agent, T1, each, None)
    monkeypatch.setattr("pancake_langgraph.prompts.book.agent_key", lambda *_: None)
    longer = [Prompt((*each.messages, dict(YES)), each.tools) for each in prompts]
    assert [book.agent_of("writer:2", name, each) for each in longer for name in (None, "ann")] == keys
    assert book.agent_of("writer:1", "bob", prompts[0]) is None
    assert book.agent_of("critic:1", None, prompts[0]) is None


def test_a_huge_state_is_not_looked_into() -> None:
    class Untouchable(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("read")

    state = {f"f{n}": Untouchable([1]) for n in range(1000)}
    fields = fields_of(state)
    assert fields is not None
    assert len(fields) == MAX_FIELDS
    assert fields["f0"] is state["f0"]
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep, *range(100)]
    huge = {"deep": deep, "long": "x" * 10_000_000, "wide": list(range(10**6))}
    assert [text for _, text in texts_in(huge)] == ["101", "1000000"]  # how many items they have


@pytest.mark.parametrize(
    ("content", "items", "separator"),
    [
        ("see - one\n- two\n- three.", ["one", "two", "three"], "\n- "),
        ("1. one\n2. two\n3. three", ["one", "two", "three"], "\n{n}. "),
        ("one, two", ["one", "two"], ", "),
        ("only this", ["this"], "\n"),
        ("one or three", ["one", "two"], ""),
        ("rule10 rule11", ["1", "1"], ""),
    ],
)
def test_what_stands_between_the_items_of_a_list_is_found(content: str, items: list[str], separator: str) -> None:
    assert separator_in(content, items) == separator


@pytest.mark.parametrize(
    ("build", "taken"),
    [
        (lambda m: m[-2:], Keep(last=2)),
        (lambda m: m[:-1], Keep(but_last=True)),
        (lambda m: [x for x in m if x["role"] == "user"], Keep(frozenset({"system", "assistant", "tool", "call"}))),
    ],
)
def test_slices_of_the_messages_are_recognized(build: Any, taken: Keep) -> None:
    state = [HumanMessage("a"), AIMessage("b"), HumanMessage("c"), AIMessage("d"), HumanMessage("e")]
    memo = WireMemo()
    wire = memo.wire(state)
    shapes = shapes_of([SYSTEM, *build(list(wire))], {"messages": state}, memo, literal_head=1)
    assert [part.keep for part in shapes[0].parts if isinstance(part, Slice)] == [taken]


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


def test_messages_of_an_ended_run_are_let_go_and_their_forms_stay_right() -> None:
    memo = WireMemo()
    mine, theirs = [HumanMessage("a"), HumanMessage("b")], [HumanMessage("c")]
    before = memo.wire([*mine, *theirs])
    memo.forget([*mine, HumanMessage("never seen"), "no message"])
    assert len(memo) == 1
    assert memo.wire([*mine, *theirs]) == before
    assert len(memo) == 3


def test_a_node_that_never_called_is_told_apart_from_one_that_may_call() -> None:
    book = PromptBook(max_entries=8)
    assert book.predict("writer", T1, exact(HUMAN)) is NEVER_CALLED
    assert not book.may_call("writer")
    book.observe(key(), T1, prompt(SYSTEM, HI), exact(HUMAN))
    assert book.may_call("writer")
    assert not book.may_call("other", graph_id="g")
    book.declare("g", [DeclaredPrompt("other", Source.DECLARED, prompt=lambda s: "Be brief.")])
    assert book.may_call("other", graph_id="g")
    assert not book.may_call("other", graph_id="h")
