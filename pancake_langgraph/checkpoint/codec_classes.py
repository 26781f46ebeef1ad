"""Which classes may be stored: the app's list, and the classes of LangChain and LangGraph that are safe by default."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import SecretBytes, SecretStr

from pancake_langgraph._errors import ConfigError, StateTypeError
from pancake_langgraph.checkpoint import codec_kinds, codec_numpy
from pancake_langgraph.checkpoint.codec_names import classes_named
from pancake_langgraph.checkpoint.codec_plans import TypeName, code_of, plan_for
from pancake_langgraph.checkpoint.codec_wire import PLAIN, Code, Ext, Plan, Read, Reader, Write, Writer, pack, type_name

_MESSAGES = "langchain_core.messages"
_TEXT_HOME = "langchain_core.messages.base"

#: Safe by default.  The names are the public ones, whatever module a class really lives in.
KNOWN: frozenset[TypeName] = frozenset(
    {
        *(
            (_MESSAGES, name)
            for name in (
                "AIMessage",
                "AIMessageChunk",
                "BaseMessage",
                "BaseMessageChunk",
                "ChatMessage",
                "ChatMessageChunk",
                "FunctionMessage",
                "FunctionMessageChunk",
                "HumanMessage",
                "HumanMessageChunk",
                "RemoveMessage",
                "SystemMessage",
                "SystemMessageChunk",
                "ToolMessage",
                "ToolMessageChunk",
            )
        ),
        ("langchain_core.documents", "Document"),
        ("langgraph.checkpoint.serde.types", "_DeltaSnapshot"),
        ("langgraph.store.base", "Item"),
        ("langgraph.store.base", "SearchItem"),
        ("langgraph.types", "Command"),
        ("langgraph.types", "Interrupt"),
        ("langgraph.types", "Overwrite"),
        ("langgraph.types", "Send"),
        ("langgraph.types", "TimeoutPolicy"),
    }
)
_KNOWN_BY_CLASS = {name: (module, name) for module, name in KNOWN}
_SLOTTED = frozenset({"Send", "Item", "SearchItem"})


class ClassTable:
    """The classes that may be stored.  Never changes, but for plans that are made at first use; thread-safe."""

    __slots__ = ("_by_name", "_by_type", "_doubtful", "_names")

    def __init__(
        self, names: Mapping[TypeName, type | None], doubtful: Mapping[TypeName, tuple[TypeName, ...]]
    ) -> None:
        self._names = names
        self._doubtful = doubtful  # classes that share the name by which they were allowed -> all who share it
        self._by_name: dict[TypeName, tuple[Code, type, Plan]] = {}
        self._by_type: dict[type, Write] = {}

    def plus(self, extra: Iterable[type | TypeName]) -> ClassTable:
        """Return a table that has more classes, this one if it has them all.

        Raises:
            ConfigError: if something is neither a class nor a pair (module, name).
        """
        names = dict(self._names)
        for item in extra:
            name, kind = _named(item)
            if kind in codec_kinds.WRITES or kind in PLAIN or _known(name) is not None:
                continue
            if kind is not None or name not in names:
                names[name] = kind
        return self if names == self._names else ClassTable(names, self._doubtful)

    def plus_listed(self, listed: Iterable[TypeName]) -> ClassTable:
        """Return a table that has more classes, named as LangGraph lists them: by module and `__name__`.

        Such a name may mean a class inside another one.  Where two classes go by it neither is added, and what is said
        when one of them is met names both.  Qualified names are taken as `plus` takes them.
        """
        extra: list[type | TypeName] = []
        doubtful = dict(self._doubtful)
        for module, name in listed:
            found = () if _known((module, name)) is not None else classes_named(module, name)
            found = tuple(kind for kind in found if code_of(kind) is not None)
            if len(found) > 1:
                owns = tuple((kind.__module__, kind.__qualname__) for kind in found)
                doubtful |= dict.fromkeys(owns, owns)
            else:
                extra += found or [(module, name)]
        table = self.plus(extra)
        return table if doubtful == self._doubtful else ClassTable(table._names, doubtful)

    def write_for(self, kind: type, *, channel: str) -> Write:
        """Return how to write objects of a type that has no kind of its own.

        Raises:
            StateTypeError: if it may not be stored.
        """
        write = self._by_type.get(kind)
        if write is None:
            write = codec_numpy.write_for(kind) or _SECRETS.get(kind) or _text_write(kind)
            if write is None:
                write = self._plan_of(kind, channel).write
            self._by_type[kind] = write
        return write

    def named(self, module: object, name: object, code: int, *, channel: str) -> Plan:
        """Return the plan of a class named by stored bytes.

        Raises:
            StateTypeError: if it is not allowed, or not of the kind that the bytes say.
        """
        if type(module) is not str or type(name) is not str:
            raise ValueError("name of a class expected")
        made = self._by_name.get((module, name))
        if made is None:
            made = self._make((module, name), channel)
        if made[0] != code:
            raise StateTypeError(
                f"channel {channel!r}: bytes store {module}.{name} as {Code(code).name}, but the class is "
                f"{made[0].name} now. Give the new class another name, or delete the thread"
            )
        return made[2]

    def _plan_of(self, kind: type, channel: str) -> Plan:
        own = (kind.__module__, kind.__qualname__)
        name = _known(own) or own
        if name not in self._names and name not in KNOWN:
            if code_of(kind) is None:
                raise StateTypeError(
                    f"channel {channel!r}: a {type_name(kind)} cannot be stored. Stored are values of Python's own "
                    "types, NumPy, messages, and enums, dataclasses, named tuples and pydantic models of the app. "
                    "Store plain data, and keep the object out of the state"
                )
            self._check_not_doubtful(name, channel)
            raise StateTypeError(
                f"channel {channel!r}: {type_name(kind)} is not among the types that may be stored. "
                f"Allow it: `PancakeSaver(..., allow=[{kind.__name__}])`"
            )
        _, found, plan = self._by_name.get(name) or self._make(name, channel)
        if found is not kind:
            raise StateTypeError(
                f"channel {channel!r}: {type_name(kind)} is not the class that goes by this name in its module, so it "
                f"would come back as the other. Allow the class itself: `PancakeSaver(..., allow=[{kind.__name__}])`"
            )
        return plan

    def _make(self, name: TypeName, channel: str) -> tuple[Code, type, Plan]:
        shown = f"{name[0]}.{name[1]}"[:200]
        if name not in self._names and name not in KNOWN:
            self._check_not_doubtful(name, channel)
            last = name[1].rpartition(".")[2][:100]
            raise StateTypeError(
                f"channel {channel!r} holds a {shown!r}, which is not among the types that may come back; nothing of "
                f"it was imported or called. Allow it: `PancakeSaver(..., allow=[{last}])`"
            )
        kind = self._names.get(name) or _import(name, channel)
        code = Code.SLOTS if name in KNOWN and name[1] in _SLOTTED else code_of(kind)
        reason = "it is neither an enum, a dataclass, a named tuple nor a pydantic (version 2) model"
        if code is not None:
            try:
                made = code, kind, plan_for(kind, name, code=code, trims=name in KNOWN)
            except TypeError as error:
                reason = f"objects of it cannot be made without running its own code ({error})"
            else:
                self._by_name[name] = made
                return made
        raise StateTypeError(
            f"channel {channel!r}: {shown!r} is allowed, but cannot be stored: {reason}. Store plain data instead"
        )

    def _check_not_doubtful(self, name: TypeName, channel: str) -> None:
        both = self._doubtful.get(name)
        if both is not None:
            raise StateTypeError(
                f"channel {channel!r}: {name[0]}.{name[1]} is listed by its last name only, and "
                f"{' and '.join(sorted(qualified for _, qualified in both))} go by that name. "
                f"Allow the class itself: `PancakeSaver(..., allow=[{name[1]}])`"
            )


def _named(item: object) -> tuple[TypeName, type | None]:
    if isinstance(item, type):
        return (item.__module__, item.__qualname__), item
    if isinstance(item, tuple) and len(item) == 2 and all(type(part) is str for part in item):
        return (item[0], item[1]), None
    raise ConfigError(f"`allow` takes classes and pairs (module, name), got {item!r:.100}. Pass the class itself")


def _known(name: TypeName) -> TypeName | None:
    """Return the public name of a class that is safe by default, by the name it has in its own module."""
    public = _KNOWN_BY_CLASS.get(name[1])
    if public is None or public[0].partition(".")[0] != name[0].partition(".")[0]:
        return None
    # Only below the public module: an app's own package may be called alike, but not be the same.
    return public if f"{name[0]}.".startswith(f"{public[0]}.") else None


def _import(name: TypeName, channel: str) -> type:
    """Return a class that is on the list by its name."""
    try:
        found: Any = importlib.import_module(name[0])
        for part in name[1].split("."):
            found = getattr(found, part)
    except Exception as error:  # an app's module may raise anything while it is imported
        raise StateTypeError(
            f"channel {channel!r}: {name[0]}.{name[1]} is allowed, but cannot be imported "
            f"({type(error).__name__}: {error}). Pass the class itself: `PancakeSaver(..., allow=[...])`"
        ) from error
    if not isinstance(found, type):
        raise StateTypeError(
            f"channel {channel!r}: {name[0]}.{name[1]} is allowed, but is not a class. Take it off the list"
        )
    return found


# -- single types of libraries --------------------------------------------------------------------------------------


def _write_secret_str(writer: Writer, value: SecretStr, depth: int) -> Ext:
    return Ext(Code.SECRET, pack(writer.wrap(value.get_secret_value(), depth)))


def _write_secret_bytes(writer: Writer, value: SecretBytes, depth: int) -> Ext:
    return Ext(Code.SECRET, pack(writer.wrap(value.get_secret_value(), depth)))


def _read_secret(reader: Reader, data: bytes) -> object:
    value = reader.load(data)
    if type(value) is bytes:
        return SecretBytes(value)
    if type(value) is str:
        return SecretStr(value)
    raise ValueError("a text or bytes expected")


_SECRETS: dict[type, Write] = {SecretStr: _write_secret_str, SecretBytes: _write_secret_bytes}


def _text_write(kind: type) -> Write | None:
    # The `str` that `message.text` gives can also be called; apps put it into their state as it is.
    if (kind.__module__, kind.__qualname__) == (_TEXT_HOME, "TextAccessor") and issubclass(kind, str):
        return _write_text
    return None


def _write_text(writer: Writer, value: Any, depth: int) -> Ext:
    return Ext(Code.MESSAGE_TEXT, pack(str.__str__(value)))


def _read_text(reader: Reader, data: bytes) -> object:
    value = reader.load(data)
    if type(value) is not str:
        raise ValueError("a text expected")
    from langchain_core.messages.base import TextAccessor

    return TextAccessor(value)


def _read_object(code: Code) -> Read:
    def read(reader: Reader, data: bytes) -> object:
        module, name, *parts = reader.sequence(data)
        return reader.classes.named(module, name, code, channel=reader.channel).read(reader, parts)

    return read


#: How to read a payload, by its code.
READS: dict[int, Read] = {
    Code.SECRET: _read_secret,
    Code.MESSAGE_TEXT: _read_text,
    **{code: _read_object(code) for code in (Code.ENUM, Code.NAMED_TUPLE, Code.DATACLASS, Code.MODEL, Code.SLOTS)},
}
