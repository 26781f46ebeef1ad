"""Tells what kind of text changes at one position: a clock, an id made anew, a counter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pancake_langgraph.prompts.lint_kinds import BreakKind

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|Oct(?:ober)?|"
)
_MONTH += r"Nov(?:ember)?|Dec(?:ember)?)\b"
_DAY = r"\d{1,2}(?:st|[nr]d|th)?"
_CLOCK: Final = (
    ("date and time", r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"),
    ("date", r"(?<!\d)(?:19|20)\d\d([-/.])(?:0?[1-9]|1[0-2])\1(?:0?[1-9]|[12]\d|3[01])(?!\d)"),
    ("date", r"(?<!\d)\d{1,2}([-/.])\d{1,2}\1(?:19|20)\d\d(?!\d)"),
    ("date", rf"(?:{_DAY} )?{_MONTH}\.?(?: {_DAY})?(?:,? \d{{4}})?"),
    ("weekday", r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b"),
    ("time of day", r"(?<![\d:])\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm])?"),
    ("epoch time", r"(?<![\w.-])1\d{9}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?(?!\w)"),
    ("compact date", r"(?<!\d)20\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:[T_-]?\d{4,6}Z?)?(?!\d)"),
    (
        "time span",
        r"(?<![\w.])\d+(?:\.\d+)? ?(?:ms|s|secs?|seconds?|mins?|minutes?|h|hours?|days?) (?:ago|left|remaining)\b",
    ),
)
_UUID: Final = r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
_ULID: Final = r"\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b"
_HEX: Final = r"(?<![0-9A-Za-z])(?:0x)?[0-9a-f]{8,}(?![0-9A-Za-z])"
_TOKEN: Final = r"(?<![\w-])[\w-]{8,}(?![\w-])"
_NUMBER: Final = r"(?<![\w.])-?\d+(?![\w]|\.\d)"
_CHANGES: Final = re.compile(r"(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z])(?=[0-9])|(?<=[a-z])(?=[A-Z])")

#: How far around the position a match may reach.
_WINDOW: Final = 80
#: So much equal text behind the changing part says that nothing else of the message has changed there.
_SAME_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class Volatile:
    """What changes, and whether the text goes on in the same way behind it."""

    kind: BreakKind
    detail: str
    goes_on: bool


def volatile_at(old: str, new: str, position: int) -> Volatile | None:
    """Name what changes between two texts that are equal before `position`; `None` where it is nothing known."""
    for kind, detail, pattern in _PATTERNS:
        left, right = _covering(pattern, old, position), _covering(pattern, new, position)
        if left is None or right is None or left.group() == right.group():
            continue
        if kind is BreakKind.RANDOM_ID and not _is_random(detail, left.group(), right.group()):
            continue
        return Volatile(kind, detail, _goes_on(old, new, left.end(), right.end()))
    return None


def _covering(pattern: re.Pattern[str], text: str, position: int) -> re.Match[str] | None:
    for match in pattern.finditer(text, max(0, position - _WINDOW), position + _WINDOW):
        if match.start() <= position <= match.end():
            return match
        if match.start() > position:
            break
    return None


def _is_random(detail: str, left: str, right: str) -> bool:
    if detail == "uuid":
        return True
    if detail == "hexadecimal id":
        return any(not found.isdigit() and not found.isalpha() for found in (left, right))
    return _looks_random(left) and _looks_random(right)


def _looks_random(word: str) -> bool:
    """Whether some piece of a word mixes letters and digits as no name does."""
    return any(
        len(piece) >= 6 and any(c.isdigit() for c in piece) and len(_CHANGES.findall(piece)) >= 2
        for piece in re.split(r"[_-]", word)
    )


def _goes_on(old: str, new: str, old_end: int, new_end: int) -> bool:
    left, right = old[old_end:], new[new_end:]
    return left == right or (len(left) >= _SAME_CHARS and left[:_SAME_CHARS] == right[:_SAME_CHARS])


_PATTERNS: Final = (
    *((BreakKind.CLOCK, detail, re.compile(pattern)) for detail, pattern in _CLOCK[:1]),
    (BreakKind.RANDOM_ID, "uuid", re.compile(_UUID)),
    *((BreakKind.CLOCK, detail, re.compile(pattern)) for detail, pattern in _CLOCK[1:]),
    (BreakKind.RANDOM_ID, "ulid", re.compile(_ULID)),
    (BreakKind.RANDOM_ID, "hexadecimal id", re.compile(_HEX)),
    (BreakKind.RANDOM_ID, "random id", re.compile(_TOKEN)),
    (BreakKind.COUNTER, "number", re.compile(_NUMBER)),
)
