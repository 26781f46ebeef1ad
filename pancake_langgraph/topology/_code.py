"""What the code of a function mentions: names, string constants, branches.  Reads byte code, runs nothing."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LOADS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
# How `await` waits, and jumps without a condition, which it uses as well: no branch of the author's.
_NO_BRANCH = ("SEND", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_BACKWARD", "JUMP_FORWARD", "JUMP_NO_INTERRUPT")
_BRANCHES = frozenset(code for code in (*dis.hasjrel, *dis.hasjabs) if dis.opname[code] not in _NO_BRANCH)


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """Names, in order of first use, and string constants of a function and of the functions written inside it."""

    names: tuple[str, ...]
    strings: frozenset[str]
    values: Mapping[str, object]

    @staticmethod
    def of(function: types.FunctionType) -> CodeFacts:
        """Read one function.  Costs O(length of its code)."""
        names: dict[str, None] = {}
        strings: set[str] = set()
        stack: list[object] = [function.__code__]
        while stack:
            constant = stack.pop()
            if isinstance(constant, types.CodeType):
                names.update(dict.fromkeys(constant.co_names))
                stack.extend(constant.co_consts)
            elif isinstance(constant, str):
                strings.add(constant)
            elif isinstance(constant, tuple | frozenset):
                stack.extend(constant)
        values = function.__globals__
        strings.update(text for name in names if isinstance(text := values.get(name), str))  # `END` and the like
        return CodeFacts(tuple(names), frozenset(strings), values)

    def mentions(self, name: str, value: object) -> bool:
        """Whether the code names `value`, by its usual name or under an alias."""
        return name in self.names or any(self.values.get(other) is value for other in self.names)


def mentioned_values(function: types.FunctionType) -> Iterator[object]:
    """Yield the globals and closed-over values that the code loads, in the order in which it first does."""
    cells: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # an empty cell: the variable is not assigned yet
            continue
    seen: set[str] = set()
    for name in _loads(function.__code__):
        if name in seen:
            continue
        seen.add(name)
        if name in cells:
            yield cells[name]
        elif name in function.__globals__:
            yield function.__globals__[name]


def is_straight(function: types.FunctionType) -> bool:
    """Whether the code has no branch and no loop with a condition, so that everything in it runs."""
    return not any(step.opcode in _BRANCHES for step in dis.get_instructions(function.__code__))


def _loads(code: types.CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in _LOADS:
            yield str(step.argval)
        elif isinstance(step.argval, types.CodeType):  # a function, lambda or comprehension written inside
            yield from _loads(step.argval)
