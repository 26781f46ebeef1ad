"""KV in fewer bytes below main memory: which codec an object gets, where its keys and values lie, and the way back.

Which codec: the one that its salt names (`pancake_vllm.identity`: `IDENTITY!int4`), otherwise the tier's own.  Where
keys and values lie: an object of two planes says so itself; those of vLLM's attention on CPUs are told by the identity
in the salt (`-v64x64`: instruction set, head size, block size).  What is not known, or does not fit the codec, is
stored as it is, and counted.

Torch and the kernels are imported when the first object is packed: a tier that keeps everything exactly needs neither.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from pancake_lmcache.counts import Counts
from pancake_lmcache.frame import CODEC_INT4, CODEC_INT8, CODEC_RAW, Buffer, Refusal, Refused
from pancake_lmcache.packing import AS_IS, Packing

if TYPE_CHECKING:
    import torch

    from pancake_kernels.kv_codec import ChunkLayout

Codec = Literal["exact", "int8", "int4"]
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)

_NUMBERS: Final[dict[Codec, int]] = {"exact": CODEC_RAW, "int8": CODEC_INT8, "int4": CODEC_INT4}
_NAMES: Final = {number: name for name, number in _NUMBERS.items()}
#: What a reader takes: nothing that lost more than it asked for.
_TAKEN: Final[dict[Codec, tuple[int, ...]]] = {
    "exact": (CODEC_RAW,),
    "int8": (CODEC_RAW, CODEC_INT8),
    "int4": (CODEC_RAW, CODEC_INT8, CODEC_INT4),
}
#: The part of a salt that the engine wrote: weights, order of a CPU's chunks, codec.  Then adapter, and the app's salt.
_IDENTITY: Final = re.compile(
    r"w[0-9a-f]{24}(?:-(?:unknown[0-9a-f]+|(?P<order>[a-z]+)(?P<head>\d+)x(?P<block>\d+)))?"
    r"(?:!(?P<codec>[a-z0-9]+))?(?![^+.~])"
)
_PLANES_AXES, _ROWS_AXES = 4, 3


class Packer:
    """Says how each object of one tier is packed.  Thread-safe."""

    def __init__(self, default: Codec, counts: Counts) -> None:
        """Keep what the tier does where nothing else is asked for.

        Args:
            default: The tier's codec.
            counts: Where objects that are stored as they are, against the wish, are counted.
        """
        self.default = default
        self._counts = counts

    def codec_of(self, salt: str) -> Codec:
        """Return which codec is asked for; one that is not known here counts as `exact`."""
        found = _IDENTITY.match(salt)
        named = found["codec"] if found is not None else None
        if named is None:
            return self.default
        return next((codec for codec in CODECS if codec == named), "exact")

    def codecs(self, salt: str) -> Packing:
        """Return a packing that is good for looking at headers."""
        return KVPacking(self.codec_of(salt), None, self._counts)

    def packing(self, salt: str, one: Any) -> Packing:
        """Return the packing of one of LMCache's memory objects."""
        codec = self.codec_of(salt)
        if codec == "exact":
            return AS_IS
        return KVPacking(codec, _place_of(salt, one), self._counts)


@dataclass(frozen=True, slots=True)
class Place:
    """Where keys and values lie in an object."""

    layout: ChunkLayout
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, payload: Buffer) -> torch.Tensor:
        """Return the object's bytes as its tensor, without a copy where they can be written."""
        import torch

        view = memoryview(payload).cast("B")
        flat = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=self.dtype)
        return flat.view(self.shape)


@dataclass(frozen=True, slots=True)
class KVPacking:
    """One object in one codec; `place` is `None` where nothing is known of it."""

    codec: Codec
    place: Place | None
    counts: Counts

    @property
    def codecs(self) -> Collection[int]:
        """Return what will do when it is read."""
        return _TAKEN[self.codec]

    def pack(self, payload: Buffer) -> tuple[int, Buffer]:
        """Return codec and body."""
        if self.codec == "exact":
            return CODEC_RAW, payload
        reason = "unknown_layout"
        if self.place is not None:
            body = self._encoded(payload, self.place)
            if isinstance(body, memoryview):
                return _NUMBERS[self.codec], body
            reason = body
        self.counts.add(f"kept_exact_{reason}")
        return CODEC_RAW, payload

    def unpack(self, codec: int, body: Buffer, payload: memoryview) -> None:
        """Fill `payload`.

        Raises:
            Refused: if the body is not KV of this object's shape, or nothing is known of the object.
        """
        if codec == CODEC_RAW:
            payload[:] = body
            return
        if self.place is None:
            raise Refused(Refusal.CODEC)
        from pancake_kernels.errors import KernelError
        from pancake_kernels.kv_codec import codec_for, read_header

        frame = memoryview(body)
        try:
            if read_header(frame).mode != _NAMES[codec]:
                raise Refused(Refusal.DAMAGED)
            keys, values = codec_for("cpu").decode(frame)
            self.place.layout.join(keys, values, self.place.view(payload))
        except KernelError as error:
            raise Refused(Refusal.DAMAGED) from error

    def _encoded(self, payload: Buffer, place: Place) -> memoryview | str:
        """Return the packed bytes, or why there are none."""
        from pancake_kernels.errors import TensorRefused, ValuesRefused
        from pancake_kernels.kv_codec import codec_for, encoded_size

        try:
            keys, values = place.layout.split(place.view(payload))
            if encoded_size(tuple(keys.shape), keys.dtype, self.codec) >= len(payload):
                return "no_gain"
            frame = codec_for("cpu").encode(keys, values, self.codec)
        except TensorRefused:
            return "unknown_layout"
        except ValuesRefused:
            return "odd_values"
        return memoryview(frame.numpy()).cast("B")


def _place_of(salt: str, one: Any) -> Place | None:
    """Return where keys and values lie in a memory object, `None` if that is not known."""
    from pancake_kernels.kv_codec import ChunkLayout, Order

    facts = getattr(one, "metadata", None)
    shapes = getattr(facts, "shapes", None) or [getattr(facts, "shape", None)]
    dtype = getattr(facts, "dtype", None)
    if len(shapes) != 1 or shapes[0] is None or dtype is None:
        return None  # several kinds of layers in one object
    shape = tuple(int(size) for size in shapes[0])
    if len(one.byte_array) != dtype.itemsize * _product(shape):
        return None
    if len(shape) == _PLANES_AXES and shape[0] == 2:
        return Place(ChunkLayout(Order.PLANES, 1, shape[3]), shape, dtype)
    found = _IDENTITY.match(salt)
    orders = {"v": Order.CPU_VEC, "a": Order.CPU_AMX}
    if len(shape) != _ROWS_AXES or found is None or found["order"] not in orders:
        return None
    head_size, block_tokens = int(found["head"]), int(found["block"])
    if not head_size or not block_tokens or shape[2] % (2 * head_size):
        return None
    layout = ChunkLayout(orders[found["order"]], shape[2] // (2 * head_size), head_size, block_tokens)
    return Place(layout, shape, dtype)


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
