"""The target on references against the built-in modules in bf16, with an FP8 cache and with NVFP4
experts: one decode step, half a layer at a time, then the whole step, then answers.

Both are held against float64 formulas on the same stored values, with what the roundings of each
path make of a result as the band: `rounded_layers` lists them, `random_rounding` weighs them. No
number in here was chosen to fit.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.glm_tiny import answered, export, heldout
from helpers.numerics import to_numpy
from helpers.random_rounding import BAND, RandomRounding, band, deviations, is_within
from helpers.rounded_layers import (
    BuiltIn,
    Roundings,
    Target,
)
from helpers.two_paths import CONFIGS, OLDER, ROWS, Compared, Step, Trace, engine
from torch import Tensor

from tensorrt_llm._torch.custom_ops.fp4 import dequantize_nvfp4, quantize_nvfp4
from tensorrt_llm._torch.custom_ops.fp8 import saturating_cast
from tensorrt_llm._torch.modeling_v2.catalog._op import OpWrapper, lasting_binds
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.attention.q_b_fp8_rope import (  # noqa: E501
    QBFp8Rope,
)


@pytest.fixture(scope="module")
def nvfp4_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export("nvfp4", tmp_path_factory.mktemp("export") / "nvfp4")


@pytest.fixture(scope="module")
def comparison(nvfp4_export: Path) -> Callable[[str], Compared]:
    """Of a config by its name, made once."""
    return cache(lambda name: Compared(name, nvfp4_export))


@pytest.fixture(params=CONFIGS)
def compared(request: pytest.FixtureRequest, comparison: Callable[[str], Compared]) -> Compared:
    return comparison(request.param)


# --- the band -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "e4m3", "nvfp4"])
def test_random_errors_are_as_large_as_real_ones(name: str) -> None:
    """Of 512 rows of 64 numbers. For NVFP4 the random ones take the widest block scale: a scale
    that is rounded by 2^-4 the other way, and a largest element that is hit exactly, one of 16,
    leave (15 / 17)^2 * 15 / 16 of the squares at least."""
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    real = {
        "bf16": lambda: x.bfloat16(),
        "e4m3": lambda: saturating_cast(x, torch.float8_e4m3fn),
        "nvfp4": lambda: dequantize_nvfp4(*quantize_nvfp4(x, one), one),
    }
    one = torch.ones(1)
    runs = getattr(RandomRounding(), name)(to_numpy(x)[None])
    got = to_numpy(real[name]())
    assert is_within(got, runs)
    least = (15 / 17) ** 2 * 15 / 16 if name == "nvfp4" else 1.0
    ratio = np.square((got - runs[0]) / deviations(runs)).mean()
    spread = np.square((runs[1:] - runs[0]) / deviations(runs)).reshape(len(runs) - 1, -1).mean(1)
    assert ratio >= least - BAND * spread.std()


# --- the step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Target, BuiltIn])
def test_each_half_layer_is_the_formula_up_to_its_roundings(
    compared: Compared, kind: type[Roundings]
) -> None:
    halves = compared.halves(kind)
    assert not [where for where, half in halves.items() if not is_within(half.got, half.runs)]


def test_the_paths_agree_up_to_the_roundings_of_both(compared: Compared) -> None:
    """The errors of two independent chains, beside what other keys or experts make exactly."""
    target, built_in = (compared.halves(kind) for kind in (Target, BuiltIn))
    for where, half in target.items():
        other = built_in[where]
        chosen_apart = half.runs[0] - other.runs[0]
        off = half.got - other.got - chosen_apart
        assert (np.abs(off) <= np.hypot(band(half.runs), band(other.runs))).all(), where
        if chose_alike(compared, where):  # then one formula, in two orders of float64
            assert np.abs(chosen_apart).max() <= 1e-12 * np.abs(half.runs[0]).max(), where


def chose_alike(compared: Compared, where: str) -> bool:
    i, half = int(where.split()[0]), where.split()[1]
    traces = [compared.traces[kind] for kind in (Target, BuiltIn)]
    if half == "attention":
        chosen = [[set(keys) for keys in trace.keys[i].tolist()] for trace in traces]
    else:
        experts = [compared.formulas.chosen_experts(i, trace) for trace in traces]
        chosen = [[set(ids) for ids in rows] for rows in experts]
    return chosen[0] == chosen[1]


def test_what_a_step_caches_is_the_formula_up_to_its_roundings(compared: Compared) -> None:
    own = range(OLDER, OLDER + ROWS)
    for kind, trace in compared.traces.items():
        compared.step.restore(trace.pools)
        for i, attended in enumerate(compared.attended[kind]):
            latents, index_keys = compared.formulas.cached(i, own)
            assert is_within(latents, attended.latents), (kind, i)
            if attended.index_keys is not None:
                assert is_within(index_keys, attended.index_keys), (kind, i)


def test_a_step_leaves_older_rows_alone(compared: Compared) -> None:
    for trace in compared.traces.values():
        compared.step.restore(trace.pools)
        for i, before in enumerate(compared.formulas.older):
            after = compared.formulas.cached(i, range(OLDER))
            assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))


def wrongly_chosen(compared: Compared, kind: type[Roundings], trace: Trace) -> list[int]:
    """Full layers where a chosen key scores below one that was left out, by more than the noise of
    both scores."""
    found = []
    for i, attended in enumerate(compared.attended[kind]):
        if attended.scores is None:
            continue
        exact, noise = attended.scores[0], band(attended.scores)
        for t, keys in enumerate(trace.keys[i].tolist()):
            seen = set(range(OLDER + t + 1))
            assert len(set(keys)) == 16 and set(keys) <= seen
            left = sorted(seen - set(keys))
            if (exact + noise)[t, keys].min() < (exact - noise)[t, left].max():
                found.append(i)
    return found


def test_the_chosen_keys_have_the_best_scores(compared: Compared) -> None:
    for kind, trace in compared.traces.items():
        assert not wrongly_chosen(compared, kind, trace), kind


def test_the_noise_of_scores_does_not_hide_a_wrong_choice(compared: Compared) -> None:
    """The worst keys instead of the best ones."""
    decode = compared.step.core.decode
    indexer = decode.layers[0].attention.indexer
    assert indexer is not None
    with rebound(decode.ops.q_tail, 0, weight_scale=-indexer.weight_scale):
        trace = compared.step.by_target()
    assert wrongly_chosen(compared, Target, trace)[0] == 0


def test_the_chosen_experts_have_the_best_scores(compared: Compared) -> None:
    for kind, trace in compared.traces.items():
        choices = [choice for _, choice in compared.mlps[kind] if choice is not None]
        for runs, chosen in zip(choices, trace.experts, strict=True):
            exact, noise = runs[0], band(runs)
            for t, ids in enumerate(chosen.tolist()):
                left = np.setdiff1d(np.arange(exact.shape[1]), ids)
                assert (exact + noise)[t, ids].min() >= (exact - noise)[t, left].max(), (kind, t)


def test_the_whole_step_is_the_formula_up_to_its_roundings(compared: Compared) -> None:
    """All layers one behind the other, each path with its own choices."""
    formulas = compared.formulas
    for kind, trace in (
        (Target, compared.target),
        (BuiltIn, compared.step.by_built_in_forward()),
    ):
        assert trace.hidden is not None
        runs = formulas.hidden_states(formulas.path(kind), trace)
        assert is_within(to_numpy(trace.hidden), runs), kind


# --- mistakes -------------------------------------------------------------------------------------


@contextmanager
def rebound(op: OpWrapper, layer: int | None = None, **values: Any) -> Iterator[None]:
    """The op with other values of these arguments, of a layer or of all."""
    row = op._const if layer is None else op._layered[layer]
    before = dict(row)
    with lasting_binds():
        row.update(op._bound(values))
    try:
        yield
    finally:
        row.clear()
        row.update(before)


def without_the_norms_weight(step: Step) -> AbstractContextManager[Any]:
    mla = step.core.layers[1].self_attn
    weight = step.core.decode.layers[1].attention.q_b.double() / mla.q_a_layernorm.weight.double()
    return rebound(step.core.decode.ops.q_b, 1, weight=weight.bfloat16())


def with_the_nope_channels_scale(step: Step) -> AbstractContextManager[Any]:
    scale = step.core.layers[0].self_attn.nope ** -0.5
    return rebound(step.core.decode.ops.kv_half, softmax_scale=scale)


def with_positions_one_late(step: Step) -> AbstractContextManager[Any]:
    def late(*args: Any, **kwargs: Any) -> Tensor:
        return QBFp8Rope.raw_call(*args, **{**kwargs, "position_ids": kwargs["position_ids"] + 1})

    return patch.object(step.core.decode.ops.q_b, "raw_call", late)


def with_scaled_up_rows(step: Step) -> AbstractContextManager[Any]:
    """As the `input_scale` of another expert would do it."""
    experts = step.core.decode.layers[2].mlp.experts
    return rebound(
        step.core.decode.ops.routed_experts, 2, output1_scale_scalar=1.25 * experts.output1_scale
    )


def with_the_routing_unscaled(step: Step) -> AbstractContextManager[Any]:
    return rebound(step.core.decode.ops.routed_experts, 2, routed_scaling_factor=2.0)


def with_gate_for_up(step: Step) -> AbstractContextManager[Any]:
    def exchanged(t: Tensor) -> Tensor:
        up, gate = t.view(torch.uint8).chunk(2, dim=1)
        return torch.cat([gate, up], dim=1).view(t.dtype)

    experts = step.core.decode.layers[2].mlp.experts
    return rebound(
        step.core.decode.ops.routed_experts,
        2,
        gemm1_weights=exchanged(experts.up_gate),
        gemm1_weights_scale=exchanged(experts.up_gate_scale),
    )


# mistake -> (config with the least noise there that has the part, where it acts first)
MISTAKES: dict[Callable[[Step], AbstractContextManager[Any]], tuple[str, str]] = {
    without_the_norms_weight: ("bf16", "1 attention"),
    with_the_nope_channels_scale: ("fp8 cache", "0 attention"),
    with_positions_one_late: ("fp8 cache", "0 attention"),
    with_the_routing_unscaled: ("fp8 cache", "2 mlp"),
    with_scaled_up_rows: ("nvfp4, fp8 cache", "2 mlp"),
    with_gate_for_up: ("nvfp4, fp8 cache", "2 mlp"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_a_mistake_falls_out_of_the_band(
    comparison: Callable[[str], Compared], mistake: Callable[[Step], AbstractContextManager[Any]]
) -> None:
    """At the first place where it acts: all before is as it was."""
    config, place = MISTAKES[mistake]
    compared = comparison(config)
    with mistake(compared.step):
        trace = compared.step.by_target()
    halves = compared.halves(Target, trace)
    outside = [where for where, half in halves.items() if not is_within(half.got, half.runs)]
    assert outside[0] == place


# --- answers --------------------------------------------------------------------------------------


def test_the_target_answers_as_well_as_the_built_in_modules(nvfp4_export: Path) -> None:
    """On the NVFP4 export with an FP8 cache. What both paths share, the weights' rounding and the
    cache's, costs some answers. Beyond that they only round differently, so a question that one
    of them alone answers is a coin that falls either way: the target may lose some and gain
    others, but to lose so many more than it gains must not be less likely than 1 in 100."""
    asked = heldout(every=30)
    built_in, target = (
        answered(engine(nvfp4_export, "fp8", mode, max_seq_len=256, max_draft_len=7), asked)
        for mode in ("off", "require")
    )
    lost = sum(b and not t for b, t in zip(built_in, target, strict=True))
    gained = sum(t and not b for b, t in zip(built_in, target, strict=True))
    coins = lost + gained
    chance = sum(math.comb(coins, k) for k in range(lost, coins + 1)) / 2**coins
    assert sum(built_in) >= 7  # seven lost and none gained are the fewest that are too many
    assert chance >= 0.01, f"{lost} answers lost, {gained} gained"
