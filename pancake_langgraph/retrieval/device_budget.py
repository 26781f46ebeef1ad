"""How much of each device's memory a process may take, and who has taken it.

Devices are named as torch names them: `cpu`, `cuda:0`; `cuda` stands for the first one.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pancake_langgraph._errors import ConfigError, DeviceFull

#: An owner's id, and the name under which it has taken something.
_Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Taken:
    """What one owner has taken of one device under one name."""

    device: str
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """What an owner has taken; `keep` watches for its end, or is the owner itself where that cannot be watched."""

    parts: tuple[Taken, ...]
    keep: object

    def forget(self) -> None:
        """Watch no more."""
        if isinstance(self.keep, weakref.finalize):
            self.keep.detach()


class DeviceBudget:
    """Keeps what is put on devices under limits.  Thread-safe; also when the garbage collector calls it.

    It counts and refuses; it neither allocates nor moves anything, and knows nothing of other processes.  A forked
    process makes its own: what is on a device is not forked.
    """

    def __init__(self, limits_bytes: Mapping[str, int]) -> None:
        """Limit the devices that are named; others are counted and not limited.

        Raises:
            ConfigError: if a limit is not an integer from 0 on, or its device no name.
        """
        self._limits = _checked(limits_bytes, "limits_bytes")
        self._lock = threading.RLock()
        #: Never changed, only replaced: while one is read the collector may run, and call in again.
        self._entries: Mapping[_Key, _Entry] = {}
        #: Those that are counted no more: the collector, which may run anywhere, also under the lock, only adds here.
        self._gone: deque[_Key] = deque()

    def take(self, owner: object, name: str, needs_bytes: Mapping[str, int]) -> None:
        """Count what `owner` puts on devices under a `name`, all of it or nothing, in place of what it had so named.

        It counts until `owner` is garbage collected or gives it back.  An owner that cannot be referred to weakly, such
        as a list or a text, is kept alive until then.

        Raises:
            ConfigError: if `needs_bytes` has anything but integers from 0 on by names of devices.
            DeviceFull: if a limit would be passed; what was counted before still is.
        """
        needs = _checked(needs_bytes, "needs_bytes")
        if not self._try(owner, name, needs):
            gc.collect()  # what nobody can reach any more, held by a cycle, still counts
            if not self._try(owner, name, needs):
                raise DeviceFull(self._refusal(owner, name, needs))

    def give_back(self, owner: object, name: str | None = None) -> None:
        """Count what an owner has taken under a name, or at all, no more.  Idempotent; never waits for a lock."""
        names = [name] if name is not None else [known for place, known in self._entries if place == id(owner)]
        self._gone.extend((id(owner), each) for each in names)

    def taken(self) -> tuple[Taken, ...]:
        """Return what is taken, in the order in which that began."""
        with self._lock:
            self._forget_gone()
            return tuple(part for entry in self._entries.values() for part in entry.parts)

    def left_bytes(self, device: str) -> int | None:
        """Return what may still be taken of a device; `None` where it has no limit."""
        limit = self._limits.get(_full_name(device))
        return None if limit is None else limit - sum(part.num_bytes for part in self._others(None, device))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _try(self, owner: object, name: str, needs: Mapping[str, int]) -> bool:
        key = id(owner), name
        with self._lock:
            self._forget_gone()
            if any(self._lacks(key, device, size) for device, size in needs.items()):
                return False
            parts = tuple(Taken(device, name, size) for device, size in needs.items() if size)
            entry, old = _Entry(parts, self._watch(owner, key)), self._entries.get(key)
            self._entries = {**self._entries, key: entry}
            if old is not None:
                old.forget()
            return True

    def _watch(self, owner: object, key: _Key) -> object:
        try:
            watch = weakref.finalize(owner, self._gone.append, key)
        except TypeError:
            return owner
        watch.atexit = False
        return watch

    def _lacks(self, key: _Key, device: str, num_bytes: int) -> bool:
        limit = self._limits.get(device)
        return limit is not None and num_bytes > limit - sum(part.num_bytes for part in self._others(key, device))

    def _others(self, key: _Key | None, device: str) -> list[Taken]:
        """Return what is taken of a device under other keys."""
        with self._lock:
            self._forget_gone()
            entries = [entry for known, entry in self._entries.items() if known != key]
        return [part for entry in entries for part in entry.parts if part.device == _full_name(device)]

    def _refusal(self, owner: object, name: str, needs: Mapping[str, int]) -> str:
        said = []
        for device, num_bytes in needs.items():
            if (limit := self._limits.get(device)) is None:
                continue
            others = self._others((id(owner), name), device)
            left = limit - sum(part.num_bytes for part in others)
            held = ", ".join(f"{part.name} {part.num_bytes:,}" for part in others) or "nothing"
            said.append(
                f"{device}: {name} needs {num_bytes:,} bytes, allowed are {limit:,} in all, of which {left:,} are left "
                f"(taken: {held})"
            )
        return f"{'; '.join(said)}. Raise the limit of the DeviceBudget, or put it on another device"

    def _forget_gone(self) -> None:
        # Nothing between reading the entries and replacing them makes an object that the collector would run for.
        forgotten: list[_Entry] = []
        entries = {**self._entries}
        while self._gone:
            if (entry := entries.pop(self._gone.popleft(), None)) is not None:
                forgotten.append(entry)
        if forgotten:
            self._entries = entries
        for entry in forgotten:
            entry.forget()


def checked_budget(budget: object) -> DeviceBudget | None:
    """Return a budget that somebody gave, or `None`.

    Raises:
        ConfigError: if it is anything else.
    """
    if budget is None or isinstance(budget, DeviceBudget):
        return budget
    raise ConfigError(f"device_budget: got {type(budget).__name__}, allowed are a DeviceBudget and None")


def _checked(given: Mapping[str, int], what: str) -> dict[str, int]:
    if not isinstance(given, Mapping):
        raise ConfigError(f'{what}: got {type(given).__name__}, allowed are bytes by device: {{"cuda:0": 1_000_000}}')
    found: dict[str, int] = {}
    for device, num_bytes in given.items():
        if not isinstance(device, str) or not device:
            raise ConfigError(f"{what}: got {device!r} as a device, allowed are names such as cpu and cuda:0")
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 0:
            raise ConfigError(f"{what} of {device}: got {num_bytes!r}, allowed are bytes, integers from 0 on")
        found[_full_name(device)] = num_bytes
    return found


def _full_name(device: str) -> str:
    """Return a device's name with its number, which only the one CPU has none of."""
    return device if device == "cpu" or ":" in device else f"{device}:0"
