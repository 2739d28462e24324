"""The tail of a draft step: the argmax of a vocabulary that is split over the ranks.

One launch packs a rank's (index, value) pairs, one sum over the ranks exchanges them. With the gate
`TRTLLM_MTP_TAIL_TRIM` at 0 the draft loop takes its original steps; the results are the same.
"""

import functools
import os

import torch

from tensorrt_llm._torch.distributed import AllReduce, allgather, min_over_ranks
from tensorrt_llm.mapping import Mapping

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installations have no Triton
    triton = None

ENV = "TRTLLM_MTP_TAIL_TRIM"
PAIR = 2  # columns of an exchange row that belong to one rank: index and value
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_VOCAB = 1 << 24  # fp32 holds every whole number below exactly
# The most that a one-shot all-reduce carries: all ranks' rows arrive at each rank. Rows of one fp32
# pair per rank take 8 * tp * tp bytes there: 16384 rows fit at tp 2, and 256 at tp 16.
ONE_SHOT_MAX_BYTES = 64 * 1024 * 8
# A block of this many logits is one round of loads, all in flight at once.
MAX_BLOCK, MAX_WARPS, LOGITS_PER_WARP = 16384, 16, 512


@functools.cache
def mtp_tail_trim_enabled() -> bool:
    """Whether draft loops run trimmed; read once, so that eager steps and captured ones agree.

    Raises:
        ValueError: the variable is set to anything but 0 or 1.
    """
    value = os.environ.get(ENV, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{ENV} is {value!r}; it must be 1 (trimmed, the default) or 0 (original)")
    return value == "1"


def local_argmax_pack(
    logits: torch.Tensor,
    vocab_offset: int,
    out: torch.Tensor,
    slot: int = 0,
    *,
    zero_rest: bool = False,
) -> None:
    """Write each row's (vocab_offset + argmax, max) into `out`, columns 2 * slot and 2 * slot + 1.

    Equal to torch.max in every bit: ties go to the lowest index, and a NaN is the largest, again
    the lowest one. A bf16 NaN comes out with all mantissa bits set, as CUDA rounds one to bf16. On
    CUDA it is one launch.

    Args:
        logits: [rows, columns] in fp32, bf16 or fp16; rows may lie apart.
        vocab_offset: global index of the first column.
        out: fp32 [rows, width]; rows may lie apart.
        zero_rest: also set the other columns to zero; they are left alone otherwise.

    Raises:
        ValueError: shapes, dtypes or strides other than these, a slot outside of `out`, or indices
            that fp32 does not hold.
    """
    check_argmax_pack(logits, vocab_offset, out, slot)
    pack = _launch_pack if logits.is_cuda else torch_argmax_pack
    pack(logits, vocab_offset, out, slot, zero_rest)


def check_argmax_pack(
    logits: torch.Tensor, vocab_offset: int, out: torch.Tensor, slot: int = 0
) -> None:
    """Raises ValueError for what `local_argmax_pack` refuses."""
    _check_logits(logits, vocab_offset)
    _check_out(out, logits, slot)


def _check_logits(logits: torch.Tensor, vocab_offset: int) -> None:
    if logits.dtype not in LOGIT_DTYPES:
        raise ValueError(f"logits are {logits.dtype}; they must be one of {LOGIT_DTYPES}")
    if logits.dim() != 2 or not logits.numel():
        raise ValueError(f"logits are {list(logits.shape)}; they must be [rows, columns], none 0")
    if logits.stride(1) != 1:
        raise ValueError(f"columns of logits are {logits.stride(1)} apart; they must be adjacent")
    if not 0 <= vocab_offset <= MAX_VOCAB - logits.shape[1]:
        raise ValueError(
            f"vocab_offset {vocab_offset} with {logits.shape[1]} columns leaves [0, {MAX_VOCAB}), "
            "the indices that fp32 holds exactly"
        )


def _check_out(out: torch.Tensor, logits: torch.Tensor, slot: int) -> None:
    if out.dtype != torch.float32 or out.device != logits.device:
        raise ValueError(f"out is {out.dtype} on {out.device}; it must be fp32 on {logits.device}")
    if out.dim() != 2 or out.shape[0] != logits.shape[0] or out.stride(1) != 1:
        raise ValueError(
            f"out is {list(out.shape)} with strides {out.stride()}; it must be "
            f"[{logits.shape[0]}, width] with adjacent columns"
        )
    if not 0 <= slot < out.shape[1] // PAIR:
        raise ValueError(f"slot {slot} is not in [0, {out.shape[1] // PAIR}) of out's columns")


def torch_argmax_pack(
    logits: torch.Tensor,
    vocab_offset: int,
    out: torch.Tensor,
    slot: int = 0,
    zero_rest: bool = False,
) -> None:
    """`local_argmax_pack` by torch's own operators, on any device and without checks."""
    value, index = logits.max(dim=-1)
    if logits.dtype == torch.bfloat16:
        all_ones = torch.tensor(0x7FFF, dtype=torch.int16).view(torch.bfloat16)
        value = torch.where(value.isnan(), all_ones, value)
    if zero_rest:
        out.zero_()
    out[:, PAIR * slot] = index + vocab_offset
    out[:, PAIR * slot + 1] = value.float()


def _launch_pack(
    logits: torch.Tensor, vocab_offset: int, out: torch.Tensor, slot: int, zero_rest: bool
) -> None:
    (rows, columns), width = logits.shape, out.shape[1]
    block = min(triton.next_power_of_2(columns), MAX_BLOCK)
    _pack_kernel[(rows,)](
        logits,
        logits.stride(0),
        columns,
        vocab_offset,
        out,
        out.stride(0),
        width,
        slot,
        BLOCK=block,
        OUT_BLOCK=triton.next_power_of_2(width),
        ZERO_REST=zero_rest,
        num_warps=min(max(block // LOGITS_PER_WARP, 1), MAX_WARPS),
    )


class DraftArgmaxExchange:
    """Brings every rank's (index, value) pairs of a draft step to all ranks.

    Each rank fills its own pair of a zero row and the rows are summed: with one addend that is not
    zero, fp32 sums are exact. So the exchange takes whatever way the model's own all-reduce takes.
    Of the values, -0.0 comes back as 0.0 and a NaN perhaps with another payload, neither of which
    an argmax tells apart. All-gather serves where a sum does not: see `max_rows`, and calls under a
    CUDA graph capture that no eager call came before.

    Building one is collective.

    Args:
        wanted: this rank's gate; where one rank's is off, all ranks gather.

    Attributes:
        max_rows: rows that are summed at most. 0 beside pipeline, context or attention data
            parallelism, whose ranks do not all draft the same rows.
    """

    def __init__(self, mapping: Mapping, *, wanted: bool) -> None:
        self.mapping = mapping
        # A workspace that the model shares would be cleared by this launch's few threads.
        self.all_reduce = AllReduce(mapping, workspace_tag="draft_argmax")
        self.max_rows = min_over_ranks(_one_shot_rows(mapping) if wanted else 0, mapping)
        self._staging: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocab / tp] of this rank -> fp32 [rows, 2 * tp]: [id0, value0, id1, value1, ...].

        The result is good until the next call.
        """
        rows, offset = logits.shape[0], self.mapping.tp_rank * logits.shape[1]
        staging = self._staging_for(logits)
        if staging is None:
            pairs = logits.new_empty(rows, PAIR, dtype=torch.float32)
            local_argmax_pack(logits, offset, pairs)
            return allgather(pairs, self.mapping, dim=-1)
        # All of the row, since a sum in place has left the other ranks' pairs there.
        local_argmax_pack(logits, offset, staging[:rows], self.mapping.tp_rank, zero_rest=True)
        return self.all_reduce(staging[:rows])

    def _staging_for(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The buffer that these logits' rows fit in; None if they are to be gathered."""
        if logits.shape[0] > self.max_rows:
            return None
        capturing = logits.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._staging is None and not capturing:  # a graph's own memory would not outlive it
            shape = (self.max_rows, PAIR * self.mapping.tp_size)
            self._staging = torch.empty(shape, dtype=torch.float32, device=logits.device)
        return self._staging


def _one_shot_rows(mapping: Mapping) -> int:
    """Exchange rows that one one-shot all-reduce carries; 0 outside pure tensor parallelism."""
    if mapping.pp_size > 1 or mapping.cp_size > 1 or mapping.enable_attention_dp:
        return 0
    row_bytes = PAIR * mapping.tp_size * torch.float32.itemsize
    return ONE_SHOT_MAX_BYTES // (row_bytes * mapping.tp_size)


if triton is not None:

    @triton.jit
    def _larger_or_nan(a, b):  # type: ignore[no-untyped-def]
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def _pack_kernel(  # type: ignore[no-untyped-def]
        logits,
        logits_stride,
        columns,
        vocab_offset,
        out,
        out_stride,
        width,
        slot,
        BLOCK: tl.constexpr,
        OUT_BLOCK: tl.constexpr,
        ZERO_REST: tl.constexpr,
    ):
        """One program per row. Every lane keeps its first largest logit; then the value is reduced,
        and the lowest place that holds it."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * logits_stride
        place = tl.arange(0, BLOCK)
        best = tl.load(logits + place, mask=place < columns, other=float("-inf")).to(tl.float32)
        best_at = place
        for start in range(BLOCK, columns, BLOCK):
            at = start + place
            x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            better = (x > best) | ((x != x) & (best == best))
            best, best_at = tl.where(better, x, best), tl.where(better, at, best_at)
        largest = tl.reduce(best, 0, _larger_or_nan)
        # Lanes are NaN only if the largest is. A row of -inf has its lowest place before the lanes
        # past the end.
        index = tl.min(tl.where((best == largest) | (best != best), best_at, columns), axis=0)
        # Read again for the bits that comparing has lost: the sign of a zero, a NaN's payload.
        value = tl.load(logits + index)
        nan_as_rounded: tl.constexpr = value.dtype == tl.bfloat16
        value = value.to(tl.float32)
        if nan_as_rounded:
            all_ones = tl.full((), 0x7FFF0000, tl.int32).to(tl.float32, bitcast=True)
            value = tl.where(value == value, value, all_ones)
        column = tl.arange(0, OUT_BLOCK)
        pair = tl.where(column % 2 == 0, (index + vocab_offset).to(tl.float32), value)
        own = column // 2 == slot
        tl.store(
            out + row * out_stride + column,
            tl.where(own, pair, 0.0),
            mask=(column < width) & (own | ZERO_REST),
        )
