"""Programs that the saver's contract suites start as processes of their own.

Usage: python saver_children.py PROGRAM WHERE [MORE]
"""

from __future__ import annotations

import asyncio
import enum
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from pancake_langgraph.saver import PancakeSaver


@dataclass
class Note:
    """A class of the app."""

    text: str


class Level(enum.Enum):
    """Another."""

    HIGH = "high"


class Noted(TypedDict):
    """A state that names both."""

    messages: Annotated[list[AnyMessage], add_messages]
    note: Note
    level: Level


def strict(where: str) -> None:
    """Compile under LANGGRAPH_STRICT_MSGPACK, which clones the saver with the types of the state's schema."""
    saver = PancakeSaver(where)
    told: list[object] = []
    saver.subscribe(told.append)
    builder = StateGraph(Noted).add_node("node", lambda state: {"note": Note("a"), "level": Level.HIGH})
    graph: Any = builder.add_edge(START, "node").compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    graph.invoke({"messages": [HumanMessage("Hi")]}, config)
    values = graph.get_state(config).values
    print("same" if graph.checkpointer is saver else "cloned")
    print("shared" if told and values == graph.get_state(config).values else "apart")
    print(type(values["note"]).__name__, values["level"])
    saver.close()


# -- kill -9 --------------------------------------------------------------------------------------------------------


def item(number: int) -> str:
    """Return the item that step `number` adds: long enough to be stored apart from its list."""
    return f"item {number} " * 20


def checkpoint_of(number: int, items: list[str]) -> Checkpoint:
    """Return a checkpoint with one channel of each form."""
    values = {"items": items, "blob": f"blob {number} " * 200, "n": number}
    return {**empty_checkpoint(), "channel_values": values, "channel_versions": dict.fromkeys(values, number + 1)}


def write_until_killed(where: str, thread_id: str, acknowledge: int) -> None:
    """Go on with the thread, step after step; say so after each call that returned."""
    saver = PancakeSaver(where)
    config: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    found = saver.get_tuple(config)
    number = found.checkpoint["channel_values"]["n"] if found else -1
    items = found.checkpoint["channel_values"]["items"] if found else []
    config = found.config if found else config
    while True:
        number += 1
        if checkpoint_id := config["configurable"].get("checkpoint_id"):
            task = f"task {number} {os.getpid()}"
            saver.put_writes(config, [("items", [item(number)]), ("n", number), ("blob", "b" * 2000)], task)
            os.write(acknowledge, f"{json.dumps(['writes', checkpoint_id, task])}\n".encode())
        items = [*items, item(number)]
        checkpoint = checkpoint_of(number, items)
        config = saver.put(config, checkpoint, {"step": number}, checkpoint["channel_versions"])
        os.write(acknowledge, f"{json.dumps(['put', checkpoint['id'], number])}\n".encode())


def kills(where: str, thread_id: str, count: str) -> None:
    """Fork a writer, kill it in the middle, print what it had been told is stored; `count` times."""
    draw = random.Random(thread_id)
    for _ in range(int(count)):
        source, sink = os.pipe()
        writer = os.fork()
        if not writer:
            os.close(source)
            write_until_killed(where, thread_id, sink)
        os.close(sink)
        with open(source, encoding="utf-8") as acknowledged:
            told = [acknowledged.readline() for _ in range(draw.randint(1, 6))]
            signal.sigtimedwait([], draw.random() * 0.004)  # dies anywhere within a step
            os.kill(writer, signal.SIGKILL)
            told += acknowledged.readlines()
        os.waitpid(writer, 0)
        print(json.dumps([json.loads(line) for line in told if line.endswith("\n")]), flush=True)


# -- many writers, and the end of a process -------------------------------------------------------------------------


def hammer(where: str, name: str, num_threads: str, num_steps: str) -> None:
    """Put a checkpoint and writes per step, in many threads at once: the even ones to threads of their own, the odd
    ones to a common one.
    """
    saver = PancakeSaver(where)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        thread_id = f"{name} {number}" if number % 2 == 0 else "common"
        config: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        metadata: Any = {"writer": f"{name} {number}"}
        try:
            for step in range(int(num_steps)):
                checkpoint = checkpoint_of(step, [item(step)])
                config = saver.put(config, checkpoint, metadata, checkpoint["channel_versions"])
                saver.put_writes(config, [("n", step)], f"{name} {number} {step}")
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(int(num_threads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        print(repr(error))
    saver.close()


def leave(where: str, count: str) -> None:
    """Queue many writes, see the last one acknowledged, and end without closing anything."""

    async def main() -> None:
        saver = PancakeSaver(where)
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        checkpoints = [checkpoint_of(number, [item(number)]) for number in range(int(count))]
        queued = [asyncio.ensure_future(saver.aput(config, each, {}, each["channel_versions"])) for each in checkpoints]
        threading.Thread(target=lambda: saver.put(config, checkpoint_of(1000, []), {}, {})).start()
        await asyncio.gather(*queued)
        queued = [asyncio.ensure_future(saver.aput(config, each, {}, each["channel_versions"])) for each in checkpoints]
        await asyncio.sleep(0)  # these were begun, and are called off by the loop's end

    asyncio.run(main())
    print("end", flush=True)


PROGRAMS: dict[str, Callable[..., None]] = {"strict": strict, "kills": kills, "hammer": hammer, "leave": leave}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
