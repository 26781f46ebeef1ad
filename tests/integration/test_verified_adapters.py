"""The verified adapters as LMCache's server makes and calls them: no engine, real files, a real Valkey."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports warn
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

KEYS = [ObjectKey(bytes([number]) * 32, "/models/small", 0x01000100, 0, "tenant-a") for number in range(1, 5)]
PAYLOADS = [bytes([number]) * 70_000 for number in range(1, 5)]
WAIT_MS = 60_000


class Server:
    """Makes an adapter from the command line's JSON and calls it as the server's controllers do."""

    def __init__(self, module: str, name: str, params: dict[str, object]) -> None:
        spec = {"type": "plugin", "module_path": f"pancake_lmcache.{module}", "class_name": name}
        asked = Namespace(l2_adapter=[json.dumps({**spec, "adapter_params": params})])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports its adapters when they are first needed
            self.adapter: Any = create_l2_adapter(parse_args_to_l2_adapters_config(asked).adapters[0])

    def _await(self, fd: int) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(WAIT_MS)

    def store(self, keys: list[ObjectKey], payloads: list[bytes]) -> bool:
        return self.run_store(keys, [SimpleNamespace(byte_array=memoryview(bytearray(one))) for one in payloads])

    def run_store(self, keys: list[ObjectKey], objects: list[Any]) -> bool:
        task = self.adapter.submit_store_task(keys, objects)
        done: dict[int, Any] = {}
        while task not in done:
            self._await(self.adapter.get_store_event_fd())
            done |= self.adapter.pop_completed_store_tasks()
        return bool(done[task].is_successful())

    def lookup(self, keys: list[ObjectKey]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        while (found := self.adapter.query_lookup_and_lock_result(task)) is None:
            self._await(self.adapter.get_lookup_and_lock_event_fd())
        self.adapter.submit_unlock(keys)
        return [found.test(index) for index in range(len(keys))]

    def load(self, keys: list[ObjectKey], num_bytes: int = len(PAYLOADS[0])) -> list[bytes | None]:
        places = [bytearray(num_bytes) for _ in keys]
        task = self.adapter.submit_load_task(keys, [SimpleNamespace(byte_array=memoryview(place)) for place in places])
        while (loaded := self.adapter.query_load_result(task)) is None:
            self._await(self.adapter.get_load_event_fd())
        return [bytes(place) if loaded.test(index) else None for index, place in enumerate(places)]

    @property
    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.adapter.report_status()["counts"]
        return counts


@pytest.fixture(params=[False, True], ids=["checksum", "key"])
def key_params(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    if not request.param:
        return {}
    (tmp_path / "key").write_text("5a" * 32)
    return {"key_file": str(tmp_path / "key")}


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(**params: object) -> Server:
        base = {"base_path": str(tmp_path / "tier"), "num_workers": 2}
        made.append(Server("disk_adapter", "VerifiedDiskAdapter", base | params))
        return made[-1]

    yield start
    for server in made:
        server.adapter.close()


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "tier").glob("*.pkv"))


def test_the_disk_adapter_stores_finds_loads_and_deletes(
    on_disk: Callable[..., Server], key_params: dict[str, object], tmp_path: Path
) -> None:
    server = on_disk(**key_params)
    assert server.lookup(KEYS) == [False] * 4
    assert server.store(KEYS[:3], PAYLOADS[:3])
    assert server.lookup(KEYS) == [True, True, True, False]
    assert server.load(KEYS) == [*PAYLOADS[:3], None]
    usage = server.adapter.get_usage()
    assert usage.total_bytes_used == sum(path.stat().st_size for path in files(tmp_path))
    assert dict(usage.bytes_by_cache_salt) == {"tenant-a": usage.total_bytes_used}
    server.adapter.delete(KEYS[:1])
    assert server.lookup(KEYS[:3]) == [False, True, True]
    assert server.adapter.get_usage().total_bytes_used < usage.total_bytes_used
    assert server.store([], [])
    assert server.lookup([]) == server.load([]) == []
    assert on_disk(**key_params).load(KEYS[:3]) == [None, *PAYLOADS[1:3]]


def test_one_spoiled_file_of_a_batch_is_one_miss_on_disk(
    on_disk: Callable[..., Server], key_params: dict[str, object], tmp_path: Path
) -> None:
    server = on_disk(**key_params)
    server.store(KEYS, PAYLOADS)
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        assert sorted(server.load(KEYS), key=lambda one: one is None)[3] is None
        assert not path.exists()
        server.store(KEYS, PAYLOADS)
        assert server.load(KEYS) == PAYLOADS
    assert server.counts == {"refused_damaged": 4, "removed": 4}


def test_the_disk_adapter_keeps_its_cap_and_tells_what_went(on_disk: Callable[..., Server], tmp_path: Path) -> None:
    server = on_disk(max_capacity_gb=3.5 * 70_000 / 1024**3)
    gone: list[Any] = []
    listener = SimpleNamespace(
        on_l2_keys_stored=lambda keys, sizes: None,
        on_l2_keys_accessed=lambda keys: None,
        on_l2_keys_deleted=gone.extend,
    )
    server.adapter.register_listener(listener)
    assert server.adapter.supports_global_eviction
    for key, payload in zip(KEYS, PAYLOADS, strict=True):
        assert server.store([key], [payload])
    assert gone == KEYS[:1]
    assert server.lookup(KEYS) == [False, True, True, True]
    assert 0.8 < server.adapter.get_usage().usage_fraction <= 1.0
    assert not server.store([KEYS[0]], [bytes(300_000)])
    assert server.counts == {"evicted": 1, "no_room": 1}


def test_what_cannot_be_stored_or_read_at_all_is_counted_and_the_adapter_goes_on(
    on_disk: Callable[..., Server],
) -> None:
    server = on_disk()
    nothing = SimpleNamespace(byte_array=None)
    assert not server.run_store(KEYS[:1], [nothing])
    assert server.store(KEYS[1:2], PAYLOADS[1:2])
    assert server.load(KEYS[1:2]) == PAYLOADS[1:2]
    assert server.counts == {"failed_task": 1}

    def broken(*args: object) -> None:
        raise RuntimeError("a listener of the server's")

    server.adapter.register_listener(SimpleNamespace(on_l2_keys_stored=broken, on_l2_keys_accessed=broken))
    assert server.store(KEYS[2:3], PAYLOADS[2:3])
    assert server.load(KEYS[1:3]) == PAYLOADS[1:3]
    assert server.counts == {"failed_task": 3}


@pytest.mark.parametrize(
    "bad",
    [
        {"base_path": ""},
        {"base_path": 5},
        {"max_capacity_gb": -1},
        {"max_capacity_gb": True},
        {"num_workers": 0},
        {"key_file": 5},
        {"key_file": "/nowhere/key"},
        {"max_capacity": 1},
        {"codec": "int2"},
        {"codec": 8},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(on_disk: Callable[..., Server], bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        on_disk(**bad)


def test_settings_of_the_redis_tier_that_cannot_work_are_refused() -> None:
    for bad in (
        {"host": ""},
        {"port": 0},
        {"port": "6379"},
        {"num_workers": 0},
        {"key_file": 5},
        {"user": "x"},
        {"codec": ""},
    ):
        with pytest.raises(ValueError, match="allowed"):
            Server("redis_adapter", "VerifiedRedisAdapter", {"host": "127.0.0.1", "port": 6379} | bad)


@pytest.fixture(scope="module")
def on_tcp(start_valkey: Callable[..., Any]) -> Any:
    """A server on a port: LMCache's client knows no sockets."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return start_valkey(port=port)


