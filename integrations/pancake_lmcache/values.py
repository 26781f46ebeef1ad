"""Objects as values of a Redis or Valkey server: the same frames as on disk, under LMCache's own names.

Everything that goes wrong is counted and becomes a miss.  A server that does not answer is left alone for a moment, so
that a dead or frozen one does not cost every lookup its deadline; the first call after that tries it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pancake_lmcache.counts import Counts
from pancake_lmcache.frame import Identity, Refusal, Refused, Sealer
from pancake_lmcache.packing import AS_IS, Packing

if TYPE_CHECKING:
    import redis

_CONNECT_S: Final = 0.5
_ANSWER_S: Final = 1.0
#: How long a server that was lost is left alone: at first, and at most; doubled each time it is not back.
_MIN_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
#: How a server begins its answer about a key that holds no string.
_WRONG_TYPE: Final = "WRONGTYPE"
_Result = TypeVar("_Result")


class RedisValues:
    """Sealed objects in one server.  Thread-safe, and safe beside other processes on the same server."""

    def __init__(self, client: redis.Redis, sealer: Sealer, counts: Counts) -> None:
        """Take a client; nothing is asked yet.

        Args:
            client: Gives bytes, not text, and has deadlines; see `connect`.
            sealer: How values are sealed.
            counts: Where misses and drops are counted.
        """
        self._client: Any = client
        self._sealer = sealer
        self._counts = counts
        self._lock = threading.Lock()
        self._down_until_s = 0.0
        self._pause_s = _MIN_PAUSE_S

    @property
    def is_down(self) -> bool:
        """Whether the server is left alone just now."""
        with self._lock:
            return time.monotonic() < self._down_until_s

    def has_all(self, wanted: list[tuple[Identity, Packing]]) -> list[bool]:
        """Say which objects are there, going by header and size; one round trip."""
        heads = self._heads([identity for identity, _ in wanted])
        if heads is None:
            return [False] * len(wanted)
        return [self._fits(*one, *head) for one, head in zip(wanted, heads, strict=True)]

    def load(self, identity: Identity, payload: memoryview, packing: Packing = AS_IS) -> bool:
        """Fill `payload` and say whether it is right; what it holds after `False` is not to be used."""
        value: bytes | None = self._ask(lambda client: client.get(name_of(identity)), None)
        if value is None:
            self._counts.add("gone")
            return False
        split = self._sealer.header_bytes(identity)
        head, body = memoryview(value)[:split], memoryview(value)[split:]
        try:
            found = self._sealer.check_header(identity, head, total_bytes=len(value), codecs=packing.codecs)
            if found.raw_bytes != len(payload):
                raise Refused(Refusal.SIZE)
            packing.unpack(found.codec, self._sealer.open(identity, head, body, codecs=packing.codecs), payload)
        except Refused as refused:
            self._refuse(identity, refused.refusal)
            return False
        return True

    def store(self, identity: Identity, payload: memoryview, packing: Packing = AS_IS) -> int | None:
        """Write an object unless it is there; return the bytes written (0: it was there), or `None` if it was dropped.

        Whatever is under its name but is not this object, going by header and size, is replaced.
        """
        heads = self._heads([identity])
        if heads is None:
            self._counts.add("store_failed")
            return None
        if heads[0][1] and self._stands(identity, *heads[0], len(payload), packing):
            return 0
        codec, packed = packing.pack(payload)
        value = b"".join(self._sealer.seal(identity, packed, codec=codec, raw_bytes=len(payload)))
        if self._ask(lambda client: client.set(name_of(identity), value), None) is None:
            self._counts.add("store_failed")
            return None
        return len(value)

    def delete(self, identity: Identity) -> bool:
        """Remove an object; say whether it was there and is gone."""
        return bool(self._ask(lambda client: client.delete(name_of(identity)), 0))

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _heads(self, identities: list[Identity]) -> list[tuple[bytes, int]] | None:
        """Return the first bytes and the length of each value, 0 if there is none; `None` without an answer.

        A key of another type than a string counts as a value of one byte, which no object has.
        """
        import redis

        if not identities:
            return []

        def ask(client: Any) -> list[tuple[bytes, int]]:
            pipeline = client.pipeline(transaction=False)
            for identity in identities:
                pipeline.getrange(name_of(identity), 0, self._sealer.header_bytes(identity) - 1)
                pipeline.strlen(name_of(identity))
            answers = pipeline.execute(raise_on_error=False)
            for number, answer in enumerate(answers):
                if isinstance(answer, redis.RedisError):
                    if not str(answer).startswith(_WRONG_TYPE):
                        raise answer
                    answers[number] = (b"", 1)[number % 2]
            return list(zip(answers[::2], answers[1::2], strict=True))

        return self._ask(ask, None)

    def _fits(self, identity: Identity, packing: Packing, head: bytes, num_bytes: int) -> bool:
        if not num_bytes:
            return False  # the plain miss: never stored, or evicted
        try:
            self._sealer.check_header(identity, head, total_bytes=num_bytes, codecs=packing.codecs)
        except Refused as refused:
            self._refuse(identity, refused.refusal)
            return False
        return True

    def _stands(self, identity: Identity, head: bytes, num_bytes: int, raw_bytes: int, packing: Packing) -> bool:
        """Say whether a store can be left out; what is in its way is counted."""
        try:
            found = self._sealer.check_header(identity, head, total_bytes=num_bytes, codecs=packing.codecs)
            if found.raw_bytes != raw_bytes:
                raise Refused(Refusal.SIZE)
        except Refused as refused:
            self._counts.add("rewritten", detail=refused.refusal.value)
            return False
        return True

    def _refuse(self, identity: Identity, refusal: Refusal) -> None:
        self._counts.add(f"refused_{refusal.value}")
        if not refusal.may_be_of_use and self.delete(identity):
            self._counts.add("removed")

    def _ask(self, call: Callable[[Any], _Result], default: _Result) -> _Result:
        """Return the server's answer; `default`, counted, if it does not answer or refuses."""
        import redis

        if self.is_down:
            self._counts.add("server_skipped")
            return default
        try:
            answer = call(self._client)
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            self._counts.add("server_lost", detail=type(error).__name__)
            self._lost()
        except redis.RedisError as error:  # it answers, but refuses: no room, another type, no right
            self._counts.add("server_refused", detail=type(error).__name__)
        else:
            with self._lock:
                self._pause_s = _MIN_PAUSE_S
            return answer
        return default

    def _lost(self) -> None:
        """Leave the server alone for a while; calls that were lost side by side count as one."""
        now_s = time.monotonic()
        with self._lock:
            if now_s >= self._down_until_s:
                self._down_until_s = now_s + self._pause_s
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)


def connect(host: str, port: int, *, user: str = "", password: str = "", connections: int = 8) -> redis.Redis:
    """Return a client with short deadlines that connects when it is first used."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    pool: Any = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
        host=host,
        port=port,
        username=user or None,
        password=password or None,
        socket_connect_timeout=_CONNECT_S,
        socket_timeout=_ANSWER_S,
        max_connections=connections,
        timeout=_ANSWER_S,
        # Once more on a connection that a restarted server closed; not on one that gave no answer in time.
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    )
    return redis.Redis.from_pool(pool)  # closes the pool with the client


def name_of(identity: Identity) -> str:
    """Return the value's name, as LMCache's own Redis tier would have it."""
    name = f"{identity.model}@{identity.kv_rank:08x}@{identity.object_group:x}@{identity.chunk_hash.hex()}"
    return f"{name}@{identity.salt}" if identity.salt else name
