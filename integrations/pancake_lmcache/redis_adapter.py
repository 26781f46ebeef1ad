"""LMCache's Redis/Valkey tier with proof of what it serves.

Named to LMCache's server by `--l2-adapter`, its documented way to load an adapter from another package:
`{"type": "plugin", "module_path": "pancake_lmcache.redis_adapter", "class_name": "VerifiedRedisAdapter",
"adapter_params": {"host": HOST, "port": PORT}}`.

LMCache's own client moves the bytes.  Around it sits `SealedClient`, which has the client's interface and puts the same
frame around each value as the disk tier does; LMCache's bridge for such clients does the rest.  Eviction is the
server's: give it `maxmemory` and an LRU policy.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmcache.logging import init_logger
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter

from pancake_lmcache.counts import LOGGER_NAME, Counts
from pancake_lmcache.frame import Identity, Refused, Sealer, read_key_file

#: LMCache gives every logger its handlers one by one.
logger = init_logger(LOGGER_NAME)

_MAX_PORT: Final = 65535
_MAX_WORKERS: Final = 64
_Completion = tuple[int, bool, str, list[bool] | None]


@dataclass(frozen=True, slots=True)
class _Get:
    """Values under way: whose they are, where they go, and the memory that catches them."""

    names: list[str]
    places: list[memoryview]
    caught: list[bytearray]


class SealedClient:
    """A client of LMCache's kind around another one: seals what is set, opens what is got.  Thread-safe."""

    def __init__(self, inner: Any, sealer: Sealer, counts: Counts) -> None:
        """Wrap a client.

        Args:
            inner: Moves the bytes; has the interface of LMCache's native clients.
            sealer: How values are sealed.
            counts: Where misses are counted.
        """
        self._inner = inner
        self._sealer = sealer
        self._counts = counts
        self._lock = threading.Lock()
        self._gets: dict[int, _Get] = {}
        self._sets: dict[int, list[bytes]] = {}
        self._removals: set[int] = set()

    def event_fd(self) -> int:
        """Return the descriptor that says that something ended."""
        return int(self._inner.event_fd())

    def submit_batch_set(self, names: list[str], payloads: list[memoryview]) -> int:
        """Begin to write sealed values; return the number of the batch."""
        values = []
        for name, payload in zip(names, payloads, strict=True):
            head, body = self._sealer.seal(identity_of(name), payload.cast("B"))
            values.append(b"".join((head, body)))
        with self._lock:  # before its end can be seen
            number = int(self._inner.submit_batch_set(names, [memoryview(value) for value in values]))
            self._sets[number] = values
        return number

    def submit_batch_get(self, names: list[str], places: list[memoryview]) -> int:
        """Begin to read values; what is right is put in its place when the batch is drained."""
        caught = [
            bytearray(self._sealer.header_bytes(identity_of(name)) + len(place))
            for name, place in zip(names, places, strict=True)
        ]
        with self._lock:
            number = int(self._inner.submit_batch_get(names, [memoryview(one) for one in caught]))
            self._gets[number] = _Get(names, places, caught)
        return number

    def submit_batch_exists(self, names: list[str]) -> int:
        """Begin to look which values are there."""
        return int(self._inner.submit_batch_exists(names))

    def submit_batch_delete(self, names: list[str]) -> int:
        """Begin to remove values."""
        return int(self._inner.submit_batch_delete(names))

    def drain_completions(self) -> list[_Completion]:
        """Return what ended; of a get, which values are right.  Wrong ones are removed."""
        result: list[_Completion] = []
        for number, good, error, each in self._inner.drain_completions():
            with self._lock:
                self._sets.pop(int(number), None)
                get = self._gets.pop(int(number), None)
                is_removal = int(number) in self._removals
                self._removals.discard(int(number))
            if is_removal:
                continue  # nobody outside asked for it
            if get is not None:
                arrived = each if each is not None else [bool(good)] * len(get.names)
                each = self._opened(get, list(arrived))
            result.append((int(number), bool(good), error, each))
        return result

    def close(self) -> None:
        """End the client."""
        self._inner.close()

    def _opened(self, get: _Get, arrived: list[bool]) -> list[bool]:
        """Return which values are right, after putting those in their places."""
        right, wrong = [], []
        for name, place, value, came in zip(get.names, get.places, get.caught, arrived, strict=True):
            is_right = False
            if came:
                identity = identity_of(name)
                split = self._sealer.header_bytes(identity)
                view = memoryview(value)
                try:
                    place.cast("B")[:] = self._sealer.open(identity, view[:split], view[split:])
                    is_right = True
                except Refused as refused:
                    self._counts.add(f"refused_{refused.refusal.value}")
                    if not refused.refusal.may_be_of_use:
                        wrong.append(name)
            else:
                self._counts.add("gone")
            right.append(is_right)
        if wrong:
            self._counts.add("removed", len(wrong))
            with self._lock:
                self._removals.add(int(self._inner.submit_batch_delete(wrong)))
        return right


