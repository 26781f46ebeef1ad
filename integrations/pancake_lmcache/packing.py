"""How the bytes of an object become the body that is stored, and back.  No torch in here; see `kv_packing`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from pancake_lmcache.frame import CODEC_RAW, Buffer


class Packing(Protocol):
    """How one object is packed.  Thread-safe."""

    @property
    def codecs(self) -> Collection[int]:
        """Return the codecs of `frame` that will do when it is read: none that loses more than was asked for."""
        ...

    def pack(self, payload: Buffer) -> tuple[int, Buffer]:
        """Return codec and body; whatever cannot be packed is stored as it is.  Never raises for what it holds."""
        ...

    def unpack(self, codec: int, body: Buffer, payload: memoryview) -> None:
        """Fill `payload` from a body whose seal was right.

        Raises:
            Refused: if it cannot be unpacked.
        """
        ...


class AsIs:
    """The body is the payload."""

    codecs: Collection[int] = (CODEC_RAW,)

    def pack(self, payload: Buffer) -> tuple[int, Buffer]:
        """Return the payload itself."""
        return CODEC_RAW, payload

    def unpack(self, codec: int, body: Buffer, payload: memoryview) -> None:
        """Copy it."""
        payload[:] = body


AS_IS: Final = AsIs()
