"""What state a node will read, told from what earlier nodes read and wrote."""

import dataclasses
import itertools
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.types import Command, Send

from pancake_langgraph.prompts.outlook import MAX_HABITS, Outlook, Spot, updates_of

HI, YES = HumanMessage("hi", id="1"), AIMessage("yes", id="2")


STEPS = itertools.count(1)


def spot(node: str, *, pushed: bool = False, around: str = "", path: str = "", step: int = 0) -> Spot:
    inner = f"{around}|{node}:1" if around else f"{node}:1"
    return Spot(inner, around, path, node, is_pushed=pushed, step=step)


def step(outlook: Outlook, node: str, fields: Any, update: Any, run: str = "r") -> None:
    here = spot(node, step=next(STEPS))
    outlook.node_started(run, here, fields, "g")
    outlook.node_ended(run, here, updates_of(update), "g")


def known(outlook: Outlook, target: str = "next", *, between: int = 0, run: str = "r", around: str = "") -> Any:
    return outlook.known(run, around, target, num_between=between, graph_id="g")


def test_a_write_is_known_when_its_node_has_ended() -> None:
    outlook = Outlook(max_levels=8)
    outlook.node_started("r", spot("a"), {"messages": [HI], "plan": "x"}, "g")
    early = known(outlook)
    assert early.all_unsure
    assert early.growing == {"messages"}
    outlook.node_ended("r", spot("a"), updates_of({"messages": [YES], "plan": "y"}), "g")
    late = known(outlook)
    assert late.fields == {"messages": [HI, YES], "plan": "y"}
    assert late.sure_of("plan")
    assert late.sure_of("messages")


def test_what_a_node_never_wrote_is_certain_while_it_runs() -> None:
    outlook = Outlook(max_levels=8)
    step(outlook, "a", {"messages": [HI], "plan": "x", "other": 1}, {"plan": "y"})
    outlook.node_started("r", spot("a", step=next(STEPS)), {"messages": [HI], "plan": "x", "other": 1}, "g")
    found = known(outlook)
    assert found.sure_of("messages")
    assert found.sure_of("other")
    assert not found.sure_of("plan")


def test_nodes_that_run_in_between_may_write_as_well() -> None:
    outlook = Outlook(max_levels=8)
    step(outlook, "a", {"plan": "x", "other": 1}, {"plan": "y"})
    step(outlook, "b", {"plan": "y", "other": 1}, {"other": 2})
    outlook.node_started("r", spot("a", step=next(STEPS)), {"plan": "y", "other": 2}, "g")
    assert known(outlook).sure_of("other")
    assert not known(outlook, between=1).sure_of("other")


def test_lists_that_add_up_are_told_from_those_that_are_replaced() -> None:
    outlook = Outlook(max_levels=8)
    old, new = [1, 2], [3]
    step(outlook, "a", {"sum": old, "last": [1, 2]}, {"sum": new, "last": new})
    step(outlook, "b", {"sum": [*old, *new], "last": new}, {"sum": [4], "last": [4]})
    assert known(outlook).fields == {"sum": [1, 2, 3, 4], "last": [4]}


def test_a_reducer_of_the_applications_own_makes_its_field_uncertain() -> None:
    outlook = Outlook(max_levels=8)
    step(outlook, "a", {"count": 1}, {"count": 2})
    step(outlook, "b", {"count": 3}, {"count": 2})  # it was added
    assert not known(outlook).sure_of("count")


def test_messages_are_added_by_id_and_removed() -> None:
    outlook = Outlook(max_levels=8)
    step(outlook, "a", {"messages": [HI, YES]}, {"messages": [HumanMessage("ho", id="1"), ("user", "more")]})
    assert [m.content for m in known(outlook).fields["messages"]] == ["ho", "yes", "more"]
    step(outlook, "b", {"messages": [HI, YES]}, {"messages": [RemoveMessage(id="1")]})
    assert known(outlook).fields["messages"] == [YES]
    outlook.node_started("r", spot("b", step=next(STEPS)), {"messages": [HI, YES]}, "g")
    assert not known(outlook).sure_of("messages")
    assert known(outlook).growing == frozenset()  # this node was seen to take messages away


