"""The DSA indexer's scores of generation rows, read straight from the paged index-key pool.

score(row, s) = k_scale(s) * sum_h w_h(row) * relu(q_h(row) . k(s)) for the keys s up to the row's
position, -inf after it.

On CUDA the keys of all requests are cut into chunks of `CHUNK`, and the chunks are split evenly
over the programs of a persistent kernel. The split (`paged_mqa_logits_schedule`) depends on the
lengths alone and serves all layers of a step. With equally many rows per request a score is always
computed in the same place of the same tile, so its bits depend on neither the schedule nor the rest
of the batch.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installations have no Triton
    triton = None

CHUNK = 64  # keys of a tile: the rows of a warp group's matrix instruction
HEADS, DIMS = (16, 32, 64), (32, 64, 128)
QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
# Cached dtype -> bytes that a key's channel takes in a product: e4m3 is multiplied as fp16.
OPERAND_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float8_e4m3fn: 2}
SCALE_BYTES = 4  # of one e4m3 key
# What registers hold, by operand bytes: (row, head) pairs of a tile, and warps that share it. No
# matrix instruction is exact enough for fp32.
COLUMNS, WARPS = {2: 256, 4: 64}, {2: 8, 4: 16}
# A key takes two loads, its block number and itself, so three tiles of keys are in flight.
STAGES = 8


def paged_mqa_logits_processors(device: torch.device) -> int:
    """Processors to schedule for: the multiprocessors of a GPU; 1 on the CPU, where no schedule is
    read."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def paged_mqa_logits_serves(heads: int, dim: int, key_dtype: torch.dtype) -> bool:
    """Whether `paged_mqa_logits` takes an indexer of this shape."""
    return heads in HEADS and dim in DIMS and key_dtype in OPERAND_BYTES