def spoiled(value: bytes, how: str, other: bytes) -> bytes:
    return {
        "flipped": value[:-100] + bytes([value[-100] ^ 1]) + value[-99:],
        "zeroed": bytes(len(value)),
        "swapped": other,
        "truncated": value[:-1],
        "grown": value + b"x",
        "foreign": b"\x7fELF" + value[4:],
    }[how]


@pytest.mark.parametrize("how", ["flipped", "zeroed", "swapped", "truncated", "grown", "foreign"])
def test_a_spoiled_value_in_redis_is_a_counted_miss_and_is_written_again(
    how: str, on_tcp: Any, key_params: dict[str, object]
) -> None:
    on_tcp.reset()
    server = Server("redis_adapter", "VerifiedRedisAdapter", {"host": "127.0.0.1", "port": on_tcp.port} | key_params)
    with contextlib.closing(server.adapter), on_tcp.client() as client:
        tenants = [KEYS[0], replace(KEYS[0], cache_salt="tenant-b")]
        assert server.lookup(tenants) == [False, False]
        assert server.store(tenants, PAYLOADS[:2])
        assert server.lookup(tenants) == [True, True]
        assert server.load(tenants) == PAYLOADS[:2]
        mine = next(name for name in client.keys("*") if name.endswith(b"tenant-a"))
        theirs = next(name for name in client.keys("*") if name.endswith(b"tenant-b"))
        value, other = client.get(mine), client.get(theirs)
        assert isinstance(value, bytes)
        assert isinstance(other, bytes)
        client.set(mine, spoiled(value, how, other))
        assert server.load(tenants) == [None, PAYLOADS[1]]
        assert sum(server.counts.values()) >= 1
        assert server.store(tenants, PAYLOADS[:2])
        assert server.load(tenants) == PAYLOADS[:2]
        if how in ("flipped", "zeroed", "swapped", "foreign"):
            assert server.counts["removed"] == 1


