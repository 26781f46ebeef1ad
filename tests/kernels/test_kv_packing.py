"""KV in 8 or 4 bits in the tiers: on disk and in a real Valkey, within bounds, and never in place of exact KV."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import torch

from pancake_kernels.kv_codec import ChunkLayout, Order, codec_for, encoded_size
from pancake_lmcache import values as values_module
from pancake_lmcache.counts import Counts
from pancake_lmcache.frame import CODEC_INT4, CODEC_INT8, Identity, Sealer
from pancake_lmcache.kv_packing import Codec, Packer
from pancake_lmcache.objects import ObjectFolder
from pancake_lmcache.space import Space
from pancake_lmcache.values import RedisValues, connect, name_of

NAME = "w" + 24 * "a"
LAYERS, TOKENS, HEADS, SIZE, BLOCK = 2, 64, 2, 64, 32
WIDTH = HEADS * SIZE
CPU_SALT = f"{NAME}-v{SIZE}x{BLOCK}"
CHUNK = Identity(model="m/small", kv_rank=1, object_group=0, chunk_hash=b"\x01" * 32, salt=f"{CPU_SALT}.tenant")
KEY = bytes(range(32))
LAYOUTS = {4: ChunkLayout(Order.PLANES, 1, WIDTH), 3: ChunkLayout(Order.CPU_VEC, HEADS, SIZE, BLOCK)}
LOSSY = pytest.mark.parametrize("codec", ["int8", "int4"])


def chunk(num_axes: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return KV with loud and quiet channels."""
    noise = torch.Generator().manual_seed(num_axes)
    keys, values = torch.randn(2, LAYERS, TOKENS, WIDTH, generator=noise)
    keys *= torch.randn(LAYERS, 1, WIDTH, generator=noise).exp()
    shape = (LAYERS, TOKENS, 2 * WIDTH) if num_axes == 3 else (2, LAYERS, TOKENS, WIDTH)
    made = torch.zeros(shape, dtype=dtype)
    LAYOUTS[num_axes].join(keys.to(dtype), values.to(dtype), made)
    return made


def memory(tensor: torch.Tensor) -> Any:
    """Return what LMCache hands to an adapter, as far as it is looked at."""
    view = memoryview(tensor.view(torch.uint8).numpy()).cast("B")
    return SimpleNamespace(
        byte_array=view, metadata=SimpleNamespace(shape=tensor.shape, shapes=None, dtype=tensor.dtype)
    )


@dataclass
class Tier:
    """A store with the tier's codec, as an adapter uses it."""

    objects: Any
    packer: Packer
    counts: Counts
    raw: Callable[[Identity], bytes | None]
    put: Callable[[Identity, bytes], None]

    def store(self, tensor: torch.Tensor, identity: Identity = CHUNK) -> int | None:
        one = memory(tensor)
        stored: int | None = self.objects.store(identity, one.byte_array, self.packer.packing(identity.salt, one))
        return stored

    def load(self, like: torch.Tensor, identity: Identity = CHUNK) -> torch.Tensor | None:
        place = torch.zeros_like(like)
        one = memory(place)
        return place if self.objects.load(identity, one.byte_array, self.packer.packing(identity.salt, one)) else None

    def has(self, identity: Identity = CHUNK) -> bool:
        found: list[bool] = self.objects.has_all([(identity, self.packer.codecs(identity.salt))])
        return found[0]


MakeTier = Callable[..., Tier]


@pytest.fixture(scope="module")
def tcp_valkey(start_valkey: Callable[..., Any]) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return start_valkey(port=port)


