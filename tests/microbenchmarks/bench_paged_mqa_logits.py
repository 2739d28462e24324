"""Times `paged_mqa_logits` against the torch chain that it replaces, on one GPU.

    python tests/microbenchmarks/bench_paged_mqa_logits.py [--rows 8] [--kv 8192 32768 131072]

One request with 32 heads, 128 channels and fp8 keys. All run as CUDA graphs of many calls, each
call on the keys of another layer, so that they come from memory and not from the L2 cache. The
floor is the time that reading the keys and their scales takes.
"""

import argparse
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from bench_argmax_pack import CALLS, graph_us

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.attention.backends.sparse.dsa.indexer import index_scores
from tensorrt_llm._torch.custom_ops.fp8 import quantize_e4m3_ue8m0
from tensorrt_llm._torch.custom_ops.paged_mqa_logits import (
    paged_mqa_logits,
    paged_mqa_logits_processors,
    paged_mqa_logits_schedule,
)

HEADS, DIM, TOKENS_PER_BLOCK = 32, 128, 32
LAYERS = CALLS  # of a graph: no call finds its keys in the L2 cache
KEY_DTYPE = torch.float8_e4m3fn
LAYOUT = DSACacheLayout(key_width=576, index_head_dim=DIM, dtype=torch.bfloat16, fp8=True)
DEVICE = torch.device("cuda")


class Step:
    """One request of `kv` keys whose last `rows` tokens are scored, with all layers' pages."""

    def __init__(self, rows: int, kv: int) -> None:
        blocks, page_bytes = -(-kv // TOKENS_PER_BLOCK), TOKENS_PER_BLOCK * LAYOUT.index_key_bytes
        self.pool = torch.empty(blocks, LAYERS, page_bytes, dtype=torch.uint8, device=DEVICE)
        for layer in range(LAYERS):
            keys, scales = quantize_e4m3_ue8m0(
                torch.randn(blocks, TOKENS_PER_BLOCK, DIM, device=DEVICE)
            )
            parts = (keys, scales)
            pages = [part.view(torch.uint8).reshape(blocks, -1) for part in parts]
            self.pool[:, layer] = torch.cat(pages, dim=1)
        self.table = torch.randperm(blocks, device=DEVICE).int().unsqueeze(0)
        self.positions = torch.arange(kv - rows, kv, device=DEVICE)
        quantised, scale = quantize_e4m3_ue8m0(torch.randn(1, rows, HEADS, DIM, device=DEVICE))
        self.q = quantised
        self.w = torch.randn(1, rows, HEADS, device=DEVICE) * scale.squeeze(-1)
        self.lens = torch.tensor([kv], dtype=torch.int32, device=DEVICE)
        self.out = torch.empty(rows, blocks * TOKENS_PER_BLOCK, device=DEVICE)

    def schedule(self, programs_per_processor: int) -> tuple[torch.Tensor, torch.Tensor]:
        entries = paged_mqa_logits_processors(DEVICE) * programs_per_processor + 1
        metadata = torch.empty(entries, 2, dtype=torch.int32, device=DEVICE)
        return metadata, torch.empty(1, dtype=torch.int32, device=DEVICE)

    def chain(self) -> Callable[[], torch.Tensor]:
        """Gathers the pages; what a step computes once for all layers is not counted."""
        manager = SimpleNamespace(
            pool=lambda role: self.pool,
            layer_slot=lambda role, layer: layer,
            tokens_per_block=TOKENS_PER_BLOCK,
        )
        layers, blocks, q = itertools.cycle(range(LAYERS)), self.table[0].long(), self.q.float()
        keys = torch.arange(self.out.shape[1], device=DEVICE)
        future = keys > self.positions.unsqueeze(1)

        def call() -> torch.Tensor:
            keys, scales = LAYOUT.read_index_pages(manager, next(layers), blocks)
            scores = index_scores(q, self.w, keys.unsqueeze(0), scales.unsqueeze(0))
            return scores[0].masked_fill_(future, float("-inf"))

        return call

    def kernel(
        self, programs_per_processor: int = 1, q_dtype: torch.dtype = KEY_DTYPE
    ) -> Callable[[], torch.Tensor]:
        layers, q = itertools.cycle(range(LAYERS)), self.q.to(q_dtype)
        schedule = self.schedule(programs_per_processor)
        paged_mqa_logits_schedule(self.lens, *schedule)

        def call() -> torch.Tensor:
            paged_mqa_logits(
                q,
                self.w,
                self.pool,
                next(layers),
                KEY_DTYPE,
                self.table,
                self.positions,
                *schedule,
                self.out,
            )
            return self.out

        return call


def largest_difference(step: Step) -> float:
    """Of kernel and chain on the first layer, relative to the largest score."""
    ours, theirs = step.kernel()().clone(), step.chain()()
    seen = theirs.isfinite()
    if not torch.equal(seen, ours.isfinite()):
        raise RuntimeError("kernel and chain disagree on which keys a row sees")
    return float((ours[seen] - theirs[seen]).abs().max() / theirs[seen].abs().max())


def report(step: Step, kv: int, tb_per_s: float) -> None:
    floor = kv * LAYOUT.index_key_bytes / tb_per_s / 1e6
    print(f"{kv} keys: floor {floor:.2f}, kernel and chain within {largest_difference(step):.1e}")
    chain, kernel = graph_us(step.chain()), graph_us(step.kernel())
    print(f"  torch chain {chain:.2f}, kernel {kernel:.2f}, {chain / kernel:.1f}x faster")
    print(f"  with 2 programs per processor {graph_us(step.kernel(2)):.2f}")
    print(f"  with fp32 queries {graph_us(step.kernel(1, torch.float32)):.2f}")
    schedule = step.schedule(1)
    once = graph_us(lambda: paged_mqa_logits_schedule(step.lens, *schedule))
    print(f"  the schedule, once per step {once:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--kv", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--tb_per_s", type=float, default=4.5, help="what the GPU's memory reads")
    args = parser.parse_args()
    print(f"{args.rows} rows on {torch.cuda.get_device_name()}, us per call")
    for kv in args.kv:
        report(Step(args.rows, kv), kv, args.tb_per_s)


if __name__ == "__main__":
    main()
