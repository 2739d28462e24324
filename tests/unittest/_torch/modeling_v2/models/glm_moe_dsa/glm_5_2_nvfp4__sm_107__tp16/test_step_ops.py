"""Which of a step's values each op takes, and that every step brings all of them."""

from dataclasses import fields

import pytest
import torch
from helpers.engine import executor_config, generate, make_engine
from helpers.example_op import ScaledAppend
from helpers.glm_tiny import CHECKPOINT, prompts

from tensorrt_llm._torch.modeling_v2.catalog._op import advance_step_generation, validating
from tensorrt_llm._torch.modeling_v2.catalog.rms_norm import RmsNorm
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.step_ops import (  # noqa: E501
    StepOps,
    bind_known,
)


def append_inputs() -> dict[str, torch.Tensor]:
    return {"slots": torch.tensor([2]), "pool": torch.zeros(4, 2, dtype=torch.bfloat16)}


def test_each_op_takes_the_values_that_it_knows() -> None:
    """Others go past it, also those that no op knows."""
    append, norm, given = ScaledAppend(), RmsNorm(), append_inputs()
    bind_known(iter((append, norm)), {**given, "scale": 2.0, "eps": 0.0, "nobody's": 1})
    assert append(torch.tensor([[3.0, -1.0]])).tolist() == [2.0]
    assert given["pool"].tolist() == [[0, 0], [0, 0], [6, -2], [0, 0]]
    assert norm(torch.tensor([[2.0, -2.0]]), torch.tensor([5.0, 7.0])).tolist() == [[5.0, -7.0]]


def test_new_values_replace_and_the_call_wins() -> None:
    append, given, x = ScaledAppend(), append_inputs(), torch.ones(1, 2)
    for scale in (2.0, 3.0):
        bind_known([append], {**given, "scale": scale})
        append(x)
        assert given["pool"][2].tolist() == [scale, scale]
    append(x, scale=5.0)
    assert given["pool"][2].tolist() == [5.0, 5.0]


def test_values_of_an_earlier_step_are_refused() -> None:
    append, x = ScaledAppend(), torch.ones(1, 2)
    advance_step_generation()
    bind_known([append], {**append_inputs(), "scale": 2.0})
    with validating():
        append(x)
        advance_step_generation()
        bind_known([append], append_inputs())
        with pytest.raises(RuntimeError, match="'scale' is a previous step's"):
            append(x)


@pytest.mark.parametrize("draft_len", [0, 3])
def test_steps_bring_what_their_ops_need(draft_len) -> None:
    """Short contexts and long ones, each op's arguments checked and none of an earlier step; and no
    step binds what no op takes."""
    executor = make_engine(
        executor_config(CHECKPOINT, modeling_v2="require", max_draft_len=draft_len)
    )
    asked = [[5], prompts(8)[-1]]
    expected = [generate(executor, [prompt], 12) for prompt in asked]
    with validating():
        assert [generate(executor, [prompt], 12) for prompt in asked] == expected
    counts = executor.stats().generation_steps
    assert all(part.fast >= 10 and not part.builtin for part in counts.values())
    decode = executor.model_engine.model.model.decode
    known = {name for member in fields(StepOps) for name in member.default_factory().arguments()}
    assert decode.step_args(executor.model_engine.attn_metadata).keys() <= known
