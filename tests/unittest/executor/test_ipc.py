"""Messages over ZeroMQ: order, late binding, closing."""

from pathlib import Path

from tensorrt_llm.executor.ipc import Receiver, Sender


def test_batches_arrive_whole_and_in_order(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    sender = Sender(address)
    sender.send([1, "two"])  # nobody has bound yet
    sender.send([{"three": 3}])
    receiver = Receiver(address)
    got = receiver.receive(timeout_s=5)
    while len(got) < 3:
        got += receiver.receive(timeout_s=5)
    assert got == [1, "two", {"three": 3}]
    assert receiver.receive() == [] == receiver.receive(timeout_s=0.01)
    sender.close()
    sender.send([4])
    assert receiver.receive(timeout_s=0.05) == []
    receiver.close()
