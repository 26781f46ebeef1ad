"""Listens to the events that a vLLM engine publishes about its pool, and keeps a `PoolIndex` up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.engines.residency import PoolIndex

if TYPE_CHECKING:
    from zmq.asyncio import Context, Socket

logger = logging.getLogger(__name__)

#: An engine that computes sends its history, up to some ten thousand batches, between its steps.
_REPLAY_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 5.0
_QUEUE_BATCHES: Final = 100_000
_END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)

#: One batch: its sequence number, the engine's time stamp, its events.
_Batch = tuple[int, float, list[dict[str, Any]]]


class KvEventSubscriber:
    """One subscription.  All methods belong to the loop on which `start` ran.

    Endpoints are given as the engine's `--kv-events-config` has them, and the other end is taken: the engine binds
    `ipc://…` and `tcp://*:PORT` and connects to `tcp://HOST:PORT`.  A host that cannot be bound here is connected to.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        on_change: Callable[[PoolIndex], None] | None = None,
    ) -> None:
        """Prepare without connecting; `on_change` is called after each batch, on the loop, and must return at once.

        Raises:
            ConfigError: if an endpoint is neither `ipc://` nor `tcp://`.
        """
        for name, value in (("kv_events_endpoint", endpoint), ("kv_replay_endpoint", replay_endpoint)):
            if value is not None and not value.startswith(("ipc://", "tcp://")):
                raise ConfigError(f"{name}: got {value!r}, allowed is an ipc:// or tcp:// address")
        self.index = PoolIndex()
        #: How often the engine hung up and came back, or began to count anew.
        self.restarts = 0
        self._has_hung_up = False
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._on_change = on_change
        self._context: Context | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._next_sequence = 0
        self._last_stamp_s = 0.0
        self._order = asyncio.Lock()
        self._failed_replay_at_s: float | None = None

    async def start(self) -> None:
        """Subscribe, and ask for what was missed.  Idempotent; does not fail when the engine is away."""
        if self._context is not None:
            return
        import zmq
        import zmq.asyncio

        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, _QUEUE_BATCHES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._attach(socket)
        self._tasks = [
            asyncio.create_task(self._watch(monitor), name="kv-events-watch"),
            asyncio.create_task(self._listen(socket), name="kv-events-listen"),
        ]

    async def stop(self) -> None:
        """Unsubscribe.  Idempotent, bounded in time."""
        context, self._context = self._context, None
        if context is None:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        context.destroy(linger=0)
        self.index.mark_incomplete()

    def _attach(self, socket: Socket) -> None:
        import zmq

        address = self._endpoint
        if address.startswith("ipc://"):
            socket.connect(address)
        elif "*" in address or "::" in address:
            socket.connect(address.replace("*", "127.0.0.1").replace("[::]", "[::1]"))
        else:
            try:
                socket.bind(address)
            except zmq.ZMQError:  # somebody else's address: the engine bound it by another name
                socket.connect(address)

    # -- following ------------------------------------------------------------------------------------------------

    async def _watch(self, monitor: Socket) -> None:
        """Start over at each new connection: behind it may be another engine with an empty pool."""
        import zmq
        from zmq.utils.monitor import parse_monitor_message

        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            async with self._order:
                if event == zmq.EVENT_DISCONNECTED:
                    logger.info("KV events: the engine hung up")
                    self.index.reset(complete=False)
                    self._has_hung_up = True
                else:
                    logger.debug("KV events: connected")
                    self.restarts += self._has_hung_up
                    self._has_hung_up = False
                    await self._resync()
            self._changed()

    async def _listen(self, socket: Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            batch = _decoded(frames[1:]) if len(frames) == 3 else None
            if batch is None:
                self.index.mark_incomplete()
                logger.warning("KV events: got a message that is not a batch of events; residency is unknown from here")
                continue
            async with self._order:
                await self._take(batch)
            self._changed()

    async def _take(self, batch: _Batch) -> None:
        sequence, stamp_s, _ = batch
        if sequence < self._next_sequence:
            if stamp_s <= self._last_stamp_s:
                return  # already seen through a replay
            logger.info("KV events: the engine started over")
            self.restarts += 1
            await self._resync(batch)
        elif self._should_retry():
            await self._resync(batch)
        elif sequence == self._next_sequence:
            self._apply(batch)
        else:
            await self._fill_gap(batch)

    def _should_retry(self) -> bool:
        failed_at_s = self._failed_replay_at_s
        return failed_at_s is not None and asyncio.get_running_loop().time() - failed_at_s > _RETRY_S

    def _apply(self, batch: _Batch) -> None:
        sequence, stamp_s, events = batch
        if sequence == 0:
            self.index.reset(complete=True)
        try:
            self.index.apply(events)
        except (TypeError, ValueError, KeyError, AttributeError):  # an event of a shape nobody has seen yet
            logger.debug("a KV event was not understood; residency is unknown until the pool is cleared")
            self.index.mark_incomplete()
        self._next_sequence, self._last_stamp_s = sequence + 1, stamp_s

    async def _resync(self, live: _Batch | None = None) -> None:
        """Start from the engine's first batch; without all of them the pool's state is not known."""
        self.index.reset(complete=False)
        self._next_sequence, self._last_stamp_s = 0, 0.0
        replayed = await self._replay(0)
        if replayed is not None and not replayed and live is None:
            self.index.reset(complete=True)  # nothing was ever published
        await self._apply_replayed(replayed or [], live)

    async def _fill_gap(self, live: _Batch) -> None:
        logger.debug("KV events: batches %d to %d are missing", self._next_sequence, live[0] - 1)
        replayed = await self._replay(self._next_sequence)
        await self._apply_replayed(replayed or [], live)

    async def _apply_replayed(self, replayed: list[_Batch], live: _Batch | None) -> None:
        batches = replayed if live is None or any(batch[0] == live[0] for batch in replayed) else [*replayed, live]
        for batch in batches:
            if batch[0] < self._next_sequence:
                continue
            if batch[0] > self._next_sequence:
                # What was lost may hold stores and removals alike: nothing known before can be trusted.
                self.index.reset(complete=False)
            self._apply(batch)

    async def _replay(self, first_sequence: int) -> list[_Batch] | None:
        """Ask for all batches from `first_sequence` on; `None` when nobody answers in time."""
        if self._replay_endpoint is None or self._context is None:
            return None
        import zmq

        self._failed_replay_at_s = None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        batches: list[_Batch] = []
        try:
            socket.connect(self._replay_endpoint.replace("*", "127.0.0.1"))
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", first_sequence.to_bytes(8, "big")])
                while True:
                    frames = (await socket.recv_multipart())[-3:]
                    if len(frames) == 3 and frames[1] == _END_OF_REPLAY:
                        return batches
                    batch = _decoded(frames[1:]) if len(frames) == 3 else None
                    if batch is None:
                        return None
                    batches.append(batch)
        except (TimeoutError, zmq.ZMQError) as exc:
            logger.warning("KV events: no replay (%s); residency is unknown until one comes", type(exc).__name__)
            self._failed_replay_at_s = asyncio.get_running_loop().time()
            return None
        finally:
            socket.close()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.index)


def _decoded(frames: list[bytes]) -> _Batch | None:
    import msgspec

    try:
        payload = msgspec.msgpack.decode(frames[1])
        stamp_s, events = payload[0], payload[1]
        return int.from_bytes(frames[0], "big"), float(stamp_s), [dict(event) for event in events]
    except (msgspec.DecodeError, TypeError, ValueError, IndexError, KeyError):
        return None
