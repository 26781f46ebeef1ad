"""A bounded, append-only list of events with conserved counts."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass

from pancake_langgraph._errors import InvariantError
from pancake_langgraph._types import ActionId, Outcome
from pancake_langgraph.ledger.events import ActionRecorded, ActionState, Event

DEFAULT_MAX_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """One snapshot of a ledger.

    `outcomes` counts settled actions, `outcome_tokens` their tokens; `open_actions` were planned and not settled yet.
    `dropped_events` is how many of the oldest events the bound has pushed out (counts survive that).
    """

    events: int
    dropped_events: int
    planned_actions: int
    open_actions: int
    planned_tokens: int
    open_tokens: int
    outcomes: dict[Outcome, int]
    outcome_tokens: dict[Outcome, int]


class Ledger:
    """Append-only record.  Thread-safe; `append` never blocks on I/O.

    Conservation law, checked by `check_integrity`: planned = settled + open, for actions and for their tokens, and no
    action is settled twice.
    """

    def __init__(self, *, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        """Hold at most `max_events` events; older ones fall out, counts stay.

        Raises:
            ValueError: if `max_events` is not positive.
        """
        if max_events <= 0:
            raise ValueError(f"max_events must be positive, got {max_events}")
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=max_events)
        self._appended = 0
        self._open: dict[ActionId, int] = {}
        self._planned = 0
        self._planned_tokens = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._outcome_tokens: Counter[Outcome] = Counter()

    def append(self, event: Event) -> None:
        """Add one event.

        Raises:
            InvariantError: if an action is planned twice, or settled without being open.
        """
        with self._lock:
            if type(event) is ActionRecorded:
                self._count(event)
            self._events.append(event)
            self._appended += 1

    def _count(self, event: ActionRecorded) -> None:
        if event.state is ActionState.PLANNED:
            if event.action_id in self._open:
                raise InvariantError(f"action {event.action_id} planned twice")
            self._open[event.action_id] = event.num_tokens
            self._planned += 1
            self._planned_tokens += event.num_tokens
        elif event.action_id not in self._open:
            raise InvariantError(f"action {event.action_id} is {event.state} but not open")
        elif event.state is ActionState.SETTLED:
            if event.outcome is None:
                raise InvariantError(f"action {event.action_id} settled without an outcome")
            num_tokens = self._open.pop(event.action_id)
            self._outcomes[event.outcome] += 1
            self._outcome_tokens[event.outcome] += num_tokens

    def events(self) -> tuple[Event, ...]:
        """Return the events still held, oldest first."""
        with self._lock:
            return tuple(self._events)

    def statistics(self) -> LedgerStatistics:
        """Return one consistent snapshot of the counts."""
        with self._lock:
            return LedgerStatistics(
                events=len(self._events),
                dropped_events=self._appended - len(self._events),
                planned_actions=self._planned,
                open_actions=len(self._open),
                planned_tokens=self._planned_tokens,
                open_tokens=sum(self._open.values()),
                outcomes={outcome: self._outcomes[outcome] for outcome in Outcome},
                outcome_tokens={outcome: self._outcome_tokens[outcome] for outcome in Outcome},
            )

    def check_integrity(self) -> None:
        """Check the conservation law.

        Raises:
            InvariantError: if it does not hold, with the numbers.
        """
        stats = self.statistics()
        settled = sum(stats.outcomes.values())
        if stats.planned_actions != settled + stats.open_actions:
            raise InvariantError(f"planned {stats.planned_actions} != settled {settled} + open {stats.open_actions}")
        settled_tokens = sum(stats.outcome_tokens.values())
        if stats.planned_tokens != settled_tokens + stats.open_tokens:
            raise InvariantError(
                f"planned tokens {stats.planned_tokens} != settled {settled_tokens} + open {stats.open_tokens}"
            )
