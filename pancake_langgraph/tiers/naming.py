"""Under which salt the tier has a request's KV: what `pancake_vllm.identity` writes inside the engine, read here.

The two know nothing of each other's code, since one runs in the engine's process; a test holds them together.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

_MAX_SALT_CHARS: Final = 80
_FORBIDDEN: Final = frozenset("@/\\\x00")
_DIGEST_BYTES: Final = 12


def tier_salt(kv_identity: str | None, salt: str | None) -> str:
    """Return the salt of the stored KV of requests that go to the engine's own model with `salt`."""
    if kv_identity is None or not salt:
        return kv_identity or salt or ""
    plain = f"{kv_identity}.{salt}"
    if len(plain) <= _MAX_SALT_CHARS and plain.isascii() and plain.isprintable() and not _FORBIDDEN & set(plain):
        return plain
    return f"{kv_identity}~{hashlib.blake2b(json.dumps(salt).encode(), digest_size=_DIGEST_BYTES).hexdigest()}"
