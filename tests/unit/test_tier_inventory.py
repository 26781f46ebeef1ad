"""What lies in a tier is listed by model and weights, and what was superseded goes when asked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pancake_lmcache.cli import tiers
from pancake_lmcache.counts import Counts
from pancake_lmcache.frame import Identity, Sealer
from pancake_lmcache.inventory import FolderStore, StoredObject, chosen, grouped
from pancake_lmcache.objects import ObjectFolder
from pancake_lmcache.space import Space
from pancake_vllm.identity import tier_salt

OLD, NEW = "w" + 24 * "a", "w" + 24 * "b"


def stored(folder: Path, salt: str, *, number: int = 0, used_at_s: float, key: bytes | None = None) -> Path:
    identity = Identity("models/m", 1, 0, bytes([number]), salt)
    space = Space(folder)
    assert ObjectFolder(space, Sealer(key), Counts("test")).store(identity, b"kv" * 500)
    path = folder / ObjectFolder.name_of(identity)
    os.utime(path, (used_at_s, used_at_s))
    return path


def one(kv_identity: str, used_at_s: float, model: str = "m") -> StoredObject:
    return StoredObject(f"{model}{kv_identity}", model, kv_identity, 10, used_at_s, sealed=True)


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["checksums", "encrypted"])
def test_objects_tell_model_and_weights_and_no_tenant(tmp_path: Path, key: bytes | None) -> None:
    identity = f"{OLD}-v64x32!int8+a12"
    path = stored(tmp_path, tier_salt(f"{OLD}-v64x32", "tenant!int8", adapter="a12"), used_at_s=100.0, key=key)
    assert b"tenant" not in path.read_bytes()
    (found,) = FolderStore(tmp_path).objects()
    assert (found.model, found.kv_identity, found.used_at_s) == ("models/m", identity, 100.0)


def test_salts_of_engines_that_name_no_identity_are_kept_to_themselves(tmp_path: Path) -> None:
    path = stored(tmp_path, "w-private-salt", used_at_s=1.0)
    assert b"private" not in path.read_bytes()
    (found,) = FolderStore(tmp_path).objects()
    assert found.kv_identity == ""


def test_files_of_the_plain_adapter_are_listed_and_those_of_other_programs_are_not(tmp_path: Path) -> None:
    (tmp_path / f"a-SEP-b@0x01000100@0@00ff@{OLD}.t.data").write_bytes(b"kv")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "broken.pkv").write_bytes(b"zero")
    found = {item.model: item.kv_identity for item in FolderStore(tmp_path).objects()}
    assert found == {"a/b": OLD, "unreadable": ""}


def test_of_one_models_weights_only_those_used_last_are_in_use() -> None:
    objects = [one(OLD, 1.0), one(NEW, 5.0), one(f"{NEW}+a1", 2.0), one(f"{OLD}+a1", 4.0), one(OLD, 1.0, model="n")]
    objects += [one("", 9.0), one(f"{NEW}-v64x64!int8", 1.0), one(f"{NEW}-a64x32", 1.0), one("", 1.0, model="k")]
    groups = {(group.model, group.kv_identity): group.superseded for group in grouped(objects)}
    assert groups == {
        ("m", OLD): True,
        ("m", NEW): False,
        ("m", f"{NEW}+a1"): False,
        ("m", f"{OLD}+a1"): True,
        ("n", OLD): False,
        ("m", ""): False,
        ("m", f"{NEW}-v64x64!int8"): False,
        ("m", f"{NEW}-a64x32"): False,
        ("k", ""): False,
    }


def test_what_is_to_be_kept_stays_and_age_is_asked_instead_of_weights() -> None:
    objects = [one(OLD, 1.0), one(NEW, 5.0), one(f"{OLD}+a1", 4.0)]

    def names(**options: Any) -> set[str]:
        options = {"keep": (), "unused_since_s": None, **options}
        return {item.kv_identity for item in chosen(objects, **options)}

    assert names() == {OLD, f"{OLD}+a1"}
    assert names(keep={f"{OLD}+a1"}) == {OLD}
    assert names(keep={OLD}) == set()
    assert names(unused_since_s=4.5) == {OLD, f"{OLD}+a1"}
    assert names(unused_since_s=4.5, keep={OLD}) == set()


def run(*args: str) -> Any:
    return CliRunner().invoke(tiers, args)


def test_nothing_goes_without_yes_and_the_folders_books_are_kept(tmp_path: Path) -> None:
    old, new = stored(tmp_path, OLD, used_at_s=100.0), stored(tmp_path, NEW, number=1, used_at_s=200.0)
    listed = run("ls", str(tmp_path))
    assert listed.output.count("superseded") == 1
    assert json.loads(run("ls", "--json", str(tmp_path)).output)[0]["kv_identity"] == NEW
    assert "1 objects" in run("gc", str(tmp_path)).output
    assert old.exists()
    assert run("gc", "--yes", str(tmp_path)).exit_code == 0
    assert not old.exists()
    assert Space(tmp_path).used_bytes() == new.stat().st_size


@pytest.mark.parametrize("where", ["nowhere", "redis://127.0.0.1:1"])
def test_a_wrong_place_is_told(where: str) -> None:
    result = run("ls", where)
    assert result.exit_code != 0
    assert "allowed" in result.output or "does not answer" in result.output


def test_values_on_a_server_are_listed_and_removed(start_valkey: Callable[..., Any]) -> None:
    import redis

    server = start_valkey()
    with redis.Redis.from_url(server.url) as client:
        client.set(f"models/m@0x01000100@0@00ff@{OLD}.t", b"kv" * 100)
        client.set("models/m@0x01000100@0@00aa", b"kv")
        client.set("session:7", b"of another program")
        assert run("ls", server.url).output.count("models/m") == 2
        assert "1 objects" in run("gc", "--unused-days", "0", "--keep", "", "--yes", server.url).output
        assert set(client.keys()) == {b"session:7", b"models/m@0x01000100@0@00aa"}
