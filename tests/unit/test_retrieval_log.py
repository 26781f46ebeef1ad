"""The write-ahead log by itself: shared syncs, damage against torn ends, records that are too large."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pancake_langgraph._errors import CorruptIndex, InvalidItem
from pancake_langgraph.retrieval import log
from pancake_langgraph.retrieval.disk import Disk
from pancake_langgraph.retrieval.log import LogItem, LogWriter, Operation, read_log, salvage


def an_operation(number: int) -> Operation:
    """Return one that says its number."""
    return Operation(
        puts=[LogItem(("a",), f"k{number}", 1.0, 2.0, None, b'{"n":1}', b"\0" * 32)], deletes=[(("b",), "x")]
    )


class SlowDisk(Disk):
    """Counts syncs; each waits until it may go on."""

    def __init__(self) -> None:
        self.num_syncs = 0
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.is_slow = False

    def sync(self, fd: int) -> None:
        self.num_syncs += 1
        if self.is_slow:
            self.begun.release()
            assert self.may_end.acquire(timeout=60)


def test_operations_come_back_as_they_were_written_in_pieces_and_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = LogWriter(path, Disk())
    written, ends = [an_operation(number) for number in range(5)], []
    for number, operation in enumerate(written):
        ends.append(writer.append(number + 1, log.encode(operation)))
        tail = read_log(path, ends[-2] if number else 0)
        assert ([record.operation for record in tail.records], tail.end) == ([operation], ends[-1])
    writer.close()
    writer.close()
    tail = read_log(path)
    assert [(record.seq, record.operation) for record in tail.records] == list(enumerate(written, 1))
    assert (tail.end, tail.damage) == (path.stat().st_size, None)


def test_writers_that_wait_together_share_a_sync(tmp_path: Path) -> None:
    disk = SlowDisk()
    writer = LogWriter(tmp_path / "log", disk)
    disk.num_syncs, disk.is_slow = 0, True
    first = threading.Thread(target=writer.wait, args=(writer.append(1, b"x"),))
    first.start()
    assert disk.begun.acquire(timeout=60)
    others = [threading.Thread(target=writer.wait, args=(writer.append(2 + n, b"y"),)) for n in range(8)]
    for thread in others:
        thread.start()
    for _ in range(2):
        disk.may_end.release()
    for thread in (first, *others):
        thread.join(60)
        assert not thread.is_alive()
    assert disk.num_syncs == 2
    disk.is_slow = False
    writer.close()


def a_log(path: Path, *, synced: bool) -> list[int]:
    """Write three records and return where each begins."""
    writer = LogWriter(path, Disk())
    starts = []
    for number in range(3):
        starts.append(writer.end)
        end = writer.append(number + 1, log.encode(an_operation(number)))
        if synced:
            writer.wait(end)
    writer.close()
    return starts


def test_a_bad_record_before_one_that_was_written_after_its_sync_is_damage(tmp_path: Path) -> None:
    starts = a_log(tmp_path / "log", synced=True)
    data = bytearray((tmp_path / "log").read_bytes())
    for at in range(starts[1], starts[2]):
        data[at] ^= 0xFF
        (tmp_path / "log").write_bytes(data)
        data[at] ^= 0xFF
        tail = read_log(tmp_path / "log")
        assert (len(tail.records), tail.end) == (1, starts[1])
        assert f"byte {starts[1]}" in str(tail.damage)
        assert [record.seq for record in salvage(tmp_path / "log")] == [1, 3]


def test_a_bad_record_among_those_that_were_never_synced_is_the_end(tmp_path: Path) -> None:
    starts = a_log(tmp_path / "log", synced=False)
    data = bytearray((tmp_path / "log").read_bytes())
    data[starts[1] : starts[2]] = bytes(starts[2] - starts[1])
    (tmp_path / "log").write_bytes(data)
    tail = read_log(tmp_path / "log")
    assert (len(tail.records), tail.end, tail.damage) == (1, starts[1], None)


def test_nothing_behind_a_torn_record_comes_back_when_the_log_is_written_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    starts = a_log(path, synced=False)
    data = bytearray(path.read_bytes())
    data[starts[1] : starts[2]] = bytes(starts[2] - starts[1])
    path.write_bytes(data)
    writer = LogWriter(path, Disk(), end=read_log(path).end)
    writer.append(7, log.encode(an_operation(7)))  # as long as the torn one: it ends where a whole one began
    writer.close()
    assert [record.seq for record in read_log(path).records] == [1, 7]


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"PCK")
    assert read_log(tmp_path / "log").end == 0
    (tmp_path / "log").write_bytes(b"something else")
    with pytest.raises(CorruptIndex, match="does not begin as a log does"):
        read_log(tmp_path / "log")


def test_a_call_that_is_too_large_for_a_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_RECORD_BYTES", 50)
    with pytest.raises(InvalidItem, match="split the call"):
        log.encode(an_operation(1))
