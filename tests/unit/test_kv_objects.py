"""Stored KV objects on disk: whatever happens to their files, a wrong one is a counted miss and is written again."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pancake_lmcache.counts import Counts
from pancake_lmcache.frame import Identity, Sealer
from pancake_lmcache.objects import ObjectFolder
from pancake_lmcache.space import NO_CAP, Space

KEY = bytes(range(32))
CHUNK = Identity(model="m/small", kv_rank=1, object_group=0, chunk_hash=b"\x01" * 32, salt="a")
OTHER_CHUNK = replace(CHUNK, chunk_hash=b"\x02" * 32)
OTHER_TENANT = replace(CHUNK, salt="b")
PAYLOAD = bytes(range(256)) * 2

BOTH = pytest.mark.parametrize("key", [None, KEY], ids=["checksum", "key"])


class Disk:
    """A folder as one server sees it."""

    def __init__(self, root: Path, *, key: bytes | None = None, cap_bytes: int = NO_CAP) -> None:
        self.counts = Counts("test")
        self.removed: list[str] = []
        self.space = Space(root, cap_bytes=cap_bytes, lock_wait_s=0.2)
        self.folder = ObjectFolder(self.space, Sealer(key), self.counts, on_removed=self.removed.extend)

    def store(self, identity: Identity = CHUNK, payload: bytes = PAYLOAD) -> int | None:
        return self.folder.store(identity, payload)

    def load(self, identity: Identity = CHUNK, num_bytes: int = len(PAYLOAD)) -> bytes | None:
        place = bytearray(num_bytes)
        return bytes(place) if self.folder.load(identity, memoryview(place)) else None

    def path(self, identity: Identity = CHUNK) -> Path:
        return self.space.root / self.folder.name_of(identity)

    def files(self) -> list[Path]:
        return sorted(self.space.root.glob("*.pkv*"))


@BOTH
def test_an_object_comes_back_and_is_written_once(tmp_path: Path, key: bytes | None) -> None:
    disk = Disk(tmp_path / "new" / "folder", key=key)
    assert not disk.folder.has(CHUNK)
    assert disk.load() is None
    assert disk.store() == disk.path().stat().st_size > len(PAYLOAD)
    assert disk.store() == 0
    assert disk.folder.has(CHUNK)
    assert disk.load() == PAYLOAD
    assert disk.counts.snapshot() == {"gone": 1}
    assert (disk.path().stat().st_mode & 0o077, disk.space.root.stat().st_mode & 0o077) == (0, 0)
    assert Disk(disk.space.root, key=key).load() == PAYLOAD


@BOTH
def test_a_flipped_bit_anywhere_is_a_counted_miss_and_the_object_is_written_again(
    tmp_path: Path, key: bytes | None
) -> None:
    disk = Disk(tmp_path, key=key)
    for position in range(disk.store() or 0):
        data = bytearray(disk.path().read_bytes())
        data[position] ^= 1 << position % 8
        disk.path().write_bytes(data)
        before = sum(disk.counts.snapshot().values())
        assert disk.load() is None
        assert sum(disk.counts.snapshot().values()) > before
        assert disk.store()
        assert disk.load() == PAYLOAD
    assert disk.counts["refused_damaged"] >= len(PAYLOAD)
    assert disk.files() == [disk.path()]


Spoil = Callable[[Disk], None]


def truncated(disk: Disk) -> None:
    os.truncate(disk.path(), disk.path().stat().st_size - 1)


def cut_in_the_header(disk: Disk) -> None:
    os.truncate(disk.path(), 50)


def emptied(disk: Disk) -> None:
    os.truncate(disk.path(), 0)


def grown(disk: Disk) -> None:
    with disk.path().open("ab") as file:
        file.write(b"more")


def zeroed(disk: Disk) -> None:
    disk.path().write_bytes(bytes(disk.path().stat().st_size))


def zeroed_body(disk: Disk) -> None:
    size = disk.path().stat().st_size
    with disk.path().open("r+b") as file:
        file.seek(size - len(PAYLOAD))
        file.write(bytes(len(PAYLOAD)))


def another_chunk(disk: Disk) -> None:
    disk.store(OTHER_CHUNK, PAYLOAD[::-1])
    shutil.copy(disk.path(OTHER_CHUNK), disk.path())


def another_tenant(disk: Disk) -> None:
    disk.store(OTHER_TENANT, PAYLOAD[::-1])
    shutil.copy(disk.path(OTHER_TENANT), disk.path())


def raw_bytes(disk: Disk) -> None:
    disk.path().write_bytes(PAYLOAD)  # as the plain adapter would have stored it


def a_link(disk: Disk) -> None:
    kept = disk.space.root / "kept"
    disk.path().rename(kept)
    disk.path().symlink_to(kept)


def a_pipe(disk: Disk) -> None:
    disk.path().unlink()
    os.mkfifo(disk.path())


@BOTH
@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (truncated, "size"),
        (cut_in_the_header, "size"),
        (emptied, "size"),
        (grown, "size"),
        (zeroed, "foreign"),
        (zeroed_body, "damaged"),
        (another_chunk, "identity"),
        (another_tenant, "identity"),
        (raw_bytes, "foreign"),
        (a_link, "foreign"),
        (a_pipe, "foreign"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_spoiled_file_is_a_miss_of_its_kind_then_gone_then_right_again(
    tmp_path: Path, spoil: Spoil, kind: str, key: bytes | None
) -> None:
    disk = Disk(tmp_path, key=key)
    disk.store()
    spoil(disk)
    assert disk.load() is None
    assert disk.counts.snapshot() == {f"refused_{kind}": 1, "removed": 1}
    assert disk.removed == [disk.path().name]
    assert not os.path.lexists(disk.path())
    assert disk.store()
    assert disk.load() == PAYLOAD
    if kind != "damaged":  # those can be told from their header and size: the lookup does not even promise them
        spoil(disk)
        assert not disk.folder.has(CHUNK)
        assert not os.path.lexists(disk.path())


def test_two_tenants_files_that_were_swapped_serve_neither(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.store(CHUNK)
    disk.store(OTHER_TENANT, PAYLOAD[::-1])
    one, two = disk.path(CHUNK), disk.path(OTHER_TENANT)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert (disk.load(CHUNK), disk.load(OTHER_TENANT)) == (None, None)
    assert disk.counts["refused_identity"] == 2


def test_a_store_replaces_a_file_of_the_wrong_size_that_nobody_loaded(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.store()
    truncated(disk)
    assert disk.store()
    assert disk.counts.snapshot() == {"rewritten": 1}
    assert disk.load() == PAYLOAD


def test_an_object_of_another_layout_is_replaced(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.store(payload=PAYLOAD[:100])
    assert disk.load() is None
    disk.store(payload=PAYLOAD[:100])
    assert disk.store()
    assert disk.load() == PAYLOAD


def test_objects_of_another_key_or_a_later_version_are_left_until_they_are_replaced(tmp_path: Path) -> None:
    plain, keyed, wrong = (Disk(tmp_path, key=key) for key in (None, KEY, KEY[::-1]))
    keyed.store()
    for reader in (plain, wrong):
        assert reader.load() is None
        assert not reader.folder.has(CHUNK)
        assert reader.counts.snapshot() == {"refused_key": 2}
    assert keyed.load() == PAYLOAD
    assert plain.store()
    assert plain.load() == PAYLOAD
    assert keyed.load() is None  # a key is set: what anybody could have written is not served
    with plain.path().open("r+b") as file:
        file.seek(8)
        file.write(b"\x63\x00")
    assert plain.load() is None
    assert plain.counts["refused_version"] == 1
    assert plain.path().exists()
    assert plain.store()
    assert plain.load() == PAYLOAD


def test_a_full_disk_drops_the_store_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    disk.store(OTHER_CHUNK)
    used, write = disk.space.used_bytes(), os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        if len(data) > 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert disk.store() is None
    assert disk.counts.snapshot() == {"disk_full": 1}
    assert disk.files() == [disk.path(OTHER_CHUNK)]
    assert disk.space.used_bytes() == used
    assert disk.load(OTHER_CHUNK) == PAYLOAD
    assert disk.store()


def test_a_folder_that_cannot_be_used_is_counted_and_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    root.write_text("a file where the folder should be")
    disk = Disk(root)
    assert not disk.folder.has(CHUNK)
    assert disk.load() is None
    assert disk.store() is None
    assert disk.counts.snapshot() == {"folder_unusable": 1, "store_failed": 1, "unreadable": 2}
    assert disk.space.used_bytes() == 0
    root.unlink()
    assert disk.store()
    assert disk.load() == PAYLOAD


def test_a_file_that_cannot_be_read_is_a_counted_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    disk.store()

    def failing(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        assert disk.load() is None
    disk.path().unlink()
    disk.path().mkdir()
    assert disk.load() is None
    assert disk.store() is None
    assert {"unreadable", "refused_foreign", "not_removed", "store_failed"} <= set(disk.counts.snapshot())
    assert disk.files() == [disk.path()]


def test_an_object_removed_by_hand_is_a_miss_and_a_vanished_folder_is_made_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "tier")
    disk.store()
    shutil.rmtree(disk.space.root)
    assert disk.load() is None
    assert disk.store()
    assert disk.load() == PAYLOAD


def test_servers_whose_clocks_differ_agree_on_what_is_younger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, behind = Disk(tmp_path), Disk(tmp_path)
    clock = time.time_ns()
    for disk, identity, offset in ((ahead, CHUNK, 10**15), (behind, OTHER_CHUNK, -(10**15)), (ahead, OTHER_TENANT, 0)):
        monkeypatch.setattr(time, "time_ns", lambda at=clock + offset: at)
        disk.store(identity)
    ages = [ahead.path(identity).stat().st_mtime_ns for identity in (CHUNK, OTHER_CHUNK, OTHER_TENANT)]
    assert ages == sorted(set(ages))


def test_clocks_that_jump_do_not_change_what_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = Disk(tmp_path).store(replace(CHUNK, salt="probe")) or 0
    shutil.rmtree(tmp_path)
    disk = Disk(tmp_path, cap_bytes=4 * size)
    chunks = [replace(CHUNK, chunk_hash=bytes([number]) * 32) for number in range(7)]
    clock = iter([now := time.time_ns(), now + 10**18, now - 10**18, now - 2 * 10**18, now + 5, now + 6, now + 7])
    monkeypatch.setattr(time, "time_ns", clock.__next__)
    for chunk in chunks[:4]:
        disk.store(chunk)
    assert disk.load(chunks[0]) == PAYLOAD
    monkeypatch.undo()
    assert Disk(tmp_path, cap_bytes=4 * size).store(chunks[4])
    assert [disk.folder.has(chunk) for chunk in chunks] == [True, False, False, True, True, False, False]
    for chunk in chunks[5:]:  # by servers that know only what is in the folder
        assert Disk(tmp_path, cap_bytes=4 * size).store(chunk)
    assert [disk.folder.has(chunk) for chunk in chunks] == [False, False, False, False, True, True, True]
