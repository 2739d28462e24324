"""A draft step's token over all vocabulary shards, and what follows from it."""

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
from .._numerics import assert_rounded_once
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
from .draft_glue_rmsnorm_cat import DraftGlueRmsnormCat


@define_op
class DraftSampleGlue(OpWrapper):
    """Choose each request's draft token over all vocabulary shards, and write what follows from it.

    The token is torch.argmax's over the whole vocabulary: the largest value, a NaN of either sign
    larger than all, equal ones (NaN too) to the lowest id. The rest is done where its arguments are
    given: the next positions (`position_ids`), the tokens that the next step verifies
    (`next_new_tokens`, after the last step), this rank's columns of the next eh_proj input
    (`embed_table`).

    Args:
        logits: activation dtype [requests, V], this rank's vocabulary shard: ids [rank * V, ...).
        workspace: descriptor of a private Lamport workspace for exchanges (`exchange_bytes`); its
            calls must be made in the same order on all ranks.
        draft_tokens: int64 [requests, K]; column `step` is written, the others stay.
        step: of these tokens, in [0, K).
        position_ids: int64 [requests], the position p of each row of this step; written: p + 1 if p
            is not negative and p + 1 is below the request's limit, else -1.
        kv_limits: int32 [requests], tokens that each request has room for; with position_ids.
        accepted_tokens: int64 [requests, K + 1], of which the first num_accepted count; with
            next_new_tokens.
        num_accepted: int64 [requests], in [1, K + 1]; with next_new_tokens. Set by
            glm_verify_head_accept.
        next_new_tokens: int64 [requests, 1 + K], only in the last step; written: the last accepted
            token accepted_tokens[r, num_accepted[r] - 1], then draft_tokens with this step's.
        embed_table, hidden_states, enorm_weight, hnorm_weight, eps, col_lo, col_hi: as
            glm_draft_glue_rmsnorm_cat takes them, whose input_ids are the chosen tokens;
            hidden_states [requests, hidden]. Without embed_table none of them is read.

    Returns:
        activation dtype [requests, col_hi - col_lo], the numbers of glm_draft_glue_rmsnorm_cat;
        [requests, 0] without embed_table.

    All ranks write the same. No lengths are written, for the reason that `DraftEhprojTable` gives.

    One call of the workspace: a rank's packet per request is (id, value); nothing is summed.

    The kernel serves bf16 and 2, 4, 8 or 16 ranks, in one CTA; the reference every geometry. Under
    programmatic dependent launch only the norms' weights are read before the wait, and the
    dependents are released right after it.
    """

    schema = (
        "glm_draft_sample_glue(Tensor logits, Tensor workspace, Tensor(a!) draft_tokens, int step, "
        "Tensor(b!)? position_ids=None, Tensor? kv_limits=None, Tensor? accepted_tokens=None, "
        "Tensor? num_accepted=None, Tensor(c!)? next_new_tokens=None, Tensor? embed_table=None, "
        "Tensor? hidden_states=None, Tensor? enorm_weight=None, Tensor? hnorm_weight=None, "
        "float eps=0.0, int col_lo=0, int col_hi=0) -> Tensor"
    )
    CELLS = (
        Cell("K 7, the last step", {"rows": 1, "step": 6, "next": True}),
        Cell("a step between", {"rows": 1, "step": 2, "positions": True}),
        Cell("ties within and across shards", {"rows": 1, "step": 0, "values": 3}),
        Cell("four requests", {"rows": 4, "step": 6, "positions": True, "next": True}),
        Cell("window of the embedding half", {"rows": 1, "step": 0, "window": 7, "vocab": 64}),
        Cell("window of the hidden half", {"rows": 4, "step": 0, "window": 8, "vocab": 64}),
        Cell("fp32", {"rows": 4, "step": 6, "next": True, "dtype": torch.float32}),
    )

    @staticmethod
    def raw_call(
        logits: Tensor,
        workspace: Tensor,
        draft_tokens: Tensor,
        step: int,
        position_ids: Tensor | None = None,
        kv_limits: Tensor | None = None,
        accepted_tokens: Tensor | None = None,
        num_accepted: Tensor | None = None,
        next_new_tokens: Tensor | None = None,
        embed_table: Tensor | None = None,
        hidden_states: Tensor | None = None,
        enorm_weight: Tensor | None = None,
        hnorm_weight: Tensor | None = None,
        eps: float = 0.0,
        col_lo: int = 0,
        col_hi: int = 0,
    ) -> Tensor:
        return torch.ops.trtllm.glm_draft_sample_glue(
            logits,
            workspace,
            draft_tokens,
            step,
            position_ids,
            kv_limits,
            accepted_tokens,
            num_accepted,
            next_new_tokens,
            embed_table,
            hidden_states,
            enorm_weight,
            hnorm_weight,
            eps,
            col_lo,
            col_hi,
        )

    @staticmethod
    def reference(
        logits: Tensor,
        workspace: Tensor,
        draft_tokens: Tensor,
        step: int,
        position_ids: Tensor | None = None,
        kv_limits: Tensor | None = None,
        accepted_tokens: Tensor | None = None,
        num_accepted: Tensor | None = None,
        next_new_tokens: Tensor | None = None,
        embed_table: Tensor | None = None,
        hidden_states: Tensor | None = None,
        enorm_weight: Tensor | None = None,
        hnorm_weight: Tensor | None = None,
        eps: float = 0.0,
        col_lo: int = 0,
        col_hi: int = 0,
    ) -> Tensor:
        head = local_candidates(logits, workspace)[1]
        (heads,) = exchange_packets(DraftSampleGlue.name(), step, workspace, head)
        token = winners(heads)[1]
        draft_tokens[:, step] = token
        if position_ids is not None:
            assert kv_limits is not None
            advance_positions(position_ids, kv_limits)
        if next_new_tokens is not None:
            assert accepted_tokens is not None and num_accepted is not None
            last = accepted_tokens.gather(1, num_accepted.unsqueeze(1) - 1)
            next_new_tokens.copy_(torch.cat([last, draft_tokens], dim=1))
        if embed_table is None:
            return logits.new_empty(logits.shape[0], 0)
        assert hidden_states is not None and enorm_weight is not None and hnorm_weight is not None
        return DraftGlueRmsnormCat.reference(
            token, embed_table, hidden_states, enorm_weight, hnorm_weight, eps, col_lo, col_hi
        )

    @staticmethod
    def fake(
        logits: Tensor,
        workspace: Tensor,
        draft_tokens: Tensor,
        step: int,
        position_ids: Tensor | None = None,
        kv_limits: Tensor | None = None,
        accepted_tokens: Tensor | None = None,
        num_accepted: Tensor | None = None,
        next_new_tokens: Tensor | None = None,
        embed_table: Tensor | None = None,
        hidden_states: Tensor | None = None,
        enorm_weight: Tensor | None = None,
        hnorm_weight: Tensor | None = None,
        eps: float = 0.0,
        col_lo: int = 0,
        col_hi: int = 0,
    ) -> Tensor:
        return logits.new_empty(logits.shape[0], 0 if embed_table is None else col_hi - col_lo)

    @staticmethod
    def is_valid(
        logits: Tensor,
        workspace: Tensor,
        draft_tokens: Tensor,
        step: int,
        position_ids: Tensor | None = None,
        kv_limits: Tensor | None = None,
        accepted_tokens: Tensor | None = None,
        num_accepted: Tensor | None = None,
        next_new_tokens: Tensor | None = None,
        embed_table: Tensor | None = None,
        hidden_states: Tensor | None = None,
        enorm_weight: Tensor | None = None,
        hnorm_weight: Tensor | None = None,
        eps: float = 0.0,
        col_lo: int = 0,
        col_hi: int = 0,
    ) -> None:
        check_tensor("logits", logits, (None, None))
        rows, ranks = logits.shape[0], LamportWorkspace.world_size_of(workspace)
        check_draft_tokens(draft_tokens, rows, step)
        check_workspace(workspace, Payload.EXCHANGE, rows, PAIR_WORDS, WORD)
        check_served(logits, "ranks", ranks, RANKS)
        check_aligned("logits", logits)
        if position_ids is not None:
            check_position_ids(position_ids, _given("kv_limits", kv_limits), rows)
        if next_new_tokens is not None:
            accepted = _given("accepted_tokens", accepted_tokens)
            counts = _given("num_accepted", num_accepted)
            _check_next(next_new_tokens, accepted, counts, draft_tokens, step)
        if embed_table is not None:
            hidden_rows = _given("hidden_states", hidden_states)
            check_tensor("hidden_states", hidden_rows, (rows, None), logits.dtype)
            DraftGlueRmsnormCat.is_valid(
                draft_tokens[:, step].contiguous(),
                embed_table,
                hidden_rows,
                _given("enorm_weight", enorm_weight),
                _given("hnorm_weight", hnorm_weight),
                eps,
                col_lo,
                col_hi,
            )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        """Only the logits differ between ranks."""
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        spec, rows, drafts = cell.spec, cell.spec["rows"], geometry.max_rows - 1
        ranks, vocab = joined_ranks(), cell.spec.get("vocab", geometry.vocab_size)
        logits = draw.normal(ranks.tp_size, rows, vocab, dtype=dtype)
        if "values" in spec:
            logits = draw.integers(0, spec["values"], ranks.tp_size, rows, vocab).to(dtype)
        following = "next" in spec
        return {
            "logits": logits[ranks.tp_rank],
            "workspace": cell_exchange(exchange_bytes(rows, ranks.tp_size)),
            "draft_tokens": draw.integers(0, vocab, rows, drafts),
            "step": spec["step"],
            **_positions(draw, rows, given="positions" in spec),
            "accepted_tokens": draw.integers(0, vocab, rows, drafts + 1) if following else None,
            "num_accepted": draw.integers(1, drafts + 2, rows) if following else None,
            "next_new_tokens": draw.integers(0, vocab, rows, drafts + 1) if following else None,
            **_window(cell, draw, vocab * ranks.tp_size),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Local memory: logits read, tokens written, all ranks' packets stored and read, the refill
        of the previous call's buffer, taken as an equal call; then what is asked for."""
        logits, drafts = inputs["logits"], inputs["draft_tokens"]
        rows, ranks = logits.shape[0], LamportWorkspace.world_size_of(inputs["workspace"])
        moved = logits.nbytes + 3 * exchange_bytes(rows, ranks) + 8 * rows
        if inputs["position_ids"] is not None:
            moved += 2 * inputs["position_ids"].nbytes + inputs["kv_limits"].nbytes
        if (following := inputs["next_new_tokens"]) is not None:
            earlier = drafts.nbytes - 8 * rows
            moved += inputs["num_accepted"].nbytes + 8 * rows + earlier + following.nbytes
        if inputs["embed_table"] is not None:  # its ids are in registers
            moved += DraftGlueRmsnormCat.bytes_moved({**inputs, "input_ids": drafts[:, :0]})
        return moved

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """Integers bit for bit; a window as glm_draft_glue_rmsnorm_cat's."""
        assert_bitwise(out[1:], ref[1:])
        if ref[0].numel():
            assert_rounded_once(out[0], ref[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """The token alone: this rank's maximum, two gathers of the process group, the choice."""
        logits, ranks = inputs["logits"], joined_ranks()

        def chain() -> Tensor:
            value, column = logits.max(dim=-1, keepdim=True)
            best = allgather(value, ranks).argmax(dim=-1, keepdim=True)
            ids = allgather(column + ranks.tp_rank * logits.shape[1], ranks)
            return ids.gather(1, best)

        return chain


def exchange_bytes(rows: int, world_size: int) -> int:
    """Bytes per buffer that the workspace needs for `rows` requests, a multiple of 16."""
    return buffer_bytes(rows, world_size, PAIR_WORDS)


def _given(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(f"{name} is None; what is asked for needs it")
    return value


def _check_next(
    next_new_tokens: Tensor, accepted: Tensor, counts: Tensor, draft_tokens: Tensor, step: int
) -> None:
    rows, drafts = draft_tokens.shape
    require(
        step == drafts - 1,
        f"next_new_tokens is given in step {step}; the drafts are complete in step {drafts - 1}",
    )
    check_tensor("next_new_tokens", next_new_tokens, (rows, drafts + 1), torch.int64)
    check_tensor("accepted_tokens", accepted, (rows, drafts + 1), torch.int64)
    check_tensor("num_accepted", counts, (rows,), torch.int64)
    require(
        bool(((counts >= 1) & (counts <= drafts + 1)).all()),
        f"num_accepted is {counts.tolist()}; each must be in [1, {drafts + 1}]",
    )


def _positions(draw: Draw, rows: int, *, given: bool) -> dict[str, Tensor | None]:
    """Of a cell: one in three requests has reached its limit, one in three is padding."""
    if not given:
        return {"kv_limits": None, "position_ids": None}
    positions = draw.integers(0, 4000, rows)
    limits = positions + 100
    limits[1::3] = positions[1::3] + 1
    positions[2::3] = -1
    return {"kv_limits": limits.int(), "position_ids": positions}


def _window(cell: Cell, draw: Draw, vocabulary: int) -> dict[str, Any]:
    """Of a cell, whose "window" is the place of a rank among the geometry's."""
    geometry, dtype = geometry_of(cell), dtype_of(cell)
    hidden, place = geometry.hidden_size, cell.spec.get("window")
    given = place is not None
    columns, first = 2 * hidden // geometry.tp_size, place or 0
    return {
        "embed_table": draw.normal(vocabulary, hidden, dtype=dtype) if given else None,
        "hidden_states": draw.normal(cell.spec["rows"], hidden, dtype=dtype) if given else None,
        "enorm_weight": draw.norm_weight(hidden, dtype) if given else None,
        "hnorm_weight": draw.norm_weight(hidden, dtype) if given else None,
        "eps": geometry.rms_norm_eps,
        "col_lo": first * columns,
        "col_hi": (first + 1) * columns,
    }


draft_sample_glue = DraftSampleGlue()
