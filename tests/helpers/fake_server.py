"""A server process with the scripted LLM: `python -m helpers.fake_server PORT BEHAVIOUR`."""

import sys
import threading
import time

from helpers.fake_llm import MODEL, FakeLLM
from tensorrt_llm.serve import launcher


def load() -> FakeLLM:
    """Behaves as told: `loading` forever, `failing` to load, `dying` in a request, or `slow`."""
    behaviour = sys.argv[2]
    if behaviour == "loading":
        time.sleep(1000)
    if behaviour == "failing":
        raise ValueError("weights.safetensors lacks lm_head.weight")
    llm = FakeLLM()
    llm.delay = 0.02
    llm.script = "x" * 10_000
    if behaviour == "dying":
        threading.Thread(target=_die_in_first_request, args=(llm,), daemon=True).start()
    return llm


def _die_in_first_request(llm: FakeLLM) -> None:
    while not llm.running:
        time.sleep(0.01)
    time.sleep(0.2)
    llm.die("rank 1 died: Traceback of rank 1")


if __name__ == "__main__":
    sys.exit(launcher.serve(load, launcher.bind("127.0.0.1", int(sys.argv[1])), MODEL))
