"""The experts against a float64 loop over tokens and their experts, on every path."""

import numpy as np
import pytest
import torch
from helpers.numerics import UNIT_ROUNDOFF, Float64, gamma, swiglu, to_numpy
from helpers.weights import fill, random_weights

from tensorrt_llm._torch.modules.fused_moe import FusedMoE
from tensorrt_llm.mapping import Mapping

HIDDEN, SIZE, EXPERTS, TOP_K = 24, 32, 8, 3
CPU = torch.device("cpu")

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_experts(
    mapping: Mapping | None = None, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> FusedMoE:
    """Slices of the same full weights, whatever the mapping."""
    experts = FusedMoE(EXPERTS, HIDDEN, SIZE, mapping or Mapping(), dtype, device)
    fill(experts.weight_specs("experts"), full_weights())
    return experts


def full_weights() -> dict[str, torch.Tensor]:
    whole = FusedMoE(EXPERTS, HIDDEN, SIZE, Mapping(), torch.float32, CPU)
    return random_weights(whole.weight_specs("experts"), seed=4)


def routed(tokens: int, dtype: torch.dtype = torch.float32) -> Routing:
    """Tokens with distinct experts each; expert 5 is nobody's."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    pool = torch.tensor([e for e in range(EXPERTS) if e != 5])
    ids = torch.stack(
        [pool[torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K]] for _ in range(tokens)]
    )
    return x, torch.rand(tokens, TOP_K, generator=generator), ids


def expected(routing: Routing) -> tuple[Float64, Float64]:
    """(exact values, bound of their error) [tokens, hidden]: SwiGLU's for each expert, a sum of
    TOP_K products in fp32 and one rounding."""
    x, weights, ids = routing
    full = {name: to_numpy(tensor.to(x.dtype)) for name, tensor in full_weights().items()}
    exact, bound = np.zeros((2, len(x), HIDDEN))
    for t in range(len(x)):
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            parts = (full[f"experts.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            out, off = swiglu(to_numpy(x[t]), *parts, x.dtype)
            exact[t] += weight * out
            bound[t] += weight * (off + gamma(TOP_K + 1) * np.abs(out))
    return exact, bound + UNIT_ROUNDOFF[x.dtype] * np.abs(exact)


def assert_within(own: torch.Tensor, routing: Routing) -> None:
    exact, bound = expected(routing)
    assert own.dtype == routing[0].dtype
    assert (np.abs(to_numpy(own) - exact) <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 9, 40, 240])
def test_equals_the_loop_over_experts(tokens, dtype) -> None:
    """One token, few, and so many that experts serve several; 240 are above ALL_EXPERTS_WORK."""
    routing = routed(tokens, dtype)
    assert_within(make_experts(dtype=dtype)(*routing), routing)


@pytest.mark.parametrize("path", ["_by_token", "_by_expert", "_one_token", "_all_experts"])
def test_every_path_computes_the_same(path) -> None:
    """Which one runs depends on device and number of tokens; the CPU can run them all."""
    routing = routed(1 if path == "_one_token" else 9)
    assert_within(getattr(make_experts(), path)(*routing), routing)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_slices_of_all_ranks_sum_to_the_whole(tp_size, tokens) -> None:
    """Each rank holds a slice of every expert; two ranks per host."""
    routing = routed(tokens)
    ranks = [
        Mapping(world_size=tp_size, tp_size=tp_size, rank=r, gpus_per_node=2)
        for r in range(tp_size)
    ]
    assert_within(sum(make_experts(rank)(*routing) for rank in ranks), routing)


def test_the_order_of_a_tokens_experts_does_not_matter() -> None:
    x, weights, ids = routed(9)
    flipped = (x, weights.flip(1), ids.flip(1))
    np.testing.assert_allclose(
        to_numpy(make_experts()(*flipped)),
        to_numpy(make_experts()(x, weights, ids)),
        rtol=0,
        atol=1e-5,
    )


def test_a_slice_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="moe_intermediate_size is 32, which tp_size 3"):
        make_experts(Mapping(world_size=3, tp_size=3, rank=0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 9, 64, 65])
def test_cuda_equals_the_loop_over_experts(tokens, dtype) -> None:
    """Around the seams between one tile, several tiles, and the path with a host decision."""
    torch.backends.cuda.matmul.allow_tf32 = False
    routing = routed(tokens, dtype)
    experts = make_experts(dtype=dtype, device=torch.device("cuda"))
    assert_within(experts(*(t.cuda() for t in routing)), routing)
