"""Messages between processes of one host: pickled batches over ZeroMQ push and pull sockets.

Receivers bind and senders connect: a sender then never blocks, whether its peer is there already,
late or gone.
"""

import hashlib
import hmac
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import zmq

from tensorrt_llm.logger import logger

_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size


class Sender:
    """The sending end; any thread may use it.

    Args:
        address: where the receiver binds, `ipc://path` or `tcp://host:port`.
        key: signs each batch (HMAC-SHA256), for addresses that others can reach; empty for none.
    """

    def __init__(self, address: str, key: bytes = b"") -> None:
        self._key = key
        # Reentrant: garbage collection inside `send` may abort an abandoned request, which sends.
        self._lock = threading.RLock()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, messages: Sequence[object]) -> None:
        """Queue picklable messages; they arrive together and in order. Does nothing once closed."""
        payload = pickle.dumps(list(messages))
        with self._lock:
            if not self._socket.closed:
                self._socket.send(_sign(self._key, payload) + payload)

    def close(self, linger_s: float = 0.0) -> None:
        """Give queued messages at most `linger_s` seconds (of background time) to leave."""
        with self._lock:
            self._socket.close(linger=int(linger_s * 1000))


class Receiver:
    """The receiving end, for one thread at a time.

    Args:
        address: to bind; `tcp://host:*` picks a free port.
        key: the sender's; batches with another signature are dropped and logged.
    """

    def __init__(self, address: str, key: bytes = b"") -> None:
        self._key = key
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(address)
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout_s: float = 0.0) -> list[Any]:
        """All messages that are there; waits up to `timeout_s` seconds for the first one."""
        messages: list[Any] = []
        if timeout_s:
            self.socket.poll(int(timeout_s * 1000))
        while True:
            try:
                messages += self._open(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def close(self) -> None:
        self.socket.close(linger=0)

    def _open(self, frame: bytes) -> list[Any]:
        size = _DIGEST_BYTES if self._key else 0
        signature, payload = frame[:size], frame[size:]
        if not hmac.compare_digest(signature, _sign(self._key, payload)):
            logger.warning("dropped a message of %d bytes with a wrong signature", len(frame))
            return []
        batch: list[Any] = pickle.loads(payload)
        return batch


def _sign(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, payload, _DIGEST) if key else b""
