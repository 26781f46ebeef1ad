"""What state a node will read: the state seen last at its level, and what running nodes may still write to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar

from langgraph.types import Command, Send

from pancake_langgraph.prompts.fields import MAX_FIELDS, Fields, as_messages, fields_of, is_messages
from pancake_langgraph.prompts.parts import Known
from pancake_langgraph.prompts.prediction import Trust
from pancake_langgraph.prompts.reducers import Reducer, Writes, begins, reduced, same_atom

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

#: Nodes, fields and levels whose habits are remembered.
MAX_HABITS: Final = 2048
MAX_UPDATES: Final = 16
NOTHING: Final = Known({}, all_unsure=True)


@dataclass(slots=True)
class Habit:
    """What a node was seen to do: the fields it `writes`, those message lists it `rewrites` instead of appending."""

    writes: set[str] = field(default_factory=set)
    rewrites: set[str] = field(default_factory=set)
    ends: int = 0


@dataclass(slots=True)
class Level:
    """The state of one run of a graph, as far as it was seen (`is_blind`: not at all).

    `running` are its open nodes by namespace, with their names and orders; `unsure` are fields that could not be
    followed, `written` this step's writes, `input_fields` those of the run's input until a node has read them, and
    `given` the messages made of that input.
    """

    path: str
    fields: dict[str, Any] = field(default_factory=dict)
    is_blind: bool = True
    step: int = -1
    running: dict[str, tuple[str, str]] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    written: dict[str, Writes] = field(default_factory=dict)
    checks: list[tuple[str, object, object]] = field(default_factory=list)
    input_fields: tuple[str, ...] = ()
    given: list[Sequence[object]] = field(default_factory=list)


def updates_of(outputs: object) -> tuple[Mapping[str, Any], ...]:
    """Return what a node's return value writes to the state of its own graph.  Looks into no value."""
    if type(outputs) is dict:  # what most nodes return
        return (fields,) if (fields := fields_of(outputs)) else ()
    found: list[Mapping[str, Any]] = []
    item: Any
    for item in islice(outputs, MAX_UPDATES) if isinstance(outputs, list | tuple) else (outputs,):
        if isinstance(item, Command):
            if item.graph is not None:
                continue  # meant for a graph around this one
            item = item.update
            if isinstance(item, list | tuple):
                pairs = [pair for pair in item[:MAX_FIELDS] if isinstance(pair, tuple) and len(pair) == 2]
                item = {key: value for key, value in pairs if type(key) is str}
        if isinstance(item, str | list | tuple | Send):
            continue
        if fields := fields_of(item):
            found.append(fields)
    return tuple(found)


