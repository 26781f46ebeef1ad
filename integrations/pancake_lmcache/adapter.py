"""What the verified adapters have in common: LMCache's calls on one side, a store of sealed objects on the other."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Protocol

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from pancake_lmcache.counts import Counts
from pancake_lmcache.frame import Identity
from pancake_lmcache.kv_packing import CODECS, Codec, Packer
from pancake_lmcache.lanes import Lane
from pancake_lmcache.packing import Packing

_MAX_WORKERS: Final = 64


class Objects(Protocol):
    """Sealed objects somewhere.  Thread-safe; whatever goes wrong is a counted miss or drop."""

    def has_all(self, wanted: list[tuple[Identity, Packing]]) -> list[bool]:
        """Say which objects are there, going by header and size."""
        ...

    def load(self, identity: Identity, payload: memoryview, packing: Packing) -> bool:
        """Fill `payload` and say whether it is right; what it holds after `False` is not to be used."""
        ...

    def store(self, identity: Identity, payload: memoryview, packing: Packing) -> int | None:
        """Write an object unless it is there; return the bytes written (0: it was there), `None` if it was dropped."""
        ...


class VerifiedAdapter(L2AdapterInterface):
    """Objects that are served only when they are proven right.  Thread-safe.

    Packing, sealing and all input and output happen in threads of its own.
    """

    def __init__(
        self, objects: Objects, packer: Packer, counts: Counts, *, num_workers: int, max_capacity_bytes: int = 0
    ) -> None:
        """Take a store.

        Args:
            objects: The store.
            packer: How objects are packed.
            counts: Where everything that went wrong is counted.
            num_workers: Threads that load; half as many store.
            max_capacity_bytes: The store's cap, 0 for none.
        """
        super().__init__(max_capacity_bytes=max_capacity_bytes)
        self._objects = objects
        self._packer = packer
        self._counts = counts
        self._stores: Lane[L2StoreResult] = Lane("store", max(1, num_workers // 2), counts)
        self._lookups: Lane[Any] = Lane("lookup", 1, counts)
        self._loads: Lane[Any] = Lane("load", num_workers, counts)

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
            return self._objects.has_all([(identity_of(key), self._packer.codecs(key.cache_salt)) for key in keys])

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

    def close(self) -> None:
        """Wait for what runs, drop what waits."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()

    def _store(self, key: ObjectKey, one: Any) -> int | None:
        packing = self._packer.packing(key.cache_salt, one)
        return self._objects.store(identity_of(key), _bytes_of(one), packing)

    def _load(self, key: ObjectKey, one: Any) -> bool:
        packing = self._packer.packing(key.cache_salt, one)
        return self._objects.load(identity_of(key), _bytes_of(one), packing)

    def _remember(self, written: list[tuple[ObjectKey, int]]) -> None:
        """Take note of what was stored; nothing here."""


def identity_of(key: ObjectKey) -> Identity:
    """Return whose object it is."""
    return Identity(
        model=key.model_name,
        kv_rank=key.kv_rank,
        object_group=key.object_group_id,
        chunk_hash=key.chunk_hash,
        salt=key.cache_salt,
    )


def require_known(params: dict[str, Any], known: set[str]) -> None:
    """Refuse settings that there are not.

    Raises:
        ValueError: if there is such a one.
    """
    if unknown := sorted(set(params) - known):
        raise ValueError(f"adapter_params: got {', '.join(unknown)}; allowed are {', '.join(sorted(known))}")


def key_file_of(params: dict[str, Any]) -> str | None:
    """Return the setting `key_file`.

    Raises:
        ValueError: if it is no path.
    """
    key_file = params.get("key_file")
    if key_file is not None and not isinstance(key_file, str):
        raise ValueError(f"key_file: got {key_file!r}, allowed is the path of a file")
    return key_file


def num_workers_of(params: dict[str, Any], default: int) -> int:
    """Return the setting `num_workers`.

    Raises:
        ValueError: if it is out of range.
    """
    workers = params.get("num_workers", default)
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= _MAX_WORKERS:
        raise ValueError(f"num_workers: got {workers!r}, allowed are 1 to {_MAX_WORKERS}")
    return workers


def codec_of(params: dict[str, Any]) -> Codec:
    """Return the setting `codec`.

    Raises:
        ValueError: if there is no such codec.
    """
    asked = params.get("codec", "exact")
    for codec in CODECS:
        if codec == asked:
            return codec
    raise ValueError(f"codec: got {asked!r}, allowed are {', '.join(CODECS)}")


def _bytes_of(one: Any) -> memoryview:
    """Return the memory of one of LMCache's objects as plain bytes."""
    return memoryview(one.byte_array).cast("B")


def _bitmap(found: list[bool]) -> Any:
    bitmap = Bitmap(len(found))
    for index, good in enumerate(found):
        if good:
            bitmap.set(index)
    return bitmap
