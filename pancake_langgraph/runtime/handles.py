"""The table of actions under way: planned, submitted, settled exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from pancake_langgraph._clock import Clock
from pancake_langgraph._errors import InvariantError
from pancake_langgraph._types import ActionId, ActionKind, Outcome, ThreadId
from pancake_langgraph.ledger import ActionRecorded, ActionState, Event


@dataclass(slots=True)
class Handle:
    """One action.  Mutable only through `HandleTable`."""

    action_id: ActionId
    kind: ActionKind
    agent: str
    thread_id: ThreadId | None
    num_tokens: int
    resident_tokens: int = 0
    started: bool = False
    computed_tokens: int | None = None


class HandleTable:
    """Books every action into the ledger.  Not thread-safe."""

    def __init__(self, *, clock: Clock, record: Callable[[Event], None]) -> None:
        """Start empty."""
        self._clock = clock
        self._record = record
        self._numbers = itertools.count(1)
        self._open: dict[ActionId, Handle] = {}

    def plan(self, kind: ActionKind, *, agent: str, thread_id: ThreadId | None, num_tokens: int, reason: str) -> Handle:
        """Open a handle."""
        handle = Handle(ActionId(f"a{next(self._numbers)}"), kind, agent, thread_id, num_tokens)
        self._open[handle.action_id] = handle
        self._write(handle, ActionState.PLANNED, reason, None)
        return handle

    def submit(self, handle: Handle, reason: str) -> None:
        """Mark that the work was sent."""
        self._write(handle, ActionState.SUBMITTED, reason, None)

    def settle(self, handle: Handle, outcome: Outcome, reason: str) -> None:
        """Close a handle.

        Raises:
            InvariantError: if it is closed already.
        """
        if self._open.pop(handle.action_id, None) is None:
            raise InvariantError(f"action {handle.action_id} settled twice, second time as {outcome}: {reason}")
        self._write(handle, ActionState.SETTLED, reason, outcome)

    def reject(self, kind: ActionKind, *, agent: str, thread_id: ThreadId | None, num_tokens: int, reason: str) -> None:
        """Book an action that was considered and not taken."""
        handle = self.plan(kind, agent=agent, thread_id=thread_id, num_tokens=num_tokens, reason=reason)
        self.settle(handle, Outcome.REJECTED, reason)

    def open_handles(self) -> tuple[Handle, ...]:
        """Return the handles not settled yet, oldest first."""
        return tuple(self._open.values())

    def _write(self, handle: Handle, state: ActionState, reason: str, outcome: Outcome | None) -> None:
        self._record(
            ActionRecorded(
                at_s=self._clock.now_s(),
                action_id=handle.action_id,
                state=state,
                kind=handle.kind,
                agent=handle.agent,
                thread_id=handle.thread_id,
                num_tokens=handle.num_tokens,
                reason=reason,
                computed_tokens=handle.computed_tokens,
                outcome=outcome,
            )
        )
