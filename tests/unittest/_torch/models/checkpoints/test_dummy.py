import pytest
import torch

from tensorrt_llm._torch.models.checkpoints import fill_dummy
from tensorrt_llm._torch.modules.weight_spec import WeightSpec


def filled(name: str = "w", seed: int = 0, dtype=torch.float32, **fields) -> torch.Tensor:
    target = torch.empty(64, 256, dtype=dtype)
    fill_dummy([WeightSpec(name, (64, 1024), target, **fields)], seed)
    return target


def test_the_same_name_seed_and_part_give_the_same_values():
    assert torch.equal(filled(), filled())
    assert not torch.equal(filled(), filled(name="other"))
    assert not torch.equal(filled(), filled(seed=1))
    assert not torch.equal(filled(cols=(0, 256)), filled(cols=(256, 512)))


def test_values_do_not_depend_on_the_order_of_the_specs():
    first, second = torch.empty(2, 8, 8)
    specs = [WeightSpec("a", (8, 8), first), WeightSpec("b", (8, 8), second)]
    fill_dummy(specs)
    before = first.clone()
    fill_dummy(reversed(specs))
    assert torch.equal(before, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_is_scaled_by_the_fan_in_of_the_whole_tensor(dtype):
    values = filled(dtype=dtype).float()
    # 16,384 draws: the sample deviation is within 2 % (3.6 standard errors) of 1024 ** -0.5.
    assert values.std().item() == pytest.approx(1024**-0.5, rel=0.02)
    assert abs(values.mean().item()) < 4 * 1024**-0.5 / 128


def test_norms_are_ones_and_zeros_are_zero():
    assert (filled(init="norm") == 1).all()
    assert (filled(init="zero") == 0).all()


def test_router_bias_shows_any_rounding_to_bf16():
    bias = torch.empty(256)
    fill_dummy([WeightSpec("gate.e_score_correction_bias", (256,), bias, init="router_bias")])
    assert bias.unique().numel() == 256
    assert bias.bfloat16().unique().tolist() == [7.0]


def test_views_and_parameters_are_filled_in_place():
    parameter = torch.nn.Parameter(torch.zeros(4, 8))
    fill_dummy([WeightSpec("w", (2, 4), parameter[1:3, 2:6])])
    outside = parameter.data.clone()
    outside[1:3, 2:6] = 0
    assert parameter.data[1:3, 2:6].all() and not outside.any()


def test_activations_stay_finite_through_78_layers():
    """A pre-norm residual stack of dummy matrices grows like the square root of its depth."""
    hidden = torch.randn(4, 128)
    for layer in range(78):
        up, down = torch.empty(512, 128), torch.empty(128, 512)
        names = (f"{layer}.up", f"{layer}.down")
        fill_dummy([WeightSpec(names[0], (512, 128), up), WeightSpec(names[1], (128, 512), down)])
        normed = torch.nn.functional.rms_norm(hidden, (128,))
        hidden = hidden + torch.nn.functional.silu(normed @ up.T) @ down.T
    assert 1 < hidden.std() < 20


def test_an_unknown_init_is_an_error_that_names_the_tensor():
    with pytest.raises(ValueError, match="w: init is 'xavier'; it must be matrix, norm"):
        filled(init="xavier")
