"""A random tiny Llama for tests that need exact numbers and no language."""

from __future__ import annotations

from pathlib import Path

from pancake_langgraph.launch.process import ProgressFn
from pancake_langgraph.weights._folder import ensure_folder, run_converter
from pancake_langgraph.weights.smollm import prepare_smollm


def build_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    tokenizer_dir: Path | None = None,
    on_progress: ProgressFn | None = None,
) -> Path:
    """Write a random two-layer Llama (6 M float32 weights) with SmolLM2's tokenizer into `folder`; return `folder`.

    The same `seed` gives the same weights under one version of torch.  A folder that is whole is left as it is.
    `tokenizer_dir` defaults to the prepared SmolLM2.

    Raises:
        ModelFilesError: if it cannot be built.
    """
    source = tokenizer_dir or prepare_smollm(on_progress=on_progress)

    def build(out: Path) -> None:
        run_converter(
            ("tiny", str(source), str(out), str(seed)), step="building the tiny model", on_progress=on_progress
        )

    return ensure_folder(
        folder, recipe=f"tiny llama, seed {seed}, 1", verify="fast", build=build, on_progress=on_progress
    )
