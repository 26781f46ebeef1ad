"""Text files of a folder, cut into pieces that an embedder reads whole."""

from __future__ import annotations

import codecs
import gzip
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

from pancake_langgraph._errors import ConfigError

logger = logging.getLogger(__name__)

#: What is read, also with `.gz` behind it.
TEXT_SUFFIXES: Final = frozenset({".adoc", ".htm", ".html", ".md", ".rst", ".sgml", ".txt", ".xhtml"})
_HTML_SUFFIXES: Final = frozenset({".htm", ".html", ".sgml", ".xhtml"})
#: Sections 1 to 9 of manual pages: `ls.1.gz`.
_MANUAL: Final = re.compile(r"\.[1-9][a-z]*")
_ROFF_LINE: Final = re.compile(r"^[.'].*$", re.MULTILINE)
_ROFF_ESCAPE: Final = re.compile(r"\\(?:f(?:\[[^]]*\]|\([^ ]{2}|.)|s[-+]?\d|\([^ ]{2}|\[[^]]*\]|.)")
#: Larger files are data rather than text.
MAX_FILE_BYTES: Final = 32_000_000
DEFAULT_CHUNK_WORDS: Final = 90
#: A text of which more than one in so many characters cannot be read is none.
_STRANGE_PART: Final = 10
#: HTML whose text nobody reads.
_SILENT_TAGS: Final = frozenset({"head", "nav", "script", "style"})


@dataclass(frozen=True, slots=True)
class Document:
    """One file: its path relative to the folder, with slashes, and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Words of a document; `number` counts from 0 within it, `folder` is what its name is below, if that was said."""

    document: str
    number: int
    text: str
    folder: str | None = None


def text_files(folder: Path) -> list[Path]:
    """Return the text files below `folder`, sorted; hidden ones and symbolic links are left out.

    Raises:
        ConfigError: if there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"got {folder}, allowed is a folder with text files ({', '.join(sorted(TEXT_SUFFIXES))})")
    return [
        path
        for path in sorted(folder.rglob("*"))
        if _kind(path) is not None
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and not path.is_symlink()
        and path.is_file()
    ]


def read_documents(
    folder: Path, files: Iterable[Path] | None = None, *, say: Callable[[str], object] = logger.warning
) -> Iterator[Document]:
    """Yield the text files below `folder`, or of those `files` only, in their order.

    Files without text are left out, and those that are too large, are no text or cannot be read; of each of these
    `say` is told in a line.

    Raises:
        ConfigError: if there is no such folder.
    """
    for path in text_files(folder) if files is None else files:
        relative = path.relative_to(folder)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                say(f"left out {relative}: it has more than {MAX_FILE_BYTES} bytes")
                continue
            text = read_text(path)
        except UnicodeError:
            say(f"left out {relative}: it is no text in UTF-8 or UTF-16")
            continue
        except (OSError, EOFError, zlib.error) as exc:
            say(f"left out {relative}: {type(exc).__name__}")
            continue
        if text:
            yield Document(relative.as_posix(), text)


def read_text(path: Path) -> str:
    """Return what people read of a file, without markup, white space made single spaces; empty if it is too large.

    Raises:
        OSError: if it cannot be read.
        EOFError: if it is compressed and cut short.
        zlib.error: if it is compressed and damaged.
        UnicodeError: if it is no text: it has zero bytes, or more than a tenth of it is not UTF-8.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        return ""
    if path.suffix == ".gz":
        with gzip.open(path) as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    else:
        data = path.read_bytes()
    if len(data) > MAX_FILE_BYTES:
        return ""
    text = _decoded(data)
    kind = _kind(path)
    if kind == "html":
        text = _html_text(text)
    elif kind == "manual":
        text = _ROFF_ESCAPE.sub("", _ROFF_LINE.sub("", text))
    return " ".join(text.split())


def has_no_text(path: Path) -> bool:
    """Return whether a file can be read and holds nothing to search."""
    try:
        return not read_text(path)
    except (OSError, EOFError, zlib.error, UnicodeError):
        return False


def _decoded(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = data.decode("utf-16")
    else:
        text = data.decode("utf-8", errors="replace")  # a few letters of an older encoding do no harm
    if "\0" in text or _STRANGE_PART * text.count("\ufffd") > len(text):
        raise UnicodeError("no text")
    return text


def chunks(document: Document, *, words: int = DEFAULT_CHUNK_WORDS, folder: str | None = None) -> Iterator[Chunk]:
    """Yield a document's text in pieces of `words` words; the last one may be shorter.

    Raises:
        ConfigError: if `words` is under 1.
    """
    if words < 1:
        raise ConfigError(f"words of a chunk: got {words}, allowed is 1 or more")
    every = document.text.split()
    for number, start in enumerate(range(0, len(every), words)):
        yield Chunk(document.name, number, " ".join(every[start : start + words]), folder)


def _kind(path: Path) -> str | None:
    """Return `html`, `manual` or `text`; `None` for what is not read."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() in TEXT_SUFFIXES:
        return "html" if suffix.lower() in _HTML_SUFFIXES else "text"
    if path.suffix == ".gz" and _MANUAL.fullmatch(suffix):
        return "manual"
    return None


class _Words(HTMLParser):
    """Collects text outside of silent tags."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if tag in _SILENT_TAGS:
            self._silent += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in _SILENT_TAGS:
            self._silent = max(0, self._silent - 1)

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data)


def _html_text(text: str) -> str:
    parser = _Words()
    parser.feed(text)
    parser.close()
    return " ".join(parser.parts)