def paged_mqa_logits_schedule(
    kv_lens: torch.Tensor, scheduler_metadata: torch.Tensor, row_order: torch.Tensor
) -> None:
    """Split the requests' chunks over the processors; none gets more than its rounded-up share.

    Works on the device alone, so that a captured graph makes the schedule anew at each replay.

    Args:
        kv_lens: int32 [requests], keys of each request; 0 is padding.
        scheduler_metadata: int32 [processors + 1, 2], overwritten with the place in `row_order`
            and the chunk of that request where each processor starts; the last entry is the end.
        row_order: int32 [requests], overwritten with the requests, longest first; equally long
            ones stay in order.

    Raises:
        ValueError: shapes, dtypes, devices or strides other than these.
    """
    device, entries = kv_lens.device, max(scheduler_metadata.numel() // 2, 2)
    _check("kv_lens", kv_lens, torch.int32, (max(kv_lens.numel(), 1),), device)
    _check("scheduler_metadata", scheduler_metadata, torch.int32, (entries, 2), device)
    _check("row_order", row_order, torch.int32, tuple(kv_lens.shape), device)
    lens, order = kv_lens.sort(descending=True, stable=True)
    row_order.copy_(order)
    before = lens.new_zeros(lens.shape[0] + 1, dtype=torch.int64)  # chunks before each place
    ends = torch.cumsum((lens + (CHUNK - 1)) // CHUNK, 0, out=before[1:])
    starts = torch.arange(entries, device=device) * ends[-1] // (entries - 1)
    place = torch.searchsorted(ends, starts, right=True)
    scheduler_metadata.copy_(torch.stack([place, starts - before[place]], dim=1))


def paged_mqa_logits(
    q: torch.Tensor,
    w: torch.Tensor,
    pool: torch.Tensor,
    layer_slot: int,
    key_dtype: torch.dtype,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scheduler_metadata: torch.Tensor,
    row_order: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Score each request's cached keys for each of its rows.

    On CUDA it is one launch. Products are exact or rounded once (fp32); sums are fp32, of `dim`
    and then of `heads` terms. NaN comes through wherever the row's position lets it be seen.

    Args:
        q: [requests, rows, heads, dim] in fp32, bf16 or e4m3, contiguous; 16, 32 or 64 heads of 32,
            64 or 128 channels. Its values are such that `key_dtype` holds them exactly, as index
            queries are rounded (bf16) or quantised (e4m3) like the keys. The narrower, the faster.
        w: fp32 [requests, rows, heads], contiguous, with all scales but the keys' folded in.
        pool: uint8 [blocks, layers, page bytes], contiguous. A page has all its tokens' keys, then
            in e4m3 all their fp32 scales, one each.
        layer_slot: which of the pool's layers.
        key_dtype: fp32, bf16 or e4m3.
        block_table: int32 [requests, pages], blocks of the pool; rows may lie apart. What is past a
            request's last position does not matter.
        positions: int64 [requests * rows], within the table; a row sees the keys up to its own, at
            -1 (padding) none.
        scheduler_metadata, row_order: from `paged_mqa_logits_schedule`, for lengths of at least
            each request's last position + 1. The CPU does not read them.
        out: fp32 [requests * rows, pages * tokens per page], all of it overwritten; rows may lie
            apart.

    Raises:
        ValueError: shapes, dtypes, devices or strides other than these, or a layer that the pool
            does not have; on the CPU also queries that do not fit `key_dtype`.
    """
    _check_queries(q, w)
    _check_pool(pool, layer_slot, key_dtype, q)
    keys, scales = _layer_pages(pool, layer_slot, key_dtype, q.shape[-1])
    requests, tokens = q.shape[0], q.shape[0] * q.shape[1]
    pages = max(block_table.numel() // requests, 1)
    entries = max(scheduler_metadata.numel() // 2, 2)
    _check("block_table", block_table, torch.int32, (requests, pages), q.device, rows_apart=True)
    _check("positions", positions, torch.int64, (tokens,), q.device)
    _check("scheduler_metadata", scheduler_metadata, torch.int32, (entries, 2), q.device)
    _check("row_order", row_order, torch.int32, (requests,), q.device)
    width = pages * keys.shape[1]
    _check("out", out, torch.float32, (tokens, width), q.device, rows_apart=True)
    score = _launch_kernel if q.is_cuda else _score_on_host
    score(q, w, keys, scales, block_table, positions, scheduler_metadata, row_order, out)


def _check(
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    rows_apart: bool = False,
) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape or x.device != device:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; "
            f"it must be {dtype} {list(shape)} on {device}"
        )
    if not x.is_contiguous() and not (rows_apart and x.stride(-1) == 1):
        layout = "its rows must be" if rows_apart else "it must be"
        raise ValueError(f"{name} has strides {x.stride()}; {layout} contiguous")


def _check_queries(q: torch.Tensor, w: torch.Tensor) -> None:
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"q is {q.dtype}; it must be one of {QUERY_DTYPES}")
    if q.dim() != 4 or not q.numel() or not q.is_contiguous():
        raise ValueError(
            f"q is {list(q.shape)} with strides {q.stride()}; "
            "it must be [requests, rows, heads, dim], none 0, contiguous"
        )
    if q.shape[2] not in HEADS or q.shape[3] not in DIMS:
        raise ValueError(
            f"{q.shape[2]} heads of {q.shape[3]} channels are not served; "
            f"heads must be one of {HEADS} and channels one of {DIMS}"
        )
    _check("w", w, torch.float32, tuple(q.shape[:3]), q.device)


def _check_pool(
    pool: torch.Tensor, layer_slot: int, key_dtype: torch.dtype, q: torch.Tensor
) -> None:
    if key_dtype not in OPERAND_BYTES:
        raise ValueError(f"key_dtype is {key_dtype}; it must be one of {tuple(OPERAND_BYTES)}")
    if pool.dim() != 3 or not pool.numel():
        raise ValueError(
            f"pool is {list(pool.shape)}; it must be [blocks, layers, page bytes], none 0"
        )
    _check("pool", pool, torch.uint8, tuple(pool.shape), q.device)
    if not 0 <= layer_slot < pool.shape[1]:
        raise ValueError(f"layer_slot {layer_slot} is not in [0, {pool.shape[1]})")
    token_bytes = _token_bytes(key_dtype, q.shape[3])
    if pool.shape[2] % token_bytes:
        raise ValueError(
            f"pages of {pool.shape[2]} bytes hold no whole number of {key_dtype} keys with "
            f"{q.shape[3]} channels, which take {token_bytes} bytes each"
        )


def _token_bytes(key_dtype: torch.dtype, dim: int) -> int:
    """Bytes of one key and its scale."""
    return dim * key_dtype.itemsize + (SCALE_BYTES if key_dtype == torch.float8_e4m3fn else 0)


def _layer_pages(
    pool: torch.Tensor, layer_slot: int, key_dtype: torch.dtype, dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of one layer's pages: keys [blocks, tokens, dim], fp32 scales [blocks, tokens] or
    None."""
    pages = pool[:, layer_slot]
    tokens = pages.shape[1] // _token_bytes(key_dtype, dim)
    data_bytes = tokens * dim * key_dtype.itemsize
    keys = pages[:, :data_bytes].view(key_dtype).unflatten(1, (tokens, dim))
    return keys, pages[:, data_bytes:].view(torch.float32) if data_bytes < pages.shape[1] else None


def _score_on_host(
    q: torch.Tensor,
    w: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scheduler_metadata: torch.Tensor,
    row_order: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Gathers all pages of the table."""
    queries = q.float()
    if not bool(((queries.to(keys.dtype).float() == queries) | queries.isnan()).all()):
        raise ValueError(f"q has values that {keys.dtype} does not hold; round it like the keys")
    requests, rows, heads, dim = q.shape
    blocks = block_table.clamp(min=0).flatten().long()
    data = keys.flatten(1).view(torch.uint8).index_select(0, blocks).view(keys.dtype).float()
    dots = torch.bmm(queries.flatten(1, 2), data.view(requests, -1, dim).transpose(1, 2)).relu_()
    dots = dots.view(requests * rows, heads, -1)
    scores = torch.bmm(w.view(requests * rows, 1, heads), dots).view(requests, rows, -1)
    if scales is not None:
        scores *= scales.index_select(0, blocks).view(requests, 1, -1)
    future = torch.arange(out.shape[1]) > positions.unsqueeze(1)
    out.copy_(scores.flatten(0, 1).masked_fill_(future, float("-inf")))


def _launch_kernel(
    q: torch.Tensor,
    w: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scheduler_metadata: torch.Tensor,
    row_order: torch.Tensor,
    out: torch.Tensor,
) -> None:
    (requests, rows, heads, dim), operand = q.shape, OPERAND_BYTES[keys.dtype]
    tile_rows = min(triton.next_power_of_2(rows), COLUMNS[operand] // heads)
    _score_kernel[(scheduler_metadata.shape[0] - 1, triton.cdiv(rows, tile_rows))](
        q,
        w,
        keys,
        keys.stride(0),
        scales,
        0 if scales is None else scales.stride(0),
        block_table,
        block_table.stride(0),
        positions,
        scheduler_metadata,
        row_order,
        out,
        out.stride(0),
        requests,
        rows,
        out.shape[1],
        HEADS=heads,
        DIM=dim,
        TOKENS_PER_BLOCK=keys.shape[1],
        ROWS=tile_rows,
        KEYS=CHUNK,
        STAGES=STAGES,
        num_warps=WARPS[operand],
    )


if triton is not None:

    @triton.jit
    def _fill_rest(  # type: ignore[no-untyped-def]
        positions, out, out_stride, requests, rows, width, row, KEYS: tl.constexpr
    ):
        """-inf into the chunks that no row of a request sees; all processors take turns."""
        for request in range(requests):
            position = tl.load(positions + request * rows + row, mask=row < rows, other=-1)
            seen = tl.cdiv(tl.max(position, 0).to(tl.int32) + 1, KEYS)
            to = out + (request * rows + row).to(tl.int64)[:, None] * out_stride
            for chunk in range(seen + tl.program_id(0), tl.cdiv(width, KEYS), tl.num_programs(0)):
                key = chunk * KEYS + tl.arange(0, KEYS)
                keep = (row < rows)[:, None] & (key < width)[None, :]
                tl.store(to + key[None, :], float("-inf"), mask=keep)

    @triton.jit
    def _score_kernel(  # type: ignore[no-untyped-def]
        q,
        w,
        keys,
        keys_stride,
        scales,
        scales_stride,
        table,
        table_stride,
        positions,
        schedule,
        row_order,
        out,
        out_stride,
        requests,
        rows,
        width,
        HEADS: tl.constexpr,
        DIM: tl.constexpr,
        TOKENS_PER_BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        KEYS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Program (p, g) walks processor p's chunks for the g-th `ROWS` rows of each request."""
        # e4m3 becomes fp16 in one instruction, bf16 only in several; both hold it exactly.
        operand: tl.constexpr = keys.dtype.element_ty if scales is None else tl.float16
        processor, first_row = tl.program_id(0), tl.program_id(1) * ROWS
        row = first_row + tl.arange(0, ROWS)
        _fill_rest(positions, out, out_stride, requests, rows, width, row, KEYS)

        first_place = tl.load(schedule + 2 * processor)
        first_chunk = tl.load(schedule + 2 * processor + 1)
        last_place = tl.load(schedule + 2 * processor + 2)
        last_end = tl.load(schedule + 2 * processor + 3)
        column = tl.arange(0, ROWS * HEADS)  # (row, head) pairs
        is_pair = first_row * HEADS + column < rows * HEADS
        key_in_chunk, channel = tl.arange(0, KEYS), tl.arange(0, DIM)
        for place in range(first_place, tl.minimum(last_place + 1, requests)):
            request = tl.load(row_order + place).to(tl.int64)
            position = tl.load(positions + request * rows + row, mask=row < rows, other=-1)
            seen = tl.max(position, 0).to(tl.int32) + 1
            start = tl.where(place == first_place, first_chunk, 0)
            end = tl.cdiv(seen, KEYS)
            end = tl.where(place == last_place, tl.minimum(end, last_end), end)
            if start < end:
                pair = (request * rows + first_row) * HEADS + column
                queries = tl.load(
                    q + pair[:, None] * DIM + channel[None, :], mask=is_pair[:, None], other=0.0
                )
                queries = tl.trans(queries.to(operand))
                weights = tl.load(w + pair, mask=is_pair, other=0.0)
                to = out + (request * rows + row)[None, :] * out_stride
                for chunk in tl.range(start, end, num_stages=STAGES):
                    key = chunk * KEYS + key_in_chunk
                    # For keys that no row sees: block 0, which exists.
                    page = table + request * table_stride + key // TOKENS_PER_BLOCK
                    block = tl.load(page, mask=key < seen, other=0).to(tl.int64)
                    token = key % TOKENS_PER_BLOCK
                    data = keys + (block * keys_stride + token * DIM)[:, None] + channel[None, :]
                    dots = tl.dot(tl.load(data).to(operand), queries, input_precision="ieee")
                    dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
                    terms = tl.reshape(dots * weights[None, :], (KEYS, ROWS, HEADS))
                    score = tl.sum(terms, axis=2)
                    if scales is not None:
                        score *= tl.load(scales + block * scales_stride + token)[:, None]
                    score = tl.where(key[:, None] <= position[None, :], score, float("-inf"))
                    keep = (key < width)[:, None] & (row < rows)[None, :]
                    tl.store(to + key[:, None], score, mask=keep)
