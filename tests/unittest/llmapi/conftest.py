"""One real engine for the tests of this room, and a way to make more."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorrt_llm import LLM

CHECKPOINT = Path(__file__).parents[3] / "examples" / "glm_tiny" / "checkpoint"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return CHECKPOINT


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """glm_tiny on one rank. Tests must leave it idle and alive."""
    with LLM(CHECKPOINT, max_seq_len=512, max_batch_size=8, device="cpu") as llm:
        yield llm


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """`LLM(CHECKPOINT, ...)`, shut down at the end of the test."""
    made: list[LLM] = []

    def make(**args: Any) -> LLM:
        made.append(LLM(CHECKPOINT, **{"device": "cpu", "max_seq_len": 512, **args}))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
