"""What an index on disk holds after its writer was killed, its log was cut, or its disk was full."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval.base import View
from pancake_langgraph.retrieval.disk import Disk
from pancake_langgraph.retrieval.disk_engine import verify
from pancake_langgraph.retrieval.inspection import torn_end
from pancake_langgraph.retrieval.manifest import SEGMENTS, read_current
from tests.contract.index_kit import flip, output_of, start
from tests.index_children import an_item, carry_out, contents, script, small

POINTS = (
    *("log:append", "log:appended", "log:sync", "log:synced"),
    *("publish:start", "publish:manifest", "publish:rename", "publish:done"),
    *("build:begun", "build:written", "build:named", "flush:frozen", "merge:begun", "swap:done"),
)
KILLS = [(point, nth) for point in POINTS for nth in (1, 2, 5)] + [("half", nth) for nth in range(1, 120, 2)]


def check_reopened(path: Path, acknowledged: int) -> None:
    """Check that an index holds what was acknowledged, perhaps with the step that was under way, and nothing else."""
    states = carry_out(script())
    with_next = states[min(acknowledged + 1, len(states) - 1)]
    engine = small(str(path))
    found = contents(engine)
    assert found in (states[acknowledged], with_next)
    assert verify(path) == []
    engine.put([an_item("new", 500)])
    engine.settle()
    engine.compact()
    engine.close()
    assert {one.name for one in (path / SEGMENTS).iterdir()} == {one.name for one in read_current(path).segments}
    again = small(str(path))
    assert contents(again) == {**found, "new": 500}
    again.close()


def test_a_killed_writer_loses_nothing_acknowledged_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    paths = [tmp_path / f"{point.replace(':', '-')}-{nth}" for point, nth in KILLS]
    lines = [json.dumps([str(path), *kill]) for path, kill in zip(paths, KILLS, strict=True)]
    process = start("kills", stdin=subprocess.PIPE)
    endings = [int(line) for line in output_of(process, "\n".join(lines)).splitlines()]
    assert len(endings) == len(KILLS)
    killed = {point for (point, _), ending in zip(KILLS, endings, strict=True) if ending == -9}
    assert killed == {*POINTS, "half"}
    assert set(endings) <= {-9, 0}
    for path in paths:
        acks = Path(f"{path}.acks")
        check_reopened(path, len(acks.read_bytes()) if acks.exists() else 0)


def test_a_log_cut_at_any_byte_of_its_last_record_is_read_up_to_it(tmp_path: Path) -> None:
    engine = small(str(tmp_path / "whole"), flush_rows=100)
    engine.put([an_item("a", 1)])
    [log] = (tmp_path / "whole" / "wal").iterdir()
    before = log.stat().st_size
    engine.put([an_item("b", 2)])
    after = log.stat().st_size
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    engine.close()
    for cut in range(before, after):
        path = tmp_path / "cut"
        shutil.copytree(tmp_path / "killed", path)
        with (path / "wal" / log.name).open("r+b") as file:
            file.truncate(cut)
        engine = small(str(path), flush_rows=100)
        assert {item.id.key for item in engine.items(View())} == {"a"}
        engine.put([an_item("c", 3)])
        engine.close()
        engine = small(str(path), flush_rows=100)
        assert {item.id.key for item in engine.items(View())} == {"a", "c"}
        engine.close()
        shutil.rmtree(path)


def test_a_log_whose_last_record_is_torn_inside_is_read_up_to_it_and_the_rest_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = small(str(tmp_path / "open"), flush_rows=100)
    engine.put([an_item("a", 1)])
    [log] = (tmp_path / "open" / "wal").iterdir()
    before = log.stat().st_size
    engine.put([an_item("b", 2)])
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "open", killed)
    engine.close()
    torn = log.read_bytes()[before:]
    flip(killed / "wal" / log.name, before + 40)
    assert verify(killed) == []
    assert "no whole record, as a crash leaves them" in str(torn_end(killed))
    with caplog.at_level(logging.WARNING):
        engine = small(str(killed), flush_rows=100)
    assert contents(engine) == {"a": 1}
    [line] = [record.getMessage() for record in caplog.records]
    assert f"its last {len(torn)} bytes are no whole record" in line
    [aside] = (killed / "wal").glob("*.cut")
    kept = aside.read_bytes()
    assert [at for at, byte in enumerate(kept) if byte != torn[at]] == [40]
    assert torn_end(killed) is None
    engine.settle()
    engine.close()
    assert not aside.exists()


# -- a full disk ----------------------------------------------------------------------------------------------------


class FullDisk(Disk):
    """Has room for so many bytes; `None` is without end.  A write that finds too little writes what fits."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.syncs = True

    def append(self, fd: int, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")
        if self.left is None:
            super().append(fd, view, offset)
            return
        fits, self.left = view[: self.left], max(0, self.left - len(view))
        super().append(fd, fits, offset)
        if len(fits) < len(view):
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self, fd: int) -> None:
        if not self.syncs:
            raise OSError(errno.EIO, "Input/output error")
        super().sync(fd)


