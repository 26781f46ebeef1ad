"""Settings: ranges, the environment, what is resolved."""

from dataclasses import fields, replace

import pytest

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.config import EngineFacts, RuntimeSettings, resolve, settings_from_env
from pancake_langgraph.config.env import _FIELDS, parse_bool, runtime_requested

ALL = EngineFacts(
    tokenizer=True,
    token_prompts=True,
    prompt_token_ids=True,
    priority=True,
    kv_events=True,
    prefix_caching=True,
    block_size_tokens=32,
    pool_tokens=9000,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("p_warm_min", 1.5),
        ("reserve_ratio", -0.1),
        ("max_inflight_actions", 0),
        ("action_ttl_s", 0),
        ("breaker_failures", True),
        ("warm_deadline_s", float("nan")),
        ("base_url", "127.0.0.1:8000"),
        ("kv_events_endpoint", "/tmp/sock"),
        ("tier_url", "localhost"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        RuntimeSettings(**{field: value})  # type: ignore[arg-type]


def test_a_tier_needs_the_engines_model_string() -> None:
    with pytest.raises(ConfigError, match="PANCAKE_TIER_MODEL"):
        RuntimeSettings(tier_url="http://127.0.0.1:1")


def test_every_field_can_be_set_by_the_environment() -> None:
    assert {name for name, _ in _FIELDS.values()} == {field.name for field in fields(RuntimeSettings)}


def test_the_environment_is_read_and_arguments_win() -> None:
    environ = {"PANCAKE_MODEL": "a", "PANCAKE_P_WARM_MIN": "0.7", "PANCAKE_BASE_URL": ""}
    settings = settings_from_env(environ, model="b")
    assert (settings.model, settings.p_warm_min) == ("b", 0.7)
    assert settings.base_url == RuntimeSettings().base_url


def test_a_bad_environment_value_names_its_variable() -> None:
    with pytest.raises(ConfigError, match="PANCAKE_P_WARM_MIN"):
        settings_from_env({"PANCAKE_P_WARM_MIN": "much"})
    with pytest.raises(ConfigError, match="PANCAKE_RUNTIME"):
        runtime_requested({"PANCAKE_RUNTIME": "maybe"})
    with pytest.raises(ConfigError, match="unknown setting"):
        settings_from_env({}, no_such_field="x")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("off", False), ("", False)])
def test_there_is_one_dialect_of_switches(text: str, value: bool) -> None:
    assert parse_bool("X", text) is value


def test_the_key_is_masked() -> None:
    assert "secret" not in repr(RuntimeSettings(api_key="secret"))


def test_a_full_engine_switches_everything_on() -> None:
    resolved = resolve(RuntimeSettings(), ALL)
    assert (resolved.warm, resolved.hold, resolved.priority, resolved.ask_token_ids) == (True, True, 10, True)


@pytest.mark.parametrize(
    ("change", "warm", "hold"),
    [
        ({"tokenizer": False}, False, False),
        ({"token_prompts": False}, False, False),
        ({"prefix_caching": False}, False, False),
        ({"kv_events": False}, True, False),
        ({"pool_tokens": None}, True, False),
    ],
)
def test_what_is_missing_is_left_out_with_a_reason(change: dict[str, object], warm: bool, hold: bool) -> None:
    from dataclasses import replace

    resolved = resolve(RuntimeSettings(), replace(ALL, **change))  # type: ignore[arg-type]
    assert (resolved.warm, resolved.hold) == (warm, hold)
    assert resolved.reasons


def test_an_engine_that_cannot_be_reached_leaves_only_watching() -> None:
    assert not resolve(RuntimeSettings(), None).warm


def test_hints_on_the_pool_need_an_engine_that_takes_them_and_may_be_switched_off() -> None:
    takes = replace(ALL, pool_hints=True)
    assert resolve(RuntimeSettings(), takes).pool_hints
    for settings, facts, why in [
        (RuntimeSettings(), ALL, "engine takes none"),
        (settings_from_env({"PANCAKE_POOL_HINTS": "off"}), takes, "switched off"),
    ]:
        found = resolve(settings, facts)
        assert found.hold
        assert not found.pool_hints
        assert any("no pool hints" in reason and why in reason for reason in found.reasons)
    assert not resolve(RuntimeSettings(), replace(takes, kv_events=False)).pool_hints
    with pytest.raises(ConfigError, match="PANCAKE_POOL_HINTS"):
        settings_from_env({"PANCAKE_POOL_HINTS": "perhaps"})
    with pytest.raises(ConfigError, match="pool_hints"):
        RuntimeSettings(pool_hints=1)  # type: ignore[arg-type]
