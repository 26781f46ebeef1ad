"""What one checkpoint row's body holds, and where each row is sealed to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ormsgpack

from pancake_langgraph._errors import CorruptCheckpoint
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.elements import Ref
from pancake_langgraph.checkpoint.rows import HASH_BYTES, CheckpointRow, WriteRow

BODY_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Record:
    """A checkpoint without its values: `fields` and `metadata` encoded, `values` as references by channel."""

    fields: bytes
    values: Mapping[str, Ref]
    metadata: bytes

    def packed(self) -> bytes:
        """Return the body."""
        values = {channel: ref.packed() for channel, ref in self.values.items()}
        return ormsgpack.packb([BODY_FORMAT, self.fields, values, self.metadata], option=ormsgpack.OPT_NON_STR_KEYS)

    @staticmethod
    def unpacked(body: bytes) -> Record:
        """Undo `packed`.

        Raises:
            CorruptCheckpoint: if it is not one.
        """
        try:
            number, fields, values, metadata = ormsgpack.unpackb(body)
            if number == BODY_FORMAT and isinstance(fields, bytes) and isinstance(metadata, bytes):
                return Record(fields, {str(key): Ref.unpacked(ref) for key, ref in values.items()}, metadata)
        except (ormsgpack.MsgpackDecodeError, TypeError, ValueError, AttributeError):
            pass
        raise CorruptCheckpoint("a checkpoint's body is damaged, or of a later format; restore the store from a copy")


def decoded(codec: Codec, data: bytes, what: str) -> dict[str, Any]:
    """Return the fields or the metadata of a record, as `what` names them.

    Raises:
        CorruptCheckpoint: if it is not a dict.
        StateTypeError: if a type in it is not allowed.
    """
    found = codec.decode(data, channel=what)
    if type(found) is not dict:
        raise CorruptCheckpoint(f"{what}: a {type(found).__name__} in place of a dict; restore the store from a copy")
    return found


def place_of_row(thread_id: str, row: CheckpointRow) -> bytes:
    """Return what a checkpoint's body is sealed to: a moved, renamed or re-parented row does not open."""
    return ormsgpack.packb(["c", thread_id, *row.spot, row.parent_id])


def place_of_write(thread_id: str, row: WriteRow) -> bytes:
    """Return what a write's body is sealed to."""
    return ormsgpack.packb(["w", thread_id, *row.spot, row.task_path, row.task_id, row.idx, row.channel])


def place_of_element(thread_id: str, digest: bytes) -> bytes:
    """Return what an element is sealed to."""
    return ormsgpack.packb(["e", thread_id, digest])


def places_of_elements(thread_id: str) -> Callable[[bytes], bytes]:
    """Return a function that does what `place_of_element` does, for many elements of one thread."""
    # A hash has one length, so only the last bytes differ.
    front = place_of_element(thread_id, bytes(HASH_BYTES))[:-HASH_BYTES]
    return front.__add__
