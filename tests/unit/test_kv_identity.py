"""What KV in a cache server belongs to: weights, number formats, adapters, tenants."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.tiers import naming
from pancake_vllm.identity import CANARY_SALT, MAX_SALT_CHARS, Adapters, engine_identity, folder_digest, tier_salt
from pancake_vllm.identity_mixin import IdentityMixin, SaltedRequest


def model_folder(folder: Path, *, weights: bytes = b"weights", config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def engine_config(model: str, **changes: str) -> Any:
    formats = {"dtype": "bfloat16", "quantization": "None", "cache_dtype": "auto", **changes}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            dtype=formats["dtype"],
            quantization=formats["quantization"],
            hf_config=SimpleNamespace(_commit_hash=changes.get("commit")),
        ),
        cache_config=SimpleNamespace(cache_dtype=formats["cache_dtype"]),
    )


def lora(folder: Path, *, number: int = 1, name: str = "x") -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder))


# -- weights ------------------------------------------------------------------------------------------------------


def test_the_same_weights_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    first, second = model_folder(tmp_path / "a"), model_folder(tmp_path / "b")
    assert folder_digest(first) == folder_digest(second)
    (first / "tokenizer.json").write_text('{"other": 1}')
    assert folder_digest(first) == folder_digest(second)


def test_one_bit_of_the_weights_or_another_configuration_changes_the_digest(tmp_path: Path) -> None:
    before = folder_digest(model_folder(tmp_path / "m", weights=b"weights"))
    assert folder_digest(model_folder(tmp_path / "m", weights=b"weightr")) != before
    assert folder_digest(model_folder(tmp_path / "m", config='{"rope_theta": 1}')) != before


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no weight files"):
        folder_digest(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"dtype": "float32"}, {"quantization": "awq"}, {"cache_dtype": "fp8_e4m3"}], ids=lambda c: next(iter(c))
)
def test_each_number_format_is_part_of_the_identity(tmp_path: Path, changes: dict[str, str]) -> None:
    model = str(model_folder(tmp_path / "m"))
    assert engine_identity(engine_config(model)) == engine_identity(engine_config(model))
    assert engine_identity(engine_config(model, **changes)) != engine_identity(engine_config(model))


def test_a_model_of_a_hub_is_told_by_its_commit() -> None:
    first = engine_identity(engine_config("org/name", commit="1111"))
    assert engine_identity(engine_config("org/name", commit="1111")) == first
    assert engine_identity(engine_config("org/name", commit="2222")) != first


def test_a_model_that_nothing_is_known_of_is_a_new_one_at_each_start() -> None:
    assert engine_identity(engine_config("org/name")) != engine_identity(engine_config("org/name"))


# -- salts --------------------------------------------------------------------------------------------------------


def test_base_adapter_new_adapter_and_a_salt_of_its_name_are_four_identities() -> None:
    salts = {
        tier_salt("w1", None),
        tier_salt("w1", None, adapter="x"),
        tier_salt("w1", None, adapter="y"),
        tier_salt("w1", "x"),
        tier_salt("w1", "+x"),
        tier_salt("w1", ".x"),
    }
    assert len(salts) == 6


@given(st.text(max_size=200), st.text(max_size=200))
def test_salts_stay_apart_and_are_ones_that_the_server_takes(first: str, second: str) -> None:
    one, other = tier_salt("w1", first, adapter="a1"), tier_salt("w1", second, adapter="a1")
    assert (one == other) == (first == second)
    for salt in (one, other):
        assert len(salt) <= MAX_SALT_CHARS
        assert not set("@/\\\x00") & set(salt)


@given(st.sampled_from(["w1", "w" + 24 * "a"]), st.one_of(st.none(), st.text(max_size=120)))
def test_the_library_looks_where_the_engine_stores(identity: str, salt: str | None) -> None:
    assert naming.tier_salt(identity, salt) == tier_salt(identity, salt)
    assert naming.tier_salt(None, salt) == (salt or "")


def test_a_codec_at_the_end_of_a_salt_moves_to_the_identity() -> None:
    assert tier_salt("w1", "!int4") == "w1!int4"
    assert tier_salt("w1", naming.with_codec("tenant", "int8")) == "w1!int8.tenant"
    assert tier_salt("w1", naming.with_codec(None, "exact"), adapter="a1") == "w1!exact+a1"
    assert tier_salt("w1", 90 * "x" + "!int4").startswith("w1!int4~")
    assert tier_salt("w1", "tenant!int2") == "w1.tenant!int2"
    assert tier_salt("w1", "a!int4!int8") == "w1!int8.a!int4"
    found = {tier_salt("w1", salt) for salt in (None, "!int4", "int4", "!int8", "!exact", ".!int4", "a!int4", "a")}
    assert len(found) == 8


@given(st.one_of(st.none(), st.text(max_size=90)), st.sampled_from(["exact", "int8", "int4"]))
def test_the_library_looks_for_packed_kv_where_the_engine_stores(salt: str | None, codec: naming.KVCodec) -> None:
    named = naming.with_codec(salt, codec)
    assert naming.tier_salt("w1", named) == tier_salt("w1", named)
    assert naming.tier_salt("w1", named).startswith(f"w1!{codec}")
    assert naming.tier_salt("w1", named) != naming.tier_salt("w1", salt)


@pytest.mark.parametrize(
    ("isa", "head_size", "block_size", "order"),
    [
        ("vec", 64, 64, "-v64x64"),
        ("vec16", 80, 16, "-v80x16"),
        ("amx", 128, 32, "-a128x32"),
        ("neon", 64, 32, "-neon64x32"),
    ],
)
def test_the_order_of_a_cpu_engines_kv_is_part_of_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, head_size: int, block_size: int, order: str
) -> None:
    config = engine_config(str(model_folder(tmp_path / "m")))
    plain = engine_identity(config)
    config.device_config = SimpleNamespace(device_type="cpu")
    config.cache_config.block_size = block_size
    config.model_config.get_head_size = lambda: head_size
    attention = SimpleNamespace(_get_attn_isa=lambda dtype, block, head, kv: isa)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.cpu_attn", attention)
    assert engine_identity(config) == plain + order
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.cpu_attn", SimpleNamespace())
    assert engine_identity(config) != engine_identity(config)  # not known: nobody else's


# -- adapters -----------------------------------------------------------------------------------------------------


def test_an_adapter_is_named_by_its_contents(tmp_path: Path) -> None:
    adapters = Adapters()
    x, same, other = (model_folder(tmp_path / name, weights=name[:1].encode()) for name in ("x", "x2", "y"))
    assert adapters.name(lora(x)) == adapters.name(lora(same, number=2))
    assert adapters.name(lora(other, number=3)) != adapters.name(lora(x))
    assert adapters.name(lora(x)) is not None


def test_files_that_change_under_a_loaded_adapter_leave_it_without_a_name(tmp_path: Path) -> None:
    adapters, folder = Adapters(), model_folder(tmp_path / "x")
    named = adapters.name(lora(folder))
    model_folder(folder, weights=b"other weights")
    assert adapters.name(lora(folder)) is None
    model_folder(folder)
    assert adapters.name(lora(folder)) is None  # what the engine holds is not known any more
    assert adapters.name(lora(folder, number=2)) == named  # loaded anew


def test_a_folder_that_cannot_be_read_has_no_name_and_no_error(tmp_path: Path) -> None:
    assert Adapters().name(lora(tmp_path / "nowhere")) is None


def test_other_contents_under_an_old_name_are_noticed_once(tmp_path: Path) -> None:
    adapters, folder = Adapters(), model_folder(tmp_path / "x")
    assert not adapters.is_replaced(lora(folder))
    assert not adapters.is_replaced(lora(folder))
    model_folder(folder, weights=b"second")
    assert adapters.is_replaced(lora(folder, number=2))
    assert not adapters.is_replaced(lora(folder, number=2))


def test_an_adapter_whose_files_keep_their_time_but_not_their_size_is_noticed(tmp_path: Path) -> None:
    adapters, folder = Adapters(), model_folder(tmp_path / "x")
    adapters.name(lora(folder))
    before = (folder / "model.safetensors").stat()
    (folder / "model.safetensors").write_bytes(b"longer weights")
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert adapters.name(lora(folder)) is None


# -- the mix-in ---------------------------------------------------------------------------------------------------


class Recorder:
    """Stands where LMCache's connector stands."""

    def __init__(self, *_: object) -> None:
        self.salts: list[str | None] = []
        self.seen: list[Any] = []

    def bind_gpu_block_pool(self, pool: object) -> None:
        pass

    def on_new_request(self, request: Any) -> None:
        self.seen.append(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.salts.append(request.cache_salt)
        return num_computed_tokens + 1, True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return True, None


class Connector(IdentityMixin, Recorder):
    """What is tested."""


class Pool:
    """As much of a block pool as the mix-in touches."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=number) for number in range(3)]
        self.evicted: list[set[int]] = []

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted.append(block_ids)


def connector(model: Path, *, role: str = "SCHEDULER") -> Connector:
    return Connector(engine_config(str(model)), SimpleNamespace(name=role))


def request(salt: str | None = None, lora_request: Any = None, params: Any = None) -> Any:
    return SimpleNamespace(request_id="r", cache_salt=salt, lora_request=lora_request, kv_transfer_params=params)


def test_the_cache_server_sees_identity_and_salt_and_everything_else_of_the_request(tmp_path: Path) -> None:
    made = connector(model_folder(tmp_path / "m"))
    assert made.get_num_new_matched_tokens(request("tenant"), 4) == (5, True)
    made.on_new_request(request())
    assert made.salts == [f"{made.kv_identity}.tenant"]
    assert isinstance(made.seen[0], SaltedRequest)
    assert (made.seen[0].request_id, made.seen[0].cache_salt) == ("r", made.kv_identity)


def test_workers_ask_nothing_and_read_no_weights(tmp_path: Path) -> None:
    assert connector(tmp_path / "nowhere", role="WORKER").kv_identity is None


def test_an_adapter_without_a_name_asks_under_a_new_one_each_time(tmp_path: Path) -> None:
    made = connector(model_folder(tmp_path / "m"))
    for _ in range(2):
        made.get_num_new_matched_tokens(request(lora_request=lora(tmp_path / "nowhere")), 0)
    assert len(set(made.salts)) == 2


def test_a_replaced_adapter_empties_the_pool_once(tmp_path: Path) -> None:
    made, pool = connector(model_folder(tmp_path / "m")), Pool()
    made.bind_gpu_block_pool(pool)
    folder = model_folder(tmp_path / "x", weights=b"first")
    made.on_new_request(request(lora_request=lora(folder)))
    model_folder(folder, weights=b"second")
    for _ in range(2):
        made.on_new_request(request(lora_request=lora(folder, number=2)))
    assert pool.evicted == [{0, 1, 2}]


@pytest.mark.parametrize("params", [None, {}, {"other": 1}])
def test_only_who_asks_is_told_the_identity(tmp_path: Path, params: Any) -> None:
    made = connector(model_folder(tmp_path / "m"))
    assert made.request_finished(request(params=params), []) == (True, None)
    told = made.request_finished(request(params={"pancake": {}}), [])
    assert told == (True, {"pancake": {"kv_identity": made.kv_identity, "tier": "unproven"}})


def test_a_known_answer_may_look_in_the_cache_server_under_the_salt_of_another(tmp_path: Path) -> None:
    made = connector(model_folder(tmp_path / "m"))
    made.get_num_new_matched_tokens(request("canary-2", params={"pancake": {"tier_salt": "canary-1"}}), 0)
    assert made.salts == [f"{made.kv_identity}.canary-1"]
    assert CANARY_SALT == naming.CANARY_SALT


@pytest.mark.parametrize("salt", ["mine", "canary-1", None])
@pytest.mark.parametrize("other", ["other", "canary-", "", 7])
def test_nobody_else_reads_the_cache_server_under_another_salt(tmp_path: Path, salt: str | None, other: Any) -> None:
    if (salt, other) == ("canary-1", "canary-"):
        other = "other!int4"
    made = connector(model_folder(tmp_path / "m"))
    made.get_num_new_matched_tokens(request(salt, params={"pancake": {"tier_salt": other}}), 0)
    assert made.salts == [tier_salt(made.kv_identity or "", salt)]


def test_a_cache_server_that_is_switched_off_is_not_read_until_it_is_proven_again(tmp_path: Path) -> None:
    made = connector(model_folder(tmp_path / "m"))
    found = []
    for state in ("off", "nonsense", "proven", "unproven"):
        made.on_new_request(request(params={"pancake": {"tier": state}}))
        found.append((made.tier_state, made.get_num_new_matched_tokens(request(), 4)))
    assert found == [("off", (0, False)), ("off", (0, False)), ("proven", (5, True)), ("unproven", (5, True))]


@pytest.mark.parametrize("params", [{"pancake": None}, {"pancake": []}, {"pancake": {"tier": ["off"]}}, "text"])
def test_what_makes_no_sense_changes_nothing(tmp_path: Path, params: Any) -> None:
    made = connector(model_folder(tmp_path / "m"))
    made.on_new_request(request(params=params))
    assert (made.tier_state, made.get_num_new_matched_tokens(request("t", params=params), 4)) == ("unproven", (5, True))
