"""The input of eh_proj: this rank's columns of the normalised embedding and hidden halves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import (
    INDEX_DTYPES,
    KERNEL_DTYPE,
    check_aligned,
    check_tensor,
    require,
)
from .._numerics import assert_rounded_once, rms_norm_rounded_once, rows_or_zeros

WINDOW_COLUMNS = 8  # one 16-byte store of bf16


@define_op
class DraftGlueRmsnormCat(OpWrapper):
    """This rank's window of the MTP layer's eh_proj input, without the rest of it:

        cat([enorm(embed_table[input_ids]), hnorm(hidden_states)], -1)[:, col_lo:col_hi]

    enorm and hnorm are RMSNorms over the whole hidden size in flashinfer's form: in fp32,
    x * rsqrt(mean(x^2) + eps) * weight, rounded once to the activation dtype. A half that the
    window does not overlap is neither read nor normalised.

    Args:
        input_ids: int32 or int64 [rows], the token after each row; an id outside of the table, such
            as the -1 of a rejected draft, gives a row of zeros (0 after the norm too).
        embed_table: activation dtype [vocabulary, hidden], whole on every rank.
        hidden_states: activation dtype [rows, hidden], after the model's final norm, or an earlier
            draft step's.
        enorm_weight, hnorm_weight: activation dtype [hidden].
        eps: of both norms.
        col_lo, col_hi: the window of the 2 * hidden columns, multiples of 8. Rank r of n has
            [r * 2 * hidden / n, (r + 1) * 2 * hidden / n): eh_proj's inputs split over the ranks.

    Returns:
        activation dtype [rows, col_hi - col_lo], contiguous.

    The sum of squares is fp32 and each row's order is fixed, independent of the other rows and of
    the window. Under programmatic dependent launch the kernel waits for its producer before any
    load and releases its dependent, eh_proj, right after the wait. Activation dtype is bf16 for the
    kernel; the reference also takes fp32 and rounds nothing then.
    """

    schema = (
        "glm_draft_glue_rmsnorm_cat(Tensor input_ids, Tensor embed_table, Tensor hidden_states, "
        "Tensor enorm_weight, Tensor hnorm_weight, float eps, int col_lo, int col_hi) -> Tensor"
    )
    CELLS = (
        Cell("K 7, first rank, embedding half", {"rows": 8, "rank": 0}),
        Cell("K 7, last rank of the embedding half", {"rows": 8, "rank": 7}),
        Cell("K 7, first rank of the hidden half", {"rows": 8, "rank": 8}),
        Cell("K 7, last rank, hidden half", {"rows": 8, "rank": 15}),
        Cell("ids outside of the table", {"rows": 8, "rank": 3, "outside": True}),
        Cell("one row", {"rows": 1, "rank": 0}),
        Cell("one rank, both halves", {"rows": 8, "rank": 0, "ranks": 1}),
    )

    @staticmethod
    def raw_call(
        input_ids: Tensor,
        embed_table: Tensor,
        hidden_states: Tensor,
        enorm_weight: Tensor,
        hnorm_weight: Tensor,
        eps: float,
        col_lo: int,
        col_hi: int,
    ) -> Tensor:
        return torch.ops.trtllm.glm_draft_glue_rmsnorm_cat(
            input_ids, embed_table, hidden_states, enorm_weight, hnorm_weight, eps, col_lo, col_hi
        )

    @staticmethod
    def reference(
        input_ids: Tensor,
        embed_table: Tensor,
        hidden_states: Tensor,
        enorm_weight: Tensor,
        hnorm_weight: Tensor,
        eps: float,
        col_lo: int,
        col_hi: int,
    ) -> Tensor:
        hidden = hidden_states.shape[1]
        halves = []
        if col_lo < hidden:
            embedded = rms_norm_rounded_once(
                rows_or_zeros(embed_table, input_ids), enorm_weight, eps
            )
            halves.append(embedded[:, col_lo:col_hi])
        if col_hi > hidden:
            normed = rms_norm_rounded_once(hidden_states, hnorm_weight, eps)
            halves.append(normed[:, max(col_lo - hidden, 0) : col_hi - hidden])
        return torch.cat(halves, dim=-1)

    @staticmethod
    def fake(
        input_ids: Tensor,
        embed_table: Tensor,
        hidden_states: Tensor,
        enorm_weight: Tensor,
        hnorm_weight: Tensor,
        eps: float,
        col_lo: int,
        col_hi: int,
    ) -> Tensor:
        return hidden_states.new_empty(hidden_states.shape[0], col_hi - col_lo)

    @staticmethod
    def is_valid(
        input_ids: Tensor,
        embed_table: Tensor,
        hidden_states: Tensor,
        enorm_weight: Tensor,
        hnorm_weight: Tensor,
        eps: float,
        col_lo: int,
        col_hi: int,
    ) -> None:
        check_tensor("hidden_states", hidden_states, (None, None))
        rows, hidden = hidden_states.shape
        dtype = hidden_states.dtype
        check_tensor("input_ids", input_ids, (rows,), *INDEX_DTYPES)
        check_tensor("embed_table", embed_table, (None, hidden), dtype)
        check_tensor("enorm_weight", enorm_weight, (hidden,), dtype)
        check_tensor("hnorm_weight", hnorm_weight, (hidden,), dtype)
        require(
            0 <= col_lo < col_hi <= 2 * hidden,
            f"the window is [{col_lo}, {col_hi}); it must be in [0, {2 * hidden}), not empty",
        )
        require(
            dtype != KERNEL_DTYPE or col_lo % WINDOW_COLUMNS == col_hi % WINDOW_COLUMNS == 0,
            f"the window is [{col_lo}, {col_hi}); both must be multiples of {WINDOW_COLUMNS}",
        )
        for name, x in (("hidden_states", hidden_states), ("embed_table", embed_table)):
            check_aligned(name, x)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        rows, hidden = cell.spec["rows"], geometry.hidden_size
        vocabulary = 64  # of the model's, since rows are looked up one by one
        ids = draw.integers(0, vocabulary, rows)
        if "outside" in cell.spec:
            ids[1::3], ids[2::3] = -1, vocabulary
        window = 2 * hidden // cell.spec.get("ranks", geometry.tp_size)
        return {
            "input_ids": ids,
            "embed_table": draw.normal(vocabulary, hidden, dtype=dtype),
            "hidden_states": draw.normal(rows, hidden, dtype=dtype),
            "enorm_weight": draw.norm_weight(hidden, dtype),
            "hnorm_weight": draw.norm_weight(hidden, dtype),
            "eps": geometry.rms_norm_eps,
            "col_lo": cell.spec["rank"] * window,
            "col_hi": (cell.spec["rank"] + 1) * window,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        x, lo, hi = inputs["hidden_states"], inputs["col_lo"], inputs["col_hi"]
        (rows, hidden), size = x.shape, x.itemsize
        moved = rows * (hi - lo) * size
        if lo < hidden:
            weight = (min(hi, hidden) - lo) * size
            moved += inputs["input_ids"].nbytes + rows * hidden * size + weight
        if hi > hidden:
            moved += rows * hidden * size + (hi - max(lo, hidden)) * size
        return moved

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """A row's factor has one fp32 sum of squares behind it, and each value is rounded once."""
        assert_rounded_once(out[0], ref[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """Lookup, two norms and a concatenation, each one call of torch."""
        table, x, eps = inputs["embed_table"], inputs["hidden_states"], inputs["eps"]
        ids = inputs["input_ids"].clamp(0, table.shape[0] - 1)
        width = (x.shape[1],)

        def chain() -> Tensor:
            rows = torch.nn.functional.embedding(ids, table)
            e = torch.nn.functional.rms_norm(rows, width, inputs["enorm_weight"], eps)
            h = torch.nn.functional.rms_norm(x, width, inputs["hnorm_weight"], eps)
            return torch.cat([e, h], dim=-1)[:, inputs["col_lo"] : inputs["col_hi"]].contiguous()

        return chain


draft_glue_rmsnorm_cat = DraftGlueRmsnormCat()
