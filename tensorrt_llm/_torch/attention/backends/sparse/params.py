"""What a draft loop may ask of a sparse-attention metadata, without knowing which backend it is."""

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class MTPIndexShareMetadata(Protocol):
    """Index share of MTP: the first draft step chooses keys, the later ones reuse its choice."""

    def set_in_mtp_draft_loop(self, active: bool) -> None:
        """While active, a choice also keeps the row of each request's last accepted token."""

    def set_mtp_num_accepted(self, num_accepted: torch.Tensor | None) -> None:
        """int [requests]: accepted tokens of each request's rows, which say where that row is."""

    def set_skip_topk(self, skip: bool) -> None:
        """While set, layers with an indexer take the kept rows instead of choosing."""


@runtime_checkable
class MTPIndexerScheduleTrimMetadata(Protocol):
    """The indexer's schedule of keys over processors, which a draft step that chooses no keys does
    not read."""

    def set_skip_indexer_sched_metadata(self, skip: bool) -> None:
        """While set, changed lengths leave the schedule as it is and mark it as stale; a choice
        that would read it raises RuntimeError."""

    def mtp_next_step_reuses_topk(self) -> bool:
        """Whether the draft steps after the first take its choice of keys."""
