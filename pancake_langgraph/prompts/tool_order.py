"""One stable order for tools: that in which the same set of tools was first sent."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pancake_langgraph.wire.bodies import stable_tools

ToolOrder = Literal["first_seen", "sorted", "as_bound"]

_MAX_SETS: Final = 256
_MAX_CHARS: Final = 4_000_000


class ToolOrders:
    """Remembers in which order, and with which order of keys, each set of tools was first sent.

    Two sets are the same when they hold the same tools, whatever their order and the order of keys in their schemas;
    lists inside a schema keep theirs and tell sets apart.  An app whose order never varies gets back what it gave, one
    whose order varies gets one order for the life of the process.  Bounded: the set that was not used for longest is
    forgotten first.  Holds nothing but tools.  Thread-safe.
    """

    def __init__(self, *, max_sets: int = _MAX_SETS, max_chars: int = _MAX_CHARS) -> None:
        """Hold at most `max_sets` sets, which have at most `max_chars` characters of JSON together."""
        self._max_sets = max_sets
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._keys: dict[str, bytes] = {}  # the same, the other way round
        self._chars = 0

    def __len__(self) -> int:
        """How many sets are held."""
        return len(self._texts)

    def settle(self, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return `tools` as they are to be sent now; a set never seen before is remembered as it is."""
        return self._ordered(tools, keeps=True)

    def expected(self, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return `tools` as `settle` would, and remember nothing."""
        return self._ordered(tools, keeps=False)

    def clear(self) -> None:
        """Forget everything: what is sent next counts as first."""
        with self._lock:
            self._texts.clear()
            self._keys.clear()
            self._chars = 0

    def _ordered(self, tools: Sequence[Mapping[str, Any]], *, keeps: bool) -> list[Any]:
        given = list(tools)
        try:
            text = json.dumps(given, ensure_ascii=False)
            if self._is_first_form(text):
                return given
            key = _key(given)
        except (TypeError, ValueError, RecursionError):  # no JSON: whoever sends it will say so
            return given
        with self._lock:
            first = self._texts.get(key)
            if first is not None:
                self._texts.move_to_end(key)
            elif keeps:
                self._remember(key, text)
        return given if first is None else list(json.loads(first))

    def _is_first_form(self, text: str) -> bool:
        """Whether tools were first sent with exactly this text; the usual case, which needs no sorting."""
        with self._lock:
            key = self._keys.get(text)
            if key is not None:
                self._texts.move_to_end(key)
            return key is not None

    def _remember(self, key: bytes, text: str) -> None:
        self._texts[key] = text
        self._keys[text] = key
        self._chars += len(text)
        while self._texts and (len(self._texts) > self._max_sets or self._chars > self._max_chars):
            _, old = self._texts.popitem(last=False)
            del self._keys[old]
            self._chars -= len(old)


#: The order that every model of this process shares.
TOOL_ORDERS: Final = ToolOrders()


def expected_tools(tools: Sequence[Mapping[str, Any]], order: object) -> list[Any]:
    """Return `tools` as a model with the setting `order` would send them now."""
    if order == "sorted":
        return stable_tools(tools)
    return TOOL_ORDERS.expected(tools) if order == "first_seen" else list(tools)


def sent_tools(tools: Sequence[Mapping[str, Any]], order: ToolOrder) -> list[Any]:
    """Return `tools` as a model with the setting `order` sends them, and remember that they were sent."""
    return TOOL_ORDERS.settle(tools) if order == "first_seen" else expected_tools(tools, order)


def _key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for text in sorted(json.dumps(tool, ensure_ascii=False, sort_keys=True) for tool in tools):
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.digest()
