"""Tables of a step against a model that walks every token in Python."""

from dataclasses import dataclass

import pytest
import torch
from helpers.dsa import StepSequence, make_manager, make_metadata, set_step
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import (
    INDEX_KEY,
    KEY,
    DSACacheLayout,
)
from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from tensorrt_llm._torch.attention.backends.sparse.dsa.params import DSAParams

LAYOUT = DSACacheLayout(48, 32, torch.float32, fp8=False)
TOKENS_PER_BLOCK, MAX_BLOCKS, LAYERS, FULL_LAYERS = 4, 10, 3, 2
CAPACITY = TOKENS_PER_BLOCK * MAX_BLOCKS


class ScatteredBlocks:
    """Blocks in an order of their own for each role, as no real allocator would hand them out.

    The real manager gives both pools the same ids, which would hide a table that is mixed up.
    """

    tokens_per_block, max_blocks_per_seq = TOKENS_PER_BLOCK, MAX_BLOCKS
    table_version = 0

    def __init__(self, lengths: dict[int, int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.pools = {
            KEY: torch.zeros(80, LAYERS, LAYOUT.key_bytes * TOKENS_PER_BLOCK, dtype=torch.uint8),
            INDEX_KEY: torch.zeros(80, FULL_LAYERS, 8, dtype=torch.uint8),
        }
        self.blocks: dict[str, dict[int, list[int]]] = {}
        for role in self.pools:
            ids = iter(torch.randperm(80, generator=generator).tolist())
            self.blocks[role] = {
                request: [next(ids) for _ in range(-(-length // TOKENS_PER_BLOCK))]
                for request, length in lengths.items()
            }

    def pool(self, role: str) -> torch.Tensor:
        return self.pools[role]

    def has_buffer(self, role: str, layer_idx: int) -> bool:
        return True

    def layer_slot(self, role: str, layer_idx: int) -> int:
        return layer_idx

    def max_held_blocks(self, request_ids: list[int], role: str) -> int:
        return max((len(self.blocks[role][request]) for request in request_ids), default=0)

    def copy_batch_block_offsets(
        self,
        dst: torch.Tensor,
        request_ids: list[int],
        role: str,
        max_blocks: int | None = None,
    ) -> None:
        for row, request in enumerate(request_ids):
            own = self.blocks[role][request]
            whole = torch.tensor(own + [-1] * (MAX_BLOCKS - len(own)))
            dst[row, :max_blocks] = whole[:max_blocks]


@dataclass
class Step:
    contexts: list[StepSequence]
    generations: list[StepSequence]
    padding: int
    topk: int
    seed: int

    @property
    def sequences(self) -> list[StepSequence]:
        return self.contexts + self.generations

    def prepared(self, **kwargs: bool) -> tuple[DSAtrtllmAttentionMetadata, ScatteredBlocks]:
        manager = ScatteredBlocks(
            {s.request_id: s.cached + s.new for s in self.sequences}, self.seed
        )
        metadata = DSAtrtllmAttentionMetadata(
            8, 400, manager, torch.device("cpu"), params=DSAParams(2, 32, self.topk), layout=LAYOUT
        )
        metadata.block_table.fill_(79)  # what an earlier step left in the rows of padding
        set_step(metadata, self.contexts, self.generations, self.padding)
        metadata.prepare(**kwargs)
        return metadata, manager

    def tokens(self) -> list[tuple[int, StepSequence | None, int]]:
        """(row of the sequence, sequence or None for padding, position) of each token in order."""
        walked: list[tuple[int, StepSequence | None, int]] = []
        for row, s in enumerate(self.sequences):
            walked += [(row, s, s.cached + i) for i in range(s.new)]
        first = len(self.sequences)
        return walked + [(first + i, None, -1) for i in range(self.padding)]


@st.composite
def steps(draw: st.DrawFn, max_contexts: int = 3) -> Step:
    def sequence(request: int, new: int) -> StepSequence:
        return StepSequence(request, draw(st.integers(0, CAPACITY - new)), new)

    requests = iter(draw(st.permutations(range(10, 18))))
    count, generations = draw(st.integers(0, max_contexts)), draw(st.integers(0, 3))
    contexts = [sequence(next(requests), draw(st.integers(1, CAPACITY))) for _ in range(count)]
    decoding = [sequence(next(requests), 1) for _ in range(generations)]
    fewest = 0 if contexts or decoding else 1
    padding = draw(st.integers(fewest, 2)) if not contexts else 0
    return Step(contexts, decoding, padding, draw(st.integers(1, 50)), draw(st.integers(0, 99)))


@given(step=steps())
def test_every_token_has_its_place(step) -> None:
    metadata, manager = step.prepared()
    walked = step.tokens()
    assert metadata.num_tokens == len(walked)
    assert metadata.num_ctx_tokens == sum(s.new for s in step.contexts)
    assert metadata.num_generations == len(step.generations) + step.padding
    assert metadata.kv_lens == [s.cached + s.new for s in step.sequences] + [0] * step.padding
    for token, (row, sequence, position) in enumerate(walked):
        assert metadata.req_idx_per_token[token] == row
        assert metadata.position_ids[token] == position
        if sequence is None:
            assert metadata.slot_mapping[token] == -1
            assert metadata.index_block[token] == -1
            continue
        page, offset = divmod(position, TOKENS_PER_BLOCK)
        block = manager.blocks[KEY][sequence.request_id][page]
        assert metadata.slot_mapping[token] == block * LAYERS * TOKENS_PER_BLOCK + offset
        assert metadata.index_block[token] == manager.blocks[INDEX_KEY][sequence.request_id][page]
        assert metadata.index_offset[token] == offset


@given(step=steps())
def test_tables_are_those_of_the_requests(step) -> None:
    metadata, manager = step.prepared()
    for table, role in (
        (metadata.block_table, KEY),
        (metadata.indexer_k_cache_block_offsets, INDEX_KEY),
    ):
        requests = [sequence.request_id for sequence in step.sequences]
        held = manager.max_held_blocks(requests, role)  # nothing is read behind them
        for row, request in enumerate(requests):
            own = manager.blocks[role][request]
            assert table[row, :held].tolist() == own + [-1] * (held - len(own))


@given(step=steps(), static_width=st.booleans(), data=st.data())
def test_selected_positions_become_rows_of_the_key_pool(step, static_width, data) -> None:
    """Local position -> block of the own request; -1 -> some valid row that a bias keeps out."""
    metadata, manager = step.prepared(static_width=static_width)
    width, indices = metadata.selection_width, []
    for _, _, position in step.tokens():
        known = list(range(position + 1))
        chosen = data.draw(st.permutations(known))[:width]
        indices.append(chosen + [-1] * (width - len(chosen)))
    selection = metadata.select(torch.tensor(indices, dtype=torch.int32))
    assert selection.indices.tolist() == indices
    has_holes = any(-1 in row for row in indices)
    assert has_holes <= (selection.bias is not None)
    for token, (_, sequence, _) in enumerate(step.tokens()):
        for column, position in enumerate(indices[token]):
            slot = int(selection.slots[token, column])
            assert 0 <= slot < 80 * LAYERS * TOKENS_PER_BLOCK
            if position >= 0:
                page, offset = divmod(position, TOKENS_PER_BLOCK)
                block = manager.blocks[KEY][sequence.request_id][page]
                assert slot == block * LAYERS * TOKENS_PER_BLOCK + offset
            if selection.bias is not None:
                bias = float(selection.bias[token, 0, column])
                assert bias == 0 if position >= 0 else bias < -1e37


@given(step=steps())
def test_width_and_skipping_follow_the_lengths(step) -> None:
    metadata, _ = step.prepared()
    assert metadata.selection_width == min(step.topk, max(metadata.kv_lens))
    longest = max((s.cached + 1 for s in step.generations), default=0)
    assert metadata.skip_indexer_for_gen_reqs == (longest <= step.topk)


@pytest.mark.parametrize("short", [True, False])
def test_a_capture_decides_width_and_skipping_itself(short) -> None:
    step = Step([], [StepSequence(10, 5)], padding=1, topk=16, seed=0)
    metadata, _ = step.prepared(static_width=True, skip_indexer=short)
    assert metadata.selection_width == 16
    assert metadata.skip_indexer_for_gen_reqs is short
    assert metadata.select(torch.full((2, 16), -1, dtype=torch.int32)).bias is not None


@given(step=steps(max_contexts=1), static_width=st.booleans())
def test_generation_keys_cover_the_longest_row(step, static_width) -> None:
    metadata, manager = step.prepared(static_width=static_width)
    if not step.generations:
        return
    keys = metadata.generation_keys()
    longest = max(s.cached + 1 for s in step.generations)
    pages = MAX_BLOCKS if static_width else -(-longest // TOKENS_PER_BLOCK)
    rows = len(step.generations) + step.padding
    assert keys.future.shape == (rows, pages * TOKENS_PER_BLOCK)
    blocks = keys.blocks.view(rows, pages)
    assert int(blocks.min()) >= 0
    for row, sequence in enumerate(step.generations):
        own = manager.blocks[INDEX_KEY][sequence.request_id]
        assert blocks[row, : len(own)].tolist() == own
        assert (~keys.future[row]).nonzero().flatten().tolist() == list(range(sequence.cached + 1))
    assert bool(keys.future[len(step.generations) :].all())


def test_lengths_that_change_on_the_device_move_every_table() -> None:
    """As after a step whose number of accepted tokens only the device knows."""
    metadata, _ = Step([], [StepSequence(10, 6), StepSequence(11, 9)], 0, 4, seed=1).prepared()
    longer, _ = Step([], [StepSequence(10, 7), StepSequence(11, 11)], 0, 4, seed=1).prepared()
    future = metadata.generation_keys().future.clone()
    metadata.kv_lens_cuda[:2] += torch.tensor([1, 2], dtype=torch.int32)
    metadata.on_update_kv_lens()
    for table in ("position_ids", "slot_mapping", "index_block", "index_offset"):
        assert torch.equal(getattr(metadata, table), getattr(longer, table)), table
    assert (future & ~metadata.generation_keys().future).sum(1).tolist() == [1, 2]


def test_several_tokens_per_generation_leave_holes_in_the_first_rows() -> None:
    """The first of two new tokens has one key less than the width of the step."""
    metadata, _ = Step([], [StepSequence(10, 5, new=2)], padding=0, topk=7, seed=0).prepared()
    rows = [[0, 1, 2, 3, 4, 5, -1], [0, 1, 2, 3, 4, 5, 6]]
    bias = metadata.select(torch.tensor(rows, dtype=torch.int32)).bias
    assert bias is not None
    assert (bias[:, 0] < 0).nonzero().tolist() == [[0, 6]]


def test_tables_of_the_real_manager() -> None:
    """Requests that took blocks in turns, one of them in a block that another gave back."""
    manager = make_manager(LAYOUT)
    for request in (1, 2, 3):
        manager.add_request(request)
    for request, tokens in ((1, 4), (2, 4), (1, 12), (3, 8), (2, 9)):
        manager.resize(request, tokens)
    manager.free(3)
    manager.resize(1, 16)
    assert manager.block_ids(1, KEY) == [0, 2, 3, 4]
    metadata = make_metadata(manager, LAYOUT, DSAParams(2, 32, 8))
    set_step(metadata, [StepSequence(1, 3, 13)], [StepSequence(2, 8)])
    metadata.prepare()
    per_block = 3 * manager.tokens_per_block
    blocks = [0] + [2] * 4 + [3] * 4 + [4] * 4 + [manager.block_ids(2, KEY)[2]]
    offsets = [3] + [0, 1, 2, 3] * 3 + [0]
    slots = [b * per_block + t for b, t in zip(blocks, offsets, strict=True)]
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.index_block.tolist() == blocks
