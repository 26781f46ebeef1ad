"""The runtime: composes engine, tier, forecast, ledger; owns one background loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pancake_langgraph._clock import Clock, MonotonicClock
from pancake_langgraph._errors import RuntimeClosed
from pancake_langgraph._types import Outcome, ThreadId
from pancake_langgraph.config import Resolved, RuntimeSettings
from pancake_langgraph.engines.base import Capabilities, Engine, ReportsEvictions
from pancake_langgraph.engines.registry import create_engine
from pancake_langgraph.forecast import Forecaster, create_forecaster
from pancake_langgraph.ledger import Ledger, LedgerStatistics, SpanKind
from pancake_langgraph.plan import CompiledPlan, GraphPhases, compile_plan, declared_for
from pancake_langgraph.prompts.agent_code import prompts_of
from pancake_langgraph.prompts.lint_report import PrefixReport
from pancake_langgraph.runtime.actor import Actor
from pancake_langgraph.runtime.background import BackgroundLoop, Mailbox
from pancake_langgraph.runtime.engine_watch import EngineWatch
from pancake_langgraph.runtime.expectations import ExpectedCall
from pancake_langgraph.runtime.handler import RuntimeHandler
from pancake_langgraph.runtime.knowledge import Knowledge
from pancake_langgraph.runtime.phases import PhaseWatch
from pancake_langgraph.runtime.retrievals import RetrievalWatch
from pancake_langgraph.runtime.signals import Closed, Drafted, Opened, Requested, Routed, Signal
from pancake_langgraph.runtime.state import State
from pancake_langgraph.runtime.tier_watch import TierWatch
from pancake_langgraph.runtime.watcher import Watcher
from pancake_langgraph.runtime.wire_extras import WireExtras, wire_extras
from pancake_langgraph.tiers.base import Tier
from pancake_langgraph.tiers.registry import create_tier
from pancake_langgraph.topology import Topology

if TYPE_CHECKING:
    from pancake_langgraph.checkpoint.listeners import Stored

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_SWEEP_S = 0.5
_IDLE_LOOKS = 4


@dataclass(frozen=True, slots=True)
class RuntimeStatistics:
    """One snapshot.

    `calls` were seen since the start, `open_calls` are under way, `expected_calls` are expected now; `failed_signals`
    counts what could not be taken in or acted on (a bug: please report); `resolved` is what runs (`None` until the
    engine was probed); `failed_forecast_files` counts stored forecasts that could not be read or written, and
    `unreadable_states` the times that a graph's state did not let itself be read (its prompts are not foretold then).
    """

    calls: int
    open_calls: int
    expected_calls: int
    failed_signals: int
    ledger: LedgerStatistics
    resolved: Resolved | None
    failed_forecast_files: int = 0
    unreadable_states: int = 0


class Runtime:
    """Watches runs, forecasts, and acts.

    The constructor is pure.  The background loop starts with the first signal (or `start`); `close` ends it.  All
    public methods are thread-safe; none may be called from the background loop itself.  `ledger` is told of what
    happens some milliseconds later; `statistics` and `wait_idle` take that in first.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        *,
        engine: Engine | None = None,
        tier: Tier | None = None,
        ledger: Ledger | None = None,
        forecaster: Forecaster | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Compose a runtime; parts not given are made from `settings`."""
        self.settings = settings
        self.ledger = ledger or Ledger()
        self._clock = clock or MonotonicClock()
        self._engine = engine or create_engine(
            settings.engine,
            base_url=settings.base_url,
            model=settings.model,
            api_key=settings.api_key,
            kv_events_endpoint=settings.kv_events_endpoint,
            kv_replay_endpoint=settings.kv_replay_endpoint,
        )
        self._tier = tier or create_tier(
            "lmcache" if settings.tier_url else "null",
            url=settings.tier_url,
            model_key=settings.tier_model,
            deadline_s=settings.tier_deadline_s,
        )
        self._state = State.build(
            settings, clock=self._clock, ledger=self.ledger, forecaster=forecaster or create_forecaster()
        )
        self._tier_watch = TierWatch(self._state, self._engine, self._tier)
        self._engine_watch = EngineWatch(self._state, self._engine, self._tier, self._engine_found)
        self._phases = PhaseWatch(self._state.forecaster)
        self._retrievals = RetrievalWatch(self._state.forecaster)
        self._knowledge = Knowledge.of(settings.forecast_dir, self._state.forecaster)
        self._background = BackgroundLoop("pancake-runtime")
        self._mailbox: Mailbox[Signal] = Mailbox(self._background, self._receive, self._settle)
        self._actor: Actor | None = None
        self._watcher: Watcher | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._unreadable_states = 0
        self._lock = threading.Lock()
        self._heard: dict[int, Callable[[], None]] = {}
        self._closed = False

    # -- the outside ----------------------------------------------------------------------------------------------

    def handler(self, *, graph_id: str = "") -> RuntimeHandler:
        """Return a callback handler that reports to this runtime."""
        return RuntimeHandler(
            self.post,
            clock=self._clock,
            wire_extras=self.wire_extras,
            graph_id=graph_id,
            runtime=self,
            on_unreadable=self._count_unreadable,
            wanted_drafts=self._retrievals.wanted,
        )

    def learn_topology(self, topology: Topology, phases: GraphPhases | None = None) -> str:
        """Tell the forecast a graph's topology and what is declared; return the id its handler must carry."""
        graph_id = topology.fingerprint
        self._state.forecaster.add_graph(graph_id, topology)
        self._state.topologies[graph_id] = topology
        if self._knowledge is not None:
            self._knowledge.want(graph_id)
        if phases is not None:
            self._state.forecaster.declare(graph_id, declared_for(topology, phases))
            self._retrievals.declare(graph_id, topology, phases)
            for note in compile_plan(topology, phases).notes:
                logger.warning("a declared phase is not used: %s", note)
        self._state.handoff_tools[graph_id] = frozenset(
            handoff.tool for node in topology.nodes for handoff in node.handoffs
        )
        return graph_id

    def plan(self, graph: object) -> CompiledPlan:
        """Return the compiled plan of a graph, with what this runtime has learnt about it so far.

        Raises:
            TopologyError: if `graph` is not a compiled graph.
        """
        return self._phases.plan(graph)

    def learn_prompts(self, graph_id: str, graph: object) -> None:
        """Read what is known of a graph's prompts before its first call: declared ones, agents of `create_agent`."""
        self._state.book.declare(graph_id, prompts_of(graph))

    def listen_to(self, saver: object) -> None:
        """Take in what a saver tells it stored; ignored where it tells nothing (it needs `subscribe`)."""
        subscribe = getattr(saver, "subscribe", None)
        if callable(subscribe) and id(saver) not in self._heard:
            self._heard[id(saver)] = subscribe(self._saved)

    def start(self) -> Resolved:
        """Start now and wait until the engine was probed; otherwise both happen with the first run.

        Raises:
            EngineError: if the engine cannot be probed.
            RuntimeClosed: after `close`.
        """
        return self._background.run(self._start_and_probe()).result()

    def wait_idle(self, *, timeout_s: float = 10.0) -> bool:
        """Wait until every signal so far was taken in and nothing is under way; return whether that came true.

        Events from the engine take a moment to arrive, so idle means idle at several looks in a row.

        Raises:
            RuntimeClosed: after `close`.
        """
        deadline_s = time.monotonic() + timeout_s
        looks = 0
        while time.monotonic() < deadline_s:
            looks = looks + 1 if self._background.ask(self._is_idle).result() else 0
            if looks >= _IDLE_LOOKS:
                return True
            time.sleep(0.01)
        return False

    def statistics(self) -> RuntimeStatistics:
        """Return one snapshot, after every signal of the caller's thread was taken in.  Works after `close`."""
        self._take_in()
        state = self._state
        return RuntimeStatistics(
            calls=state.counters.calls,
            open_calls=len(state.running),
            expected_calls=len(state.expectations),
            failed_signals=state.counters.failed_signals,
            ledger=self.ledger.statistics(),
            resolved=state.resolved,
            failed_forecast_files=self._knowledge.failures if self._knowledge else 0,
            unreadable_states=self._unreadable_states,
        )

    def prefix_report(self) -> PrefixReport:
        """Return per agent where its prompts did not extend the one before; no text of them.  Works after `close`."""
        self._take_in()
        return self._state.lint.report()

    def expectations(self) -> tuple[ExpectedCall, ...]:
        """Return which calls are expected, oldest first, after every signal of the caller's thread was taken in.

        Raises:
            RuntimeClosed: after `close`.
        """
        return self._background.ask(self._copy_expectations).result()

    def check_integrity(self) -> None:
        """Check that every action is accounted for.

        Raises:
            InvariantError: if not.
        """
        self.ledger.check_integrity()

    def close(self) -> None:
        """Give up all work, settle every action, release everything.  Idempotent; bounded in time."""
        if self._closed:
            return
        self._closed = True
        for unsubscribe in self._heard.values():
            unsubscribe()
        try:
            if self._background.is_running:
                self._background.run(self._shutdown()).result(_CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("runtime did not close within %.0f s; its thread is left behind", _CLOSE_TIMEOUT_S)
        finally:
            self._background.stop()

    def __enter__(self) -> Runtime:
        """Return itself; the runtime starts with the first run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # -- from the user's threads -----------------------------------------------------------------------------------

    def post(self, signal: Signal) -> None:
        """Take in a signal; returns at once, never raises."""
        if self._closed:
            return
        self._mailbox.put(signal)
        if type(signal) is Requested and self._actor is not None and self._actor.is_working:
            self._mailbox.hurry()  # what computes for other calls gives way to this one

    def wire_extras(self, run_id: UUID, payload: Mapping[str, Any]) -> WireExtras:
        """Return what the request of a call should say besides."""
        desk = self._actor.hints if self._actor is not None else None
        return wire_extras(self._state.resolved, desk, run_id, payload)

    def _take_in(self) -> None:
        """Have what was posted before taken in now."""
        if self._background.is_running:
            with contextlib.suppress(RuntimeClosed, TimeoutError):  # closed meanwhile: what was seen is what there is
                self._background.ask(self._mailbox.drain).result(_CLOSE_TIMEOUT_S)

    def _count_unreadable(self) -> None:
        with self._lock:  # handlers run in any thread
            self._unreadable_states += 1

    def _saved(self, stored: Stored) -> None:
        if stored.next_nodes:
            self.post(
                Routed(self._clock.now_s(), ThreadId(stored.thread_id), stored.spot.checkpoint_ns, stored.next_nodes)
            )

    # -- on the background loop -------------------------------------------------------------------------------------

    def _receive(self, signal: Signal) -> None:
        if self._draining:
            return
        try:
            watcher = self._watcher or self._compose()
            if type(signal) is Drafted:  # of no interest to anybody else
                self._retrievals.receive(signal)
                return
            watcher.receive(signal)
            if type(signal) is Opened:
                if self._knowledge is not None:
                    self._knowledge.touch(signal.graph_id)
                self._phases.opened(signal)
            elif type(signal) is Closed:
                self._phases.closed(signal)
            self._retrievals.receive(signal)
        except Exception:  # hints fail open; counted
            level = self._state.count_bug()
            logger.log(level, "a %s signal could not be taken in", type(signal).__name__, exc_info=True)

    def _settle(self) -> None:
        try:
            if self._watcher is not None:
                self._watcher.settle()
        except Exception:  # hints fail open; counted
            logger.log(self._state.count_bug(), "what a call has written could not be taken in", exc_info=True)

    def _compose(self) -> Watcher:
        self._actor = Actor(self._state, self._engine, self._tier)
        self._watcher = Watcher(self._state, self._actor)
        if isinstance(self._engine, ReportsEvictions):
            self._engine.add_residency_listener(self._actor.poke)
        self._spawn(self._actor.serve())
        self._spawn(self._keep_probing())
        self._spawn(self._keep_house())
        if self._knowledge is not None:
            self._spawn(self._knowledge.keep())
        return self._watcher

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_and_probe(self) -> Resolved:
        if self._watcher is None:
            self._compose()
        if self._knowledge is not None:
            await self._knowledge.load()
        return await self._engine_watch.resolved()

    async def _keep_probing(self) -> None:
        await self._engine_watch.keep_probing()
        self._poke()

    def _engine_found(self, found: Capabilities, resolved: Resolved) -> None:
        if resolved.tier:
            self._spawn(self._tier_watch.engine_found(found))

    def _poke(self) -> None:
        if self._actor is not None:
            self._actor.poke()

    async def _keep_house(self) -> None:
        """Drop stale expectations; while runs are open, watch the tier's pulse, so that its loss is seen early."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            if self._actor is not None:
                self._actor.sweep()
            if await self._engine_watch.look_again():
                self._poke()
            is_used = self.settings.tier_url and self._state.spans.num_open(SpanKind.RUN)
            if is_used and self._tier_watch.is_due and self._tier_watch.is_back(await self._tier.health()):
                self._spawn(self._tier_watch.tier_came_back())

    def _copy_expectations(self) -> tuple[ExpectedCall, ...]:
        self._mailbox.drain()
        return tuple(expectation.copy() for expectation in self._state.expectations)

    def _is_idle(self) -> bool:
        self._mailbox.drain()
        return self._actor is None or self._actor.idle

    async def _shutdown(self) -> None:
        self._mailbox.drain()
        self._draining = True
        if self._actor is not None:
            for expectation in self._state.expectations:
                self._actor.drop(expectation, "runtime closed")
            for call in list(self._state.calls.values()):
                if call.claim is not None:
                    self._actor.settle_claim(call.claim, Outcome.WASTED, "runtime closed")
            await self._actor.stop()
        for task in tuple(self._tasks):
            task.cancel()
        if self._knowledge is not None:
            await self._knowledge.save()
        try:
            await self._engine.close()
        finally:
            await self._tier.close()
