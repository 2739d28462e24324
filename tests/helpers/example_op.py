"""A small op record, for tests of what is common to all of them. It is no part of the package."""

from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op


@define_op
class ScaledAppend(OpWrapper):
    """Write `scale * x` into rows of a pool and return the fp32 sum of each row of x.

    Args:
        x: fp32 [rows, width].
        slots: int64 [rows], distinct rows of the pool.
        pool: bf16 [num_rows, width], written at `slots` and nowhere else; rounds to nearest even.
        scale: factor of what is written.

    Returns:
        fp32 [rows].
    """

    schema = "test_scaled_append(Tensor x, Tensor slots, Tensor(a!) pool, float scale) -> Tensor"
    CELLS = (
        Cell("one row", {"rows": 1, "pool_rows": 4}),
        Cell("as many rows as the pool", {"rows": 8, "pool_rows": 8}),
    )

    @staticmethod
    def raw_call(x: Tensor, slots: Tensor, pool: Tensor, scale: float) -> Tensor:
        return torch.ops.trtllm.test_scaled_append(x, slots, pool, scale)

    @staticmethod
    def reference(x: Tensor, slots: Tensor, pool: Tensor, scale: float) -> Tensor:
        pool[slots] = (scale * x).to(pool.dtype)
        return x.sum(-1)

    @staticmethod
    def fake(x: Tensor, slots: Tensor, pool: Tensor, scale: float) -> Tensor:
        return x.new_empty(x.shape[0])

    @staticmethod
    def is_valid(x: Tensor, slots: Tensor, pool: Tensor, scale: float) -> None:
        if x.shape[1] != pool.shape[1]:
            raise ValueError(f"x is {x.shape[1]} wide; it must be as wide as the pool's rows")
        if slots.unique().numel() != slots.numel():
            raise ValueError(f"slots {slots.tolist()} repeat; each token needs a row of its own")

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        rows, pool_rows = cell.spec["rows"], cell.spec["pool_rows"]
        x = torch.randn(rows, 16, device=device, generator=generator)
        slots = torch.randperm(pool_rows, device=device, generator=generator)[:rows]
        pool = torch.zeros(pool_rows, 16, dtype=torch.bfloat16, device=device)
        return {"x": x, "slots": slots, "pool": pool, "scale": 0.5}

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        x = inputs["x"]
        return x.nbytes + x.numel() * 2 + 12 * x.shape[0]
