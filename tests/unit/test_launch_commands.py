"""Command lines are pure functions of plans; plans refuse what cannot work."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pancake_langgraph._errors import ConfigError, LaunchError
from pancake_langgraph.launch import EngineProcess, StackPlan, TierPlan
from pancake_langgraph.launch.lmcache_command import TierPlaces, lmcache_command
from pancake_langgraph.launch.vllm_command import EnginePlaces, vllm_command


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def plan(model_dir: Path) -> StackPlan:
    return StackPlan(model_dir=model_dir, tier=TierPlan())


PLACES = EnginePlaces(port=8011, socket_dir=Path("/run/pk"), tier_port=5555)
TIER_PLACES = TierPlaces(port=5555, http_port=8089, shm_name="pancake_x", l2_dir=Path("/run/l2"))


def value_of(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_the_engine_starts_as_a_module_on_loopback_only(plan: StackPlan) -> None:
    command = vllm_command(plan, PLACES, device="cpu")
    assert command.argv[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert value_of(command.argv, "--host") == "127.0.0.1"
    assert command.env["VLLM_HOST_IP"] == "127.0.0.1"
    assert not [part for part in command.argv if "0.0.0.0" in part]


def test_a_cpu_engine_is_eager_in_one_process_with_bounded_steps(plan: StackPlan) -> None:
    command = vllm_command(plan, PLACES, device="cpu")
    assert "--enforce-eager" in command.argv
    assert value_of(command.argv, "--distributed-executor-backend") == "uni"
    assert command.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert command.env["OMP_NUM_THREADS"] == "1"
    assert value_of(command.argv, "--max-num-batched-tokens") == "256"
    assert value_of(command.argv, "--long-prefill-token-threshold") == "128"
    assert value_of(command.argv, "--scheduling-policy") == "priority"


def test_a_gpu_engine_gets_none_of_the_cpu_switches(plan: StackPlan) -> None:
    command = vllm_command(plan, PLACES, device="gpu")
    assert "--enforce-eager" not in command.argv
    assert "--distributed-executor-backend" not in command.argv
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"} & set(command.env)


def test_a_lost_tier_is_recomputed_and_waited_for_two_seconds_at_most(plan: StackPlan) -> None:
    transfer = json.loads(value_of(vllm_command(plan, PLACES, device="cpu").argv, "--kv-transfer-config"))
    assert transfer["kv_load_failure_policy"] == "recompute"
    extra = transfer["kv_connector_extra_config"]
    assert extra["pancake.hold_cap_ratio"] == 0.75
    assert (extra["lmcache.mp.mq_timeout"], extra["lmcache.mp.heartbeat_interval"]) == (2.0, 1.0)
    assert (extra["lmcache.mp.host"], extra["lmcache.mp.port"]) == ("tcp://127.0.0.1", 5555)


def test_without_a_tier_the_engine_has_no_connector(plan: StackPlan) -> None:
    command = vllm_command(replace(plan, tier=None), replace(PLACES, tier_port=None), device="cpu")
    assert "--kv-transfer-config" not in command.argv


def test_kv_events_go_over_private_sockets(plan: StackPlan) -> None:
    events = json.loads(value_of(vllm_command(plan, PLACES, device="cpu").argv, "--kv-events-config"))
    assert events["endpoint"] == PLACES.kv_events_endpoint == "ipc:///run/pk/kv.sock"
    assert events["replay_endpoint"] == PLACES.kv_replay_endpoint == "ipc:///run/pk/kvr.sock"
    assert events["enable_kv_cache_events"] is True
    assert "--kv-events-config" not in vllm_command(replace(plan, kv_events=False), PLACES, device="cpu").argv


def test_development_routes_are_off_unless_asked_for(plan: StackPlan) -> None:
    assert "VLLM_SERVER_DEV_MODE" not in vllm_command(plan, PLACES, device="cpu").env
    assert vllm_command(replace(plan, dev_routes=True), PLACES, device="cpu").env["VLLM_SERVER_DEV_MODE"] == "1"


def test_template_and_tool_parser_are_passed_on(plan: StackPlan, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("x")
    argv = vllm_command(replace(plan, chat_template=template), PLACES, device="cpu").argv
    assert value_of(argv, "--chat-template") == str(template)
    assert value_of(argv, "--tool-call-parser") == "hermes"
    assert (
        "--enable-auto-tool-choice" not in vllm_command(replace(plan, tool_call_parser=None), PLACES, device="cpu").argv
    )


def test_adapters_are_passed_on_by_name(plan: StackPlan, model_dir: Path) -> None:
    (model_dir / "adapter_config.json").write_text("{}")
    command = vllm_command(replace(plan, adapters=(("x", model_dir), ("y", model_dir))), PLACES, device="cpu")
    assert "--enable-lora" in command.argv
    first = command.argv.index("--lora-modules")
    assert command.argv[first + 1 : first + 3] == (f"x={model_dir}", f"y={model_dir}")
    assert "--enable-lora" not in vllm_command(plan, PLACES, device="cpu").argv


@pytest.mark.parametrize(
    ("names", "problem"), [(["small"], "no other model has"), (["x", "x"], "no other model has"), (["a=b"], "without")]
)
def test_adapters_need_names_of_their_own(plan: StackPlan, model_dir: Path, names: list[str], problem: str) -> None:
    (model_dir / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=problem):
        replace(plan, adapters=tuple((name, model_dir) for name in names))


def test_an_adapter_is_a_folder_with_its_configuration(plan: StackPlan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        replace(plan, adapters=(("x", tmp_path),))


def test_a_socket_folder_too_long_for_unix_sockets_is_refused(plan: StackPlan) -> None:
    with pytest.raises(ConfigError, match="TMPDIR"):
        vllm_command(plan, replace(PLACES, socket_dir=Path("/x" * 40)), device="cpu")


def test_a_cpu_block_size_must_be_a_multiple_of_32(plan: StackPlan) -> None:
    odd = replace(plan, block_size_tokens=48, tier=TierPlan(chunk_tokens=96))
    with pytest.raises(ConfigError, match="multiples of 32"):
        vllm_command(odd, PLACES, device="cpu")
    assert vllm_command(odd, PLACES, device="gpu")


def test_the_cpu_tier_uses_engine_driven_shared_memory_and_keeps_prefetched_chunks() -> None:
    command = lmcache_command(TierPlan(l1_bytes=1024**3), TIER_PLACES, device="cpu")
    assert value_of(command.argv, "--supported-transfer-mode") == "engine_driven"
    assert value_of(command.argv, "--shm-name") == "pancake_x"
    assert value_of(command.argv, "--l2-prefetch-policy") == "retain"
    assert float(value_of(command.argv, "--l1-size-gb")) == 1.0
    assert json.loads(value_of(command.argv, "--l2-adapter")) == {
        "type": "plugin",
        "module_path": "pancake_lmcache.disk_adapter",
        "class_name": "VerifiedDiskAdapter",
        "adapter_params": {"base_path": "/run/l2", "max_capacity_gb": 10_000_000_000 / 1024**3, "codec": "exact"},
    }
    assert value_of(command.argv, "--host") == value_of(command.argv, "--http-host") == "127.0.0.1"


def test_the_gpu_tier_moves_kv_its_own_way() -> None:
    command = lmcache_command(TierPlan(), TIER_PLACES, device="gpu")
    assert "--supported-transfer-mode" not in command.argv
    assert "--shm-name" not in command.argv


def test_the_disk_tier_may_be_encrypted_or_lmcaches_own(tmp_path: Path) -> None:
    key = tmp_path / "key"
    with pytest.raises(ConfigError, match="openssl rand"):
        TierPlan(l2_key_file=key)
    key.write_text("ab" * 32)
    argv = lmcache_command(TierPlan(l2_key_file=key), TIER_PLACES, device="cpu").argv
    assert json.loads(value_of(argv, "--l2-adapter"))["adapter_params"]["key_file"] == str(key.resolve())
    argv = lmcache_command(TierPlan(l2_adapter="plain"), TIER_PLACES, device="cpu").argv
    assert json.loads(value_of(argv, "--l2-adapter")) == {"type": "fs", "base_path": "/run/l2"}
    with pytest.raises(ConfigError, match="verified"):
        TierPlan(l2_adapter="plain", l2_key_file=key)


def test_a_shared_tier_comes_after_the_disk_and_its_password_is_not_in_the_arguments(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    url = "redis://me:pass%40word@cache.example:6380"
    command = lmcache_command(TierPlan(l2_codec="int8", l3_url=url, l2_key_file=key), TIER_PLACES, device="cpu")
    places = [index for index, word in enumerate(command.argv) if word == "--l2-adapter"]
    disk, shared = [json.loads(command.argv[place + 1]) for place in places]
    assert (disk["class_name"], shared["class_name"]) == ("VerifiedDiskAdapter", "VerifiedRedisAdapter")
    assert shared["module_path"] == "pancake_lmcache.redis_adapter"
    assert shared["adapter_params"] == {
        "host": "cache.example",
        "port": 6380,
        "codec": "int8",
        "key_file": str(key.resolve()),
    }
    assert disk["adapter_params"]["codec"] == "int8"
    assert command.env["LMCACHE_RESP_USERNAME"] == "me"
    assert command.env["LMCACHE_RESP_PASSWORD"] == "pass@word"
    assert "word" not in " ".join(command.argv)
    open_server = TierPlan(l2=False, l3_url="redis://127.0.0.1:6379/")
    alone = lmcache_command(open_server, replace(TIER_PLACES, l2_dir=None), device="cpu")
    assert alone.argv.count("--l2-adapter") == 1
    assert not [name for name in alone.env if name.startswith("LMCACHE_RESP")]


@pytest.mark.parametrize(
    "url", ["127.0.0.1:6379", "redis://127.0.0.1", "redis://:secret@/0", "rediss://h:1", "redis://h:1/2", "redis://h:x"]
)
def test_an_address_that_is_no_redis_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://") as caught:
        TierPlan(l3_url=url)
    assert "secret" not in str(caught.value)


def test_a_codec_needs_the_verified_adapter() -> None:
    with pytest.raises(ConfigError, match="verified"):
        TierPlan(l2_adapter="plain", l2_codec="int4")
    with pytest.raises(ConfigError, match="exact, int8, int4"):
        TierPlan(l2_codec="fp8")  # type: ignore[arg-type]


def test_without_a_disk_tier_there_is_no_adapter() -> None:
    argv = lmcache_command(TierPlan(l2=False), replace(TIER_PLACES, l2_dir=None), device="cpu").argv
    assert "--l2-adapter" not in argv


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_pool_bytes", 10),
        ("block_size_tokens", 40),
        ("max_model_len_tokens", 1),
        ("max_num_batched_tokens", 0),
        ("long_prefill_threshold_tokens", 512),
        ("num_threads", 0),
        ("engine_port", 70000),
        ("served_model_name", " "),
        ("ready_timeout_s", 0.0),
        ("model_dir", Path("nowhere")),
        ("chat_template", Path("nowhere")),
        ("block_size_tokens", 128),
    ],
)
def test_plans_refuse_values_that_cannot_work(plan: StackPlan, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"got .*allowed"):
        replace(plan, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [{"l1_bytes": 1}, {"chunk_tokens": 1}, {"port": 0}, {"port": 5, "http_port": 5}, {"mq_timeout_s": 0.0}],
)
def test_tier_plans_refuse_values_that_cannot_work(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="got"):
        TierPlan(**bad)  # type: ignore[arg-type]


def test_an_engine_whose_plan_has_a_tier_needs_one(plan: StackPlan) -> None:
    with pytest.raises(LaunchError, match="TierProcess"):
        EngineProcess(plan)
