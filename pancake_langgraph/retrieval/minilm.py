"""all-MiniLM-L6-v2 as a LangChain embedder on this machine's processor: for tests, benches and the command line.

It loads torch and transformers when it is constructed.  Vectors have 384 numbers and length one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from pancake_langgraph.weights.minilm import prepare_minilm

DIM: Final = 384
#: Longer texts are cut, as the model's authors do.
MAX_TOKENS: Final = 256
#: Tokens of a batch, padding included: about what keeps a core's caches busy and memory small.
BATCH_TOKENS: Final = 4_096


class MiniLMEmbeddings(Embeddings):
    """Mean pooling over the last layer, normalized.  Safe to call from any thread; one text or batch runs at a time."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        num_threads: int | None = None,
    ) -> None:
        """Load the model.

        Args:
            folder: The model's files; `None` takes those that `prepare_minilm` keeps.
            dtype: `bfloat16` is faster where the processor has instructions for it, and rounds: cosines of the same
                text with `float32` are about 0.9999.
            num_threads: Threads that torch uses, for the whole process; `None` leaves it as it is.

        Raises:
            ModelFilesError: if the files are not there and cannot be made.
        """
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModel
        from transformers.utils import logging as transformers_logging

        source = folder or prepare_minilm()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        transformers_logging.disable_progress_bar()
        self._torch = torch
        self._model = AutoModel.from_pretrained(source, dtype=getattr(torch, dtype), local_files_only=True).eval()
        self._tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.no_padding()
        self._lock = threading.Lock()

    def encode(
        self,
        texts: Sequence[str],
        *,
        on_done: Callable[[int], None] | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Return the vectors of `texts` in their order, shape `(len(texts), 384)`, float32.

        Texts of about the same length share a batch, so that little is padded.  `on_done` is told after each batch how
        many texts are done; `out` is filled instead of a new array.
        """
        vectors = np.empty((len(texts), DIM), dtype=np.float32) if out is None else out
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(texts)), key=lambda place: len(tokens[place]), reverse=True)
        start = 0
        while start < len(order):
            width = len(tokens[order[start]])
            batch = order[start : start + max(1, BATCH_TOKENS // width)]
            with self._lock:
                vectors[batch] = self._forward([tokens[place] for place in batch], width)
            start += len(batch)
            if on_done is not None:
                on_done(start)
        return vectors

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector for each text."""
        return self.encode(texts).tolist()  # type: ignore[no-any-return] # numpy says Any

    def embed_queries(self, texts: list[str]) -> list[list[float]]:
        """Return one vector for each text: questions are embedded as documents are."""
        return self.embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of one text."""
        return self.encode([text])[0].tolist()  # type: ignore[no-any-return] # numpy says Any

    def weight_bytes(self) -> dict[str, int]:
        """Return what the weights take: they lie in this process, on the CPU."""
        return {"cpu": sum(one.numel() * one.element_size() for one in self._model.parameters())}

    def _forward(self, tokens: Sequence[Sequence[int]], width: int) -> NDArray[np.float32]:
        torch = self._torch
        ids = torch.zeros((len(tokens), width), dtype=torch.long)
        mask = torch.zeros((len(tokens), width), dtype=torch.long)
        for row, text in enumerate(tokens):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        with torch.inference_mode():
            hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            weight = mask.unsqueeze(-1).float()
            mean = (hidden * weight).sum(1) / weight.sum(1)
            return torch.nn.functional.normalize(mean, dim=1).numpy()  # type: ignore[no-any-return] # no types
