"""The strict codec: what comes back is what went in, or nothing went in."""

import dataclasses
import datetime as dt
import enum
import ipaddress
import logging
import os
import pathlib
import re
import struct
import subprocess
import sys
import threading
import types
import typing
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, partial
from zoneinfo import ZoneInfo

import langchain_core.messages as lc
import numpy as np
import ormsgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.store.base import Item, SearchItem
from langgraph.types import Command, Interrupt, Overwrite, Send, TimeoutPolicy
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, RootModel, SecretBytes, SecretStr, create_model

from pancake_langgraph import _errors as errors
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.codec_classes import KNOWN
from pancake_langgraph.checkpoint.codec_wire import MAX_DEPTH, Code, pack

# -- classes of an app ----------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"
    ALSO_RED = "red"  # noqa: PIE796 - an alias on purpose
    PAIR = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    A = "a"


class Mode(enum.Flag):
    R = 1
    W = 2


class Pair(typing.NamedTuple):
    a: typing.Any
    b: typing.Any = 7


@dataclasses.dataclass
class Base:
    x: typing.Any = 0

    def __post_init__(self) -> None:
        raise_if_restoring()


@dataclasses.dataclass
class Derived(Base):
    y: typing.Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: typing.Any
    y: typing.Any = 0
    note: str = dataclasses.field(default="", init=False, compare=False)


@dataclasses.dataclass(slots=True)
class Late:
    """A field that is not set at first."""

    x: int
    later: int = dataclasses.field(init=False, repr=False, compare=False)


class Slotted:
    __slots__ = ("cache",)


@dataclasses.dataclass
class Attributed(Slotted):
    x: int = 0

    @cached_property
    def half(self) -> float:
        return self.x / 2


T = typing.TypeVar("T")


@dataclasses.dataclass
class Box(typing.Generic[T]):
    item: T


class Inner(BaseModel):
    v: typing.Any = 0


class SubInner(Inner):
    w: int = 1


class Model(BaseModel):
    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)
    a: typing.Any
    b: Inner = Field(default_factory=Inner)
    c: list[int] = []
    _secret: typing.Any = PrivateAttr(default=None)
    _unset: int = PrivateAttr()

    def __init__(self, **data: typing.Any) -> None:
        raise_if_restoring()
        super().__init__(**data)


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)
    a: int = Field(alias="A", default=3)

    @cached_property
    def twice(self) -> int:
        return 2 * self.a


class Numbers(RootModel[list[int]]):
    pass


APP = [
    *(Color, Level, Word, Mode, Pair, Base, Derived, Point, Late, Attributed, Box),
    *(Inner, SubInner, Model, Frozen, Numbers),
]
CODEC = Codec.build(APP)
STRICT = Codec.build()
restoring = threading.local()


def raise_if_restoring() -> None:
    assert not getattr(restoring, "on", False), "a constructor ran while a value was read"


def back(value: object, codec: Codec = CODEC) -> typing.Any:
    data = codec.encode(value, channel="c")
    assert type(data) is bytes
    assert codec.encode(value, channel="c") == data
    restoring.on = True
    try:
        return codec.decode(data, channel="c")
    finally:
        restoring.on = False


def contents(array: typing.Any) -> typing.Any:
    if array.dtype.names is None:
        return array.tobytes()
    return {name: contents(array[name]) for name in array.dtype.names}


def attributes(value: object) -> dict[str, object]:
    computed = ("half", "__orig_class__")
    return {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in computed}


