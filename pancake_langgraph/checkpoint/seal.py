"""Seals rows: bound to their thread and place, encrypted where keys are given.

Without keys a sealed row carries a checksum over its place and content, which finds damage and rows that were moved by
accident.  With keys it is AES-256-GCM (NIST SP 800-38D) with the place as associated data, which finds any change.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint
from pancake_langgraph.checkpoint.rows import HASH_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_PLAIN: Final = b"\x00"
_SEALED: Final = b"\x01"
_CHECK_BYTES: Final = 8
_KEY_ID_BYTES: Final = 4
_NONCE_BYTES: Final = 12
KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a ring: the cipher, the name written into rows, and the secret behind content hashes."""

    key_id: bytes
    cipher: AESGCM = field(repr=False)
    hash_secret: bytes = field(repr=False)


class Seal:
    """Seals and opens with a ring of keys: the first seals, all open.  Immutable and thread-safe."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """Take keys of 32 bytes, newest first; none means rows are not encrypted.

        Raises:
            ConfigError: if a key is not 32 bytes long, or the package `cryptography` is missing.
        """
        self._keys = tuple(_key(secret) for secret in keys)
        self._by_id = {key.key_id: key for key in self._keys}

    @property
    def encrypts(self) -> bool:
        """Whether rows are encrypted."""
        return bool(self._keys)

    def digest(self, plain: bytes) -> bytes:
        """Return the content hash; with keys it tells nothing about the content to those who have none."""
        secret = self._keys[0].hash_secret if self._keys else b""
        return hashlib.blake2b(plain, digest_size=HASH_BYTES, key=secret).digest()

    def seal(self, plain: bytes, place: bytes) -> bytes:
        """Return `plain` sealed for `place`."""
        if not self._keys:
            return _PLAIN + _checksum(plain, place) + plain
        key, nonce = self._keys[0], os.urandom(_NONCE_BYTES)
        return _SEALED + key.key_id + nonce + key.cipher.encrypt(nonce, plain, place)

    def open(self, data: bytes, place: bytes, *, what: str) -> bytes:
        """Return what was sealed for `place`.

        Raises:
            CorruptCheckpoint: if it is damaged, was sealed for another place, with an unknown key, or not at all
                although keys are given; the message begins with `what`.
        """
        if data[:1] == _SEALED:
            return self._open_sealed(data, place, what)
        if data[:1] != _PLAIN or len(data) < 1 + _CHECK_BYTES:
            raise CorruptCheckpoint(f"{what}: stored bytes are not a row of this saver; restore the store from a copy")
        if self._keys:
            raise CorruptCheckpoint(
                f"{what}: stored in plain although encryption is on; a row was planted, or the thread is older than "
                "the key: open it without `keys` and copy it over with `pancake threads export` and `import`"
            )
        plain = data[1 + _CHECK_BYTES :]
        if not hmac.compare_digest(data[1 : 1 + _CHECK_BYTES], _checksum(plain, place)):
            raise CorruptCheckpoint(
                f"{what}: stored bytes are damaged or belong elsewhere; restore the store from a copy"
            )
        return plain

    def _open_sealed(self, data: bytes, place: bytes, what: str) -> bytes:
        from cryptography.exceptions import InvalidTag

        head = 1 + _KEY_ID_BYTES
        key = self._by_id.get(data[1:head])
        if key is None:
            raise CorruptCheckpoint(
                f"{what}: encrypted with key {data[1:head].hex()}, known are "
                f"{[k.key_id.hex() for k in self._keys]}; add the old key behind the new one in `keys`"
            )
        try:
            return key.cipher.decrypt(data[head : head + _NONCE_BYTES], data[head + _NONCE_BYTES :], place)
        except (InvalidTag, ValueError) as exc:
            raise CorruptCheckpoint(
                f"{what}: stored bytes were changed or moved from another thread; restore the store from a copy"
            ) from exc


def _checksum(plain: bytes, place: bytes) -> bytes:
    return hashlib.blake2b(len(place).to_bytes(4, "big") + place + plain, digest_size=_CHECK_BYTES).digest()


def _key(secret: bytes) -> Key:
    if not isinstance(secret, bytes) or len(secret) != KEY_BYTES:
        got = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ConfigError(f"keys: got {got}, allowed are {KEY_BYTES} bytes each, as `os.urandom({KEY_BYTES})` gives")
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as exc:
        raise ConfigError("keys: encryption needs `pip install 'pancake-langgraph[encrypt]'`") from exc
    key_id = hashlib.blake2b(secret, digest_size=_KEY_ID_BYTES, person=b"pancake-id").digest()
    hash_secret = hashlib.blake2b(secret, digest_size=KEY_BYTES, person=b"pancake-hash").digest()
    return Key(key_id, AESGCM(secret), hash_secret)
