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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from pancake_lmcache.counts import LOGGER_NAME, Counts
from pancake_lmcache.frame import Identity, Sealer, read_key_file
from pancake_lmcache.objects import ObjectFolder
from pancake_lmcache.space import NO_CAP, Space

_GIB: Final = 1024**3
_MAX_WORKERS: Final = 64

#: LMCache gives every logger its handlers one by one; without this, warnings would have no time and no place.
logger = init_logger(LOGGER_NAME)

_Result = TypeVar("_Result")


class VerifiedDiskAdapterConfig(L2AdapterConfigBase):
    """Settings of the disk tier, as in `adapter_params`."""

    def __init__(
        self, base_path: str, *, max_capacity_gb: float = 0.0, key_file: str | None = None, num_workers: int = 4
    ) -> None:
        """Keep the settings.

        Args:
            base_path: Folder of the objects; made if it is not there.  Several servers may share it.
            max_capacity_gb: Most GiB that all files directly in the folder may take together; 0 is no cap.
            key_file: File with the key to encrypt with (32 bytes, or 64 hexadecimal digits); `None`: checksums only.
            num_workers: Threads that load; half as many store.
        """
        self.base_path = base_path
        self.max_capacity_gb = max_capacity_gb
        self.key_file = key_file
        self.num_workers = num_workers

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> VerifiedDiskAdapterConfig:
        """Return settings from JSON.

        Raises:
            ValueError: if one is missing, unknown, or out of range.
        """
        known = {"base_path", "max_capacity_gb", "key_file", "num_workers"}
        if unknown := sorted(set(d) - known):
            raise ValueError(f"adapter_params: got {', '.join(unknown)}; allowed are {', '.join(sorted(known))}")
        base_path, key_file = d.get("base_path"), d.get("key_file")
        if not isinstance(base_path, str) or not base_path:
            raise ValueError(f"base_path: got {base_path!r}, allowed is the path of a folder")
        capacity, workers = d.get("max_capacity_gb", 0.0), d.get("num_workers", 4)
        if isinstance(capacity, bool) or not isinstance(capacity, int | float) or not 0 <= capacity < NO_CAP / _GIB:
            raise ValueError(f"max_capacity_gb: got {capacity!r}, allowed are numbers from 0 (no cap)")
        if key_file is not None and not isinstance(key_file, str):
            raise ValueError(f"key_file: got {key_file!r}, allowed is the path of a file")
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= _MAX_WORKERS:
            raise ValueError(f"num_workers: got {workers!r}, allowed are 1 to {_MAX_WORKERS}")
        return cls(base_path, max_capacity_gb=float(capacity), key_file=key_file, num_workers=workers)

    @classmethod
    def help(cls) -> str:
        """Return what the server prints about the settings."""
        return (
            "Verified disk adapter, adapter_params:\n"
            "- base_path (str): folder of the objects (required)\n"
            "- max_capacity_gb (float): cap over all files in the folder, in GiB (default 0 = none)\n"
            "- key_file (str): file with a 32-byte key; encrypts with AES-256-GCM (default: checksums only)\n"
            "- num_workers (int): threads that load (default 4)"
        )


