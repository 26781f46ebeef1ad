"""Which requests are looked up in the cache server, on a small model of LMCache's connector."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pancake_vllm.lookup_mixin import MAX_NEW_TOKENS, MAX_SPARED_S, SparedLookupMixin

SIZE = 16
PARAMS = {"pancake": {"hold": {"id": "h", "num_tokens": 10**6, "ttl_s": 60.0, "whole": True}}}


class Book:
    """Holds one context of four blocks, whole."""

    block_size_tokens = SIZE
    held = "h"

    def __init__(self) -> None:
        self.said: list[str] = []

    def say_whole(self, hint_id: str) -> None:
        self.said.append(hint_id)

    def whole_behind(self, hashes: Sequence[str], num_blocks: int) -> str | None:
        return self.held if num_blocks >= 4 else None


class Asked:
    """What LMCache's connector keeps of requests, and the look-ups that it makes."""

    _hit_alignment_tokens = SIZE

    def __init__(self) -> None:
        self.scheduler_adapter = SimpleNamespace(lmcache_tokens_per_chunk=SIZE)
        self.request_trackers: dict[str, Any] = {}
        self.asked: list[str] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tracker = self._get_or_create_request_tracker(request)
        tracker.lookup_started_at = 1.0
        self.asked.append(request.request_id)
        return None, True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self.request_trackers.pop(request.request_id, None)
        return False, None

    def _get_or_create_request_tracker(self, request: Any) -> Any:
        fresh = SimpleNamespace(
            lookup_started_at=None,
            state=SimpleNamespace(name="PREFETCHING"),
            num_vllm_hit_tokens=0,
            num_stored_tokens=0,
            num_lmcache_hit_tokens=0,
        )
        return self.request_trackers.setdefault(request.request_id, fresh)

    def _salted(self, request: Any) -> Any:
        return request