@pytest.mark.parametrize("room", [0, 1, 30, 200])
def test_a_put_that_finds_no_room_stores_nothing_and_the_next_one_works(tmp_path: Path, room: int) -> None:
    disk = FullDisk()
    engine = small(str(tmp_path), disk=disk, flush_rows=100)
    engine.put([an_item("a", 1)])
    disk.left = room
    with pytest.raises(RetrievalError, match="no room on the disk"):
        engine.put([an_item("a", 2), an_item("b", 2)])
    assert contents(engine) == {"a": 1}
    disk.left = None
    engine.put([an_item("c", 3)])
    assert contents(engine) == {"a": 1, "c": 3}
    engine.close()
    engine = small(str(tmp_path), flush_rows=100)
    assert contents(engine) == {"a": 1, "c": 3}
    engine.close()


def test_a_flush_or_merge_that_finds_no_room_leaves_everything_as_it_was(tmp_path: Path) -> None:
    disk = FullDisk()
    engine = small(str(tmp_path), disk=disk, flush_rows=1000)
    wanted = {}
    for turn in range(4):
        for key in "abcdefg":
            engine.put([an_item(f"{key}{turn}", turn * 10 + ord(key))])
            wanted[f"{key}{turn}"] = turn * 10 + ord(key)
        for room in (0, 100, 300, 700, 1500):
            disk.left = room
            with pytest.raises(RetrievalError, match="no room on the disk"):
                engine.compact()
            assert contents(engine) == wanted
        disk.left = None
        engine.settle()
        assert engine.stats().delta_vectors == 0
        assert contents(engine) == wanted
    engine.close()
    assert verify(tmp_path) == []
    engine = small(str(tmp_path))
    assert contents(engine) == wanted
    engine.close()


def test_what_the_disk_refused_to_sync_is_not_acknowledged_and_nothing_more_is_taken(tmp_path: Path) -> None:
    disk = FullDisk()
    engine = small(str(tmp_path), disk=disk, flush_rows=100)
    engine.put([an_item("a", 1)])
    disk.syncs = False
    with pytest.raises(RetrievalError, match="could not be synced"):
        engine.put([an_item("b", 2)])
    disk.syncs = True
    with pytest.raises(RetrievalError, match="could not be synced"):
        engine.put([an_item("c", 3)])
    engine.close()
    engine = small(str(tmp_path), flush_rows=100)
    assert contents(engine) in ({"a": 1}, {"a": 1, "b": 2})
    engine.put([an_item("c", 3)])
    engine.close()


def test_a_real_limit_on_file_sizes_is_met_with_a_typed_error(tmp_path: Path) -> None:
    acknowledged, trouble = json.loads(output_of(start("fill", str(tmp_path), "20000")))
    assert acknowledged > 20
    assert "no room on the disk" in trouble
    engine = small(str(tmp_path), flush_rows=10_000)
    assert len(contents(engine)) == acknowledged
    engine.close()