class _Lane(Generic[_Result]):
    """One kind of task: its threads, its finished results, and the descriptor that says so."""

    def __init__(self, name: str, num_workers: int, counts: Counts) -> None:
        self._counts = counts
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix=f"pancake-{name}")
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._next_id = 0
        self._finished: dict[int, _Result] = {}

    def fileno(self) -> int:
        return int(self._notifier.fileno())

    def submit(
        self,
        jobs: Sequence[Callable[[], Any]],
        result_of: Callable[[list[Any]], _Result],
        *,
        default: Any,
        tell: Callable[[list[Any]], None] = lambda results: None,
    ) -> int:
        """Run jobs side by side; a job that raises gives `default`.  Then tell listeners, then say that it is done."""
        with self._lock:
            task_id, self._next_id = self._next_id, self._next_id + 1
        results, left = [default] * len(jobs), len(jobs)

        def run(index: int, job: Callable[[], Any]) -> None:
            nonlocal left
            results[index] = self._guarded(job, default)
            with self._lock:
                left -= 1
                is_last = left == 0
            if is_last:
                self._guarded(partial(tell, results), None)
                self._complete(task_id, result_of(results))

        for index, job in enumerate(jobs):
            self._pool.submit(run, index, job)
        if not jobs:
            self._complete(task_id, result_of(results))
        return task_id

    def take(self, task_id: int) -> _Result | None:
        with self._lock:
            return self._finished.pop(task_id, None)

    def take_all(self) -> dict[int, _Result]:
        with self._lock:
            finished, self._finished = self._finished, {}
        return finished

    def close(self) -> None:
        """End: tasks that run are waited for, since they use the caller's memory."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._notifier.close()

    def _guarded(self, call: Callable[[], Any], default: Any) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the server must go on; a miss is always a right answer; counted
            self._counts.add("failed_task", detail=repr(error))
            return default

    def _complete(self, task_id: int, result: _Result) -> None:
        with self._lock:
            self._finished[task_id] = result
        self._notifier.notify()


class VerifiedDiskAdapter(L2AdapterInterface):
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
        super().__init__(max_capacity_bytes=0 if cap_bytes == NO_CAP else cap_bytes)
        sealer = Sealer(None if config.key_file is None else read_key_file(Path(config.key_file)))
        self._config = config
        self._counts = Counts(f"disk tier {config.base_path}")
        self._known: dict[str, tuple[ObjectKey, int]] = {}
        self._known_lock = threading.Lock()
        self._space = Space(Path(config.base_path), cap_bytes=cap_bytes)
        self._folder = ObjectFolder(self._space, sealer, self._counts, on_removed=self._forget)
        self._stores: _Lane[L2StoreResult] = _Lane("store", max(1, config.num_workers // 2), self._counts)
        self._lookups: _Lane[Any] = _Lane("lookup", 1, self._counts)
        self._loads: _Lane[Any] = _Lane("load", config.num_workers, self._counts)
        sealing = "encrypted" if sealer.encrypts else "checksums"
        logger.info("disk tier in %s: %s, cap %s GiB", config.base_path, sealing, config.max_capacity_gb or "none")

    def get_store_event_fd(self) -> int:
        """Return the descriptor that says that a store ended."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that says that a lookup ended."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Return the descriptor that says that a load ended."""
        return self._loads.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begin to store; return the task's number."""
        jobs = [partial(self._store, key, one) for key, one in zip(keys, objects, strict=True)]

        def tell(written: list[int | None]) -> None:
            self._remember([(key, size) for key, size in zip(keys, written, strict=True) if size])

        def result_of(written: list[int | None]) -> L2StoreResult:
            return L2StoreResult(None not in written, sum(size or 0 for size in written))

        return self._stores.submit(jobs, result_of, default=None, tell=tell)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return what ended since the last call.  A task with an object that was dropped counts as failed."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: object) -> int:
        """Begin to look which objects are there, going by header and size; nothing needs a lock."""

        def look() -> list[bool]:
            return [self._folder.has(_identity(key)) for key in keys]

        def result_of(found: list[list[bool]]) -> Any:
            return _bitmap(found[0] or [False] * len(keys))

        return self._lookups.submit([look], result_of, default=[])

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return which objects were found, once; `None` while the lookup runs."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: an object that goes between lookup and load is a miss."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begin to load; return the task's number."""
        jobs = [partial(self._load, key, one) for key, one in zip(keys, objects, strict=True)]

        def tell(loaded: list[bool]) -> None:
            if hits := [key for key, good in zip(keys, loaded, strict=True) if good]:
                self._notify_keys_accessed(hits)

        return self._loads.submit(jobs, _bitmap, default=False, tell=tell)

    def query_load_result(self, task_id: int) -> Any:
        """Return which objects were loaded and are right, once; `None` while the load runs."""
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects."""
        gone = [self._folder.name_of(_identity(key)) for key in keys if self._folder.delete(_identity(key))]
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
            "used_bytes": self._space.used_bytes(),
            "max_capacity_bytes": self._max_capacity_bytes,
            "counts": self._counts.snapshot(),
        }

    def close(self) -> None:
        """Wait for what runs, drop what waits."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()
        logger.info("disk tier closed: %s", self._counts.snapshot())

    def _store(self, key: ObjectKey, one: Any) -> int | None:
        return self._folder.store(_identity(key), _bytes_of(one))

    def _load(self, key: ObjectKey, one: Any) -> bool:
        return self._folder.load(_identity(key), _bytes_of(one))

    def _remember(self, written: list[tuple[ObjectKey, int]]) -> None:
        """Tell LMCache what was stored; of an object that was written again only the difference."""
        if not written:
            return
        with self._known_lock:
            self._told_gone([self._folder.name_of(_identity(key)) for key, _ in written])
            for key, size in written:
                self._known[self._folder.name_of(_identity(key))] = (key, size)
            self._notify_keys_stored([key for key, _ in written], [size for _, size in written])

    def _forget(self, names: list[str]) -> None:
        """Tell LMCache what is gone; of others' objects it knows nothing."""
        with self._known_lock:
            self._told_gone(names)

    def _told_gone(self, names: list[str]) -> None:
        gone = [self._known.pop(name) for name in names if name in self._known]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])


def _identity(key: ObjectKey) -> Identity:
    return Identity(
        model=key.model_name,
        kv_rank=key.kv_rank,
        object_group=key.object_group_id,
        chunk_hash=key.chunk_hash,
        salt=key.cache_salt,
    )


def _bytes_of(one: Any) -> memoryview:
    """Return the memory of one of LMCache's objects as plain bytes."""
    return memoryview(one.byte_array).cast("B")


def _bitmap(found: list[bool]) -> Any:
    bitmap = Bitmap(len(found))
    for index, good in enumerate(found):
        if good:
            bitmap.set(index)
    return bitmap
