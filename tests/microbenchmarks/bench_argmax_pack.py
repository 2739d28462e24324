"""Times `local_argmax_pack` against the torch chain that it replaces, on one GPU.

    python tests/microbenchmarks/bench_argmax_pack.py [--rows 8] [--columns 9680]

Both run as CUDA graphs of many calls over logits that the LM head has just left in the L2 cache.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from tensorrt_llm._torch.speculative.interface import local_max_and_index
from tensorrt_llm._torch.speculative.mtp_tail_trim import local_argmax_pack
from tensorrt_llm.mapping import Mapping

CALLS = 100  # per graph
REPLAYS = 50
MAPPING = Mapping(world_size=16, tp_size=16, rank=3)


def graph_us(call: Callable[[], object]) -> float:
    """Median microseconds of one call within a graph of `CALLS`."""
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = [_replay_ms(graph) for _ in range(REPLAYS)]
    return statistics.median(times[REPLAYS // 5 :]) * 1000 / CALLS


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def compare(rows: int, columns: int, dtype: torch.dtype) -> tuple[float, float]:
    """(microseconds of the chain, of the pack) for [rows, columns]."""
    logits = torch.randn(rows, columns, device="cuda").to(dtype)
    out = torch.empty(rows, 2 * MAPPING.tp_size, device="cuda")
    offset, slot = MAPPING.tp_rank * columns, MAPPING.tp_rank
    chain = graph_us(lambda: local_max_and_index(logits, MAPPING))
    pack = graph_us(lambda: local_argmax_pack(logits, offset, out, slot, zero_rest=True))
    return chain, pack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--columns", type=int, default=9680)
    args = parser.parse_args()
    print(f"[{args.rows}, {args.columns}] on {torch.cuda.get_device_name()}, us per call")
    for dtype in (torch.bfloat16, torch.float32):
        chain, pack = compare(args.rows, args.columns, dtype)
        print(f"{dtype}: torch chain {chain:.2f}, pack {pack:.2f}, {chain / pack:.1f}x faster")


if __name__ == "__main__":
    main()
