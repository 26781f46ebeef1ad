"""Reads what other savers stored, strictly: LangGraph's serializer with everything refused that is not allowed here.

LangGraph's serializer is permissive unless told otherwise, and when it is told, it hands back raw data in place of an
object that it may not make.  Either would be taken over quietly; here both raise.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import ormsgpack
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from pancake_langgraph._errors import CheckpointError, ConfigError, CorruptCheckpoint, StateTypeError
from pancake_langgraph.checkpoint.codec import Codec, TypeName

#: Extension codes of LangGraph's wire that name something to call, and the one for arrays.
_NAMING: Final = frozenset(range(6))
_ARRAY: Final = 6
#: Containers and objects within each other; more than any app has, and few enough for the C stack.
_MAX_HEIGHT: Final = 200
#: How much of packed messages is kept to recognize them again.
_MAX_KNOWN_BYTES: Final = 64 << 20
_KINDS: Final = frozenset({"null", "bytes", "bytearray", "base64", "json", "msgpack"})
_REVIVED_HOMES: Final = ("langchain_core.messages", "langchain_core.documents")
_CONSTRUCTORS: Final = (1, 2)
_SET: Final = ("builtins", "set")


class StrictSerializer(JsonPlusSerializer):
    """LangGraph's serializer for reading only.  For one thread at a time.

    `refusal` keeps the first error, for savers that swallow what their serializer raises.  Where checkpoints hold the
    same message, as those of a chat do, all of them get the same object; whoever reads must not change it.
    """

    def __init__(self, is_allowed: Callable[[TypeName], bool]) -> None:
        """Allow what LangGraph takes for safe, and what `is_allowed` says."""
        super().__init__(pickle_fallback=False, allowed_msgpack_modules=None)
        self._is_allowed = is_allowed
        self.refusal: CheckpointError | None = None
        self._seen: dict[bytes, int] = {}
        self._messages: dict[tuple[int, bytes], BaseMessage] = {}
        self._num_known_bytes = 0

    def loads_typed(self, data: tuple[str, Any]) -> Any:
        """Return the value.

        Raises:
            StateTypeError: if it names something that is not allowed, or that cannot be made any more.
            CorruptCheckpoint: if it cannot be read.
        """
        kind = data[0]
        if kind not in _KINDS:
            self._refuse(
                StateTypeError(
                    f"a value is stored as {kind!r}, which is not read here; import encrypted rows from Python, with "
                    "the saver that can read them: `PancakeSaver.import_from(saver)`; pickled ones are refused always"
                )
            )
        try:
            if kind == "msgpack":
                self._inspect(data[1])
                return ormsgpack.unpackb(data[1], ext_hook=self._made, option=ormsgpack.OPT_NON_STR_KEYS)
            return super().loads_typed(data)
        except CheckpointError as exc:
            self._refuse(exc)
        except (ValueError, TypeError, AttributeError, LookupError, NotImplementedError, RecursionError) as exc:
            self._refuse(CorruptCheckpoint(f"a value stored as {kind} cannot be read ({type(exc).__name__})"))

    def _made(self, code: int, data: bytes) -> Any:
        """Make what one extension holds, and a message that was made before not again."""
        known = self._messages.get((code, data))
        if known is not None:
            return known
        made = super().loads_typed(("msgpack", ormsgpack.packb(ormsgpack.Ext(code, data))))
        if isinstance(made, BaseMessage):
            self._num_known_bytes += len(data)
            if self._num_known_bytes > _MAX_KNOWN_BYTES:
                self._messages.clear()
                self._num_known_bytes = len(data)
            self._messages[code, data] = made
        return made

    def _refuse(self, error: CheckpointError) -> NoReturn:
        self.refusal = self.refusal or error
        raise error

    def _inspect(self, data: bytes) -> None:
        """Look at every object in a packed value before the whole is made."""
        while blocked := self._blocked(data):
            for module, name, method in blocked:
                if method or not self._is_allowed((module, name)):
                    raise not_allowed(f"{module}.{name}{method}", (module, name))
            grown = self.with_msgpack_allowlist([(module, name) for module, name, _ in blocked])
            vars(self).update(vars(grown))  # the only way the serializer offers is a clone

    def _blocked(self, data: bytes) -> Collection[tuple[str, str, str]]:
        """Return what is named but not allowed yet, as (module, name, method).

        Raises:
            StateTypeError: if something that is allowed cannot be made.
        """
        blocked: dict[tuple[str, str, str], None] = {}
        own_thread = threading.get_ident()

        def listen(event: SerdeEvent) -> None:
            method = event.get("method")
            if threading.get_ident() == own_thread and event["kind"] in ("msgpack_blocked", "msgpack_method_blocked"):
                blocked[event["module"], event["name"], f".{method}" if method else ""] = None

        look = _Look(self._seen, super().loads_typed)
        end = register_serde_event_listener(listen)
        try:
            look.height(_Payload(None, data), _MAX_HEIGHT)
        finally:
            end()
        if blocked:
            return blocked
        if look.unmade:
            raise StateTypeError(
                f"a stored {look.unmade[0]} cannot be made any more: its class is gone, or does not take what was "
                "stored; bring the class back, or remove the value with the saver it is stored in"
            )
        self._seen.update(look.fresh)
        return blocked

    # -- rows in JSON: old ones, and those of langgraph-checkpoint-redis ---------------------------------------------

    def _reviver(self, value: dict[str, Any]) -> Any:
        if value.get("lc") not in _CONSTRUCTORS or value.get("type") != "constructor":
            return super()._reviver(value)
        names = self._named(value)
        if value["lc"] == 1 and not any(self._is_allowed((home, names[1])) for home in _REVIVED_HOMES):
            self._refuse(not_allowed(".".join(names), names))
        made = self._revived(value)
        if (made is None or isinstance(made, dict)) and (names == _SET or self._is_allowed(names)):
            if hasattr(super(), "_reconstruct_from_constructor"):
                return value  # that method makes it, and what is inside it first
            made = JsonPlusSerializer(allowed_json_modules=[tuple(value["id"])])._reviver(value)
        if made is None or isinstance(made, dict):
            self._refuse(not_allowed(".".join(names), names))
        return made

    def _revived(self, value: dict[str, Any]) -> Any:
        try:
            return super()._reviver(value)
        except (ValueError, TypeError, AttributeError, LookupError, ImportError, NotImplementedError) as exc:
            name = ".".join(self._named(value))
            self._refuse(CorruptCheckpoint(f"a stored {name} cannot be made any more ({type(exc).__name__})"))

    def _constructor_class(self, value: dict[str, Any]) -> Any:
        """Stand before the method by which langgraph-checkpoint-redis imports the class of an object, any class."""
        if not self._is_allowed(self._named(value)):
            raise ValueError("not allowed")  # it leaves the object to `_reviver` then, which refuses it
        return super()._constructor_class(value)  # type: ignore[misc]

    def _reconstruct_from_constructor(self, value: dict[str, Any]) -> Any:
        """Stand before the method by which versions of it before 0.5 make an object of any class."""
        names = self._named(value)
        if names != _SET and not self._is_allowed(names):
            self._refuse(not_allowed(".".join(names), names))
        return super()._reconstruct_from_constructor(value)  # type: ignore[misc]

    def _named(self, value: dict[str, Any]) -> TypeName:
        parts = value.get("id")
        if not isinstance(parts, list) or len(parts) <= 1 or not all(isinstance(part, str) for part in parts):
            self._refuse(CorruptCheckpoint("a stored object names no class"))
        return ".".join(parts[:-1]), parts[-1]


def allowed_by(codec: Codec) -> Callable[[TypeName], bool]:
    """Return a function that says whether a codec stores a class."""
    return lambda name: codec.allowing([name]) is codec


def not_allowed(shown: str, name: TypeName) -> StateTypeError:
    """Return the error for a type that may not come in."""
    return StateTypeError(
        f"a stored value names {shown[:200]}, which is not among the types that may come in; nothing of it was "
        f"imported or called. If it is a class of your app, allow it: `--allow {name[0][:100]}:{name[1][:100]}`, or "
        f"`PancakeSaver(..., allow=[...])`"
    )


def strict_serializer(
    serde: SerializerProtocol, is_allowed: Callable[[TypeName], bool]
) -> tuple[SerializerProtocol, StrictSerializer]:
    """Return what to read a saver with in place of its serializer, and the strict part of it.

    Raises:
        ConfigError: if the serializer is none of LangGraph's.
    """
    if isinstance(serde, EncryptedSerializer):
        inner, strict = strict_serializer(serde.serde, is_allowed)
        return EncryptedSerializer(serde.cipher, inner), strict
    if type(serde) is JsonPlusSerializer:
        strict = StrictSerializer(is_allowed)
        return strict, strict
    if isinstance(serde, JsonPlusSerializer):  # of langgraph-checkpoint-redis: keep its format, but under our eyes
        strict = type(f"Strict{type(serde).__name__}", (StrictSerializer, type(serde)), {})(is_allowed)
        return strict, strict
    raise ConfigError(
        f"cannot import with a {type(serde).__name__}: it is none of LangGraph's serializers, so nothing says which "
        "types it makes; give the saver a JsonPlusSerializer or an EncryptedSerializer"
    )


@dataclass(frozen=True, slots=True)
class _Payload:
    """What one extension holds, `code` saying what it is; without one, a whole value."""

    code: int | None
    data: bytes


class _Look:
    """Goes through a packed value, level by level, and has every object in it made on its own."""

    def __init__(self, seen: Mapping[bytes, int], load: Callable[[tuple[str, bytes]], Any]) -> None:
        self._seen = seen
        self._load = load
        self.fresh: dict[bytes, int] = {}
        self.unmade: list[str] = []

    def height(self, value: object, room: int) -> int:
        """Return how many levels of containers and objects lie in a value; raise `ValueError` if more than `room`."""
        if room < 0:
            raise ValueError("nested too deep")
        if isinstance(value, _Payload):
            return self._height_of_payload(value, room)
        if isinstance(value, dict):
            return 1 + max((self.height(part, room - 1) for pair in value.items() for part in pair), default=0)
        if isinstance(value, list | tuple):
            return 1 + max((self.height(part, room - 1) for part in value), default=0)
        return 0

    def _height_of_payload(self, payload: _Payload, room: int) -> int:
        salt = b"" if payload.code is None else bytes([payload.code & 0xFF])
        key = hashlib.blake2b(payload.data, digest_size=16, salt=salt, person=b"value" if not salt else b"").digest()
        known = self._seen.get(key)  # most messages of a checkpoint stood in the one before
        if known is None:
            parts = ormsgpack.unpackb(payload.data, ext_hook=_Payload, option=ormsgpack.OPT_NON_STR_KEYS)
            known = self.fresh[key] = 1 + self.height(parts, room - 1)
            self._make(payload, parts)
        if known > room:
            raise ValueError("nested too deep")
        return known

    def _make(self, payload: _Payload, parts: Any) -> None:
        """Note an object that does not come out, but in its place its raw data."""
        if payload.code is None or not (payload.code in _NAMING or payload.code == _ARRAY):
            return
        made = self._load(("msgpack", ormsgpack.packb(ormsgpack.Ext(payload.code, payload.data))))
        if payload.code == _ARRAY:
            if made is None:
                self.unmade.append("numpy.ndarray")
        elif parts[0] != "builtins" and type(made).__module__ == "builtins":
            self.unmade.append(f"{parts[0]}.{parts[1]}")
