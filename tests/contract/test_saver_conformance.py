"""LangGraph's own conformance suite for savers: all capabilities, all tests, on every backend."""

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import ALL_CAPABILITIES, DetectedCapabilities
from langgraph.checkpoint.conformance.report import CapabilityResult

from pancake_langgraph.saver import PancakeSaver

#: Number of tests by capability: together 81.
TESTS = {
    "put": 17,
    "put_writes": 10,
    "get_tuple": 10,
    "list": 16,
    "delete_thread": 5,
    "delete_for_runs": 7,
    "copy_thread": 8,
    "prune": 8,
}
ALL_PASSED = {name: CapabilityResult(True, True, count, 0, 0, []) for name, count in TESTS.items()}
KEYS = [os.urandom(32), os.urandom(32)]


async def results_of(saver: PancakeSaver) -> dict[str, CapabilityResult]:
    @checkpointer_test(name="PancakeSaver")
    async def factory() -> AsyncIterator[PancakeSaver]:
        yield saver

    return (await validate(factory)).results


def test_the_suite_has_81_tests_for_the_capabilities_there_are() -> None:
    assert sum(TESTS.values()) == 81
    assert {capability.value for capability in ALL_CAPABILITIES} == set(TESTS)


def test_the_saver_has_every_capability() -> None:
    saver = PancakeSaver()
    for instance in (saver, saver.with_allowlist([("decimal", "Decimal"), ("app.models", "Invoice")])):
        assert DetectedCapabilities.from_instance(instance) == DetectedCapabilities(ALL_CAPABILITIES, frozenset())


@pytest.mark.parametrize("keys", [[], KEYS], ids=["plain", "encrypted"])
async def test_all_81_pass(saver_factory: Any, keys: list[bytes]) -> None:
    assert await results_of(saver_factory(keys=keys)) == ALL_PASSED


async def test_all_81_pass_on_a_clone_with_more_types(saver_factory: Any) -> None:
    saver = saver_factory()
    clone = saver.with_allowlist([("app.models", "Invoice")])
    assert clone is not saver
    assert await results_of(clone) == ALL_PASSED


async def test_all_81_pass_with_a_time_to_live(saver_factory: Any) -> None:
    assert await results_of(saver_factory(ttl_s=3600, refresh_ttl_on_read=True)) == ALL_PASSED
