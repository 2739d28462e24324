"""Refuses to run beside NVIDIA's TensorRT-LLM, whose wheel owns the same import package."""

import os
import sys
from collections.abc import Iterable

_METADATA_ENDINGS = (".dist-info", ".egg-info")


def refuse_beside_nvidia(paths: Iterable[str] | None = None) -> None:
    """Raise when NVIDIA's distribution `tensorrt-llm` is installed next to this one.

    It looks for the metadata directory itself: `importlib.metadata` alone costs ten times the time,
    and this runs at every import.

    Args:
        paths: directories to look in; None is `sys.path`.

    Raises:
        ImportError: the message says which directory was found and what to do.
    """
    for directory in sys.path if paths is None else paths:
        found = _nvidia_metadata(directory)
        if found is not None:
            raise ImportError(
                f"NVIDIA's TensorRT-LLM is installed here ({os.path.join(directory, found)}), and "
                "it owns the import package tensorrt_llm that tensorrt-llm-glm provides too. Give "
                "each a virtual environment of its own, or run: pip uninstall tensorrt-llm"
            )


def _nvidia_metadata(directory: str) -> str | None:
    try:
        names = os.listdir(directory or ".")
    except OSError:  # sys.path also names archives and directories that do not exist
        return None
    # This project's own metadata starts with tensorrt_llm_glm-, which the hyphen rules out.
    wanted = (name for name in names if name.lower().startswith(("tensorrt_llm-", "tensorrt-llm-")))
    return next((name for name in wanted if name.endswith(_METADATA_ENDINGS)), None)
