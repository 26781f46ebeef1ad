"""LangGraph's own list of a graph's classes, which names each by its last name, and what is allowed by it."""

from __future__ import annotations

import dataclasses
import sys
from enum import Enum
from types import ModuleType
from typing import Any, TypedDict, cast

import pytest
from langgraph._internal._serde import collect_allowlist_from_schemas
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from pydantic import BaseModel

from pancake_langgraph._errors import StateTypeError
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.codec_names import classes_named
from pancake_langgraph.saver import PancakeSaver

HERE = __name__


class Order(BaseModel):
    class Line(BaseModel):
        class Unit(Enum):
            KILO = "kg"

        amount: int

    class Twin(BaseModel):
        value: int

    lines: list[Line]


class Other:
    class Twin(BaseModel):
        value: int

    class Config:
        """Of a kind that is never stored."""


@dataclasses.dataclass(frozen=True)
class Config:
    name: str


#: A second name for one class does not make it two.
Alias = Order.Line


def listed(*names: str) -> Codec:
    return Codec.build().allowing_listed([(HERE, name) for name in names])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Order", Order(lines=[])),
        ("Line", Order.Line(amount=1)),
        ("Unit", Order.Line.Unit.KILO),
        ("Order.Line", Order.Line(amount=1)),
        ("Config", Config("a")),
    ],
)
def test_a_class_is_found_by_its_last_name_and_by_its_whole_name(name: str, value: Any) -> None:
    codec = listed(name)
    data = codec.encode(value, channel="c")
    assert codec.decode(data, channel="c") == value
    assert type(listed(name).decode(data, channel="c")) is type(value)
    for other in (Codec.build(), listed("Other")):
        with pytest.raises(StateTypeError, match="is not among the types"):
            other.decode(data, channel="c")


def test_a_name_of_two_classes_allows_neither_and_says_so() -> None:
    allowed = Codec.build([Order.Twin, Other.Twin])
    for kind in (Order.Twin, Other.Twin):
        value = kind(value=1)
        data = allowed.encode(value, channel="c")
        text = rf"channel 'c'.*Order\.Twin and Other\.Twin go by that name.*allow=\[{kind.__qualname__}\]"
        with pytest.raises(StateTypeError, match=text):
            listed("Twin").encode(value, channel="c")
        with pytest.raises(StateTypeError, match=text):
            listed("Twin").decode(data, channel="c")


def test_a_class_that_the_app_allowed_stays_allowed_whatever_shares_its_name() -> None:
    codec = Codec.build([Order.Twin]).allowing_listed([(HERE, "Twin")])
    assert codec.decode(codec.encode(Order.Twin(value=1), channel="c"), channel="c") == Order.Twin(value=1)
    with pytest.raises(StateTypeError, match="go by that name"):
        codec.encode(Other.Twin(value=1), channel="c")
    more = codec.allowing([Other.Twin])
    assert more.decode(more.encode(Other.Twin(value=1), channel="c"), channel="c") == Other.Twin(value=1)


def test_langgraphs_own_list_of_a_state_brings_its_nested_classes_back() -> None:
    class State(TypedDict):
        line: Order.Line
        unit: Order.Line.Unit

    names = collect_allowlist_from_schemas(schemas=[State])
    assert {(HERE, "Line"), (HERE, "Unit")} <= names
    checkpoint = {**empty_checkpoint(), "channel_values": {"line": Order.Line(amount=2), "unit": Order.Line.Unit.KILO}}
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    with PancakeSaver().with_allowlist(names) as saver:
        stored = saver.put(config, cast("Checkpoint", checkpoint), {}, {})
        found = saver.get_tuple(stored)
    assert found is not None
    assert found.checkpoint["channel_values"] == checkpoint["channel_values"]


def test_a_list_with_nothing_new_gives_the_same_saver() -> None:
    names = [(HERE, "Line"), (HERE, "Twin"), ("langchain_core.messages.ai", "AIMessage"), ("not.loaded", "Thing")]
    clone = PancakeSaver().with_allowlist(names)
    assert clone.with_allowlist(names) is clone


def test_looking_for_a_class_imports_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("asked what it is")

    home = ModuleType("lazy_home")
    home.__dict__.update(thing=Lazy(), Order=Order)
    monkeypatch.setitem(sys.modules, "lazy_home", home)
    assert classes_named("lazy_home", "Order") == ()
    assert classes_named("not.loaded", "Order") == ()
    assert "not" not in sys.modules
