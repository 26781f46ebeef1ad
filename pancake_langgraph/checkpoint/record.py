"""What one checkpoint row's body holds, and where each row is sealed to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import ormsgpack

from pancake_langgraph._errors import CorruptCheckpoint
from pancake_langgraph.checkpoint.elements import Ref
from pancake_langgraph.checkpoint.rows import CheckpointRow, WriteRow

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


def place_of_row(thread_id: str, row: CheckpointRow) -> bytes:
    """Return what a checkpoint's body is sealed to: a moved, renamed or re-parented row does not open."""
    return ormsgpack.packb(["c", thread_id, *row.spot, row.parent_id])


def place_of_write(thread_id: str, row: WriteRow) -> bytes:
    """Return what a write's body is sealed to."""
    return ormsgpack.packb(["w", thread_id, *row.spot, row.task_path, row.task_id, row.idx, row.channel])


def place_of_element(thread_id: str, digest: bytes) -> bytes:
    """Return what an element is sealed to."""
    return ormsgpack.packb(["e", thread_id, digest])
