"""Signals reach the runtime's loop in order, many with one wake-up, and none gets lost on the way."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from pancake_langgraph.runtime.background import LOOK_S, MANY_ITEMS, BackgroundLoop, Mailbox


class Sleeper(BackgroundLoop):
    """A loop that only notes who wakes it, and what it is to look at later."""

    def __init__(self) -> None:
        super().__init__("sleeper")
        self.wakes: list[Callable[[], None]] = []
        self.looks: list[Callable[[], None]] = []

    def call(self, callback, *args):
        self.wakes.append(callback)
        return True

    def later(self, delay_s, callback):
        assert delay_s == LOOK_S
        self.looks.append(callback)

    def run_all(self) -> None:
        while self.wakes or self.looks:
            (self.wakes or self.looks).pop(0)()


def test_items_put_while_the_loop_is_being_woken_travel_with_that_wake_up() -> None:
    loop, taken = Sleeper(), []
    mailbox = Mailbox(loop, taken.append)
    for number in range(5):
        mailbox.put(number)
    assert (len(loop.wakes), taken) == (1, [])
    loop.run_all()
    assert taken == [0, 1, 2, 3, 4]
    mailbox.put(5)
    assert len(loop.wakes) == 1
    loop.run_all()
    assert taken[-1] == 5


def test_items_put_right_behind_others_wake_nobody_and_are_found_at_the_next_look() -> None:
    loop, taken = Sleeper(), []
    mailbox = Mailbox(loop, taken.append)
    mailbox.put(0)
    loop.wakes.pop()()
    mailbox.put(1)
    mailbox.put(2)
    assert (loop.wakes, len(loop.looks), taken) == ([], 1, [])
    loop.looks.pop()()
    assert (taken, len(loop.looks)) == ([0, 1, 2], 1)
    loop.looks.pop()()
    assert loop.looks == []  # it was quiet: the loop sleeps
    mailbox.put(3)
    assert len(loop.wakes) == 1


def test_an_item_put_just_as_the_loop_falls_asleep_is_taken_in() -> None:
    loop, taken = Sleeper(), []
    mailbox = Mailbox(loop, taken.append)

    class Raced(deque):
        """Gets its item right after it was found empty."""

        def __len__(self) -> int:
            length = super().__len__()
            if not taken[1:] and not length:
                mailbox.put(1)
            return length

    mailbox.put(0)
    loop.wakes.pop()()
    loop.looks.pop()()
    mailbox._items = Raced()
    loop.looks.pop()()
    assert (taken, loop.wakes, loop.looks) == ([0, 1], [], [])


def test_in_a_hurry_items_need_not_wait_for_the_next_look() -> None:
    loop, taken = Sleeper(), []
    mailbox = Mailbox(loop, taken.append)
    mailbox.put(0)
    loop.wakes.pop()()
    mailbox.put(1)
    mailbox.hurry()
    loop.wakes.pop()()
    assert taken == [0, 1]


def test_what_is_put_while_others_are_taken_in_is_taken_in_later() -> None:
    loop, taken = Sleeper(), []

    def receive(item: int) -> None:
        taken.append(item)
        if item < 3:
            mailbox.put(item + 1)

    mailbox = Mailbox(loop, receive)
    mailbox.put(0)
    loop.run_all()
    assert taken == [0, 1, 2, 3]


def test_a_callback_that_fails_does_not_end_the_looking() -> None:
    loop, taken = Sleeper(), []

    def receive(item: int) -> None:
        if item == 0:
            raise LookupError(item)
        taken.append(item)

    mailbox = Mailbox(loop, receive)
    mailbox.put(0)
    mailbox.put(1)
    with pytest.raises(LookupError):
        loop.run_all()
    loop.run_all()
    assert taken == [1]


def test_an_asker_does_not_depend_on_a_wake_up_that_another_thread_has_only_promised() -> None:
    loop, taken = Sleeper(), []
    mailbox = Mailbox(loop, taken.append)
    mailbox.put("theirs")
    loop.wakes.clear()  # the other thread was stopped between its promise and the wake-up
    mailbox.put("mine")
    assert loop.wakes == []
    mailbox.drain()
    assert taken == ["theirs", "mine"]


def test_nothing_piles_up_where_the_loop_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = BackgroundLoop("test")
    mailbox = Mailbox(loop, print)
    loop.run(nothing()).result(5)
    with monkeypatch.context() as child:
        child.setattr("pancake_langgraph.runtime.background.os.getpid", lambda: 0)
        for number in range(3):
            mailbox.put(number)
        assert not mailbox._items
    loop.stop()
    mailbox.put(4)
    assert not mailbox._items


def test_a_process_forked_between_two_looks_keeps_few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Sleeper()
    mailbox = Mailbox(loop, print)
    mailbox.put(0)
    monkeypatch.setattr(Sleeper, "is_gone", True)  # the look that was promised is the parent's
    for number in range(10 * MANY_ITEMS):
        mailbox.put(number)
        assert len(mailbox._items) < MANY_ITEMS


async def nothing() -> None:
    return None


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("eager_switches")
def test_nothing_is_lost_stuck_or_out_of_order_when_threads_race_with_the_loop() -> None:
    loop = BackgroundLoop("test")
    num_threads, num_items = 4, 2000
    taken: list[tuple[int, int]] = []
    all_taken = threading.Event()

    def receive(item: tuple[int, int]) -> None:
        taken.append(item)
        if len(taken) == num_threads * num_items:
            all_taken.set()

    mailbox = Mailbox(loop, receive)

    def put_all(name: int) -> None:
        for number in range(num_items):
            mailbox.put((name, number))

    threads = [threading.Thread(target=put_all, args=(name,)) for name in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all_taken.wait(30)
    for name in range(num_threads):
        assert [number for who, number in taken if who == name] == list(range(num_items))
    loop.stop()


def test_an_answer_comes_back_as_it_was_given_or_raised() -> None:
    loop = BackgroundLoop("test")
    assert loop.ask(lambda: 42).result(5) == 42

    def fail() -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        loop.ask(fail).result(5)
    loop.stop()
