"""What an index consists of: `CURRENT` names a manifest, and the manifest names every file with size and checksum.

A manifest is never changed.  A new one is written beside it, synced, and becomes the index when `CURRENT` is replaced
by a rename: before it the index is the old one, after it the new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from pancake_langgraph._errors import CorruptIndex, EmbedderMismatch, RetrievalError
from pancake_langgraph.retrieval.disk import Disk, FileMark, size_of
from pancake_langgraph.retrieval.fingerprint import are_of_one_embedder
from pancake_langgraph.retrieval.log import EMPTY_LOG_BYTES
from pancake_langgraph.retrieval.log_sizes import CLOSED

#: Raised by one whenever an older version of this package could not read what a newer one writes.
FORMAT: Final = 1
CURRENT: Final = "CURRENT"
SEGMENTS: Final = "seg"
LOGS: Final = "wal"
TOMBSTONES: Final = "dead"
#: Where a repair keeps what was damaged.
LOST: Final = "lost"
_PRODUCT: Final = "pancake-index"
_TRIES: Final = 50
#: What to do about damage; the end of every message about it.
REPAIR: Final = "restore it from a copy, or run `pancake index repair` on the index, which keeps what can be read"
_FIRST: Final = "MANIFEST-000001.json"


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One immutable segment: its folder below `seg`, its kind, its sizes, its files, and the tombstones of it.

    `trained_rows` is for how many rows its codes were trained; `longest` the length of its longest vector.
    """

    name: str
    kind: str
    num_items: int
    num_rows: int
    trained_rows: int
    longest: float
    files: tuple[FileMark, ...]
    dead: FileMark | None = None
    num_dead: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(mark.size for mark in self.files) + (self.dead.size if self.dead else 0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole index.

    `log_floor` is the first log whose records are not in the segments; `seq` the number of the last operation that is
    in them.
    """

    number: int
    dim: int
    fingerprint: str | None
    log_floor: int
    seq: int
    next_segment: int
    segments: tuple[SegmentEntry, ...] = ()
    format: int = FORMAT
    product: str = _PRODUCT

    @property
    def file_name(self) -> str:
        """Name of the file that holds it."""
        return f"MANIFEST-{self.number:06d}.json"

    @property
    def copy_name(self) -> str:
        """Name of its copy, which a repair uses where it is damaged itself."""
        return f"MANIFEST-{self.number:06d}.copy"

    def next(self, **changes: Any) -> Manifest:
        """Return the manifest that follows, with `changes`."""
        return replace(self, number=self.number + 1, **changes)


def log_path(root: Path, number: int) -> Path:
    """Return where a log lies."""
    return root / LOGS / f"{number:06d}.log"


def publish(root: Path, manifest: Manifest, disk: Disk) -> None:
    """Make `manifest` the index.  The files it names must be synced before.

    Raises:
        OSError: if it could not be written; the index is then what it was.
    """
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    disk.point("publish:start")
    for file_name in (manifest.file_name, manifest.copy_name):
        disk.write(root / file_name, (body, b"\n", _seal(body), b"\n"))
    disk.sync_folder(root)
    disk.point("publish:manifest")
    temporary = root / f"{CURRENT}.tmp"
    name = manifest.file_name.encode()
    disk.write(temporary, (name, b" ", _seal(name), b"\n"))
    disk.point("publish:rename")
    disk.rename(temporary, root / CURRENT)
    disk.point("publish:done")


def exists(root: Path) -> bool:
    """Return whether there is an index at `root`."""
    return (root / CURRENT).exists()


def read_current(root: Path) -> Manifest:
    """Return the index that is published now.

    Raises:
        CorruptIndex: if `CURRENT` or the manifest are not what was written, or only `CURRENT` is missing; the message
            names the file.
        RetrievalError: if there is no index, it cannot be read, or a later version of this package made it.
    """
    for _ in range(_TRIES):
        try:
            line = (root / CURRENT).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            check_unused(root)
            raise RetrievalError(f"{root}: there is no index here (no file {CURRENT}); make one first") from None
        except OSError as error:
            raise RetrievalError(f"{root / CURRENT}: it cannot be read ({error.strerror})") from error
        name, _, seal = line.rstrip(b"\n").partition(b" ")
        if _seal(name) != seal:
            raise CorruptIndex(f"{root / CURRENT}: its checksum does not fit; {REPAIR}")
        try:
            return _decode(root / name.decode())
        except FileNotFoundError:
            continue  # a writer published the next one and removed this one meanwhile
    raise CorruptIndex(f"{root / CURRENT} names {name.decode()!r}, which is missing; {REPAIR}")


def check_unused(root: Path) -> None:
    """Make sure that no index was ever in use where there is no `CURRENT`: an index whose making was cut off has less.

    Raises:
        CorruptIndex: if one was; the message names a file of it.
    """
    left = [path for path in (root / CLOSED,) if path.exists()]
    left += [path for path in (root / SEGMENTS).glob("*") if path.suffix != ".tmp"]
    left += [path for path in (root / LOGS).glob("*.log") if size_of(path) > EMPTY_LOG_BYTES]
    left += [path for path in _manifests(root) if path.name != _FIRST]
    if left:
        raise CorruptIndex(f"{root / CURRENT} is missing, but {left[-1]} is there; {REPAIR}")


def numbered(paths: Iterable[Path]) -> list[Path]:
    """Return the files whose names end in a number, by that number."""
    found = [path for path in paths if path.stem.rpartition("-")[2].isdigit()]
    return sorted(found, key=lambda path: int(path.stem.rpartition("-")[2]))


def _manifests(root: Path) -> list[Path]:
    return numbered(root.glob("MANIFEST-*.json"))


def newest_whole(root: Path) -> Manifest | None:
    """Return the whole manifest with the highest number, whatever `CURRENT` says; `None` if there is none."""
    found = numbered([*root.glob("MANIFEST-*.copy"), *root.glob("MANIFEST-*.json")])
    for path in reversed(found):
        try:
            return _decode(path)
        except (CorruptIndex, FileNotFoundError):
            continue
    return None


def check_embedder(root: Path, manifest: Manifest, dim: int | None, fingerprint: str | None) -> None:
    """Refuse vectors that cannot be compared with those of an index.

    Raises:
        EmbedderMismatch: if length or fingerprint are others.
    """
    if dim is not None and dim != manifest.dim:
        raise EmbedderMismatch(
            f"{root}: got vectors of {dim} numbers, the index holds those of {manifest.dim}; "
            "use the embedder it was made with, or build it anew"
        )
    if fingerprint is None or manifest.fingerprint is None:
        return
    if not are_of_one_embedder(fingerprint, manifest.fingerprint):
        raise EmbedderMismatch(
            f"{root}: the embedder answers otherwise than the one that the index was made with (fingerprint "
            f"{_shown(fingerprint)}, the index has {_shown(manifest.fingerprint)}); use that one, or build the index "
            "anew"
        )


def _shown(fingerprint: str) -> str:
    """Return a fingerprint as messages show it: its beginning tells it from others."""
    return repr(fingerprint if len(fingerprint) <= 48 else f"{fingerprint[:45]}...")


def _seal(data: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(data).encode()


def _decode(path: Path) -> Manifest:
    """Read one manifest and check it."""
    try:
        body, _, seal = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RetrievalError(f"{path}: it cannot be read ({error.strerror})") from error
    if _seal(body) != seal:
        raise CorruptIndex(f"{path}: its checksum does not fit; {REPAIR}")
    try:
        found = msgspec.json.decode(body)
        if found["product"] != _PRODUCT:
            raise CorruptIndex(f"{path}: it was made by {found['product']!r}, allowed is {_PRODUCT!r}")
        if found["format"] > FORMAT:
            raise RetrievalError(
                f"{path}: it has format {found['format']}, this version reads up to {FORMAT}; update pancake-langgraph"
            )
        return msgspec.convert(found, Manifest)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise CorruptIndex(f"{path}: it is whole, but no manifest ({error}); {REPAIR}") from error