class VerifiedRedisAdapterConfig(L2AdapterConfigBase):
    """Settings of the Redis tier, as in `adapter_params`."""

    def __init__(self, host: str, port: int, *, num_workers: int = 8, key_file: str | None = None) -> None:
        """Keep the settings.

        Args:
            host: Where the server is.
            port: Its port.
            num_workers: Threads of LMCache's client.
            key_file: File with the key to encrypt with; `None`: checksums only.
        """
        self.host = host
        self.port = port
        self.num_workers = num_workers
        self.key_file = key_file

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> VerifiedRedisAdapterConfig:
        """Return settings from JSON.

        Raises:
            ValueError: if one is missing, unknown, or out of range.
        """
        known = {"host", "port", "num_workers", "key_file"}
        if unknown := sorted(set(d) - known):
            raise ValueError(f"adapter_params: got {', '.join(unknown)}; allowed are {', '.join(sorted(known))}")
        host, port, key_file = d.get("host"), d.get("port"), d.get("key_file")
        if not isinstance(host, str) or not host:
            raise ValueError(f"host: got {host!r}, allowed is a name or an address")
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= _MAX_PORT:
            raise ValueError(f"port: got {port!r}, allowed are 1 to {_MAX_PORT}")
        if key_file is not None and not isinstance(key_file, str):
            raise ValueError(f"key_file: got {key_file!r}, allowed is the path of a file")
        workers = d.get("num_workers", 8)
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= _MAX_WORKERS:
            raise ValueError(f"num_workers: got {workers!r}, allowed are 1 to {_MAX_WORKERS}")
        return cls(host, port, num_workers=workers, key_file=key_file)

    @classmethod
    def help(cls) -> str:
        """Return what the server prints about the settings."""
        return (
            "Verified Redis adapter, adapter_params:\n"
            "- host (str), port (int): the Redis or Valkey server (required)\n"
            "- num_workers (int): threads of the client (default 8)\n"
            "- key_file (str): file with a 32-byte key; encrypts with AES-256-GCM (default: checksums only)\n"
            "User and password are read from LMCACHE_RESP_USERNAME and LMCACHE_RESP_PASSWORD, as LMCache does."
        )


class VerifiedRedisAdapter(NativeConnectorL2Adapter):
    """Objects in Redis or Valkey, served only when they are proven right.  Thread-safe."""

    def __init__(self, config: VerifiedRedisAdapterConfig, l1_memory_desc: object = None) -> None:
        """Connect.

        Args:
            config: The settings.
            l1_memory_desc: Not used; LMCache gives it to every adapter.

        Raises:
            ValueError: if the key file is not right.
            RuntimeError: if the server is not there.
        """
        from lmcache.lmcache_redis import LMCacheRedisClient

        sealer = Sealer(None if config.key_file is None else read_key_file(Path(config.key_file)))
        self._counts = Counts(f"Redis tier {config.host}:{config.port}")
        user, password = (os.environ.get(f"LMCACHE_RESP_{name}", "") for name in ("USERNAME", "PASSWORD"))
        inner = LMCacheRedisClient(config.host, config.port, config.num_workers, user, password)
        extra = {"host": config.host, "port": config.port, "encrypted": sealer.encrypts}
        super().__init__(SealedClient(inner, sealer, self._counts), type_name=type(self).__name__, extra_status=extra)

    def report_status(self) -> dict[str, Any]:
        """Return what `GET /status` of the server shows; `counts` holds every miss by kind."""
        return {**super().report_status(), "counts": self._counts.snapshot()}


def identity_of(name: str) -> Identity:
    """Return whose value it is, from the name that LMCache gives it: model, rank, group, hash and maybe salt.

    Raises:
        ValueError: if the name is not one of LMCache's.
    """
    model, rank, group, chunk_hash, *salt = name.split("@")
    return Identity(model, int(rank, 16), int(group, 16), bytes.fromhex(chunk_hash), salt[0] if salt else "")
