"""Reads the vectors of a Faiss file of the kind Flat, without Faiss: what langchain's store writes by default.

The layout is four letters, a header (size of a vector, number of vectors, two unused numbers, a flag, the metric), and
the vectors one after the other, all little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import ConfigError, CorruptIndex

_HEADER: Final = struct.Struct("<4siqqq?i")
_COUNT: Final = struct.Struct("<Q")
_METRICS: Final[dict[bytes, Literal["inner product", "distance"]]] = {b"IxFI": "inner product", b"IxF2": "distance"}


@dataclass(frozen=True, slots=True, eq=False)
class FlatVectors:
    """The vectors of a file, row by row, and how it compares them."""

    vectors: NDArray[np.float32]
    metric: Literal["inner product", "distance"]


def read_flat(path: Path) -> FlatVectors:
    """Return the vectors of a file.

    Raises:
        ConfigError: if there is no such file, or it is of another kind.
        CorruptIndex: if it is not as long as it says, or has numbers that are none.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEADER.size + _COUNT.size)
            kind = head[:4]
            if kind not in _METRICS:
                raise ConfigError(
                    f"{path.name}: got a Faiss file of the kind {kind!r}, allowed are flat ones ({b'IxFI'!r}, "
                    f"{b'IxF2'!r}), as langchain's store makes them by default; make the index from its texts instead"
                )
            if len(head) < _HEADER.size + _COUNT.size:
                raise CorruptIndex(f"{path.name} ends within its header ({len(head)} bytes)")
            _, dim, rows, *_ = _HEADER.unpack_from(head)
            [count] = _COUNT.unpack_from(head, _HEADER.size)
            size = path.stat().st_size - len(head)
            if dim < 1 or rows < 0 or count != dim * rows or size != 4 * count:
                raise CorruptIndex(
                    f"{path.name}: its header says {rows} vectors of {dim} numbers, {size:,} bytes of vectors follow; "
                    "it is damaged or cut short"
                )
            vectors = np.fromfile(stream, dtype="<f4", count=count).reshape(rows, dim)
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}; name a folder that `save_local` wrote") from exc
    if not np.isfinite(vectors).all():
        raise CorruptIndex(f"{path.name} holds NaN or infinity")
    return FlatVectors(vectors.astype(np.float32, copy=False), _METRICS[kind])
