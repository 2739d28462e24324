"""Splitting over ranks: ranges, slices of columns and rows, SwiGLU."""

import numpy as np
import pytest
import torch
from helpers.numerics import Float64, gamma, swiglu, to_numpy
from helpers.weights import fill, random_weights

from tensorrt_llm._torch.modules.gated_mlp import GatedMLP
from tensorrt_llm._torch.modules.linear import Linear, TensorParallelMode, shard_range
from tensorrt_llm.mapping import Mapping

CPU = torch.device("cpu")
FP32 = {"dtype": torch.float32, "device": CPU}


def ranks(tp_size: int) -> list[Mapping]:
    """The ranks of two hosts, without processes: what they compute before any communication."""
    per_node = max(1, tp_size // 2)
    return [
        Mapping(world_size=tp_size, tp_size=tp_size, rank=r, gpus_per_node=per_node)
        for r in range(tp_size)
    ]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 16])
def test_ranges_cover_everything_in_rank_order(tp_size) -> None:
    parts = [shard_range(48, mapping, "size") for mapping in ranks(tp_size)]
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(48))
    assert {stop - start for start, stop in parts} == {48 // tp_size}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda m: shard_range(10, m, "vocab_size"), "vocab_size is 10, which tp_size 4"),
        (
            lambda m: Linear(8, 10, mapping=m, mode=TensorParallelMode.COLUMN, **FP32),
            "out_features is 10",
        ),
        (
            lambda m: Linear(10, 8, mapping=m, mode=TensorParallelMode.ROW, **FP32),
            "in_features is 10",
        ),
        (lambda m: GatedMLP(8, 10, mapping=m, **FP32), "intermediate_size is 10"),
    ],
)
def test_what_does_not_divide_is_an_error(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(ranks(4)[1])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_column_slices_concatenate_and_row_slices_sum(tp_size) -> None:
    """All against one float64 product; a sum of partial sums has the same number of additions."""
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    modules = {
        mode: [
            Linear(24, 16, mapping=m, mode=mode, reduce_output=False, **FP32)
            for m in ranks(tp_size)
        ]
        for mode in TensorParallelMode
    }
    weights = random_weights(modules[TensorParallelMode.NONE][0].weight_specs("w"))
    for module in sum(modules.values(), []):
        fill(module.weight_specs("w"), weights)
    exact = to_numpy(x) @ to_numpy(weights["w.weight"]).T
    bound = gamma(24) * (np.abs(to_numpy(x)) @ np.abs(to_numpy(weights["w.weight"])).T)
    columns = torch.cat([m(x) for m in modules[TensorParallelMode.COLUMN]], dim=-1)
    parts = x.chunk(tp_size, dim=-1)
    rows = sum(m(p) for m, p in zip(modules[TensorParallelMode.ROW], parts, strict=True))
    for own in (modules[TensorParallelMode.NONE][0](x), columns, rows):
        assert (np.abs(to_numpy(own) - exact) <= bound).all()


def mlp_weights(weights: dict[str, torch.Tensor]) -> list[Float64]:
    return [to_numpy(weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up", "down")]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_gated_mlp_slices_sum_to_the_whole(tp_size) -> None:
    """Also over more hosts than one: the split is over the whole group that adds the parts."""
    modules = [GatedMLP(24, 32, mapping=m, reduce_output=False, **FP32) for m in ranks(tp_size)]
    whole = GatedMLP(24, 32, mapping=Mapping(), **FP32)
    weights = random_weights(whole.weight_specs("mlp"))
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(1))
    for module in modules:
        fill(module.weight_specs("mlp"), weights)
    exact, bound = swiglu(to_numpy(x), *mlp_weights(weights), torch.float32)
    assert (np.abs(to_numpy(sum(m(x) for m in modules)) - exact) <= bound).all()
    assert bound.max() < 1e-4


def test_gated_mlp_in_bf16_stays_in_bf16() -> None:
    mlp = GatedMLP(24, 32, mapping=Mapping(), dtype=torch.bfloat16, device=CPU)
    weights = {n: w.bfloat16() for n, w in random_weights(mlp.weight_specs("mlp")).items()}
    fill(mlp.weight_specs("mlp"), weights)
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = mlp(x)
    assert out.dtype == torch.bfloat16
    exact, bound = swiglu(to_numpy(x), *mlp_weights(weights), torch.bfloat16)
    assert (np.abs(to_numpy(out) - exact) <= bound).all()
    assert bound.max() < 0.2 < np.abs(exact).max()
