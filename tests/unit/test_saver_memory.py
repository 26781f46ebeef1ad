"""What a saver remembers never shows in what it stores: each step equals what a saver that remembers nothing stores."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.base.id import uuid6

from pancake_langgraph import PancakeSaver
from pancake_langgraph._errors import CorruptCheckpoint, StateTypeError
from pancake_langgraph.checkpoint.chunks import CHUNK
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.elements import FANOUT
from pancake_langgraph.checkpoint.memory import Latest, Remembered
from pancake_langgraph.checkpoint.rows import Spot

GONE = "DELETE FROM elements WHERE hash = ?"
LONG = 9 * CHUNK + 5
EDGES = (0, 1, FANOUT - 1, FANOUT, FANOUT + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, FANOUT * FANOUT + 1)


@pytest.fixture
def saver() -> Iterator[PancakeSaver]:
    with PancakeSaver() as made:
        yield made


def message(number: int, rng: random.Random) -> Any:
    text = f"{number}: {'word ' * rng.randrange(40)}"
    match rng.randrange(4):
        case 0:
            return HumanMessage(text, id=f"h{number}")
        case 1:
            call = {"name": "look", "args": {"at": [number, {"deep": [1]}]}, "id": f"c{number}"}
            return AIMessage(text, id=f"a{number}", tool_calls=[call], response_metadata={"model": "m", "n": [number]})
        case 2:
            return ToolMessage(text, tool_call_id=f"c{number}", id=f"t{number}", artifact={"rows": [number]})
        case _:
            return AIMessage([{"type": "text", "text": text}], id=f"b{number}", additional_kwargs={"k": {"v": number}})


def messages(count: int, *, start: int = 0) -> list[Any]:
    rng = random.Random(start)
    return [message(start + number, rng) for number in range(count)]


class Note(HumanMessage):
    """A message of the app."""


class Thread:
    """One thread, written by LangGraph's rules; `value` is a channel that changes with every step."""

    def __init__(self, saver: PancakeSaver) -> None:
        self.saver = saver
        self.config: RunnableConfig = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        self.version = 0

    def step(self, value: list[Any]) -> tuple[RunnableConfig, Any, Any, Any]:
        self.version += 1
        checkpoint = empty_checkpoint()
        checkpoint["id"] = str(uuid6())
        checkpoint["channel_values"] = {"messages": value}
        checkpoint["channel_versions"] = {"messages": self.version}
        return self.config, checkpoint, {"source": "loop", "step": self.version}, {"messages": self.version}

    def put(self, value: list[Any]) -> None:
        self.config = self.saver.put(*self.step(value))

    async def aput(self, value: list[Any]) -> None:
        self.config = await self.saver.aput(*self.step(value))

    def read(self) -> list[Any]:
        found = self.saver.get_tuple({"configurable": {"thread_id": "1"}})
        assert found is not None
        value = found.checkpoint["channel_values"]["messages"]
        assert isinstance(value, list)
        return value

    def stored(self) -> tuple[Any, Sequence[bytes]]:
        """Return the reference to the latest value, and its encoded items as they lie in the store."""
        core, codec = self.saver._core, self.saver._codec
        row = core.store.get_checkpoint("1", "", None)
        assert row is not None
        ref = core.record("1", row).values["messages"]
        value = core.values(codec, "1", {"messages": ref}, {})["messages"]
        assert isinstance(value, list)
        return ref, [codec.encode(item, channel="messages") for item in value]


def assert_exact(thread: Thread, value: list[Any]) -> None:
    """The stored bytes are those that a saver without memory stores for the same value, and all of them are there."""
    with PancakeSaver() as fresh:
        expected = Thread(fresh)
        expected.put(value)
        assert thread.stored() == expected.stored()


Edit = Callable[[list[Any], random.Random], list[Any]]


def append(value: list[Any], rng: random.Random) -> list[Any]:
    return [*value, *messages(rng.choice((1, 1, 2, FANOUT)), start=rng.randrange(10**9))]


def edit_field(value: list[Any], rng: random.Random) -> list[Any]:
    rng.choice(value).content = f"changed {rng.random()}"
    return [*value]


