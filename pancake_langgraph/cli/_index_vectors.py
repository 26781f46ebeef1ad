"""Embedders and vectors, as `pancake index` meets them: what fails, what does not fit, what can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pancake_langgraph._errors import EmbedderMismatch, EmbeddingError, PancakeError

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

#: A stored vector and what the embedder says of the same text: under this they are of two embedders.
_SAME_COSINE: Final = 0.99


@contextmanager
def answering() -> Iterator[None]:
    """Say in one line that an embedder failed, whatever it raised."""
    try:
        yield
    except PancakeError:
        raise
    except Exception as exc:
        raise EmbeddingError(
            f"the embedder failed ({type(exc).__name__}: {exc}); what was put in before is kept; look whether its "
            "server runs, and run this again"
        ) from exc


def check_embedder(embedder: Embeddings, text: str, vector: Any) -> None:
    """Refuse an embedder that says something else of a text than the vector that is stored with it."""
    import numpy as np

    with answering():
        found = np.asarray(embedder.embed_documents([text])[0], dtype=np.float32)
    if found.shape != vector.shape:
        raise EmbedderMismatch(
            f"the embedder makes vectors of {len(found)} numbers, those to import have {len(vector)}; name "
            "the embedder that made them"
        )
    lengths = float(np.linalg.norm(found) * np.linalg.norm(vector))
    if lengths == 0 or float(found @ vector) < _SAME_COSINE * lengths:
        raise EmbedderMismatch(
            "the embedder says something else of the first text than what is stored with it; name the embedder that "
            "made the vectors"
        )


def comparable(vectors: Any, metric: str) -> tuple[Any, bool]:
    """Return vectors whose inner products order as the metric does, and whether that is by angle now."""
    import numpy as np

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if metric == "inner product" or np.allclose(lengths, 1.0, atol=1e-3):
        return vectors, False
    return vectors / np.where(lengths > 0, lengths, 1.0), True
