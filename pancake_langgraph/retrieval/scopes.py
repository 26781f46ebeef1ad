"""What one of several agents may read and write: whole branches of namespaces, and a list of single items."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pancake_langgraph._errors import ConfigError, InvalidItem
from pancake_langgraph.retrieval.base import ItemId, Namespace

_ROOT: tuple[Namespace, ...] = ((),)


@dataclass(frozen=True, slots=True)
class Scope:
    """Branches that may be read and written; `allowed` are the only items that may be read, `None` allows all."""

    reads: tuple[Namespace, ...] = _ROOT
    writes: tuple[Namespace, ...] = _ROOT
    allowed: frozenset[ItemId] | None = None

    def narrowed(
        self,
        reads: Iterable[Namespace] | None,
        writes: Iterable[Namespace] | None,
        allowed: Collection[tuple[Namespace, str]] | None,
    ) -> Scope:
        """Return a scope within this one; `None` keeps what this one has, and `writes` defaults to what may be read.

        Raises:
            ConfigError: if a branch is no tuple of texts, or lies outside of this scope.
        """
        new_reads = self.reads if reads is None else _branches(reads, "reads", self.reads)
        if writes is not None:
            new_writes = _branches(writes, "writes", self.writes)
        else:
            new_writes = tuple(one for branch in new_reads for one in overlap(self.writes, branch))
        if allowed is None:
            return Scope(new_reads, new_writes, self.allowed)
        ids = frozenset(ItemId(tuple(namespace), key) for namespace, key in allowed)
        return Scope(new_reads, new_writes, ids if self.allowed is None else ids & self.allowed)

    def within(self, prefix: Namespace) -> tuple[Namespace, ...]:
        """Return what of a branch may be read; empty when nothing of it."""
        return overlap(self.reads, prefix)

    def shows(self, item_id: ItemId) -> bool:
        """Return whether an item may be read, if it is there."""
        return _covers(self.reads, item_id.namespace) and (self.allowed is None or item_id in self.allowed)

    def check_write(self, namespace: Namespace) -> None:
        """Check that a namespace may be written.

        Raises:
            InvalidItem: if not.
        """
        if not _covers(self.writes, namespace):
            raise InvalidItem(
                f"namespace {'/'.join(map(str, namespace))[:120]!r} lies outside of what this view may write: "
                f"{', '.join('/'.join(one) or 'everything' for one in self.writes)[:200] or 'nothing'}; nothing was "
                "stored; write through a view that has it in `writes`"
            )


def overlap(branches: Iterable[Namespace], prefix: Namespace) -> tuple[Namespace, ...]:
    """Return what the branches have in common with one more."""
    found = []
    for branch in branches:
        if prefix[: len(branch)] == branch:
            return (prefix,)
        if branch[: len(prefix)] == prefix:
            found.append(branch)
    return tuple(found)


def _covers(branches: Iterable[Namespace], namespace: Namespace) -> bool:
    return any(namespace[: len(branch)] == branch for branch in branches)


def _branches(given: Iterable[Namespace], name: str, outer: tuple[Namespace, ...]) -> tuple[Namespace, ...]:
    """Return branches that lie within others."""
    found = []
    for branch in given:
        if not isinstance(branch, tuple | list) or not all(isinstance(label, str) and label for label in branch):
            raise ConfigError(f"{name}: got {branch!r}, allowed are namespaces such as [('team',), ('agents', 'ann')]")
        if not _covers(outer, tuple(branch)):
            raise ConfigError(f"{name}: got {branch!r}, which lies outside of the view that this one is made from")
        found.append(tuple(branch))
    return tuple(found)
