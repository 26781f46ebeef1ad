"""Whose KV is it?  Names of what computed it: weights, number formats, adapter, tenant.

A KV cache server keys objects by the engine's `--model` string, the tokens and the request's `cache_salt`.  None of
these changes when other weights come under an old name, and an adapter is not part of it at all.  Here all of that is
put into the salt, which every part of the cache server, its files included, already keeps apart.  The chat template
needs no part in it: it shows in the tokens.

vLLM's attention on CPUs orders the KV of each block for the processor.  That order is part of the name, readably: with
another block size or instruction set the same chunk is other bytes, and who packs them has to know their order.  A
request may say how its KV is to be packed below the cache server's main memory, by the end of its salt (`!int4`).

Contents are hashed whole.  That reads every weight file once more at an engine's start, and is the only thing that
tells a fine-tuned layer from the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

#: Files that make a model or an adapter; tokenizers and templates show in the tokens.
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_CONFIG_NAMES: Final = ("config.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json")
_IDENTITY_BYTES: Final = 12
_READ_THREADS: Final = 4

#: A cache server takes salts of up to 128 characters, and puts them into file names.  It refuses these:
MAX_SALT_CHARS: Final = 80
#: How the salts of known answers begin, which belong to no tenant.
CANARY_SALT: Final = "canary-"
#: How a salt may end: the codec in which its KV is to be kept.
_CODEC: Final = re.compile(r"(?s)(?P<salt>.*)!(?P<codec>exact|int8|int4)")
#: Instruction sets of vLLM's attention on CPUs that share an order.
_ORDERS: Final = {"vec": "v", "vec16": "v", "amx": "a"}
_FORBIDDEN: Final = frozenset("@/\\\x00")
_MAX_ADAPTERS: Final = 1024

#: A child of vLLM's logger, which alone has a handler in the engine process.
_logger = logging.getLogger("vllm.pancake")

#: Name, size, time of change and inode of each file: a folder whose stamp is the same was not touched.
Stamp = tuple[tuple[str, int, int, int], ...]


def folder_stamp(folder: Path) -> Stamp:
    """Return what changes when a file of a model's or adapter's folder does.

    Raises:
        OSError: if the folder or a file cannot be read.
    """
    found = []
    for path in _model_files(folder):
        status = path.stat()
        found.append((path.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)


def folder_digest(folder: Path) -> str:
    """Return a digest over the contents of a model's or adapter's files, 24 hex digits.

    Raises:
        OSError: if the folder or a file cannot be read, or holds no such file.
    """
    paths = _model_files(folder)
    if not any(path.suffix in _WEIGHT_SUFFIXES for path in paths):
        raise FileNotFoundError(f"no weight files in {folder}; allowed are {', '.join(_WEIGHT_SUFFIXES)}")
    with ThreadPoolExecutor(_READ_THREADS) as readers:
        digests = list(readers.map(_file_digest, paths))
    return _digest([[path.name, digest] for path, digest in zip(paths, digests, strict=True)])


def engine_identity(vllm_config: Any) -> str:
    """Return the name of what an engine computes KV with: its weights, quantization and number formats.

    A model that is not a local folder is told by the commit that its hub gave.  Where neither can be had the name is
    new at each start: nothing of an earlier start is used then, rather than something of other weights.
    """
    model = vllm_config.model_config
    try:
        weights = _weights_of(model)
    except OSError as exc:
        _logger.warning("no identity for the model's weights (%s); KV of earlier starts is not used", exc)
        weights = f"unknown {secrets.token_hex(16)}"
    cache = vllm_config.cache_config
    formats = [str(model.dtype), str(model.quantization), str(cache.cache_dtype)]
    return f"w{_digest([weights, *formats])}{_cpu_order(vllm_config)}"


def tier_salt(identity: str, salt: str | None, *, adapter: str | None = None) -> str:
    """Return the salt under which a cache server keeps the KV of a request that came with `salt`.

    Readable, so that stored objects tell what they belong to: `IDENTITY[!CODEC][+ADAPTER][.SALT]`.  A salt that does
    not fit, or has characters that the server refuses, is hashed: `~` stands before it then.
    """
    asked = _CODEC.fullmatch(salt) if salt else None
    if asked is not None:
        salt, identity = asked["salt"], f"{identity}!{asked['codec']}"
    name = identity if adapter is None else f"{identity}+{adapter}"
    if not salt:
        return name
    if (
        len(name) + 1 + len(salt) <= MAX_SALT_CHARS
        and salt.isascii()
        and salt.isprintable()
        and not _FORBIDDEN & set(salt)
    ):
        return f"{name}.{salt}"
    return f"{name}~{_digest(salt)}"


class Adapters:
    """Names the contents of LoRA adapters.  Used from the engine's step only; at most `_MAX_ADAPTERS` are remembered.

    Contents are read when an adapter is first seen under its number, which the engine gives anew with each load.  An
    adapter whose files change under its number has no name any more: what the engine holds of it is not known.
    """

    def __init__(self) -> None:
        """Know none."""
        self._named: OrderedDict[tuple[int, str], tuple[Stamp, str] | None] = OrderedDict()
        self._latest: OrderedDict[tuple[str, str], str | None] = OrderedDict()

    def name(self, lora_request: Any) -> str | None:
        """Return the adapter's name, or `None` when its KV must be kept out of the cache server."""
        path = Path(lora_request.lora_path)
        key = (lora_request.lora_int_id, lora_request.lora_path)
        try:
            stamp = folder_stamp(path)
            if key not in self._named:
                self._remember(key, (stamp, f"a{folder_digest(path)}"))
            known = self._named[key]
            if known is None or known[0] == stamp:
                return None if known is None else known[1]
            _logger.warning("the files of adapter %s changed while it was loaded; load it anew", lora_request.lora_name)
        except OSError as exc:
            if key not in self._named:
                _logger.warning("adapter %s has no identity: %s", lora_request.lora_name, exc)
        self._named[key] = None
        return None

    def is_replaced(self, lora_request: Any) -> bool:
        """Say whether other contents came under an adapter's name and path since the last call: the pool holds old KV.

        The engine's own pool tells adapters by name and path alone.
        """
        key = (lora_request.lora_name, lora_request.lora_path)
        name = self.name(lora_request)
        replaced = key in self._latest and self._latest[key] != name
        self._latest[key] = name
        self._latest.move_to_end(key)
        if len(self._latest) > _MAX_ADAPTERS:
            self._latest.popitem(last=False)
        return replaced

    def _remember(self, key: tuple[int, str], named: tuple[Stamp, str]) -> None:
        self._named[key] = named
        if len(self._named) > _MAX_ADAPTERS:
            self._named.popitem(last=False)


