"""The routed experts' weighted sum, the shared expert, all-reduce, residual add and RMSNorm."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.distributed import LamportWorkspace, Payload, joined_ranks
from tensorrt_llm._torch.modeling_v2.catalog._op import (
    Cell,
    OpWrapper,
    assert_bitwise,
    define_op,
)

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_aligned, check_tensor
from .._numerics import assert_rounded_once
from ._exchange import add_norm, cell_workspace, check_hop_served, check_workspace

TILE_ROWS = 8  # to which the experts' rows are padded in a cell


def finalize(expert_rows: Tensor, weights: Tensor, places: Tensor, shared: Tensor) -> Tensor:
    """This rank's addend of the hop [rows, hidden], as `MnnvlMoeFinalizeHop` says."""
    picked = expert_rows[places.clamp_min(0)].float()
    products = picked * weights.float().unsqueeze(-1)
    products = products.masked_fill((places < 0).unsqueeze(-1), 0)
    total = torch.zeros_like(products[:, 0])
    for product in products.unbind(1):
        total = total + product
    return total.to(shared.dtype) + shared


@define_op
class MnnvlMoeFinalizeHop(OpWrapper):
    """The finalize step of the routed experts, the shared expert's output added, then the hop:

        routed = sum over k of weights[row, k] * expert_rows[places[row, k]]
                                                        fp32, rounded to activation dtype
        x      = routed + shared                        rounded to activation dtype
        (normed, residual') = glm_mnnvl_hop(x, residual, gamma, eps, workspace)

    routed is summed from +0.0 in the order of k; a product of two bf16 numbers is exact in fp32, so
    fused multiply-adds give the same bits. A place of -1 (an expert of another rank) adds nothing,
    and no row is read for it. The result equals the finalize step, the addition and the hop one
    after the other bit for bit, in each returned element.

    Args:
        expert_rows: activation dtype [permuted rows, hidden], contiguous: the second expert GEMM's
            output before finalization, sorted by expert and padded to tiles. Padding may hold
            anything, NaN included; it is not read.
        weights: activation dtype [rows, top_k], the routing weights with their scaling factor.
        places: int32 [rows, top_k]: the row of expert_rows of each routed copy, in
            [-1, permuted rows). Set by the routing of the expert runner.
        shared: activation dtype [rows, hidden], this rank's part of the shared expert's output.
        residual, gamma, eps, workspace: the hop's. It is the same workspace, in one order with the
            hops on it; to it this call is one turn like theirs.

    Returns:
        (normed, residual'), activation dtype [rows, hidden] each, with the same bits on all ranks
        as long as residual, gamma and eps are the same on them. Arguments stay as they are.

    Activation dtype is bf16 for the kernel. With fp32 only the fp32 operations round, products
    before their additions. Exchange, shapes served, flags and order of launches are the hop's.
    """

    schema = (
        "glm_mnnvl_moe_finalize_hop(Tensor expert_rows, Tensor weights, Tensor places, "
        "Tensor shared, Tensor residual, Tensor gamma, float eps, Tensor workspace) "
        "-> (Tensor, Tensor)"
    )
    CELLS = (
        Cell("K 7", {"rows": 8}),
        Cell("one row", {"rows": 1}),
        Cell("experts of other ranks", {"rows": 5, "absent": True}),
        Cell("fp32", {"rows": 8, "dtype": torch.float32}),
    )

    @staticmethod
    def raw_call(
        expert_rows: Tensor,
        weights: Tensor,
        places: Tensor,
        shared: Tensor,
        residual: Tensor,
        gamma: Tensor,
        eps: float,
        workspace: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.trtllm.glm_mnnvl_moe_finalize_hop(
            expert_rows, weights, places, shared, residual, gamma, eps, workspace
        )

    @staticmethod
    def reference(
        expert_rows: Tensor,
        weights: Tensor,
        places: Tensor,
        shared: Tensor,
        residual: Tensor,
        gamma: Tensor,
        eps: float,
        workspace: Tensor,
    ) -> tuple[Tensor, Tensor]:
        addend = finalize(expert_rows, weights, places, shared)
        opened = LamportWorkspace.at(workspace)
        shards = opened.exchange(MnnvlMoeFinalizeHop.name(), addend)
        return add_norm(shards, residual, gamma, eps)

    @staticmethod
    def fake(
        expert_rows: Tensor,
        weights: Tensor,
        places: Tensor,
        shared: Tensor,
        residual: Tensor,
        gamma: Tensor,
        eps: float,
        workspace: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(residual), torch.empty_like(residual)

    @staticmethod
    def is_valid(
        expert_rows: Tensor,
        weights: Tensor,
        places: Tensor,
        shared: Tensor,
        residual: Tensor,
        gamma: Tensor,
        eps: float,
        workspace: Tensor,
    ) -> None:
        check_tensor("residual", residual, (None, None))
        check_tensor("weights", weights, (residual.shape[0], None), residual.dtype)
        (rows, hidden), top_k = residual.shape, weights.shape[1]
        check_tensor("expert_rows", expert_rows, (None, hidden), residual.dtype)
        check_tensor("places", places, (rows, top_k), torch.int32)
        check_tensor("shared", shared, (rows, hidden), residual.dtype)
        check_tensor("gamma", gamma, (hidden,), residual.dtype)
        check_workspace(workspace, Payload.SUM, rows, hidden, residual.dtype)
        check_hop_served(rows, hidden, residual.dtype, workspace)
        named = {"expert_rows": expert_rows, "shared": shared, "residual": residual, "gamma": gamma}
        for name, x in named.items():
            check_aligned(name, x)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        """Each routed copy has a tile of its own, in random order; padding is NaN. What is summed
        over the ranks differs between them."""
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        rows, hidden, top_k = cell.spec["rows"], geometry.hidden_size, geometry.num_experts_per_tok
        ranks = joined_ranks()
        tiles = torch.randperm(rows * top_k, generator=generator, device=device)
        places = (TILE_ROWS * tiles).to(torch.int32).view(rows, top_k)
        copies = draw.normal(ranks.tp_size, rows * top_k, hidden, dtype=dtype)[ranks.tp_rank]
        expert_rows = copies.new_full((TILE_ROWS * rows * top_k, hidden), torch.nan)
        expert_rows[::TILE_ROWS] = copies
        if "absent" in cell.spec:
            places[:, ::3] = -1
        return {
            "expert_rows": expert_rows,
            "weights": draw.normal(rows, top_k, dtype=dtype).abs(),
            "places": places,
            "shared": draw.normal(ranks.tp_size, rows, hidden, dtype=dtype)[ranks.tp_rank].clone(),
            "residual": draw.normal(rows, hidden, dtype=dtype),
            "gamma": draw.norm_weight(hidden, dtype),
            "eps": geometry.rms_norm_eps,
            "workspace": cell_workspace(cell, Payload.SUM, hidden),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """The hop's, with a row per routed copy in place of the input; absent ones are counted."""
        residual, places = inputs["residual"], inputs["places"]
        ranks = LamportWorkspace.world_size_of(inputs["workspace"])
        copies = places.numel() * residual[0].nbytes
        small = sum(inputs[name].nbytes for name in ("weights", "places", "gamma"))
        return copies + small + residual.nbytes * (4 + 3 * ranks)

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """The updated residual bit for bit; the norm has one fp32 sum of squares behind it."""
        assert_bitwise(out[1:], ref[1:])
        assert_rounded_once(out[0], ref[0])


mnnvl_moe_finalize_hop = MnnvlMoeFinalizeHop()
