"""The first words of texts that a model still writes: each text anew whenever it has twice as many of them.

So a text of n words is told at most log n times, and every character is looked at once.  Nothing here raises or keeps
more than `MAX_CHARS` characters; not thread-safe.
"""

from __future__ import annotations

import re
from typing import Final

#: With so many words a text is told for the first time.
FIRST_WORDS: Final = 2
#: What a text has behind that is not told.
MAX_CHARS: Final = 2000
#: So many characters are taken for a word, as not every script has spaces.
_WORD_CHARS: Final = 12
_MAX_DEPTH: Final = 32
#: What may stand before JSON: the fence around it, and what language it is in.
_MAX_LEAD_IN: Final = 16
_MAX_JSON_CHARS: Final = 16_384

_QUOTE: Final = re.compile(r'["\\]')
_MARK: Final = re.compile(r'["{}\[\],:]')
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_JSON_BEGINS: Final = frozenset("{[`")


class _Growing:
    """A text that comes in pieces, and how many words of it have ended."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._num_chars = self._num_ended = self._num_letters = 0
        self._is_in_word = False

    def add(self, piece: str) -> None:
        piece = piece[: MAX_CHARS - self._num_chars]
        if not piece:
            return
        self._parts.append(piece)
        self._num_chars += len(piece)
        words = piece.split()
        self._num_letters += sum(map(len, words))
        if self._is_in_word and piece[0].isspace():
            self._num_ended += 1
        self._is_in_word = not piece[-1].isspace()
        self._num_ended += len(words) - self._is_in_word

    @property
    def num_ended(self) -> int:
        return max(self._num_ended, self._num_letters // _WORD_CHARS)

    @property
    def num_words(self) -> int:
        return max(self._num_ended + self._is_in_word, self._num_letters // _WORD_CHARS)

    def whole(self) -> str:
        return _joined("".join(self._parts))

    def so_far(self) -> str:
        """Return it without a word that has not ended, unless there is no other."""
        text = "".join(self._parts)
        return _joined(text.rsplit(None, 1)[0] if self._is_in_word else text)


class TextDrafts:
    """Tells the beginnings of a plain text."""

    def __init__(self) -> None:
        """Expect the beginning of the text."""
        self._text = _Growing()
        self._due = FIRST_WORDS

    def feed(self, piece: str) -> str | None:
        """Take the next piece; return the text so far if there is enough new of it."""
        self._text.add(piece)
        if self._text.num_ended < self._due:
            return None
        self._due = 2 * self._text.num_ended
        return self._text.so_far() or None


class JsonDrafts:
    """Tells the beginnings of the texts among the values of a JSON object or list, and each as a whole when it ends.

    Of several texts one is told only as long as it is the longest so far.
    """

    def __init__(self) -> None:
        """Expect the beginning of an object or list, or of a fence around it."""
        self._around: list[str] = []
        self._in_text = self._is_key = self._is_over = False
        self._escape = ""
        self._lead_in = 0
        self._text = _Growing()
        self._due = FIRST_WORDS
        self._longest = 0
        self._told: str | None = None

    def feed(self, piece: str) -> str | None:
        """Take the next piece; return the newest of what there is to tell."""
        found: str | None = None
        position = 0
        while position < len(piece) and not self._is_over:
            if not self._in_text:
                position = self._look_on(piece, position)
                continue
            position = self._read_text(piece, position)
            found = self._whole_value() or found
        if self._in_text and not self._is_key and self._text.num_ended >= self._due:
            self._longest = self._text.num_ended
            found = self._tell(self._text.so_far()) or found
        return found

    def _look_on(self, piece: str, position: int) -> int:
        """Go on to the next mark outside of texts."""
        match = _MARK.search(piece, position)
        if not self._around:
            self._lead_in += (match.start() if match else len(piece)) - position
            self._is_over = self._lead_in > _MAX_LEAD_IN or (match is not None and match.group() not in "{[")
        if match is None or self._is_over:
            return len(piece)
        mark = match.group()
        if mark == '"':
            self._in_text = True
            if not self._is_key:
                self._text, self._told = _Growing(), None
        elif mark in "{[":
            self._around.append(mark)
            self._is_key = mark == "{"
            self._is_over = len(self._around) > _MAX_DEPTH
        elif mark in "}]":
            self._around.pop()
            self._is_over = not self._around
        else:
            self._is_key = mark == "," and self._around[-1] == "{"
        return match.end()

    def _read_text(self, piece: str, position: int) -> int:
        """Read inside a text up to its end, an escape, or the end of the piece."""
        if self._escape:
            self._unescape(piece[position])
            return position + 1
        match = _QUOTE.search(piece, position)
        if not self._is_key:
            self._text.add(piece[position : match.start() if match else len(piece)])
        if match is None:
            return len(piece)
        if match.group() == "\\":
            self._escape = "\\"
        else:
            self._in_text = False
        return match.end()

    def _unescape(self, char: str) -> None:
        self._escape += char
        if self._escape[1] != "u":
            meant = _ESCAPES.get(char, char)
        elif len(self._escape) < len("\\uFFFF"):
            return
        else:
            try:
                meant = chr(int(self._escape[2:], 16))
            except ValueError:
                meant = ""
        self._escape = ""
        if not self._is_key:
            self._text.add(meant)

    def _whole_value(self) -> str | None:
        """Return the value that has just ended, if one has and it is to be told."""
        if self._in_text or self._is_key:
            return None
        told, whole, num_words = self._told, self._text.whole(), self._text.num_words
        if not whole or whole == told or (told is None and num_words <= self._longest):
            return None
        self._longest = max(self._longest, num_words)
        return self._tell(whole)

    def _tell(self, text: str) -> str:
        self._due = max(FIRST_WORDS, 2 * self._longest)
        self._told = text
        return text


class AnswerDrafts:
    """Tells the beginnings of an answer: of its text, or of those in it where it is JSON."""

    def __init__(self) -> None:
        """Expect the beginning of the answer."""
        self._drafts: TextDrafts | JsonDrafts | None = None

    def feed(self, piece: str) -> str | None:
        """Take the next piece; return what there is to tell."""
        if self._drafts is None:
            piece = piece.lstrip()
            if not piece:
                return None
            self._drafts = JsonDrafts() if piece[0] in _JSON_BEGINS else TextDrafts()
        return self._drafts.feed(piece)


def _joined(text: str) -> str:
    """Join characters that JSON wrote as two halves, and leave out halves that are alone."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore").strip()


def draft_in(answer: str) -> str | None:
    """Return what is told last of a whole answer; `None` if there is nothing to tell."""
    text = answer.strip()
    if text[:1] in _JSON_BEGINS:
        return JsonDrafts().feed(text[:_MAX_JSON_CHARS])
    return text[:MAX_CHARS] or None
