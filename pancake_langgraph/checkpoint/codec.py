"""The strict codec of single values.

What comes back has the type and the value of what went in, or storing it raised; nothing changes quietly.  Only known
types come back: stored bytes never make the codec import or call something that is not on its list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pancake_langgraph._errors import StateTypeError
from pancake_langgraph.checkpoint import codec_classes, codec_kinds, codec_numpy
from pancake_langgraph.checkpoint.codec_classes import ClassTable
from pancake_langgraph.checkpoint.codec_plans import TypeName
from pancake_langgraph.checkpoint.codec_wire import Reader, Writer, pack

__all__ = ["Codec", "TypeName"]

#: The channel to which LangGraph writes the exception that ended a task.
ERROR_CHANNEL = "__error__"

_READS = {**codec_kinds.READS, **codec_numpy.READS, **codec_classes.READS}


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """Turns values into bytes and back.  Immutable, thread-safe, cheap to derive.

    Stored are Python's own types, NumPy arrays and scalars, pydantic secrets, messages and documents of LangChain, and
    what LangGraph itself writes.  Enums, dataclasses, named tuples and pydantic models of the app are stored if they
    are allowed; subclasses are classes of their own.

    Equal values give equal bytes: sets are sorted; dicts keep their order, which is part of what they are.
    """

    classes: ClassTable

    @staticmethod
    def build(allow: Iterable[type | TypeName] = ()) -> Codec:
        """Return a codec.

        Args:
            allow: Classes of the app; a pair (module, qualified name) is imported when it is first met.

        Raises:
            ConfigError: if something in `allow` is neither.
        """
        return Codec(ClassTable({}, {}).plus(allow))

    def allowing(self, extra: Iterable[type | TypeName]) -> Codec:
        """Return a codec that allows more, this one if nothing is new.

        Raises:
            ConfigError: if something in `extra` is neither a class nor a pair (module, qualified name).
        """
        classes = self.classes.plus(extra)
        return self if classes is self.classes else Codec(classes)

    def allowing_listed(self, listed: Iterable[TypeName]) -> Codec:
        """Return a codec that allows what a list of LangGraph's names, this one if nothing is new.

        Such a list names a class inside another one by its last name.  Where a name fits two classes of a module,
        neither is allowed by it, and the error when one is met says so.
        """
        classes = self.classes.plus_listed(listed)
        return self if classes is self.classes else Codec(classes)

    def encode(self, value: object, *, channel: str) -> bytes:
        """Return the bytes of a value.

        An exception on the channel `__error__` is stored as its `repr`, as LangGraph does.

        Args:
            value: The value; later changes to it do not reach the bytes.
            channel: Named in errors.

        Raises:
            StateTypeError: if something in the value may not be stored, if it contains itself, or if another thread
                changes it meanwhile.
        """
        if channel == ERROR_CHANNEL and isinstance(value, BaseException):
            value = _text_of(value)
        writer = Writer(channel, codec_kinds.WRITES, self.classes)
        try:
            return pack(writer.wrap(value, 0))
        except (StateTypeError, MemoryError):
            raise
        except Exception as error:  # attributes of an app's objects may run any code; callers get one error tree
            raise StateTypeError(
                f"channel {channel!r}: a {type(value).__name__} could not be stored ({type(error).__name__}). "
                "Store plain data, no deeper than the call stack allows, and change it in one "
                "thread only"
            ) from error

    def decode(self, data: bytes, *, channel: str) -> object:
        """Return the value that was stored.

        Args:
            data: What `encode` gave.
            channel: Named in errors.

        Raises:
            StateTypeError: if a class in it is not allowed, or has changed so that the stored object no longer fits.
            CorruptCheckpoint: if the bytes are not what `encode` gave.
        """
        return Reader(channel, _READS, self.classes).decode(data)


def _text_of(error: BaseException) -> str:
    try:
        return str.__str__(repr(error))
    except Exception:  # noqa: BLE001 - fails open: that the task failed matters more than how its error prints itself
        return f"{type(error).__name__}(...)"
