"""Runs a model on KV that was packed and unpacked.  Loads torch and transformers; import it only where it is run.

The model reads a prompt's whole chunks once.  Their KV is packed and unpacked chunk by chunk, with the functions that
the cache server's adapters use, and the model goes on from there: it reads the end of the prompt, which lies in no
whole chunk, and answers.  All modes go on side by side, in one batch, from KV that differs in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from pancake_kernels.kv_codec import codec_for
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.kv_quality import KvMode, PromptDistance

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: Keys and values of all layers, `[layers, tokens, heads, head_size]`.
_KV = tuple[torch.Tensor, torch.Tensor]


def distances(
    model_dir: Path,
    prompts: Sequence[str],
    modes: Sequence[KvMode],
    *,
    dtype: str,
    chunk_tokens: int,
    answer_tokens: int,
    num_threads: int,
) -> Iterator[dict[KvMode, PromptDistance]]:
    """Yield for each prompt, as it is done, how far each mode is from KV as it is.

    Raises:
        ConfigError: if a prompt has no whole chunk.
    """
    torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=_DTYPES[dtype]).eval()
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        stored = (len(ids) - 1) // chunk_tokens * chunk_tokens
        if stored == 0:
            raise ConfigError(f"prompt of {len(ids)} tokens: allowed is more than one chunk ({chunk_tokens} tokens)")
        with torch.inference_mode():
            kv = _read(model, ids[:stored])
            rows = [kv, *(_packed(kv, mode, chunk_tokens) for mode in modes)]
            greedy = _answers(model, rows, ids[stored:], answer_tokens)
            chances = _chances(model, rows, torch.cat((ids[stored:], greedy[0, :-1])), answer_tokens)
        yield {mode: _distance(greedy, chances, row) for row, mode in enumerate(modes, start=1)}


def _read(model: torch.nn.Module, ids: torch.Tensor) -> _KV:
    layers = model(ids[None], use_cache=True).past_key_values.layers
    keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in layers])
    values = torch.stack([layer.values[0].transpose(0, 1) for layer in layers])
    return keys, values


def _packed(kv: _KV, mode: KvMode, chunk_tokens: int) -> _KV:
    """Return KV as it comes back from a store that keeps it in `mode`."""
    pack = _pack_fp8 if mode is KvMode.LMCACHE_FP8 else _packer(mode)
    parts = [pack(keys, values) for keys, values in zip(*(side.split(chunk_tokens, dim=1) for side in kv), strict=True)]
    keys = torch.cat([part[0] for part in parts], dim=1)
    values = torch.cat([part[1] for part in parts], dim=1)
    return keys, values


def _packer(mode: KvMode) -> Callable[[torch.Tensor, torch.Tensor], _KV]:
    codec = codec_for("cpu")

    def pack(keys: torch.Tensor, values: torch.Tensor) -> _KV:
        frame = codec.encode(keys.flatten(2).contiguous(), values.flatten(2).contiguous(), str(mode))
        new_keys, new_values = codec.decode(frame)
        return new_keys.view(keys.shape), new_values.view(values.shape)

    return pack


def _pack_fp8(keys: torch.Tensor, values: torch.Tensor) -> _KV:
    """Use LMCache's own functions; all they look at is the tensor of what they are given."""
    from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer

    back: list[torch.Tensor] = []
    for side in (keys, values):
        packed = SimpleNamespace(tensor=torch.empty(side.numel(), dtype=torch.uint8))
        Fp8QuantizationSerializer().serialize(SimpleNamespace(tensor=side.contiguous()), packed, None)
        restored = SimpleNamespace(tensor=torch.empty_like(side, memory_format=torch.contiguous_format))
        Fp8QuantizationDeserializer().deserialize(packed, restored, None)
        back.append(restored.tensor)
    return back[0], back[1]


def _cache(rows: Sequence[_KV]) -> DynamicCache:
    """Return the cache of a batch with one row per KV."""
    cache = DynamicCache()
    for layer in range(rows[0][0].shape[0]):
        keys = torch.stack([keys[layer].transpose(0, 1) for keys, _ in rows])
        values = torch.stack([values[layer].transpose(0, 1) for _, values in rows])
        cache.update(keys, values, layer)
    return cache


def _answers(model: torch.nn.Module, rows: Sequence[_KV], end: torch.Tensor, answer_tokens: int) -> torch.Tensor:
    """Return each row's own greedy answer, `[rows, answer_tokens]`."""
    cache = _cache(rows)
    ids = end.expand(len(rows), -1)
    said: list[torch.Tensor] = []
    for _ in range(answer_tokens):
        ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        said.append(ids)
    return torch.cat(said, dim=1)


def _chances(model: torch.nn.Module, rows: Sequence[_KV], ids: torch.Tensor, answer_tokens: int) -> torch.Tensor:
    """Return the log-chances of every token where each row reads the same words, `[rows, answer_tokens, words]`."""
    logits = model(ids.expand(len(rows), -1), past_key_values=_cache(rows), use_cache=True).logits
    return logits[:, -answer_tokens:].double().log_softmax(-1)


def _distance(greedy: torch.Tensor, chances: torch.Tensor, row: int) -> PromptDistance:
    exact, other = chances[0], chances[row]
    kl = (exact.exp() * (exact - other)).sum(-1).clamp(min=0)
    equal = greedy[0] == greedy[row]
    return PromptDistance(
        kl_nats=tuple(kl.tolist()),
        equal_tokens=int(equal.sum()),
        equal_until=int(equal.long().cumprod(0).sum()),
        same_choices=int((exact.argmax(-1) == other.argmax(-1)).sum()),
    )
