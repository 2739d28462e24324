"""How many tokens of a verify step count."""

from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op
from tensorrt_llm._torch.speculative.forced_acceptance import POOL_SIZE, SLOT_STRIDE, STEP_STRIDE

from .._cells import Draw
from .._checks import INDEX_DTYPES, check_tensor, require


@define_op
class VerifyHeadAccept(OpWrapper):
    """Accepted-token counts of one verify step, and the accepted rows if a buffer is given.

    Sequences are ordered contexts first. With C contexts, G generations and draft length K:
    - A context has one token, its target token, and the count 1.
    - A generation has the K + 1 target tokens of its rows. Strict count: 1 + the number of leading
      drafts that equal the target token of their row.
    - With forced_tokens > 0 the generations' counts are replaced, whatever the drafts were:
      min(forced_tokens + extra, K + 1). Without a fraction, extra is 0. With one, it is 1 where
      pool[(counter * counter_stride + slot * slot_stride) & (pool_size - 1)] < forced_fraction,
      compared in fp32, and else 0; places are computed in 64 bits. All requests of a call draw with
      the counter as it was before, and the call then advances it by 1, once. A call that does not
      draw (no fraction, or no generations) leaves it alone.

    These are the counts of `SpecWorkerBase.accept_draft_tokens` with `ForcedAcceptance`, which owns
    pool, counter and strides. Its skip in a graph's eager warm-up is the caller's: pass
    forced_tokens = 0 there.

    Args:
        target_tokens: int32 or int64 [C + G * (K + 1)], the sampled token of each row.
        draft_tokens: int32 or int64 [G, K], what was verified; K may be 0.
        num_contexts: C.
        slot_ids: int64 [C + G], the sequences' places in the token store; needed for a fraction.
        force_pool: fp32 [pool_size], pool_size a power of two; needed for a fraction.
        force_counter: int64 [], the draws so far; advanced in place; needed for a fraction.
        counter_stride, slot_stride: of the pool's place.
        forced_tokens: whole tokens to keep, the target's own included (whole drafts + 1); 0 is
            strict acceptance.
        forced_fraction: probability of one more, in [0, 1); rounded to fp32.
        accepted_tokens: target_tokens' dtype [at least C + G, K + 1], or None. Rows [0, C + G) are
            written: a context's token and then zeros, a generation's K + 1 target tokens whatever
            its count. Further rows stay.

    Returns:
        target_tokens' dtype [C + G], each in [1, K + 1].
    """

    schema = (
        "glm_verify_head_accept(Tensor target_tokens, Tensor draft_tokens, int num_contexts, "
        "Tensor? slot_ids, Tensor? force_pool, Tensor(a!)? force_counter, int counter_stride, "
        "int slot_stride, int forced_tokens, float forced_fraction, Tensor(b!)? accepted_tokens) "
        "-> Tensor"
    )
    CELLS = (
        Cell(
            "K 7, forced 2.91",
            {"generations": 1, "k": 7, "forced": 2, "fraction": 0.91, "buffer": True},
        ),
        Cell("K 7, strict, counts only", {"generations": 1, "k": 7}),
        Cell("K 7, strict, int64", {"generations": 1, "k": 7, "dtype": torch.int64}),
        Cell("whole forced count", {"generations": 1, "k": 7, "forced": 3}),
        Cell("forced beyond the drafts", {"generations": 2, "k": 3, "forced": 9}),
        Cell("no drafts", {"generations": 2, "k": 0, "buffer": True}),
        Cell(
            "contexts before generations",
            {"contexts": 2, "generations": 2, "k": 3, "forced": 1, "fraction": 0.5, "buffer": True},
        ),
        Cell("contexts alone", {"contexts": 3, "generations": 0, "k": 3, "buffer": True}),
        Cell(
            "many requests, each with a draw",
            {"generations": 33, "k": 7, "forced": 2, "fraction": 0.5, "buffer": True},
        ),
    )

    @staticmethod
    def raw_call(
        target_tokens: Tensor,
        draft_tokens: Tensor,
        num_contexts: int,
        slot_ids: Tensor | None,
        force_pool: Tensor | None,
        force_counter: Tensor | None,
        counter_stride: int,
        slot_stride: int,
        forced_tokens: int,
        forced_fraction: float,
        accepted_tokens: Tensor | None,
    ) -> Tensor:
        return torch.ops.trtllm.glm_verify_head_accept(
            target_tokens,
            draft_tokens,
            num_contexts,
            slot_ids,
            force_pool,
            force_counter,
            counter_stride,
            slot_stride,
            forced_tokens,
            forced_fraction,
            accepted_tokens,
        )

    @staticmethod
    def reference(
        target_tokens: Tensor,
        draft_tokens: Tensor,
        num_contexts: int,
        slot_ids: Tensor | None,
        force_pool: Tensor | None,
        force_counter: Tensor | None,
        counter_stride: int,
        slot_stride: int,
        forced_tokens: int,
        forced_fraction: float,
        accepted_tokens: Tensor | None,
    ) -> Tensor:
        generations, k = draft_tokens.shape
        sequences = num_contexts + generations
        rows = target_tokens[num_contexts:].view(generations, k + 1)
        counts = target_tokens.new_ones(sequences)
        agree = (rows[:, :k] == draft_tokens).to(counts.dtype)
        counts[num_contexts:] += agree.cumprod(dim=1, dtype=counts.dtype).sum(1, dtype=counts.dtype)
        if forced_tokens:
            forced = counts.new_full((generations,), forced_tokens)
            if forced_fraction and generations:
                assert slot_ids is not None and force_pool is not None
                assert force_counter is not None
                steps = force_counter * counter_stride
                place = steps + slot_ids[num_contexts:].long() * slot_stride
                drawn = force_pool[place & (force_pool.shape[0] - 1)]
                forced += (drawn < forced_fraction).to(forced.dtype)
                force_counter += 1
            counts[num_contexts:] = forced.clamp(max=k + 1)
        if accepted_tokens is not None:
            accepted_tokens[:num_contexts] = 0
            accepted_tokens[:num_contexts, 0] = target_tokens[:num_contexts]
            accepted_tokens[num_contexts:sequences] = rows
        return counts

    @staticmethod
    def fake(
        target_tokens: Tensor,
        draft_tokens: Tensor,
        num_contexts: int,
        slot_ids: Tensor | None,
        force_pool: Tensor | None,
        force_counter: Tensor | None,
        counter_stride: int,
        slot_stride: int,
        forced_tokens: int,
        forced_fraction: float,
        accepted_tokens: Tensor | None,
    ) -> Tensor:
        return target_tokens.new_empty(num_contexts + draft_tokens.shape[0])

    @staticmethod
    def is_valid(
        target_tokens: Tensor,
        draft_tokens: Tensor,
        num_contexts: int,
        slot_ids: Tensor | None,
        force_pool: Tensor | None,
        force_counter: Tensor | None,
        counter_stride: int,
        slot_stride: int,
        forced_tokens: int,
        forced_fraction: float,
        accepted_tokens: Tensor | None,
    ) -> None:
        check_tensor("draft_tokens", draft_tokens, (None, None), *INDEX_DTYPES)
        generations, k = draft_tokens.shape
        sequences, rows = num_contexts + generations, num_contexts + generations * (k + 1)
        require(num_contexts >= 0, f"num_contexts is {num_contexts}; it must be at least 0")
        check_tensor("target_tokens", target_tokens, (rows,), *INDEX_DTYPES)
        require(forced_tokens >= 0, f"forced_tokens is {forced_tokens}; it must be at least 0")
        require(
            0 <= forced_fraction < 1, f"forced_fraction is {forced_fraction}; it must be in [0, 1)"
        )
        require(
            bool(forced_tokens) or not forced_fraction,
            f"forced_fraction is {forced_fraction} with strict acceptance, forced_tokens 0",
        )
        if forced_fraction:
            _check_draw(sequences, slot_ids, force_pool, force_counter)
        if accepted_tokens is not None:
            check_tensor("accepted_tokens", accepted_tokens, (None, k + 1), target_tokens.dtype)
            require(
                accepted_tokens.shape[0] >= sequences,
                f"accepted_tokens has {accepted_tokens.shape[0]} rows; the step has {sequences} "
                "sequences",
            )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        """Drafts agree with the target for a random number of tokens and then by chance."""
        draw, spec, dtype = Draw(device, generator), cell.spec, cell.spec.get("dtype", torch.int32)
        contexts, generations, k = spec.get("contexts", 0), spec["generations"], spec["k"]
        sequences, fraction = contexts + generations, spec.get("fraction", 0.0)
        target = draw.integers(0, 150000, contexts + generations * (k + 1), dtype=dtype)
        drafts = target[contexts:].view(generations, k + 1)[:, :k].clone()
        kept = draw.integers(0, k + 1, generations, 1)
        first_wrong = torch.arange(k, device=device) == kept
        drafts += first_wrong.to(dtype)
        buffer = torch.full((sequences + 1, k + 1), -7, dtype=dtype, device=device)
        pool = draw.normal(POOL_SIZE).uniform_(generator=generator) if fraction else None
        counter = torch.tensor(12345, device=device) if fraction else None
        return {
            "target_tokens": target,
            "draft_tokens": drafts,
            "num_contexts": contexts,
            "slot_ids": draw.integers(0, 4096, sequences) if fraction else None,
            "force_pool": pool,
            "force_counter": counter,
            "counter_stride": STEP_STRIDE,
            "slot_stride": SLOT_STRIDE,
            "forced_tokens": spec["forced"] + 1 if "forced" in spec else 0,
            "forced_fraction": fraction,
            "accepted_tokens": buffer if "buffer" in spec else None,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        target, drafts = inputs["target_tokens"], inputs["draft_tokens"]
        sequences = inputs["num_contexts"] + drafts.shape[0]
        moved = target.nbytes + drafts.nbytes + sequences * target.itemsize
        if inputs["accepted_tokens"] is not None:
            moved += inputs["accepted_tokens"][:sequences].nbytes
        if inputs["forced_fraction"]:
            moved += drafts.shape[0] * (8 + 4) + 2 * 8  # slots and pool entries, the counter
        return moved


def _check_draw(
    sequences: int,
    slot_ids: Tensor | None,
    force_pool: Tensor | None,
    force_counter: Tensor | None,
) -> None:
    given = {"slot_ids": slot_ids, "force_pool": force_pool, "force_counter": force_counter}
    missing = [name for name, value in given.items() if value is None]
    require(not missing, f"forced_fraction is given without {', '.join(missing)}")
    assert slot_ids is not None and force_pool is not None and force_counter is not None
    check_tensor("slot_ids", slot_ids, (sequences,), torch.int64)
    check_tensor("force_pool", force_pool, (None,), torch.float32)
    size = force_pool.shape[0]
    require(
        size > 0 and size & (size - 1) == 0,
        f"force_pool has {size} entries; it must have a power of two",
    )
    check_tensor("force_counter", force_counter, (), torch.int64)


verify_head_accept = VerifyHeadAccept()
