"""What all tests share: small thread counts, no network, and clean skips where a GPU is missing."""

import functools
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tensorrt_llm.logger import logger

# Set before torch is imported and inherited by the rank processes that tests start: several
# processes that each take all cores are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# First calls of torch operators take long; a deadline per example would measure that.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

GPUS_NEEDED = {"gpu": 1, "multi_gpu": 2}


@functools.cache
def gpu_count() -> int:
    """GPUs that torch can use; 0 on a CPU build."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are."""
    for marker, needed in GPUS_NEEDED.items():
        if item.get_closest_marker(marker) and gpu_count() < needed:
            pytest.skip(f"needs {needed} GPU(s), found {gpu_count()}")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The project's logger does not propagate, so the capturing handler is hung on it."""
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)
