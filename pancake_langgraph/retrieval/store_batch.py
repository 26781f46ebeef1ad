"""Carries out a planned batch of a LangGraph store's operations on an engine: reads first, then writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from langgraph.store.base import ListNamespacesOp, Result, SearchOp

from pancake_langgraph.retrieval.base import (
    Hit,
    Item,
    ItemId,
    Namespace,
    Query,
    Vector,
    View,
)
from pancake_langgraph.retrieval.desk import Desk
from pancake_langgraph.retrieval.records import (
    namespace_matches,
    record_filter,
    record_value,
    search_item,
    store_item,
    ttl_of,
)
from pancake_langgraph.retrieval.scopes import Scope
from pancake_langgraph.retrieval.store_plan import StorePlan

#: An item's time is not moved on for less than this share of it, nor for less than a second.
_TOUCH_SHARE, _TOUCH_S = 0.01, 1.0


@dataclass(frozen=True)
class StoreBatch:
    """One batch: what is to be done, and the vectors of its texts and queries.

    `write_lock` is held while what is stored decides what will be: times of creation.  It is the same for all who write
    to the engine through one store.
    """

    engine: Desk
    scope: Scope
    plan: StorePlan
    vectors: Sequence[Vector]
    queries: Mapping[str, Vector]
    clock: Callable[[], float]
    write_lock: threading.Lock

    @cached_property
    def questions(self) -> list[Query]:
        """What the engine has to be asked by meaning, before `run`."""
        return [Query(self.queries[op.query or ""], view, op.limit, op.offset) for _, op, view in self._by_meaning]

    @property
    def prefixes(self) -> list[Namespace]:
        """The namespaces in which `questions` were asked."""
        return [tuple(op.namespace_prefix) for _, op, _ in self._by_meaning]

    def is_done(self, hits: Sequence[Sequence[Hit]]) -> bool:
        """Return whether these hits are all that is wanted, so that `run` asks the engine nothing more."""
        plan = self.plan
        return (
            not (plan.gets or plan.listings or plan.writes)
            and len(hits) == len(plan.searches)
            and all(len(found) == question.limit for found, question in zip(hits, self.questions, strict=True))
            and all(hit.item.expires_at_s is None for found in hits for hit in found)
        )

    def run(self, hits: Sequence[Sequence[Hit]]) -> list[Result]:
        """Do everything and return results in the order of the batch; `hits` answer `questions`.  Blocks.

        Raises:
            RetrievalError: if the engine does not do it.
        """
        results: list[Result] = [None] * self.plan.num_ops
        used: list[Item] = []
        for place, item in self._gets():
            results[place] = store_item(item)
            used.append(item)
        for place, found in self._searches(hits):
            results[place] = [search_item(item, score) for item, score in found]
            used += [item for item, _ in found]
        for place, op in self.plan.listings:
            results[place] = self._namespaces(op)
        if used:
            self._refresh(used)
        if self.plan.writes:
            self._write()
        return results

    # -- reads ----------------------------------------------------------------------------------------------------

    def _gets(self) -> Iterator[tuple[int, Item]]:
        """Yield what is there, with its place; times that are not to be moved on are taken off."""
        wanted = [(place, ItemId(tuple(op.namespace), op.key), op.refresh_ttl) for place, op in self.plan.gets]
        visible = [one for one in wanted if self.scope.shows(one[1])]
        if not visible:
            return
        for (place, _, refresh), item in zip(visible, self.engine.get([one[1] for one in visible]), strict=True):
            if item is not None:
                yield place, item if refresh else _at_rest(item)

    @cached_property
    def _asked(self) -> list[tuple[int, SearchOp, View]]:
        return [(place, op, self._view(op)) for place, op in self.plan.searches]

    @property
    def _by_meaning(self) -> list[tuple[int, SearchOp, View]]:
        return [(place, op, view) for place, op, view in self._asked if op.query and self.queries]

    def _searches(self, hits: Sequence[Sequence[Hit]]) -> Iterator[tuple[int, list[tuple[Item, float | None]]]]:
        """Yield what was found, with its place."""
        answers = dict(zip((place for place, _, _ in self._by_meaning), hits, strict=True))
        for place, op, view in self._asked:
            found: list[tuple[Item, float | None]]
            if place in answers:
                found = self._filled(op, view, answers[place])
            else:
                found = [(item, None) for item in self.engine.items(view, limit=op.limit, offset=op.offset)]
            yield place, found if op.refresh_ttl else [(_at_rest(item), score) for item, score in found]

    def _view(self, op: SearchOp) -> View:
        prefixes = self.scope.within(tuple(op.namespace_prefix))
        return View(prefixes, record_filter(op.filter), self.scope.allowed)

    def _filled(self, op: SearchOp, view: View, hits: Sequence[Hit]) -> list[tuple[Item, float | None]]:
        """Return hits, and behind them, where there are too few, items that have no vectors to be found by."""
        found: list[tuple[Item, float | None]] = [(hit.item, hit.score) for hit in hits]
        if len(found) == op.limit:
            return found
        scored = hits
        if op.offset:
            [scored] = self.engine.search([Query(self.queries[op.query or ""], view, op.offset + op.limit)])
        known = {hit.item.id for hit in scored}
        rest = [item for item in self.engine.items(view) if item.id not in known]
        start = max(0, op.offset - len(known))
        return found + [(item, None) for item in rest[start : start + op.limit - len(found)]]

    def _namespaces(self, op: ListNamespacesOp) -> list[Namespace]:
        if self.scope.allowed is None:
            found = [one for one in self.engine.namespaces() if self.scope.within(one) == (one,)]
        else:
            found = [
                item.id.namespace for item in self.engine.items(View(self.scope.reads, allowed=self.scope.allowed))
            ]
        matching = (one for one in found if namespace_matches(one, op.match_conditions or ()))
        return sorted({one[: op.max_depth] for one in matching})[op.offset : op.offset + op.limit]

    # -- writes ---------------------------------------------------------------------------------------------------

    def _refresh(self, used: Sequence[Item]) -> None:
        """Move on when items that were read expire; who only reads an index leaves that to its writer."""
        if self.engine.read_only:
            return
        now_s = self.clock()
        expiries: dict[ItemId, float] = {}
        for item in used:
            ttl_s = ttl_of(item)
            if ttl_s is None or item.expires_at_s is None:
                continue
            if now_s + ttl_s - item.expires_at_s >= min(_TOUCH_S, _TOUCH_SHARE * ttl_s):
                expiries[item.id] = now_s + ttl_s
        if expiries:
            self.engine.refresh(expiries, {item.id: item.updated_at_s for item in used if item.id in expiries})

    def _write(self) -> None:
        puts, now_s = self.plan.puts, self.clock()
        vectors = iter(self.vectors)
        with self.write_lock:
            if puts:
                before = self.engine.get([put.id for put in puts])
                created = [now_s if item is None else item.created_at_s for item in before]
                self.engine.put(
                    [
                        Item(
                            put.id,
                            record_value(put.value, put.ttl_s),
                            tuple(next(vectors) for _ in put.texts),
                            created_at_s,
                            now_s,
                            None if put.ttl_s is None else now_s + put.ttl_s,
                        )
                        for put, created_at_s in zip(puts, created, strict=True)
                    ]
                )
            if deletes := self.plan.deletes:
                self.engine.delete(deletes)


def _at_rest(item: Item) -> Item:
    """Return an item whose time of expiry stays as it is."""
    return replace(item, expires_at_s=None)
