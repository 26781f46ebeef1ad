"""The event subscription against a publisher that speaks as the engine does."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.engines.kv_events import KvEventSubscriber

BLOCK = 4


def stored(first: int) -> dict:
    return {
        "type": "BlockStored",
        "block_hashes": [first],
        "parent_block_hash": None,
        "token_ids": list(range(first, first + BLOCK)),
        "block_size": BLOCK,
        "medium": "GPU",
        "extra_keys": [None],
        "group_idx": 0,
    }


class Publisher:
    """One engine's end: publishes, keeps what it published, replays it on request."""

    def __init__(self, folder, *, keep: int = 1000) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self.keep = keep
        self.batches: list[tuple[int, bytes]] = []
        self.sequence = 0
        self.stamp_s = 1.0

    async def __aenter__(self):
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)  # as PUB, but tells of subscribers
        self.pub.bind(self.endpoint)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(self.replay_endpoint)
        self.task = asyncio.create_task(self._replay())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.context.destroy(linger=0)

    async def subscribed(self) -> None:
        async with asyncio.timeout(5):
            assert await self.pub.recv() == b"\x01"

    async def publish(self, *events: dict, lost: bool = False) -> None:
        self.stamp_s += 1
        payload = msgspec.msgpack.encode([self.stamp_s, list(events), 0])
        self.batches = [*self.batches, (self.sequence, payload)][-self.keep :]
        if not lost:
            await self.pub.send_multipart([b"kv", self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    def start_over(self) -> None:
        self.sequence, self.batches = 0, []

    async def _replay(self) -> None:
        while True:
            who, _, first = await self.router.recv_multipart()
            for sequence, payload in self.batches:
                if sequence >= int.from_bytes(first, "big"):
                    await self.router.send_multipart([who, b"", b"kv", sequence.to_bytes(8, "big"), payload])
            await self.router.send_multipart([who, b"", b"", b"\xff" * 8, b""])


@asynccontextmanager
async def following(publisher: Publisher, *, replay: bool = True):
    changed = asyncio.Event()
    subscriber = KvEventSubscriber(
        publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint if replay else None,
        on_change=lambda index: changed.set(),
    )
    await subscriber.start()
    await subscriber.start()

    async def until(condition) -> None:
        async with asyncio.timeout(5):
            while not condition():
                changed.clear()
                await changed.wait()

    try:
        yield subscriber.index, until
    finally:
        await subscriber.stop()
        await subscriber.stop()
        assert not subscriber.index.complete


@pytest.fixture
def folder(tmp_path_factory):
    # Unix socket paths are short; the test's own folder may not be.
    return tmp_path_factory.mktemp("z")


async def test_events_before_and_after_the_start_are_both_seen(folder):
    async with Publisher(folder) as publisher:
        await publisher.publish(stored(0))
        async with following(publisher) as (index, until):
            await until(lambda: index.complete)
            assert index.resident_tokens(range(4)) == 4
            await publisher.publish(stored(100))
            await until(lambda: index.resident_tokens(range(100, 104)) == 4)
            assert index.complete


async def test_an_engine_that_published_nothing_has_an_empty_pool(folder):
    async with Publisher(folder) as publisher, following(publisher) as (index, until):
        await until(lambda: index.complete)
        assert index.num_blocks == 0


async def test_a_lost_batch_is_asked_for(folder):
    async with Publisher(folder) as publisher, following(publisher) as (index, until):
        await until(lambda: index.complete)
        await publisher.publish(stored(0), lost=True)
        await publisher.publish(stored(100))
        await until(lambda: index.resident_tokens(range(100, 104)) == 4)
        assert index.resident_tokens(range(4)) == 4
        assert index.complete
        assert index.allocated_tokens == 8


async def test_a_batch_that_nobody_kept_makes_residency_unknown(folder):
    async with Publisher(folder, keep=1) as publisher, following(publisher) as (index, until):
        await until(lambda: index.complete)
        await publisher.publish(stored(0), lost=True)
        await publisher.publish(stored(100))
        await until(lambda: index.resident_tokens(range(100, 104)) == 4)
        assert not index.complete
        await publisher.publish({"type": "AllBlocksCleared"})
        await until(lambda: index.complete)


async def test_without_replay_a_late_start_is_unknown_until_the_pool_is_cleared(folder):
    async with Publisher(folder) as publisher:
        await publisher.publish(stored(0))
        async with following(publisher, replay=False) as (index, until):
            await publisher.subscribed()
            await publisher.publish(stored(100))
            await until(lambda: index.num_blocks == 1)
            assert not index.complete
            await publisher.publish({"type": "AllBlocksCleared"}, stored(200))
            await until(lambda: index.complete)
            assert index.resident_tokens(range(200, 204)) == 4


async def test_an_engine_that_starts_over_resets_the_index(folder):
    async with Publisher(folder) as publisher, following(publisher) as (index, until):
        await until(lambda: index.complete)
        for first in (0, 100, 200):
            await publisher.publish(stored(first))
        await until(lambda: index.num_blocks == 3)
        publisher.start_over()
        await publisher.publish(stored(300), lost=True)
        await publisher.publish(stored(400))
        await until(lambda: index.resident_tokens(range(400, 404)) == 4)
        assert index.resident_tokens(range(300, 304)) == 4
        assert index.resident_tokens(range(4)) == 0
        assert index.complete


async def test_an_engine_that_goes_away_makes_residency_unknown_until_it_is_back(folder):
    async with Publisher(folder) as publisher:
        await publisher.publish(stored(0))
        async with following(publisher) as (index, until):
            await until(lambda: index.complete)
            await publisher.__aexit__()
            await until(lambda: not index.complete)
            assert index.num_blocks == 0
            async with Publisher(folder) as again:
                await again.publish(stored(100))
                await until(lambda: index.complete)
                assert index.resident_tokens(range(100, 104)) == 4
                assert index.resident_tokens(range(4)) == 0
            await until(lambda: not index.complete)


async def test_restarts_of_the_engine_are_counted(folder):
    async with Publisher(folder) as publisher:
        changed = asyncio.Event()
        subscriber = KvEventSubscriber(
            publisher.endpoint, replay_endpoint=publisher.replay_endpoint, on_change=lambda index: changed.set()
        )

        async def until(condition) -> None:
            async with asyncio.timeout(5):
                while not condition():
                    changed.clear()
                    await changed.wait()

        await subscriber.start()
        try:
            await publisher.subscribed()
            for first in (0, 100):
                await publisher.publish(stored(first))
            await until(lambda: subscriber.index.num_blocks == 2)
            assert subscriber.restarts == 0
            publisher.start_over()
            await publisher.publish(stored(200))
            await until(lambda: subscriber.index.num_blocks == 1)
            assert subscriber.restarts == 1
            await publisher.__aexit__()
            await until(lambda: not subscriber.index.complete)
            async with Publisher(folder):
                await until(lambda: subscriber.restarts == 2)
        finally:
            await subscriber.stop()


async def test_garbage_is_not_an_event(folder):
    async with Publisher(folder) as publisher, following(publisher) as (index, until):
        await until(lambda: index.complete)
        await publisher.subscribed()
        await publisher.pub.send_multipart([b"kv", (0).to_bytes(8, "big"), b"\xc1"])
        await publisher.pub.send_multipart([b"kv"])
        await publisher.publish(stored(0))  # batch 0: a known start again
        await until(lambda: index.num_blocks == 1)
        await publisher.pub.send_multipart([b"kv", (1).to_bytes(8, "big"), b"\xc1"])
        await publisher.publish(stored(100))
        await until(lambda: index.num_blocks == 2)
        assert not index.complete


async def test_an_engine_that_bound_a_port_is_connected_to():
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.PUB)
    port = pub.bind_to_random_port("tcp://127.0.0.1")
    for endpoint in (f"tcp://*:{port}", f"tcp://127.0.0.1:{port}"):
        subscriber = KvEventSubscriber(endpoint)
        await subscriber.start()
        payload = msgspec.msgpack.encode([1.0, [stored(0)], 0])
        async with asyncio.timeout(5):
            while subscriber.index.num_blocks == 0:
                await pub.send_multipart([b"kv", (0).to_bytes(8, "big"), payload])
                await asyncio.sleep(0.02)
        await subscriber.stop()
    context.destroy(linger=0)


async def test_an_engine_that_connects_to_us_is_heard():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.PUB)
    subscriber = KvEventSubscriber(f"tcp://127.0.0.1:{port}")
    await subscriber.start()
    try:
        pub.connect(f"tcp://127.0.0.1:{port}")
        payload = msgspec.msgpack.encode([1.0, [stored(0)], 0])
        async with asyncio.timeout(5):
            while subscriber.index.num_blocks == 0:
                await pub.send_multipart([b"kv", (0).to_bytes(8, "big"), payload])
                await asyncio.sleep(0.02)
    finally:
        await subscriber.stop()
        context.destroy(linger=0)


def test_other_addresses_are_refused():
    with pytest.raises(ConfigError, match="kv_replay_endpoint"):
        KvEventSubscriber("ipc://x", replay_endpoint="http://x")
