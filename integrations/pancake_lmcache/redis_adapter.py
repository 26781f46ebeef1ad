"""LMCache's Redis/Valkey tier with proof of what it serves: one server may be shared by several cache servers.

Named to LMCache's server by `--l2-adapter`, its documented way to load an adapter from another package:
`{"type": "plugin", "module_path": "pancake_lmcache.redis_adapter", "class_name": "VerifiedRedisAdapter",
"adapter_params": {"host": HOST, "port": PORT}}`.

Not on LMCache's own client: that one needs to know the length of a value before it asks for it, and gets no object's
shape, so that nothing could be packed; and a server that is not there when it starts ends the cache server.  Eviction
is the server's: give it `maxmemory` and an LRU policy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from pancake_lmcache.adapter import (
    VerifiedAdapter,
    codec_of,
    identity_of,
    key_file_of,
    num_workers_of,
    require_known,
)
from pancake_lmcache.counts import LOGGER_NAME, Counts
from pancake_lmcache.frame import Sealer, read_key_file
from pancake_lmcache.kv_packing import Codec, Packer
from pancake_lmcache.values import RedisValues, connect

#: LMCache gives every logger its handlers one by one.
logger = init_logger(LOGGER_NAME)

_MAX_PORT: Final = 65535


class VerifiedRedisAdapterConfig(L2AdapterConfigBase):
    """Settings of the Redis tier, as in `adapter_params`."""

    def __init__(
        self, host: str, port: int, *, num_workers: int = 4, key_file: str | None = None, codec: Codec = "exact"
    ) -> None:
        """Keep the settings.

        Args:
            host: Where the server is.
            port: Its port.
            num_workers: Threads that load; half as many store.
            key_file: File with the key to encrypt with; `None`: checksums only.
            codec: How KV is packed where a request asks for nothing else.
        """
        self.host = host
        self.port = port
        self.num_workers = num_workers
        self.key_file = key_file
        self.codec: Codec = codec

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> VerifiedRedisAdapterConfig:
        """Return settings from JSON.

        Raises:
            ValueError: if one is missing, unknown, or out of range.
        """
        require_known(d, {"host", "port", "num_workers", "key_file", "codec"})
        host, port = d.get("host"), d.get("port")
        if not isinstance(host, str) or not host:
            raise ValueError(f"host: got {host!r}, allowed is a name or an address")
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= _MAX_PORT:
            raise ValueError(f"port: got {port!r}, allowed are 1 to {_MAX_PORT}")
        return cls(host, port, num_workers=num_workers_of(d, 4), key_file=key_file_of(d), codec=codec_of(d))

    @classmethod
    def help(cls) -> str:
        """Return what the server prints about the settings."""
        return (
            "Verified Redis adapter, adapter_params:\n"
            "- host (str), port (int): the Redis or Valkey server (required)\n"
            "- num_workers (int): threads that load (default 4)\n"
            "- key_file (str): file with a 32-byte key; encrypts with AES-256-GCM (default: checksums only)\n"
            "- codec (str): exact, int8 or int4, for KV of requests that name none (default exact)\n"
            "User and password are read from LMCACHE_RESP_USERNAME and LMCACHE_RESP_PASSWORD, as LMCache does."
        )


class VerifiedRedisAdapter(VerifiedAdapter):
    """Objects in Redis or Valkey, served only when they are proven right.  Thread-safe."""

    def __init__(self, config: VerifiedRedisAdapterConfig, l1_memory_desc: object = None) -> None:
        """Prepare; a server that is not there is no error: it is tried again.

        Args:
            config: The settings.
            l1_memory_desc: Not used; LMCache gives it to every adapter.

        Raises:
            ValueError: if the key file is not right.
        """
        sealer = Sealer(None if config.key_file is None else read_key_file(Path(config.key_file)))
        counts = Counts(f"Redis tier {config.host}:{config.port}")
        user, password = (os.environ.get(f"LMCACHE_RESP_{name}", "") for name in ("USERNAME", "PASSWORD"))
        connections = 2 * config.num_workers + 2
        client = connect(config.host, config.port, user=user, password=password, connections=connections)
        self._config = config
        self._values = RedisValues(client, sealer, counts)
        super().__init__(self._values, Packer(config.codec, counts), counts, num_workers=config.num_workers)
        sealing = "encrypted" if sealer.encrypts else "checksums"
        logger.info("Redis tier at %s:%s: %s, codec %s", config.host, config.port, sealing, config.codec)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects."""
        for key in keys:
            self._values.delete(identity_of(key))

    def report_status(self) -> dict[str, Any]:
        """Return what `GET /status` of the server shows; `counts` holds every miss and drop by kind."""
        return {
            "is_healthy": True,
            "is_reachable": not self._values.is_down,
            "type": type(self).__name__,
            "host": self._config.host,
            "port": self._config.port,
            "encrypted": self._config.key_file is not None,
            "codec": self._config.codec,
            "counts": self._counts.snapshot(),
        }

    def close(self) -> None:
        """Wait for what runs, drop what waits."""
        super().close()
        self._values.close()
        logger.info("Redis tier closed: %s", self._counts.snapshot())