def edit_nested(value: list[Any], rng: random.Random) -> list[Any]:
    found = rng.choice(value)
    part = rng.choice([part for part in vars(found).values() if isinstance(part, dict | list)])
    while inner := [x for x in (part.values() if isinstance(part, dict) else part) if isinstance(x, dict | list)]:
        part = rng.choice(inner)
    if isinstance(part, dict):
        part[f"new {rng.random()}"] = [rng.random()]
    elif found.type == "ai" and part is found.tool_calls:
        part.append({"name": "more", "args": {}, "id": "x"})
    else:
        part.append({"type": "text", "text": str(rng.random())})
    return [*value]


def edit_extra(value: list[Any], rng: random.Random) -> list[Any]:
    found = rng.choice(value)
    found.__pydantic_extra__[f"extra{rng.randrange(3)}"] = rng.random()
    return [*value]


def rename_key(value: list[Any], rng: random.Random) -> list[Any]:
    for found in value:
        if found.additional_kwargs:
            key, held = found.additional_kwargs.popitem()
            found.additional_kwargs[f"{key}'"] = held
            break
    return [*value]


def swap(value: list[Any], rng: random.Random) -> list[Any]:
    value = [*value]
    one, two = rng.randrange(len(value)), rng.randrange(len(value))
    value[one], value[two] = value[two], value[one]
    return value


def delete(value: list[Any], rng: random.Random) -> list[Any]:
    value = [*value]
    del value[rng.randrange(len(value))]
    return value


def truncate(value: list[Any], rng: random.Random) -> list[Any]:
    return value[: rng.choice([edge for edge in (*EDGES, len(value) - 1) if edge <= len(value)])]


def drop_oldest(value: list[Any], rng: random.Random) -> list[Any]:
    return value[rng.choice((1, 2, FANOUT)) :]


def copy_some(value: list[Any], rng: random.Random) -> list[Any]:
    return [copy.deepcopy(found) if rng.random() < 0.1 else found for found in value]


def edit_copied(value: list[Any], rng: random.Random) -> list[Any]:
    value = [copy.deepcopy(found) for found in value]
    return edit_nested(value, rng)


def repeat(value: list[Any], rng: random.Random) -> list[Any]:
    return [*value, rng.choice(value)]


def replace_container(value: list[Any], rng: random.Random) -> list[Any]:
    """An equal container takes the place of one, and is changed a step later by `edit_nested`."""
    found = rng.choice(value)
    found.additional_kwargs = copy.deepcopy(found.additional_kwargs)
    found.__pydantic_fields_set__.add("additional_kwargs")
    found.content = f"and changed {rng.random()}"  # else only the mark would be new, which is not noticed
    return [*value]


EDITS: tuple[Edit, ...] = (
    append,
    append,
    append,
    edit_field,
    edit_nested,
    edit_nested,
    edit_extra,
    rename_key,
    swap,
    delete,
    truncate,
    drop_oldest,
    copy_some,
    edit_copied,
    repeat,
    replace_container,
)


@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_of_edits_is_stored_as_without_memory(saver: PancakeSaver, seed: int) -> None:
    rng = random.Random(seed)
    thread = Thread(saver)
    value = messages(rng.choice((3, FANOUT, CHUNK + 3)), start=seed)
    thread.put(value)
    for _ in range(25):
        value = rng.choice(EDITS)(value or messages(1), rng)
        thread.put(value)
        assert_exact(thread, value)


@pytest.mark.parametrize("is_read_first", [False, True])
def test_a_long_list_is_stored_as_without_memory(saver: PancakeSaver, *, is_read_first: bool) -> None:
    rng = random.Random(7)
    thread = Thread(saver)
    value = messages(LONG)
    thread.put(value)
    for edit in (append, edit_nested, edit_field, append, edit_extra, swap, delete, drop_oldest, truncate, append):
        if is_read_first:
            found = saver.get_tuple({"configurable": {"thread_id": "1"}})
            assert found is not None
            value = found.checkpoint["channel_values"]["messages"]
        value = edit(value, rng)
        thread.put(value)
        assert_exact(thread, value)


async def test_async_and_sync_steps_share_what_is_remembered(saver: PancakeSaver) -> None:
    rng = random.Random(11)
    thread = Thread(saver)
    value = messages(LONG)
    await thread.aput(value)
    for number, edit in enumerate((append, edit_nested, append, edit_field, edit_copied, append, truncate, append)):
        value = edit(value, rng)
        if number % 3 == 1:
            thread.put(value)
        else:
            await thread.aput(value)
        assert_exact(thread, value)