def test_a_key_of_another_type_in_redis_is_one_miss_and_is_written_again(on_tcp: Any) -> None:
    on_tcp.reset()
    server = Server("redis_adapter", "VerifiedRedisAdapter", {"host": "127.0.0.1", "port": on_tcp.port})
    with contextlib.closing(server.adapter), on_tcp.client() as client:
        assert server.store(KEYS[:2], PAYLOADS[:2])
        mine = next(name for name in client.keys("*") if KEYS[0].chunk_hash.hex().encode() in name)
        client.delete(mine)
        client.rpush(mine, b"not", b"ours")
        assert server.lookup(KEYS[:2]) == [False, True]
        assert server.load(KEYS[:2]) == [None, PAYLOADS[1]]
        assert server.counts["removed"] == 1
        assert server.store(KEYS[:2], PAYLOADS[:2])
        assert server.load(KEYS[:2]) == PAYLOADS[:2]


def memory_object(tensor: torch.Tensor) -> Any:
    """Return LMCache's own object around a tensor."""
    shapes, dtypes = [tensor.shape], [tensor.dtype]
    facts = MemoryObjMetadata(tensor.shape, tensor.dtype, 0, tensor.nbytes, 1, shapes=shapes, dtypes=dtypes)
    return TensorMemoryObj(tensor.view(-1).view(torch.uint8), facts, None)


def test_both_adapters_pack_lmcaches_objects_in_threads_of_their_own(
    on_disk: Callable[..., Server], on_tcp: Any, key_params: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pancake_kernels.kv_codec.cpu import CpuBackend

    on_tcp.reset()
    seen: set[tuple[str, int]] = set()
    plain = CpuBackend.quantize

    def quantize(self: CpuBackend, source: Any, plane: Any) -> None:
        seen.add((threading.current_thread().name.split("_")[0], torch.get_num_threads()))
        plain(self, source, plane)

    monkeypatch.setattr(CpuBackend, "quantize", quantize)
    place = {"host": "127.0.0.1", "port": on_tcp.port, "codec": "int4"}
    redis = Server("redis_adapter", "VerifiedRedisAdapter", place | key_params)
    kv = torch.randn(2, 3, 64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    with contextlib.closing(redis.adapter), on_tcp.client() as client:
        disk = on_disk(codec="int4", **key_params)
        seen.clear()  # the trial of the codec
        for server in (disk, redis):
            assert server.run_store(KEYS[:1], [memory_object(kv.clone())])
            assert server.lookup(KEYS[:2]) == [True, False]
            back = torch.zeros_like(kv)
            task = server.adapter.submit_load_task(KEYS[:1], [memory_object(back)])
            while (loaded := server.adapter.query_load_result(task)) is None:
                server._await(server.adapter.get_load_event_fd())
            assert loaded.test(0)
            assert 0 < float((back - kv).abs().max()) < 0.3
            assert server.adapter.report_status()["codec"] == "int4"
            assert server.counts == {}
        assert 0.2 < disk.adapter.get_usage().total_bytes_used / kv.nbytes < 0.32
        assert client.strlen(client.keys("*")[0]) < 0.32 * kv.nbytes
        redis.adapter.delete(KEYS[:1])
        assert redis.lookup(KEYS[:1]) == [False]
    assert {count for name, count in seen if name == "pancake-store"} == {1}


def test_a_cache_server_starts_without_its_shared_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = Server("redis_adapter", "VerifiedRedisAdapter", {"host": "127.0.0.1", "port": port})
    with contextlib.closing(server.adapter):
        assert server.lookup(KEYS) == [False] * 4
        assert server.load(KEYS[:1]) == [None]
        assert not server.store(KEYS[:1], PAYLOADS[:1])
        assert server.counts["server_lost"] == 1
        assert not server.adapter.report_status()["is_reachable"]
