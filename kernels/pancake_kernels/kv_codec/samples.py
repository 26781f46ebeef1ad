"""KV to measure on: a real model's, or a heavy-tailed stand-in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

#: Tokens of one chunk, as LMCache cuts them by default.
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """Keys and values, `[layers, tokens, width]` each, and where they come from in words."""

    keys: torch.Tensor
    values: torch.Tensor
    origin: str

    def chunks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return whole chunks of the sample, each contiguous."""
        count = self.keys.shape[1] // CHUNK_TOKENS
        cuts = [slice(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS) for index in range(count)]
        return [(self.keys[:, cut].contiguous(), self.values[:, cut].contiguous()) for cut in cuts]


def model_sample(folder: Path, text: str, tokens: int) -> Sample:
    """Run the first `tokens` tokens of `text` through the model in `folder` (bfloat16), and take its KV cache.

    Raises:
        ValueError: if the text is shorter than that.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(f"text of {ids.shape[1]} tokens: at least {tokens} are needed; to mend: give a longer text")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    keys = torch.stack([_flat(layer.keys) for layer in cache.layers]).clone()
    values = torch.stack([_flat(layer.values) for layer in cache.layers]).clone()
    return Sample(keys, values, f"{folder.name}, {tokens} tokens of real text, bfloat16")


def synthetic_sample(tokens: int) -> Sample:
    """Return heavy-tailed stand-ins of a small model's shape: keys with loud channels, values without."""
    noise = torch.Generator().manual_seed(7)
    shape = (30, tokens, 192)
    loud = torch.randn((30, 1, 192), generator=noise).mul(1.2).exp()
    keys = torch.randn(shape, generator=noise) * loud + loud * torch.randn((30, 1, 192), generator=noise)
    values = torch.randn(shape, generator=noise) / torch.rand(shape, generator=noise).clamp(min=0.05).sqrt()
    return Sample(
        keys.to(torch.bfloat16), values.to(torch.bfloat16), f"synthetic, heavy-tailed, {tokens} tokens, bfloat16"
    )


def _flat(heads: torch.Tensor) -> torch.Tensor:
    """Turn `[1, heads, tokens, size]` into `[tokens, heads * size]`."""
    return heads[0].transpose(0, 1).flatten(1)
