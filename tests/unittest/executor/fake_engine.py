"""A rank whose engine counts instead of computing: token i is the prompt's last token + i + 1.

Run as a script in place of `tensorrt_llm.executor.worker`. Some prompts make trouble on request.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass, field

from tensorrt_llm._torch.distributed import broadcast_object
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.messages import (
    CancelRequest,
    EngineReady,
    EngineStats,
    FinishReason,
    LlmResponse,
    NewRequest,
    Shutdown,
)
from tensorrt_llm.executor.worker import Receive, Send, main

RAISE_ON_RANK = 1000  # + rank: that rank raises
KILL_RANK = 2000  # + rank: that rank is killed
HANG = 3000  # never looks at a message again
BABBLE = 4000  # sends what is no message
FAIL_TO_START = "/fails/to/start"  # as model directory: the last rank raises while it loads
STEP_S = 0.002


@dataclass
class FakeEngine:
    config: ExecutorConfig
    receive: Receive
    send: Send
    going: dict[int, NewRequest] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    def ready_message(self) -> EngineReady:
        return EngineReady(64, 32, 4, 512, (0,), 16, 32, 1024, 4096)

    def run(self) -> None:
        while True:
            messages = self.receive(not self.going) if self.is_first else []
            for message in broadcast_object(messages, self.config.mapping):
                if isinstance(message, Shutdown):
                    return
                self.take(message)
            self.step()

    @property
    def is_first(self) -> bool:
        return self.config.mapping.rank == 0

    def take(self, message: NewRequest | CancelRequest) -> None:
        if isinstance(message, NewRequest):
            self.misbehave(message.prompt_token_ids[-1])
            self.going[message.request_id] = message
        elif self.going.pop(message.request_id, None):
            self.say([LlmResponse(message.request_id, finish_reason=FinishReason.CANCELLED)])

    def step(self) -> None:
        if not self.going:
            return
        time.sleep(STEP_S)
        self.steps += 1
        news = [self.advance(request) for request in list(self.going.values())]
        self.say([*news, self.stats()])

    def advance(self, request: NewRequest) -> LlmResponse:
        made = self.made[request.request_id] = self.made.get(request.request_id, 0) + 1
        token = (request.prompt_token_ids[-1] + made) % 512
        done = made >= (request.sampling_params.max_tokens or 1)
        if done:
            del self.going[request.request_id]
        return LlmResponse(
            request.request_id, [token], finish_reason=FinishReason.LENGTH if done else None
        )

    def stats(self) -> EngineStats:
        return EngineStats(self.steps, len(self.going), 0, 0, 16, 0, 16, 0, 0, 0, STEP_S * 1e3)

    def say(self, messages: list[object]) -> None:
        if self.is_first:
            self.send(messages)

    def misbehave(self, token: int) -> None:
        rank = self.config.mapping.rank
        if token == RAISE_ON_RANK + rank:
            raise RuntimeError(f"asked to fail on rank {rank}")
        if token == KILL_RANK + rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if token == BABBLE:
            self.say(["nonsense"])
        while token == HANG:
            time.sleep(1)


def create_engine(config: ExecutorConfig, receive: Receive, send: Send) -> FakeEngine:
    if str(config.model) == FAIL_TO_START and config.mapping.rank == config.mapping.world_size - 1:
        raise ValueError("no such weights")
    print(f"fake rank {os.getpid()}", file=sys.stderr, flush=True)
    return FakeEngine(config, receive, send)


if __name__ == "__main__":
    main(create_engine)