@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, LONG // 2, LONG - 1])
@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "content", "other"),
        lambda m: m.additional_kwargs.update(new=[]),
        lambda m: m.response_metadata.update(n=[1, [2]]),
        lambda m: m.tool_calls.append({"name": "n", "args": {}, "id": "i"}),
        lambda m: m.__pydantic_extra__.update(extra=1),
        lambda m: setattr(m, "response_metadata", {"whole": "new"}),
        lambda m: m.additional_kwargs["kept"]["deep"].append(2),
    ],
    ids=["field", "empty", "metadata", "calls", "extra", "container", "deep"],
)
def test_a_message_changed_in_place_is_stored_changed(
    saver: PancakeSaver, at: int, change: Callable[[AIMessage], object]
) -> None:
    value: list[Any] = [AIMessage(f"text {number}", id=f"{number}") for number in range(LONG)]
    value[at].additional_kwargs["kept"] = {"deep": [1]}
    thread = Thread(saver)
    thread.put(value)
    value = [*value, HumanMessage("new")]
    thread.put(value)
    change(value[at])
    value = [*value, HumanMessage("newer")]
    thread.put(value)
    found = saver.get_tuple({"configurable": {"thread_id": "1"}})
    assert found is not None
    read = found.checkpoint["channel_values"]["messages"]
    assert read == value
    assert read[at].__pydantic_extra__ == value[at].__pydantic_extra__


def test_equal_items_of_other_types_are_not_taken_for_the_same(saver: PancakeSaver) -> None:
    thread = Thread(saver)
    plain = [True, 1, 1.0, False, 0, None, "a", b"a", "", -0.0, 0.0]
    value: list[Any] = plain * 13
    thread.put(value)
    for shift in range(1, len(plain)):
        value = [*value[shift:], *value[:shift]]
        thread.put(value)
        assert_exact(thread, value)
    value = [{True: 1, False: 0.0}.get(item, item) if type(item) is bool else item for item in value]
    thread.put(value)
    assert_exact(thread, value)


def test_items_that_cannot_be_recognized_are_stored_anew(saver: PancakeSaver) -> None:
    thread = Thread(saver)
    inner = {"n": [1]}
    odd = HumanMessage("odd", additional_kwargs={"array": np.arange(3)})
    value: list[Any] = [*messages(CHUNK), inner, odd, ("tuple", [1])]
    thread.put(value)
    for number in range(3):
        inner["n"].append(number)
        odd.additional_kwargs["array"][0] = number + 7
        value = [*value, *messages(1, start=number + 10_000)]
        thread.put(value)
        assert_exact(thread, value)


def test_a_list_of_a_message_that_got_an_array_is_stored(saver: PancakeSaver) -> None:
    thread = Thread(saver)
    value: list[Any] = [HumanMessage("a", additional_kwargs={"x": [1, 2]}), *messages(3)]
    thread.put(value)
    value[0].additional_kwargs["x"] = np.array([1, 2])
    value = [*value, HumanMessage("b")]
    thread.put(value)
    assert_exact(thread, value)


@pytest.mark.parametrize("count", EDGES)
def test_lists_that_grow_over_an_edge_are_stored_as_without_memory(saver: PancakeSaver, count: int) -> None:
    thread = Thread(saver)
    value = messages(count)
    thread.put(value)
    for number in range(3):
        value = [*value, *messages(1, start=count + number)]
        thread.put(value)
        assert_exact(thread, value)
    thread.put(value[:count])
    assert_exact(thread, value[:count])


def test_a_value_that_is_refused_leaves_what_is_remembered_as_it_was(saver: PancakeSaver) -> None:
    thread = Thread(saver)
    value = messages(CHUNK + 1)
    thread.put(value)
    with pytest.raises(StateTypeError):
        thread.put([*value, object()])
    value = [*value, HumanMessage("fine")]
    thread.put(value)
    assert_exact(thread, value)


def test_a_pruned_list_is_stored_whole_again(tmp_path: Path) -> None:
    with PancakeSaver(tmp_path / "app.db") as saver, PancakeSaver(tmp_path / "app.db") as other:
        thread = Thread(saver)
        value = messages(LONG)
        thread.put(value)
        parent = thread.config
        thread.put([HumanMessage("short")])
        other.prune(["1"])
        thread.config = parent
        thread.put([*value, HumanMessage("late")])
        assert_exact(thread, [*value, HumanMessage("late")])


