"""The model server and the KV cache server as one thing that starts, stops, and can be broken on purpose."""

from __future__ import annotations

import contextlib
import logging
import shutil
import uuid
from pathlib import Path

import httpx

from pancake_langgraph._errors import LaunchError
from pancake_langgraph.launch.device import resolve_device
from pancake_langgraph.launch.lmcache_command import TierPlaces, lmcache_command
from pancake_langgraph.launch.plans import Device, StackPlan, TierPlan
from pancake_langgraph.launch.ports import LOOPBACK, free_ports, require_free
from pancake_langgraph.launch.process import ChildProcess, Leftovers, ProgressFn, TerminationSignals
from pancake_langgraph.launch.run_folder import new_run_dir, new_socket_dir
from pancake_langgraph.launch.vllm_command import EnginePlaces, vllm_command

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0


def answers(url: str) -> bool:
    """Say whether a GET of this loopback URL gives 200 within two seconds.  Never raises; ignores proxies."""
    try:
        return httpx.get(url, timeout=_PROBE_TIMEOUT_S, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


class TierProcess:
    """The KV cache server as a child process; one may serve several engines.

    Ports and names are chosen when the object is made and stay over `restart`, as does what lies on disk.
    """

    def __init__(
        self,
        plan: TierPlan,
        *,
        run_dir: Path | None = None,
        device: Device = "auto",
        on_progress: ProgressFn | None = None,
    ) -> None:
        """Choose places; nothing is started.

        Raises:
            LaunchError: if no engine is installed (it decides how KV is moved).
        """
        self.plan = plan
        self.log_dir = run_dir or new_run_dir()
        spare = iter(free_ports(2))
        self._own_l2 = plan.l2 and plan.l2_dir is None
        l2_dir = (plan.l2_dir or self.log_dir / f"l2-{uuid.uuid4().hex[:8]}") if plan.l2 else None
        self.places = TierPlaces(
            port=plan.port or next(spare),
            http_port=plan.http_port or next(spare),
            shm_name=f"pancake_{uuid.uuid4().hex[:12]}",
            l2_dir=l2_dir,
        )
        self._on_progress = on_progress
        self.process = ChildProcess(
            "cache server",
            lmcache_command(plan, self.places, device=resolve_device(device)),
            log_path=self.log_dir / "lmcache.log",
            leftovers=Leftovers(self.places.shm_files, (l2_dir,) if self._own_l2 and l2_dir else ()),
        )

    @property
    def url(self) -> str:
        """Base URL of health and prefetch."""
        return self.places.http_url

    @property
    def port(self) -> int:
        """Port of the engine protocol."""
        return self.places.port

    def start(self) -> float:
        """Start and wait until it answers; return the seconds it took.

        Raises:
            LaunchError: if a port is taken, or the server does not come up.
        """
        require_free(self.places.port, "cache server")
        require_free(self.places.http_port, "cache server (HTTP)")
        if self.places.l2_dir is not None:
            self.places.l2_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.process.start()
        return self.process.wait_ready(self.healthy, timeout_s=self.plan.ready_timeout_s, on_progress=self._on_progress)

    def healthy(self) -> bool:
        """Say whether the server answers.  Never raises."""
        return answers(f"{self.url}/healthcheck")

    def restart(self) -> float:
        """End (if it runs) and start again on the same ports; return the seconds until it answers."""
        self.process.terminate()
        return self.start()

    def stop(self) -> None:
        """End it; remove the disk tier if it was made for this run.  Idempotent, bounded."""
        self.process.terminate()
        if self._own_l2 and self.places.l2_dir is not None:
            shutil.rmtree(self.places.l2_dir, ignore_errors=True)

    def __enter__(self) -> TierProcess:
        """Start."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()


class EngineProcess:
    """The model server as a child process, joined to `tier` when one is given and the plan has a tier.

    Ports and names are chosen when the object is made and stay over `restart`.
    """

    def __init__(
        self,
        plan: StackPlan,
        *,
        tier: TierProcess | None = None,
        run_dir: Path | None = None,
        name: str = "model server",
        on_progress: ProgressFn | None = None,
    ) -> None:
        """Choose places; nothing is started.

        Raises:
            LaunchError: if no engine is installed, or the plan has a tier and none is given.
            ConfigError: if the plan does not fit the device.
        """
        if plan.tier is not None and tier is None:
            raise LaunchError("the plan has a cache server but none was given; pass tier=TierProcess(...)")
        self.plan = plan
        self.log_dir = run_dir or plan.run_dir or new_run_dir()
        self._socket_dir = new_socket_dir()
        self._on_progress = on_progress
        try:
            self.places = EnginePlaces(
                port=plan.engine_port or free_ports(1)[0],
                socket_dir=self._socket_dir,
                tier_port=tier.port if tier is not None and plan.tier is not None else None,
            )
            self.process = ChildProcess(
                name,
                vllm_command(plan, self.places, device=resolve_device(plan.device)),
                log_path=self.log_dir / f"{name.replace(' ', '-')}.log",
                leftovers=Leftovers((), (self._socket_dir,)),
            )
        except BaseException:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            raise

    @property
    def base_url(self) -> str:
        """OpenAI-compatible base URL, ending in `/v1`."""
        return f"http://{LOOPBACK}:{self.places.port}/v1"

    @property
    def model_key(self) -> str:
        """The model's name in the tier's keys: the engine's `--model` string, not the served name."""
        return str(self.plan.model_dir)

    @property
    def kv_events_endpoint(self) -> str | None:
        """ZeroMQ endpoint of KV events; `None` when the plan has none."""
        return self.places.kv_events_endpoint if self.plan.kv_events else None

    @property
    def kv_replay_endpoint(self) -> str | None:
        """ZeroMQ endpoint for missed KV events; `None` when the plan has none."""
        return self.places.kv_replay_endpoint if self.plan.kv_events else None

    def start(self) -> float:
        """Start and wait until it answers; return the seconds it took.

        Raises:
            LaunchError: if the port is taken, or the server does not come up.
        """
        require_free(self.places.port, "model server")
        self._socket_dir.mkdir(mode=0o700, exist_ok=True)
        self.process.start()
        return self.process.wait_ready(self.healthy, timeout_s=self.plan.ready_timeout_s, on_progress=self._on_progress)

    def healthy(self) -> bool:
        """Say whether the server answers.  Never raises."""
        return answers(f"http://{LOOPBACK}:{self.places.port}/health")

    def restart(self) -> float:
        """End (if it runs) and start again on the same port; return the seconds until it answers."""
        self.process.terminate()
        return self.start()

    def stop(self) -> None:
        """End it and remove its sockets.  Idempotent, bounded."""
        self.process.terminate()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def __enter__(self) -> EngineProcess:
        """Start."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()


class Stack:
    """The whole plan: the KV cache server first, then the engine; ended in the other order.

    A context manager.  While it is open in the main thread, SIGTERM ends the `with` block as Ctrl-C does.  Should this
    process be killed outright, the guards end the children.
    """

    def __init__(self, plan: StackPlan, *, on_progress: ProgressFn | None = None) -> None:
        """Choose places; nothing is started.

        Raises:
            LaunchError: if no engine is installed.
            ConfigError: if the plan does not fit the device.
        """
        self.plan = plan
        self.log_dir = plan.run_dir or new_run_dir()
        self._open = contextlib.ExitStack()
        self.tier_process = (
            TierProcess(plan.tier, run_dir=self.log_dir, device=plan.device, on_progress=on_progress)
            if plan.tier is not None
            else None
        )
        self.engine_process = EngineProcess(plan, tier=self.tier_process, run_dir=self.log_dir, on_progress=on_progress)

    @property
    def engine(self) -> ChildProcess:
        """The engine's process, to kill, freeze or thaw."""
        return self.engine_process.process

    @property
    def tier(self) -> ChildProcess | None:
        """The cache server's process, to kill, freeze or thaw; `None` without a tier."""
        return self.tier_process.process if self.tier_process is not None else None

    @property
    def base_url(self) -> str:
        """OpenAI-compatible base URL, ending in `/v1`."""
        return self.engine_process.base_url

    @property
    def served_model_name(self) -> str:
        """Name that clients send."""
        return self.plan.served_model_name

    @property
    def model_key(self) -> str:
        """The model's name in the tier's keys."""
        return self.engine_process.model_key

    @property
    def tier_url(self) -> str | None:
        """Base URL of the cache server's health and prefetch; `None` without a tier."""
        return self.tier_process.url if self.tier_process is not None else None

    @property
    def kv_events_endpoint(self) -> str | None:
        """ZeroMQ endpoint of KV events; `None` when the plan has none."""
        return self.engine_process.kv_events_endpoint

    @property
    def kv_replay_endpoint(self) -> str | None:
        """ZeroMQ endpoint for missed KV events; `None` when the plan has none."""
        return self.engine_process.kv_replay_endpoint

    def client_env(self) -> dict[str, str]:
        """Return the `PANCAKE_*` variables that point a client at this stack."""
        pairs = {
            "PANCAKE_BASE_URL": self.base_url,
            "PANCAKE_MODEL": self.served_model_name,
            "PANCAKE_KV_EVENTS": self.kv_events_endpoint,
            "PANCAKE_KV_REPLAY": self.kv_replay_endpoint,
            "PANCAKE_TIER_URL": self.tier_url,
            "PANCAKE_TIER_MODEL": self.model_key if self.tier_url else None,
        }
        return {name: value for name, value in pairs.items() if value is not None}

    def start(self) -> None:
        """Start both and wait until both answer.

        Raises:
            LaunchError: if a port is taken or a server does not come up; nothing is left running then.
        """
        try:
            if self.tier_process is not None:
                self._open.enter_context(self.tier_process)
            self._open.enter_context(self.engine_process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End both, the engine first.  Idempotent, bounded."""
        self._open.close()
        self.engine_process.stop()
        if self.tier_process is not None:
            self.tier_process.stop()

    def __enter__(self) -> Stack:
        """Start."""
        self._open.enter_context(TerminationSignals())
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()
