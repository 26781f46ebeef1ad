"""Declaring what a node or tool does: `@phase(kind=..., expect_s=..., may_need=[...], retrieves=...)`.

A declaration never changes what is decorated.  It is a mark under `__pancake_phase__` that an attached runtime, the
compiled plan and `pancake explain` read; without one, all of it is learnt from runs.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, Protocol, TypeVar, cast, get_args

from pancake_langgraph._errors import ConfigError

PhaseKind = Literal["reasoning", "action", "generation", "io"]

#: Where the mark is kept, and the key of a node's `metadata` that says the same.
PHASE_ATTRIBUTE: Final = "__pancake_phase__"
METADATA_KEY: Final = "pancake"

KINDS: Final[tuple[str, ...]] = get_args(PhaseKind)
MAX_NEEDS: Final = 32
MAX_EXPECT_S: Final = 7 * 24 * 3600.0

_T = TypeVar("_T")
# Fields under which runnables, tools and partial functions keep what they wrap.
_WRAPPED = ("func", "afunc", "coroutine", "bound")
_MAX_DEPTH = 6
_MAX_OBJECTS = 64


class TakesDrafts(Protocol):
    """What a node or tool may retrieve from: an index that gets ready for a query of which there is a draft only."""

    def draft(self, agent: str, text: str) -> None:
        """Take in the likely words of the next query of `agent`, which is a thread's id; return at once."""
        ...