def test_an_append_encodes_the_new_item_and_shares_the_rest(saver: PancakeSaver) -> None:
    thread = Thread(saver)
    value = messages(LONG)
    thread.put(value)
    first = remembered(saver)
    thread.put([*value, HumanMessage("x" * 200)])
    second = remembered(saver)
    assert second.num_items == first.num_items + 1
    assert [a is b for a, b in zip(first.chunks, second.chunks, strict=True)] == [True] * 9 + [False]
    assert [*second.entries()][:LONG] == [*first.entries()]


def test_an_append_stores_a_message_and_the_path_to_it(saver: PancakeSaver) -> None:
    thread = Thread(saver)
    value = messages(3 * FANOUT * FANOUT // 2)
    thread.put(value)
    plan = saver._core.plan_put(saver._codec, *thread.step([*value, HumanMessage("x" * 200)]))
    assert len(plan.put.elements) == 3  # the message, its leaf, and the one node that is new


def test_a_window_that_moves_encodes_only_what_is_new(saver: PancakeSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = Thread(saver)
    value = messages(2 * CHUNK)
    thread.put(value)
    encoded: list[object] = []
    encode = type(saver._codec).encode

    def counted(codec: Any, item: object, *, channel: str) -> bytes:
        if channel == "messages":
            encoded.append(item)
        return encode(codec, item, channel=channel)

    monkeypatch.setattr(type(saver._codec), "encode", counted)
    new = HumanMessage("new")
    value = [*value[1:], new]
    thread.put(value)
    assert encoded == [new]
    monkeypatch.undo()
    assert_exact(thread, value)


# -- reading what is remembered -------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was decoded of the messages since the test began."""
    found: list[object] = []
    decode = Codec.decode

    def counted(codec: Codec, data: bytes, *, channel: str) -> object:
        value = decode(codec, data, channel=channel)
        if channel == "messages":
            found.append(value)
        return value

    monkeypatch.setattr(Codec, "decode", counted)
    return found


def parts(value: object) -> Iterator[object]:
    """Yield everything in a value that can be changed."""
    if isinstance(value, BaseMessage):
        yield from (value, value.__pydantic_fields_set__, value.__pydantic_extra__)
        yield from parts(value.__dict__)
    elif isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from parts(item)


def described(value: Sequence[Any]) -> list[object]:
    """Return all there is to see of messages, in its order."""
    return [
        (
            type(m),
            [*m.__dict__.items()],
            m.__pydantic_fields_set__,
            m.__pydantic_extra__,
            m.__pydantic_private__,
            repr(m),
        )
        for m in value
    ]


def every_kind(count: int) -> list[Any]:
    more = [
        SystemMessage("rules"),
        RemoveMessage("h1"),
        AIMessage("a", usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}, id="u"),
        HumanMessage("named", name="n"),
        AIMessage.model_construct(content="made", type="ai"),
        HumanMessage("extra", more=[1]),
        Note("app"),
        HumanMessage("keys", additional_kwargs={"by": {(1, 2): "pair", 3: "three"}}),
        "text",
        7,
    ]
    return [*more, *messages(count)]


@pytest.mark.parametrize("count", [*EDGES, LONG])
@pytest.mark.parametrize("has_been_read", [False, True])
def test_what_is_remembered_is_read_as_it_would_be_decoded(count: int, *, has_been_read: bool) -> None:
    with PancakeSaver(allow=[Note]) as saver:
        thread = Thread(saver)
        thread.put(every_kind(count))
        if has_been_read:
            thread.read()
        remembered_value = thread.read()
        saver._core.memory.forget("1")
        decoded_value = thread.read()
    assert remembered_value == decoded_value
    kinds = [m for m in remembered_value if isinstance(m, BaseMessage)]
    assert described(kinds) == described([m for m in decoded_value if isinstance(m, BaseMessage)])


def test_a_read_of_what_is_remembered_decodes_no_message(saver: PancakeSaver, decoded: list[object]) -> None:
    thread = Thread(saver)
    value = messages(LONG)
    thread.put(value)
    assert thread.read() == value
    assert thread.read() == value
    assert decoded == []


def test_what_another_saver_stored_is_decoded(tmp_path: Path, decoded: list[object]) -> None:
    with PancakeSaver(tmp_path / "app.db") as saver, PancakeSaver(tmp_path / "app.db") as other:
        thread = Thread(saver)
        value = messages(LONG)
        thread.put(value)
        thread.saver = other
        thread.put([*value, HumanMessage("more")])
        thread.saver = saver
        assert thread.read() == [*value, HumanMessage("more")]
        assert decoded == [HumanMessage("more")]
        for edit in (swap, delete, drop_oldest, truncate):
            thread.saver, value = other, edit(value, random.Random(3))
            thread.put(value)
            thread.saver = saver
            assert thread.read() == value


def test_values_that_were_read_share_nothing_that_can_change(saver: PancakeSaver) -> None:
    thread = Thread(saver)
    value = messages(CHUNK + 3)
    thread.put(value)
    lists = [value, thread.read(), thread.read(), thread.read()]
    seen = [id(part) for found in lists for part in parts(found)]
    assert len(seen) == len({*seen})


@pytest.mark.parametrize("count", [5, 600, 2_000])
def test_a_change_of_what_was_read_reaches_no_later_read(saver: PancakeSaver, count: int) -> None:
    rng = random.Random(count)
    thread = Thread(saver)
    value = messages(count)
    expected = copy.deepcopy(value)
    thread.put(value)
    for edit in (edit_field, edit_nested, edit_extra, edit_nested):
        edit(value, rng)
        value = thread.read()
        assert value == expected
        assert described(value) == described(expected)


@pytest.mark.parametrize("count", [600, 2_000])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_change_of_an_old_message_is_stored_and_read(saver: PancakeSaver, count: int, mode: str) -> None:
    thread = Thread(saver)
    value: list[Any] = messages(count)
    thread.put(value)
    for at in (0, count // 2, count - 1):
        value = thread.read()
        value[at].additional_kwargs["new"] = [{"at": at}]
        value = [*value, HumanMessage(f"after {at}")]
        await (thread.aput(value) if mode == "async" else asyncio.to_thread(thread.put, value))
        assert thread.read() == value
        saver._core.memory.forget("1")
        assert thread.read() == value


def test_a_value_that_counts_as_unchanged_is_read_as_it_was_stored(saver: PancakeSaver) -> None:
    thread = Thread(saver)
    value: list[Any] = [HumanMessage("a", additional_kwargs={"is": True}), *messages(3)]
    thread.put(value)
    value[0].additional_kwargs["is"] = 1
    value[0].__pydantic_fields_set__.add("name")
    for _ in range(2):  # moved, and then where it was
        value = [*messages(1, start=50), *value]
        thread.put(value)
        read = thread.read()
        saver._core.memory.forget("1")
        assert described(read) == described(thread.read())
        thread.put(value)


def test_a_class_that_is_not_allowed_is_refused_although_it_is_remembered(saver: PancakeSaver) -> None:
    thread = Thread(saver)
    thread.saver = saver.with_allowlist([(Note.__module__, Note.__qualname__)])
    thread.put([Note("app")])
    assert thread.read() == [Note("app")]
    thread.saver = saver
    with pytest.raises(StateTypeError, match="Note"):
        thread.read()


@pytest.mark.parametrize("damage", ["UPDATE elements SET data = zeroblob(40) WHERE hash = ?", GONE])
def test_damage_is_found_although_all_is_remembered(tmp_path: Path, damage: str) -> None:
    with PancakeSaver(tmp_path / "app.db") as saver, contextlib.closing(sqlite3.connect(tmp_path / "app.db")) as file:
        thread = Thread(saver)
        thread.put([HumanMessage("x" * 200, id=f"{number}") for number in range(CHUNK)])
        thread.read()
        for digest, data in file.execute("SELECT hash, data FROM elements").fetchall()[::16]:
            file.execute(damage, (digest,))
            file.commit()
            with pytest.raises(CorruptCheckpoint):
                thread.read()
            file.execute("INSERT OR REPLACE INTO elements VALUES (1, ?, ?)", (digest, data))
            file.commit()
        assert len(thread.read()) == CHUNK


def remembered(saver: PancakeSaver) -> Remembered:
    latest: Latest | None = saver._core.memory.get("1", "")
    assert latest is not None
    channels: Mapping[str, Remembered] = latest.channels
    assert isinstance(latest.spot, Spot)
    return channels["messages"]
