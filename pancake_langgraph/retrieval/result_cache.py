"""Results of searches that were made before, for as long as they are still true."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from pancake_langgraph._clock import Clock, MonotonicClock
from pancake_langgraph.retrieval.base import Hit, ItemId, Namespace, Query, Vector, View

#: Writes that a search under way is compared with; after more, what it found is not remembered.
_MAX_WRITES: Final = 256
_MAX_DEPTH: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What was asked: `subject` is a query's vector, or its text where one embedder makes all vectors."""

    subject: Vector | str
    view: View = field(default_factory=View)
    limit: int = 10
    offset: int = 0

    @classmethod
    def of(cls, query: Query) -> Question:
        """Return what a query asks."""
        return cls(query.vector, query.view, query.limit, query.offset)


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """What `look_up` did not find; `store` takes it with what a search has found, which began after it was made."""

    question: Question
    key: Hashable
    num_writes: int


@dataclass(frozen=True, slots=True)
class ResultCacheStats:
    """Counts since the start: look-ups that found something, and not; results dropped because of a write, or too old.

    `refused` are results that a write made doubtful before they came, `unfit` those of questions that have no key, and
    `leaks` those that held something outside the view they were for, which an engine must never give.
    """

    hits: int = 0
    misses: int = 0
    invalidated: int = 0
    expired: int = 0
    refused: int = 0
    unfit: int = 0
    leaks: int = 0
    entries: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    view: View
    hits: tuple[Hit, ...]
    until_s: float
    until_epoch_s: float


class ResultCache:
    """Remembers results by question and view.  All methods are thread-safe.

    A result is given only to the very view that it was found for: same prefixes, filter and allowed items.  It is gone
    after `ttl_s`, when one of its items expires, and with any write below a prefix of its view.  Writes of other
    processes are not seen; there `ttl_s` is how old an answer can be.

    Whoever writes calls `invalidate` after the write can be found and before it says so to its caller; then everyone
    reads their own writes.  A search that was under way meanwhile is not remembered.
    """

    def __init__(
        self,
        *,
        max_entries: int = 4096,
        ttl_s: float = 300.0,
        clock: Clock | None = None,
        epoch_s: Callable[[], float] = time.time,
    ) -> None:
        """Start empty; `epoch_s` gives the time that items expire by."""
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._clock = clock or MonotonicClock()
        self._epoch_s = epoch_s
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._by_prefix: dict[Namespace, set[Hashable]] = {}
        self._writes: deque[Namespace] = deque(maxlen=_MAX_WRITES)
        self._num_writes = 0
        self._stats = ResultCacheStats()
        self._lock = threading.Lock()

    def look_up(self, question: Question) -> list[Hit] | Missed:
        """Return what was found before, as copies that the caller may change, or what `store` needs."""
        key = question_key(question)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and self._is_old(entry):
                self._drop(key)
                self._count(expired=1)
                entry = None
            if entry is None:
                self._count(misses=1)
                return Missed(question, key, self._num_writes)
            self._entries.move_to_end(key)
            self._count(hits=1)
        return [_copied(hit) for hit in entry.hits]

    def store(self, missed: Missed, hits: Sequence[Hit]) -> bool:
        """Remember what a search has found; return whether it was, which a write in between forbids.

        Nothing is remembered, and that is counted, if a hit lies outside the view.
        """
        view = missed.question.view
        copies = tuple(_copied(hit) for hit in hits)
        expiring = [hit.item.expires_at_s for hit in copies if hit.item.expires_at_s is not None]
        entry = _Entry(view, copies, self._clock.now_s() + self._ttl_s, min(expiring, default=np.inf))
        with self._lock:
            if missed.key is None:
                self._count(unfit=1)
                return False
            if not all(_may_see(view, hit.item.id) for hit in copies):
                self._count(leaks=1)
                return False
            if self._is_overtaken(missed):
                self._count(refused=1)
                return False
            self._drop(missed.key)
            self._entries[missed.key] = entry
            for prefix in view.prefixes:
                self._by_prefix.setdefault(prefix, set()).add(missed.key)
            while len(self._entries) > self._max_entries:
                self._drop(next(iter(self._entries)))
            return missed.key in self._entries

    def invalidate(self, namespaces: Iterable[Namespace]) -> int:
        """Forget all results that a write in one of `namespaces` may have changed; return how many there were."""
        dropped = 0
        with self._lock:
            for namespace in set(namespaces):
                self._writes.append(namespace)
                self._num_writes += 1
                for length in range(len(namespace) + 1):
                    for key in tuple(self._by_prefix.get(namespace[:length], ())):
                        self._drop(key)
                        dropped += 1
            self._count(invalidated=dropped)
        return dropped

    def clear(self) -> None:
        """Forget everything, and what searches that are under way will find."""
        with self._lock:
            self._num_writes += _MAX_WRITES + 1
            self._count(invalidated=len(self._entries))
            self._entries.clear()
            self._by_prefix.clear()

    def stats(self) -> ResultCacheStats:
        """Return counts."""
        with self._lock:
            return replace(self._stats, entries=len(self._entries))

    # -- under the lock -------------------------------------------------------------------------------------------

    def _is_old(self, entry: _Entry) -> bool:
        return self._clock.now_s() >= entry.until_s or self._epoch_s() >= entry.until_epoch_s

    def _is_overtaken(self, missed: Missed) -> bool:
        """Whether something was written since that may belong to the result."""
        num_since = self._num_writes - missed.num_writes
        if num_since > len(self._writes):
            return True
        since = list(self._writes)[len(self._writes) - num_since :]
        return any(_is_below(namespace, missed.question.view.prefixes) for namespace in since)

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        for prefix in entry.view.prefixes if entry is not None else ():
            if (keys := self._by_prefix.get(prefix)) is not None:
                keys.discard(key)
                if not keys:
                    del self._by_prefix[prefix]

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + num for name, num in more.items()})


