"""Scores from the paged index-key pool, against the formula in float64.

With TRITON_INTERPRET=1 the kernel itself runs on the CPU, in place of the plain-torch
implementation; test_paged_mqa_logits_kernel.py runs this file so.
"""

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.dsa import make_manager
from helpers.numerics import DEVICES, Float64, gamma, to_numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import (
    INDEX_KEY,
    DSACacheLayout,
)
from tensorrt_llm._torch.attention.backends.sparse.dsa.indexer import index_scores
from tensorrt_llm._torch.custom_ops import paged_mqa_logits as module
from tensorrt_llm._torch.custom_ops.fp8 import quantize_e4m3_ue8m0
from tensorrt_llm._torch.custom_ops.paged_mqa_logits import (
    CHUNK,
    paged_mqa_logits,
    paged_mqa_logits_processors,
    paged_mqa_logits_schedule,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXAMPLES = 5 if INTERPRETED else 60
FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
KEY_DTYPES = [
    FP32,
    pytest.param(BF16, marks=pytest.mark.skipif(INTERPRETED, reason="Triton interprets no bf16")),
    FP8,
]
# Where the kernel runs, whose results are equal in every bit.
KERNEL_DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the kernel is not interpreted")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
LAYERS, SLOT = 3, 1
POISON = 0xFF  # repeated, a NaN in each of the dtypes
RERUNS = 20


@pytest.fixture(autouse=True, scope="module")
def kernel_on_the_cpu() -> None:
    if INTERPRETED:
        module._score_on_host = module._launch_kernel


class Case:
    """Random queries over requests of `kv_lens` keys; whatever is no key of theirs is NaN.

    A request's rows are its last positions; those before its first key are padding.
    """

    def __init__(
        self,
        kv_lens: Sequence[int],
        *,
        seed: int = 0,
        key_dtype: torch.dtype = FP32,
        rows: int = 2,
        heads: int = 16,
        dim: int = 32,
        tokens_per_block: int = 8,
        spare_pages: int = 1,
        processors: int = 3,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv_lens, self.key_dtype, self.processors = kv_lens, key_dtype, processors
        self.heads, self.dim, self.tokens_per_block = heads, dim, tokens_per_block
        requests = len(kv_lens)
        q = torch.randn(requests, rows, heads, dim, generator=generator)
        self.q = q.to(key_dtype).float()
        self.w = torch.randn(requests, rows, heads, generator=generator)
        first = torch.tensor(kv_lens) - rows
        self.positions = (first.unsqueeze(1) + torch.arange(rows)).clamp(min=-1).flatten()
        self.keys = [torch.randn(n, dim, generator=generator).to(key_dtype) for n in kv_lens]
        self.scales = [torch.rand(n, generator=generator) for n in kv_lens]
        self._fill_pool(spare_pages, generator)

    def _fill_pool(self, spare_pages: int, generator: torch.Generator) -> None:
        """Blocks in random order, block 0 and all other layers poisoned, -1 where there is none."""
        used = [-(-n // self.tokens_per_block) for n in self.kv_lens]
        blocks = torch.randperm(sum(used), generator=generator).int() + 1
        self.table = torch.full((len(used), max(used) + spare_pages), -1, dtype=torch.int32)
        key_bytes = self.dim * self.key_dtype.itemsize
        page_bytes = self.tokens_per_block * (key_bytes + (4 if self.key_dtype == FP8 else 0))
        self.pool = torch.full((len(blocks) + 1, LAYERS, page_bytes), POISON, dtype=torch.uint8)
        for row, own, keys, scales in zip(
            self.table, blocks.split(used), self.keys, self.scales, strict=True
        ):
            row[: len(own)] = own
            parts = [self._paged(keys, len(own))]
            if self.key_dtype == FP8:
                parts.append(self._paged(scales.unsqueeze(1), len(own)))
            self.pool[own.long(), SLOT] = torch.cat(parts, dim=1)

    def _paged(self, values: torch.Tensor, pages: int) -> torch.Tensor:
        """[tokens, width] -> bytes [pages, ...], with the last page filled up."""
        data = values.contiguous().view(torch.uint8)
        tokens, width = pages * self.tokens_per_block, data.shape[1]
        whole = torch.full((tokens, width), POISON, dtype=torch.uint8)
        whole[: len(data)] = data
        return whole.view(pages, self.tokens_per_block * width)

    def request(self, i: int) -> "Case":
        """The i-th request alone, in the same pool."""
        alone = Case.__new__(Case)
        alone.__dict__.update(self.__dict__)
        rows = self.q.shape[1]
        alone.kv_lens, alone.table = self.kv_lens[i : i + 1], self.table[i : i + 1]
        alone.q, alone.w = self.q[i : i + 1], self.w[i : i + 1]
        alone.positions = self.positions[i * rows : (i + 1) * rows]
        return alone

    def run(self, device: str, processors: int | None = None) -> torch.Tensor:
        """Scores [requests * rows, width]; all bytes around them are checked."""
        count, width = len(self.positions), self.table.shape[1] * self.tokens_per_block
        around = torch.full((count + 2, width + 16), torch.nan, device=device)
        out = around[1:-1, 8:-8]
        schedule = schedule_of(self.kv_lens, processors or self.processors, device)
        inputs = (self.table, self.positions)
        table, positions = (t.to(device) for t in inputs)
        q, w, pool = (t.to(device) for t in (self.q, self.w, self.pool))
        paged_mqa_logits(q, w, pool, SLOT, self.key_dtype, table, positions, *schedule, out)
        scores = out.cpu().clone()
        out.fill_(torch.nan)
        assert bool(around.isnan().all())
        return scores

    def expected(self) -> tuple[Float64, Float64]:
        """(exact scores, how far off rounding may take them).

        A dot of `dim` products, whose fp32 sum on tensor cores cuts off instead of rounding (two
        unit roundoffs) when it aligns each product, and once more for at least every second one
        when it adds them up: gamma(3 dim). Then the weight's and the scale's product and a sum of
        `heads`: gamma(heads + 1).
        """
        q, w, positions = to_numpy(self.q), to_numpy(self.w), self.positions.tolist()
        requests, rows, heads, dim = q.shape
        shape = (requests * rows, self.table.shape[1] * self.tokens_per_block)
        exact, bound = np.full(shape, -np.inf), np.zeros(shape)
        for r, (keys, scales) in enumerate(zip(self.keys, self.scales, strict=True)):
            for row in range(rows):
                seen = positions[r * rows + row] + 1
                k, own = to_numpy(keys[:seen]), (r * rows + row, slice(seen))
                factor = to_numpy(scales[:seen]) if self.key_dtype == FP8 else 1.0
                exact[own] = np.maximum(k @ q[r, row].T, 0) @ w[r, row] * factor
                sizes = np.abs(k) @ np.abs(q[r, row]).T @ np.abs(w[r, row]) * factor
                bound[own] = gamma(3 * dim + heads + 1) * sizes
        return exact, bound

    def check(self, scores: torch.Tensor) -> None:
        exact, bound = self.expected()
        own, keys = to_numpy(scores), np.isfinite(exact)
        assert (own[~keys] == -np.inf).all()
        assert (np.abs(own[keys] - exact[keys]) <= bound[keys]).all()


def schedule_of(
    kv_lens: Sequence[int], processors: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    metadata = torch.full((processors + 1, 2), -7, dtype=torch.int32, device=device)
    order = torch.full((len(kv_lens),), -7, dtype=torch.int32, device=device)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    paged_mqa_logits_schedule(lens, metadata, order)
    return metadata, order


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


# --- the schedule ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@given(
    kv_lens=st.lists(st.integers(0, 1000) | st.sampled_from([0, 64, 65]), min_size=1, max_size=9),
    processors=st.integers(1, 40),
)
@settings(max_examples=EXAMPLES)
def test_every_chunk_has_one_processor_and_none_has_too_many(device, kv_lens, processors) -> None:
    metadata, order = (t.tolist() for t in schedule_of(kv_lens, processors, device))
    assert order == sorted(range(len(kv_lens)), key=lambda i: -kv_lens[i])  # stable
    chunks = [(place, c) for place, i in enumerate(order) for c in range(-(-kv_lens[i] // CHUNK))]
    end = (sum(n > 0 for n in kv_lens), 0)
    starts = [tuple(entry) for entry in metadata]
    assert starts == sorted(starts)
    assert all(start in chunks or start >= end for start in starts)
    shares = [
        [c for c in chunks if begin <= c < after]
        for begin, after in zip(starts, starts[1:], strict=False)
    ]
    assert [c for share in shares for c in share] == chunks
    assert max(map(len, shares)) <= -(-len(chunks) // processors)


def test_the_host_waits_for_nothing_of_the_schedule() -> None:
    tensors = [torch.zeros(shape, dtype=torch.int32) for shape in ((5,), (9, 2), (5,))]
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        paged_mqa_logits_schedule(*tensors)
    operations = {event.name for event in profile.function_events}
    assert "aten::searchsorted" in operations
    assert not operations & {"aten::_local_scalar_dense", "aten::nonzero"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lens": torch.zeros(3)}, r"kv_lens is torch.float32 \[3\]"),
        ({"kv_lens": torch.zeros(0, dtype=torch.int32)}, r"kv_lens is torch.int32 \[0\]"),
        ({"kv_lens": torch.zeros(4, dtype=torch.int32)}, r"row_order is .* it must be .* \[4\]"),
        ({"metadata": torch.zeros(9, 2)}, "scheduler_metadata is torch.float32"),
        ({"metadata": torch.zeros(1, 2, dtype=torch.int32)}, r"scheduler_metadata .* \[1, 2\]"),
        ({"metadata": torch.zeros(2, 9, dtype=torch.int32).t()}, r"has strides \(1, 9\)"),
        ({"row_order": torch.zeros(3, dtype=torch.int64)}, "row_order is torch.int64"),
        ({"row_order": torch.zeros(3, dtype=torch.int32, device="meta")}, "row_order .* on meta"),
    ],
)
def test_the_schedule_refuses(change, message) -> None:
    good = {
        "kv_lens": torch.ones(3, dtype=torch.int32),
        "metadata": torch.zeros(9, 2, dtype=torch.int32),
        "row_order": torch.zeros(3, dtype=torch.int32),
    }
    paged_mqa_logits_schedule(*good.values())
    with pytest.raises(ValueError, match=message):
        paged_mqa_logits_schedule(*{**good, **change}.values())


def test_the_cpu_has_one_processor() -> None:
    assert paged_mqa_logits_processors(torch.device("cpu")) == 1


@pytest.mark.gpu
def test_a_gpu_has_its_multiprocessors() -> None:
    count = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert paged_mqa_logits_processors(torch.device("cuda")) == count


# --- the scores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "tokens_per_block"),
    [(1, 16, 32, 8), (3, 64, 64, 64), (8, 32, 128, 32), (5, 16, 32, 128), (12, 64, 32, 16)],
)
def test_equal_the_loop_over_keys(key_dtype, rows, heads, dim, tokens_per_block, device) -> None:
    """Padding, one key, a chunk's border, several chunks, and more rows than one tile has."""
    case = Case(
        [0, 130, 1, 64, 65],
        key_dtype=key_dtype,
        rows=rows,
        heads=heads,
        dim=dim,
        tokens_per_block=tokens_per_block,
    )
    case.check(case.run(device))


@pytest.mark.parametrize("device", DEVICES)
@given(
    seed=st.integers(0, 1000),
    kv_lens=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    rows=st.integers(1, 9),
    tokens_per_block=st.sampled_from([1, 4, 8, 32]),
    processors=st.integers(1, 20),
    spare_pages=st.integers(1, 20),
    padding=st.integers(0, 3),
)
@settings(max_examples=EXAMPLES)
def test_any_lengths_rows_and_pages(device, padding, **shape) -> None:
    """Also rows that are padding though their request has keys for them, at a request's limit."""
    case = Case(key_dtype=FP8, **shape)
    case.positions.view(len(case.kv_lens), -1)[:, case.q.shape[1] - padding :] = -1
    case.check(case.run(device))


def test_the_band_is_tight_enough_to_mean_something() -> None:
    exact, bound = Case([100], key_dtype=FP8, heads=32, dim=128).expected()
    assert bound.max() < 0.1 < 1 < np.abs(exact[np.isfinite(exact)]).mean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=str)
def test_nan_is_seen_and_stays_where_it_is(key_dtype, device) -> None:
    """A key's NaN in all rows past it, a query's in its own row; -inf everywhere after a row."""
    if INTERPRETED and key_dtype == FP8:
        pytest.skip("Triton interprets no NaN of e4m3")
    case = Case([70, 9], rows=3, key_dtype=key_dtype)
    clean = case.run(device)
    key_bytes, block = 32 * key_dtype.itemsize, int(case.table[0, 68 // 8])
    case.pool[block, SLOT].view(-1)[68 % 8 * key_bytes : (68 % 8 + 1) * key_bytes] = POISON
    case.q[1, 1, 5, 7] = torch.nan
    scores = case.run(device)
    nan = torch.zeros_like(scores, dtype=torch.bool)
    nan[1:3, 68] = True
    nan[4, :8] = True
    assert torch.equal(scores.isnan(), nan)
    assert torch.equal(bits(scores[~nan]), bits(clean[~nan]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("key_dtype", "narrow"), [(FP8, FP8), (FP8, BF16), (BF16, BF16)], ids=str)
def test_queries_in_fewer_bytes_give_the_same_bits(key_dtype, narrow, device) -> None:
    if INTERPRETED and BF16 in (key_dtype, narrow):
        pytest.skip("Triton interprets no bf16")
    case = Case([70, 9], key_dtype=key_dtype)
    wide = case.run(device)
    case.q = case.q.to(narrow)
    assert torch.equal(bits(case.run(device)), bits(wide))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=str)
def test_a_score_depends_on_neither_schedule_nor_batch(key_dtype, device) -> None:
    case = Case([130, 0, 65, 200], rows=4, key_dtype=key_dtype)
    together = case.run(device, processors=1)
    for processors in (2, 7, 20):
        assert torch.equal(bits(case.run(device, processors)), bits(together))
    for i, own in enumerate(together.split(4)):
        assert torch.equal(bits(case.request(i).run(device)), bits(own))


@pytest.mark.skipif(INTERPRETED, reason="compares plain torch")
@pytest.mark.parametrize(("dtype", "fp8"), [(FP32, False), (BF16, False), (FP32, True)])
def test_plain_torch_gives_the_indexers_bits(dtype, fp8) -> None:
    """The pool of a real cache manager, written and read by its layout, and `index_scores`."""
    layout = DSACacheLayout(key_width=48, index_head_dim=32, dtype=dtype, fp8=fp8)
    manager, generator = make_manager(layout), torch.Generator().manual_seed(0)
    table = torch.tensor([[3, 9, 4], [5, 1, 7]], dtype=torch.int32)
    q, w = (torch.randn(2, 3, 16, *more, generator=generator) for more in ((32,), ()))
    q = q.to(FP8 if fp8 else dtype).float()
    for start in range(12):
        keys = torch.randn(2, 32, generator=generator).to(dtype)
        block, offset = table[:, start // 4].long(), torch.full((2,), start % 4)
        layout.write_index_keys(manager, 2, keys, block, offset)
    keys, scales = layout.read_index_pages(manager, 2, table.flatten().long())
    scales = None if scales is None else scales.view(2, -1)
    expected = index_scores(q, w, keys.view(2, 12, 32), scales).flatten(0, 1)
    positions = torch.tensor([8, 9, 10, 4, 5, -1])
    expected.masked_fill_(torch.arange(12) > positions.unsqueeze(1), float("-inf"))
    out = torch.full((6, 12), torch.nan)
    pool, slot = manager.pool(INDEX_KEY), manager.layer_slot(INDEX_KEY, 2)
    schedule = schedule_of([11, 6], 1)
    paged_mqa_logits(q, w, pool, slot, layout.key_dtype, table, positions, *schedule, out)
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.skipif(INTERPRETED, reason="the kernel cannot look at values")
@pytest.mark.parametrize("key_dtype", [BF16, FP8], ids=str)
def test_plain_torch_refuses_queries_that_are_not_rounded(key_dtype) -> None:
    case = Case([70], key_dtype=key_dtype)
    case.q[0, 0, 0, 0] = 1 + 2.0**-10
    with pytest.raises(ValueError, match=f"q has values that {key_dtype} does not hold"):
        case.run("cpu")


def test_indexers_fp8_queries_are_exact() -> None:
    """What the indexer quantises fits the contract, whatever its size."""
    q = torch.randn(4, 16, 32) * torch.logspace(-6, 6, 4).view(4, 1, 1)
    quantised, _ = quantize_e4m3_ue8m0(q)
    assert torch.equal(quantised.float().to(torch.float16).float(), quantised.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 16, 32, dtype=torch.float64)}, "q is torch.float64"),
        ({"q": torch.zeros(6, 16, 32)}, r"q is \[6, 16, 32\]"),
        ({"q": torch.zeros(0, 3, 16, 32)}, r"q is \[0, 3, 16, 32\]"),
        ({"q": torch.zeros(2, 3, 32, 16).transpose(2, 3)}, "contiguous"),
        ({"q": torch.zeros(2, 3, 4, 32)}, "4 heads of 32 channels"),
        ({"q": torch.zeros(2, 3, 16, 256)}, "16 heads of 256 channels"),
        ({"w": torch.zeros(2, 3, 16, dtype=BF16)}, "w is torch.bfloat16"),
        ({"w": torch.zeros(2, 3, 8)}, r"w is torch.float32 \[2, 3, 8\]"),
        ({"pool": torch.zeros(9, 3, 288)}, "pool is torch.float32"),
        ({"pool": torch.zeros(27, 288, dtype=torch.uint8)}, r"pool is \[27, 288\]"),
        ({"pool": torch.zeros(9, 288, 3, dtype=torch.uint8).transpose(1, 2)}, "pool has strides"),
        ({"pool": torch.zeros(9, 3, 290, dtype=torch.uint8)}, "pages of 290 bytes"),
        ({"layer_slot": 3}, r"layer_slot 3 is not in \[0, 3\)"),
        ({"layer_slot": -1}, "layer_slot -1"),
        ({"key_dtype": torch.float16}, "key_dtype is torch.float16"),
        ({"key_dtype": FP32}, "pages of 288 bytes"),
        ({"block_table": torch.zeros(2, 5, dtype=torch.int64)}, "block_table is torch.int64"),
        ({"block_table": torch.zeros(3, 5, dtype=torch.int32)}, r"block_table .* \[3, 5\]"),
        ({"block_table": torch.zeros(5, 2, dtype=torch.int32).t()}, "block_table has strides"),
        ({"positions": torch.zeros(6, dtype=torch.int32)}, "positions is torch.int32"),
        ({"positions": torch.zeros(5, dtype=torch.int64)}, r"positions is torch.int64 \[5\]"),
        ({"metadata": torch.zeros(4, 3, dtype=torch.int32)}, r"scheduler_metadata .* \[4, 3\]"),
        ({"row_order": torch.zeros(3, dtype=torch.int32)}, r"row_order is torch.int32 \[3\]"),
        ({"out": torch.zeros(6, 39)}, r"out is .* \[6, 39\] .* it must be .* \[6, 40\]"),
        ({"out": torch.zeros(5, 40)}, r"out is torch.float32 \[5, 40\]"),
        ({"out": torch.zeros(6, 40, dtype=BF16)}, "out is torch.bfloat16"),
        ({"out": torch.zeros(40, 6).t()}, "its rows must be contiguous"),
        ({"out": torch.zeros(6, 40, device="meta")}, "on meta"),
    ],
)
def test_refuses(change, message) -> None:
    good = {
        "q": torch.zeros(2, 3, 16, 32),
        "w": torch.zeros(2, 3, 16),
        "pool": torch.zeros(9, 3, 8 * 36, dtype=torch.uint8),
        "layer_slot": 2,
        "key_dtype": FP8,
        "block_table": torch.zeros(2, 5, dtype=torch.int32),
        "positions": torch.zeros(6, dtype=torch.int64),
        "metadata": torch.zeros(4, 2, dtype=torch.int32),
        "row_order": torch.zeros(2, dtype=torch.int32),
        "out": torch.zeros(6, 40),
    }
    paged_mqa_logits(*good.values())
    with pytest.raises(ValueError, match=message):
        paged_mqa_logits(*{**good, **change}.values())


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("key_dtype", [FP32, BF16, FP8], ids=str)
@pytest.mark.parametrize(("kv_lens", "rows"), [([8190], 8), ([3000, 17, 0, 2049], 4), ([5000], 1)])
def test_cuda_repeats_bitwise(kv_lens, rows, key_dtype) -> None:
    """The target's heads and channels, over and over on one machine-wide schedule."""
    case = Case(kv_lens, rows=rows, key_dtype=key_dtype, heads=32, dim=128, tokens_per_block=32)
    case.processors = paged_mqa_logits_processors(torch.device("cuda"))
    first = case.run("cuda")
    case.check(first)
    for _ in range(RERUNS):
        assert torch.equal(bits(case.run("cuda")), bits(first))


@pytest.mark.gpu
@pytest.mark.parametrize("key_dtype", [FP32, BF16, FP8], ids=str)
def test_a_graph_follows_the_lengths(key_dtype) -> None:
    """Schedule and scores captured once, replayed on fresh lengths, queries and old results."""
    case = Case([400, 400, 400], rows=4, key_dtype=key_dtype)
    processors, device = paged_mqa_logits_processors(torch.device("cuda")), "cuda"
    lens = torch.zeros(3, dtype=torch.int32, device=device)
    metadata = torch.empty(processors + 1, 2, dtype=torch.int32, device=device)
    order = torch.empty(3, dtype=torch.int32, device=device)
    q, w, pool, table, positions = (
        t.to(device) for t in (case.q, case.w, case.pool, case.table, case.positions)
    )
    out = torch.empty(12, table.shape[1] * 8, device=device)

    def step() -> None:
        paged_mqa_logits_schedule(lens, metadata, order)
        paged_mqa_logits(q, w, pool, SLOT, key_dtype, table, positions, metadata, order, out)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, kv_lens in enumerate([[400, 3, 77], [0, 0, 0], [64, 65, 400], [1, 128, 0]]):
        case.kv_lens = kv_lens
        case.q = torch.randn(3, 4, 16, 32, generator=torch.Generator().manual_seed(seed))
        case.q = case.q.to(key_dtype).float()
        ends = torch.tensor(kv_lens).unsqueeze(1) - 4 + torch.arange(4)
        case.positions = ends.clamp(min=-1).flatten()
        lens.copy_(torch.tensor(kv_lens))
        positions.copy_(case.positions)
        q.copy_(case.q)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(bits(out.cpu()), bits(case.run("cuda")))
        case.check(out.cpu())


@pytest.mark.gpu
def test_cuda_pages_beyond_32_bits() -> None:
    """A pool of more than 4 GiB whose last block is in use."""
    case = Case([8], key_dtype=FP8)
    blocks, page_bytes = (5 << 30) // (LAYERS * 288), 288
    assert case.pool.shape[2] == page_bytes
    expected = case.run("cuda")
    pool = torch.full((blocks, LAYERS, page_bytes), POISON, dtype=torch.uint8, device="cuda")
    pool[-1] = case.pool[int(case.table[0, 0])].cuda()
    case.table[0, 0], case.pool = blocks - 1, pool
    assert torch.equal(bits(case.run("cuda")), bits(expected))
