"""The trimmed tail of a draft step against the steps it replaces, bit by bit."""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.draft_loop import run_loop
from helpers.engine import run_ranks

from tensorrt_llm._torch.distributed import AllReduce, allgather
from tensorrt_llm._torch.speculative.interface import (
    SpecWorkerBase,
    draft_tokens_from_gathered,
    local_max_and_index,
)
from tensorrt_llm._torch.speculative.mtp_tail_trim import (
    ENV,
    MAX_VOCAB,
    DraftArgmaxExchange,
    local_argmax_pack,
    mtp_tail_trim_enabled,
)
from tensorrt_llm.mapping import Mapping

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHARDS = (77, 1000, 9680, 77440, 151936)
BITS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """Sets the gate as a new process would find it; unset to begin with and in the end."""

    def set_gate(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv(ENV, raising=False)
        else:
            monkeypatch.setenv(ENV, value)
        mtp_tail_trim_enabled.cache_clear()

    set_gate(None)
    yield set_gate
    mtp_tail_trim_enabled.cache_clear()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def with_bits(pattern: int, dtype: torch.dtype) -> torch.Tensor:
    """The scalar of this dtype with these bits."""
    return torch.tensor(pattern, dtype=BITS[dtype.itemsize]).view(dtype)


def special_rows(columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[9, columns]: a random row, and eight that a careless reduction gets wrong."""
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    nan = torch.tensor(torch.nan) if dtype.itemsize == 4 else with_bits(0x7FFF, dtype)
    x[1] = 1.5  # all equal
    x[2, [5, columns // 2, columns - 1]] = 9.0  # ties
    x[3] = -torch.inf
    x[4, [columns // 3, columns - 1]] = nan
    x[5, [7, columns - 3]] = torch.inf
    x[6] = -torch.inf
    x[6, -1] = -3.0
    x[7] = -1.0
    x[7, 3], x[7, 6] = -0.0, 0.0  # equal, so the first of them, and with its sign
    x[8, 0], x[8, -1] = torch.inf, nan
    return x.to(device)


# --- the gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "enabled"), [(None, True), ("1", True), ("0", False)])
def test_gate_is_read_once(value, enabled, gate, monkeypatch) -> None:
    gate(value)
    assert mtp_tail_trim_enabled() is enabled
    monkeypatch.setenv(ENV, "0" if enabled else "1")
    assert mtp_tail_trim_enabled() is enabled


@pytest.mark.parametrize("value", ["", "2", "true", "off", " 1"])
def test_gate_refuses_other_values(value, gate) -> None:
    gate(value)
    with pytest.raises(ValueError, match=f"{ENV} is '{value}'"):
        SpecWorkerBase(1, Mapping())


# --- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", SHARDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_local_argmax_pack_matches_torch(device, dtype, columns) -> None:
    """1 to 9 rows, both ranks' offsets, alone and as one slot of a wide row."""
    x = special_rows(columns, dtype, device)
    for rank in range(2):
        mapping = Mapping(world_size=2, tp_size=2, rank=rank)
        for rows in range(1, 10):
            expected = local_max_and_index(x[:rows], mapping)
            for width, slot in ((2, 0), (4, rank), (128, rank)):
                out = torch.full((rows, width), 7.0, device=device)
                local_argmax_pack(x[:rows], rank * columns, out, slot, zero_rest=True)
                wanted = torch.zeros_like(out)
                wanted[:, 2 * slot : 2 * slot + 2] = expected
                assert torch.equal(bits(out), bits(wanted))


@pytest.mark.parametrize("device", DEVICES)
def test_nan_payloads(device) -> None:
    """bf16: all mantissa bits, as CUDA's rounding gives; fp32: what was there."""
    out = torch.empty(1, 2, device=device)
    for pattern in (0x7FC0, 0x7F81, -0x40):
        x = torch.zeros(1, 77, dtype=torch.bfloat16)
        x[0, 5] = with_bits(pattern, torch.bfloat16)
        local_argmax_pack(x.to(device), 0, out)
        assert float(out[0, 0]) == 5 and int(bits(out)[0, 1]) == 0x7FFF0000
    x = torch.zeros(1, 77)
    x[0, 5] = with_bits(0x7FC12345, torch.float32)
    local_argmax_pack(x.to(device), 0, out)
    assert int(bits(out)[0, 1]) == 0x7FC12345


@pytest.mark.parametrize("device", DEVICES)
def test_other_columns_stay_unless_they_are_to_be_zero(device) -> None:
    x, wide = special_rows(77, torch.float32, device), torch.full((9, 128), 7.0, device=device)
    local_argmax_pack(x, 0, wide, slot=3)
    assert bool((wide[:, :6] == 7).all()) and bool((wide[:, 8:] == 7).all())
    # One part of a wider buffer: what lies around it belongs to others.
    local_argmax_pack(x, 0, wide[:, 32:64], slot=3, zero_rest=True)
    assert bool((wide[:, 8:32] == 7).all()) and bool((wide[:, 64:] == 7).all())
    assert bool((wide[:, 32:38] == 0).all()) and bool((wide[:, 40:64] == 0).all())
    assert torch.equal(bits(wide[:, 38:40]), bits(wide[:, 6:8]))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_lie_apart(device) -> None:
    for dtype in DTYPES:
        x = special_rows(1000, dtype, device)
        out, apart = (torch.empty(9, 2, device=device) for _ in range(2))
        local_argmax_pack(x[:, 3:903], 900, apart)
        local_argmax_pack(x[:, 3:903].contiguous(), 900, out)
        assert torch.equal(bits(apart), bits(out))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 5, dtype=torch.float64)}, "logits are torch.float64"),
        ({"logits": torch.zeros(5)}, r"logits are \[5\]"),
        ({"logits": torch.zeros(0, 5)}, r"logits are \[0, 5\]"),
        ({"logits": torch.zeros(5, 2).t()}, "columns of logits are 2 apart"),
        ({"vocab_offset": -1}, "vocab_offset -1"),
        ({"vocab_offset": MAX_VOCAB - 4}, f"vocab_offset {MAX_VOCAB - 4} with 5 columns"),
        ({"out": torch.zeros(2, 4, dtype=torch.float64)}, "out is torch.float64"),
        ({"out": torch.zeros(2, 4, device="meta")}, "out is torch.float32 on meta"),
        ({"out": torch.zeros(3, 4)}, r"out is \[3, 4\]"),
        ({"out": torch.zeros(4, 2).t()}, "with strides"),
        ({"slot": 2}, r"slot 2 is not in \[0, 2\)"),
        ({"slot": -1}, "slot -1"),
    ],
)
def test_pack_refuses(change, message) -> None:
    good = {"logits": torch.zeros(2, 5), "vocab_offset": 0, "out": torch.zeros(2, 4), "slot": 1}
    local_argmax_pack(**good)
    with pytest.raises(ValueError, match=message):
        local_argmax_pack(**{**good, **change})


