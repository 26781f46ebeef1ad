"""How objects of classes are taken apart and put together: one plan per class, made once.

Objects are restored without running `__init__`, `__post_init__` or validators: what was stored was valid when it was
stored, and running them again could change it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, Flag
from functools import cached_property, partial
from typing import Any

from pydantic import BaseModel, RootModel
from pydantic_core import PydanticUndefined

from pancake_langgraph._errors import StateTypeError
from pancake_langgraph.checkpoint.codec_wire import PLAIN, Code, Ext, Plan, Reader, Writer, pack

_log = logging.getLogger(__name__)

#: What stands on the wire for a class.
TypeName = tuple[str, str]

#: Gives the value of a field that is missing from the bytes; takes the fields before it.
_Default = Callable[[dict[str, Any]], Any]

# Fields that were added to a slotted class of LangGraph after its first release.
_SLOT_DEFAULTS: dict[str, None] = {"timeout": None, "score": None}

_MOST_WARNINGS = 1000
_warned: set[tuple[TypeName, str]] = set()
_set = object.__setattr__


def code_of(kind: type) -> Code | None:
    """Return which kind of class it is, `None` for a class that cannot be stored."""
    if issubclass(kind, Enum):
        return Code.ENUM
    if issubclass(kind, tuple):
        return Code.NAMED_TUPLE if isinstance(getattr(kind, "_fields", None), tuple) else None
    if issubclass(kind, BaseModel):
        return Code.MODEL
    return Code.DATACLASS if dataclasses.is_dataclass(kind) else None


def plan_for(kind: type, name: TypeName, *, code: Code, trims: bool = False) -> Plan:
    """Return the plan of a class.

    Args:
        kind: The class.
        name: What stands for it on the wire.
        code: Its kind.
        trims: Leave out fields that have their default.  Only for classes whose defaults never change.

    Raises:
        TypeError: if objects of the class hold more than can be seen from outside, as subclasses of builtins do.
    """
    if code is Code.ENUM:
        return _EnumPlan(kind, name)
    if code is Code.NAMED_TUPLE:
        return _TuplePlan(kind, name)
    object.__new__(kind)
    if code is Code.MODEL:
        return _ModelPlan(kind, name, trims=trims)
    return _DataclassPlan(kind, name) if code is Code.DATACLASS else _SlotsPlan(kind, name)


def _changed(reader: Reader, name: TypeName, what: str) -> StateTypeError:
    return StateTypeError(
        f"channel {reader.channel!r}: a stored {'.'.join(name)} no longer fits its class: {what}. "
        "Give the class what is missing, or delete the thread"
    )


def _drop(name: TypeName, fields: Iterable[object]) -> None:
    """Say once per class and field that stored data has no place any more."""
    for field in fields:
        key = (name, str(field)[:100])
        if key not in _warned and len(_warned) < _MOST_WARNINGS:
            _warned.add(key)
            _log.warning("stored field %r is unknown to %s and is dropped", key[1], ".".join(name))


def _take(reader: Reader, name: TypeName, stored: dict[str, Any], defaults: Mapping[str, _Default | None]) -> Any:
    """Return the fields in the order of the class; what is missing takes its default, what is unknown goes."""
    if type(stored) is not dict:
        raise ValueError("fields expected")
    if stored.keys() == defaults.keys():
        return {field: stored[field] for field in defaults}
    fields: dict[str, Any] = {}
    for field, default in defaults.items():
        if field in stored:
            fields[field] = stored[field]
        elif default is not None:
            fields[field] = _made(reader, name, field, partial(default, fields))
        else:
            raise _changed(reader, name, f"field {field!r} was not stored and has no default")
    return fields


def _made(reader: Reader, name: TypeName, field: str, default: Callable[[], Any]) -> Any:
    try:
        return default()
    except Exception as error:  # it is the app's code
        raise _changed(reader, name, f"the default of {field!r} raised {type(error).__name__}") from error


def _constant(value: Any) -> _Default:
    return lambda _: value


def _calling(factory: Callable[[], Any]) -> _Default:
    return lambda _: factory()


class _EnumPlan:
    __slots__ = ("_kind", "_name")

    def __init__(self, kind: Any, name: TypeName) -> None:
        self._kind = kind
        self._name = name

    def write(self, writer: Writer, value: Any, depth: int) -> object:
        if issubclass(self._kind, Flag):
            member: int | str = value._value_
            is_found = self._kind(member) is value
        else:
            member = value._name_
            is_found = self._kind.__members__.get(member) is value
        if not is_found:
            raise writer.refusal(self._kind, "the object is not a member of its class. Store declared members only")
        return Ext(Code.ENUM, pack([*self._name, member]))

    def read(self, reader: Reader, parts: list[Any]) -> object:
        [member] = parts
        if issubclass(self._kind, Flag):
            if type(member) is not int:
                raise ValueError("number of a flag expected")
            try:
                return self._kind(member)
            except ValueError as error:
                raise _changed(reader, self._name, f"it has no flags for {member}") from error
        if type(member) is not str:
            raise ValueError("name of a member expected")
        found = self._kind.__members__.get(member)
        if found is None:
            raise _changed(reader, self._name, f"it has no member {member[:100]!r}")
        return found


class _TuplePlan:
    __slots__ = ("_defaults", "_kind", "_name")

    def __init__(self, kind: Any, name: TypeName) -> None:
        self._kind = kind
        self._name = name
        given = getattr(kind, "_field_defaults", {})
        self._defaults = {field: _constant(given[field]) if field in given else None for field in kind._fields}

    def write(self, writer: Writer, value: Any, depth: int) -> object:
        if tuple.__len__(value) != len(self._defaults) or getattr(value, "__dict__", None):
            raise writer.refusal(self._kind, "it holds more than its fields. Use a dataclass")
        items = writer.items(tuple.__iter__(value), depth)
        return Ext(Code.NAMED_TUPLE, pack([*self._name, dict(zip(self._defaults, items, strict=True))]))

    def read(self, reader: Reader, parts: list[Any]) -> object:
        [stored] = parts
        fields = _take(reader, self._name, stored, self._defaults)
        _drop(self._name, stored.keys() - fields.keys())
        return tuple.__new__(self._kind, fields.values())


class _SlotsPlan:
    """Plain slotted classes of LangGraph."""

    __slots__ = ("_defaults", "_kind", "_name")

    def __init__(self, kind: Any, name: TypeName) -> None:
        self._kind = kind
        self._name = name
        self._defaults = {
            slot: _constant(None) if slot in _SLOT_DEFAULTS else None
            for base in reversed(kind.__mro__)
            for slot in base.__dict__.get("__slots__", ())
        }

    def write(self, writer: Writer, value: Any, depth: int) -> object:
        fields = {slot: writer.wrap(getattr(value, slot), depth) for slot in self._defaults}
        return Ext(Code.SLOTS, pack([*self._name, fields]))

    def read(self, reader: Reader, parts: list[Any]) -> object:
        [stored] = parts
        fields = _take(reader, self._name, stored, self._defaults)
        _drop(self._name, stored.keys() - fields.keys())
        made = object.__new__(self._kind)
        for slot, value in fields.items():
            _set(made, slot, value)
        return made


class _DataclassPlan:
    __slots__ = ("_defaults", "_kind", "_more_slots", "_name")

    def __init__(self, kind: Any, name: TypeName) -> None:
        self._kind = kind
        self._name = name
        self._defaults = {field.name: self._default(field) for field in dataclasses.fields(kind)}
        slots = {
            slot
            for base in kind.__mro__
            for given in [base.__dict__.get("__slots__", ())]
            for slot in ([given] if isinstance(given, str) else given)
        }
        self._more_slots = sorted(slots - self._defaults.keys() - {"__dict__", "__weakref__"})

    @staticmethod
    def _default(field: dataclasses.Field[Any]) -> _Default | None:
        if field.default is not dataclasses.MISSING:
            return _constant(field.default)
        return None if field.default_factory is dataclasses.MISSING else _calling(field.default_factory)

    def write(self, writer: Writer, value: Any, depth: int) -> object:
        fields: dict[str, object] = {}
        unset: list[str] = []
        for name in self._defaults:
            try:
                item = getattr(value, name)
            except AttributeError:
                unset.append(name)
                continue
            fields[name] = item if type(item) in PLAIN else writer.wrap(item, depth)
        more = self._attributes(value)
        parts: list[object] = [*self._name, fields]
        if unset or more:
            parts += [unset, writer.mapping(more, depth)]
        return Ext(Code.DATACLASS, pack(parts))

    def _attributes(self, value: Any) -> dict[str, Any]:
        """Return what the object holds beside its fields, but for what can be computed again."""
        slots = {slot: getattr(value, slot) for slot in self._more_slots if hasattr(value, slot)}
        # `__orig_class__` is a trace that `Box[int](...)` leaves; it says nothing about the value.
        return slots | {
            name: item
            for name, item in getattr(value, "__dict__", {}).items()
            if name not in self._defaults and name != "__orig_class__" and not _is_cached(self._kind, name)
        }

    def read(self, reader: Reader, parts: list[Any]) -> object:
        stored, unset, more = parts if len(parts) != 1 else (parts[0], (), {})
        defaults: Mapping[str, _Default | None] = self._defaults
        if unset:
            defaults = {name: default for name, default in defaults.items() if name not in unset}
        fields = _take(reader, self._name, stored, defaults)
        if stored.keys() - fields.keys():
            _drop(self._name, stored.keys() - fields.keys())
        made = object.__new__(self._kind)
        for name, value in fields.items():
            _set(made, name, value)
        for name, value in more.items():
            self._restore(made, name, value)
        return made

    def _restore(self, made: Any, name: str, value: object) -> None:
        if name in self._more_slots:
            _set(made, name, value)
        elif hasattr(made, "__dict__"):
            # Into the dict itself: a stored name never reaches a descriptor such as `__class__`.
            made.__dict__[name] = value
        else:
            _drop(self._name, [name])


def _is_cached(kind: type, name: str) -> bool:
    return any(isinstance(base.__dict__.get(name), cached_property) for base in kind.__mro__)


class _ModelPlan:
    __slots__ = ("_defaults", "_has_extra", "_is_root", "_kind", "_name", "_private", "_trims")

    def __init__(self, kind: Any, name: TypeName, *, trims: bool) -> None:
        self._kind = kind
        self._name = name
        # Root models have no room for extras and private attributes.
        self._is_root = issubclass(kind, RootModel)
        self._has_extra = kind.model_config.get("extra") == "allow"
        self._private: Mapping[str, Any] = kind.__private_attributes__
        self._defaults = {field: self._default(info) for field, info in kind.model_fields.items()}
        self._trims: dict[str, Any] = {}
        if trims:
            made = {field: default({}) for field, default in self._defaults.items() if default is not None}
            self._trims = {field: value for field, value in made.items() if type(value) in (*PLAIN, list, dict)}

    @staticmethod
    def _default(info: Any) -> _Default | None:
        if info.is_required():
            return None
        if info.default_factory in (list, dict):
            return _calling(info.default_factory)
        if info.default_factory is None and type(info.default) in PLAIN:
            return _constant(info.default)
        return lambda fields: _pydantic_default(info, fields)

    def write(self, writer: Writer, value: Any, depth: int) -> object:
        state = value.__dict__
        marked = value.__pydantic_fields_set__
        trims = self._trims
        fields: dict[str, object] = {}
        for name in self._defaults:
            try:
                item = state[name]
            except KeyError:
                raise writer.refusal(self._kind, f"its field {name!r} is not set. Set it") from None
            kind = type(item)
            if name in trims and name not in marked and kind is type(trims[name]) and item == trims[name]:
                continue
            fields[name] = item if kind in PLAIN else writer.wrap(item, depth)
        if len(state) != len(self._defaults):
            self._check_attributes(writer, state)
        parts = [*self._name, fields, *self._rest(writer, value, fields, marked, depth)]
        while parts[-1] is None:
            parts.pop()
        return Ext(Code.MODEL, pack(parts))

    def _rest(
        self, writer: Writer, value: Any, fields: dict[str, object], marked: set[str], depth: int
    ) -> tuple[object, object, object, object]:
        """Return names stored but not marked as set, names marked but not stored, extras, private attributes."""
        extra = value.__pydantic_extra__
        private = value.__pydantic_private__
        stored = fields.keys() | extra.keys() if extra else fields.keys()
        is_same = stored == marked
        return (
            None if is_same else sorted(stored - marked),
            None if is_same else sorted(marked - stored),
            writer.mapping(extra, depth) if extra else None,
            writer.mapping(private, depth) if private else None,
        )

    def _check_attributes(self, writer: Writer, state: dict[str, Any]) -> None:
        for name in state:
            if name not in self._defaults and not _is_cached(self._kind, name):
                raise writer.refusal(self._kind, f"it holds {name!r}, which is no field. Declare it, or allow extras")

    def read(self, reader: Reader, parts: list[Any]) -> object:
        stored, unmarked, also, extra, private = parts + [None] * (5 - len(parts))
        loose = extra or {}
        marked = {*stored, *loose}
        if loose.keys() & self._defaults.keys():
            # A field was declared since.
            stored = {**loose, **stored}
            loose = {}
        fields = _take(reader, self._name, stored, self._defaults)
        if len(stored) > len(self._defaults) or not stored.keys() <= fields.keys():
            loose = {**{name: value for name, value in stored.items() if name not in fields}, **loose}
        if loose and not self._has_extra:
            _drop(self._name, loose)
            marked.difference_update(loose)
        marked.difference_update(unmarked or ())
        marked.update(also or ())
        made = object.__new__(self._kind)
        _set(made, "__dict__", fields)
        _set(made, "__pydantic_fields_set__", marked)
        if self._is_root:
            return made
        _set(made, "__pydantic_extra__", dict(loose) if self._has_extra else None)
        _set(made, "__pydantic_private__", self._privates(reader, private or {}, fields))
        return made

    def _privates(self, reader: Reader, stored: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any] | None:
        if stored.keys() - self._private.keys():
            _drop(self._name, stored.keys() - self._private.keys())
        if not self._private:
            return None
        found = {
            name: stored[name]
            if name in stored
            else _made(reader, self._name, name, partial(_pydantic_default, attribute, fields))
            for name, attribute in self._private.items()
        }
        return {name: value for name, value in found.items() if value is not PydanticUndefined}


def _pydantic_default(info: Any, fields: dict[str, Any]) -> Any:
    """Return the default of a field or private attribute."""
    factory = info.default_factory
    if factory is None:
        return info.get_default()
    return factory(fields) if getattr(info, "default_factory_takes_validated_data", False) else factory()