def _is_below(namespace: Namespace, prefixes: Iterable[Namespace]) -> bool:
    return any(namespace[: len(prefix)] == prefix for prefix in prefixes)


def _may_see(view: View, item_id: ItemId) -> bool:
    return _is_below(item_id.namespace, view.prefixes) and (view.allowed is None or item_id in view.allowed)


def _copied(hit: Hit) -> Hit:
    """Return a hit whose value nobody else has; vectors are shared, as they are read-only."""
    return replace(hit, item=replace(hit.item, value=_copied_json(hit.item.value)))


def _copied_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copied_json(inner) for inner in value]
    return value


def question_key(question: Question) -> Hashable | None:
    """Return what equal questions share, and no two others; `None` where a filter is not made of plain values."""
    subject, view = question.subject, question.view
    try:
        where = _frozen(view.where, _MAX_DEPTH)
    except TypeError:
        return None
    if isinstance(subject, str):
        asked: Hashable = subject
    else:
        plain = np.ascontiguousarray(subject)
        asked = (plain.dtype.str, plain.shape, hashlib.blake2b(plain.tobytes(), digest_size=16).digest())
    allowed = None if view.allowed is None else frozenset(view.allowed)  # a caller may have given a set
    return asked, frozenset(view.prefixes), where, allowed, question.limit, question.offset


def _frozen(value: Any, depth: int) -> Hashable:
    """Return a hashable that equals only that of the same value of the same types: 1, 1.0 and True are three."""
    if depth <= 0:
        raise TypeError("too deep")
    kind = type(value)
    if isinstance(value, Mapping):
        named = [(_frozen(name, 1), _frozen(inner, depth - 1)) for name, inner in value.items()]
        return "mapping", frozenset(named)
    if isinstance(value, list | tuple):
        return "list", tuple(_frozen(inner, depth - 1) for inner in value)
    if value is None or kind in (str, int, float, bool):
        return kind.__name__, value
    raise TypeError(kind.__name__)