def same(a: typing.Any, b: typing.Any) -> bool:
    """Whether two values have the same types and contents all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (a != a and b != b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, BaseModel):
        parts = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
        return all(same(getattr(a, part), getattr(b, part)) for part in parts)
    if isinstance(a, np.ndarray):
        flags = [(x.flags.writeable, x.flags.fnc, x.shape, x.dtype) for x in (a, b)]
        return flags[0] == flags[1] and contents(a) == contents(b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and contents(np.asarray(a)) == contents(np.asarray(b))
    if isinstance(a, dict):
        extra = same(a.default_factory, b.default_factory) if isinstance(a, defaultdict) else True
        return extra and same([*a.items()], [*b.items()])
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, list | tuple | deque):
        bound = not isinstance(a, deque) or a.maxlen == b.maxlen
        return bound and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dt.datetime | dt.time):
        naive = a.replace(tzinfo=None) == b.replace(tzinfo=None)
        return naive and a.fold == b.fold and same(a.tzinfo, b.tzinfo)
    if isinstance(a, Decimal):
        return a.as_tuple() == b.as_tuple()
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        fields = same([getattr(a, n, ...) for n in names], [getattr(b, n, ...) for n in names])
        return fields and same(attributes(a), attributes(b)) and getattr(a, "cache", 0) == getattr(b, "cache", 0)
    if isinstance(a, Send | Item):
        names = [slot for base in type(a).__mro__ for slot in getattr(base, "__slots__", ())]
        return same([getattr(a, n) for n in names], [getattr(b, n) for n in names])
    return bool(a == b)


def test_the_comparer_sees_types_order_and_bounds() -> None:
    differing = [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (deque([1]), deque([1], 3)),
        (defaultdict(int), defaultdict(list)),
        (Inner(v=1), Inner(v=True)),
        (Inner(), Inner(v=0)),
        (Base(1), Derived(1)),
        ({1}, {True}),
        (Decimal("1.0"), Decimal("1.00")),
        (np.zeros(2), np.zeros(2, "f4")),
    ]
    assert not [pair for pair in differing if same(*pair)]


# -- every kind -----------------------------------------------------------------------------------------------------


def read_only(array: typing.Any) -> typing.Any:
    array.flags.writeable = False
    return array


def with_private() -> Model:
    model = Model(a=(1, {2}), b=SubInner(v=Color.RED, w=2), extra_one=b"x", extra_two=(1,))
    model._secret = {1: "one"}
    return model


def attributed() -> Attributed:
    value = Attributed(4)
    value.cache = (1,)
    value.loose = {2}
    assert value.half == 2
    return value


def moved() -> OrderedDict[str, int]:
    value = OrderedDict(a=1, b=2, c=3)
    value.move_to_end("a")
    return value


def fortran() -> typing.Any:
    return np.asfortranarray(np.arange(6).reshape(2, 3))


PLAIN = [
    *(None, True, False, 0, -1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**100, -(10**100), 255 * 2**64),
    *(0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324),
    *("", "a", "\x00", "\ud800", "a\udfffb", "\ud83d\ude00", "😀", b"", b"\xff", bytearray(b"ab"), bytearray()),
    *([], [1, [2, [3]]], (), (1,), (1, (2, [3, ()])), {}, {"a": {"b": {"c": ()}}}, [bytearray(b"x")]),
    *({1: "a", "1": "b"}, {None: 1, True: 2, 2.5: 3}, {(1, "a"): {(): 0}}, {Word.A: 1}, {"\ud800": 1, "b": ["\udc00"]}),
    *({frozenset({1}): 1}, {b"a": 1}, {"__type__": "set", "lc": 1, "type": "constructor", "id": ["os", "system"]}),
    *(set(), {1, "a", (1, 2)}, frozenset(), frozenset({frozenset({(1, (2,))}), None})),
    *(deque(), deque([1, (2,)], maxlen=3), deque(maxlen=0), Counter("abca"), Counter({(1, 2): -3}), moved()),
    *(OrderedDict([(1, 2)]), *(defaultdict(f, {"a": (1,)}) for f in (list, dict, set, int, float, str, None))),
    *(1j, complex(-0.0, float("nan")), Decimal("-0.00"), Decimal("sNaN12"), Decimal("1E+1000"), Decimal("-Infinity")),
    *(Fraction(-3, 7), Fraction(2**70), range(3), range(10, 0, -3), range(2**70)),
]
TIMES = [
    dt.datetime(2024, 2, 29, 1, 2, 3, 4),
    dt.datetime(1, 1, 1, tzinfo=dt.UTC),
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Paris")),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3, seconds=1), "odd")),
    *(dt.date(2024, 1, 2), dt.time(1, 2, 3, 4, fold=1), dt.time(0, tzinfo=dt.UTC), dt.timedelta(-1, 2, 3)),
    *(dt.UTC, dt.timezone(dt.timedelta(minutes=90)), ZoneInfo("UTC"), ZoneInfo("Asia/Tokyo"), dt.timedelta.max),
]
TEXTS = [
    *(
        uuid.UUID(int=7),
        pathlib.Path("a/b"),
        pathlib.PurePosixPath("/"),
        pathlib.PureWindowsPath("C:\\a\\b"),
        pathlib.Path(),
    ),
    *(pathlib.Path("a\udc80"), re.compile("a+", re.IGNORECASE), re.compile(b"x.", re.DOTALL), re.compile("(?x) a # b")),
    *(ipaddress.ip_address("::1%eth0"), ipaddress.ip_address("10.0.0.1"), ipaddress.ip_network("10.0.0.0/8")),
    *(ipaddress.ip_network("fe80::/10"), ipaddress.ip_interface("10.0.0.1/8"), ipaddress.ip_interface("::1/64")),
]
ARRAYS = [
    *(np.arange(3), np.array(3.5), np.zeros((0, 3)), np.array([[1, 2], [3, 4]], ">i2"), fortran(), fortran()[:, ::2]),
    *(read_only(np.ones(2)), np.array(["a", "b\x00c"]), np.array([b"a", b""]), np.array([True]), np.array([1j])),
    np.array(["2024-01-01", "NaT"], "M8[ns]"),
    np.array([3], "m8[25s]"),
    np.array([(1, [2.0, 3.0], "x")], [("a", "i4"), ("b", "f8", (2,)), ("c", "U3")]),
    np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    *(np.float64("nan"), np.float32(1.5), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j)),
    *(
        np.str_("a\x00"),
        np.str_(""),
        np.str_("\ud800"),
        np.bytes_(b"a\x00"),
        np.datetime64("2024-01-01"),
        np.timedelta64("NaT"),
    ),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])[0],
    {np.int64(1): np.float16(2)},
]
CLASSES = [
    *(
        Color.RED,
        Color.ALSO_RED,
        Color.PAIR,
        Level.LOW,
        Word.A,
        Mode.R,
        Mode.R | Mode.W,
        Mode(0),
        {Color.RED: {Level.LOW}},
    ),
    *(Pair(1), Pair((1,), {2}), Base((1,)), Derived(Base(2), [Derived()]), Point(Point(1), {Word.A}), Late(1)),
    *(attributed(), Box[int](3), Inner(), Inner(v=SubInner()), SubInner(v=(1,)), with_private(), Model(a=1)),
    *(Model.model_construct(a=1), Frozen(A=4), Frozen(), Numbers([1, 2]), SecretStr("s\ud800"), SecretBytes(b"s")),
]
GRAPH = [
    Send("n", {"a": (1,)}),
    Send("n", None, timeout=3.0),
    TimeoutPolicy(run_timeout=dt.timedelta(1)),
    Interrupt(value={"q": (1,)}, id="i"),
    Interrupt(value=1, id="i", response_schema={"type": "object"}),
    *(Command(), Command(graph=Command.PARENT, update={"m": [lc.HumanMessage("x")]}, goto=[Send("a", 1), "b"])),
    *(Command(resume={"x": (1,)}), Overwrite([1, (2,)]), _DeltaSnapshot([lc.HumanMessage("x", id="1")])),
    Item(value={"a": 1}, key="k", namespace=("a", "b"), created_at=dt.datetime.now(dt.UTC), updated_at=dt.datetime.min),
    SearchItem(("a",), "k", {}, dt.datetime.min, dt.datetime.max, 0.5),
    *(Document("text", id="1", metadata={"a": (1,)}), Document("")),
]
CALL = {"name": "f", "args": {"a": 1}, "id": "c1", "type": "tool_call"}
CHUNK = {"name": "f", "args": '{"a"', "id": "c1", "index": 0, "type": "tool_call_chunk"}
MESSAGES = [
    lc.AIMessage("hi"),
    lc.AIMessage(
        [{"type": "text", "text": "hi"}, "there"],
        id="1",
        tool_calls=[CALL],
        invalid_tool_calls=[{"name": "f", "args": "{", "id": "2", "error": "e", "type": "invalid_tool_call"}],
        usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
        response_metadata={"logprobs": [(1, 2.0)]},
        additional_kwargs={"x": {1}},
    ),
    lc.AIMessageChunk("a", tool_call_chunks=[CHUNK], chunk_position="last"),
    *(
        lc.HumanMessage("a", name="n", custom=(1, 2)),
        lc.HumanMessageChunk("a"),
        lc.SystemMessage(""),
        lc.SystemMessageChunk("s"),
    ),
    *(lc.ChatMessage("a", role="r"), lc.ChatMessageChunk("a", role="r"), lc.FunctionMessage("a", name="n")),
    *(lc.FunctionMessageChunk("a", name="n"), lc.RemoveMessage("1"), lc.ToolMessageChunk("a", tool_call_id="1")),
    lc.ToolMessage("a", tool_call_id="1", status="error", artifact={"rows": np.arange(3), (1, 2): Decimal(1)}),
    *(
        lc.ToolMessage("a", tool_call_id="1", artifact=None),
        lc.BaseMessage("a", type="t"),
        lc.BaseMessageChunk("a", type="t"),
    ),
    lc.AIMessage("said").text,
]
EVERYTHING = [*PLAIN, *TIMES, *TEXTS, *ARRAYS, *CLASSES, *GRAPH, *MESSAGES]


@pytest.mark.parametrize("number", range(len(EVERYTHING)))
def test_every_kind_comes_back_as_it_went_in(number: int) -> None:
    value = EVERYTHING[number]
    assert same(value, back(value)), ascii(back(value))
    assert same([value, {"a": (value,)}], back([value, {"a": (value,)}]))


def test_safe_classes_need_no_list() -> None:
    for value in [*GRAPH, *MESSAGES]:
        assert same(value, back(value, STRICT))
    seen = {type(value).__name__ for value in [*GRAPH, *MESSAGES]}
    assert {name for _, name in KNOWN} <= seen


def test_every_message_class_is_known() -> None:
    found = [getattr(lc, name) for name in dir(lc)]
    classes = {kind.__name__ for kind in found if isinstance(kind, type) and issubclass(kind, lc.BaseMessage)}
    assert classes == {name for module, name in KNOWN if module == "langchain_core.messages"}


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**62, 2**70),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(),
    st.dates(),
    st.datetimes(timezones=st.none() | st.sampled_from([dt.UTC, ZoneInfo("Europe/Paris")]), allow_imaginary=True),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.fractions(),
    st.decimals(allow_nan=False),
    st.ip_addresses(),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    st.sampled_from([Color.RED, Level.LOW, Word.A, Mode.R | Mode.W, pathlib.PurePosixPath("a/b"), re.compile("a")]),
)
FLAT = LEAVES | st.sampled_from([value for value in EVERYTHING if not isinstance(value, re.Pattern)])
KEYS = st.recursive(LEAVES, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=4)


def nested(inner: st.SearchStrategy[typing.Any]) -> st.SearchStrategy[typing.Any]:
    few = st.lists(inner, max_size=3)
    tables = st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        few,
        few.map(tuple),
        st.builds(deque, few, st.none() | st.integers(3, 9)),
        tables,
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        tables.map(OrderedDict),
        st.builds(defaultdict, st.sampled_from([list, int, None]), tables),
        st.sets(KEYS, max_size=3),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
        st.builds(Pair, inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Derived, inner, inner),
        st.builds(lambda a, e: Model(a=a, b=SubInner(v=a), e=e), inner, inner),
        st.builds(lambda a: lc.ToolMessage("x", tool_call_id="1", artifact=a), inner),
        st.builds(lambda a: Send("n", a), inner),
        st.builds(lambda a: Interrupt(value=a, id="1"), inner),
        st.builds(_DeltaSnapshot, inner),
        st.builds(lambda a: Command(update=a), inner),
    )


VALUES = nested(FLAT | nested(FLAT | nested(FLAT)))


@settings(max_examples=300)
@given(VALUES)
def test_any_nesting_comes_back_as_it_went_in(value: object) -> None:
    assert same(value, back(value))


# -- equal bytes ----------------------------------------------------------------------------------------------------


@given(st.lists(KEYS, max_size=6, unique_by=repr))
def test_sets_built_in_any_order_give_equal_bytes(items: list[object]) -> None:
    forward, backward = dict.fromkeys(items), dict.fromkeys(reversed(items))
    if not same(set(forward), set(backward)):  # 1 and True are equal, but not the same
        return
    assert CODEC.encode(set(forward), channel="c") == CODEC.encode(set(backward), channel="c")


def test_sets_of_texts_give_equal_bytes_in_every_process() -> None:
    code = (
        "from pancake_langgraph.checkpoint.codec import Codec\n"
        "print(Codec.build().encode({'a', 'b', 'c', ('d', 1)}, channel='c').hex())"
    )
    out = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(out) == 1


def test_a_change_after_encoding_does_not_reach_the_bytes() -> None:
    value = {"m": [lc.AIMessage("a", response_metadata={"x": [1]})], "a": np.zeros(2), "b": bytearray(b"a")}
    data = CODEC.encode(value, channel="c")
    copy = bytes(bytearray(data))
    value["m"][0].response_metadata["x"].append(2)
    value["a"][0] = 1
    value["b"][:] = b"zz"
    assert data == copy
    restored = CODEC.decode(data, channel="c")
    assert restored["m"][0].response_metadata == {"x": [1]}
    assert restored["a"].tolist() == [0, 0]
    restored["a"][0] = 5
    assert CODEC.decode(data, channel="c")["a"].tolist() == [0, 0]


def test_messages_leave_out_defaults_but_keep_which_fields_were_set() -> None:
    plain, spelled = lc.AIMessage("a"), lc.AIMessage("a", tool_calls=[], name=None)
    assert b"invalid_tool_calls" not in CODEC.encode(plain, channel="c")
    assert back(spelled).model_fields_set == spelled.model_fields_set != plain.model_fields_set
    first, second = back(plain), back(plain)
    first.tool_calls.append(1)
    assert second.tool_calls == []


def test_cached_properties_are_computed_again() -> None:
    value = Frozen(A=4)
    assert value.twice == 8
    restored = back(value)
    assert "twice" not in restored.__dict__
    assert restored.twice == 8


def test_bytes_between_the_fields_of_records_are_not_stored() -> None:
    dtype = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    one, two = (np.frombuffer(fill * dtype.itemsize * 2, dtype).copy() for fill in (b"\x01", b"\x02"))
    two["a"], two["b"] = one["a"], one["b"]
    assert CODEC.encode(one, channel="c") == CODEC.encode(two, channel="c")
    assert CODEC.encode(one[0], channel="c") == CODEC.encode(two[0], channel="c")


def test_a_field_that_was_never_set_stays_unset() -> None:
    assert not hasattr(back(Late(1)), "later")


# -- what is refused ------------------------------------------------------------------------------------------------


class Str(str): ...


class Int(int): ...


class Float(float): ...


class Bytes(bytes): ...


class List(list): ...


class Dict(dict): ...


class Tuple(tuple): ...


class Moment(dt.datetime): ...


class Zone(dt.tzinfo): ...


class Ordinary: ...


@dataclasses.dataclass
class DictData(dict):
    x: int = 0


@dataclasses.dataclass
class ErrorData(Exception):
    x: int = 0


REFUSED = [
    *(Str("a"), Int(1), Float(1), Bytes(b"a"), List(), Dict(), Tuple(), Moment(1, 1, 1), object(), Ordinary()),
    *(ValueError("x"), threading.Lock(), sys, print, lambda: 0, (x for x in ()), int, Ordinary, ..., memoryview(b"a")),
    *(ormsgpack.Ext(1, b""), ormsgpack.Fragment(b"\xc0"), partial(int), types.SimpleNamespace(a=1), iter([])),
    *({}.keys(), types.MappingProxyType({}), dt.datetime(1, 1, 1, tzinfo=Zone()), defaultdict(lambda: 0)),
    *(defaultdict(Ordinary), np.array([1, "a"], object), np.zeros(1, [("a", "O")])),
    *(
        np.zeros((1, 1)).view(np.matrix),
        np.ma.array([1]),
        np.longlong(1),
        np.zeros(2, "V0"),
        np.zeros(1, np.dtypes.StringDType()),
    ),
    *(np.recarray(1, [("a", "i4")]), DictData(1), ErrorData(1), namedtuple("Local", "a")(1)),
]


def as_artifact(value: object) -> lc.ToolMessage:
    return lc.ToolMessage("", tool_call_id="", artifact=value)


@pytest.mark.parametrize("number", range(len(REFUSED)))
@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, lambda x: [x], lambda x: {"k": (x,)}, as_artifact],
)
def test_what_cannot_come_back_exactly_is_refused_naming_channel_and_type(
    number: int, wrap: typing.Callable[[object], object]
) -> None:
    value = REFUSED[number]
    with pytest.raises(errors.StateTypeError) as caught:
        CODEC.encode(wrap(value), channel="the-channel")
    assert "the-channel" in str(caught.value)
    kind = type(value.tzinfo) if isinstance(value, dt.datetime) and value.tzinfo else type(value)
    assert kind.__name__ in str(caught.value)


@pytest.mark.parametrize("kind", [Str, Dict, DictData, ErrorData, Ordinary])
def test_classes_that_hold_what_cannot_be_seen_are_refused_though_allowed(kind: type) -> None:
    with pytest.raises(errors.StateTypeError, match="is allowed, but cannot be stored"):
        Codec.build([kind]).encode(kind(), channel="c")


@pytest.mark.parametrize("value", [Color.RED, Level.LOW, Word.A, Mode.R, Pair(1), Point(1), Inner(), Box(1)])
def test_classes_of_the_app_are_refused_unless_allowed(value: object) -> None:
    with pytest.raises(errors.StateTypeError, match=rf"'ch'.*{type(value).__name__}.*allow=\[{type(value).__name__}\]"):
        STRICT.encode([value], channel="ch")
    data = CODEC.encode([value], channel="ch")
    with pytest.raises(errors.StateTypeError, match=rf"'ch'.*{type(value).__name__}.*allow=\[{type(value).__name__}\]"):
        STRICT.decode(data, channel="ch")
    assert same([value], back([value], Codec.build([type(value)])))


def test_a_subclass_of_an_allowed_class_is_another_class() -> None:
    codec = Codec.build([Inner])
    with pytest.raises(errors.StateTypeError, match="SubInner"):
        codec.encode(Inner(v=SubInner()), channel="c")


def test_a_subclass_of_a_message_needs_the_list() -> None:
    class Mine(lc.HumanMessage):
        pass

    with pytest.raises(errors.StateTypeError, match="Mine"):
        STRICT.encode(Mine("x"), channel="c")
    assert same(Mine("x"), back(Mine("x"), Codec.build([Mine])))


def test_a_pattern_that_prints_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pattern = re.compile("printed", re.DEBUG)
    capsys.readouterr()
    with pytest.raises(errors.StateTypeError, match=r"re\.DEBUG"):
        CODEC.encode(pattern, channel="c")
    with pytest.raises(errors.CorruptCheckpoint):
        CODEC.decode(crafted(Code.PATTERN, "printed too", int(re.DEBUG)), channel="c")
    assert not capsys.readouterr().out


def test_objects_with_more_than_their_fields_are_refused() -> None:
    class Loose(Pair):
        pass

    loose = Loose(1, 2)
    codec = Codec.build([Loose, Inner])
    assert same(loose, back(loose, codec))
    loose.more = 1
    with pytest.raises(errors.StateTypeError, match="more than its fields"):
        codec.encode(loose, channel="c")
    counter = Counter("a")
    counter.more = 1
    with pytest.raises(errors.StateTypeError, match="attributes"):
        codec.encode(counter, channel="c")
    model = Inner()
    del model.__dict__["v"]
    with pytest.raises(errors.StateTypeError, match="'v'"):
        codec.encode(model, channel="c")
    model = Inner()
    model.__dict__["more"] = 1
    with pytest.raises(errors.StateTypeError, match="'more'"):
        codec.encode(model, channel="c")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    table: dict[object, object] = {}
    table[(1,)] = table
    model = Inner()
    model.v = model
    box = Box(None)
    box.item = [box, box]
    for value in (loop, table, model, box):
        with pytest.raises(errors.StateTypeError, match="contains itself"):
            CODEC.encode(value, channel="c")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x],
        lambda x: (x,),
        lambda x: {"a": x},
        lambda x: {1: x},
        Box,
        lambda x: Inner(v=x),
        lambda x: frozenset({x}),
    ],
)
def test_nesting_is_kept_up_to_a_limit_and_refused_beyond(wrap: typing.Callable[[object], object]) -> None:
    value: object = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert type(back(value)) is type(value)
    with pytest.raises(errors.StateTypeError, match="nested"):
        CODEC.encode(wrap(value), channel="c")
    for _ in range(5000):
        value = [value]
    with pytest.raises(errors.StateTypeError, match="nested"):
        CODEC.encode(value, channel="c")


def test_a_short_call_stack_gives_a_typed_error() -> None:
    value: object = 1
    for _ in range(MAX_DEPTH):
        value = (value,)
    data = CODEC.encode(value, channel="c")

    def at_the_end_of_the_stack(call: typing.Callable[[], object]) -> object:
        try:
            return at_the_end_of_the_stack(call)
        except RecursionError:
            return call()

    for call in (lambda: CODEC.encode(value, channel="c"), lambda: CODEC.decode(data, channel="c")):
        with pytest.raises(errors.StateTypeError):
            at_the_end_of_the_stack(call)


def test_code_of_the_app_that_raises_becomes_a_typed_error() -> None:
    @dataclasses.dataclass
    class Rude:
        x: int = 0

        def __getattribute__(self, name: str) -> object:
            if name == "x":
                raise ZeroDivisionError
            return object.__getattribute__(self, name)

    with pytest.raises(errors.StateTypeError, match="ZeroDivisionError"):
        Codec.build([Rude]).encode(Rude(), channel="c")


def test_an_exception_on_the_error_channel_is_stored_as_its_repr() -> None:
    class Silent(Exception):
        def __repr__(self) -> str:
            raise RuntimeError

    def stored(error: BaseException) -> object:
        return STRICT.decode(STRICT.encode(error, channel="__error__"), channel="__error__")

    assert stored(ValueError("x")) == "ValueError('x')"
    assert stored(KeyboardInterrupt()) == "KeyboardInterrupt()"
    assert stored(Silent()) == "Silent(...)"
    with pytest.raises(errors.StateTypeError):
        STRICT.encode([ValueError("x")], channel="__error__")


# -- the list -------------------------------------------------------------------------------------------------------


def test_allowing_returns_the_same_codec_when_nothing_is_new() -> None:
    known = [
        *(str, dict, dt.datetime, uuid.UUID, lc.AIMessage, Send),
        *(("langchain_core.messages.ai", "AIMessage"), ("langchain_core.documents.base", "Document")),
    ]
    assert STRICT.allowing(known) is STRICT
    more = STRICT.allowing([Color, ("uuid", "SafeUUID")])
    assert more is not STRICT
    assert more.allowing([Color, ("uuid", "SafeUUID"), (Color.__module__, "Color")]) is more
    with pytest.raises(errors.StateTypeError):
        STRICT.encode(Color.RED, channel="c")
    assert back(Color.RED, more) is Color.RED


def test_a_pair_is_imported_when_it_is_met() -> None:
    codec = Codec.build(
        [("uuid", "SafeUUID"), ("urllib.parse", "ParseResult"), ("no_such_module", "X"), ("os", "system")]
    )
    from urllib.parse import urlparse

    assert same(urlparse("http://a/b"), back(urlparse("http://a/b"), codec))
    assert back(uuid.SafeUUID.safe, codec) is uuid.SafeUUID.safe
    with pytest.raises(errors.StateTypeError, match="no_such_module"):
        codec.decode(crafted(Code.ENUM, "no_such_module", "X", "A"), channel="c")
    with pytest.raises(errors.StateTypeError, match="not a class"):
        codec.decode(crafted(Code.DATACLASS, "os", "system", {}), channel="c")


@pytest.mark.parametrize("item", ["Color", ("a",), ("a", 1), 3, Color.RED, ("a", "b", "c")])
def test_a_list_of_anything_else_is_refused(item: object) -> None:
    with pytest.raises(errors.ConfigError, match="allow"):
        Codec.build([item])


def test_two_classes_of_one_name_are_not_mixed_up() -> None:
    def make() -> type:
        @dataclasses.dataclass
        class Twin:
            x: int = 0

        return Twin

    one, two = make(), make()
    codec = Codec.build([one])
    assert type(back(one(), codec)) is one
    with pytest.raises(errors.StateTypeError, match="come back as the other"):
        codec.encode(two(), channel="c")


def test_a_class_that_calls_itself_a_message_is_not_one() -> None:
    fake = create_model("AIMessage", __module__="langchain_core.messages.ai", content=(str, ""))
    with pytest.raises(errors.StateTypeError, match="come back as the other"):
        STRICT.encode(fake(), channel="c")


# -- foreign bytes --------------------------------------------------------------------------------------------------

CLASS_CODES = [Code.ENUM, Code.NAMED_TUPLE, Code.DATACLASS, Code.MODEL, Code.SLOTS]


def crafted(code: int, *parts: object) -> bytes:
    return pack(ormsgpack.Ext(code, pack(list(parts))))


@pytest.mark.parametrize("code", CLASS_CODES)
@pytest.mark.parametrize("parts", [("echo x",), ({"x": "echo x"},), ({}, None, None), ([], [], {})])
def test_bytes_that_name_what_is_not_on_the_list_call_and_import_nothing(
    code: Code, parts: tuple[object, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    monkeypatch.setattr(os, "system", called.append)
    monkeypatch.setattr("builtins.eval", called.append)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pancake_marker_module.py").write_text("X = 1\n")
    names = [
        *(("os", "system"), ("builtins", "eval"), ("pancake_marker_module", "X"), (Point.__module__, "Point")),
        *(("langchain_core.messages", "os"), ("langgraph.types", "interrupt"), ("re", "compile"), ("", "")),
    ]
    for module, name in names:
        with pytest.raises(errors.StateTypeError, match=f"'ch'.*{re.escape(name)}.*allow="):
            STRICT.decode(crafted(code, module, name, *parts), channel="ch")
    assert not called
    assert "pancake_marker_module" not in sys.modules


@pytest.mark.parametrize("code", CLASS_CODES)
def test_a_class_is_read_only_as_the_kind_it_is(code: Code) -> None:
    for kind, own in ((Color, Code.ENUM), (Pair, Code.NAMED_TUPLE), (Point, Code.DATACLASS), (Inner, Code.MODEL)):
        data = crafted(code, kind.__module__, kind.__qualname__, "RED" if own is Code.ENUM else {"a": 1, "x": 1})
        if code is own:
            assert isinstance(CODEC.decode(data, channel="c"), kind)
        else:
            with pytest.raises(errors.StateTypeError, match=kind.__name__):
                CODEC.decode(data, channel="c")


def test_rows_of_the_permissive_serializer_are_refused() -> None:
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

    _, data = JsonPlusSerializer().dumps_typed({"m": [lc.HumanMessage("x")], "d": Decimal(1), "p": Point(1)})
    with pytest.raises(errors.CheckpointError):
        CODEC.decode(data, channel="c")
    called = pack(ormsgpack.Ext(0, ormsgpack.packb(("os", "strerror", 2))))
    with pytest.raises(errors.CorruptCheckpoint):
        CODEC.decode(called, channel="c")


def test_stored_attributes_never_change_the_class_of_an_object() -> None:
    for name in ("__class__", "__dict__", "__post_init__"):
        data = crafted(Code.DATACLASS, Box.__module__, "Box", {"item": 1}, [], {name: 3})
        assert type(CODEC.decode(data, channel="c")) is Box


@settings(max_examples=500)
@given(st.binary(max_size=60))
def test_random_bytes_raise_typed_errors_only(data: bytes) -> None:
    only_typed_errors(data)


SAMPLES = [CODEC.encode(value, channel="c") for value in EVERYTHING]


@settings(max_examples=3000)
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_bytes_raise_typed_errors_only(sample: bytes, data: st.DataObject) -> None:
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255) | st.sampled_from([damaged[at] ^ (1 << bit) for bit in range(8)]))
    only_typed_errors(bytes(damaged))


@given(st.sampled_from(SAMPLES), st.data())
def test_cut_or_lengthened_bytes_are_corrupt(sample: bytes, data: st.DataObject) -> None:
    cut = sample[: data.draw(st.integers(0, len(sample) - 1))]
    with pytest.raises(errors.CorruptCheckpoint, match="'ch'"):
        CODEC.decode(cut, channel="ch")
    with pytest.raises(errors.CorruptCheckpoint):
        CODEC.decode(sample + data.draw(st.binary(min_size=1, max_size=9)), channel="ch")


@settings(max_examples=500)
@given(st.integers(0, 127), st.recursive(LEAVES, lambda x: st.lists(x, max_size=9), max_leaves=12))
def test_every_code_with_any_payload_raises_typed_errors_only(code: int, payload: object) -> None:
    only_typed_errors(pack(ormsgpack.Ext(code, CODEC.encode(payload, channel="c"))))
    for kind in (Color, Mode, Pair, Point, Model):
        head = [kind.__module__, kind.__qualname__]
        rest = [CODEC.decode(CODEC.encode(payload, channel="c"), channel="c")]
        if isinstance(rest[0], list):
            only_typed_errors(pack(ormsgpack.Ext(code, CODEC.encode(head + rest[0], channel="c"))))
        only_typed_errors(pack(ormsgpack.Ext(code, CODEC.encode(head + rest, channel="c"))))


def only_typed_errors(data: bytes) -> None:
    logging.disable(logging.WARNING)
    message = "'c'"
    try:
        CODEC.decode(data, channel="c")
    except errors.CheckpointError as error:
        message = str(error)
    finally:
        logging.disable(logging.NOTSET)
    assert "'c'" in message


@pytest.mark.parametrize("lists", [0, 5, 120, 250, 1000])
def test_payloads_that_nest_without_end_do_not_overrun_the_stack(lists: int) -> None:
    data = pack(1)
    for _ in range(5000 if lists < 100 else 300):
        data = b"\x91" * lists + pack(ormsgpack.Ext(Code.TUPLE, b"\x91" + data))
    outcome: list[object] = []

    def read() -> None:
        try:
            CODEC.decode(data, channel="c")
        except errors.CheckpointError as error:
            outcome.append(type(error))

    before = threading.stack_size(2 << 20)
    try:
        thread = threading.Thread(target=read)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert outcome == [errors.CorruptCheckpoint]


def test_deep_values_fit_a_small_stack() -> None:
    value: object = 1
    for _ in range(MAX_DEPTH // 2):
        value = [(value,)]
    outcome: list[object] = []
    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=lambda: outcome.append(back(value)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert same(value, outcome[0])


def test_an_array_that_claims_more_than_it_has_allocates_nothing() -> None:
    for shape in ([2**40], [2**62, 2**62], [-1], [1.0], "ab"):
        with pytest.raises(errors.CorruptCheckpoint):
            CODEC.decode(crafted(Code.ARRAY, "<f8", shape, "C", True, b"12345678"), channel="c")
    with pytest.raises(errors.CorruptCheckpoint):
        CODEC.decode(crafted(Code.ARRAY, "|O", [1], "C", True, b"12345678"), channel="c")


def test_an_interrupt_passes_through() -> None:
    class Stop(BaseException):
        pass

    @dataclasses.dataclass
    class Old:
        x: int = 1

    def stop() -> int:
        raise Stop

    old = Codec.build([Old])
    data = old.encode(Old(), channel="c")
    new = dataclasses.make_dataclass("Old", [("x", int), ("y", int, dataclasses.field(default_factory=stop))])
    with pytest.raises(Stop):
        renamed(new, Old).decode(data, channel="c")


# -- classes that changed -------------------------------------------------------------------------------------------


def renamed(new: type, old: type) -> Codec:
    new.__module__, new.__qualname__ = old.__module__, old.__qualname__
    return Codec.build([new])


def stored_then_read(old: typing.Any, value: object, new: type) -> typing.Any:
    data = Codec.build([old]).encode(value, channel="ch")
    return renamed(new, old).decode(data, channel="ch")


def test_a_new_field_takes_its_default() -> None:
    data = dataclasses.make_dataclass(
        "New", [("x", int), ("y", list, dataclasses.field(default_factory=lambda: [1])), ("z", int, 5)]
    )
    read = stored_then_read(Base, Base(3), data)
    assert (read.x, read.y, read.z) == (3, [1], 5)
    model = create_model("New", v=(int, 0), w=(list[int], Field(default_factory=lambda: [1])), z=(int, 5))
    read = stored_then_read(Inner, Inner(v=3), model)
    assert (read.v, read.w, read.z, read.model_fields_set) == (3, [1], 5, {"v"})
    tuple_ = namedtuple("New", "a b c", defaults=[9])
    assert stored_then_read(Pair, Pair(1, 2), tuple_) == (1, 2, 9)


def broken() -> int:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        (Base, Base(1), dataclasses.make_dataclass("New", ["x", "needed"])),
        (Inner, Inner(v=1), create_model("New", v=(int, 0), needed=(int, ...))),
        (Pair, Pair(1), namedtuple("New", "a b needed")),
        (Color, Color.RED, enum.Enum("New", ["needed"])),
        (Mode, Mode.W, enum.Flag("New", ["needed"])),
        (
            Base,
            Base(1),
            dataclasses.make_dataclass(
                "New", ["x", ("needed", int, dataclasses.field(default_factory=lambda: 1 // 0))]
            ),
        ),
        (Base, Base(1), create_model("New", x=(int, 0))),
        (Color, Color.RED, dataclasses.make_dataclass("New", ["x"])),
    ],
)
def test_a_class_that_no_longer_fits_is_named(old: type, value: object, new: type) -> None:
    with pytest.raises(errors.StateTypeError, match=f"'ch'.*{old.__qualname__}"):
        stored_then_read(old, value, new)


def test_a_field_that_is_gone_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    @dataclasses.dataclass
    class Gone:
        x: int = 1
        gone_field: int = 2

    new = dataclasses.make_dataclass("Gone", [("x", int)])
    for _ in range(3):
        assert stored_then_read(Gone, Gone(5), new).x == 5
    assert [record.getMessage().count("gone_field") for record in caplog.records] == [1]

    class GoneModel(BaseModel):
        x: int = 1
        gone_field: int = 2

    model = create_model("GoneModel", x=(int, 0))
    read = stored_then_read(GoneModel, GoneModel(x=5, gone_field=3), model)
    assert (read.x, read.model_fields_set, read.model_extra) == (5, {"x"}, None)
    assert "gone_field" in caplog.text
    assert "3" not in caplog.records[-1].getMessage().partition("GoneModel")[2]


def test_a_field_that_is_gone_from_a_model_with_extras_becomes_one() -> None:
    model = create_model("New", __config__=ConfigDict(extra="allow"), w=(int, 0))
    read = stored_then_read(Inner, Inner(v=(1,)), model)
    assert (read.model_extra, read.model_fields_set) == ({"v": (1,)}, {"v"})


def test_an_extra_that_was_declared_since_becomes_the_field() -> None:
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")

    new = create_model("New", __config__=ConfigDict(extra="allow"), declared=(int, ...))
    read = stored_then_read(Open, Open(declared=4, other=5), new)
    assert (read.declared, read.model_extra, read.model_fields_set) == (4, {"other": 5}, {"declared", "other"})


def test_private_attributes_come_and_go() -> None:
    class Private(BaseModel):
        _old: int = PrivateAttr(default=1)

    class New(BaseModel):
        _new: list[int] = PrivateAttr(default_factory=lambda: [1])
        _unset: int = PrivateAttr()

    read = stored_then_read(Private, Private(), New)
    assert read._new == [1]
    assert read.__pydantic_private__ == {"_new": [1]}


# -- the rest -------------------------------------------------------------------------------------------------------


def test_numpy_is_imported_only_for_its_own_values() -> None:
    code = (
        "import sys\n"
        "from pancake_langgraph.checkpoint.codec import Codec\n"
        "codec = Codec.build()\n"
        "codec.decode(codec.encode({'a': (1, 2.5)}, channel='c'), channel='c')\n"
        "print(sorted({'numpy', 'redis', 'cryptography'} & set(sys.modules)))\n"
        "codec.decode(bytes.fromhex(sys.argv[1]), channel='c')\n"
        "print('numpy' in sys.modules)"
    )
    data = CODEC.encode(np.arange(3), channel="c").hex()
    done = subprocess.run([sys.executable, "-c", code, data], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]


def test_one_codec_serves_many_threads() -> None:
    codec = Codec.build(APP)
    expected = [CODEC.encode(value, channel="c") for value in EVERYTHING]
    start = threading.Barrier(6)
    wrong: list[object] = []

    def work() -> None:
        start.wait()
        for value, data in zip(EVERYTHING, expected, strict=True):
            if codec.encode(value, channel="c") != data or not same(value, codec.decode(data, channel="c")):
                wrong.append(value)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_errors_do_not_show_what_is_stored() -> None:
    for value in (Decimal("12345"), ipaddress.ip_address("10.9.8.7")):
        data = CODEC.encode(value, channel="c").replace(b"1", b"x")
        with pytest.raises(errors.CorruptCheckpoint) as caught:
            CODEC.decode(data, channel="c")
        assert "x" + str(value)[1:] not in str(caught.value)
    with pytest.raises(errors.StateTypeError) as refused:
        CODEC.encode({"key": ["hunter2", object()]}, channel="c")
    assert "hunter2" not in str(refused.value)
