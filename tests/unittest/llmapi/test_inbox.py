"""One consumer, in a thread or in an event loop."""

import asyncio
import threading
import time

import pytest

from tensorrt_llm.llmapi.inbox import Inbox


def test_blocking_consumer() -> None:
    inbox: Inbox[int] = Inbox()
    with pytest.raises(TimeoutError):
        inbox.get(timeout_s=0.01)
    threading.Timer(0.05, inbox.put, [1]).start()
    assert inbox.get(timeout_s=5) == 1


def test_awaiting_consumer_leaves_the_loop_free() -> None:
    inbox: Inbox[int] = Inbox()

    async def consume() -> tuple[list[int], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        got = [await inbox.aget() for _ in range(100)]
        ticker.cancel()
        return got, ticks

    def produce() -> None:
        for i in range(100):
            inbox.put(i)
            time.sleep(0.0005)

    threading.Thread(target=produce).start()
    got, ticks = asyncio.run(consume())
    assert got == list(range(100)) and ticks > 5


def test_cancelled_consumer_loses_nothing() -> None:
    inbox: Inbox[int] = Inbox()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.aget(), 0.01)

    asyncio.run(give_up())
    inbox.put(1)  # wakes a waiter of a loop that is closed by now
    assert inbox.get(0) == 1
    inbox.put(2)
    assert asyncio.run(inbox.aget()) == 2