@dataclass(frozen=True, slots=True)
class Phase:
    """What is declared about one node or tool; `None` and empty mean "not declared, learn it".

    `kind`: "reasoning" (a model decides: tool calls, routes), "generation" (a model writes text), "action" (a tool or
    code does something) or "io" (waits for the outside).  `blocking`: whether what follows waits for it.  `expect_s`:
    its usual duration in seconds, used until enough runs were measured.  `may_need`: nodes that may run because of it,
    as named in the graph.  `prompt`: what its model call will read: a text, messages, or a callable from state to
    messages; it is left out of `repr`.  `retrieves`: an index with a method `draft(agent, text)` that it searches; it
    hears early what will likely be searched for.

    Raises:
        ConfigError: if a value is not allowed.
    """

    kind: PhaseKind | None = None
    blocking: bool | None = None
    expect_s: float | None = None
    may_need: tuple[str, ...] = ()
    prompt: Any = field(default=None, repr=False)
    retrieves: TakesDrafts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check all values, and turn sequences into tuples."""
        if self.kind is not None and (not isinstance(self.kind, str) or self.kind not in KINDS):
            raise _refused("kind", self.kind, f"one of {', '.join(KINDS)}")
        if self.blocking is not None and not isinstance(self.blocking, bool):
            raise _refused("blocking", self.blocking, "True or False")
        object.__setattr__(self, "expect_s", _seconds(self.expect_s))
        object.__setattr__(self, "may_need", _needs(self.may_need))
        object.__setattr__(self, "prompt", _prompt(self.prompt))
        if self.retrieves is not None and not callable(getattr(self.retrieves, "draft", None)):
            got = type(self.retrieves).__qualname__
            raise _refused("retrieves", got, "an index with a method draft(agent, text)")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is declared."""
        return not any(_is_given(getattr(self, f.name)) for f in fields(self))

    def over(self, other: Phase) -> Phase:
        """Return both together; where both declare something, this one wins."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return Phase(**{name: value if _is_given(value) else getattr(other, name) for name, value in mine.items()})

    @staticmethod
    def of_metadata(declared: object) -> Phase:
        """Read the value that a node's `metadata` has under `"pancake"`: a mapping of the fields, or a `Phase`.

        Raises:
            ConfigError: if it is neither, has an unknown key, or a value is not allowed.
        """
        if isinstance(declared, Phase):
            return declared
        if not isinstance(declared, Mapping):
            raise _refused(f"metadata {METADATA_KEY!r}", declared, "a mapping such as {'kind': 'io', 'expect_s': 2.0}")
        known = [f.name for f in fields(Phase)]
        if unknown := [str(key) for key in declared if key not in known]:
            raise ConfigError(
                f"cannot declare a phase: got unknown key {', '.join(unknown)} in metadata {METADATA_KEY!r}, "
                f"allowed are {', '.join(known)}. Remove or rename it."
            )
        return Phase(**declared)


def phase(
    *,
    kind: PhaseKind | None = None,
    blocking: bool | None = None,
    expect_s: float | None = None,
    may_need: Sequence[str] = (),
    prompt: Any = None,
    retrieves: TakesDrafts | None = None,
) -> Callable[[_T], _T]:
    """Return a decorator that declares what a node or tool does; the arguments are the fields of `Phase`.

    It takes functions, coroutine functions, callable objects and classes, runnables and tools, and gives back the very
    object it got, marked.  Over an earlier mark, what is given here wins field by field.  A tool may be marked above
    or below `@tool`.

    Raises:
        ConfigError: if a value is not allowed, nothing is declared, or the object cannot carry a mark.
    """
    declared = Phase(kind, blocking, expect_s, cast("tuple[str, ...]", may_need), prompt, retrieves)
    if declared.is_empty:
        raise ConfigError(
            "cannot declare a phase: got no argument, allowed are kind, blocking, expect_s, may_need, prompt and "
            "retrieves. Give at least one, such as @phase(kind='io')."
        )

    def mark(target: _T) -> _T:
        if not callable(target) and not hasattr(target, "invoke"):
            raise _refused("target", target, "a function, a callable, a runnable or a tool")
        earlier = _mark_on(target)
        merged = declared if earlier is None else declared.over(earlier)
        try:
            # Pydantic models (tools) refuse unknown fields, yet keep what is put in past their check.
            (setattr if isinstance(target, type) else object.__setattr__)(target, PHASE_ATTRIBUTE, merged)
        except (AttributeError, TypeError) as exc:
            raise ConfigError(
                f"cannot declare a phase on a {type(target).__qualname__}: it takes no attributes. Mark the function "
                f"or class it comes from, or say it in add_node(..., metadata={{{METADATA_KEY!r}: {{...}}}})."
            ) from exc
        return target

    return mark


def phase_of(target: object) -> Phase | None:
    """Return the phase marked on an object or on what it wraps, the outermost field by field; `None` without one.

    Never raises, and runs nothing of the object's own: no property, no `__getattr__`.
    """
    found: Phase | None = None
    for item in unwrapped(target):
        mark = _mark_on(item)
        if mark is not None:
            found = mark if found is None else found.over(mark)
    return found


def unwrapped(target: object) -> Iterator[object]:
    """Yield an object and the functions, tools and runnables that it wraps, outermost first, within a budget."""
    level = [target]
    seen: set[int] = set()
    for _ in range(_MAX_DEPTH):
        following: list[object] = []
        for item in level:
            if item is None or id(item) in seen or len(seen) >= _MAX_OBJECTS:
                continue
            seen.add(id(item))
            yield item
            following += _inside(item)
        level = following


def _inside(item: object) -> list[object]:
    kind = type(item)  # `isinstance` would ask lazy proxies for their class
    if issubclass(kind, types.FunctionType | type):
        return []
    if issubclass(kind, types.MethodType):
        return [cast("types.MethodType", item).__func__]
    if issubclass(kind, functools.partial):
        return [cast("functools.partial[object]", item).func]
    found = [_read(item, name) for name in _WRAPPED]
    call = _read(kind, "__call__")
    return [*found, call] if type(call) is types.FunctionType else found


def _mark_on(item: object) -> Phase | None:
    mark = _read(item, PHASE_ATTRIBUTE)
    return mark if type(mark) is Phase else None


def _read(item: object, name: str) -> object:
    try:
        return inspect.getattr_static(item, name, None)
    except Exception:  # noqa: BLE001 - a foreign object may be broken in any way; then it has no mark
        return None


def _is_given(value: object) -> bool:
    return value is not None and not (type(value) is tuple and not value)


def _seconds(expect_s: object) -> float | None:
    if expect_s is None:
        return None
    is_number = isinstance(expect_s, int | float) and not isinstance(expect_s, bool)
    if not is_number or not 0 < cast("float", expect_s) <= MAX_EXPECT_S:
        raise _refused("expect_s", expect_s, f"seconds over 0, at most {MAX_EXPECT_S:.0f}")
    return float(cast("float", expect_s))


def _needs(may_need: object) -> tuple[str, ...]:
    allowed = f"a list of at most {MAX_NEEDS} node names"
    if isinstance(may_need, str) or not isinstance(may_need, Sequence):
        raise _refused("may_need", may_need, allowed)
    if len(may_need) > MAX_NEEDS or not all(isinstance(name, str) and name.strip() for name in may_need):
        raise _refused("may_need", may_need, allowed)
    return tuple(dict.fromkeys(may_need))


def _prompt(prompt: object) -> object:
    allowed = "a text, a list of messages, a prompt template, or a callable from state to messages"
    if prompt is None or callable(prompt) or hasattr(prompt, "format_messages") or hasattr(prompt, "invoke"):
        return prompt
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) and prompt:
        return tuple(prompt)
    # Prompt text is not repeated in the message.
    raise ConfigError(
        f"cannot declare a phase: got prompt of type {type(prompt).__qualname__}, allowed is {allowed}, not empty. "
        "Mend that argument."
    )


def _refused(name: str, got: object, allowed: str) -> ConfigError:
    text = repr(got)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return ConfigError(f"cannot declare a phase: got {name}={shown}, allowed is {allowed}. Mend that argument.")
