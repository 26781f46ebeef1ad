"""What every store promises about threads that are deleted, cut or expire, and about who comes too late."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from pancake_langgraph._errors import ThreadDeleted
from pancake_langgraph.checkpoint.rows import CheckpointRow, Removal, Spot, ThreadContent
from pancake_langgraph.checkpoint.sqlite_store import SqliteStore
from pancake_langgraph.checkpoint.store import ORPHANS_KEPT_S, StaleNeed, Store
from tests.contract.store_kit import (
    NO_REMOVAL,
    NOTHING,
    MakeStore,
    digest,
    filled,
    is_empty,
    listed,
    put,
    put_writes,
    row,
    write,
)

# -- deletion ---------------------------------------------------------------------------------------------------------


def test_delete_leaves_nothing_and_touches_no_other_thread(store: Store) -> None:
    filled(store)
    filled(store, "u")
    before = store.read_thread("u")
    store.delete_thread("t", deletion_id="5")
    assert is_empty(store, "t")
    assert store.get_checkpoint("t", "", None) is None
    assert store.get_checkpoint("t", "", "2") is None
    assert store.get_writes("t", Spot("", "2")) == ()
    assert store.get_elements("t", [digest(1)]) == {}
    assert listed(store, "t") == []
    assert store.read_thread("u") == before


@pytest.mark.parametrize(
    ("late", "why"),
    [
        (row("4"), "older than the deletion"),
        (row("5"), "equal to the deletion"),
        (row("4", "3"), "older, and its parent is gone"),
        (row("6", "3"), "its parent is gone"),
        (row("6", "2", ns="sub"), "its parent is in another namespace, and gone"),
    ],
)
def test_a_late_put_is_refused_and_stores_nothing(store: Store, late: CheckpointRow, why: str) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted, match="'t' was deleted"):
        put(store, "t", late, {digest(9): b"late"})
    assert is_empty(store, "t"), why
    with pytest.raises(ThreadDeleted):  # whatever else holds: its id is dead
        put_writes(store, "t", write(late.spot.checkpoint_id, "task", 0, ns=late.spot.checkpoint_ns))
    assert is_empty(store, "t"), why


def test_deleted_goes_before_a_missing_need(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("6", "3"), needs=Spot("", "3"))


def test_a_thread_that_never_was_can_be_deleted_too(store: Store) -> None:
    store.delete_thread("t", deletion_id="5")
    assert is_empty(store, "t")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("4"))


def test_a_new_run_may_use_the_id_again(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    put(store, "t", row("6"), {digest(6): b"six"})
    put(store, "t", row("7", "6"), needs=Spot("", "6"))
    put_writes(store, "t", write("7", "task", 0))
    assert listed(store, "t") == ["7", "6"]
    assert list(store.threads()) == ["t"]
    assert store.get_elements("t", [digest(1), digest(6)]) == {digest(6): b"six"}
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("8", "3"))
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("4"))
    assert listed(store, "t") == ["7", "6"]


def test_late_writes_are_refused_by_the_age_of_their_checkpoint(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    for checkpoint_id in ("2", "4", "5"):
        with pytest.raises(ThreadDeleted, match="'t' was deleted"):
            put_writes(store, "t", write(checkpoint_id, "task", 0), elements={digest(9): b"late"})
    with pytest.raises(ThreadDeleted):  # one late row spoils all
        put_writes(store, "t", write("6", "task", 0), write("4", "task", 0))
    assert is_empty(store, "t")
    put_writes(store, "t", write("6", "task", 0))
    assert store.get_writes("t", Spot("", "6")) == (write("6", "task", 0),)


def test_writes_to_a_dead_id_are_taken_once_it_exists(store: Store) -> None:
    store.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("6", "3"))
    put(store, "t", row("6"))
    put_writes(store, "t", write("6", "task", 0))
    assert store.get_writes("t", Spot("", "6")) == (write("6", "task", 0),)


def test_writes_that_came_before_a_refused_put_go_with_it(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    put_writes(store, "t", write("6", "task", 0), write("6", "task", -1))
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("6", "3"))
    assert store.get_writes("t", Spot("", "6")) == ()
    assert list(store.threads()) == []


def test_deleting_again_moves_the_mark(store: Store) -> None:
    store.delete_thread("t", deletion_id="5")
    put(store, "t", row("6"))
    store.delete_thread("t", deletion_id="8")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("7"))
    put(store, "t", row("9"))
    assert listed(store, "t") == ["9"]


def test_deletion_holds_for_other_stores_too(shared: MakeStore) -> None:
    first, second = shared(), shared()
    filled(first)
    put(second, "t", row("3", "2"))
    first.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted):
        put(second, "t", row("6", "3"), needs=Spot("", "3"))
    with pytest.raises(ThreadDeleted):
        put_writes(second, "t", write("3", "task", 0))
    assert is_empty(first, "t")


# -- writes without a checkpoint --------------------------------------------------------------------------------------


def put_orphans(store: Store, thread_id: str = "t") -> None:
    """Writes that come after a deletion, to a checkpoint minted after it that never comes."""
    put_writes(store, thread_id, write("6", "task", 0), write("6", "task", -1), elements={digest(6): b"six"})


def test_writes_without_a_checkpoint_make_no_thread(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    put_orphans(store)
    put_orphans(store, "never deleted")
    for thread_id in ("t", "never deleted"):
        assert is_empty(store, thread_id)
        assert store.get_checkpoint(thread_id, "", None) is None
        assert listed(store, thread_id) == []
        assert len(store.get_writes(thread_id, Spot("", "6"))) == 2  # its put may be on the way
        store.rewrite_thread(thread_id, lambda _: pytest.fail("there is nothing to decide about"))
        assert len(store.get_writes(thread_id, Spot("", "6"))) == 2
    assert list(store.threads_of_run("r")) == []


def test_a_checkpoint_finds_the_writes_that_waited_for_it(store: Store) -> None:
    store.delete_thread("t", deletion_id="5")
    put_orphans(store)
    put(store, "t", row("6"), {digest(7): b"seven"})
    put_writes(store, "t", write("7", "task", 0))
    put(store, "t", row("7", "6"), needs=Spot("", "6"))
    assert list(store.threads()) == ["t"]
    store.expire(now_s=time.time() + 10 * ORPHANS_KEPT_S)
    assert listed(store, "t") == ["7", "6"]
    assert len(store.get_writes("t", Spot("", "6"))) == 2
    assert store.get_writes("t", Spot("", "7")) == (write("7", "task", 0),)
    assert store.get_elements("t", [digest(6), digest(7)]) == {digest(6): b"six", digest(7): b"seven"}


def test_writes_without_a_checkpoint_go_with_the_next_deletion(store: Store) -> None:
    store.delete_thread("t", deletion_id="5")
    put_orphans(store)
    store.delete_thread("t", deletion_id="7")
    assert store.get_writes("t", Spot("", "6")) == ()
    assert store.get_elements("t", [digest(6)]) == {}


@pytest.mark.parametrize("expires_in_s", [None, 10 * ORPHANS_KEPT_S])
def test_writes_without_a_checkpoint_are_gone_after_a_while(
    store: Store, monkeypatch: pytest.MonkeyPatch, expires_in_s: float | None
) -> None:
    store.delete_thread("t", deletion_id="5")
    monkeypatch.setattr("pancake_langgraph.checkpoint.store.ORPHANS_KEPT_S", 0.05)
    expires_at_s = None if expires_in_s is None else time.time() + expires_in_s
    put_writes(store, "t", write("6", "task", 0), elements={digest(6): b"six"}, expires=expires_at_s)
    while store.get_writes("t", Spot("", "6")) or store.get_elements("t", [digest(6)]):
        time.sleep(0.01)
    assert store.expire(now_s=time.time()) == 0
    with pytest.raises(ThreadDeleted):  # the deletion is not forgotten with them
        put(store, "t", row("4"))
    put(store, "t", row("6"))
    assert store.read_thread("t") == ThreadContent((row("6"),), (), {})


def test_a_sweep_takes_writes_without_a_checkpoint_out_of_the_file(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "threads.db"))
    store.delete_thread("t", deletion_id="5")
    put_orphans(store)
    put_orphans(store, "never deleted")
    connection = sqlite3.connect(tmp_path / "threads.db")

    def num_rows() -> list[int]:
        tables = ("threads", "writes", "elements")
        return [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]

    assert store.expire(now_s=time.time() + ORPHANS_KEPT_S - 60) == 0
    assert num_rows() == [2, 4, 2]
    assert store.expire(now_s=time.time() + ORPHANS_KEPT_S) == 0  # no threads, only what was left behind
    assert num_rows() == [0, 0, 0]
    connection.close()
    store.close()


def test_writes_that_a_rewrite_leaves_without_a_checkpoint_are_gone_after_a_while(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pancake_langgraph.checkpoint.store.ORPHANS_KEPT_S", 0.05)
    put(store, "t", row("1"))
    put_writes(store, "t", write("2", "task", 0))
    store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "1")}), frozenset(), frozenset()))
    assert is_empty(store, "t")
    while store.get_writes("t", Spot("", "2")):
        time.sleep(0.01)


def test_a_rewrite_may_leave_writes_whose_checkpoint_is_still_to_come(store: Store) -> None:
    put(store, "t", row("1"))
    put_writes(store, "t", write("2", "task", 0))
    store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "1")}), frozenset(), frozenset()))
    assert is_empty(store, "t")
    put(store, "t", row("2", "1"))
    assert store.read_thread("t") == ThreadContent((row("2", "1"),), (write("2", "task", 0),), {})


def test_a_thread_overwritten_by_writes_alone_is_gone(store: Store) -> None:
    filled(store)
    store.write_thread("t", ThreadContent((), (write("6", "task", 0),), {digest(6): b"six"}), expires_at_s=None)
    assert is_empty(store, "t")
    assert store.get_writes("t", Spot("", "6")) == ()


def test_a_thread_that_expires_stays_deleted(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("8", "3"))
    put(store, "t", row("6"), expires_at_s=time.time() - 1)
    store.expire(now_s=time.time())
    for late in (row("4"), row("7", "3")):
        with pytest.raises(ThreadDeleted):
            put(store, "t", late)
    with pytest.raises(ThreadDeleted):
        put_writes(store, "t", write("8", "task", 0))
    put(store, "t", row("9"))
    assert listed(store, "t") == ["9"]


# -- rewriting --------------------------------------------------------------------------------------------------------


def test_a_rewrite_sees_everything_and_takes_out_what_is_decided(store: Store) -> None:
    filled(store)
    before = store.read_thread("t")
    seen: list[ThreadContent] = []

    def decide(content: ThreadContent) -> Removal:
        seen.append(content)
        return Removal(frozenset({Spot("", "1")}), frozenset({Spot("", "2")}), frozenset({digest(1), digest(9)}))

    store.rewrite_thread("t", decide)
    assert seen == [before]
    assert len(before.rows) == 3
    assert len(before.writes) == 2
    after = store.read_thread("t")
    assert set(after.rows) == {row("2", "1", run_id="r", hidden=True), row("3", "2", ns="sub", run_id="s")}
    assert after.elements == {digest(2): b"two", digest(3): b"three"}
    assert after.writes == before.writes
    assert listed(store, "t") == ["3"]
    assert store.get_checkpoint("t", "", None) is None
    assert store.get_checkpoint("t", "", "2") == row("2", "1", run_id="r", hidden=True)


def test_writes_of_removed_checkpoints_go_with_them(store: Store) -> None:
    put(store, "t", row("1"))
    put(store, "t", row("2"))
    put_writes(store, "t", write("1", "task", 0), write("2", "task", 0), write("1", "task", 0, ns="sub"))
    store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "1")}), frozenset(), frozenset()))
    assert store.get_writes("t", Spot("", "1")) == ()
    assert store.get_writes("t", Spot("", "2")) == (write("2", "task", 0),)
    assert store.get_writes("t", Spot("sub", "1")) == (write("1", "task", 0, ns="sub"),)


def test_a_put_leans_on_nothing_that_a_rewrite_took(store: Store) -> None:
    filled(store)
    store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "2")}), frozenset(), frozenset({digest(2)})))
    with pytest.raises(StaleNeed):
        put(store, "t", row("4", "2"), needs=Spot("", "2"))
    put(store, "t", row("4", "2"), {digest(2): b"two"})  # the thread was not deleted: a gone parent is all right


def test_where_nothing_is_left_the_thread_is_as_if_it_had_never_been(store: Store) -> None:
    filled(store)
    spots = frozenset({Spot("", "1"), Spot("", "2"), Spot("sub", "3"), Spot("", "3")})
    store.rewrite_thread("t", lambda content: Removal(spots, frozenset(), frozenset(content.elements)))
    assert is_empty(store, "t")
    put(store, "t", row("0", "nowhere"))
    assert listed(store, "t") == ["0"]


def test_a_rewrite_that_decides_nothing_changes_nothing(store: Store) -> None:
    filled(store)
    before = store.read_thread("t")
    store.rewrite_thread("t", lambda _: NO_REMOVAL)
    assert store.read_thread("t") == before
    store.rewrite_thread("nobody", lambda _: NO_REMOVAL)
    assert is_empty(store, "nobody")


def test_an_error_while_deciding_changes_nothing(store: Store) -> None:
    filled(store)
    before = store.read_thread("t")

    def fail(_: ThreadContent) -> Removal:
        raise LookupError("no decision")

    with pytest.raises(LookupError, match="no decision"):
        store.rewrite_thread("t", fail)
    assert store.read_thread("t") == before
    put(store, "t", row("9"))


def test_a_rewrite_does_not_lift_a_deletion(store: Store) -> None:
    filled(store)
    store.delete_thread("t", deletion_id="5")
    put(store, "t", row("6"))
    put(store, "t", row("7"))
    store.rewrite_thread("t", lambda _: Removal(frozenset({Spot("", "6")}), frozenset(), frozenset()))
    with pytest.raises(ThreadDeleted):
        put(store, "t", row("4"))
    assert listed(store, "t") == ["7"]


# -- expiry -----------------------------------------------------------------------------------------------------------


def gone_at_once(store: Store, thread_id: str) -> None:
    assert is_empty(store, thread_id)
    assert store.get_checkpoint(thread_id, "", None) is None
    assert store.get_elements(thread_id, [digest(1), digest(2)]) == {}
    assert store.get_writes(thread_id, Spot("", "2")) == ()
    assert listed(store, thread_id) == []


def test_a_thread_whose_time_has_come_is_gone_as_a_whole(store: Store) -> None:
    filled(store)
    filled(store, "u")
    store.touch("t", expires_at_s=time.time() - 1)
    gone_at_once(store, "t")
    store.expire(now_s=time.time())
    gone_at_once(store, "t")
    assert list(store.threads()) == ["u"]
    put(store, "t", row("4", "nowhere"))  # it was not deleted
    assert listed(store, "t") == ["4"]


def test_a_put_moves_the_expiry_of_the_whole_thread(store: Store) -> None:
    filled(store)
    put(store, "t", row("4"), expires_at_s=time.time() - 1)
    gone_at_once(store, "t")
    put(store, "t", row("5"), expires_at_s=time.time() + 3_600)
    assert listed(store, "t") == ["5"]
    put_writes(store, "t", write("5", "task", 0), expires=time.time() - 1)
    gone_at_once(store, "t")


def test_a_written_thread_expires_as_told(store: Store) -> None:
    filled(store)
    content = store.read_thread("t")
    store.write_thread("u", content, expires_at_s=time.time() + 3_600)
    assert store.read_thread("u") == content
    store.write_thread("u", content, expires_at_s=time.time() - 1)
    gone_at_once(store, "u")


def test_a_touch_keeps_a_thread_alive(store: Store) -> None:
    now_s = time.time()
    filled(store)
    store.touch("t", expires_at_s=now_s + 1_000)
    store.touch("t", expires_at_s=now_s + 3_000)
    assert store.expire(now_s=now_s + 2_000) == 0
    assert len(store.read_thread("t").rows) == 3


def test_a_thread_expires_by_itself(store: Store) -> None:
    filled(store)
    store.touch("t", expires_at_s=time.time() + 0.2)
    while store.read_thread("t") != NOTHING:
        time.sleep(0.02)
    gone_at_once(store, "t")


def test_touching_nobody_makes_no_thread(store: Store) -> None:
    store.touch("nobody", expires_at_s=time.time() + 3_600)
    assert is_empty(store, "nobody")
