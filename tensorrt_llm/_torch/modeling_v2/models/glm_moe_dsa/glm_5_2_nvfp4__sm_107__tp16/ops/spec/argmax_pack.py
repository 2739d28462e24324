"""The (token, logit) pair by which a rank takes part in a vocabulary-wide argmax."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op
from tensorrt_llm._torch.speculative.mtp_tail_trim import (
    check_argmax_pack,
    local_argmax_pack,
    torch_argmax_pack,
)

from .._cells import Draw, dtype_of, geometry_of
from .._inputs import poisoned

PAIR = 2  # columns


@define_op
class ArgmaxPack(OpWrapper):
    """Write each row's global argmax and maximum, as fp32, into the first two columns of `out`:

        out[r, 0] = first_id + argmax(logits[r])
        out[r, 1] = max(logits[r])

    The bits are those of torch.max and `float()` on a GPU: equal values go to the lowest id, 0.0
    and -0.0 being equal, and the value keeps its sign; a NaN of either sign is the largest, again
    the lowest one. Values are widened exactly; a bf16 NaN comes out as 0x7FFF0000, to which CUDA
    rounds one, others with their payload. Ids are exact, for they stay below 2^24. Further columns
    of `out` stay as they are.

    Args:
        logits: fp32, bf16 or fp16 [rows, columns], this rank's vocabulary shard; rows may lie
            apart.
        first_id: of the shard: rank * columns.
        out: fp32 [rows, width], width at least 2, rows may lie apart; written. A slot of a wider
            exchange row is a view that begins at it.

    `local_argmax_pack` is the same in Triton and for the engine.
    """

    schema = "glm_argmax_pack(Tensor logits, int first_id, Tensor(a!) out) -> ()"
    CELLS = (
        Cell("a draft step of one request", {"rows": 1}),
        Cell("eight requests, slots of wider rows", {"rows": 8, "width": 128, "apart": True}),
        Cell("ties", {"rows": 8, "values": 3}),
        Cell("a NaN in every other row", {"rows": 8, "nan": True}),
        Cell("fp32", {"rows": 8, "dtype": torch.float32}),
        Cell("fp16", {"rows": 8, "dtype": torch.float16}),
    )

    @staticmethod
    def raw_call(logits: Tensor, first_id: int, out: Tensor) -> None:
        torch.ops.trtllm.glm_argmax_pack(logits, first_id, out)

    @staticmethod
    def reference(logits: Tensor, first_id: int, out: Tensor) -> None:
        torch_argmax_pack(logits, first_id, out)

    @staticmethod
    def fake(logits: Tensor, first_id: int, out: Tensor) -> None:
        pass

    @staticmethod
    def is_valid(logits: Tensor, first_id: int, out: Tensor) -> None:
        check_argmax_pack(logits, first_id, out)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, spec, geometry = Draw(device, generator), cell.spec, geometry_of(cell)
        rows, columns, gap = spec["rows"], geometry.vocab_size, 16 if "apart" in spec else 0
        logits = draw.normal(rows, columns + gap, dtype=dtype_of(cell))
        if "values" in spec:
            logits = draw.integers(0, spec["values"], rows, columns).to(logits.dtype)
        if "nan" in spec:
            logits[::2, columns // 3 :: 100] = torch.nan
        out = poisoned((rows, spec.get("width", PAIR) + gap), torch.float32, device)
        return {
            "logits": logits[:, gap:],
            "first_id": 3 * columns,
            "out": out[:, gap:],
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        logits = inputs["logits"]
        return logits.numel() * logits.itemsize + logits.shape[0] * PAIR * 4

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """The engine's kernel; off a GPU torch's."""
        out = inputs["out"].clone()

        def call() -> Tensor:
            local_argmax_pack(inputs["logits"], inputs["first_id"], out)
            return out

        return call


argmax_pack = ArgmaxPack()
