"""Finds the complete fields of a JSON object while it still streams in."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Final

#: Longer names and values are no choice between nodes; more fields than this are not looked at.
MAX_CHARS: Final = 64
MAX_FIELDS: Final = 8
_MAX_LEAD_IN: Final = 16

_QUOTE = re.compile(r'["\\]')
_NESTED = re.compile(r'["{}\[\]]')
_LEAD_IN: Final = frozenset(" \t\r\n`jsonJSON")
_SPACE: Final = frozenset(" \t\r\n,")


class _At(Enum):
    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    SCALAR = auto()
    NESTED = auto()
    DONE = auto()


class FieldScanner:
    """Reads one object piece by piece and tells its top-level texts and switches as soon as each is complete.

    Every character is looked at once, long texts are skipped and not kept.  What is no JSON object is given up at its
    first characters.  Never raises; not thread-safe.
    """

    def __init__(self) -> None:
        """Expect the beginning of an object."""
        self._at = _At.START
        self._in_text = self._escaped = False
        self._text = ""
        self._name: str | None = None
        self._depth = self._lead_in = self._num_fields = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing more will be told."""
        return self._at is _At.DONE

    def feed(self, piece: str) -> list[tuple[str, str]]:
        """Take the next piece; return the fields that it completes as name and value."""
        found: list[tuple[str, str]] = []
        position = 0
        while position < len(piece) and self._at is not _At.DONE:
            if self._in_text:
                position = self._read_text(piece, position, found)
            elif self._at is _At.NESTED:
                position = self._skip_nested(piece, position)
            else:
                self._step(piece[position], found)
                position += 1
        return found

    def _step(self, char: str, found: list[tuple[str, str]]) -> None:
        if self._at is _At.START:
            self._lead_in += 1
            if char == "{":
                self._at = _At.KEY
            elif char not in _LEAD_IN or self._lead_in > _MAX_LEAD_IN:
                self._at = _At.DONE
        elif self._at is _At.KEY:
            self._open_text(char, or_end="}", spaces=_SPACE)
        elif self._at is _At.COLON:
            if char == ":":
                self._at = _At.VALUE
            elif char not in _SPACE:
                self._at = _At.DONE
        elif self._at is _At.VALUE:
            self._begin_value(char)
        elif char in "truefals":
            self._text = (self._text + char)[: MAX_CHARS + 1]
        elif char in ",} \t\r\n":
            if self._text in ("true", "false"):
                self._tell(self._text, found)
            self._at = _At.DONE if char == "}" or self._at is _At.DONE else _At.KEY
        else:
            self._text += "\0" if len(self._text) <= MAX_CHARS else ""  # a number, or nothing that is known

    def _open_text(self, char: str, *, or_end: str, spaces: frozenset[str]) -> None:
        if char == '"':
            self._in_text, self._text = True, ""
        elif char == or_end or char not in spaces:
            self._at = _At.DONE

    def _begin_value(self, char: str) -> None:
        self._text = ""
        if char == '"':
            self._in_text = True
        elif char in "{[":
            self._at, self._depth = _At.NESTED, 1
        elif char not in _SPACE:
            self._at, self._text = _At.SCALAR, char

    def _read_text(self, piece: str, position: int, found: list[tuple[str, str]]) -> int:
        """Read inside a text up to its end, the end of the piece, or past one escaped character."""
        if self._escaped:
            self._keep(piece[position])
            self._escaped = False
            return position + 1
        match = _QUOTE.search(piece, position)
        self._keep(piece[position : match.start() if match else len(piece)])
        if match is None:
            return len(piece)
        if match.group() == "\\":
            self._keep("\\")
            self._escaped = True
        else:
            self._in_text = False
            self._end_text(found)
        return match.end()

    def _keep(self, text: str) -> None:
        if self._at is not _At.NESTED and len(self._text) <= 6 * MAX_CHARS:  # an escaped character takes up to six
            self._text += text[: 6 * MAX_CHARS + 1]

    def _end_text(self, found: list[tuple[str, str]]) -> None:
        if self._at is _At.NESTED:
            return
        text = _unescaped(self._text)
        if self._at is _At.KEY:
            self._name, self._at = text, _At.COLON
            return
        self._at = _At.KEY
        if text is not None:
            self._tell(text, found)

    def _skip_nested(self, piece: str, position: int) -> int:
        match = _NESTED.search(piece, position)
        if match is None:
            return len(piece)
        if match.group() == '"':
            self._in_text = True
        else:
            self._depth += 1 if match.group() in "{[" else -1
            self._at = _At.KEY if self._depth == 0 else _At.NESTED
        return match.end()

    def _tell(self, value: str, found: list[tuple[str, str]]) -> None:
        if self._name and value:
            found.append((self._name, value))
            self._num_fields += 1
        if self._num_fields >= MAX_FIELDS:
            self._at = _At.DONE


def _unescaped(text: str) -> str | None:
    """Return a JSON text's characters; `None` if it is too long or none."""
    try:
        value = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) and len(value) <= MAX_CHARS else None
