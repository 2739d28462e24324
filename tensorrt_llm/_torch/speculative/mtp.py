"""MTP with one layer that is run again for every draft token."""

from tensorrt_llm._torch.speculative.eagle3 import Eagle3OneModelWorker


class MTPEagleWorker(Eagle3OneModelWorker):
    """The unified one-model loop over the MTP layer of the checkpoint."""
