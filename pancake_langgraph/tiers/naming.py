"""Under which salt the tier has a request's KV: what `pancake_vllm.identity` writes inside the engine, read here.

The two know nothing of each other's code, since one runs in the engine's process; a test holds them together.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Final, Literal

KVCodec = Literal["exact", "int8", "int4"]

#: How the salts of known answers begin: only under these is the tier read as of another request's salt.
CANARY_SALT: Final = "canary-"
_MAX_SALT_CHARS: Final = 80
_FORBIDDEN: Final = frozenset("@/\\\x00")
_DIGEST_BYTES: Final = 12
_CODEC: Final = re.compile(r"(?s)(?P<salt>.*)!(?P<codec>exact|int8|int4)")


def with_codec(salt: str | None, codec: KVCodec) -> str:
    """Return the salt of requests whose KV is to be kept in `codec` below the tier's main memory.

    It is another salt for the engine, too: its pool does not give KV that came back from 8 or 4 bits to a request that
    asks for exact KV, nor the other way round.
    """
    return f"{salt or ''}!{codec}"


def tier_salt(kv_identity: str | None, salt: str | None) -> str:
    """Return the salt of the stored KV of requests that go to the engine's own model with `salt`.

    The end of a salt may name the codec in which KV is kept, see `with_codec`; it moves to the identity.
    """
    if kv_identity is None or not salt:
        return kv_identity or salt or ""
    if (asked := _CODEC.fullmatch(salt)) is not None:
        salt, kv_identity = asked["salt"], f"{kv_identity}!{asked['codec']}"
    if not salt:
        return kv_identity
    plain = f"{kv_identity}.{salt}"
    if len(plain) <= _MAX_SALT_CHARS and plain.isascii() and plain.isprintable() and not _FORBIDDEN & set(plain):
        return plain
    return f"{kv_identity}~{hashlib.blake2b(json.dumps(salt).encode(), digest_size=_DIGEST_BYTES).hexdigest()}"
