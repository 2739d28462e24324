"""Collectives on real rank processes."""

import pytest
import torch
from helpers.engine import run_ranks

from tensorrt_llm._torch.distributed import (
    AllReduce,
    allgather,
    broadcast_object,
    destroy_process_group,
    init_process_group,
    min_over_ranks,
    ops,
)
from tensorrt_llm.mapping import Mapping

TP_SIZE = 3  # no power of two, and the order of three additions shows
DTYPES = (torch.float32, torch.bfloat16)


def partial_sum(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of unlike sizes, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    return (10.0 ** (3 * rank - 3) * torch.randn(7, 33, generator=generator)).to(dtype)


def work(mapping: Mapping) -> dict[str, object]:
    """Everything in one go: starting processes is what takes the time."""
    reduce, mine = AllReduce(mapping), torch.full((2, 3), float(mapping.rank))
    parts = {d: partial_sum(mapping.rank, d) for d in DTYPES}
    return {
        "sums": [[reduce(parts[d]) for d in DTYPES] for _ in range(3)],
        "inputs_unchanged": all(
            torch.equal(parts[d], partial_sum(mapping.rank, d)) for d in DTYPES
        ),
        "scalar_rows": reduce(torch.tensor([1.0 + mapping.rank])),
        "last": allgather(mine, mapping),
        "first": allgather(mine, mapping, dim=0),
        "transposed": allgather(mine.t(), mapping, dim=0),
        "told": broadcast_object({"rank": mapping.rank, "ids": [1, 2]}, mapping),
        "least": min_over_ranks(100 - mapping.rank, mapping),
    }


@pytest.fixture(scope="module")
def answers() -> list[dict[str, object]]:
    return run_ranks(TP_SIZE, work)


def test_sums_are_bitwise_equal_on_all_ranks_and_repeats(answers) -> None:
    """Added in fp32 in rank order, then rounded once."""
    for i, dtype in enumerate(DTYPES):
        total = partial_sum(0, dtype).float()
        for rank in range(1, TP_SIZE):
            total = total + partial_sum(rank, dtype).float()
        for answer in answers:
            for repeat in answer["sums"]:
                assert repeat[i].dtype == dtype
                assert torch.equal(repeat[i], total.to(dtype))


def test_another_order_would_give_other_bits() -> None:
    first, second, third = (partial_sum(rank, torch.float32) for rank in range(TP_SIZE))
    assert not torch.equal((first + second) + third, first + (second + third))


def test_inputs_stay_and_vectors_work(answers) -> None:
    for answer in answers:
        assert answer["inputs_unchanged"]
        assert answer["scalar_rows"].tolist() == [6.0]


def test_gathered_parts_are_in_rank_order(answers) -> None:
    for answer in answers:
        assert answer["last"].tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 2
        assert answer["first"].tolist() == [[rank] * 3 for rank in (0, 0, 1, 1, 2, 2)]
        assert answer["transposed"].tolist() == [[r] * 2 for r in (0, 0, 0, 1, 1, 1, 2, 2, 2)]


def test_rank_0_speaks_and_the_least_counts(answers) -> None:
    for answer in answers:
        assert answer["told"] == {"rank": 0, "ids": [1, 2]}
        assert answer["least"] == 100 - (TP_SIZE - 1)


def test_one_rank_needs_no_group() -> None:
    """Nothing is started, and everything passes through."""
    alone, x = Mapping(), torch.ones(2, 2)
    init_process_group(alone, "cpu", "file:///nowhere", 1.0)
    assert not torch.distributed.is_initialized()
    assert AllReduce(alone)(x) is x
    assert allgather(x, alone) is x
    assert broadcast_object(x, alone) is x
    assert min_over_ranks(5, alone) == 5
    destroy_process_group()


def test_many_ranks_are_added_one_after_the_other(monkeypatch) -> None:
    """16 ranks without their processes: only the transport is left out."""
    scales = 10.0 ** torch.arange(-8, 8)
    parts = scales[:, None] * torch.randn(16, 50, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(ops, "_gather", lambda _x, _mapping: parts)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.equal(AllReduce(Mapping(world_size=16, tp_size=16))(parts[0]), total)


@pytest.mark.multi_gpu
def test_nccl_sums_are_bitwise_equal_on_all_ranks() -> None:
    for repeats in zip(*run_ranks(2, _reduce_on_gpu, device="cuda"), strict=True):
        assert torch.equal(*repeats)
        exact = sum(partial_sum(rank, torch.float32).double() for rank in range(2))
        torch.testing.assert_close(repeats[0].double(), exact)


def _reduce_on_gpu(mapping: Mapping) -> list[torch.Tensor]:
    mine = partial_sum(mapping.rank, torch.float32)
    return [AllReduce(mapping)(mine.cuda()).cpu() for _ in range(5)]
