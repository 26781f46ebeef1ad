"""How much of each device's memory a process may take, and who has taken it.

Devices are named as torch names them: `cpu`, `cuda:0`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pancake_langgraph._errors import ConfigError, DeviceFull


@dataclass(frozen=True, slots=True)
class Taken:
    """What one owner has taken of one device."""

    device: str
    name: str
    num_bytes: int


class DeviceBudget:
    """Keeps what is put on devices under limits.  Thread-safe.

    It counts and refuses; it neither allocates nor moves anything.  What an owner has taken counts until the owner is
    garbage collected, or gives it back.
    """

    def __init__(self, limits_bytes: Mapping[str, int]) -> None:
        """Limit the devices that are named; others are counted and not limited.

        Raises:
            ConfigError: if a limit is not an integer from 0 on.
        """
        for device, limit in limits_bytes.items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise ConfigError(f"limit of {device}: got {limit!r}, allowed are bytes, integers from 0 on")
        self._limits = dict(limits_bytes)
        self._lock = threading.Lock()
        self._taken: dict[int, tuple[Taken, ...]] = {}
        #: Filled by the garbage collector, which may run anywhere, so also under the lock.
        self._gone: deque[int] = deque()

    def take(self, owner: object, name: str, needs: Mapping[str, int]) -> None:
        """Count what `owner` puts on devices, all of it or nothing.  One that is counted already is not counted again.

        `name` says what it is.  An owner that cannot be referred to weakly is counted until it gives it back.

        Raises:
            DeviceFull: if a limit would be passed; nothing is taken then.
        """
        with self._lock:
            self._forget_gone()
            if id(owner) in self._taken:
                return
            for device, num_bytes in needs.items():
                self._check(device, name, num_bytes)
            self._taken[id(owner)] = tuple(Taken(device, name, size) for device, size in needs.items() if size)
        with contextlib.suppress(TypeError):  # that stays counted
            weakref.finalize(owner, self._gone.append, id(owner)).atexit = False

    def give_back(self, owner: object) -> None:
        """Count an owner no more; one that is not counted changes nothing."""
        with self._lock:
            self._taken.pop(id(owner), None)

    def taken(self) -> tuple[Taken, ...]:
        """Return what is taken, in the order in which it was."""
        with self._lock:
            self._forget_gone()
            return tuple(part for parts in self._taken.values() for part in parts)

    def left_bytes(self, device: str) -> int | None:
        """Return what may still be taken of a device; `None` where it has no limit."""
        limit = self._limits.get(device)
        return None if limit is None else limit - sum(part.num_bytes for part in self.taken() if part.device == device)

    def _check(self, device: str, name: str, num_bytes: int) -> None:
        limit = self._limits.get(device)
        if limit is None:
            return
        others = [part for parts in self._taken.values() for part in parts if part.device == device]
        left = limit - sum(part.num_bytes for part in others)
        if num_bytes > left:
            held = ", ".join(f"{part.name} {part.num_bytes:,}" for part in others) or "nothing"
            raise DeviceFull(
                f"{device}: {name} needs {num_bytes:,} bytes, allowed are {limit:,} in all, of which {left:,} are left "
                f"(taken: {held}); raise the limit of the DeviceBudget, or put it on another device"
            )

    def _forget_gone(self) -> None:
        while self._gone:
            self._taken.pop(self._gone.popleft(), None)
