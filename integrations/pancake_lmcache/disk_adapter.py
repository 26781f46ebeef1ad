"""LMCache's disk tier (L2) with proof of what it serves and a cap on what it takes.

Named to LMCache's server by `--l2-adapter`, its documented way to load an adapter from another package:
`{"type": "plugin", "module_path": "pancake_lmcache.disk_adapter", "class_name": "VerifiedDiskAdapter",
"adapter_params": {"base_path": FOLDER, "max_capacity_gb": 10.0}}`.

Why an adapter and not a serde, which in LMCache 0.5.6 is also given the object's key: the command line can name only
serdes that LMCache registers itself, one bad object fails the whole batch of loads, and a serde has no hold of files,
so that a bad one would be refused for ever, since the plain adapter does not write a name that exists.  Nor can it keep
a cap.  Why not a subclass of the plain adapter: all of its file handling is private.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any, Final

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage
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
from pancake_lmcache.objects import ObjectFolder
from pancake_lmcache.space import NO_CAP, Space

_GIB: Final = 1024**3

#: LMCache gives every logger its handlers one by one; without this, warnings would have no time and no place.
logger = init_logger(LOGGER_NAME)


class VerifiedDiskAdapterConfig(L2AdapterConfigBase):
    """Settings of the disk tier, as in `adapter_params`."""

    def __init__(
        self,
        base_path: str,
        *,
        max_capacity_gb: float = 0.0,
        key_file: str | None = None,
        num_workers: int = 4,
        codec: Codec = "exact",
    ) -> None:
        """Keep the settings.

        Args:
            base_path: Folder of the objects; made if it is not there.  Several servers may share it.
            max_capacity_gb: Most GiB that all files directly in the folder may take together; 0 is no cap.
            key_file: File with the key to encrypt with (32 bytes, or 64 hexadecimal digits); `None`: checksums only.
            num_workers: Threads that load; half as many store.
            codec: How KV is packed where a request asks for nothing else.
        """
        self.base_path = base_path
        self.max_capacity_gb = max_capacity_gb
        self.key_file = key_file
        self.num_workers = num_workers
        self.codec: Codec = codec

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> VerifiedDiskAdapterConfig:
        """Return settings from JSON.

        Raises:
            ValueError: if one is missing, unknown, or out of range.
        """
        require_known(d, {"base_path", "max_capacity_gb", "key_file", "num_workers", "codec"})
        base_path, capacity = d.get("base_path"), d.get("max_capacity_gb", 0.0)
        if not isinstance(base_path, str) or not base_path:
            raise ValueError(f"base_path: got {base_path!r}, allowed is the path of a folder")
        if isinstance(capacity, bool) or not isinstance(capacity, int | float) or not 0 <= capacity < NO_CAP / _GIB:
            raise ValueError(f"max_capacity_gb: got {capacity!r}, allowed are numbers from 0 (no cap)")
        return cls(
            base_path,
            max_capacity_gb=float(capacity),
            key_file=key_file_of(d),
            num_workers=num_workers_of(d, 4),
            codec=codec_of(d),
        )

    @classmethod
    def help(cls) -> str:
        """Return what the server prints about the settings."""
        return (
            "Verified disk adapter, adapter_params:\n"
            "- base_path (str): folder of the objects (required)\n"
            "- max_capacity_gb (float): cap over all files in the folder, in GiB (default 0 = none)\n"
            "- key_file (str): file with a 32-byte key; encrypts with AES-256-GCM (default: checksums only)\n"
            "- num_workers (int): threads that load (default 4)\n"
            "- codec (str): exact, int8 or int4, for KV of requests that name none (default exact)"
        )


class VerifiedDiskAdapter(VerifiedAdapter):
    """Objects in a folder, served only when they are proven right, under a cap.  Thread-safe."""

    def __init__(self, config: VerifiedDiskAdapterConfig, l1_memory_desc: object = None) -> None:
        """Open the folder.

        Args:
            config: The settings.
            l1_memory_desc: Not used; LMCache gives it to every adapter.

        Raises:
            ValueError: if the key file is not right.  A folder that cannot be used is no error: it is tried again.
        """
        cap_bytes = int(config.max_capacity_gb * _GIB) or NO_CAP
        sealer = Sealer(None if config.key_file is None else read_key_file(Path(config.key_file)))
        counts = Counts(f"disk tier {config.base_path}")
        self._config = config
        self._known: dict[str, tuple[ObjectKey, int]] = {}
        self._known_lock = threading.Lock()
        self._space = Space(Path(config.base_path), cap_bytes=cap_bytes)
        self._folder = ObjectFolder(self._space, sealer, counts, on_removed=self._forget)
        super().__init__(
            self._folder,
            Packer(config.codec, counts),
            counts,
            num_workers=config.num_workers,
            max_capacity_bytes=0 if cap_bytes == NO_CAP else cap_bytes,
        )
        sealing = "encrypted" if sealer.encrypts else "checksums"
        cap = config.max_capacity_gb or "none"
        logger.info("disk tier in %s: %s, codec %s, cap %s GiB", config.base_path, sealing, config.codec, cap)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects."""
        gone = [self._folder.name_of(one) for one in map(identity_of, keys) if self._folder.delete(one)]
        self._forget(gone)

    def get_usage(self) -> AdapterUsage:
        """Return how full the folder is: files of all processes and earlier runs; by salt, what this process stored."""
        return dataclasses.replace(super().get_usage(), total_bytes_used=self._space.used_bytes())

    def report_status(self) -> dict[str, Any]:
        """Return what `GET /status` of the server shows; `counts` holds every miss and drop by kind."""
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "base_path": self._config.base_path,
            "encrypted": self._config.key_file is not None,
            "codec": self._config.codec,
            "used_bytes": self._space.used_bytes(),
            "max_capacity_bytes": self._max_capacity_bytes,
            "counts": self._counts.snapshot(),
        }

    def close(self) -> None:
        """Wait for what runs, drop what waits."""
        super().close()
        logger.info("disk tier closed: %s", self._counts.snapshot())

    def _remember(self, written: list[tuple[ObjectKey, int]]) -> None:
        """Tell LMCache what was stored; of an object that was written again only the difference."""
        if not written:
            return
        with self._known_lock:
            self._told_gone([self._folder.name_of(identity_of(key)) for key, _ in written])
            for key, size in written:
                self._known[self._folder.name_of(identity_of(key))] = (key, size)
            self._notify_keys_stored([key for key, _ in written], [size for _, size in written])

    def _forget(self, names: list[str]) -> None:
        """Tell LMCache what is gone; of others' objects it knows nothing."""
        with self._known_lock:
            self._told_gone(names)

    def _told_gone(self, names: list[str]) -> None:
        gone = [self._known.pop(name) for name in names if name in self._known]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])
