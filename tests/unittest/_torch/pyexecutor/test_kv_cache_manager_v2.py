"""Block accounting against a plain model, and the byte arithmetic against hand counts."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import (
    BufferConfig,
    KVCacheManagerV2,
    Role,
    num_blocks_for_memory,
)

KEY = BufferConfig(Role.KEY, (0, 1, 2), 1152)
INDEX = BufferConfig(Role.INDEX_KEY, (0, 2), 132)


def manager(**changes) -> KVCacheManagerV2:
    arguments = {
        "buffers": [KEY, INDEX],
        "tokens_per_block": 4,
        "max_seq_len": 30,
        "max_batch_size": 3,
        "num_blocks": {Role.KEY: 12, Role.INDEX_KEY: 10},
        "device": torch.device("cpu"),
    }
    return KVCacheManagerV2(**(arguments | changes))


class BlockLedger(RuleBasedStateMachine):
    """Random add, resize and free; a dict of token counts is the model."""

    @initialize(
        key=st.integers(1, 20),
        index=st.integers(1, 20),
        size=st.integers(1, 5),
        extra=st.integers(0, 3),
    )
    def start(self, key: int, index: int, size: int, extra: int) -> None:
        self.size, self.limit = size, 30 + extra
        self.kv = manager(
            tokens_per_block=size,
            num_blocks={Role.KEY: key, Role.INDEX_KEY: index},
            num_extra_kv_tokens=extra,
        )
        self.total = {Role.KEY: key, Role.INDEX_KEY: index}
        self.held: dict[int, int] = {}  # request -> blocks

    def _free(self, role: Role) -> int:
        return self.total[role] - sum(self.held.values())

    @rule(request=st.integers(0, 5))
    def add(self, request: int) -> None:
        if request in self.held:
            with pytest.raises(ValueError, match=f"request {request} is in"):
                self.kv.add_request(request)
        elif len(self.held) == 3:
            with pytest.raises(RuntimeError, match="finds no place"):
                self.kv.add_request(request)
        else:
            self.kv.add_request(request)
            self.held[request] = 0

    @rule(request=st.integers(0, 5), tokens=st.integers(-1, 34))
    def resize(self, request: int, tokens: int) -> None:
        if request not in self.held:
            with pytest.raises(KeyError, match=f"request {request} is not"):
                self.kv.resize(request, tokens)
            return
        if not 0 <= tokens <= self.limit:
            with pytest.raises(ValueError, match=f"0 to {self.limit}"):
                self.kv.resize(request, tokens)
            return
        wanted = (tokens + self.size - 1) // self.size
        fits = all(wanted - self.held[request] <= self._free(role) for role in Role)
        before = {role: self.kv.block_ids(request, role) for role in Role}
        assert self.kv.resize(request, tokens) is fits
        if fits:
            self.held[request] = wanted
        for role in Role:
            after = self.kv.block_ids(request, role)
            kept = min(len(before[role]), len(after))
            assert after[:kept] == before[role][:kept], "blocks that stay keep their order"

    @rule(request=st.integers(0, 5))
    def free(self, request: int) -> None:
        if request in self.held:
            self.kv.free(request)
            del self.held[request]
        else:
            with pytest.raises(KeyError, match=f"request {request} is not"):
                self.kv.free(request)

    @rule(lengths=st.lists(st.integers(0, 30), max_size=3))
    def can_hold(self, lengths: list[int]) -> None:
        needed = sum((n + self.size - 1) // self.size for n in lengths)
        assert self.kv.can_hold(lengths) is all(needed <= self._free(role) for role in Role)

    @rule()
    def check_empty(self) -> None:
        if self.held:
            with pytest.raises(RuntimeError, match="leaked"):
                self.kv.check_empty()
        else:
            self.kv.check_empty()

    @invariant()
    def counts_and_owners_agree(self) -> None:
        for role in Role:
            owned = [b for request in self.held for b in self.kv.block_ids(request, role)]
            assert len(owned) == len(set(owned)) == sum(self.held.values())
            assert all(0 <= b < self.total[role] for b in owned)
            assert self.kv.num_free_blocks(role) == self._free(role)
            assert self.kv.num_used_blocks(role) == len(owned)

    @invariant()
    def tables_show_the_blocks(self) -> None:
        requests = sorted(self.held, reverse=True)
        for role in Role:
            dst = torch.full((5, self.kv.max_blocks_per_seq), 7, dtype=torch.int32)
            self.kv.copy_batch_block_offsets(dst, requests, role)
            for row, request in zip(dst.tolist(), requests, strict=False):
                blocks = self.kv.block_ids(request, role)
                assert row == blocks + [-1] * (len(row) - len(blocks))
            assert (dst[len(requests) :] == 7).all()


BlockLedger.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlockLedger = BlockLedger.TestCase


def test_lowest_free_blocks_first() -> None:
    kv = manager()
    for request in range(3):
        kv.add_request(request)
        kv.resize(request, 8)
    kv.free(1)
    kv.free(0)
    kv.add_request(9)
    kv.resize(9, 12)
    assert kv.block_ids(9, Role.KEY) == [0, 1, 2]


def test_strides_by_hand() -> None:
    kv = manager()
    assert kv.pool(Role.KEY).shape == (12, 3, 4 * 1152)
    assert kv.pool(Role.INDEX_KEY).shape == (10, 2, 528)
    assert kv.pool("key").dtype == torch.uint8 and not kv.pool("key").any()
    assert kv.page_stride(Role.KEY) == 3 * 4 * 1152
    assert kv.page_bytes(Role.INDEX_KEY) == 4 * 132
    assert [kv.layer_slot(Role.INDEX_KEY, layer) for layer in (0, 2)] == [0, 1]
    assert kv.has_buffer(Role.KEY, 1) and not kv.has_buffer(Role.INDEX_KEY, 1)
    assert kv.max_blocks_per_seq == 8
    assert manager(num_extra_kv_tokens=3).max_blocks_per_seq == 9


def test_layer_pages_are_views_of_the_pool() -> None:
    kv = manager()
    pages = kv.layer_pages(Role.KEY, 2, torch.bfloat16)
    assert pages.shape == (12, 4 * 576) and pages.stride(0) * 2 == kv.page_stride(Role.KEY)
    pages[5, 1] = 1.0
    start = 5 * kv.page_stride(Role.KEY) + 2 * kv.page_bytes(Role.KEY) + 2
    memory = kv.pool(Role.KEY).flatten()
    assert memory[start : start + 2].view(torch.bfloat16).item() == 1.0
    memory[start : start + 2] = 0
    assert not memory.any()


def test_report_has_exact_bytes() -> None:
    report = manager().report()
    assert "key: 3 layers x 1,152 B = 3,456 B per token" in report
    assert "4,608 B per page, 13,824 B per block, 12 blocks = 48 tokens = 165,888 B" in report
    assert "index_key: 2 layers x 132 B = 264 B per token" in report
    assert f"total: 3,720 B per token, {165_888 + 10 * 1_056:,} B" in report


def test_blocks_for_memory_cover_equal_tokens() -> None:
    block = 3 * 4 * 1152 + 2 * 4 * 132
    assert num_blocks_for_memory([KEY, INDEX], 4, 5 * block + block - 1) == {
        Role.KEY: 5,
        Role.INDEX_KEY: 5,
    }
    with pytest.raises(ValueError, match=f"14,879 B are free.*{block:,} B"):
        num_blocks_for_memory([KEY, INDEX], 4, block - 1)


def test_offsets_beyond_32_bits() -> None:
    kv = manager(
        buffers=[BufferConfig(Role.KEY, (0,), 1 << 20)],
        tokens_per_block=64,
        num_blocks={Role.KEY: 80},
        device=torch.device("meta"),  # strides without memory
    )
    assert kv.layer_pages(Role.KEY, 0)[79].storage_offset() == 79 * 64 * (1 << 20) > 2**32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffers": []}, "each role needs one entry"),
        ({"buffers": [KEY, KEY]}, "each role needs one entry"),
        ({"tokens_per_block": 0}, "tokens_per_block is 0"),
        ({"num_blocks": {Role.KEY: 4}}, "index_key needs at least 1"),
        ({"buffers": [BufferConfig(Role.KEY, (1, 1), 8)]}, "distinct layers"),
        ({"buffers": [BufferConfig(Role.KEY, (), 8)]}, "distinct layers"),
        ({"buffers": [BufferConfig(Role.KEY, (1,), 0)]}, "at least one byte"),
    ],
)
def test_refused_construction(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        manager(**changes)


def test_errors_name_what_is_wrong() -> None:
    kv = manager(buffers=[KEY, BufferConfig(Role.INDEX_KEY, (0,), 33)])
    with pytest.raises(KeyError, match="layer 1 has no index_key buffer; layers \\[0\\] have one"):
        kv.layer_slot(Role.INDEX_KEY, 1)
    with pytest.raises(KeyError, match="no pool for role 'value'"):
        kv.pool("value")
    with pytest.raises(ValueError, match="132 bytes, which is not a multiple of the 8"):
        kv.layer_pages(Role.INDEX_KEY, 0, torch.int64)
    kv.add_request(4)
    for shape in ((1, 7), (0, 8)):
        with pytest.raises(ValueError, match="exactly 8"):
            kv.copy_batch_block_offsets(torch.zeros(shape, dtype=torch.int32), [4], "key")


@pytest.mark.parametrize(("max_blocks", "columns"), [(0, 0), (1, 4), (4, 4), (5, 8), (99, 8)])
def test_bounded_tables_leave_the_columns_behind_alone(max_blocks, columns) -> None:
    """Whole 16-byte accesses of four entries; negative or no bound copies whole rows."""
    kv = manager()
    kv.add_request(1)
    kv.resize(1, 4 * 3)
    whole = torch.full((2, 8), 7, dtype=torch.int32)
    for everything in (None, -1):
        kv.copy_batch_block_offsets(whole, [1], Role.KEY, everything)
        assert whole[0].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    bounded = torch.full((2, 8), 7, dtype=torch.int32)
    kv.copy_batch_block_offsets(bounded, [1], Role.KEY, max_blocks)
    assert torch.equal(bounded[:, :columns], whole[:, :columns])
    assert bool((bounded[:, columns:] == 7).all())
    assert kv.max_held_blocks([1], Role.KEY) == 3
    assert kv.max_held_blocks([], Role.KEY) == 0


@pytest.mark.gpu
def test_tables_reach_the_gpu() -> None:
    kv = manager(device=torch.device("cuda"))
    for request in range(3):
        kv.add_request(request)
        kv.resize(request, 4 * request + 1)
    dst = torch.zeros((3, 8), dtype=torch.int32, device="cuda")
    kv.copy_batch_block_offsets(dst, [2, 0, 1], Role.KEY)
    assert dst[:, :4].tolist() == [[3, 4, 5, -1], [0, -1, -1, -1], [1, 2, -1, -1]]
