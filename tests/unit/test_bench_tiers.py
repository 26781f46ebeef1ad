"""What `pancake bench tiers` makes of measured times; the times are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pancake_langgraph._errors import ConfigError, TierError
from pancake_langgraph.bench.options import BenchOptions
from pancake_langgraph.bench.readme import render_block
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.tier_arms import (
    GROUPS,
    TIER_ARM_TEXT,
    GroupResult,
    TierArm,
    TierGroup,
    TierSample,
    chosen_groups,
    rotated,
    tier_ratios,
    tier_summary,
)
from pancake_langgraph.bench.tier_servers import group_tier_plan, own_adapter, with_adapter
from pancake_langgraph.bench.tiers import HostState, TiersPlan, host_state, tiers_result
from pancake_langgraph.bench.workloads import run_bench, servers_plan
from pancake_langgraph.launch.lmcache_command import TierPlaces, lmcache_command
from pancake_langgraph.launch.process import Command

STORED_TOKENS = 1_984
BF16 = 23_040
GROUP_OF = {group.lower: group for group in GROUPS}


def sample(ttft_s: float, cached: int = STORED_TOKENS, words: str = "so it is") -> TierSample:
    return TierSample(ttft_s, cached, words)


def result_of(
    lower: TierArm, lower_s: tuple[float, ...], *, cold_s: float = 4.0, size: float = BF16, words: str = "so it is"
) -> GroupResult:
    repeats = [
        {
            TierArm.COLD: sample(cold_s, cached=0),
            TierArm.L0: sample(0.1),
            TierArm.L1: sample(0.2),
            lower: sample(value, words=words),
        }
        for value in lower_s
    ]
    return GroupResult(GROUP_OF[lower], repeats, size, STORED_TOKENS)


def plan_of(tmp_path: Path) -> TiersPlan:
    return TiersPlan(servers_plan(BenchOptions(model_dir=tmp_path), "tiers"), 2, tuple(TierArm), BF16)


def test_every_arm_says_what_it_is_and_every_lower_store_has_one_server() -> None:
    assert set(TIER_ARM_TEXT) == set(TierArm)
    lower = [group.lower for group in GROUPS]
    assert len(set(lower)) == len(lower)
    assert set(lower) == set(TierArm) - {TierArm.COLD, TierArm.L0, TierArm.L1}


def test_only_servers_that_an_arm_needs_are_started() -> None:
    assert chosen_groups(tuple(TierArm)) == GROUPS
    assert [group.lower for group in chosen_groups((TierArm.L3_INT8, TierArm.COLD))] == [TierArm.L3_INT8]
    assert chosen_groups((TierArm.L1,)) == GROUPS[:1]


def test_every_arm_is_once_in_each_rotation_and_once_in_each_place() -> None:
    arms = GROUPS[0].arms
    turns = [rotated(arms, repeat) for repeat in range(len(arms))]
    assert all(set(turn) == set(arms) and len(turn) == len(arms) for turn in turns)
    assert all({turn[place] for turn in turns} == set(arms) for place in range(len(arms)))


def test_a_ratio_pairs_with_the_cold_prompt_of_its_own_server() -> None:
    slow = result_of(TierArm.L2_EXACT, (0.5, 0.25), cold_s=4.0)
    fast = result_of(TierArm.L2_INT8, (0.5, 0.5), cold_s=2.0)
    ratios = tier_ratios([slow, fast])
    assert ratios["ttft_s.p50 cold/l2-exact"].median == pytest.approx(12.0)
    assert ratios["ttft_s.p50 cold/l2-int8"].median == pytest.approx(4.0)
    assert (ratios["ttft_s.p50 cold/l1"].min, ratios["ttft_s.p50 cold/l1"].max) == pytest.approx((10.0, 20.0))


def test_the_summary_names_what_loses_time() -> None:
    summary = tier_summary(
        [
            result_of(TierArm.L2_EXACT, (0.3, 0.3)),
            result_of(TierArm.L2_INT4, (0.6, 0.6), size=BF16 * 0.29, words="other words"),
            result_of(TierArm.L3_EXACT, (5.0, 6.0)),
        ],
        bf16_token_bytes=BF16,
    )
    assert summary["loses_time"] == ["l3-exact"]
    assert summary["slower_than_exact"] == ["l2-int4"]
    assert summary["over_l1_s"]["l2-exact"] == pytest.approx(0.1)
    assert summary["bytes_ratio_to_bf16"]["l2-int4"] == pytest.approx(0.29)
    assert summary["answers_as_from_l0"]["l2-int4"] == "0 of 2"
    assert summary["answers_as_from_l0"]["l2-exact"] == "2 of 2"
    assert summary["misses"] == {}


def test_kv_that_came_from_elsewhere_is_counted() -> None:
    result = GroupResult(
        GROUP_OF[TierArm.L2_EXACT],
        [
            {
                TierArm.COLD: sample(4.0, cached=64),
                TierArm.L0: sample(0.1),
                TierArm.L1: sample(0.2, cached=STORED_TOKENS - 32),
                TierArm.L2_EXACT: sample(4.0, cached=0),
            }
        ],
        BF16,
        STORED_TOKENS,
    )
    assert tier_summary([result], bf16_token_bytes=BF16)["misses"] == {"cold": 1, "l1": 1, "l2-exact": 1}


def test_the_result_follows_the_schema_and_fills_a_page(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    made = tiers_result(plan, [result_of(TierArm.L2_EXACT, (0.5, 0.25)), result_of(TierArm.L3_INT8, (0.5, 5.0))])
    result = BenchResult.from_json(made.to_json())
    assert list(result.arms) == ["cold", "l0", "l1", "l2-exact", "l3-int8"]
    assert (result.arms["cold"]["ttft_s"].n, result.arms["l3-int8"]["ttft_s"].n) == (4, 2)
    block = render_block([result])
    assert "| `l2-exact` | on disk, VerifiedDiskAdapter, as it is | 0.375 | **12.0** (8.00 to 16.0) |" in block
    assert "Slower than computing the prompt anew: none." in block
    assert result.date in block


def test_our_own_settings_are_those_of_pancake_up(tmp_path: Path) -> None:
    plan = plan_of(tmp_path).servers
    disk = group_tier_plan(GROUP_OF[TierArm.L2_INT4], plan, folder=tmp_path, url=None)
    assert (disk.l2_dir, disk.l2_codec, disk.l2_adapter, disk.l3_url) == (tmp_path, "int4", "verified", None)
    shared = group_tier_plan(GROUP_OF[TierArm.L3_INT8], plan, folder=None, url="redis://127.0.0.1:7000")
    assert (shared.l2, shared.l2_codec, shared.l3_url) == (False, "int8", "redis://127.0.0.1:7000")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: str(group.lower))
def test_each_server_has_one_store_below_main_memory(group: TierGroup, tmp_path: Path) -> None:
    url = "redis://127.0.0.1:7000" if group.place == "valkey" else None
    folder = tmp_path if group.place == "disk" else None
    tier = group_tier_plan(group, plan_of(tmp_path).servers, folder=folder, url=url)
    places = TierPlaces(port=1, http_port=2, shm_name="shm", l2_dir=folder)
    command = lmcache_command(tier, places, device="cpu")
    if (adapter := own_adapter(group, folder=folder, url=url)) is not None:
        command = with_adapter(command, adapter)
    argv = list(command.argv)
    assert argv.count("--l2-adapter") == 1
    said = json.loads(argv[argv.index("--l2-adapter") + 1])
    own = "resp" if url else "fs"
    assert said["type"] == ("plugin" if group.codec is not None else own)
    assert said.get("serde", {}).get("type") == group.serde
    assert said.get("adapter_params", {}).get("codec") == group.codec


def test_what_the_cache_server_has_yet_to_write_is_read_from_its_status() -> None:
    store = {"pending_keys_count": 2, "in_flight_task_count": 1}
    status = {"storage_manager": {"l1_manager": {"total_object_count": 7}, "store_controller": store}}
    assert host_state(status) == HostState(objects=7, pending_stores=3)
    for wrong in (None, {}, {"storage_manager": {"l1_manager": {}}}):
        with pytest.raises(TierError, match="/status"):
            host_state(wrong)


def test_another_adapter_takes_the_place_of_those_that_are_there() -> None:
    command = Command(("server", "--l2-adapter", "{}", "--port", "1", "--l2-adapter", "{}"), {"A": "1"})
    assert with_adapter(command, {"type": "x"}) == Command(
        ("server", "--port", "1", "--l2-adapter", '{"type": "x"}'), {"A": "1"}
    )


def test_a_wrong_arm_is_said_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="l3-lmcache-resp"):
        run_bench("tiers", BenchOptions(arms=("l4",)), lambda text: None)