def test_the_largest_index_is_exact() -> None:
    out = torch.empty(1, 2)
    local_argmax_pack(torch.tensor([[0.0, 1.0]]), MAX_VOCAB - 2, out)
    assert int(out[0, 0]) == MAX_VOCAB - 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_local_argmax_pack_strided_rows_and_cuda_graph(dtype) -> None:
    """Captured once, replayed on fresh logits."""
    buffer = torch.zeros(9, 20000, dtype=dtype, device="cuda")
    logits, out = buffer[:, 160 : 160 + 9680], torch.empty(9, 128, device="cuda")
    local_argmax_pack(logits, 9680, out, slot=1, zero_rest=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        local_argmax_pack(logits, 9680, out, slot=1, zero_rest=True)
    mapping = Mapping(world_size=2, tp_size=2, rank=1)
    for seed in range(20):
        generator = torch.Generator("cuda").manual_seed(seed)
        logits.copy_(torch.randn(9, 9680, generator=generator, device="cuda"))
        if seed % 2:
            logits.copy_(special_rows(9680, dtype, "cuda").roll(seed, dims=0))
        out.fill_(7.0)
        graph.replay()
        assert torch.equal(bits(out[:, 2:4]), bits(local_max_and_index(logits, mapping)))
        assert int(out[:, :2].count_nonzero() + out[:, 4:].count_nonzero()) == 0


# --- the exchange ---------------------------------------------------------------------------------

SHARD = 77
TP_SIZE = 2
CASES = [(rows, dtype) for rows in (1, 2, 9, 40) for dtype in DTYPES]


def shard_logits(rows: int, rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """[rows, SHARD] of one rank, with ties, NaN and infinities within and across ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(rows, SHARD, generator=generator).mul(2).round().to(dtype)  # many ties
    special = special_rows(SHARD, dtype, "cpu").roll(rank + seed, dims=0)
    x[: min(rows - 1, 9)] = special[: min(rows - 1, 9)]
    return x


def assert_same_pairs(ours: torch.Tensor, gathered: torch.Tensor) -> None:
    """Bitwise, but for the payload of a NaN and the sign of a zero."""
    assert ours.dtype == gathered.dtype == torch.float32
    assert bool(((ours == gathered) | (ours.isnan() & gathered.isnan())).all())


def compare_with_allgather(mapping: Mapping, device: str) -> list[list[int]]:
    """One rank of the comparison; returns the tokens of each of `CASES` and of the limits' rows."""
    exchange = DraftArgmaxExchange(mapping, wanted=True)
    assert exchange.max_rows == 16384
    summed: list[int] = []
    all_reduce = exchange.all_reduce
    exchange.all_reduce = lambda x: summed.append(len(x)) or all_reduce(x)
    model_all_reduce, tokens = AllReduce(mapping), []
    limits = [(exchange.max_rows + more, torch.bfloat16) for more in range(2)]
    for rows, dtype in CASES + limits:
        logits = shard_logits(rows, mapping.rank, dtype).to(device)
        expected = allgather(local_max_and_index(logits, mapping), mapping, dim=-1)
        model_all_reduce(torch.ones(64, 128, device=device))  # as the model's last layer does
        ours = exchange(logits).clone()
        assert_same_pairs(ours, expected)
        tokens.append(draft_tokens_from_gathered(ours).tolist())
        assert tokens[-1] == draft_tokens_from_gathered(expected).tolist()
        for _ in range(20 if rows < 100 else 1):
            assert torch.equal(bits(exchange(logits)), bits(ours))
    assert max(summed) == exchange.max_rows  # and the case above it was gathered
    return tokens


def one_rank(mapping: Mapping) -> tuple[list[list[int]], list[int], list[int]]:
    """All that needs ranks on the CPU: starting them is what takes the time."""
    tokens = compare_with_allgather(mapping, "cpu")
    others = [
        dataclasses.replace(mapping, enable_attention_dp=True),
        Mapping(world_size=TP_SIZE, rank=mapping.rank, pp_size=TP_SIZE),
        Mapping(world_size=TP_SIZE, rank=mapping.rank, cp_size=TP_SIZE),
    ]
    limits = [DraftArgmaxExchange(other, wanted=True).max_rows for other in others]
    gathering = DraftArgmaxExchange(others[0], wanted=True)
    logits = shard_logits(9, mapping.rank, torch.float32)
    expected = allgather(local_max_and_index(logits, mapping), mapping, dim=-1)
    assert torch.equal(bits(gathering(logits)), bits(expected))
    # Gates that differ: nobody sums, and both kinds of gathering understand each other.
    os.environ[ENV] = str(mapping.rank)
    mtp_tail_trim_enabled.cache_clear()
    worker = SpecWorkerBase(1, mapping)
    assert worker.tail_trim == bool(mapping.rank)
    limits.append(worker.argmax_exchange.max_rows)
    return tokens, limits, worker.draft_argmax(logits).tolist()


def whole_argmax(rows: int, dtype: torch.dtype) -> list[int]:
    """What one rank with the whole vocabulary would choose."""
    shards = [shard_logits(rows, rank, dtype) for rank in range(TP_SIZE)]
    return torch.cat(shards, dim=1).argmax(dim=-1).tolist()


def check_tokens(answers: list[list[list[int]]]) -> None:
    """All ranks agree, also with a rank of its own."""
    assert all(tokens == answers[0] for tokens in answers)
    for case, tokens in zip(CASES, answers[0][: len(CASES)], strict=True):
        assert tokens == whole_argmax(*case)


def test_mailbox_matches_gloo_allgather() -> None:
    answers = run_ranks(TP_SIZE, one_rank)
    check_tokens([tokens for tokens, _, _ in answers])
    for _, limits, chosen in answers:
        assert limits == [0, 0, 0, 0]
        assert chosen == whole_argmax(9, torch.float32)


@pytest.mark.multi_gpu
def test_mailbox_matches_nccl_allgather() -> None:
    check_tokens(run_ranks(TP_SIZE, one_gpu_rank, device="cuda"))


def one_gpu_rank(mapping: Mapping) -> list[list[int]]:
    tokens = compare_with_allgather(mapping, "cuda")
    replay_exchange(mapping)
    gather_while_capturing(mapping)
    return tokens


def replay_exchange(mapping: Mapping) -> None:
    """A model all-reduce, the pack and the exchange in one graph, on fresh logits."""
    exchange, model_all_reduce = DraftArgmaxExchange(mapping, wanted=True), AllReduce(mapping)
    logits, partial = torch.zeros(9, SHARD, device="cuda"), torch.ones(9, 6144, device="cuda")
    exchange(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model_all_reduce(partial)
        pairs = exchange(logits)
    for seed in range(20):
        logits.copy_(shard_logits(9, mapping.rank, torch.float32, seed))
        partial.fill_(1.0)
        graph.replay()
        expected = allgather(local_max_and_index(logits, mapping), mapping, dim=-1)
        assert_same_pairs(pairs, expected)
        assert bool((partial == mapping.tp_size).all())


def gather_while_capturing(mapping: Mapping) -> None:
    """A first call under capture gathers and keeps nothing; a later eager one sums."""
    exchange = DraftArgmaxExchange(mapping, wanted=True)
    exchange.all_reduce = refuse
    logits = shard_logits(9, mapping.rank, torch.float32).cuda()
    expected = allgather(local_max_and_index(logits, mapping), mapping, dim=-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pairs = exchange(logits)
    graph.replay()
    assert torch.equal(bits(pairs), bits(expected))
    exchange.all_reduce = AllReduce(mapping)
    assert_same_pairs(exchange(logits), expected)


def refuse(_x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("summed under a capture that no eager call came before")


def test_rows_that_fit_one_shot() -> None:
    assert DraftArgmaxExchange(Mapping(), wanted=True).max_rows == 65536
    assert DraftArgmaxExchange(Mapping(), wanted=False).max_rows == 0


def test_one_rank_takes_the_plain_argmax() -> None:
    logits = special_rows(SHARD, torch.float32, "cpu")
    assert torch.equal(SpecWorkerBase(1, Mapping()).draft_argmax(logits), logits.argmax(dim=-1))


# --- the draft loop -------------------------------------------------------------------------------


@pytest.mark.parametrize("index_share", [True, False], ids=["share", "own_index"])
@pytest.mark.parametrize("draft_len", [1, 2, 5])
def test_draft_loop_trim_is_bit_identical(draft_len, index_share, gate) -> None:
    loops = {}
    for value in ("1", "0"):
        gate(value)
        loops[value] = run_loop(draft_len, index_share)
    trimmed, original = loops["1"], loops["0"]
    for ours, theirs in zip(
        vars(trimmed.outputs).values(), vars(original.outputs).values(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert len(trimmed.draft_model.seen) == draft_len
    for ours, theirs in zip(trimmed.draft_model.seen, original.draft_model.seen, strict=True):
        assert all(map(torch.equal, ours, theirs))
    for name in ("seq_lens_cuda", "kv_lens_cuda"):
        ours, theirs = getattr(trimmed.metadata, name), getattr(original.metadata, name)
        assert torch.equal(ours, theirs)
    for name in ("seq_lens", "kv_lens", "num_contexts", "num_tokens", "indexer_skip_topk"):
        assert getattr(trimmed.metadata, name) == getattr(original.metadata, name)
    assert Counter(trimmed.outputs.new_tokens_lens.tolist()).keys() >= {1, 1 + draft_len}


@pytest.mark.parametrize("draft_len", [1, 2, 5])
def test_trimmed_loop_selects_rows_once(draft_len, gate) -> None:
    """Without the trim each step gathers for the LM head and for the next step."""
    gate("0")
    original = run_loop(draft_len, index_share=True)
    assert original.gathers == 2 * draft_len
    gate("1")
    assert run_loop(draft_len, index_share=True).gathers == 1


@pytest.mark.parametrize(("draft_len", "moves"), [(1, 0), (2, 1), (5, 4)])
def test_rows_move_only_for_a_step_that_follows(draft_len, moves, gate) -> None:
    """The trimmed loop's last draft step leaves them where they are, also if it is the first."""
    gate("1")
    assert run_loop(draft_len, index_share=True).metadata.num_moves == moves
    gate("0")
    assert run_loop(draft_len, index_share=True).metadata.num_moves == draft_len
