"""The wire of the codec: MessagePack with extension kinds, one writer and one reader per value.

A value of a plain type is MessagePack as it stands.  Every other value is an extension: a code that says what it is,
and a payload.  The packing library would quietly turn some types into others (`bytearray` into `bytes`) and pass some
through as raw wire (`Ext`, `Fragment`); therefore nothing reaches it that was not looked at here first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, Final, Protocol

import ormsgpack

from pancake_langgraph._errors import CheckpointError, CorruptCheckpoint, StateTypeError

Ext = ormsgpack.Ext

#: Levels of nesting that a value may have; each container and each object is one.
MAX_DEPTH = 100

#: Types that MessagePack keeps as they are (integers beyond 64 bits and lone surrogates are seen to by `pack`).
PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes})

_TEXT: frozenset[type] = frozenset({str})

# Everything the library offers to convert by itself is passed to us instead.
_OPTIONS = (
    ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_UUID
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_BIG_INT
)

# The library ignores bytes after the first value.  Read as the first of two values, with a mark as the second, surplus
# bytes are found out.
_PAIR = b"\x92"
_MARK = "\x00end"
_MARK_BYTES = ormsgpack.packb(_MARK)

# The library bounds the nesting of one payload, but payloads nest; unchecked, a few kilobytes overrun the C stack.
_UNMEASURED_PAYLOADS = 1
_NOT_A_CONTAINER = bytes(code for code in range(256) if not (0x80 <= code <= 0x9F or 0xDC <= code <= 0xDF))


class Code(IntEnum):
    """The kinds on the wire.  A number is never given to another kind."""

    TUPLE = 1
    DICT = 2
    SET = 3
    FROZENSET = 4
    BYTEARRAY = 5
    INT = 6
    STR = 7
    DEQUE = 8
    COUNTER = 9
    ORDERED_DICT = 10
    DEFAULT_DICT = 11
    COMPLEX = 12
    DATETIME = 13
    DATE = 14
    TIME = 15
    TIMEDELTA = 16
    TIMEZONE = 17
    ZONE_INFO = 18
    UUID = 19
    DECIMAL = 20
    FRACTION = 21
    PATH = 22
    PATTERN = 23
    ADDRESS = 24
    RANGE = 25
    ARRAY = 26
    SCALAR = 27
    SECRET = 28
    MESSAGE_TEXT = 29
    ENUM = 40
    NAMED_TUPLE = 41
    DATACLASS = 42
    MODEL = 43
    SLOTS = 44


#: Kinds whose payload is raw; that of all others is a packed value.
RAW_CODES = frozenset({Code.BYTEARRAY, Code.INT, Code.STR, Code.UUID})

#: Turns a value into what `pack` takes; the number is the depth of what is inside the value.
Write = Callable[["Writer", Any, int], object]

#: Turns a payload back into a value.
Read = Callable[["Reader", bytes], object]


class Plan(Protocol):
    """How the objects of one class are taken apart and put together."""

    def write(self, writer: Writer, value: Any, depth: int) -> object:
        """Return what `pack` takes."""

    def read(self, reader: Reader, parts: list[Any]) -> object:
        """Return an object made of the parts of the payload after the name."""


class Classes(Protocol):
    """The classes that may be stored."""

    def write_for(self, kind: type, *, channel: str) -> Write:
        """Return how to write objects of a type that has no kind of its own.

        Raises:
            StateTypeError: if it may not be stored.
        """

    def named(self, module: object, name: object, code: int, *, channel: str) -> Plan:
        """Return the plan of a class named by stored bytes.

        Raises:
            StateTypeError: if it is not allowed, or not of the kind that the bytes say.
        """


def pack(tree: object) -> bytes:
    """Return the bytes of a tree of plain values, lists, string-keyed dicts and extensions."""
    try:
        return ormsgpack.packb(tree, default=_beyond, option=_OPTIONS)
    except ormsgpack.MsgpackEncodeError:
        # Almost always a lone surrogate; whatever else it was raises again.
        return ormsgpack.packb(_without_surrogates(tree), default=_beyond, option=_OPTIONS)


def _beyond(value: object) -> Ext:
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} reached the wire unwrapped")
    return Ext(Code.INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _without_surrogates(tree: object) -> object:
    if type(tree) is str:
        try:
            tree.encode()
        except UnicodeEncodeError:
            return Ext(Code.STR, tree.encode("utf-8", "surrogatepass"))
        return tree
    if type(tree) is list:
        return [_without_surrogates(item) for item in tree]
    if type(tree) is dict:
        flat = [_without_surrogates(part) for pair in tree.items() for part in pair]
        if _TEXT.issuperset(map(type, flat[::2])):
            return dict(zip(flat[::2], flat[1::2], strict=True))
        return Ext(Code.DICT, pack(flat))
    return tree


class Writer:
    """Turns one value into what `pack` takes.  Used once, by one thread."""

    __slots__ = ("_classes", "_kinds", "channel")

    def __init__(self, channel: str, kinds: Mapping[type, Write], classes: Classes) -> None:
        self.channel = channel
        self._kinds = kinds
        self._classes = classes

    def wrap(self, value: object, depth: int) -> object:
        """Return `value` if it is plain, else what stands for it.

        Raises:
            StateTypeError: if something in it may not be stored.
        """
        kind = type(value)
        if kind in PLAIN:
            return value
        if depth >= MAX_DEPTH:
            raise StateTypeError(
                f"channel {self.channel!r}: a value is nested more than {MAX_DEPTH} levels deep, or contains itself; "
                f"the innermost object reached is a {type_name(kind)}. Store a flatter value"
            )
        write = self._kinds.get(kind)
        if write is None:
            write = self._classes.write_for(kind, channel=self.channel)
        return write(self, value, depth + 1)

    def items(self, values: Iterable[object], depth: int) -> list[object]:
        """Return the wrapped items."""
        return [item if type(item) in PLAIN else self.wrap(item, depth) for item in values]

    def pairs(self, mapping: dict[Any, Any], depth: int) -> list[object]:
        """Return keys and values in turn, wrapped, in the order of the dict."""
        return [self.wrap(part, depth) for pair in dict.items(mapping) for part in pair]

    def mapping(self, value: dict[str, Any], depth: int) -> object:
        """Return a dict with exact `str` keys as a map, any other dict as pairs."""
        if not _TEXT.issuperset(map(type, value)):
            return Ext(Code.DICT, pack(self.pairs(value, depth)))
        if PLAIN.issuperset(map(type, value.values())):
            return value
        return {key: item if type(item) in PLAIN else self.wrap(item, depth) for key, item in value.items()}

    def refusal(self, kind: type, why: str) -> StateTypeError:
        """Return the error for a value that cannot be stored as it is."""
        return StateTypeError(f"channel {self.channel!r}: a {type_name(kind)} cannot be stored: {why}")


#: The library's words for a failed hook.  A hook that kept no error aside was never entered: the call stack was full.
_HOOK_FAILED: Final = "ext_hook failed"


class Reader:
    """Turns bytes back into one value.  Used once, by one thread."""

    __slots__ = ("_depth", "_error", "_kinds", "channel", "classes")

    def __init__(self, channel: str, kinds: Mapping[int, Read], classes: Classes) -> None:
        self.channel = channel
        self.classes = classes
        self._kinds = kinds
        self._depth = 0
        self._error: BaseException | None = None

    def decode(self, data: bytes) -> object:
        """Return the value.

        Raises:
            StateTypeError: if a class in it is not allowed, or has changed too much.
            CorruptCheckpoint: if the bytes are not what a writer wrote.
        """
        try:
            return self.load(data)
        except ValueError as error:
            # The library says only that the hook failed; what happened was kept aside.
            cause: BaseException = self._error or (RecursionError() if str(error) == _HOOK_FAILED else error)
            if isinstance(cause, CheckpointError | MemoryError) or not isinstance(cause, Exception):
                raise cause from cause.__cause__
            if isinstance(cause, RecursionError):
                raise StateTypeError(
                    f"channel {self.channel!r}: a stored value is nested too deep for what is left of the call stack; "
                    "read it from a shallower call, or raise `sys.setrecursionlimit`"
                ) from cause
            raise CorruptCheckpoint(
                f"channel {self.channel!r}: {len(data)} stored bytes are not what was written "
                f"({type(cause).__name__}). Restore the database from a backup, or delete the thread"
            ) from cause

    def load(self, data: bytes) -> Any:
        """Return the value packed in a payload; garbage raises some `ValueError`."""
        both = ormsgpack.unpackb(b"".join((_PAIR, data, _MARK_BYTES)), ext_hook=self._hook)
        mark = both[1]
        if type(mark) is not str or mark != _MARK:
            raise ValueError("surplus bytes after the value")
        return both[0]

    def sequence(self, data: bytes) -> list[Any]:
        """Return the list packed in a payload."""
        value = self.load(data)
        if type(value) is not list:
            raise ValueError(f"a list was expected, got {type(value).__name__}")
        return value

    def _hook(self, code: int, data: bytes) -> object:
        depth = self._depth
        try:
            if (
                depth == _UNMEASURED_PAYLOADS
                and code not in RAW_CODES
                and len(data.translate(None, _NOT_A_CONTAINER)) > MAX_DEPTH
            ):
                _measure(data)
            read = self._kinds.get(code)
            if read is None or depth > 2 * MAX_DEPTH:
                raise ValueError(f"unknown kind {code}" if read is None else "nested too deep")
            self._depth = depth + 1
            value = read(self, data)
        except BaseException as error:
            # The library drops what a hook raises, interrupts too; `decode` raises the first one again.
            if self._error is None:
                self._error = error
            raise
        self._depth = depth
        return value


def _measure(data: bytes) -> None:
    """Raise `ValueError` if payloads and containers nest deeper than any writer would; uses no recursion."""
    limit = 4 * MAX_DEPTH
    waiting: list[tuple[object, int]] = [(_Payload(data), 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > limit:
            raise ValueError("nested too deep")
        if type(item) is _Payload:
            waiting.append((ormsgpack.unpackb(item.data, ext_hook=_payload), depth + 1))
        elif type(item) is list:
            waiting.extend((part, depth + 1) for part in item if type(part) not in PLAIN)
        elif type(item) is dict:
            waiting.extend((part, depth + 1) for part in item.values() if type(part) not in PLAIN)


class _Payload:
    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


def _payload(code: int, data: bytes) -> _Payload | None:
    return None if code in RAW_CODES else _Payload(data)


def type_name(kind: type) -> str:
    """Return `module.qualname` of a class, for messages."""
    return f"{kind.__module__}.{kind.__qualname__}"


def typed(value: Any, kind: type) -> Any:
    """Return a value read from a payload if it is exactly of that type.

    Raises:
        ValueError: if it is not.
    """
    if type(value) is not kind:
        raise ValueError(f"{kind.__name__} expected, got {type(value).__name__}")
    return value
