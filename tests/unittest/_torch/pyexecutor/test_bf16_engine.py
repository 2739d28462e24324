"""bf16 on the CPU: other bits than fp32, but the same answers."""

import pytest
from helpers.engine import executor_config, make_engine, run_ranks
from helpers.glm_tiny import CHECKPOINT, heldout, share_answered

from tensorrt_llm.mapping import Mapping


def answered(mapping: Mapping, kv_cache_dtype: str, draft_len: int) -> float:
    engine = make_engine(
        executor_config(
            CHECKPOINT,
            mapping=mapping,
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            latent_norm_eps=None,
            max_seq_len=256,
            max_draft_len=draft_len,
            disable_overlap_scheduler=False,
        )
    )
    return share_answered(engine, heldout(every=12))


@pytest.mark.parametrize("draft_len", [0, 3])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_glm_tiny_answers(kv_cache_dtype, draft_len) -> None:
    assert answered(Mapping(), kv_cache_dtype, draft_len) >= 0.9


def test_two_ranks_answer_alike() -> None:
    shares = run_ranks(2, answered, "auto", 3)
    assert shares[0] == shares[1] >= 0.9
