"""The indexer's choice: its parts against loops, and the whole against the formula in float64."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers import reference_glm
from helpers.dsa import StepSequence, cached_index_key, make_manager, make_metadata, set_step
from helpers.numerics import DEVICES, Float64, gamma, to_numpy
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.attention.backends.interface import AttentionMetadata
from tensorrt_llm._torch.attention.backends.sparse.dsa import indexer as indexer_module
from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.attention.backends.sparse.dsa.indexer import (
    Indexer,
    dense_rows,
    index_scores,
    top_k,
)
from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import (
    DSAtrtllmAttentionMetadata,
    Selection,
)
from tensorrt_llm._torch.attention.backends.sparse.dsa.params import DSAParams
from tensorrt_llm._torch.attention.backends.sparse.params import (
    MTPIndexerScheduleTrimMetadata,
    MTPIndexShareMetadata,
)
from tensorrt_llm._torch.modules.rotary_embedding import RotaryEmbedding
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role

Q_RANK, ROPE, THETA, HEADS = 24, 16, 8e6, 4
REQUESTS = (1, 2)
# fp32 noise of normed and projected activations: some tens of roundings of 2^-24.
NOISE = 1e-5


# --- parts ----------------------------------------------------------------------------------------


@st.composite
def scored_keys(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], int]:
    """(distinct scores [tokens, kv], position of each token, k)."""
    tokens, kv = draw(st.integers(1, 5)), draw(st.integers(1, 30))
    order = [draw(st.permutations(range(kv))) for _ in range(tokens)]
    scores = torch.tensor(order, dtype=torch.float32) - kv / 2
    positions = draw(st.lists(st.integers(-1, kv - 1), min_size=tokens, max_size=tokens))
    return scores, positions, draw(st.integers(1, 35))


@given(case=scored_keys(), spare=st.integers(0, 4))
def test_top_k_takes_the_best_keys_up_to_the_position(case, spare) -> None:
    scores, positions, k = case
    width = min(k, max(positions) + 1) + spare
    future = torch.arange(scores.shape[1]) > torch.tensor(positions).unsqueeze(1)
    chosen = top_k(scores.clone(), future, k, width)
    assert chosen.dtype == torch.int32
    assert chosen.shape[1] >= width
    for row, values, position in zip(chosen.tolist(), scores.tolist(), positions, strict=True):
        keys = sorted(range(position + 1), key=lambda key: -values[key])
        real = [key for key in row if key != -1]
        assert sorted(real) == sorted(keys[:k])
        assert set(row) - set(real) <= {-1}


def test_top_k_among_equal_scores_takes_as_many_as_there_is_room_for() -> None:
    """Which of the equal ones is open; all better ones are in, and nothing comes twice."""
    scores = torch.tensor([[1.0, 5.0, 1.0, 1.0, 7.0, 1.0]])
    chosen = top_k(scores.clone(), torch.zeros(1, 6, dtype=torch.bool), 4, 4)[0].tolist()
    assert len(set(chosen)) == 4
    assert {1, 4} < set(chosen)


@given(positions=st.lists(st.integers(-1, 20), min_size=1, max_size=8), width=st.integers(1, 24))
def test_dense_rows_are_all_keys_up_to_the_position(positions, width) -> None:
    rows = dense_rows(torch.tensor(positions), width)
    assert rows.dtype == torch.int32
    for row, position in zip(rows.tolist(), positions, strict=True):
        assert row == [key if key <= position else -1 for key in range(width)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_scales", [True, False])
@pytest.mark.parametrize(
    ("requests", "rows", "heads", "kv"), [(1, 9, 3, 17), (3, 2, 16, 5), (4, 1, 1, 1)]
)
def test_scores_equal_the_loop(requests, rows, heads, kv, with_scales, device) -> None:
    """Two fp32 sums, of dim and of heads terms, and one multiplication."""
    dim, generator = 32, torch.Generator().manual_seed(heads)
    q = torch.randn(requests, rows, heads, dim, generator=generator)
    w = torch.randn(requests, rows, heads, generator=generator)
    keys = torch.randn(requests, kv, dim, generator=generator)
    scales = torch.rand(requests, kv, generator=generator) if with_scales else None
    inputs = [None if t is None else t.to(device) for t in (q, w, keys, scales)]
    own = to_numpy(index_scores(*inputs))
    qs, ws, ks = to_numpy(q), to_numpy(w), to_numpy(keys)
    factors = np.ones((requests, kv)) if scales is None else to_numpy(scales)
    for r in range(requests):
        for row in range(rows):
            for key in range(kv):
                dots = [max(0.0, qs[r, row, h] @ ks[r, key]) for h in range(heads)]
                sizes = [np.abs(qs[r, row, h]) @ np.abs(ks[r, key]) for h in range(heads)]
                exact = ws[r, row] @ dots * factors[r, key]
                bound = gamma(dim + heads + 1) * (np.abs(ws[r, row]) @ sizes) * factors[r, key]
                assert abs(own[r, row, key] - exact) <= bound


# --- the whole ------------------------------------------------------------------------------------


class Bench:
    """One indexer over real pools, fed step by step with two requests' random activations."""

    def __init__(self, layout: DSACacheLayout, *, topk: int, length: int = 40) -> None:
        self.layout, dim = layout, layout.index_head_dim
        self.params = DSAParams(HEADS, dim, topk)
        generator = torch.Generator().manual_seed(dim)
        self.indexer = Indexer(
            self.params, 2, Q_RANK, ROPE, layout, torch.float32, torch.device("cpu")
        )
        norm = self.indexer.k_norm
        self.indexer.wq_b.weight.copy_(torch.randn(HEADS * dim, Q_RANK, generator=generator))
        norm.weight.copy_(1 + 0.2 * torch.randn(dim, generator=generator))
        norm.bias.copy_(0.3 * torch.randn(dim, generator=generator))
        self.inputs = {
            request: tuple(
                torch.randn(length, width, generator=generator) for width in (Q_RANK, dim, HEADS)
            )
            for request in REQUESTS
        }
        self.rotary = RotaryEmbedding(ROPE, THETA, 64, torch.device("cpu"))
        self.manager = make_manager(layout)
        self.metadata = make_metadata(self.manager, layout, self.params)
        for request in REQUESTS:
            self.manager.add_request(request)
        for tokens in range(1, length + 1):  # in turns, so that the blocks of the two alternate
            for request in REQUESTS:
                self.manager.resize(request, tokens)

    def step(
        self, contexts: Sequence[StepSequence], generations: Sequence[StepSequence] = ()
    ) -> dict[tuple[int, int], list[int]]:
        """(request, position) -> chosen keys, for every token of the step."""
        set_step(self.metadata, contexts, generations)
        self.metadata.prepare()
        sequences = [*contexts, *generations]
        qr, k, weights = (
            torch.cat(
                [self.inputs[s.request_id][i][s.cached : s.cached + s.new] for s in sequences]
            )
            for i in range(3)
        )
        rotations = self.rotary.rotations(self.metadata.position_ids)
        chosen = self.indexer(qr, k, weights, rotations, self.metadata).indices.tolist()
        tokens = [(s.request_id, s.cached + i) for s in sequences for i in range(s.new)]
        return {
            token: [key for key in row if key != -1]
            for token, row in zip(tokens, chosen, strict=True)
        }

    def stored_key(self, request: int, position: int) -> Float64:
        """From the pool's bytes, scales applied."""
        page, offset = divmod(position, self.manager.tokens_per_block)
        block = self.manager.block_ids(request, Role.INDEX_KEY)[page]
        data, scales = cached_index_key(self.manager, self.layout, block, 1, offset)
        return data * np.repeat(scales, len(data) // len(scales)) if len(scales) else data

    def exact_key(self, request: int, position: int) -> Float64:
        norm = self.indexer.k_norm
        raw, weight, bias = (
            to_numpy(t) for t in (self.inputs[request][1][position], norm.weight, norm.bias)
        )
        key = reference_glm.layer_norm(raw, weight, bias, 1e-6)
        return reference_glm.rotate_first(key, ROPE, position, THETA)

    def scores(self, request: int, position: int) -> tuple[Float64, Float64]:
        """(exact scores over the stored keys, how far off the indexer may be) [position + 1]."""
        qr, _, weights = (to_numpy(t[position]) for t in self.inputs[request])
        queries = (to_numpy(self.indexer.wq_b.weight) @ qr).reshape(HEADS, -1)
        queries = reference_glm.rotate_first(queries, ROPE, position, THETA)
        keys = np.array([self.stored_key(request, p) for p in range(position + 1)])
        noise = reference_glm.score_noise(queries, weights, keys, NOISE, self.layout.fp8)
        if self.layout.fp8:
            queries = np.array([reference_glm.through_fp8(q) for q in queries])
        return reference_glm.index_scores(queries, weights, keys), noise

    def check(self, chosen: dict[tuple[int, int], list[int]]) -> None:
        for (request, position), keys in chosen.items():
            assert len(set(keys)) == len(keys) == min(self.params.index_topk, position + 1)
            assert set(keys) <= set(range(position + 1))
            assert_are_best(keys, *self.scores(request, position))


def assert_are_best(chosen: list[int], scores: Float64, noise: Float64) -> None:
    """No key that was left out is better than one that was taken, beyond what rounding explains."""
    left = np.setdiff1d(np.arange(len(scores)), chosen)
    if len(left):
        worst_taken = (scores + noise)[chosen].min()
        assert worst_taken >= (scores - noise)[left].max()


LAYOUTS = {
    "fp32": DSACacheLayout(48, 32, torch.float32, fp8=False),
    "fp8": DSACacheLayout(48, 32, torch.float32, fp8=True),
    "fp8 with two scales": DSACacheLayout(48, 256, torch.float32, fp8=True),
}
LAYOUT_CASES = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@LAYOUT_CASES
def test_chosen_keys_are_the_best_by_score(layout) -> None:
    """Whole prompts, later chunks, and both requests decoding at unequal lengths."""
    bench = Bench(layout, topk=8)
    bench.check(bench.step([StepSequence(1, 0, 30), StepSequence(2, 0, 5)]))
    bench.check(bench.step([StepSequence(2, 5, 13)], [StepSequence(1, 30)]))
    bench.check(bench.step([], [StepSequence(2, 18), StepSequence(1, 31)]))
    bench.check(bench.step([StepSequence(1, 32, 8), StepSequence(2, 19, 3)]))


@LAYOUT_CASES
def test_stored_keys_are_the_formulas(layout) -> None:
    """Within half an e4m3 step plus the fp32 noise that moves a channel over a border at times."""
    bench = Bench(layout, topk=8)
    bench.step([StepSequence(1, 0, 40)])
    for position in range(40):
        stored, exact = bench.stored_key(1, position), bench.exact_key(1, position)
        best = reference_glm.through_fp8(exact) if layout.fp8 else exact
        slack = NOISE * np.abs(exact).max()
        assert (np.abs(stored - exact) <= np.abs(best - exact) + slack).all()


@LAYOUT_CASES
def test_skipping_the_choice_writes_the_same_index_keys(layout) -> None:
    """Below index_topk nothing is scored, but later steps read these keys."""
    pools, selections = [], []
    for topk in (8, 64):
        bench = Bench(layout, topk=topk)
        chosen = bench.step([StepSequence(1, 0, 20), StepSequence(2, 0, 7)])
        chosen |= bench.step([], [StepSequence(1, 20), StepSequence(2, 7)])
        pools.append(bench.manager.pool(Role.INDEX_KEY))
        selections.append(chosen)
    assert torch.equal(*pools)
    assert int(pools[0].count_nonzero()) > 0
    for (_, position), keys in selections[1].items():
        assert keys == list(range(position + 1))


def test_tiles_of_queries_choose_the_same(monkeypatch) -> None:
    layout = LAYOUTS["fp8"]
    whole = Bench(layout, topk=8).step([StepSequence(1, 0, 33)])
    monkeypatch.setitem(indexer_module.SCORE_TILE_BYTES, "cpu", 5 * HEADS * 36 * 4)
    bench = Bench(layout, topk=8)
    tiled = bench.step([StepSequence(1, 0, 33)])
    bench.check(tiled)
    assert {t: sorted(keys) for t, keys in tiled.items()} == {
        t: sorted(keys) for t, keys in whole.items()
    }


def test_padding_rows_choose_nothing_and_write_nothing() -> None:
    bench = Bench(LAYOUTS["fp8"], topk=8)
    bench.step([StepSequence(1, 0, 30)])
    metadata: DSAtrtllmAttentionMetadata = bench.metadata
    before = bench.manager.pool(Role.INDEX_KEY).clone()
    set_step(metadata, [], [], padding=2)
    metadata.prepare(static_width=True, skip_indexer=False)
    rotations = bench.rotary.rotations(metadata.position_ids)
    inputs = (t[:2] for t in bench.inputs[1])
    selection = bench.indexer(*inputs, rotations, metadata)
    assert selection.indices.tolist() == [[-1] * 8] * 2
    assert torch.equal(bench.manager.pool(Role.INDEX_KEY), before)


# --- the schedule and index share -----------------------------------------------------------------


def draft_row(bench: Bench, position: int) -> None:
    """Move request 1's row on, as a draft loop does."""
    bench.metadata.advance_draft_rows(torch.tensor([position]))


def choose(bench: Bench, position: int) -> Selection:
    """One pass of the indexer on request 1's row."""
    rotations = bench.rotary.rotations(torch.tensor([position]))
    return bench.indexer(
        *(t[position : position + 1] for t in bench.inputs[1]), rotations, bench.metadata
    )


@pytest.mark.parametrize("stale_sched", [False, True])
def test_indexer_decode_mtp_topk_reuse(stale_sched) -> None:
    """Reusing steps take the stash 1:1 whatever the schedule holds; choosing on a stale one
    raises."""
    bench = Bench(LAYOUTS["fp32"], topk=8)
    bench.step([StepSequence(1, 0, 30)])
    metadata = bench.metadata
    set_step(metadata, [], [StepSequence(1, 30)])
    metadata.prepare()
    metadata.set_mtp_num_accepted(torch.tensor([1]))
    metadata.set_in_mtp_draft_loop(True)
    first = choose(bench, 30)
    metadata.set_in_mtp_draft_loop(False)
    metadata.set_skip_topk(True)
    assert metadata.mtp_next_step_reuses_topk()
    metadata.set_skip_indexer_sched_metadata(stale_sched)
    metadata.begin_draft_rows(torch.tensor([31]))
    if stale_sched:
        metadata.scheduler_metadata_buffer.fill_(-1)
    for position in (32, 33):
        draft_row(bench, position)
        assert metadata.shared_selection is not None
        assert torch.equal(metadata.shared_selection.indices, first.indices)
        assert torch.equal(metadata.shared_selection.slots, first.slots)
        assert metadata.position_ids.tolist() == [position]
    assert metadata.indexer_schedule_is_stale is stale_sched
    if stale_sched:
        with pytest.raises(RuntimeError, match="schedule is stale"):
            choose(bench, 33)
        metadata.set_skip_indexer_sched_metadata(False)
        draft_row(bench, 33)
    assert int(choose(bench, 33).indices.max()) <= 33


def test_lengths_that_change_while_the_schedule_is_skipped_make_it_stale() -> None:
    """Tables are refreshed all the same."""
    bench = Bench(LAYOUTS["fp32"], topk=8)
    bench.step([StepSequence(1, 0, 30)])
    metadata = bench.metadata
    set_step(metadata, [], [StepSequence(1, 29)])
    metadata.prepare()
    assert not metadata.indexer_schedule_is_stale
    metadata.set_skip_indexer_sched_metadata(True)
    metadata.kv_lens_cuda[:1] -= 3
    metadata.on_update_kv_lens()
    assert metadata.position_ids.tolist() == [26]
    assert metadata.indexer_schedule_is_stale
    with pytest.raises(RuntimeError, match="schedule is stale"):
        choose(bench, 26)


def test_short_rows_need_no_schedule() -> None:
    bench = Bench(LAYOUTS["fp32"], topk=64)
    bench.step([StepSequence(1, 0, 30)])
    chosen = bench.step([], [StepSequence(1, 30)])
    assert list(chosen.values()) == [list(range(31))]


def test_metadata_is_what_a_draft_loop_may_ask_for() -> None:
    metadata = Bench(LAYOUTS["fp32"], topk=8).metadata
    assert isinstance(metadata, MTPIndexShareMetadata)
    assert isinstance(metadata, MTPIndexerScheduleTrimMetadata)
    assert metadata.kv_lens_hook_idempotent
    assert not AttentionMetadata.kv_lens_hook_idempotent
