"""KV of other weights, of adapters and of other tenants is never read: on the real engine and cache server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pancake_langgraph.launch import Stack, StackPlan, TierPlan
from pancake_langgraph.launch.run_folder import new_run_dir
from pancake_langgraph.weights import build_tiny_llama

pytestmark = pytest.mark.real

PROMPT = [300 + 7 * position % 9_000 for position in range(403)]
#: All whole chunks of the prompt.
STORED_TOKENS = 384


@dataclass(frozen=True)
class Answer:
    """What an engine said, and where it had the prompt's KV from."""

    text: str
    cached_tokens: int
    loaded_tokens: int


class Engine:
    """A running engine whose pool can be emptied."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._root = stack.base_url.removesuffix("/v1")

    def ask(self, model: str = "small", *, salt: str | None = None) -> Answer:
        before = self._loaded_tokens()
        body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}
        response = httpx.post(
            f"{self.stack.base_url}/completions",
            json=body if salt is None else {**body, "cache_salt": salt},
            timeout=120,
        )
        assert response.is_success, response.text
        answer = response.json()
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(answer["choices"][0]["text"], cached, round(self._loaded_tokens() - before))

    def forget(self) -> None:
        """Empty the engine's own pool."""
        assert httpx.post(f"{self._root}/reset_prefix_cache", timeout=30).is_success

    def load(self, name: str, folder: Path) -> None:
        """Take an adapter out, and load it anew from its folder."""
        out = httpx.post(f"{self.stack.base_url}/unload_lora_adapter", json={"lora_name": name}, timeout=30)
        assert out.is_success, out.text
        loaded = {"lora_name": name, "lora_path": str(folder)}
        back = httpx.post(f"{self.stack.base_url}/load_lora_adapter", json=loaded, timeout=60)
        assert back.is_success, back.text

    def _loaded_tokens(self) -> float:
        lines = httpx.get(f"{self._root}/metrics", timeout=30).text.splitlines()
        name = "vllm:external_prefix_cache_hits_total{"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def write_adapter(folder: Path, model_dir: Path, *, seed: int) -> Path:
    """Write a random LoRA adapter, strong enough to be heard."""
    import torch
    from safetensors.torch import save_file

    sizes = json.loads((model_dir / "config.json").read_text())
    hidden, rank = sizes["hidden_size"], 8
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(sizes["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=random)
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=random)
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, sizes["intermediate_size"], generator=random)
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=random)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
        "base_model_name_or_path": str(model_dir),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights may be replaced."""
    return Path(shutil.copytree(tiny_dir, tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture(scope="module")
def adapter_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "x", model_dir, seed=1)


@pytest.fixture(scope="module")
def engine(
    one_engine: None, model_dir: Path, adapter_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    plan = StackPlan(
        model_dir=model_dir,
        dtype="float32",
        kv_pool_bytes=32_000_000,
        adapters=(("x", adapter_dir),),
        tier=TierPlan(l1_bytes=64_000_000, l2_dir=tmp_path_factory.mktemp("l2")),
        dev_routes=True,
        run_dir=new_run_dir(),
    )
    with Stack(plan) as stack:
        yield Engine(stack)


def test_base_adapter_and_tenant_are_kept_apart_in_pool_and_cache_server(engine: Engine) -> None:
    """LMCache 0.5.6 alone gives an adapter the KV of the base model: its keys do not know adapters."""
    asked = {"base": ("small", None), "adapter": ("x", None), "tenant": ("small", "x"), "adapter's": ("x", "x")}
    cold = {name: engine.ask(model, salt=salt) for name, (model, salt) in asked.items()}
    assert {(answer.cached_tokens, answer.loaded_tokens) for answer in cold.values()} == {(0, 0)}
    assert cold["base"].text == cold["tenant"].text != cold["adapter"].text == cold["adapter's"].text
    engine.forget()
    for name, (model, salt) in asked.items():
        again = engine.ask(model, salt=salt)
        assert (again.text, again.loaded_tokens) == (cold[name].text, STORED_TOKENS), name


def test_an_adapter_with_new_weights_under_its_old_name_reads_nothing_old(
    engine: Engine, adapter_dir: Path, model_dir: Path
) -> None:
    old = engine.ask("x")
    write_adapter(adapter_dir, model_dir, seed=2)
    engine.load("x", adapter_dir)
    new = engine.ask("x")
    assert (new.cached_tokens, new.loaded_tokens) == (0, 0)
    assert new.text == engine.ask("x", salt="fresh").text != old.text
    write_adapter(adapter_dir, model_dir, seed=1)
    engine.load("x", adapter_dir)
    back = engine.ask("x")
    assert (back.text, back.loaded_tokens) == (old.text, STORED_TOKENS)  # what it had stored before is found again


def test_new_weights_under_an_old_path_read_nothing_old_and_old_ones_find_theirs_again(
    engine: Engine, model_dir: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    engine.forget()
    old = engine.ask()
    other = build_tiny_llama(tmp_path / "other", seed=1, tokenizer_dir=tiny_dir)
    shutil.copy(other / "model.safetensors", model_dir / "model.safetensors")
    engine.stack.engine_process.restart()
    new = engine.ask()
    assert (new.cached_tokens, new.loaded_tokens) == (0, 0)
    assert new.text == engine.ask(salt="fresh").text != old.text
    shutil.copy(tiny_dir / "model.safetensors", model_dir / "model.safetensors")
    engine.stack.engine_process.restart()
    back = engine.ask()
    assert (back.text, back.loaded_tokens) == (old.text, STORED_TOKENS)
