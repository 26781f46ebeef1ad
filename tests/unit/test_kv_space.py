"""The cap of the disk tier: over all processes, leftovers and files under way."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pancake_lmcache.counts import Counts
from pancake_lmcache.frame import Identity, Sealer
from pancake_lmcache.objects import ObjectFolder
from pancake_lmcache.space import NoRoom, Space

PAYLOAD = bytes(range(250)) * 40


def chunk(number: int) -> Identity:
    return Identity("m", 1, 0, number.to_bytes(32, "big"), "")


def opened(root: Path, cap_bytes: int, counts: Counts | None = None) -> ObjectFolder:
    return ObjectFolder(Space(root, cap_bytes=cap_bytes), Sealer(), counts or Counts("test"))


def loads(folder: ObjectFolder, number: int) -> bool:
    place = bytearray(len(PAYLOAD))
    return folder.load(chunk(number), memoryview(place)) and bytes(place) == PAYLOAD


@contextmanager
def at_rest(root: Path) -> Iterator[None]:
    """Hold the folder's lock: nothing is begun, put in place or removed meanwhile."""
    with (root / ".pancake-tier").open("rb") as books:
        fcntl.flock(books, fcntl.LOCK_EX)
        yield


def taken(root: Path) -> int:
    return sum(path.stat().st_size for path in root.iterdir() if path.name != ".pancake-tier")


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    counts = Counts("test")
    folder = opened(tmp_path, 10 * len(PAYLOAD) + 5000, counts)
    for number in range(10):
        assert folder.store(chunk(number), PAYLOAD)
    assert loads(folder, 0)
    assert folder.has(chunk(1))
    folder.store(chunk(2), PAYLOAD)  # there already: that is a use, too
    folder.store(chunk(10), PAYLOAD)
    assert counts.snapshot() == {"evicted": 2}  # one for room, one for a little slack
    assert [number for number in range(11) if not folder.has(chunk(number))] == [3, 4]
    assert taken(tmp_path) <= 10 * len(PAYLOAD) + 5000


def test_leftovers_of_earlier_runs_and_of_the_plain_adapter_count_and_go(tmp_path: Path) -> None:
    cap = 5 * len(PAYLOAD)
    for _ in range(3):
        folder = opened(tmp_path, 10**9)
        for number in range(12):
            folder.store(chunk(number), PAYLOAD)
        old = tmp_path / f"m@0x01000100@0@{'ab' * 32}.data"
        old.write_bytes(PAYLOAD)
        os.utime(old, (1, 1))
        (tmp_path / f"{'0' * 32}.pkv-new").write_bytes(PAYLOAD)  # a writer that was killed
        folder = opened(tmp_path, cap)
        assert taken(tmp_path) <= cap
        assert not old.exists()
        assert not list(tmp_path.glob("*-new"))
        assert loads(folder, 11)
        for number in range(20, 40):
            folder.store(chunk(number), PAYLOAD)
            assert taken(tmp_path) == Space(tmp_path).used_bytes() <= cap


def test_files_of_others_are_counted_and_never_removed(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_bytes(bytes(3 * len(PAYLOAD)))
    (tmp_path / "folder").mkdir()
    counts = Counts("test")
    folder = opened(tmp_path, 5 * len(PAYLOAD), counts)
    for number in range(6):
        folder.store(chunk(number), PAYLOAD)
    assert taken(tmp_path) - (tmp_path / "folder").stat().st_size <= 5 * len(PAYLOAD)
    assert notes.exists()
    assert loads(folder, 5)
    assert folder.store(chunk(9), bytes(3 * len(PAYLOAD))) is None  # would not fit if all of ours went
    assert counts["no_room"] == 1
    assert loads(folder, 5)


def test_a_file_under_way_counts_in_full_and_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    space = Space(tmp_path, cap_bytes=1000)
    reservation = space.reserve(900)
    assert Space(tmp_path, cap_bytes=1000).recount() == []
    assert space.used_bytes() == taken(tmp_path) == 900
    with pytest.raises(NoRoom):
        Space(tmp_path, cap_bytes=1000).reserve(200)
    space.abandon(reservation)
    assert space.used_bytes() == taken(tmp_path) == 0
    space.commit(space.reserve(900), tmp_path / "a.pkv")
    space.commit(space.reserve(100), tmp_path / "a.pkv")  # both are there for a moment
    assert space.used_bytes() == taken(tmp_path) == 100


def test_a_spoiled_book_is_counted_anew(tmp_path: Path) -> None:
    folder = opened(tmp_path, 10**6)
    folder.store(chunk(1), PAYLOAD)
    (tmp_path / ".pancake-tier").write_bytes(b"junk")
    assert Space(tmp_path).used_bytes() == 0
    folder.store(chunk(2), PAYLOAD)
    assert Space(tmp_path).used_bytes() == taken(tmp_path)


def test_a_frozen_server_that_keeps_the_lock_costs_stores_not_loads(tmp_path: Path) -> None:
    counts = Counts("test")
    folder = ObjectFolder(Space(tmp_path, lock_wait_s=0.05), Sealer(), counts)
    folder.store(chunk(1), PAYLOAD)
    with at_rest(tmp_path):
        assert folder.store(chunk(2), PAYLOAD) is None
        assert loads(folder, 1)
        path = tmp_path / folder.name_of(chunk(1))
        path.write_bytes(b"spoiled")
        assert not folder.has(chunk(1))
        assert path.exists()
    assert counts.snapshot() == {"not_removed": 1, "refused_foreign": 1, "store_failed": 1}
    assert folder.store(chunk(1), PAYLOAD)
    assert loads(folder, 1)
    assert folder.store(chunk(2), PAYLOAD)


WRITER = """
import sys
from pathlib import Path
from pancake_lmcache.counts import Counts
from pancake_lmcache.frame import Identity, Sealer
from pancake_lmcache.objects import ObjectFolder
from pancake_lmcache.space import Space

root, cap, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
counts = Counts("child")
folder = ObjectFolder(Space(root, cap_bytes=cap, lock_wait_s=60.0), Sealer(), counts)
payload = bytes(range(250)) * 40
for number in range(first, first + 150):
    assert folder.store(Identity("m", 1, 0, number.to_bytes(32, "big"), ""), payload) is not None, counts.snapshot()
    place = bytearray(len(payload))
    assert not folder.load(Identity("m", 1, 0, number.to_bytes(32, "big"), ""), memoryview(place)) or place == payload
assert set(counts.snapshot()) <= {"evicted", "gone"}, counts.snapshot()
"""


def test_two_processes_on_one_folder_keep_one_cap_and_serve_each_others_objects(tmp_path: Path) -> None:
    cap = 12 * len(PAYLOAD)
    opened(tmp_path, cap)
    command = [sys.executable, "-W", "error", "-c", WRITER, str(tmp_path), str(cap)]
    writers = [subprocess.Popen([*command, str(first)], stderr=subprocess.PIPE) for first in (0, 75)]
    most = 0
    while any(writer.poll() is None for writer in writers):
        with at_rest(tmp_path):
            most = max(most, taken(tmp_path))
    errors = [writer.communicate()[1].decode() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], errors
    assert 0 < most <= cap
    assert Space(tmp_path).used_bytes() == taken(tmp_path)
    folder = opened(tmp_path, cap)
    there = [number for number in range(225) if folder.has(chunk(number))]
    assert len(there) >= 10
    assert all(loads(folder, number) for number in there)
