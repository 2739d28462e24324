"""When the log says how drafting goes, and about what."""

import pytest
from helpers.engine import executor_config, generate, make_engine
from helpers.glm_tiny import CHECKPOINT

from tensorrt_llm._torch.pyexecutor.messages import SpeculationStats
from tensorrt_llm._torch.pyexecutor.speculation_log import SpeculationLog
from tensorrt_llm._torch.speculative.forced_acceptance import ENV


class Engine:
    """Counts as an engine does, on a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.total = SpeculationStats(0, (0, 0))
        self.log = SpeculationLog(lambda: self.now)

    def read_prompt(self) -> None:
        self.log.update(self.total, idle=False)

    def verify(self, num_accepted: int, seconds: float) -> None:
        """A step that takes so long."""
        self.now += seconds
        self.total = self.total.verified(num_accepted)
        self.log.update(self.total, idle=False)

    def end(self) -> None:
        self.log.update(self.total, idle=True)


def test_a_line_every_few_seconds_and_one_at_the_end(logged: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.read_prompt()
    for _ in range(9):
        engine.verify(2, 0.5)
    assert logged.messages == []
    engine.verify(0, 0.5)
    for _ in range(4):
        engine.verify(1, 1.0)
    engine.end()
    assert logged.messages == [
        "speculation: 10 verify steps in 5.0 s, acceptance length 2.80, by position 0.90 0.90",
        "speculation: 4 verify steps in 4.0 s, acceptance length 2.00, by position 1.00 0.00",
    ]


def test_a_pause_belongs_to_no_line(logged: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    for _ in range(2):
        engine.read_prompt()
        engine.verify(1, 2.0)
        engine.end()
        engine.now += 3600.0
    line = "speculation: 1 verify steps in 2.0 s, acceptance length 2.00, by position 1.00 0.00"
    assert logged.messages == [line, line]


def test_nothing_is_said_twice_or_about_nothing(logged: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.end()  # as after a request that was refused
    engine.read_prompt()
    engine.now += 60.0
    engine.read_prompt()
    assert logged.messages == []
    engine.verify(0, 6.0)
    assert len(logged.messages) == 1
    engine.end()
    assert len(logged.messages) == 1


def test_the_engine_logs_a_short_run(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, "1")
    executor = make_engine(executor_config(CHECKPOINT, max_seq_len=64, max_draft_len=2))
    logged.clear()
    generate(executor, [[5]], 9)  # one from the prompt, then two from each step
    (line,) = logged.messages
    assert line.startswith("speculation: 4 verify steps in ")
    assert line.endswith(" s, acceptance length 2.00, by position 1.00 0.00")


def test_without_drafts_nothing_is_logged(logged: pytest.LogCaptureFixture) -> None:
    executor = make_engine(executor_config(CHECKPOINT, max_seq_len=64))
    logged.clear()
    generate(executor, [[5]], 3)
    assert logged.messages == []