def _weights_of(model: Any) -> str:
    folder = Path(model.model)
    if folder.is_dir():
        return folder_digest(folder)
    if folder.is_file():
        return _digest([folder.name, _file_digest(folder)])
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    if isinstance(commit, str) and commit:
        return f"{model.model} {commit}"
    raise FileNotFoundError(f"{model.model} is no folder here, and its hub gave no commit")


def _cpu_order(vllm_config: Any) -> str:
    """Return how a CPU engine orders the KV of a block: instruction set, head size, block size; "" on other devices."""
    if getattr(getattr(vllm_config, "device_config", None), "device_type", None) != "cpu":
        return ""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        head_size, block_size = int(model.get_head_size()), int(cache.block_size)
        isa = str(_get_attn_isa(model.dtype, block_size, head_size, cache.cache_dtype))
    except (ImportError, AttributeError, TypeError, ValueError, NotImplementedError) as exc:
        _logger.warning("the order of this engine's KV is not known (%s): it is not shared and not packed", exc)
        return f"-unknown{secrets.token_hex(4)}"
    return f"-{_ORDERS.get(isa, isa)}{head_size}x{block_size}"


def _model_files(folder: Path) -> list[Path]:
    paths = (path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES or path.name in _CONFIG_NAMES)
    return sorted(path for path in paths if path.is_file())


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=_IDENTITY_BYTES).hexdigest()
