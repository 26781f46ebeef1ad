"""Threads come over from any saver that can list, unchanged or not at all."""

import importlib
import json
import os
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from pancake_langgraph._errors import (
    ConfigError,
    CorruptCheckpoint,
    StateTypeError,
    StoreUnavailable,
)
from pancake_langgraph.checkpoint import foreign, foreign_sources
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.saver import PancakeSaver, observe
from tests.contract.transfer_bed import (
    CRAFTED,
    KEY,
    Chat,
    everything,
    run_talk,
    talk,
    thread,
)


@pytest.mark.parametrize("wrap", [lambda saver: saver, observe], ids=["plain", "observed"])
def test_any_saver_that_lists_comes_over(saver_factory: Any, wrap: Callable[[Any], Any]) -> None:
    old, saver = InMemorySaver(), saver_factory(keys=[KEY])
    run_talk(old, "t1")
    serde = old.serde
    assert saver.import_from(wrap(old)) == ("t1",)
    assert old.serde is serde
    assert everything(saver) == everything(old)
    assert talk(saver).invoke(Command(resume="yes"), thread("t1"))["seen"][-1] == "yes"


def test_a_saver_that_lists_similar_threads_as_well_does_not_mix_them() -> None:
    class Loose(InMemorySaver):
        def list(self, config: Any, **kwargs: Any) -> Iterator[CheckpointTuple]:
            return super().list(None, **kwargs)

    old = Loose()
    run_talk(old, "t1")
    run_talk(old, "T1")
    with PancakeSaver() as saver:
        assert sorted(saver.import_from(old)) == ["T1", "t1"]
        assert len(everything(saver, "t1")) == len(everything(saver, "T1")) == 7


def test_a_message_is_encoded_once_however_many_checkpoints_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    old, turns = InMemorySaver(), 30
    graph = StateGraph(Chat)
    graph.add_node("answer", lambda state: {"messages": [AIMessage(f"answer {len(state['messages'])}")]})
    graph.add_edge(START, "answer")
    for turn in range(turns):
        graph.compile(checkpointer=old).invoke({"messages": [HumanMessage(f"question {turn}")]}, thread("t1"))
    encoded: list[object] = []
    encode = Codec.encode

    def counted(codec: Codec, value: object, *, channel: str) -> bytes:
        encoded.extend(value if isinstance(value, list) else [value])
        return encode(codec, value, channel=channel)

    with PancakeSaver() as saver:
        monkeypatch.setattr(Codec, "encode", counted)
        saver.import_from(old)
        monkeypatch.undo()
        assert everything(saver) == everything(old)
    # Once in a state, once in a pending write; and both states of the newest checkpoint to compare them.
    assert sum(isinstance(value, BaseMessage) for value in encoded) <= 5 * 2 * turns


def test_our_own_saver_comes_over(tmp_path: Path) -> None:
    with PancakeSaver() as old, PancakeSaver(tmp_path / "new.db") as saver:
        run_talk(old, "t1")
        saver.import_from(old)
        assert everything(saver) == everything(old)


def test_order_of_writes_survives_without_task_paths() -> None:
    writes = [("b", "x", 1), ("b", "__interrupt__", 2), ("b", "y", 3), ("a", "x", 4), ("b", "z", 5)]
    found = foreign_sources.numbered(writes)
    assert [(w.task_id, w.idx, w.value) for w in found] == [
        ("b", 0, 1), ("b", -3, 2), ("b", 1, 3), ("b", 2, 5), ("a", 0, 4)
    ]  # fmt: skip
    assert [w.task_path for w in found if w.task_id == "b"] < [w.task_path for w in found if w.task_id == "a"]
    assert {w.task_path for w in foreign_sources.numbered([("a", "x", 1), ("b", "x", 2)])} == {""}


