"""The step on a GPU, with real side streams and references in the place of missing kernels."""

import pytest
from helpers.engine import executor_config, generate, make_engine, verified_drafts
from helpers.glm_tiny import CHECKPOINT, prompts

from tensorrt_llm._torch.modeling_v2.catalog._op import REFERENCE_OPS_ENV


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3, 7])
def test_tokens_are_those_of_the_built_in_model(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REFERENCE_OPS_ENV, "1")
    engines = [
        make_engine(
            executor_config(CHECKPOINT, device="cuda", max_draft_len=drafts, modeling_v2=mode)
        )
        for mode in ("off", "require")
    ]
    answers = [[generate(engine, [p], 20) for p in prompts(6)] for engine in engines]
    assert answers[0] == answers[1]
    assert verified_drafts(engines[0]) == verified_drafts(engines[1])
    steps = engines[1].stats().generation_steps
    assert all(counts.fast and not counts.builtin for counts in steps.values())