@pytest.fixture(params=["disk", "redis"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTier]:
    clients: list[Any] = []
    server = request.getfixturevalue("tcp_valkey") if request.param == "redis" else None
    if server is not None:
        server.reset()

    def make(codec: Codec, key: bytes | None = None) -> Tier:
        counts = Counts("test")
        if server is None:
            folder = ObjectFolder(Space(tmp_path), Sealer(key), counts)

            def path(identity: Identity) -> Path:
                return tmp_path / folder.name_of(identity)

            return Tier(
                folder,
                Packer(codec, counts),
                counts,
                lambda identity: path(identity).read_bytes() if path(identity).exists() else None,
                lambda identity, data: path(identity).write_bytes(data) and None,
            )
        client: Any = connect("127.0.0.1", server.port)
        clients.append(client)
        return Tier(
            RedisValues(client, Sealer(key), counts),
            Packer(codec, counts),
            counts,
            lambda identity: client.get(name_of(identity)),
            lambda identity, data: client.set(name_of(identity), data) and None,
        )

    yield make
    for client in clients:
        client.close()


def bounds(tensor: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return half a step for each key and value, and one part in a hundred for the rounding of scales."""

    def half_step(groups: torch.Tensor, axis: int) -> torch.Tensor:
        low, high = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
        step = torch.maximum(high, -low) / 127 if codec == "int8" else torch.maximum((high - low) / 15, low.abs() / 112)
        return (step * 0.505).expand_as(groups)

    keys, values = LAYOUTS[tensor.dim()].split(tensor)
    channels = 64 if codec == "int8" else 32
    of_keys = half_step(keys.unflatten(1, (-1, 32)), 2).flatten(1, 2)
    return of_keys, half_step(values.unflatten(2, (-1, channels)), 3).flatten(2, 3)


@LOSSY
@pytest.mark.parametrize("num_axes", [3, 4], ids=["cpu", "planes"])
@pytest.mark.parametrize("key", [None, KEY], ids=["checksum", "key"])
def test_what_was_packed_comes_back_within_its_bound(
    make_tier: MakeTier, codec: Codec, num_axes: int, key: bytes | None
) -> None:
    tier, kv = make_tier(codec, key), chunk(num_axes)
    stored = tier.store(kv)
    assert stored == Sealer.header_bytes(CHUNK) + encoded_size((LAYERS, TOKENS, WIDTH), kv.dtype, codec)
    assert stored == len(tier.raw(CHUNK) or b"")
    assert tier.has()
    assert tier.store(kv) == 0
    back = tier.load(kv)
    assert back is not None
    for was, now, bound in zip(
        LAYOUTS[num_axes].split(kv), LAYOUTS[num_axes].split(back), bounds(kv, codec), strict=True
    ):
        assert bool(((was - now).abs() <= bound).all())
        assert not torch.equal(was, now)
    assert tier.counts.snapshot() == {}


def test_bfloat16_gets_as_short_as_promised(make_tier: MakeTier) -> None:
    kv = chunk(3, torch.bfloat16)
    for codec, share in (("int8", 0.53), ("int4", 0.30)):
        identity = replace(CHUNK, salt=f"{CPU_SALT}!{codec}.tenant")
        stored = make_tier("exact").store(kv, identity)
        assert stored is not None
        assert stored - Sealer.header_bytes(identity) <= share * kv.nbytes


def test_exact_keeps_every_bit(make_tier: MakeTier) -> None:
    kv = chunk()
    kv[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    tier = make_tier("exact")
    for tensor, identity in ((kv, CHUNK), (kv, replace(CHUNK, salt=f"{CPU_SALT}!exact"))):
        tier.store(tensor, identity)
        back = tier.load(tensor, identity)
        assert back is not None
        assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))


@LOSSY
def test_what_cannot_be_packed_is_stored_as_it_is_and_counted(make_tier: MakeTier, codec: Codec) -> None:
    tier, odd, short = make_tier(codec), chunk(), chunk(4)[:, :, :1, :1].contiguous()
    odd[1, 2, 3] = float("nan")
    nameless = replace(CHUNK, salt="tenant")
    arm = replace(CHUNK, salt=f"{NAME}-neon{SIZE}x{BLOCK}")
    for identity, kv in ((CHUNK, odd), (nameless, chunk()), (arm, chunk()), (replace(CHUNK, kv_rank=2), short)):
        assert tier.store(kv, identity) == Sealer.header_bytes(identity) + kv.nbytes
        assert tier.has(identity)
        back = tier.load(kv, identity)
        assert back is not None
        assert torch.equal(back.view(torch.int32), kv.view(torch.int32))
    assert tier.counts.snapshot() == {
        "kept_exact_no_gain": 1,
        "kept_exact_odd_values": 1,
        "kept_exact_unknown_layout": 2,
    }


def test_who_asks_for_exact_kv_gets_no_other_and_replaces_it(make_tier: MakeTier) -> None:
    kv = chunk()
    exact, eight, four = (make_tier(codec) for codec in ("exact", "int8", "int4"))
    four.store(kv)
    assert [tier.has() for tier in (exact, eight, four)] == [False, False, True]
    assert exact.load(kv) is None
    assert eight.store(kv)
    assert [tier.has() for tier in (exact, eight, four)] == [False, True, True]
    assert four.load(kv) is not None
    assert exact.store(kv)
    assert [tier.has() for tier in (exact, eight, four)] == [True, True, True]
    assert [tier.store(kv) for tier in (eight, four)] == [0, 0]
    back = four.load(kv)
    assert back is not None
    assert torch.equal(back, kv)
    assert exact.counts["refused_codec"] == 3
    assert exact.counts["removed"] == 0
    assert exact.counts["rewritten"] == eight.counts["rewritten"] == 1


def test_each_agent_has_its_own_codec_in_one_tier(make_tier: MakeTier) -> None:
    tier, kv = make_tier("int8"), chunk()
    sizes = {}
    for codec in ("exact", "int8", "int4", "int2"):
        identity = replace(CHUNK, salt=f"{CPU_SALT}!{codec}+a1.tenant")
        sizes[codec] = (tier.store(kv, identity) or 0) - Sealer.header_bytes(identity)
        assert tier.load(kv, identity) is not None
    assert sizes["int2"] == sizes["exact"]  # a later release's: nothing is lost that nobody here knows of
    assert sizes["exact"] > 3 * sizes["int8"] > 4 * sizes["int4"]


def body_of(kv: torch.Tensor, codec: str) -> bytes:
    return bytes(codec_for("cpu").encode(*LAYOUTS[3].split(kv), codec).numpy())


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (CODEC_INT8, b""),
        (CODEC_INT8, b"no frame at all"),
        (CODEC_INT8, body_of(chunk(), "int8")[:-1]),
        (CODEC_INT8, body_of(chunk(), "int8") + b"x"),
        (CODEC_INT8, body_of(chunk(), "int4")),
        (CODEC_INT4, body_of(chunk()[:1], "int4")),
        (CODEC_INT4, body_of(chunk(3, torch.bfloat16), "int4")),
    ],
    ids=["empty", "foreign", "short", "long", "other mode", "other shape", "other dtype"],
)
def test_a_well_sealed_body_that_is_not_this_kv_is_a_counted_miss(
    make_tier: MakeTier, number: int, body: bytes
) -> None:
    tier, kv = make_tier("int4"), chunk()
    head, packed = Sealer().seal(CHUNK, body, codec=number, raw_bytes=kv.nbytes)
    tier.put(CHUNK, head + bytes(packed))
    assert tier.load(kv) is None
    assert tier.raw(CHUNK) is None
    assert tier.counts.snapshot() == {"refused_damaged": 1, "removed": 1}
    assert tier.store(kv)
    assert tier.load(kv) is not None


@LOSSY
def test_a_packed_object_that_was_changed_is_a_counted_miss(make_tier: MakeTier, codec: Codec) -> None:
    tier, kv = make_tier(codec), chunk()
    tier.store(kv)
    stored = tier.raw(CHUNK) or b""
    for at in (20, 24, 30, 60, 120, len(stored) // 2, len(stored) - 1):
        tier.put(CHUNK, stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :])
        assert tier.load(kv) is None
    for data in (stored[:-1], stored + b"x", stored[:100]):
        tier.put(CHUNK, data)
        assert not tier.has()
    tier.put(CHUNK, stored)
    assert tier.load(kv) is not None


def test_a_salt_tells_the_codec_only_where_the_engine_wrote_it() -> None:
    packer = Packer("int8", Counts("test"))
    asked = {
        f"{NAME}!int4": "int4",
        f"{NAME}-v64x64!int4": "int4",
        f"{NAME}-a64x32!exact+a1~{24 * 'b'}": "exact",
        f"{NAME}.tenant!int4": "int8",
        f"{NAME}-v64x64.x!exact": "int8",
        "tenant!int4": "int8",
        f"{NAME}": "int8",
        f"{NAME}!int4x.a": "exact",
        f"{NAME}-unknown0a1b2c3d!exact.tenant": "exact",
        f"{NAME}-unknown0a1b2c3d.x!exact": "int8",
        "": "int8",
    }
    assert {salt: packer.codec_of(salt) for salt in asked} == asked


def test_a_server_that_is_lost_costs_misses_and_is_found_again(
    tcp_valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tcp_valkey.reset()
    counts, kv = Counts("test"), chunk()
    client: Any = connect("127.0.0.1", tcp_valkey.port)
    tier = Tier(RedisValues(client, Sealer(), counts), Packer("int8", counts), counts, lambda _: None, lambda *_: None)
    assert tier.store(kv)
    tcp_valkey.stop()
    try:
        assert not tier.has()
        assert tier.load(kv) is None
        assert tier.store(kv) is None
        assert counts.snapshot() == {"gone": 1, "server_lost": 1, "server_skipped": 2, "store_failed": 1}
    finally:
        tcp_valkey.start()
    later_s = time.monotonic() + 60.0
    monkeypatch.setattr(values_module, "time", SimpleNamespace(monotonic=lambda: later_s))
    assert tier.store(kv) is not None
    assert tier.load(kv) is not None
    client.close()


def test_a_server_that_freezes_costs_one_deadline_and_then_nothing(
    tcp_valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tcp_valkey.reset()
    now_s = time.monotonic()
    monkeypatch.setattr(values_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(values_module, "_ANSWER_S", 0.05)
    counts, kv = Counts("test"), chunk()
    client: Any = connect("127.0.0.1", tcp_valkey.port)
    values = RedisValues(client, Sealer(), counts)
    tier = Tier(values, Packer("int8", counts), counts, lambda _: None, lambda *_: None)
    os.kill(tcp_valkey.pid, signal.SIGSTOP)
    try:
        for lost, pause_s in enumerate((1.0, 2.0, 4.0), start=1):
            assert not tier.has()
            now_s += pause_s - 0.1
            assert not tier.has()
            assert (counts["server_lost"], counts["server_skipped"]) == (lost, lost)
            now_s += 0.2
    finally:
        os.kill(tcp_valkey.pid, signal.SIGCONT)
    client.connection_pool.connection_kwargs["socket_timeout"] = 60.0
    client.connection_pool.disconnect()
    assert tier.store(kv)
    assert tier.load(kv) is not None
    assert not values.is_down
    client.close()


def test_calls_that_are_lost_side_by_side_lengthen_the_pause_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, together = 100.0, threading.Barrier(4)
    monkeypatch.setattr(values_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Lost:
        def get(self, _: str) -> None:
            together.wait()
            raise redis.ConnectionError

    counts = Counts("test")
    lost: Any = Lost()
    values = RedisValues(lost, Sealer(), counts)
    callers = [threading.Thread(target=values.load, args=(CHUNK, memoryview(bytearray(8)))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert counts["server_lost"] == 4
    now_s += 1.1
    assert not values.is_down
