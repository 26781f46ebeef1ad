"""Real servers for the tests that need them: started on demand, one stack at a time, and never skipped.

A test asks for `smol_stack`, `tiny_stack` or `exact_stack`.  They live for the whole session, but only one engine is
alive at any time: asking for another one ends the first.  Tests are therefore ordered by the stack they use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pancake_langgraph.config.folders import cache_dir
from pancake_langgraph.launch import Stack, StackPlan, TierPlan
from pancake_langgraph.launch.run_folder import new_run_dir
from pancake_langgraph.weights import TOOLS_TEMPLATE, build_tiny_llama, prepare_smollm

_ORDER = ("smol_stack", "tiny_stack", "exact_stack")


def _progress(step: str, elapsed_s: float) -> None:
    if int(elapsed_s) % 10 < 2:
        print(f"  {step} … {elapsed_s:.0f} s", file=sys.stderr, flush=True)


class OneStack:
    """Keeps at most one stack alive; makes it again when its processes died."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._stack: Stack | None = None

    def get(self, name: str, make: Callable[[], StackPlan]) -> Stack:
        """Return the running stack called `name`, ending another one first and mending what a test broke."""
        if self._stack is not None and self._name == name:
            self._mend(self._stack)
            return self._stack
        self.close()
        stack = Stack(make(), on_progress=_progress)
        stack.start()
        self._name, self._stack = name, stack
        return stack

    def close(self) -> None:
        """End whatever runs."""
        if self._stack is not None:
            self._stack.stop()
        self._name = self._stack = None

    @staticmethod
    def _mend(stack: Stack) -> None:
        for part in (stack.tier_process, stack.engine_process):
            if part is not None:
                part.process.thaw()
                if not part.healthy():
                    part.restart()


@pytest.fixture(scope="session")
def _one_stack() -> Iterator[OneStack]:
    holder = OneStack()
    yield holder
    holder.close()


@pytest.fixture(scope="session")
def one_engine(_one_stack: OneStack) -> None:
    """End the session's stack: the test brings an engine of its own."""
    _one_stack.close()


@pytest.fixture(scope="session")
def smol_dir() -> Path:
    """Folder of the prepared SmolLM2-135M-Instruct."""
    return prepare_smollm(on_progress=_progress)


@pytest.fixture(scope="session")
def tiny_dir(smol_dir: Path) -> Path:
    """Folder of the random tiny Llama."""
    return build_tiny_llama(cache_dir() / "models" / "tiny-llama-0", tokenizer_dir=smol_dir, on_progress=_progress)


@pytest.fixture
def smol_stack(_one_stack: OneStack, smol_dir: Path) -> Stack:
    """SmolLM2 in bfloat16 with tier, KV events, tools template and tool parser."""
    return _one_stack.get(
        "smol",
        lambda: StackPlan(
            model_dir=smol_dir,
            chat_template=TOOLS_TEMPLATE,
            tier=TierPlan(),
            dev_routes=True,
            run_dir=new_run_dir(),
        ),
    )


@pytest.fixture
def tiny_stack(_one_stack: OneStack, tiny_dir: Path) -> Stack:
    """The random tiny Llama in float32 with tier, KV events, tools template and tool parser."""
    return _one_stack.get(
        "tiny",
        lambda: StackPlan(
            model_dir=tiny_dir,
            dtype="float32",
            kv_pool_bytes=32_000_000,
            chat_template=TOOLS_TEMPLATE,
            tier=TierPlan(l1_bytes=64_000_000),
            dev_routes=True,
            run_dir=new_run_dir(),
        ),
    )


@pytest.fixture
def exact_stack(_one_stack: OneStack, smol_dir: Path) -> Stack:
    """SmolLM2 in float32, where a cached prompt and a cold one give the same tokens."""
    return _one_stack.get(
        "exact",
        lambda: StackPlan(
            model_dir=smol_dir,
            dtype="float32",
            kv_pool_bytes=480_000_000,
            chat_template=TOOLS_TEMPLATE,
            tier=TierPlan(l1_bytes=1_000_000_000, mq_timeout_s=1.0, heartbeat_s=0.5),
            dev_routes=True,
            run_dir=new_run_dir(),
        ),
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by the stack they use, those without any first, otherwise in their order."""

    def rank(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return next((1 + k for k, name in enumerate(_ORDER) if name in names), 0)

    items.sort(key=rank)