class Rot:
    """A cipher that hides nothing."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "rot", plaintext[::-1]

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return ciphertext[::-1]


def test_an_encrypted_saver_comes_over_and_stays_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    old = InMemorySaver(serde=EncryptedSerializer(Rot()))
    run_talk(old, "t1")
    with PancakeSaver() as saver:
        saver.import_from(old)
        assert everything(saver) == everything(old)
    crafted = ormsgpack.packb(ormsgpack.Ext(0, ormsgpack.packb(CRAFTED[0])))
    place = next(iter(old.writes))
    key, write = next(iter(old.writes[place].items()))
    old.writes[place][key] = (write[0], write[1], ("msgpack+rot", crafted[::-1]), write[3])
    called: list[object] = []
    monkeypatch.setattr(os, "system", called.append)
    with PancakeSaver() as saver, pytest.raises(StateTypeError, match=r"os\.system"):
        saver.import_from(old)
    assert not called


class RedisLike(JsonPlusSerializer):
    """Makes any class that JSON names, and swallows what goes wrong, as langgraph-checkpoint-redis does."""

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return self.revived(json.loads(data[1])) if data[0] == "json" else super().loads_typed(data)

    def revived(self, value: Any) -> Any:
        if isinstance(value, dict) and value.get("lc"):
            try:
                made = self._reviver(value)
                return self._reconstruct_from_constructor(value) if isinstance(made, dict) else made
            except Exception:
                return value
        return value

    def _reconstruct_from_constructor(self, value: dict[str, Any]) -> Any:
        kind = getattr(importlib.import_module(".".join(value["id"][:-1])), value["id"][-1])
        kwargs = {name: self.revived(part) for name, part in value["kwargs"].items()}
        return set(kwargs["__set_items__"]) if kind is set else kind(**kwargs)


def redis_like_with(*path: str, **kwargs: Any) -> InMemorySaver:
    """A saver in whose first pending write stands an object of the class of that name."""
    old = InMemorySaver(serde=RedisLike())
    run_talk(old, "t1")
    crafted = json.dumps({"lc": 2, "type": "constructor", "id": list(path), "kwargs": kwargs}).encode()
    place = next(iter(old.writes))
    key, write = next(iter(old.writes[place].items()))
    old.writes[place][key] = (write[0], write[1], ("json", crafted), write[3])
    return old


def test_objects_in_a_format_of_its_own_come_over_if_they_are_allowed() -> None:
    inner = {"lc": 2, "type": "constructor", "id": ["builtins", "set"], "kwargs": {"__set_items__": [1, 2]}}
    old = redis_like_with("uuid", "SafeUUID", value=inner)
    with PancakeSaver() as saver, pytest.raises(StateTypeError, match=r"--allow uuid:SafeUUID"):
        saver.import_from(old)
    with PancakeSaver() as saver:
        saver.import_from(redis_like_with("builtins", "set", __set_items__=[1, 2]))
        assert {1, 2} in [value for item in everything(saver) for _, _, value in item.pending_writes or ()]
    with PancakeSaver(allow=[HTTPStatus]) as saver:
        saver.import_from(redis_like_with("http", "HTTPStatus", value=404))
        found = [value for item in everything(saver) for _, _, value in item.pending_writes or ()]
        assert HTTPStatus.NOT_FOUND in found


def test_a_serializer_that_swallows_refusals_does_not_get_past(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(os, "system", called.append)
    old = redis_like_with("os", "system", command="true")
    with PancakeSaver() as saver, pytest.raises(StateTypeError, match=r"os\.system"):
        saver.import_from(old)
    assert not called


def test_a_saver_that_cannot_be_read_strictly_is_refused() -> None:
    class Own:
        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            return "own", b""

        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            return None

    class Silent(BaseCheckpointSaver[Any]):
        pass

    class Broken(BaseCheckpointSaver[Any]):
        def list(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError("the database is away")

    with PancakeSaver() as saver:
        with pytest.raises(ConfigError, match="Own"):
            saver.import_from(InMemorySaver(serde=Own()))
        with pytest.raises(ConfigError, match="does not implement `list`"):
            saver.import_from(Silent())
        with pytest.raises(StoreUnavailable, match="the database is away"):
            saver.import_from(Broken())


def test_what_does_not_come_back_equal_is_taken_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    old = InMemorySaver()
    run_talk(old, "t1")
    monkeypatch.setattr(foreign, "_is_equal", lambda *args: False)
    with PancakeSaver() as saver:
        with pytest.raises(CorruptCheckpoint, match="did not come back"):
            saver.import_from(old)
        assert not list(saver.threads())
        monkeypatch.undo()
        assert saver.import_from(old) == ("t1",)
