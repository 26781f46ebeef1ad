"""The files of a segment: names, and how arrays, documents and checksums of rows stand in them.

Documents stand one after the other as `checksum, body`; each row of vectors has a checksum of its own, so that what a
search reads is checked without reading the whole file.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import CorruptIndex

#: Vectors, sorted by namespace and partition; float32.
RAW: Final = "raw.f32"
#: A checksum for each row of `RAW`.
SUMS: Final = "sums.u32"
#: Documents, and where each begins (one more number than there are documents).
DOCS: Final = "docs.bin"
DOC_OFFSETS: Final = "docs.u64"
#: Namespaces, and which of them each item is in.
NAMESPACES: Final = "namespaces.json"
ITEM_NAMESPACES: Final = "namespaces.i32"
UPDATED: Final = "updated.f64"
#: Only where some item expires.
EXPIRES: Final = "expires.f64"
#: Hashes of ids, sorted, and the item of each.
HASHES: Final = "ids.u64"
HASH_ITEMS: Final = "ids.i32"
#: Only where some item has several vectors: the item of each row, and the rows of each item.
ROW_ITEMS: Final = "row_items.i32"
ITEM_ROWS: Final = "item_rows.i32"
ITEM_ROW_STARTS: Final = "item_rows.u64"
#: Only in segments with codes.
CODES: Final = "codes.faiss"

#: Files that a reader does not look through when it opens a segment, because their parts have checksums.
CHECKED_IN_PARTS: Final = frozenset({RAW, DOCS})
_TYPES: Final = {"f32": np.float32, "u32": np.uint32, "u64": np.uint64, "i32": np.int32, "f64": np.float64}
_WHOSE_FAULTS: Final = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
_CHECKSUM: Final = struct.Struct("<I")


class Document(msgspec.Struct, array_like=True, frozen=True):
    """An item without its namespace and vectors; `value` is JSON."""

    key: str
    created_at_s: float
    updated_at_s: float
    expires_at_s: float | None
    value: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Document).decode


def sealed(document: Document) -> bytes:
    """Return a document as it stands in `DOCS`."""
    body = _encode(document)
    return _CHECKSUM.pack(zlib.crc32(body)) + body


def is_whole(data: bytes) -> bool:
    """Return whether a document's checksum fits."""
    size = _CHECKSUM.size
    return len(data) > size and zlib.crc32(memoryview(data)[size:]) == _CHECKSUM.unpack_from(data)[0]


def opened(data: bytes) -> Document:
    """Return a document that is whole."""
    return _decode(memoryview(data)[_CHECKSUM.size :])


def row_sums(rows: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the checksums of rows.

    Each number counts with an odd weight of its own, modulo 2**32: a change of any one number changes the sum.
    """
    words = np.ascontiguousarray(rows).view(np.uint32)
    sums: NDArray[np.uint32] = np.einsum("ij,j->i", words, _weights(rows.shape[1]))
    return sums


@cache
def _weights(dim: int) -> NDArray[np.uint32]:
    return np.random.default_rng(dim).integers(0, 2**32, dim, np.uint32) | np.uint32(1)


def mapped(path: Path, columns: int = 0) -> NDArray[Any]:
    """Return a file's numbers without reading them; the name says their type.

    The file may be removed while they are used.

    Raises:
        CorruptIndex: if its size does not fit.
        OSError: if it cannot be opened.
    """
    kind = np.dtype(_TYPES[path.suffix[1:]])
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size % (kind.itemsize * max(1, columns)):
            raise CorruptIndex(f"{path}: got {size} bytes, allowed are multiples of {kind.itemsize * max(1, columns)}")
        data: bytes | mmap.mmap = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
    if columns and isinstance(data, mmap.mmap):
        data.madvise(mmap.MADV_RANDOM)
    numbers = np.frombuffer(data, kind)
    return numbers.reshape(-1, columns) if columns else numbers


def let_go(numbers: NDArray[Any], start: int, end: int) -> None:
    """Give up the memory of some bytes of a mapped file: read again, they are looked up again.

    As long as a process has them mapped, the system cannot be told to forget them.
    """
    data: Any = numbers
    while isinstance(data, np.ndarray):
        data = data.base
    if isinstance(data, memoryview) and isinstance(data.obj, mmap.mmap):
        first = start - start % mmap.PAGESIZE
        data.obj.madvise(mmap.MADV_DONTNEED, first, end - first)


def num_faults() -> int:
    """Return for how many pages this thread (the process, where threads are not counted) has waited for the device."""
    return resource.getrusage(_WHOSE_FAULTS).ru_majflt
