"""Fingerprints of embedders, taken from what they answer: names of models lie, and say nothing of how they are run.

Embedders do not give the same bits twice: threads, batches and half precision change the last ones.  So this is no
hash, of which one changed bit changes all, but a sketch: a few numbers for a few texts, which are near for one embedder
and far apart for two.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import EmbedderMismatch, EmbeddingError

if TYPE_CHECKING:  # engines compare fingerprints, and do without LangChain
    from langchain_core.embeddings import Embeddings

_VERSION: Final = "e1"
_DOCUMENTS: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "Set the retry limit to 3 and restart the service; the queue drains in about 40 seconds.",
    "def area(radius): return 3.14159 * radius ** 2",
    "She asked whether the train to Lisbon leaves before noon.",
    "Was kostet die Fahrt zum Flughafen am Samstag?",
    "error: permission denied while opening the configuration file",
)
_QUERIES: Final = ("how do I change the retry limit", "train to Lisbon in the morning")
#: Directions that each vector is measured along.
_NUM_DIRECTIONS: Final = 16
_SCALE: Final = 4096.0
#: Two sketches of one embedder are nearer than this, those of two are about 1.4 apart.
_MAX_DISTANCE: Final = 0.05
_MAX_LENGTH_RATIO: Final = 1.05


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells an embedder from others: the size of its vectors, their mean length, and a sketch of their directions.

    `str` gives a text of ASCII letters without spaces, from which `parse` makes the same again.
    """

    dim: int
    length: float
    sketch: tuple[int, ...]

    def __str__(self) -> str:
        """Return it as text."""
        packed = base64.urlsafe_b64encode(np.array(self.sketch, "<i2").tobytes()).decode("ascii")
        return f"{_VERSION}:{self.dim}:{self.length:.6g}:{packed}"

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Read a fingerprint from its text.

        Raises:
            EmbedderMismatch: if it is none of this version.
        """
        try:
            version, dim, length, packed = text.split(":")
            sketch = np.frombuffer(base64.b64decode(packed, altchars=b"-_", validate=True), "<i2")
            found = cls(int(dim), float(length), tuple(int(number) for number in sketch))
        except (ValueError, binascii.Error) as exc:
            raise _unreadable(text) from exc
        if version != _VERSION or len(sketch) != _sketch_size():
            raise _unreadable(text)
        return found

    def distance(self, other: Fingerprint) -> float:
        """Return how far two embedders are apart: about 0 for one, about 1.4 for two; infinite if sizes differ."""
        if self.dim != other.dim or len(self.sketch) != len(other.sketch):
            return math.inf
        difference = np.subtract(self.sketch, other.sketch, dtype=np.float64) / _SCALE
        return float(np.sqrt(np.mean(difference**2)))

    def is_same(self, other: Fingerprint) -> bool:
        """Whether both are of one embedder, run in whatever batches, threads and precision."""
        shorter, longer = sorted((self.length, other.length))
        return self.distance(other) <= _MAX_DISTANCE and longer <= shorter * _MAX_LENGTH_RATIO

    def check(self, stored: str) -> None:
        """Check that an index with the fingerprint `stored` was made with this embedder.

        Raises:
            EmbedderMismatch: if not, or if `stored` is no fingerprint.
        """
        other = Fingerprint.parse(stored)
        if not self.is_same(other):
            raise EmbedderMismatch(
                f"this embedder is another one than the index was made with: got vectors of {self.dim} numbers and "
                f"length {self.length:.3g}, the index has {other.dim} and {other.length:.3g}; their answers to the "
                f"same texts are {self.distance(other):.2f} apart, allowed is {_MAX_DISTANCE}. Use the embedder that "
                f"the index was made with, or make a new index."
            )


def are_of_one_embedder(one: str, other: str) -> bool:
    """Whether two texts name one embedder: they are equal, or fingerprints that are near each other.  Never raises."""
    if one == other:
        return True
    try:
        return Fingerprint.parse(one).is_same(Fingerprint.parse(other))
    except EmbedderMismatch:
        return False


def fingerprint(embedder: Embeddings) -> Fingerprint:
    """Return the fingerprint of an embedder; embeds eight short texts, and blocks for it.

    Raises:
        EmbeddingError: if its answers are no vectors of one size with finite numbers.
    """
    answers = [*embedder.embed_documents(list(_DOCUMENTS)), *(embedder.embed_query(text) for text in _QUERIES)]
    try:
        vectors = np.array(answers, dtype=np.float64)
    except (TypeError, ValueError) as exc:
        raise _unusable(str(exc)) from exc
    if vectors.shape[0] != len(_DOCUMENTS) + len(_QUERIES) or vectors.ndim != 2 or not vectors.shape[1]:
        raise _unusable(f"an array of shape {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise _unusable("NaN or infinity")
    lengths = np.linalg.norm(vectors, axis=1)
    directions = vectors / np.where(lengths > 0, lengths, 1.0)[:, None]
    sketch = np.rint(directions @ _axes(vectors.shape[1]).T * _SCALE).clip(-32767, 32767)
    return Fingerprint(vectors.shape[1], float(f"{lengths.mean():.6g}"), tuple(int(number) for number in sketch.flat))


@functools.lru_cache(maxsize=4)
def _axes(dim: int) -> NDArray[np.float64]:
    """Return directions of plus and minus ones, the same on every machine and for ever.

    Along them a unit vector measures about 1.
    """
    seed = f"pancake axes {dim}".encode()
    bits = np.unpackbits(np.frombuffer(hashlib.shake_256(seed).digest((dim * _NUM_DIRECTIONS + 7) // 8), np.uint8))
    return bits[: dim * _NUM_DIRECTIONS].reshape(_NUM_DIRECTIONS, dim).astype(np.float64) * 2.0 - 1.0


def _sketch_size() -> int:
    return (len(_DOCUMENTS) + len(_QUERIES)) * _NUM_DIRECTIONS


def _unreadable(text: str) -> EmbedderMismatch:
    shown = text if len(text) <= 24 else f"{text[:21]}..."
    return EmbedderMismatch(
        f"cannot tell which embedder an index was made with: got {shown!r}, allowed is a fingerprint of version "
        f"{_VERSION}. Make the index anew, or use the version of this package that made it."
    )


def _unusable(got: str) -> EmbeddingError:
    return EmbeddingError(
        f"cannot take an embedder's fingerprint: got {got}, allowed are vectors of one size with finite numbers. Use "
        f"another embedder."
    )