class Connector(SparedLookupMixin, Asked):
    """The mix-in over the model, with a clock that is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self._hints = SimpleNamespace(book=Book())
        self.now_s = 0.0

    def _now_s(self) -> float:
        return self.now_s

    def ask(self, name: str, num_tokens: int, *, num_new: int = 20) -> Any:
        request = SimpleNamespace(
            request_id=name,
            block_hashes=["x"] * 9,
            all_token_ids=range(num_tokens + num_new),
            kv_transfer_params=PARAMS,
        )
        return request, self.get_num_new_matched_tokens(request, num_tokens)

    def serve(self, name: str, num_tokens: int, *, stored: int | None = None, found: int = 0, prompt: int = 0) -> None:
        request, _ = self.ask(name, num_tokens)
        request.num_prompt_tokens = prompt
        self.request_trackers[name].num_lmcache_hit_tokens = found
        if stored is not None:
            self.request_trackers[name].num_stored_tokens = stored
        self.request_finished(request, [])


@pytest.fixture
def connector() -> Connector:
    made = Connector()
    made.serve("first", 0, stored=3 * SIZE)
    assert made.asked == ["first"]
    return made


def test_a_context_that_is_held_whole_is_not_looked_up_and_stored_on_from_where_it_was(connector: Connector) -> None:
    _, answer = connector.ask("next", 4 * SIZE + 3)
    assert (answer, connector.asked) == ((0, False), ["first"])
    tracker = connector.request_trackers["next"]
    assert (tracker.num_vllm_hit_tokens, tracker.num_stored_tokens) == (4 * SIZE, 3 * SIZE)


def test_storing_goes_on_at_the_edge_of_a_chunk() -> None:
    connector = Connector()
    connector.scheduler_adapter.lmcache_tokens_per_chunk = 3 * SIZE
    connector.serve("first", 0, stored=6 * SIZE)
    connector.ask("next", 5 * SIZE)  # less is found than was stored: the answer's end is read in other tokens
    tracker = connector.request_trackers["next"]
    assert (tracker.num_vllm_hit_tokens, tracker.num_stored_tokens) == (5 * SIZE, 3 * SIZE)


def test_what_the_pool_has_lost_a_part_of_is_looked_up(connector: Connector) -> None:
    assert connector.ask("next", 3 * SIZE)[1] == (None, True)


def test_a_context_of_which_nothing_is_known_is_looked_up(connector: Connector) -> None:
    connector._hints.book.held = "another"
    assert connector.ask("next", 4 * SIZE)[1] == (None, True)


def test_a_request_that_was_asked_for_already_goes_on_being_asked_for(connector: Connector) -> None:
    connector.ask("next", 0)
    assert connector.ask("next", 4 * SIZE)[1] == (None, True)


def test_a_request_that_lost_its_context_before_there_was_room_for_it_is_looked_up_from_its_beginning(
    connector: Connector,
) -> None:
    assert connector.ask("next", 4 * SIZE)[1] == (0, False)
    assert connector.ask("next", 0)[1] == (None, True)
    assert connector.request_trackers["next"].num_stored_tokens == 0


def test_a_thread_is_looked_up_again_after_a_time_however_often_it_was_spared(connector: Connector) -> None:
    for number in range(3):
        connector.now_s += MAX_SPARED_S / 4
        connector.serve(f"turn {number}", 4 * SIZE)
    assert connector.asked == ["first"]
    connector.now_s += MAX_SPARED_S / 4
    connector.serve("late", 4 * SIZE)
    connector.serve("soon after", 4 * SIZE)
    assert connector.asked == ["first", "late"]


def test_another_lmcache_is_asked_as_it_wants_to_be(connector: Connector) -> None:
    connector._salted = lambda request: request.no_such_field  # type: ignore[method-assign]
    assert connector.ask("next", 4 * SIZE)[1] == (None, True)
    assert connector.ask("other", 4 * SIZE)[1] == (None, True)
    assert connector.asked == ["first", "next", "other"]


def test_a_request_with_much_behind_its_context_is_looked_up(connector: Connector) -> None:
    assert connector.ask("short", 4 * SIZE, num_new=MAX_NEW_TOKENS)[1] == (0, False)
    assert connector.ask("long", 4 * SIZE, num_new=MAX_NEW_TOKENS + 1)[1] == (None, True)


@pytest.mark.parametrize(
    ("chunk", "found", "prompt", "is_new"),
    [
        (SIZE, 3 * SIZE, 4 * SIZE + 1, True),
        (SIZE, 0, 4 * SIZE + 1, True),
        (SIZE, 4 * SIZE, 4 * SIZE + 1, False),  # all of it was found: more may lie behind
        (SIZE, 3 * SIZE, 4 * SIZE, False),  # nobody looks up a prompt's last token
        (3 * SIZE, 3 * SIZE, 5 * SIZE, False),  # what is no whole chunk is nowhere
        (3 * SIZE, 0, 5 * SIZE, True),
    ],
)
def test_what_is_behind_a_context_that_was_not_found_whole_is_new(
    chunk: int, found: int, prompt: int, is_new: bool
) -> None:
    connector = Connector()
    connector.scheduler_adapter.lmcache_tokens_per_chunk = chunk
    connector.serve("first", 0, found=found, prompt=prompt)
    assert connector._hints.book.said == (["h"] if is_new else [])


def test_another_lmcache_tells_of_nothing_that_it_would_be_new() -> None:
    connector = Connector()
    request, _ = connector.ask("first", 0)
    request.num_prompt_tokens = 4 * SIZE
    del connector.request_trackers["first"].num_lmcache_hit_tokens
    connector.request_finished(request, [])
    assert connector._hints.book.said == []


def test_without_hints_everything_is_looked_up(connector: Connector) -> None:
    for hints in (None, SimpleNamespace(book=None)):
        connector._hints = hints
        assert connector.ask(f"with {hints}", 4 * SIZE)[1] == (None, True)
