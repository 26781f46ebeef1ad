"""What lies in a tier: by model and KV identity, so that what no engine asks for any more is found and removed.

An identity names weights, number formats and adapter (`pancake_vllm.identity`).  When other weights come under an old
name, what the old ones computed stays where it is, takes room, and is never read again: it is superseded.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from pancake_lmcache.frame import Refused, kv_identity_of, read_header
from pancake_lmcache.space import OBJECT_SUFFIX, Space

#: Longest header: more than any label needs.
_HEAD_BYTES: Final = 4096
#: How LMCache's plain adapter names files: model, rank, group, hash, and maybe the salt.
_PLAIN_NAME: Final = re.compile(r"(?P<model>[^@]+)@0x[0-9a-f]{8,}@[0-9a-f]+@[0-9a-f]+(@(?P<salt>[^@]*))?\.data")
#: How LMCache names values in Redis.
_KEY_NAME: Final = re.compile(rb"(?P<model>[^@]+)@[0-9a-fx]+@[0-9a-f]+@[0-9a-f]+(@(?P<salt>[^@]*))?")
_SCAN_COUNT: Final = 500


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object.  `used_at_s` is when it was last used, in seconds since 1970; `sealed` whether it proves itself."""

    name: str
    model: str
    kv_identity: str
    num_bytes: int
    used_at_s: float
    sealed: bool


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """All objects of one model and KV identity (empty: of an engine that names none)."""

    model: str
    kv_identity: str
    num_objects: int
    num_bytes: int
    used_at_s: float
    superseded: bool


class Store(Protocol):
    """A tier that can be listed and cleaned."""

    def objects(self) -> Iterator[StoredObject]:
        """Return everything that is LMCache's or ours.

        Raises:
            OSError: if it cannot be read.
        """
        ...

    def remove(self, names: Iterable[str]) -> int:
        """Remove objects; return how many were there.

        Raises:
            OSError: if one cannot be removed.
        """
        ...


class FolderStore:
    """A folder of the disk tier.  Safe beside running servers."""

    def __init__(self, root: Path) -> None:
        """Name the folder.

        Raises:
            NotADirectoryError: if it is none.
        """
        if not root.is_dir():
            raise NotADirectoryError(f"{root}: got no folder, allowed is the folder of a disk tier")
        self._root = root

    def objects(self) -> Iterator[StoredObject]:
        """Return what lies in the folder; files of other programs are left out."""
        with os.scandir(self._root) as entries:
            for entry in entries:
                try:
                    facts = entry.stat(follow_symlinks=False)
                    found = self._object(entry.name, facts) if stat.S_ISREG(facts.st_mode) else None
                except FileNotFoundError:  # evicted meanwhile
                    continue
                if found is not None:
                    yield found

    def remove(self, names: Iterable[str]) -> int:
        """Remove files, and tell the folder's books."""
        space = Space(self._root)
        return sum(space.remove(self._root / name) is not None for name in names)

    def _object(self, name: str, facts: os.stat_result) -> StoredObject | None:
        size, used_at_s = facts.st_size, facts.st_mtime
        if name.endswith(OBJECT_SUFFIX):
            with (self._root / name).open("rb") as file:
                head = file.read(_HEAD_BYTES)
            try:
                header = read_header(head)
            except Refused:
                return StoredObject(name, "unreadable", "", size, used_at_s, sealed=False)
            return StoredObject(name, header.model, header.kv_identity, size, used_at_s, sealed=True)
        if plain := _PLAIN_NAME.fullmatch(name):
            model = plain["model"].replace("-SEP-", "/")
            return StoredObject(name, model, kv_identity_of(plain["salt"] or ""), size, used_at_s, sealed=False)
        return None


class RedisStore:
    """A Redis or Valkey server that several engines share.  Looks at all its keys, some hundred at a time."""

    def __init__(self, client: Any, *, now_s: Callable[[], float]) -> None:
        """Use a client of redis-py that answers bytes; `now_s` tells the time in seconds since 1970."""
        self._client = client
        self._now_s = now_s

    def objects(self) -> Iterator[StoredObject]:
        """Return LMCache's values; other keys are left out."""
        for key in self._client.scan_iter(count=_SCAN_COUNT):
            found = _KEY_NAME.fullmatch(key)
            if found is None:
                continue
            size, idle_s = self._client.strlen(key), self._client.object("idletime", key)
            if idle_s is None:  # evicted meanwhile
                continue
            salt = (found["salt"] or b"").decode("utf-8", "replace")
            model = found["model"].decode("utf-8", "replace")
            name = key.decode("utf-8", "surrogateescape")
            yield StoredObject(name, model, kv_identity_of(salt), size, self._now_s() - idle_s, sealed=True)

    def remove(self, names: Iterable[str]) -> int:
        """Remove values."""
        return sum(int(self._client.unlink(name.encode("utf-8", "surrogateescape"))) for name in names)


def grouped(objects: Iterable[StoredObject]) -> list[StoredGroup]:
    """Return the groups of objects, by model, what was used last first.  Pure.

    Of the identities of a model that differ in their weights, all but the one used last are superseded; objects of
    engines that name none never are.
    """
    groups: dict[tuple[str, str], list[StoredObject]] = {}
    for one in objects:
        groups.setdefault((one.model, one.kv_identity), []).append(one)
    used_at_s = {key: max(one.used_at_s for one in found) for key, found in groups.items()}
    latest: dict[str, tuple[float, str]] = {}
    for (model, kv_identity), when_s in used_at_s.items():
        if kv_identity:
            latest[model] = max(latest.get(model, (0.0, "")), (when_s, _weights(kv_identity)))
    result = [
        StoredGroup(
            model,
            kv_identity,
            len(found),
            sum(one.num_bytes for one in found),
            used_at_s[model, kv_identity],
            superseded=bool(kv_identity) and _weights(kv_identity) != latest[model][1],
        )
        for (model, kv_identity), found in groups.items()
    ]
    return sorted(result, key=lambda group: (group.model, -group.used_at_s))


def chosen(
    objects: Iterable[StoredObject], *, keep: Collection[str], unused_since_s: float | None
) -> list[StoredObject]:
    """Return what to remove: of superseded identities that are not in `keep`, or not used since `unused_since_s`."""
    everything = list(objects)
    gone = {(group.model, group.kv_identity) for group in grouped(everything) if group.superseded}
    return [
        one
        for one in everything
        if one.kv_identity not in keep
        and _weights(one.kv_identity) not in keep
        and ((one.model, one.kv_identity) in gone if unused_since_s is None else one.used_at_s < unused_since_s)
    ]


def _weights(kv_identity: str) -> str:
    """Return the part of an identity that names the weights: adapters, codecs and machines supersede nothing."""
    return re.split(r"[-+!]", kv_identity, maxsplit=1)[0]
