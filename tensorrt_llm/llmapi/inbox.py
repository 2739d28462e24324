"""Hands items from one thread to one consumer, which may wait in a thread or in any event loop."""

import asyncio
import contextlib
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue whose consumer decides at each item whether to block its thread or to await."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = threading.Condition()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Append; from any thread, never blocks."""
        with self._filled:
            self._items.append(item)
            self._filled.notify()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    def get(self, timeout_s: float | None = None) -> T:
        """Take the first item; raises TimeoutError when there is none in time."""
        with self._filled:
            if not self._filled.wait_for(lambda: self._items, timeout_s):
                raise TimeoutError
            return self._items.popleft()

    async def aget(self) -> T:
        """Take the first item; the running event loop does other things until there is one."""
        while True:
            with self._filled:
                if self._items:
                    return self._items.popleft()
                self._waiter = waiter = asyncio.get_running_loop().create_future()
            await waiter


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
