"""Real text that the team reads: loading, searching, and excerpts for prompts.

Documents are UTF-8 files; they are split into paragraphs, and paragraphs are ranked with Okapi BM25.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pancake_langgraph._errors import ConfigError

SUFFIXES = (".md", ".py", ".rst", ".txt")
MAX_FILES = 2_000
MAX_FILE_BYTES = 4 * 2**20

_WORD = re.compile(r"[^\W_]+")
_K1 = 1.2
_B = 0.75


class CorpusError(ConfigError):
    """The folder of texts cannot be used; the message names the folder or file and says how to mend it."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file: a short id for the model (`d1`), its name inside the folder, its paragraphs in order."""

    doc_id: str
    name: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """One paragraph found.  A larger `score` is a better match; scores of different queries cannot be compared."""

    doc_id: str
    name: str
    paragraph: str
    score: float


class Corpus:
    """An immutable set of documents with a search over their paragraphs.  Thread-safe."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Build the search index.

        Raises:
            CorpusError: if there is no paragraph at all.
        """
        self._documents = {document.doc_id: document for document in documents}
        self._paragraphs = [(document, text) for document in documents for text in document.paragraphs]
        if not self._paragraphs:
            raise CorpusError("the corpus has no text: got only empty files; give a folder with text to read")
        self._counts = [Counter(_words(text)) for _, text in self._paragraphs]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean_length = max(1.0, sum(self._lengths) / len(self._lengths))
        self._containing = Counter(word for counts in self._counts for word in counts)

    @property
    def documents(self) -> tuple[Document, ...]:
        """All documents, ordered by id number."""
        return tuple(self._documents.values())

    def document(self, doc_id: str) -> Document | None:
        """Return a document, or `None` when no document has that id."""
        return self._documents.get(doc_id)

    def search(self, query: str, *, limit: int = 3) -> tuple[Hit, ...]:
        """Return the paragraphs that match best, the best first; equal scores keep the order of the corpus."""
        words = sorted(set(_words(query)))
        scored = [(self._score(index, words), index) for index in range(len(self._paragraphs))]
        best = sorted((pair for pair in scored if pair[0] > 0), key=lambda pair: (-pair[0], pair[1]))[:limit]
        hits = []
        for score, index in best:
            document, text = self._paragraphs[index]
            hits.append(Hit(document.doc_id, document.name, text, score))
        return tuple(hits)

    def opening(self, doc_id: str, *, max_chars: int) -> str:
        """Return the first paragraphs of a document, whole ones up to `max_chars`; of a longer first one its start.

        Raises:
            KeyError: if no document has that id.
        """
        return _whole_paragraphs(self._documents[doc_id].paragraphs, max_chars=max_chars)

    def excerpt(self, *, part: int, parts: int, max_chars: int) -> str:
        """Return paragraphs in reading order that begin at `part / parts` of the corpus, whole, up to `max_chars`.

        Goes on at the beginning when the end is reached, and stops before any paragraph would come twice.  Long tables
        and the like, which would take more than half of it, are passed over where there is anything else.
        """
        first = part * len(self._paragraphs) // parts
        turned = [text for _, text in self._paragraphs[first:] + self._paragraphs[:first]]
        return _whole_paragraphs([text for text in turned if 2 * len(text) <= max_chars] or turned, max_chars=max_chars)

    def _score(self, index: int, words: Sequence[str]) -> float:
        counts = self._counts[index]
        norm = _K1 * (1 - _B + _B * self._lengths[index] / self._mean_length)
        total = 0.0
        for word in words:
            if occurrences := counts.get(word):
                having = self._containing[word]
                rarity = math.log(1 + (len(self._counts) - having + 0.5) / (having + 0.5))
                total += rarity * occurrences * (_K1 + 1) / (occurrences + norm)
        return total


def load_corpus(folder: Path | str) -> Corpus:
    """Read all text files below a folder (`.md`, `.py`, `.rst`, `.txt`; hidden ones are left out), in name order.

    Raises:
        CorpusError: if the folder is missing, is no folder, cannot be read, has no such file, has too many, or if a
            file is too large or not UTF-8 text.
    """
    root = Path(folder)
    if not root.exists():
        raise CorpusError(f"corpus folder not found: got {root}; give the path of an existing folder")
    if not root.is_dir():
        raise CorpusError(f"corpus is not a folder: got {root}; give the folder that holds the text files")
    paths = _text_files(root)
    if not paths:
        raise CorpusError(f"no text files in corpus folder {root}; allowed: files that end in {', '.join(SUFFIXES)}")
    if len(paths) > MAX_FILES:
        raise CorpusError(f"too many files in corpus folder {root}: got {len(paths)}, allowed: at most {MAX_FILES}")
    documents = []
    for number, path in enumerate(paths, start=1):
        paragraphs = split_paragraphs(_read_text(path))
        documents.append(Document(f"d{number}", path.relative_to(root).as_posix(), paragraphs))
    return Corpus(documents)


def split_paragraphs(text: str) -> tuple[str, ...]:
    """Split at blank lines; line breaks inside a paragraph stay."""
    return tuple(part.strip() for part in re.split(r"\n\s*\n", text.replace("\r\n", "\n")) if part.strip())


def project_docs() -> Path:
    """Return the folder of this project's own documentation, the default corpus.

    Raises:
        CorpusError: if the example runs without the checkout around it.
    """
    folder = Path(__file__).resolve().parents[2] / "docs"
    if not folder.is_dir():
        raise CorpusError("the project's docs are not next to the example; name a folder of texts with --corpus")
    return folder


def _text_files(root: Path) -> list[Path]:
    try:
        found = [
            path
            for path in root.rglob("*")
            if path.suffix.lower() in SUFFIXES
            and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(root).parts)
        ]
    except OSError as exc:
        raise CorpusError(f"corpus folder {root} cannot be read: {exc.strerror}; check its permissions") from exc
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise CorpusError(f"corpus file {path} cannot be read: {exc.strerror}; check its permissions") from exc
    if len(data) > MAX_FILE_BYTES:
        raise CorpusError(f"corpus file {path} is too large; allowed: at most {MAX_FILE_BYTES // 2**20} MiB, split it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise CorpusError(
            f"corpus file {path} is not UTF-8 text: byte {exc.start} does not fit; convert it or take it out"
        ) from exc
    if "\x00" in text:
        raise CorpusError(f"corpus file {path} is binary: it holds NUL bytes; take it out of the folder")
    return text


def _whole_paragraphs(paragraphs: Sequence[str], *, max_chars: int) -> str:
    taken: list[str] = []
    used = 0
    for text in paragraphs:
        if used + len(text) > max_chars:
            break
        taken.append(text)
        used += len(text) + 2
    return "\n\n".join(taken) if taken else "".join(paragraphs[:1])[:max_chars]


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
