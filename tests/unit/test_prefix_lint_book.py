"""Breaks over many calls: which call came before, what is added up, what is kept and for how long."""

import copy
import json
import logging
import random
from typing import Any

import pytest

from pancake_langgraph._types import Prompt
from pancake_langgraph.prompts.lint_book import Observed, PrefixLint
from pancake_langgraph.prompts.lint_kinds import BreakKind

K = BreakKind
RULES = "You keep the accounts of a small bakery, and you answer in one short sentence. "
PROMPTS = [
    "Plan the week of a small bakery and say which flour has to be bought.",
    "Read what was said, find each mistake in it and list them all.",
    "Translate the last answer into plain French without a word of your own.",
    "Judge whether this may be sent to a customer; reply with yes or no.",
    "You write recipes. Use metric units, and never name a brand.",
    "Count how many loaves were mentioned above. Numbers only!",
    "As an auditor, compare these orders with yesterday's stock.",
    "Give three short titles for the conversation so far.",
]
OTHER = "Read what was said and find every mistake in it, however small, and list them."


def sys(text: str = RULES) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ai(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(name: str, text: str = "Does it.") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object"}}}


def turns(count: int, about: str = "") -> list[dict[str, Any]]:
    pairs = [(user(f"{about} question {n}"), ai(f"{about} answer {n}")) for n in range(count)]
    return [message for pair in pairs for message in pair]


class Calls:
    """Observes calls of one agent, each with objects of its own, as they come from the wire."""

    def __init__(self, **limits: Any) -> None:
        self.lint = PrefixLint(**limits)

    def __call__(self, *messages: Any, tools: Any = (), agent: str = "a", thread: str = "t", **how: Any) -> Observed:
        prompt = Prompt.of(copy.deepcopy(messages), copy.deepcopy(tools))
        return self.lint.observe(prompt, agent=agent, thread=thread, **how)

    def kinds(self, agent: str = "a") -> dict[BreakKind, int]:
        found = self.lint.report().agent(agent)
        assert found is not None
        return {kind.kind: kind.count for kind in found.kinds}


def suspected(calls: Calls) -> tuple[int, int]:
    """All breaks, and those that are only suspected."""
    report = calls.lint.report()
    assert report.suspected == len(calls.lint.suspected())
    return report.breaks, report.suspected


def test_a_growing_thread_has_no_break() -> None:
    calls = Calls()
    for count in range(20):
        assert calls(sys(), *turns(count), user(f" question {count}")).found is None
    assert calls.kinds() == {}
    assert calls.lint.sizes[0] == 1


def test_a_clock_breaks_every_call_and_is_added_up_with_its_worst_place() -> None:
    calls = Calls(count_tokens=len)
    for minute in range(10, 20):
        calls(sys(f"{RULES}It is 09:{minute}."), *turns(minute), tag=minute)
    report = calls.lint.report().agent("a")
    assert report is not None
    [clock] = report.kinds
    assert (report.calls, report.breaks, clock.kind, clock.count) == (10, 9, K.CLOCK, 9)
    assert clock.worst.place.char == len(RULES + "It is 09:1")
    assert clock.lost_tokens > clock.worst.lost_tokens > 0
    assert not clock.is_estimate
    assert calls(sys(f"{RULES}It is 09:20."), *turns(20)).tag == 19


def test_a_new_thread_is_compared_with_the_head_of_another() -> None:
    calls = Calls(count_tokens=len)
    tools = [tool("x"), tool("y")]
    calls(sys(), *turns(3, "rolls"), tools=tools, thread="one")
    assert calls(sys(), *turns(1, "cakes"), tools=tools, thread="two").found is None
    found = calls(sys(), *turns(1, "buns"), tools=tools[::-1], thread="three").found
    assert found is not None
    assert found.kind is K.TOOL_ORDER
    assert found.lost_tokens == sum(len(json.dumps(t)) for t in tools), "the history of another thread is no loss"


def test_threads_running_beside_each_other_do_not_mix() -> None:
    calls = Calls()
    for count in range(6):
        for thread in ("one", "two", "three"):
            calls(sys(), *turns(count, thread), user(f"{thread} question {count}"), thread=thread)
    assert calls.kinds() == {}


def test_workers_of_a_fan_out_do_not_break_each_other() -> None:
    calls = Calls()
    shared = user("All of them read these notes about flour and ovens.")
    for step in range(3):
        for worker in range(8):
            talk = turns(step, f"worker {worker}")
            calls(sys(), shared, user(f"Write chapter {worker}"), *talk)
    assert calls.kinds() == {}


def test_two_prompts_in_one_node_are_two_agents() -> None:
    calls = Calls()
    for count in range(1, 5):
        calls(sys(), *turns(count))
        calls(sys(OTHER), *turns(count))
    assert calls.kinds() == {}


def test_another_prompt_in_another_thread_is_another_agent() -> None:
    calls = Calls()
    for thread, rules in enumerate((RULES, OTHER, RULES, OTHER)):
        calls(sys(rules), *turns(2, f"topic {thread}"), thread=str(thread))
    assert calls.kinds() == {}


def test_a_system_prompt_that_became_another_is_a_break_once_nothing_comes_back() -> None:
    calls = Calls()
    calls(sys(), *turns(2))
    calls(sys(OTHER), *turns(3))
    assert suspected(calls) == (1, 1), "it may still be another agent"
    calls(sys(OTHER), *turns(4))
    assert suspected(calls) == (1, 0)


def test_a_prompt_made_anew_each_time_is_told_in_the_end() -> None:
    calls = Calls()
    words = random.Random(3)
    for count in range(1, 14):
        letters = "".join(words.choices("abcdefghijklmnop ", k=100))
        calls(sys(letters), *turns(count), tag=count)
    assert suspected(calls) == (12, 8)
    assert [late.call_tag for late in calls.lint.suspected()] == list(range(6, 14))


@pytest.mark.parametrize("count", [2, 8])
def test_a_few_calls_with_a_prompt_made_anew_are_enough(count: int) -> None:
    calls = Calls()
    for number in range(count):
        assert not calls(sys(PROMPTS[number]), *turns(number + 1)).late
    assert suspected(calls) == (count - 1, count - 1)
    assert suspected(calls) == (count - 1, count - 1), "a report books nothing"


def test_a_prompt_replaced_in_each_of_many_short_threads_is_booked_when_they_are_pushed_out() -> None:
    calls = Calls(max_lines=20)
    late = []
    for number in range(50):
        calls(sys(PROMPTS[0]), *turns(1), thread=str(number))
        late += calls(sys(PROMPTS[1]), *turns(2), thread=str(number), tag=number).late
    assert suspected(calls) == (50, 10)
    assert [each.call_tag for each in late] == list(range(40))
    assert {each.agent for each in late} == {"a"}


def test_what_is_pushed_out_of_an_agent_that_is_forgotten_is_not_counted() -> None:
    calls = Calls(max_agents=1, max_lines=2)
    calls(sys(PROMPTS[0]), *turns(1))
    calls(sys(PROMPTS[1]), *turns(2))
    assert not calls(sys(), agent="b").late
    assert calls.lint.suspected() == ()
    assert not calls(sys(), agent="b", thread="u").late
    assert [agent.agent for agent in calls.lint.report().agents] == ["b"]


def test_a_prompt_that_goes_on_does_not_bring_back_an_older_one() -> None:
    calls = Calls()
    for number, prompt in enumerate((0, 1, 2)):
        calls(sys(PROMPTS[prompt]), *turns(number + 1), tag=number)
    [late] = calls(sys(PROMPTS[2]), *turns(4), tag=3).late
    assert (late.found.kind, late.tag, late.call_tag) == (K.SYSTEM, 1, 2)
    assert late.previous.messages[0] == sys(PROMPTS[1])
    assert late.current.messages == (sys(PROMPTS[2]), *turns(3))
    assert suspected(calls) == (2, 1)
    calls(sys(PROMPTS[0]), *turns(4))
    assert suspected(calls) == (1, 0)


@pytest.mark.parametrize("prompts", [2, 3, 6])
@pytest.mark.parametrize("is_trimmed", [False, True], ids=["growing", "trimmed"])
def test_prompts_that_take_turns_in_one_node_break_only_themselves(prompts: int, is_trimmed: bool) -> None:
    calls = Calls()
    for count in range(9, 12):
        for prompt in PROMPTS[:prompts]:
            calls(sys(prompt), *turns(count)[2 * (count - 5) if is_trimmed else 0 :])
    assert calls.kinds() == ({K.TRIMMED: 2 * prompts} if is_trimmed else {})


def test_prompts_that_take_turns_with_a_clock_each_show_the_clock() -> None:
    calls = Calls()
    for minute in range(10, 14):
        for prompt in PROMPTS[:2]:
            calls(sys(f"{prompt} It is 09:{minute}."), *turns(minute))
    assert calls.kinds() == {K.CLOCK: 6}


def test_prompts_that_take_turns_on_texts_of_their_own_are_two_agents() -> None:
    calls = Calls()
    calls(sys(PROMPTS[0]), user("rolls"))
    calls(sys(PROMPTS[1]), user("rolls"))
    assert suspected(calls) == (1, 1)
    calls(sys(PROMPTS[0]), user("cakes"))
    assert calls.kinds() == {}


def test_other_tools_are_another_agent_only_if_the_first_ones_come_back() -> None:
    calls = Calls()
    calls(sys(), *turns(2), tools=[tool("x")])
    calls(sys(), *turns(3), tools=[tool("y")])
    assert calls.kinds() == {K.TOOL_SET: 1}
    calls(sys(), user("cakes"), tools=[tool("x")])
    assert calls.kinds() == {}


def test_a_step_back_in_time_is_no_break_and_neither_is_another_answer() -> None:
    calls = Calls()
    calls(sys(), *turns(4))
    calls(sys(), *turns(2))
    assert calls(sys(), *turns(2), user("Something else?"), ai("Yes.")).found is None
    assert calls(sys(), *turns(5)).found is None
    assert calls.kinds() == {}


@pytest.mark.parametrize(
    ("kind", "now"),
    [
        (K.TRIMMED, [sys(), *turns(6)[4:], user("new")]),
        (K.SUMMARIZED, [sys(), user("Summary: so far so good."), *turns(6)[8:], user("new")]),
        (K.INSERTED, [sys(), user("Memory: rye is liked."), *turns(6), user("new")]),
        (K.EDITED, [sys(), *turns(6)[:4], user("(cleared)"), *turns(6)[5:], user("new")]),
    ],
)
def test_what_is_done_to_a_history_is_told_by_what_remains_of_it(kind: K, now: list[Any]) -> None:
    calls = Calls()
    calls(sys(), *turns(6))
    assert calls(*now).found is not None
    assert calls(*now, ai("And on it goes")).found is None, "the new history is the one to extend"
    assert calls.kinds() == {kind: 1}


def test_token_ids_tell_what_messages_do_not() -> None:
    calls = Calls()
    calls(sys(), *turns(2), token_ids=(*range(100), *range(500, 600)))
    observed = calls(sys(), *turns(3), token_ids=(*range(100), *range(700, 900)))
    assert observed.found is not None
    assert (observed.found.kind, observed.found.lost_tokens, observed.found.is_estimate) == (K.TEMPLATE, 100, False)
    assert calls(sys(), *turns(4), token_ids=(*range(100), *range(700, 1200))).found is None


def test_what_two_threads_share_is_counted_at_the_rate_of_the_prompt() -> None:
    calls = Calls()
    calls(sys(f"{RULES}It is 10:15."), user("rolls"), thread="one", token_ids=range(1000))
    found = calls(sys(f"10:16 {RULES * 4}"), user("cakes"), thread="two", token_ids=range(10)).found
    assert found is None or found.lost_tokens <= 10
    found = calls(sys(f"10:17 {RULES * 4}"), user("buns"), thread="three", token_ids=range(1000)).found
    assert found is not None
    assert (found.kind, found.is_estimate) == (K.CLOCK, True)
    assert 900 < found.lost_tokens < 1000


# -- without names --------------------------------------------------------------------------------------------------


def test_without_names_the_system_prompt_tells_the_agent_and_the_history_the_thread() -> None:
    calls = Calls()
    seen = []
    for count in range(1, 6):
        for rules, about in ((RULES, "rolls"), (RULES, "cakes"), (OTHER, "rolls")):
            text = f"{rules} Step {count}." if about == "cakes" else rules
            seen.append(calls(sys(text), *turns(count, about), agent="", thread=""))
    assert {observed.agent for observed in seen} == {"agent 1", "agent 2"}
    assert calls.kinds("agent 2") == {}
    assert calls.kinds("agent 1")[K.COUNTER] >= 4


def test_without_a_system_prompt_there_is_one_agent() -> None:
    calls = Calls()
    names = {calls(*turns(count), agent="", thread="").agent for count in range(1, 4)}
    assert names == {"agent 1"}
    assert calls(sys(), *turns(2), agent="", thread="").agent == "agent 2"


# -- bounds ---------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_in_conversations_agents_and_token_ids() -> None:
    calls = Calls(max_lines=10, max_agents=5, max_ids=1000)
    for number in range(200):
        calls(sys(), *turns(2, f"topic {number}"), agent=f"a{number % 20}", thread=f"t{number}", token_ids=range(300))
    lines, agents, ids = calls.lint.sizes
    assert (lines, agents) == (10, 5)
    assert 0 < ids <= 1000
    assert calls.lint.report().forgotten_agents > 0
    held = list(calls.lint._lines.values())
    assert sum(len(line.ids or ()) for line in held) == ids


def test_one_thread_that_never_extends_itself_keeps_few_prompts() -> None:
    calls = Calls()
    for number in range(100):
        calls(sys(), user(f"completely unrelated text {number * 7919}"))
    assert calls.lint.sizes[0] <= 8


def test_a_call_that_extends_the_one_before_is_not_looked_at_any_further(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    calls(sys(), *turns(3))
    monkeypatch.setattr("pancake_langgraph.prompts.lint_history._explained", lambda *_: pytest.fail("looked further"))
    monkeypatch.setattr("pancake_langgraph.prompts.lint_book.turn_key", lambda *_: pytest.fail("looked further"))
    assert calls(sys(), *turns(4)).found is None


# -- what is told -----------------------------------------------------------------------------------------------------


def test_no_text_is_logged_or_reported_and_each_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    secret = "zebra-crossing"
    calls = Calls()
    with caplog.at_level(logging.DEBUG):
        for minute in range(10, 14):
            talk = turns(4, secret)[(minute - 10) * 2 :]
            calls(sys(f"{secret} {RULES} 09:{minute} {secret}"), *talk, tools=[tool("x", f"{secret} {minute}")])
            calls(sys(), *turns(minute, secret)[minute:], agent="b", tools=[tool("x", f"{secret} {'odd' * minute}")])
    report = calls.lint.report()
    assert report.breaks >= 4
    told = caplog.text + str(report) + json.dumps(report.to_json())
    assert secret not in told
    assert "09:1" not in told
    assert "question" not in told
    messages = [record.getMessage() for record in caplog.records if "to mend" in record.getMessage()]
    assert len(messages) == sum(len(agent.kinds) for agent in report.agents)


def test_the_report_says_it_in_words_with_the_costliest_first() -> None:
    calls = Calls()
    calls(sys(), *turns(1), agent="cheap")
    calls(sys(RULES + "x"), *turns(1), agent="cheap")
    calls(sys(), *turns(50), agent="dear")
    calls(sys(RULES + "12:30"), *turns(50), agent="dear", thread="u")
    calls(sys(RULES + "12:31"), *turns(50), agent="dear", thread="u")
    report = calls.lint.report()
    assert [agent.agent for agent in report.agents] == ["dear", "cheap"]
    assert "suspected" not in str(report)
    calls(sys(OTHER), *turns(51), agent="dear", thread="u")
    text = str(calls.lint.report())
    assert "system: 2 times (1 suspected), about" in text
    assert "clock: 1 times, about" in text
    assert K.CLOCK.mend in text
    assert report.to_json()["agents"][0]["kinds"][0]["worst"]["place"]["role"] == "system"
