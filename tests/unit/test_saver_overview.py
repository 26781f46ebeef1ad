"""What people are shown of a thread when something about it is wrong, and what a saver keeps in memory."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from pancake_langgraph._errors import CorruptCheckpoint
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.memory import MAX_NAMESPACES
from pancake_langgraph.checkpoint.record import Record, place_of_row
from pancake_langgraph.checkpoint.rows import CheckpointRow, Spot
from pancake_langgraph.checkpoint.seal import Seal
from pancake_langgraph.saver import PancakeSaver


def thread(name: str = "t") -> Any:
    return {"configurable": {"thread_id": name, "checkpoint_ns": ""}}


@pytest.mark.parametrize("part", ["(checkpoint)", "(metadata)"])
def test_a_checkpoint_that_holds_something_else_is_a_problem_that_is_named(tmp_path: Path, part: str) -> None:
    checkpoint = empty_checkpoint()
    row = CheckpointRow(Spot("", checkpoint["id"]), None, "", b"")
    codec = Codec.build()
    texts = {"(checkpoint)": codec.encode({"ts": "now"}, channel="c"), "(metadata)": codec.encode({}, channel="c")}
    texts[part] = codec.encode([1], channel="c")
    record = Record(texts["(checkpoint)"], {}, texts["(metadata)"])
    with PancakeSaver(tmp_path / "x.db") as saver:
        saver.put(thread(), checkpoint, {}, {})
        with sqlite3.connect(tmp_path / "x.db") as connection:
            body = Seal().seal(record.packed(), place_of_row("t", row))
            connection.execute("UPDATE checkpoints SET body = ?", (body,))
        connection.close()
        info = saver.info("t")
        assert info is not None
        assert f"{part}: a list in place of a dict" in str(info.problem)
        with pytest.raises(CorruptCheckpoint, match="a list in place of a dict"):
            list(saver.history("t"))
        with pytest.raises(CorruptCheckpoint, match="a list in place of a dict"):
            saver.get_tuple(thread())


def test_a_saver_remembers_a_bounded_number_of_threads() -> None:
    with PancakeSaver() as saver:
        for number in range(2 * MAX_NAMESPACES):
            checkpoint: Any = {**empty_checkpoint(), "channel_values": {"items": ["x"] * 100}}
            saver.put(thread(str(number)), {**checkpoint, "channel_versions": {"items": 1}}, {}, {"items": 1})
        remembered = [saver._core.memory.get(str(number), "") is not None for number in range(2 * MAX_NAMESPACES)]
    assert remembered == [False] * MAX_NAMESPACES + [True] * MAX_NAMESPACES
