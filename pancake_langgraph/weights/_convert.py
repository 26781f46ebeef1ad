"""Runs in a child process, so that the heavy libraries are not loaded into the one that asks.

`python -m pancake_langgraph.weights._convert gguf FILE OUT` or `... tiny TOKENIZER_DIR OUT SEED`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write the packed model in `gguf` as bfloat16 safetensors with its tokenizer into `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Without `dequantize` the packed tensors stay packed and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_tiny(tokenizer_dir: Path, out: Path, seed: int) -> None:
    """Write a random two-layer Llama in float32 into `out`, with the tokenizer of `tokenizer_dir`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
        # Wide and untied: with small or tied weights the model repeats its last token whatever it reads.
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(out)
    for name in _TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, out / name)


def main(argv: list[str]) -> None:
    """Do what `argv` says."""
    if argv[0] == "gguf":
        convert_gguf(Path(argv[1]), Path(argv[2]))
    else:
        write_tiny(Path(argv[1]), Path(argv[2]), int(argv[3]))


if __name__ == "__main__":
    main(sys.argv[1:])