class Outlook:
    """Follows the state of every run.  References only; bounded; not thread-safe."""

    def __init__(self, *, max_levels: int) -> None:
        """Follow at most `max_levels` runs of graphs at once; the least recently used go first."""
        self._max_levels = max_levels
        self._levels: OrderedDict[tuple[Hashable, str], Level] = OrderedDict()
        self._habits: OrderedDict[tuple[str, str], Habit] = OrderedDict()
        self._reducers: OrderedDict[tuple[str, str], Reducer] = OrderedDict()
        self._foreign: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._opens: OrderedDict[str, Trust] = OrderedDict()
        self._threads: OrderedDict[str, None] = OrderedDict()
        # Several nodes are asked about between two changes, and all at one level will read the same.
        self._told: dict[tuple[int, str, bool], Known] = {}

    def __len__(self) -> int:
        """Return how many levels, habits and facts of other kinds are remembered."""
        known = len(self._levels) + len(self._habits) + len(self._reducers) + len(self._foreign)
        return known + len(self._opens) + len(self._threads)

    def run_started(self, run: Hashable, thread_id: str, fields: Fields | None, graph_id: str) -> None:
        """Take in the input of a run; in a thread that is new it is all that the first node reads.

        A run without a thread (an empty `thread_id`) has no past.
        """
        is_new = thread_id not in self._threads
        self._told.clear()
        if thread_id:
            _put(self._threads, thread_id, None, MAX_HABITS)
        level = self._level(run, Spot("", "", "", ""))
        if fields is None or not is_new:
            return
        for name, value in islice(fields.items(), MAX_FIELDS):
            self._write(graph_id, level, Habit(), name, value, "")
        level.input_fields = tuple(level.fields)
        level.given = _lists_of(level)
        level.is_blind = not self._trust(graph_id).holds

    def node_started(self, run: Hashable, spot: Spot, fields: Fields | None, graph_id: str) -> None:
        """Take in the state that a node reads."""
        self._told.clear()
        level = self._level(run, spot)
        level.running[spot.namespace] = spot.node, spot.order
        while len(level.running) > MAX_HABITS:
            level.running.pop(next(iter(level.running)))
        if fields is None:
            return
        self._note_origin(run, spot, level, fields, graph_id)
        is_late = spot.step == level.step and bool(level.written)  # it reads what was there before its siblings wrote
        if spot.step > level.step:
            level.written.clear()
            level.step = spot.step
        if spot.is_pushed or is_late:
            return
        for name, old, written in level.checks:
            if name in fields:
                self._learn_reducer(graph_id, level, name, old, written, fields[name])
        level.checks.clear()
        self._check_input(graph_id, level, fields)
        level.fields.update(islice(fields.items(), MAX_FIELDS))
        level.is_blind = False
        level.unsure -= fields.keys()
        while len(level.fields) > MAX_FIELDS:
            level.fields.pop(next(iter(level.fields)))

    def node_ended(self, run: Hashable, spot: Spot, updates: Iterable[Mapping[str, Any]], graph_id: str) -> None:
        """Take in what a node wrote; its state is then known before the next node starts."""
        self._told.clear()
        level = self._level(run, spot)
        level.running.pop(spot.namespace, None)
        habit = self._habit(graph_id, level.path, spot.node)
        habit.ends += 1
        level.checks.clear()
        for update in updates:
            for name, written in islice(update.items(), MAX_FIELDS):
                if len(habit.writes) < MAX_FIELDS:
                    habit.writes.add(name)
                self._write(graph_id, level, habit, name, written, spot.order)

    def node_cut(self, run: Hashable, spot: Spot) -> None:
        """Take in that a node ended without a result."""
        self._told.clear()
        self._level(run, spot).running.pop(spot.namespace, None)

    def run_ended(self, run: Hashable) -> list[Sequence[object]]:
        """Forget a run; return the lists of messages that its state had at first and at last."""
        self._told.clear()
        gone = [self._levels.pop(key) for key in [key for key in self._levels if key[0] == run]]
        return [messages for level in gone for messages in (*level.given, *_lists_of(level))]

    def known(self, run: Hashable, around: str, target: str, *, num_between: int, graph_id: str) -> Known:
        """Return what is known of the state that node `target` will read.

        Nodes under way at its level, and `num_between` that have not started yet, may write before it starts.
        """
        level = self._level_for(run, around, target)
        if level is None or level.is_blind or self._foreign.get((graph_id, target), 0) > 0:
            return NOTHING
        question = id(level), graph_id, num_between > 0
        told = self._told.get(question)
        if told is None:
            told = self._told[question] = self._tell(level, graph_id, may_others_run=num_between > 0)
        return told

    def _tell(self, level: Level, graph_id: str, *, may_others_run: bool) -> Known:
        habits = [self._habits.get((graph_id, f"{level.path}/{node}")) for node, _ in level.running.values()]
        if may_others_run:  # any node of the level may be it
            here = f"{level.path}/"
            habits += [h for (graph, key), h in self._habits.items() if graph == graph_id and key.startswith(here)]
        unseen = any(habit is None or not habit.ends for habit in habits)
        writes = set().union(*(habit.writes for habit in habits if habit)) | level.unsure
        rewrites = set().union(*(habit.rewrites for habit in habits if habit)) | level.unsure
        lists = {name for name, value in level.fields.items() if is_messages(value)} - rewrites
        growing = lists if unseen else lists & writes
        fields = {**level.fields, **self._early_writes(graph_id, level)}
        return Known(fields, frozenset(writes - growing), frozenset(growing), all_unsure=unseen)

    def knows(self, run: Hashable, around: str, target: str, *, graph_id: str) -> bool:
        """Whether `known` would name any field."""
        level = self._level_for(run, around, target)
        is_dark = level is None or level.is_blind or self._foreign.get((graph_id, target), 0) > 0
        return not is_dark and level is not None and bool(level.fields)

    def _level_for(self, run: Hashable, around: str, target: str) -> Level | None:
        """Return the level that `target` runs at or under, from `around` outwards."""
        while True:
            level = self._levels.get((run, around))
            if level is not None and (not level.path or target.startswith(f"{level.path}|")):
                return level
            if not around:
                return None
            around = around.rpartition("|")[0]

    def _level(self, run: Hashable, spot: Spot) -> Level:
        level = self._levels.get((run, spot.around))
        if level is None:
            level = Level(spot.path)
        _put(self._levels, (run, spot.around), level, self._max_levels)
        return level

    def _habit(self, graph_id: str, path: str, node: str) -> Habit:
        key = graph_id, f"{path}/{node}"
        habit = self._habits.get(key) or Habit()
        _put(self._habits, key, habit, MAX_HABITS)
        return habit

    def _note_origin(self, run: Hashable, spot: Spot, level: Level, fields: Fields, graph_id: str) -> None:
        """Learn whether a node reads the state of the graph around it, or an input of its own."""
        outer_key = spot.around.rpartition("|")[0]
        outer = level if spot.is_pushed else self._levels.get((run, outer_key)) if spot.around else None
        if outer is None or (not spot.is_pushed and level.fields):
            return
        key = graph_id, f"{spot.path}|{spot.node}" if spot.path else spot.node
        same = all(begins(value, outer.fields.get(name)) for name, value in fields.items() if is_messages(value))
        doubt = self._foreign.get(key, 0)
        _put(self._foreign, key, max(doubt - 1, 0) if same and not spot.is_pushed else 2, MAX_HABITS)

    def _trust(self, graph_id: str) -> Trust:
        trust = self._opens.get(graph_id) or Trust()
        _put(self._opens, graph_id, trust, MAX_HABITS)
        return trust

    def _check_input(self, graph_id: str, level: Level, fields: Fields) -> None:
        """Learn whether the first node of a new thread reads the run's input and nothing before it."""
        seen = [name for name in level.input_fields if is_messages(fields.get(name))]
        if seen:
            pairs = [(fields[name], as_messages(level.fields.get(name)) or []) for name in seen]
            right = all(begins(now, then) and len(now) == len(then) for now, then in pairs)
            self._trust(graph_id).note(right=right)
        level.input_fields = ()

    def _write(self, graph_id: str, level: Level, habit: Habit, name: str, written: object, order: str) -> None:
        step = level.written.get(name)
        if step is None:
            step = level.written[name] = Writes(level.fields.get(name))
        else:
            level.checks = [check for check in level.checks if check[0] != name]
        step.add(order, written)
        reducer = self._reducers.get((graph_id, f"{level.path}/{name}"))
        if len(step.writes) == 1:
            level.checks.append((name, step.before, written))
            del level.checks[:-MAX_FIELDS]
        if reducer is Reducer.UNKNOWN or step.is_unordered:
            level.unsure.add(name)
            level.fields[name] = step.before
            return
        value, grew = reduced(step.before, written, reducer)
        if reducer is not Reducer.REPLACE:
            (habit.rewrites.discard if grew else habit.rewrites.add)(name)
        level.fields[name] = value if len(step.writes) == 1 else step.value(reducer)

    def _early_writes(self, graph_id: str, level: Level) -> Mapping[str, Any]:
        """Return the written fields without those writes that a node under way may come before."""
        first = min((order for _, order in level.running.values()), default="")
        found = {}
        for name, step in level.written.items():
            if level.running and name not in level.unsure:
                found[name] = step.value(self._reducers.get((graph_id, f"{level.path}/{name}")), before=first)
        return found

    def _learn_reducer(self, graph_id: str, level: Level, name: str, old: object, written: object, now: object) -> None:
        """Compare what a node wrote with what the next one read; by lengths and ends only, whatever the size."""
        if now is written:
            kind = Reducer.REPLACE
        elif is_messages(now):
            kind = Reducer.MESSAGES  # its reducer makes a new list each time
        elif not isinstance(now, list):
            kind = Reducer.REPLACE if same_atom(now, written) else Reducer.UNKNOWN
        elif not isinstance(written, list):
            kind = Reducer.UNKNOWN
        elif isinstance(old, list) and old and len(now) == len(old) + len(written) and now[0] is old[0]:
            kind = Reducer.APPEND
        else:
            kind = Reducer.REPLACE if len(now) == len(written) else Reducer.UNKNOWN
        if kind is Reducer.REPLACE and not old:
            return  # appending to nothing looks the same
        _put(self._reducers, (graph_id, f"{level.path}/{name}"), kind, MAX_HABITS)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a node runs: its `namespace` and the one `around` it with task ids, the level's `path` without, its name.

    `is_pushed` says that it got an input of its own (`Send`), `step` counts the steps of its graph, and `order` sorts
    the tasks of one step as LangGraph does (empty: not known).
    """

    namespace: str
    around: str
    path: str
    node: str
    is_pushed: bool = False
    step: int = 0
    order: str = ""


def _lists_of(level: Level) -> list[Sequence[object]]:
    return [value for value in level.fields.values() if is_messages(value)]


def _put(table: OrderedDict[_K, _V], key: _K, value: _V, limit: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)
