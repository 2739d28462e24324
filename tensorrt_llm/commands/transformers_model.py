"""transformers' own model of a checkpoint, the peer of our engine."""

from pathlib import Path
from typing import Any


def load(directory: Path, device: str, dtype: str, num_threads: int | None) -> Any:
    """An `AutoModelForCausalLM` in evaluation mode.

    Args:
        directory: checkpoint in the hub layout.
        device: "cpu" or "cuda".
        dtype: torch's name of the weights' and activations' type.
        num_threads: CPU threads of this process from now on; None leaves them as they are.

    Raises:
        ValueError: weights that the model needs are not there. (Others are left alone, as the MTP
            layer must be, which transformers does not have.)
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as library_logging

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    logging: Any = library_logging  # is not annotated
    logging.set_verbosity_error()  # it would warn of every weight that it leaves alone
    logging.disable_progress_bar()
    loading: Any = AutoModelForCausalLM.from_pretrained
    model, info = loading(directory, dtype=getattr(torch, dtype), output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"transformers misses {sorted(info['missing_keys'])} in {directory}")
    return model.to(device).eval()
