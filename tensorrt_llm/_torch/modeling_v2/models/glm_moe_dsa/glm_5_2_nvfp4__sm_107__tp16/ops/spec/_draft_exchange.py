"""What ends a draft step: the argmax over all ranks' vocabulary shards, and the next positions.

Each rank sends one packet per row in one call of an exchange workspace. A packet begins with the
rank's candidate, its global id (int32, never the empty word) and its logit (fp32); what an op needs
of the winner follows. All ranks choose among the same packets, so all choose the same.

The workspace is private to drafting, at best to the op: no other traffic leaves its few threads the
refill of a large buffer.
"""

import torch
from torch import Tensor

from tensorrt_llm._torch.distributed import (
    LamportWorkspace,
    Payload,
    joined_ranks,
    lamport_workspace,
)

from .._checks import VECTOR_BYTES, check_tensor, require

PAIR_WORDS = 2  # of a packet: id and value
WORD = torch.int32


def local_candidates(logits: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row of this rank's shard: ties to the lowest id, NaN the largest.

    Args:
        logits: [rows, columns]; rank r has the ids [r * columns, (r + 1) * columns).

    Returns:
        (its column int64 [rows], the head of its packet int32 [rows, 2]).
    """
    value, column = logits.max(dim=-1)
    token = column + LamportWorkspace.at(workspace).rank * logits.shape[1]
    return column, torch.stack([token.to(WORD), value.float().view(WORD)], dim=1)


def exchange_packets(call: str, step: int, workspace: Tensor, *parts: Tensor) -> list[Tensor]:
    """Every rank's packets, by part.

    Args:
        call, step: the op's name and draft step, which the ranks compare.
        parts: of this rank's packets: [rows, columns] in any dtype, rows of whole words.

    Returns:
        for each part [rows, ranks, columns] in its dtype.
    """
    words = [part.view(WORD) for part in parts]
    opened = LamportWorkspace.at(workspace)
    packets = opened.exchange(f"{call} at step {step}", torch.cat(words, dim=1))
    arrived = packets.to(parts[0].device).split([part.shape[1] for part in words], dim=-1)
    return [x.contiguous().view(part.dtype) for x, part in zip(arrived, parts, strict=True)]


def winners(heads: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of the ranks' candidates: ties to the lowest rank, NaN the largest.

    As a rank's candidate is the lowest id of equals in its shard, this is the order of torch.argmax
    over the whole vocabulary.

    Args:
        heads: int32 [rows, ranks, 2].

    Returns:
        (rank, global id), int64 [rows] each.
    """
    rank = heads[..., 1].view(torch.float32).argmax(dim=1)
    return rank, heads[..., 0].gather(1, rank.unsqueeze(1)).squeeze(1).long()


def advance_positions(position_ids: Tensor, kv_limits: Tensor) -> None:
    """One further, in place; padding (below 0) stays -1, and so does what has reached its limit.

    Args:
        position_ids: int64 [rows].
        kv_limits: int32 [rows], tokens that each request has room for.
    """
    following = torch.where(position_ids < 0, -1, position_ids + 1)
    position_ids.copy_(torch.where(following < kv_limits, following, -1))


def buffer_bytes(rows: int, world_size: int, packet_words: int) -> int:
    """Bytes per buffer that hold all ranks' packets of a call."""
    needed = rows * world_size * packet_words * WORD.itemsize
    return -(-needed // VECTOR_BYTES) * VECTOR_BYTES


def check_draft_tokens(draft_tokens: Tensor, rows: int, step: int) -> None:
    """Raises ValueError unless the step has a column in int64 [rows, K]."""
    check_tensor("draft_tokens", draft_tokens, (rows, None), torch.int64)
    drafts = draft_tokens.shape[1]
    require(0 <= step < drafts, f"step is {step}; draft_tokens has the steps [0, {drafts})")


def check_position_ids(position_ids: Tensor, kv_limits: Tensor, rows: int) -> None:
    """Raises ValueError unless they are what `advance_positions` takes."""
    check_tensor("position_ids", position_ids, (rows,), torch.int64)
    check_tensor("kv_limits", kv_limits, (rows,), torch.int32)


def cell_exchange(bytes_per_buffer: int) -> Tensor:
    """The descriptor of a workspace for cells, over the joined ranks."""
    tag = f"draft cells {bytes_per_buffer}"
    return lamport_workspace(joined_ranks(), tag, Payload.EXCHANGE, bytes_per_buffer).descriptor
