"""From a draft step's logits to the next draft step's attention, for one request."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.distributed import LamportWorkspace, Payload, allgather, joined_ranks
from tensorrt_llm._torch.modeling_v2.catalog._op import (
    Cell,
    OpWrapper,
    assert_bitwise,
    define_op,
)

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_aligned, check_served, check_tensor, require
from .._numerics import assert_rounded_once, rms_norm_rounded_once
from ..comm._exchange import RANKS, check_workspace
from ._draft_exchange import (
    PAIR_WORDS,
    WORD,
    advance_positions,
    buffer_bytes,
    cell_exchange,
    check_draft_tokens,
    check_position_ids,
    exchange_packets,
    local_candidates,
    winners,
)

SERVED_HIDDEN = (6144,)
PAD_WORDS = 2  # behind a packet's head, so that its rows begin at multiples of 16 bytes


@define_op
class DraftEhprojTable(OpWrapper):
    """Choose a draft token over all vocabulary shards and give the next step's attention input:

        t  = argmax over all ranks' logits
        x  = token_table row of t + all ranks' hidden_half, side by side    fp32, rounded once
        normed = x * rsqrt(mean(x^2) + eps) * gamma                         fp32, rounded once

    t is torch.argmax's over the whole vocabulary: the largest value, a NaN of either sign larger
    than all, equal ones (NaN too) to the lowest id. x is eh_proj's output for t, whose embedding
    half a table holds (`draft_token_table`) and whose hidden half the ranks have computed in equal
    parts (glm_draft_hidden_half). The norm, flashinfer's, takes the rounded x.

    Args:
        logits: activation dtype [1, V], this rank's vocabulary shard: ids [rank * V, ...).
        token_table: activation dtype [V, hidden], rows of this shard's tokens.
        hidden_half: fp32 [1, hidden / ranks], this rank's outputs of the hidden half.
        gamma: activation dtype [hidden], input_layernorm's.
        eps: of input_layernorm.
        kv_limits: int32 [1], tokens that the request has room for.
        workspace: descriptor of a private Lamport workspace for exchanges (`exchange_bytes`); its
            calls must be made in the same order on all ranks.
        position_ids: int64 [1], the position p of this step's row; written: p + 1 if p is not
            negative and p + 1 is below kv_limits[0], else -1.
        draft_tokens: int64 [1, K]; column `step` is written, the others stay.
        step: of this token, in [0, K).

    Returns:
        (normed, x), activation dtype [1, hidden] each; x is the new residual. All ranks get the
        same bits, as gamma, eps and the written arguments are the same on them.

    Exactly one row. No lengths are written: with index sharing, draft steps after the first reuse
    a selection of keys and add none to the cache, so nothing reads a length before the next step's
    metadata sets it.

    One call of the workspace: a rank's packet is [id, value, 2 words of 0 | table row of its own
    candidate | hidden_half], so the winner's row is there before anyone knows the winner. A word of
    all ones arrives with its lowest bit cleared; only a NaN has one.

    The kernel serves bf16, hidden 6144, and 2, 4, 8 or 16 ranks, in a cluster of CTAs that split
    the columns; the reference every geometry. Under programmatic dependent launch only gamma is
    read before the wait, and the dependents are released right after it.
    """

    schema = (
        "glm_draft_ehproj_table(Tensor logits, Tensor token_table, Tensor hidden_half, "
        "Tensor gamma, float eps, Tensor kv_limits, Tensor workspace, Tensor(a!) position_ids, "
        "Tensor(b!) draft_tokens, int step) -> (Tensor, Tensor)"
    )
    CELLS = (
        Cell("a draft step", {"rows": 1, "step": 2}),
        Cell("ties within and across shards", {"rows": 1, "step": 0, "values": 3}),
        Cell("the request's last position", {"rows": 1, "step": 5, "room": 1}),
        Cell("padding", {"rows": 1, "step": 5, "position": -1}),
        Cell("fp32", {"rows": 1, "step": 2, "dtype": torch.float32}),
    )

    @staticmethod
    def raw_call(
        logits: Tensor,
        token_table: Tensor,
        hidden_half: Tensor,
        gamma: Tensor,
        eps: float,
        kv_limits: Tensor,
        workspace: Tensor,
        position_ids: Tensor,
        draft_tokens: Tensor,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.trtllm.glm_draft_ehproj_table(
            logits,
            token_table,
            hidden_half,
            gamma,
            eps,
            kv_limits,
            workspace,
            position_ids,
            draft_tokens,
            step,
        )

    @staticmethod
    def reference(
        logits: Tensor,
        token_table: Tensor,
        hidden_half: Tensor,
        gamma: Tensor,
        eps: float,
        kv_limits: Tensor,
        workspace: Tensor,
        position_ids: Tensor,
        draft_tokens: Tensor,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        column, head = local_candidates(logits, workspace)
        pad = head.new_zeros(1, PAD_WORDS)
        heads, _, rows, halves = exchange_packets(
            DraftEhprojTable.name(), step, workspace, head, pad, token_table[column], hidden_half
        )
        rank, token = winners(heads)
        draft_tokens[:, step] = token
        advance_positions(position_ids, kv_limits)
        x = (rows[0, rank].float() + halves.flatten(1)).to(gamma.dtype)
        return rms_norm_rounded_once(x, gamma, eps), x

    @staticmethod
    def fake(
        logits: Tensor,
        token_table: Tensor,
        hidden_half: Tensor,
        gamma: Tensor,
        eps: float,
        kv_limits: Tensor,
        workspace: Tensor,
        position_ids: Tensor,
        draft_tokens: Tensor,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        normed, x = (gamma.new_empty(1, gamma.shape[0]) for _ in range(2))
        return normed, x

    @staticmethod
    def is_valid(
        logits: Tensor,
        token_table: Tensor,
        hidden_half: Tensor,
        gamma: Tensor,
        eps: float,
        kv_limits: Tensor,
        workspace: Tensor,
        position_ids: Tensor,
        draft_tokens: Tensor,
        step: int,
    ) -> None:
        check_tensor("logits", logits, (1, None))
        check_tensor("token_table", token_table, (logits.shape[1], None), logits.dtype)
        hidden, ranks = token_table.shape[1], LamportWorkspace.world_size_of(workspace)
        require(
            hidden % ranks == 0, f"the hidden size is {hidden}, which {ranks} ranks do not divide"
        )
        check_tensor("hidden_half", hidden_half, (1, hidden // ranks), torch.float32)
        check_tensor("gamma", gamma, (hidden,), logits.dtype)
        check_position_ids(position_ids, kv_limits, rows=1)
        check_draft_tokens(draft_tokens, 1, step)
        words = _packet_words(hidden, ranks, logits.dtype)
        check_workspace(workspace, Payload.EXCHANGE, 1, words, WORD)
        check_served(logits, "the hidden size", hidden, SERVED_HIDDEN)
        check_served(logits, "ranks", ranks, RANKS)
        for name, x in (("logits", logits), ("token_table", token_table), ("gamma", gamma)):
            check_aligned(name, x)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        """Logits, table and hidden share differ between ranks. A table of independent numbers would
        take long: its rows are one row, each shifted by a number of its own."""
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        ranks, vocab, hidden = joined_ranks(), geometry.vocab_size, geometry.hidden_size
        logits = draw.normal(ranks.tp_size, 1, vocab, dtype=dtype)
        if "values" in cell.spec:
            logits = draw.integers(0, cell.spec["values"], ranks.tp_size, 1, vocab).to(dtype)
        shifts = draw.normal(ranks.tp_size, vocab, 1, dtype=dtype)[ranks.tp_rank]
        halves = draw.normal(ranks.tp_size, 1, hidden // ranks.tp_size)
        position = cell.spec.get("position", 2500)
        limit = position + cell.spec.get("room", 100)
        return {
            "logits": logits[ranks.tp_rank],
            "token_table": draw.normal(1, hidden, dtype=dtype) + shifts,
            "hidden_half": halves[ranks.tp_rank],
            "gamma": draw.norm_weight(hidden, dtype),
            "eps": geometry.rms_norm_eps,
            "kv_limits": torch.tensor([limit], dtype=torch.int32, device=device),
            "workspace": cell_exchange(exchange_bytes(hidden, ranks.tp_size, dtype)),
            "position_ids": torch.tensor([position], device=device),
            "draft_tokens": draw.integers(0, vocab, 1, geometry.max_rows - 1),
            "step": cell.spec["step"],
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Local memory: logits, one row of the table, the hidden share and gamma read, all ranks'
        packets stored and read, both results and two numbers; the refill of the previous call's
        buffer, taken as an equal call."""
        gamma, ranks = inputs["gamma"], LamportWorkspace.world_size_of(inputs["workspace"])
        packets = exchange_bytes(gamma.shape[0], ranks, gamma.dtype)
        read = inputs["logits"].nbytes + inputs["hidden_half"].nbytes + 2 * gamma.nbytes
        return read + 3 * packets + 2 * gamma.nbytes + 8 + 8 + 4 + 8

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """All but the norm, which has one fp32 sum of squares behind it, bit for bit."""
        assert_bitwise(out[1:], ref[1:])
        assert_rounded_once(out[0], ref[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """Argmax, gathers of the process group, sum and norm, each one call of torch."""
        logits, table, gamma = inputs["logits"], inputs["token_table"], inputs["gamma"]
        half, ranks = inputs["hidden_half"], joined_ranks()

        def chain() -> Tensor:
            value, column = logits.max(dim=-1)
            best = allgather(value, ranks).argmax(dim=-1, keepdim=True)
            row = allgather(table[column], ranks, dim=0)[best]
            x = (row.float() + allgather(half, ranks)).to(gamma.dtype)
            return torch.nn.functional.rms_norm(x, gamma.shape, gamma, inputs["eps"])

        return chain


def exchange_bytes(hidden: int, world_size: int, dtype: torch.dtype) -> int:
    """Bytes per buffer that the workspace needs, a multiple of 16.

    Args:
        dtype: of the activations.
    """
    return buffer_bytes(1, world_size, _packet_words(hidden, world_size, dtype))


def _packet_words(hidden: int, world_size: int, dtype: torch.dtype) -> int:
    row = hidden * dtype.itemsize // WORD.itemsize
    return PAIR_WORDS + PAD_WORDS + row + hidden // world_size


draft_ehproj_table = DraftEhprojTable()
