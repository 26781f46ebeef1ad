"""The builtin and standard-library types, each with a kind of its own on the wire."""

from __future__ import annotations

import ipaddress
import pathlib
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar
from uuid import UUID

import ormsgpack

from pancake_langgraph._errors import StateTypeError
from pancake_langgraph.checkpoint import codec_times
from pancake_langgraph.checkpoint.codec_wire import PLAIN, Code, Ext, Read, Reader, Write, Writer, pack, typed

_Dict = TypeVar("_Dict", bound=dict[Any, Any])

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "": None,
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "float": float,
    "str": str,
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_PATHS: dict[str, type[pathlib.PurePath]] = {
    "PosixPath": pathlib.PosixPath,
    "WindowsPath": pathlib.WindowsPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_ADDRESSES: dict[str, Callable[[str], object]] = {
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Network": ipaddress.IPv6Network,
    "IPv4Interface": ipaddress.IPv4Interface,
    "IPv6Interface": ipaddress.IPv6Interface,
}
# Not among them: DEBUG, which prints.
_FLAGS = re.ASCII | re.IGNORECASE | re.LOCALE | re.MULTILINE | re.DOTALL | re.UNICODE | re.VERBOSE


# -- containers -----------------------------------------------------------------------------------------------------


def _write_list(writer: Writer, value: list[Any], depth: int) -> object:
    return value if PLAIN.issuperset(map(type, value)) else writer.items(value, depth)


def _write_dict(writer: Writer, value: dict[Any, Any], depth: int) -> object:
    return writer.mapping(value, depth)


def _write_tuple(writer: Writer, value: tuple[Any, ...], depth: int) -> Ext:
    return Ext(Code.TUPLE, pack(writer.items(value, depth)))


def _sorted_items(writer: Writer, value: set[Any] | frozenset[Any], depth: int) -> bytes:
    # Sets have no order of their own; equal sets must give equal bytes.
    parts = sorted(pack(writer.wrap(item, depth)) for item in value)
    return pack([ormsgpack.Fragment(part) for part in parts])


def _write_set(writer: Writer, value: set[Any], depth: int) -> Ext:
    return Ext(Code.SET, _sorted_items(writer, value, depth))


def _write_frozenset(writer: Writer, value: frozenset[Any], depth: int) -> Ext:
    return Ext(Code.FROZENSET, _sorted_items(writer, value, depth))


def _write_deque(writer: Writer, value: deque[Any], depth: int) -> Ext:
    return Ext(Code.DEQUE, pack([value.maxlen, writer.items(value, depth)]))


def _write_counter(writer: Writer, value: Counter[Any], depth: int) -> Ext:
    _refuse_attributes(writer, value)
    return Ext(Code.COUNTER, pack(writer.pairs(value, depth)))


def _write_ordered(writer: Writer, value: OrderedDict[Any, Any], depth: int) -> Ext:
    _refuse_attributes(writer, value)
    # Not `dict.items`: moving a key to the end changes only the order the subclass keeps.
    flat = [writer.wrap(part, depth) for pair in value.items() for part in pair]
    return Ext(Code.ORDERED_DICT, pack(flat))


def _write_default(writer: Writer, value: defaultdict[Any, Any], depth: int) -> Ext:
    factory = value.default_factory
    try:
        name = _FACTORY_NAMES[factory]
    except (KeyError, TypeError):
        raise writer.refusal(
            defaultdict,
            f"its factory is {type(factory).__name__} {getattr(factory, '__qualname__', '')!r}; allowed are list, "
            "dict, set, int, float, str and None. Use one of these, or a plain dict",
        ) from None
    return Ext(Code.DEFAULT_DICT, pack([name, writer.pairs(value, depth)]))


def _refuse_attributes(writer: Writer, value: object) -> None:
    if value.__dict__:
        raise writer.refusal(type(value), "it carries attributes of its own; use a dataclass")


def _unflatten(flat: list[Any], into: _Dict) -> _Dict:
    for key, item in zip(flat[::2], flat[1::2], strict=True):
        into[key] = item
    if 2 * len(into) != len(flat):
        raise ValueError("a key occurs twice")
    return into


def _read_tuple(reader: Reader, data: bytes) -> object:
    return tuple(reader.sequence(data))


def _read_dict(reader: Reader, data: bytes) -> object:
    return _unflatten(reader.sequence(data), {})


def _read_set(reader: Reader, data: bytes) -> object:
    return set(_distinct(reader.sequence(data)))


def _read_frozenset(reader: Reader, data: bytes) -> object:
    return _distinct(reader.sequence(data))


def _distinct(items: list[Any]) -> frozenset[Any]:
    found = frozenset(items)
    if len(found) != len(items):
        raise ValueError("an item occurs twice in a set")
    return found


def _read_deque(reader: Reader, data: bytes) -> object:
    bound, items = reader.sequence(data)
    return deque(typed(items, list), None if bound is None else typed(bound, int))


def _read_counter(reader: Reader, data: bytes) -> object:
    return _unflatten(reader.sequence(data), Counter())


def _read_ordered(reader: Reader, data: bytes) -> object:
    return _unflatten(reader.sequence(data), OrderedDict())


def _read_default(reader: Reader, data: bytes) -> object:
    name, flat = reader.sequence(data)
    return _unflatten(typed(flat, list), defaultdict(_FACTORIES[name]))


# -- numbers and bytes ----------------------------------------------------------------------------------------------


def _write_bytearray(writer: Writer, value: bytearray, depth: int) -> Ext:
    return Ext(Code.BYTEARRAY, bytes(value))


def _read_bytearray(reader: Reader, data: bytes) -> object:
    return bytearray(data)


def _read_int(reader: Reader, data: bytes) -> object:
    return int.from_bytes(data, "big", signed=True)


def _read_str(reader: Reader, data: bytes) -> object:
    return data.decode("utf-8", "surrogatepass")


def _write_complex(writer: Writer, value: complex, depth: int) -> Ext:
    return Ext(Code.COMPLEX, pack([value.real, value.imag]))


def _read_complex(reader: Reader, data: bytes) -> object:
    real, imag = reader.sequence(data)
    return complex(typed(real, float), typed(imag, float))


def _write_decimal(writer: Writer, value: Decimal, depth: int) -> Ext:
    return Ext(Code.DECIMAL, pack(str(value)))


def _read_decimal(reader: Reader, data: bytes) -> object:
    return Decimal(typed(reader.load(data), str))


def _write_fraction(writer: Writer, value: Fraction, depth: int) -> Ext:
    return Ext(Code.FRACTION, pack([value.numerator, value.denominator]))


def _read_fraction(reader: Reader, data: bytes) -> object:
    numerator, denominator = reader.sequence(data)
    return Fraction(typed(numerator, int), typed(denominator, int))


def _write_range(writer: Writer, value: range, depth: int) -> Ext:
    return Ext(Code.RANGE, pack([value.start, value.stop, value.step]))


def _read_range(reader: Reader, data: bytes) -> object:
    start, stop, step = reader.sequence(data)
    return range(typed(start, int), typed(stop, int), typed(step, int))


# -- texts that mean something --------------------------------------------------------------------------------------


def _write_uuid(writer: Writer, value: UUID, depth: int) -> Ext:
    return Ext(Code.UUID, value.bytes)


def _read_uuid(reader: Reader, data: bytes) -> object:
    return UUID(bytes=data)


def _write_path(writer: Writer, value: pathlib.PurePath, depth: int) -> Ext:
    text, kind = str(value), type(value)
    if kind(text).parts != value.parts:
        raise writer.refusal(kind, "its text reads back as another path. Store the parts")
    return Ext(Code.PATH, pack([kind.__name__, text]))


def _read_path(reader: Reader, data: bytes) -> object:
    name, text = reader.sequence(data)
    kind = _PATHS[name]
    try:
        return kind(typed(text, str))
    except NotImplementedError as error:
        raise StateTypeError(
            f"channel {reader.channel!r}: a {name} cannot live on this system; store `PurePath` objects in threads "
            "that move between systems"
        ) from error


def _write_pattern(writer: Writer, value: re.Pattern[Any], depth: int) -> Ext:
    if value.flags & ~_FLAGS:
        raise writer.refusal(re.Pattern, "it was compiled with `re.DEBUG`. Compile it without")
    return Ext(Code.PATTERN, pack([writer.wrap(value.pattern, depth), value.flags]))


def _read_pattern(reader: Reader, data: bytes) -> object:
    pattern, flags = reader.sequence(data)
    if type(pattern) not in (str, bytes) or typed(flags, int) & ~_FLAGS:
        raise ValueError("not a pattern")
    return re.compile(pattern, flags)


def _write_address(writer: Writer, value: object, depth: int) -> Ext:
    return Ext(Code.ADDRESS, pack([type(value).__name__, str(value)]))


def _read_address(reader: Reader, data: bytes) -> object:
    name, text = reader.sequence(data)
    return _ADDRESSES[name](typed(text, str))


#: How to write a value, by its exact type.
WRITES: dict[type, Write] = {
    **codec_times.WRITES,
    list: _write_list,
    dict: _write_dict,
    tuple: _write_tuple,
    set: _write_set,
    frozenset: _write_frozenset,
    deque: _write_deque,
    Counter: _write_counter,
    OrderedDict: _write_ordered,
    defaultdict: _write_default,
    bytearray: _write_bytearray,
    complex: _write_complex,
    Decimal: _write_decimal,
    Fraction: _write_fraction,
    range: _write_range,
    UUID: _write_uuid,
    re.Pattern: _write_pattern,
    **dict.fromkeys(_PATHS.values(), _write_path),
    ipaddress.IPv4Address: _write_address,
    ipaddress.IPv6Address: _write_address,
    ipaddress.IPv4Network: _write_address,
    ipaddress.IPv6Network: _write_address,
    ipaddress.IPv4Interface: _write_address,
    ipaddress.IPv6Interface: _write_address,
}

#: How to read a payload, by its code.
READS: dict[int, Read] = {
    **codec_times.READS,
    Code.TUPLE: _read_tuple,
    Code.DICT: _read_dict,
    Code.SET: _read_set,
    Code.FROZENSET: _read_frozenset,
    Code.BYTEARRAY: _read_bytearray,
    Code.INT: _read_int,
    Code.STR: _read_str,
    Code.DEQUE: _read_deque,
    Code.COUNTER: _read_counter,
    Code.ORDERED_DICT: _read_ordered,
    Code.DEFAULT_DICT: _read_default,
    Code.COMPLEX: _read_complex,
    Code.UUID: _read_uuid,
    Code.DECIMAL: _read_decimal,
    Code.FRACTION: _read_fraction,
    Code.PATH: _read_path,
    Code.PATTERN: _read_pattern,
    Code.ADDRESS: _read_address,
    Code.RANGE: _read_range,
}
