"""Real text for benches of retrieval: documentation packages of Debian, a folder, or what lies on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.config.folders import cache_dir as default_cache_dir
from pancake_langgraph.retrieval.texts import Document, chunks, read_documents, text_files

logger = logging.getLogger(__name__)

#: Documentation on programming, systems and databases, tens of thousands of chunks together.
DEBIAN_PACKAGES: Final = (
    "python3.11-doc",
    "linux-doc-6.1",
    "git-doc",
    "postgresql-doc-15",
    "sqlite3-doc",
    "apache2-doc",
    "manpages",
    "manpages-dev",
    "perl-doc",
    "debian-handbook",
    "debian-policy",
    "debian-reference-en",
    "developers-reference",
)
CHUNK_WORDS: Final = 90
#: Shorter ones are left out.
MIN_CHUNK_WORDS: Final = 40
#: Of one document, so that no large one fills the set.
MAX_DOCUMENT_CHUNKS: Final = 400
_APT_TIMEOUT_S: Final = 600.0
_PROGRESS_DOCUMENTS: Final = 1_000

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Different chunks of text; `documents[i]` numbers the document that `texts[i]` comes from, in order.

    `source` says where the text is from, in words.
    """

    texts: tuple[str, ...]
    documents: tuple[int, ...]
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of all texts, in hexadecimal."""
        total = hashlib.sha256()
        for text in self.texts:
            total.update(text.encode())
            total.update(b"\n")
        return total.hexdigest()


def load_corpus(
    num_chunks: int, on_progress: Progress, *, folder: Path | None = None, cache_dir: Path | None = None
) -> Corpus:
    """Return `num_chunks` chunks, document by document, in an order that is always the same for the same files.

    Without `folder` packages are fetched once with `apt-get download` into the cache folder; where that does not work,
    documentation that is installed on this machine is taken, which is not the same everywhere.

    Raises:
        ConfigError: if there is less text than asked for.
    """
    if folder is not None:
        return _take(_mixed(folder, say=logger.warning), num_chunks, f"the folder {folder.name}", on_progress)
    fetched = _debian_folder(cache_dir or default_cache_dir(), on_progress)
    if fetched is not None:
        return _take(_mixed(fetched), num_chunks, "documentation packages of Debian", on_progress)
    on_progress("apt-get cannot fetch packages here; taking the documentation on this machine")
    return _take(_installed_documents(), num_chunks, "documentation on this machine", on_progress)


def _take(documents: Iterable[Document], num_chunks: int, source: str, on_progress: Progress) -> Corpus:
    seen: set[bytes] = set()
    texts: list[str] = []
    numbers: list[int] = []
    for number, document in enumerate(documents):
        if number and number % _PROGRESS_DOCUMENTS == 0:
            on_progress(f"corpus: {len(texts):,} of {num_chunks:,} chunks from {number:,} documents")
        for chunk in itertools.islice(chunks(document, words=CHUNK_WORDS), MAX_DOCUMENT_CHUNKS):
            digest = hashlib.blake2b(chunk.text.encode(), digest_size=16).digest()
            if chunk.text.count(" ") + 1 < MIN_CHUNK_WORDS or digest in seen:
                continue
            seen.add(digest)
            texts.append(chunk.text)
            numbers.append(number)
            if len(texts) == num_chunks:
                return Corpus(tuple(texts), tuple(numbers), source)
    raise ConfigError(
        f"{source}: got {len(texts):,} different chunks of {MIN_CHUNK_WORDS} to {CHUNK_WORDS} words, asked for were "
        f"{num_chunks:,}; ask for less with --chunks, or name a folder with more text with --corpus"
    )


def _mixed(folder: Path, *, say: Callable[[str], object] = logger.debug) -> Iterator[Document]:
    """Yield a folder's documents in an order that mixes them and is always the same.

    `say` is told of files that are left out: of packages nobody wants to know.
    """
    files = text_files(folder)
    files.sort(key=lambda path: hashlib.blake2b(path.relative_to(folder).as_posix().encode()).digest())
    return read_documents(folder, files, say=say)


def _debian_folder(cache_dir: Path, on_progress: Progress) -> Path | None:
    """Return the folder with the unpacked packages; fetch them once.  `None` where that does not work."""
    folder = cache_dir / "bench" / "debian-doc"
    if folder.is_dir():
        return folder
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".debian-doc-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "unpacked"
        for package in DEBIAN_PACKAGES:
            on_progress(f"corpus: fetching {package}")
            for archive in _fetch(package, Path(scratch)):
                with contextlib.suppress(OSError, subprocess.SubprocessError):  # less text then; the caller counts it
                    subprocess.run(["dpkg-deb", "-x", archive, fresh], check=True, capture_output=True)
                archive.unlink()
        if not fresh.is_dir():
            return None
        fresh.rename(folder)
    return folder


def _fetch(package: str, folder: Path) -> list[Path]:
    """Return the archive of a package; nothing if it cannot be had, since releases differ in what they have."""
    try:
        subprocess.run(
            ["apt-get", "download", package], cwd=folder, check=True, capture_output=True, timeout=_APT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return list(folder.glob("*.deb"))


def _installed_documents() -> Iterator[Document]:
    for place in (Path("/usr/share/doc"), Path("/usr/share/man"), Path(sysconfig.get_path("purelib"))):
        if place.is_dir():
            yield from _mixed(place)