def test_what_nodes_of_one_step_write_is_ordered_by_task_and_not_by_time() -> None:
    outlook = Outlook(max_levels=8)
    state = {"messages": [HI]}
    left, right = (dataclasses.replace(spot(node, step=3), order=node) for node in ("left", "right"))
    for here in (left, right):
        outlook.node_started("r", here, state, "g")
    outlook.node_ended("r", right, updates_of({"messages": [AIMessage("right")]}), "g")
    assert known(outlook).fields["messages"] == [HI]  # the other one's comes before it
    assert known(outlook).growing == {"messages"}
    outlook.node_ended("r", left, updates_of({"messages": [AIMessage("left")]}), "g")
    assert [m.content for m in known(outlook).fields["messages"]] == ["hi", "left", "right"]
    assert known(outlook).sure_of("messages")


def test_writes_of_one_step_whose_order_is_not_known_leave_their_field_uncertain() -> None:
    outlook = Outlook(max_levels=8)
    for node in ("left", "right"):
        outlook.node_started("r", spot(node, step=3), {"messages": [HI]}, "g")
    for node in ("left", "right"):
        outlook.node_ended("r", spot(node, step=3), updates_of({"messages": [AIMessage(node)]}), "g")
    assert not known(outlook).sure_of("messages")
    outlook.node_started("r", spot("next", step=4), {"messages": [HI, YES, YES]}, "g")
    outlook.node_ended("r", spot("next", step=4), (), "g")
    assert known(outlook).sure_of("messages")


def test_a_late_sibling_reads_what_was_there_before_the_others_wrote() -> None:
    outlook = Outlook(max_levels=8)
    outlook.node_started("r", spot("left", step=3), {"plan": "x"}, "g")
    outlook.node_ended("r", spot("left", step=3), updates_of({"plan": "y"}), "g")
    outlook.node_started("r", spot("right", step=3), {"plan": "x"}, "g")
    outlook.node_ended("r", spot("right", step=3), (), "g")
    assert known(outlook).fields == {"plan": "y"}


def test_the_first_node_of_a_new_thread_reads_the_input_unless_it_was_seen_to_read_more() -> None:
    outlook = Outlook(max_levels=64)

    def opened(thread: str) -> Any:
        outlook.run_ended(thread)
        outlook.run_started(thread, thread, {"messages": [HI], "plan": "x"}, "g")
        return known(outlook, run=thread)

    def read(thread: str, messages: list[Any]) -> None:
        here = spot("a", step=1)
        outlook.node_started(thread, here, {"messages": messages, "plan": "x"}, "g")
        outlook.node_ended(thread, here, (), "g")

    assert opened("t1").sure_of("messages")
    read("t1", [HI])
    assert opened("t1").fields == {}  # this thread has a past
    assert opened("t2").sure_of("plan")
    read("t2", [YES, HI])  # and so had this one, stored before
    assert opened("t3").fields == {}
    for thread in ("t4", "t5"):
        opened(thread)
        read(thread, [HI])
    assert opened("t6").sure_of("messages")


def test_an_input_of_its_own_says_nothing_of_the_graphs_state() -> None:
    outlook = Outlook(max_levels=8)
    outlook.node_started("r", spot("a"), {"plan": "x"}, "g")
    outlook.node_started("r", spot("worker", pushed=True), {"plan": "sent"}, "g")
    outlook.node_ended("r", spot("a"), (), "g")
    outlook.node_ended("r", spot("worker", pushed=True), (), "g")
    assert known(outlook, "next").fields == {"plan": "x"}
    assert known(outlook, "worker").fields == {}


