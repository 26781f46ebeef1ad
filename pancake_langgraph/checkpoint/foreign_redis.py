"""Reads what langgraph-checkpoint-redis stored, document by document.

The `list` of that package cannot serve: it hands channel values back as raw JSON, takes threads for one whose ids
differ in case only or are parts of each other between commas, and ends where its search index does.  Its `get_tuple`
loses pending writes, and answers only after a set-up that changes the server.  So documents are found by their keys
and told apart by what they hold; no search index is needed.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.serde.types import ERROR, TASKS

from pancake_langgraph._errors import CheckpointError, CorruptCheckpoint
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.foreign import ForeignCheckpoint, ForeignWrite, of_other_saver
from pancake_langgraph.checkpoint.foreign_serde import allowed_by, strict_serializer
from pancake_langgraph.checkpoint.rows import Spot

#: Documents asked for at once.
_BATCH: Final = 500
_JSON_TYPE: Final = "ReJSON-RL"
_PLACE: Final = ("$.thread_id", "$.checkpoint_ns", "$.checkpoint_id")
#: What that package stores in place of the root's namespace.
_ROOT: Final = "__empty__"
#: What that package adds to a checkpoint.
_OWN_FIELDS: Final = frozenset({"type", "pending_sends"})
#: From this version on a checkpoint holds the tasks sent before it; earlier ones leave them in their parent's writes.
_TASKS_IN_CHANNELS: Final = 4

#: Keys of documents, by thread and by place in it.
_Places = dict[str, dict[Spot, list[str]]]


class RedisSource:
    """What langgraph-checkpoint-redis stored.  Values are read through its own serializer, made strict.

    Threads are those of the moment of the first question.
    """

    def __init__(self, saver: BaseCheckpointSaver[Any], codec: Codec) -> None:
        """Read from a copy of `saver`, a `RedisSaver` or `ShallowRedisSaver`; `codec` says which types may come in."""
        self._serde, self._strict = strict_serializer(saver.serde, allowed_by(codec))
        self._saver: Any = copy.copy(saver)
        self._saver.serde = self._serde
        self._places: tuple[_Places, _Places] | None = None

    def threads(self) -> Iterable[str]:
        """See `Source.threads`."""
        return sorted(self._found()[0])

    def checkpoints(self, thread_id: str) -> Iterator[ForeignCheckpoint]:
        """See `Source.checkpoints`."""
        checkpoints, write_keys = self._found()
        places, keys_of_writes = checkpoints.get(thread_id, {}), write_keys.get(thread_id, {})
        for spot in sorted(places, key=lambda spot: spot.checkpoint_id, reverse=True):
            [document] = self._documents(places[spot][-1:], "$")
            if document is None:
                raise CorruptCheckpoint(f"checkpoint {spot.checkpoint_id} went away while it was read; try again")
            with _of_document():
                [document] = document
                stored, metadata = document["checkpoint"], document["metadata"]
                parent_id = str(document.get("parent_checkpoint_id") or "") or None
                checkpoint = {key: value for key, value in stored.items() if key not in _OWN_FIELDS}
                checkpoint["channel_values"] = self._values(stored.get("channel_values") or {})
                metadata = json.loads(metadata) if isinstance(metadata, str) else dict(metadata)
            if parent_id is not None and stored.get("v", 0) < _TASKS_IN_CHANNELS:
                parent = Spot(spot.checkpoint_ns, parent_id)
                sent = self._writes(keys_of_writes.get(parent, ()))
                checkpoint["pending_sends"] = [write.value for write in sent if write.channel == TASKS]
            yield ForeignCheckpoint(
                spot,
                parent_id,
                cast("Checkpoint", checkpoint),
                cast("CheckpointMetadata", metadata),
                self._writes(keys_of_writes.get(spot, ())),
            )

    def _values(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        self._strict.refusal = None
        with of_other_saver():
            made: dict[str, Any] = self._saver._deserialize_channel_values(stored)
        self._raise_swallowed()
        return made

    def _writes(self, keys: Sequence[str]) -> tuple[ForeignWrite, ...]:
        writes = [self._write(document) for document in self._documents(keys, "$") if document is not None]
        return tuple(sorted(writes, key=lambda write: (write.task_path, write.task_id, write.idx)))

    def _write(self, documents: Any) -> ForeignWrite:
        with _of_document():
            [document] = documents
            kind, blob = document["type"], base64.b64decode(document["blob"], validate=True)
            task_path, task_id = document.get("task_path") or "", document["task_id"]
            idx, channel = int(document["idx"]), document["channel"]
            error = _error_of(blob) if channel == ERROR and kind == "json" else None
        self._strict.refusal = None
        value = self._serde.loads_typed((kind, blob)) if error is None else error
        self._raise_swallowed()
        return ForeignWrite(task_path, task_id, idx, channel, value)

    def _raise_swallowed(self) -> None:
        if self._strict.refusal is not None:
            raise self._strict.refusal

    # -- where everything lies --------------------------------------------------------------------------------------

    def _found(self) -> tuple[_Places, _Places]:
        """Return the keys of all checkpoints and of all writes; one pass through the database for each."""
        if self._places is None:
            schemas = (self._saver.checkpoints_schema, self._saver.writes_schema)
            checkpoints, writes = (self._by_place(schema["index"]["prefix"]) for schema in schemas)
            self._places = checkpoints, writes
        return self._places

    def _by_place(self, prefix: str) -> _Places:
        pattern = "".join(f"\\{char}" if char in "*?[]\\" else char for char in prefix) + "*"
        with of_other_saver():
            client = self._saver.checkpoints_index.client
            keys = sorted({_text(key) for key in client.scan_iter(pattern, count=_BATCH, _type=_JSON_TYPE)})
        found: _Places = {}
        for key, place in zip(keys, self._documents(keys, *_PLACE), strict=True):
            if not isinstance(place, Mapping) or not all(place.get(path) for path in _PLACE):
                continue  # gone since, or of somebody else
            thread_id, checkpoint_ns, checkpoint_id = (str(place[path][0]) for path in _PLACE)
            spot = Spot("" if checkpoint_ns == _ROOT else checkpoint_ns, checkpoint_id)
            found.setdefault(thread_id, {}).setdefault(spot, []).append(key)
        return found

    def _documents(self, keys: Sequence[str], *paths: str) -> Iterator[Any]:
        """Yield what lies under each key at some paths; `None` where there is no document."""
        for at in range(0, len(keys), _BATCH):
            with of_other_saver(), self._saver.checkpoints_index.client.pipeline(transaction=False) as pipeline:
                for key in keys[at : at + _BATCH]:
                    pipeline.json().get(key, *paths)
                documents = pipeline.execute()
            yield from documents


def _error_of(blob: bytes) -> str | None:
    """Return the text that other savers store of an error; that package stores the class, and of the rest nothing."""
    stored = json.loads(blob)
    if isinstance(stored, dict) and stored.get("type") == "constructor":
        return f"{stored['id'][-1]}()"
    return None


@contextlib.contextmanager
def _of_document() -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as exc:
        raise CorruptCheckpoint(f"a document is damaged ({type(exc).__name__})") from exc


def _text(key: bytes | str) -> str:
    return key if isinstance(key, str) else key.decode()
