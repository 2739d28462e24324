"""The exact top-k of one request's index scores, which may lie on several ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorrt_llm._torch.distributed import (
    LamportWorkspace,
    Payload,
    joined_ranks,
    lamport_workspace,
)
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, geometry_of
from .._checks import VECTOR_BYTES, check_tensor, require
from .._inputs import poisoned
from ..comm._exchange import check_workspace

HISTOGRAM_BINS = 1 << 11
NO_KEY = float("-inf")


@define_op
class HistTopK(OpWrapper):
    """Choose the topk largest scores of each row, exactly, for one request whose keys are cut into
    contiguous shards over the ranks. Every rank writes the same rows.

    Column c < shard_len[0] of a rank's logits scores the request's position shard_start[0] + c.
    topk_indices[t] is the set of positions with the topk largest scores of row t on all ranks
    together, in rising order, then -1 where there are fewer. A score of -inf is no key and never
    chosen. Of equal scores at the cut the larger position wins; -0.0 equals 0.0, and NaN, of either
    sign, is larger than everything and equal to itself. So the result is a function of the values
    alone: reruns, and other ways to divide the keys or the work, give the same bits. All of
    topk_indices is written. Columns from shard_len on are not read.

    Args:
        logits: fp32 [rows, columns] from `glm_fp8_paged_mqa_logits`; rows may lie apart. The same
            number of rows on all ranks.
        shard_len: int32 [1], keys of this rank, 0 (none) to columns; on the device like
            shard_start, so that a captured graph follows them.
        shard_start: int32 [1], position of this rank's first key. The shards follow each other in
            rank order, as `glm_dsa_hist_shard_meta` cuts them.
        workspace: descriptor of a Lamport workspace for exchanges over the tensor-parallel group,
            with `exchange_bytes` in a buffer. This op's own; its calls must be made in the same
            order on all ranks. None: this rank has all keys, from position 0 on.
        topk_indices: int32 [rows, topk], contiguous, written. Positions within the request.

    Raises:
        RuntimeError: another rank makes another call on the workspace, or none in 120 s.

    The kernel orders values by their bits (NaN first, zeros as one). Each rank counts its keys in a
    histogram of 11 bits and stores it into the current buffer of every rank. The histograms of all
    ranks give the bin of the cut, on every rank the same one, and the keys in it are counted by the
    next bits, at most to three levels: 11, 11 and 10 bits, which is the whole value. Last, each
    rank stores the positions that it has selected: all above the cut, and of those equal to it what
    the ranks after it, whose positions are larger, leave over. The counts say how many each rank
    selects, and so where they go in a row. Every level and the positions are one exchange each, and
    each of them rotates the three buffers.

    The reference exchanges once: every rank's own topk best (value, position) pairs of a row, among
    which all ranks choose. The results are equal: whoever is among the best of all ranks is among
    the best of its own, by the same order.

    Source: radix selection, most significant digit first (Alabi et al., "Fast k-selection
    algorithms for graphics processing units").
    """

    schema = (
        "glm_dsa_hist_topk(Tensor logits, Tensor shard_len, Tensor shard_start, "
        "Tensor? workspace, Tensor(a!) topk_indices) -> ()"
    )
    CELLS = (
        Cell("verify rows", {"rows": 8, "columns": 8192}),
        Cell("one row", {"rows": 1, "columns": 8192}),
        Cell("fewer keys than are chosen", {"rows": 8, "columns": 1024}),
        Cell("ties across the cut: 8 different values", {"rows": 8, "columns": 8192, "values": 8}),
        Cell("one more key than is chosen", {"rows": 8, "columns": 2049}),
        Cell("shards, verify rows", {"rows": 8, "columns": 8192, "exchange": True}),
        Cell("shards, one row", {"rows": 1, "columns": 8192, "exchange": True}),
        Cell(
            "shards, ties across their borders",
            {"rows": 8, "columns": 8192, "values": 8, "exchange": True},
        ),
        Cell(
            "shards of 9 pages: of 4 or 16 ranks some have none",
            {"rows": 8, "columns": 571, "exchange": True},
        ),
    )

    @staticmethod
    def raw_call(
        logits: Tensor,
        shard_len: Tensor,
        shard_start: Tensor,
        workspace: Tensor | None,
        topk_indices: Tensor,
    ) -> None:
        torch.ops.trtllm.glm_dsa_hist_topk(logits, shard_len, shard_start, workspace, topk_indices)

    @staticmethod
    def reference(
        logits: Tensor,
        shard_len: Tensor,
        shard_start: Tensor,
        workspace: Tensor | None,
        topk_indices: Tensor,
    ) -> None:
        topk = topk_indices.shape[1]
        past = torch.arange(logits.shape[1], device=logits.device) >= shard_len
        values, columns = best_of(logits.masked_fill(past, NO_KEY), topk)
        positions = columns + shard_start
        if workspace is not None:
            values, positions = _exchanged(values, positions, workspace)
        values, chosen = best_of(values, topk)
        topk_indices.copy_(positions.gather(1, chosen).masked_fill(values == NO_KEY, -1))

    @staticmethod
    def fake(
        logits: Tensor,
        shard_len: Tensor,
        shard_start: Tensor,
        workspace: Tensor | None,
        topk_indices: Tensor,
    ) -> None:
        pass

    @staticmethod
    def is_valid(
        logits: Tensor,
        shard_len: Tensor,
        shard_start: Tensor,
        workspace: Tensor | None,
        topk_indices: Tensor,
    ) -> None:
        check_tensor("logits", logits, (None, None), torch.float32, rows_apart=True)
        check_tensor("shard_len", shard_len, (1,), torch.int32)
        check_tensor("shard_start", shard_start, (1,), torch.int32)
        check_tensor("topk_indices", topk_indices, (logits.shape[0], None), torch.int32)
        rows, topk = topk_indices.shape
        require(
            0 <= int(shard_len) <= logits.shape[1],
            f"shard_len is {int(shard_len)}; logits has {logits.shape[1]} columns",
        )
        if workspace is not None:
            check_workspace(workspace, Payload.EXCHANGE, rows, _packet_words(topk), torch.int32)
        first = int(shard_start)
        require(first >= 0, f"shard_start is {first}; it must be a position")
        require(
            workspace is not None or not first,
            f"shard_start is {first} without a workspace; the one rank that has all keys starts "
            "at 0",
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        """The same request on all ranks; larger scores than any of its stand behind the shard."""
        rows, kv_len = cell.spec["rows"], cell.spec["columns"]
        geometry, exchanged = geometry_of(cell), cell.spec.get("exchange", False)
        topk, ranks = geometry.index_topk, joined_ranks()
        rank, world_size = (ranks.tp_rank, ranks.tp_size) if exchanged else (0, 1)
        width = -(-kv_len // (world_size * geometry.tokens_per_block)) * geometry.tokens_per_block
        start, end = min(rank * width, kv_len), min((rank + 1) * width, kv_len)
        draw = Draw(device, generator)
        logits = draw.normal(rows, width + 64, mean=1e9, std=1e8)
        logits[:, : end - start] = _scores(cell, draw)[:, start:end]
        workspace = _cell_workspace(geometry.max_rows, topk) if exchanged else None
        return {
            "logits": logits,
            "shard_len": torch.tensor([end - start], dtype=torch.int32, device=device),
            "shard_start": torch.tensor([start], dtype=torch.int32, device=device),
            "workspace": workspace,
            "topk_indices": poisoned((rows, topk), torch.int32, device),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Local memory. With a workspace also a level of all ranks' histograms and the selected
        positions: stored, read, and cleared once more by the next call, taken as an equal one."""
        written, workspace = inputs["topk_indices"].nbytes, inputs["workspace"]
        rows = inputs["logits"].shape[0]
        total = rows * int(inputs["shard_len"]) * 4 + written
        if workspace is None:
            return total
        histograms = LamportWorkspace.world_size_of(workspace) * rows * HISTOGRAM_BINS * 4
        return total + 3 * (histograms + written)


hist_topk = HistTopK()


def exchange_bytes(rows: int, topk: int, world_size: int) -> int:
    """Bytes per buffer of the workspace that calls of up to `rows` rows need; a multiple of 16.

    Of every row each rank sends topk (value, position) pairs, or, in the kernel, a histogram or
    topk positions at a time.
    """
    needed = rows * world_size * _packet_words(topk) * 4
    return -(-needed // VECTOR_BYTES) * VECTOR_BYTES


def best_of(values: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The topk best of each row of fp32 [rows, columns], as `HistTopK` orders them.

    Returns:
        (values fp32 [rows, topk], their columns int64 [rows, topk]), by rising column; then -inf
        and column 0 where there are fewer.
    """
    columns = values.shape[1]
    # Columns in falling order, so that a stable sort puts the larger of equals first.
    best, order = values.flip(1).sort(dim=1, descending=True, stable=True)
    chosen = (columns - 1 - order[:, :topk]).masked_fill(best[:, :topk] == NO_KEY, columns)
    chosen = F.pad(chosen, (0, topk - chosen.shape[1]), value=columns).sort(dim=1).values
    found = F.pad(values, (0, 1), value=NO_KEY).gather(1, chosen)
    return found, chosen.masked_fill(chosen == columns, 0)


def _packet_words(topk: int) -> int:
    """4-byte words of a row that a rank stores at a time, at most."""
    return max(2 * topk, HISTOGRAM_BINS)


def _exchanged(values: Tensor, positions: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of all ranks [rows, ranks * topk], in rank order.

    Args:
        values, positions: [rows, topk]. A NaN of all ones loses its lowest bit on the way and stays
            NaN; positions are not negative, so none of their words is one of all ones.
    """
    packet = torch.stack([values.view(torch.int32), positions.int()], dim=1)
    opened = LamportWorkspace.at(workspace)
    arrived = opened.exchange(HistTopK.name(), packet.flatten(1))
    pairs = arrived.unflatten(2, packet.shape[1:]).to(values.device)
    theirs, places = pairs.unbind(2)
    return theirs.contiguous().view(torch.float32).flatten(1), places.flatten(1)


def _scores(cell: Cell, draw: Draw) -> Tensor:
    """fp32 [rows, columns] of a whole request; each row sees one key more than the row before."""
    rows, columns = cell.spec["rows"], cell.spec["columns"]
    scores = draw.normal(rows, columns)
    if "values" in cell.spec:
        scores = draw.integers(0, cell.spec["values"], rows, columns).float()
    newest = columns - rows + torch.arange(rows, device=draw.device)
    future = torch.arange(columns, device=draw.device) > newest.unsqueeze(1)
    return scores.masked_fill_(future, NO_KEY)


def _cell_workspace(rows: int, topk: int) -> Tensor:
    ranks = joined_ranks()
    size = exchange_bytes(rows, topk, ranks.tp_size)
    tag = f"cells {HistTopK.name()} {size}"
    return lamport_workspace(ranks, tag, Payload.EXCHANGE, size).descriptor
