"""How a stored object looks: a header that names the object it is, and a seal over header and body.

Pure; no I/O, thread-safe.  Without a key the seal is a checksum (XXH3, 128 bits) and finds damage and mix-ups, not an
attacker, who can compute checksums too.  With a key it is AES-256-GCM and finds any change.  Either way the object's
identity is sealed with it: a body under another object's name is refused, whether that is another prompt's or another
tenant's.

Layout, little endian: magic, format version, seal, codec, length of the model name, reserved, raw length, body length,
key id, identity digest, nonce, tag, model name, body.  The model name is there for people who list or clean a folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Buffer = bytes | bytearray | memoryview

VERSION: Final = 1
#: How a body is packed: the payload as it is, or a frame of `pancake_kernels.kv_codec` in 8 or 4 bits.  A codec that
#: the reader does not ask for is refused.
CODEC_RAW: Final = 0
CODEC_INT8: Final = 1
CODEC_INT4: Final = 2
KEY_BYTES: Final = 32

#: How `pancake_vllm.identity` begins a salt: weights, and maybe an order of blocks, a codec and an adapter.
_KV_IDENTITY: Final = re.compile(r"w[0-9a-f]{24}(-[0-9a-z]+)?(![0-9a-z]+)?(\+[0-9a-z]+)?(?=[.~]|$)")

_MAGIC: Final = b"\x89PANKV\r\n"
_PLAIN, _SEALED = 1, 2
_HEAD: Final = struct.Struct("<8sHBBHHQQ8s32s12s16s")
_TAG_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_TAG_AT: Final = _HEAD.size - _TAG_BYTES
_MAX_NAME_BYTES: Final = 1024
_NO_KEY_ID: Final = bytes(8)
_NO_NONCE: Final = bytes(_NONCE_BYTES)


class Refusal(StrEnum):
    """Why an object is not served."""

    FOREIGN = "foreign"
    """It does not begin as ours do."""
    VERSION = "version"
    """It has another format version."""
    CODEC = "codec"
    """Its body is packed in a way that is not known here, or with a greater loss than was asked for."""
    KEY = "key"
    """It was sealed with another key, or without one although one is set, or the other way round."""
    IDENTITY = "identity"
    """It is whole, but another object: of another prompt, model, worker or tenant."""
    SIZE = "size"
    """It is shorter or longer than it says, or not as long as what is asked for."""
    DAMAGED = "damaged"
    """Its seal does not fit its content."""

    @property
    def may_be_of_use(self) -> bool:
        """Whether another key or release could open it: then it is only replaced, not removed."""
        return self in (Refusal.VERSION, Refusal.CODEC, Refusal.KEY)


class Refused(Exception):
    """An object that is not served; `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        """Keep the reason."""
        super().__init__(refusal.value)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a stored object the one that is asked for."""

    model: str
    kv_rank: int
    object_group: int
    chunk_hash: bytes
    salt: str

    def digest(self) -> bytes:
        """Return 32 bytes that differ whenever any field does."""
        hasher = hashlib.blake2b(digest_size=32, person=b"pancake-kv-obj")
        rank, group = str(self.kv_rank).encode(), str(self.object_group).encode()
        for part in (_utf8(self.model), rank, group, self.chunk_hash, _utf8(self.salt)):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        return hasher.digest()

    def name(self) -> str:
        """Return a file name stem: 40 hexadecimal digits, whatever the fields contain."""
        return self.digest()[:20].hex()


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says; nothing of it is proven before `Sealer.open`."""

    version: int
    seal: int
    codec: int
    raw_bytes: int
    body_bytes: int
    key_id: bytes
    identity: bytes
    nonce: bytes
    tag: bytes
    model: str
    kv_identity: str


class Sealer:
    """Seals and opens objects, with one key or with none.  Immutable and thread-safe."""

    def __init__(self, key: bytes | None = None) -> None:
        """Take a key of 32 bytes, or none for checksums.

        Raises:
            ValueError: if the key has another length, or there is nothing to encrypt with.
        """
        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"key: got {len(key)} bytes, allowed are {KEY_BYTES}")
        if key is not None and find_spec("cryptography") is None:  # told now, and not with every object
            raise ValueError("key: got one without the package cryptography; install pancake-langgraph[encrypt]")
        self._key = key
        self._key_id = _NO_KEY_ID if key is None else hashlib.blake2b(b"key id", key=key, digest_size=8).digest()

    @property
    def encrypts(self) -> bool:
        """Whether bodies are encrypted; otherwise a body is its payload."""
        return self._key is not None

    @staticmethod
    def header_bytes(identity: Identity) -> int:
        """Return how long the header of this object is."""
        return _HEAD.size + len(_label(identity))

    def seal(
        self, identity: Identity, payload: Buffer, *, codec: int = CODEC_RAW, raw_bytes: int | None = None
    ) -> tuple[bytes, Buffer]:
        """Return header and body.  Without a key the body is `payload` itself, not a copy.

        Args:
            identity: Whose it is.
            payload: What is to be stored, packed already.
            codec: How it is packed.
            raw_bytes: How long it was before; `None`: as it is.
        """
        label, size, digest = _label(identity), len(payload), identity.digest()
        raw_bytes = size if raw_bytes is None else raw_bytes
        seal, nonce = (_PLAIN, _NO_NONCE) if self._key is None else (_SEALED, os.urandom(_NONCE_BYTES))
        fields = (_MAGIC, VERSION, seal, codec, len(label), 0, raw_bytes, size, self._key_id, digest, nonce)
        bound = _HEAD.pack(*fields, b"")[:_TAG_AT] + label
        if self._key is None:
            return bound[:_TAG_AT] + _checksum(bound, payload) + label, payload
        packed = self._cipher(digest).encrypt(nonce, bytes(payload), bound)
        return bound[:_TAG_AT] + packed[-_TAG_BYTES:] + label, memoryview(packed)[:-_TAG_BYTES]

    def check_header(
        self, identity: Identity, head: Buffer, *, total_bytes: int, codecs: Collection[int] = (CODEC_RAW,)
    ) -> Header:
        """Return what the header says if it may belong to this object; reads no body and proves nothing.

        Args:
            identity: The object that is asked for.
            head: The first bytes, at least as many as `header_bytes` gives when the object is that long.
            total_bytes: How long the whole object is, header and body.
            codecs: The ways of packing that will do.

        Raises:
            Refused: if it cannot be this object.
        """
        header = read_header(head)
        if header.seal != (_SEALED if self.encrypts else _PLAIN) or header.key_id != self._key_id:
            raise Refused(Refusal.KEY if header.seal in (_PLAIN, _SEALED) else Refusal.DAMAGED)
        if header.codec not in codecs:
            raise Refused(Refusal.CODEC)
        if header.identity != identity.digest():
            raise Refused(Refusal.IDENTITY)
        body_bytes = total_bytes - self.header_bytes(identity)
        is_packed = header.codec != CODEC_RAW  # and shorter for it: otherwise it would have been stored as it is
        raw_fits = header.raw_bytes > body_bytes if is_packed else header.raw_bytes == body_bytes
        if header.body_bytes != body_bytes or not raw_fits:
            raise Refused(Refusal.SIZE)
        return header

    def open(self, identity: Identity, head: Buffer, body: Buffer, *, codecs: Collection[int] = (CODEC_RAW,)) -> Buffer:
        """Return what was sealed, packed as the header says.  Without a key that is `body` itself.

        Args:
            identity: The object that is asked for.
            head: The header, `header_bytes` long.
            body: All that follows it.
            codecs: The ways of packing that will do.

        Raises:
            Refused: if it is not exactly what was sealed for this object.
        """
        header = self.check_header(identity, head, total_bytes=len(head) + len(body), codecs=codecs)
        bound = bytes(head[:_TAG_AT]) + bytes(head[_HEAD.size :])
        if self._key is None:
            if _checksum(bound, body) != header.tag:
                raise Refused(Refusal.DAMAGED)
            return body
        from cryptography.exceptions import InvalidTag

        try:
            plain: bytes = self._cipher(header.identity).decrypt(header.nonce, bytes(body) + header.tag, bound)
        except InvalidTag as error:
            raise Refused(Refusal.DAMAGED) from error
        return plain

    def _cipher(self, identity: bytes) -> Any:
        """Return the cipher of one object: a key of its own, so that random nonces do not meet."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        secret = hashlib.blake2b(identity, key=self._key or b"", digest_size=KEY_BYTES, person=b"pancake-kv-seal")
        return AESGCM(secret.digest())


def read_header(head: Buffer) -> Header:
    """Return what the first bytes of an object say, whoever's it is.

    Raises:
        Refused: if they are not a header, or one of another format version.
    """
    view = memoryview(head)
    if bytes(view[: len(_MAGIC)]) != _MAGIC[: len(view)]:
        raise Refused(Refusal.FOREIGN)
    if len(view) < _HEAD.size:
        raise Refused(Refusal.SIZE)
    fields: Sequence[Any] = _HEAD.unpack_from(view)
    _, version, seal, codec, name_bytes, _, raw_bytes, body_bytes, key_id, identity, nonce, tag = fields
    if version != VERSION:
        raise Refused(Refusal.VERSION)
    label = bytes(view[_HEAD.size : _HEAD.size + name_bytes]).decode("utf-8", "replace")
    model, _, kv_identity = label.partition("@")  # LMCache has no `@` in a model's name
    return Header(version, seal, codec, raw_bytes, body_bytes, key_id, identity, nonce, tag, model, kv_identity)


def kv_identity_of(salt: str) -> str:
    """Return the part of a salt that names weights and adapter, as `pancake_vllm.identity` writes it; else nothing."""
    found = _KV_IDENTITY.match(salt)
    return found.group() if found else ""


def read_key_file(path: Path) -> bytes:
    """Return the key in a file: 32 bytes, or 64 hexadecimal digits.

    Raises:
        ValueError: if the file holds anything else, or cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"key_file: cannot read {path} ({error.strerror}); allowed is a readable file") from error
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"key_file: got {len(data)} bytes in {path}, allowed are {KEY_BYTES} bytes or {2 * KEY_BYTES} hexadecimal "
            f"digits; make one with `openssl rand -hex {KEY_BYTES}`"
        )
    return key


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _label(identity: Identity) -> bytes:
    """Return what the file tells people: model and KV identity; the tenant's salt is nobody's business."""
    kv_identity = kv_identity_of(identity.salt)
    return _utf8(f"{identity.model}@{kv_identity}" if kv_identity else identity.model)[:_MAX_NAME_BYTES]


def _checksum(bound: bytes, body: Buffer) -> bytes:
    hasher = xxhash.xxh3_128(bound)
    hasher.update(body)
    return hasher.digest()
