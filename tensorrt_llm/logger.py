"""The one logger of the project; its level follows `--log_level` or `TLLM_LOG_LEVEL`."""

import logging
import os

LEVELS = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}

logger = logging.getLogger("tensorrt_llm")


def set_level(level: str) -> None:
    """Set the log level by TensorRT-LLM's name for it; raises ValueError on any other name."""
    if level.lower() not in LEVELS:
        raise ValueError(f"log level is {level!r}; it must be one of {', '.join(LEVELS)}")
    logger.setLevel(LEVELS[level.lower()])


def _configure() -> None:
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s", "%H:%M:%S")
        )
        logger.addHandler(handler)
        logger.propagate = False
    set_level(os.environ.get("TLLM_LOG_LEVEL", "info"))


_configure()
