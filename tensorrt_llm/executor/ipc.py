"""Messages between processes of one host: pickled batches over ZeroMQ push and pull sockets.

Receivers bind and senders connect: a sender then never blocks, whether its peer is there already,
late or gone. Whoever can reach an address can run code in the receiver, so addresses are paths in a
directory of the user's own.
"""

import pickle
import threading
from collections.abc import Sequence
from typing import Any

import zmq


class Sender:
    """The sending end; any thread may use it.

    Args:
        address: where the receiver binds, `ipc://path`.
    """

    def __init__(self, address: str) -> None:
        # Reentrant: garbage collection inside `send` may abort an abandoned request, which sends.
        self._lock = threading.RLock()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, messages: Sequence[object]) -> None:
        """Queue picklable messages; they arrive together and in order. Does nothing once closed."""
        batch = pickle.dumps(list(messages))
        with self._lock:
            if not self._socket.closed:
                self._socket.send(batch)

    def close(self, linger_s: float = 0.0) -> None:
        """Give queued messages at most `linger_s` seconds (of background time) to leave."""
        with self._lock:
            self._socket.close(linger=int(linger_s * 1000))


class Receiver:
    """The receiving end, for one thread at a time.

    Args:
        address: to bind, `ipc://path`.
    """

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(address)

    def receive(self, timeout_s: float = 0.0) -> list[Any]:
        """All messages that are there; waits up to `timeout_s` seconds for the first one."""
        messages: list[Any] = []
        if timeout_s:
            self.socket.poll(int(timeout_s * 1000))
        while True:
            try:
                messages += pickle.loads(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def close(self) -> None:
        self.socket.close(linger=0)