def test_a_graph_inside_is_foreseen_from_the_graph_around_while_it_reads_the_same_messages() -> None:
    outlook = Outlook(max_levels=8)
    outlook.node_started("r", spot("team"), {"messages": [HI]}, "g")
    assert known(outlook, "team|writer").fields == {"messages": [HI]}
    outlook.node_started("r", spot("writer", around="team:1", path="team"), {"messages": [AIMessage("own")]}, "g")
    assert known(outlook, "team|writer").fields == {}


@pytest.mark.parametrize(
    ("outputs", "updates"),
    [
        ({"a": 1}, ({"a": 1},)),
        (Command(update={"a": 1}, goto="x"), ({"a": 1},)),
        (Command(update=[("a", 1), ("b", 2)]), ({"a": 1, "b": 2},)),
        ([Command(update={"a": 1}), {"b": 2}], ({"a": 1}, {"b": 2})),
        (Command(update={"a": 1}, graph=Command.PARENT), ()),
        ([Send("x", {"a": 1})], ()),
        ("text", ()),
        (None, ()),
    ],
)
def test_what_a_node_returns_is_read_as_what_it_writes(outputs: object, updates: tuple[Any, ...]) -> None:
    assert updates_of(outputs) == updates


def test_everything_followed_is_bounded() -> None:
    outlook = Outlook(max_levels=4)
    message = ToolMessage("x", tool_call_id="1")
    for number in range(MAX_HABITS + 500):
        fields = {f"f{number}-{n}": [message] for n in range(80)} if number < 3 else {"messages": [HI]}
        step(outlook, f"node{number}", fields, {f"g{number}": [1]}, run=f"r{number}")
    assert len(outlook._levels) == 4
    assert len(outlook._habits) == MAX_HABITS
    assert all(len(level.fields) <= 66 for level in outlook._levels.values())
    outlook.run_ended(f"r{number}")
    assert len(outlook._levels) == 3


def test_asking_in_between_changes_no_later_answer() -> None:
    inner = spot("inner", around="team:1", path="team", step=1)
    first = spot("a", step=1)
    events = [
        lambda o: o.run_started("r", "thread r", {"messages": [HI]}, "g"),
        lambda o: o.run_started("s", "thread s", {"messages": [HI]}, "g"),
        lambda o: o.run_started("s", "thread t", {"messages": [HI], "plan": "z"}, "g"),
        lambda o: o.node_started("r", first, {"messages": [HI], "plan": "x"}, "g"),
        lambda o: o.node_started("s", first, {"messages": [HI], "plan": "x"}, "g"),
        lambda o: o.node_ended("r", first, updates_of({"plan": "y"}), "g"),
        lambda o: o.node_started("r", inner, {"messages": [HI]}, "g"),
        lambda o: o.node_ended("s", first, updates_of({"messages": [YES]}), "g"),
        lambda o: o.node_cut("r", inner),
        lambda o: o.run_ended("s"),
    ]
    asked = Outlook(max_levels=8)
    for done, event in enumerate(events, 1):
        event(asked)
        silent = Outlook(max_levels=8)
        for earlier in events[:done]:
            earlier(silent)
        for run, around, target in (("r", "", "next"), ("s", "", "next"), ("r", "team:1", "team|next")):
            for between in (0, 1):
                found = known(asked, target, between=between, run=run, around=around)
                assert found == known(silent, target, between=between, run=run, around=around)
                assert asked.knows(run, around, target, graph_id="g") == bool(found.fields)


def test_one_level_is_read_once_between_two_changes() -> None:
    outlook = Outlook(max_levels=8)
    outlook.node_started("r", spot("a"), {"messages": [HI]}, "g")
    assert known(outlook, "next") is known(outlook, "other")
    assert len(outlook._told) == 1
    step(outlook, "b", {"messages": [HI]}, {"messages": [YES]})
    assert len(outlook._told) == 0
