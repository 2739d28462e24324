import json
import logging

import pytest
import torch

from tensorrt_llm._torch.models.checkpoints import CheckpointError, CheckpointReader, load_weights
from tensorrt_llm._torch.models.checkpoints import loader as loader_module
from tensorrt_llm._torch.modules.weight_spec import WeightSpec

FP8 = torch.float8_e4m3fn
FP8_CONFIG = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
NVFP4_CONFIG = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def matrix(rows: int = 8, cols: int = 32) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols))


def fp8_matrix(rows: int = 200, cols: int = 150) -> dict[str, torch.Tensor]:
    blocks = (-(-rows // 128), -(-cols // 128))
    scales = torch.arange(1.0, 1 + blocks[0] * blocks[1]).view(blocks)
    return {"q.weight": matrix(rows, cols).to(FP8), "q.weight_scale_inv": scales}


def nvfp4_matrix(rows: int = 4, cols: int = 32) -> dict[str, torch.Tensor]:
    return {
        "q.weight": torch.full((rows, cols // 2), 0x52, dtype=torch.uint8),
        "q.weight_scale": torch.full((rows, cols // 16), 2.0).to(FP8),
        "q.weight_scale_2": torch.tensor(0.5),
        "q.input_scale": torch.tensor(1.0),
    }


def spec(name: str, shape: tuple[int, ...], **fields: object) -> WeightSpec:
    """A spec whose target has the shape of its part, in bf16 unless `dtype` says otherwise."""
    dtype = fields.pop("dtype", torch.float32)
    part = list(shape)
    for dim, bounds in enumerate((fields.get("rows"), fields.get("cols"))):
        if bounds:
            part[dim] = bounds[1] - bounds[0]
    target = torch.full(part, float("nan"), dtype=dtype)
    return WeightSpec(name, shape, target, **fields)


def failure(path, specs, **arguments) -> str:
    """The message of the error that loading ends in; nothing may have been written by then."""
    with pytest.raises(CheckpointError) as error:
        load_weights(CheckpointReader(path), specs, **arguments)
    assert all(one.target.isnan().all() for one in specs)
    return str(error.value)


def test_parts_land_in_views_and_are_cast(write_checkpoint):
    path = write_checkpoint({"a": matrix(), "bias": matrix()[0], "scalar": torch.tensor(2.5)})
    stacked = torch.zeros(8, 16, dtype=torch.bfloat16)
    specs = [
        WeightSpec("a", (8, 32), stacked[:4], rows=(4, 8), cols=(16, 32)),
        WeightSpec("a", (8, 32), stacked[4:], rows=(0, 4), cols=(16, 32)),
        spec("bias", (32,)),
        spec("scalar", ()),
    ]
    report = load_weights(CheckpointReader(path), specs)
    expected = torch.cat((matrix()[4:, 16:], matrix()[:4, 16:]))
    assert torch.equal(stacked, expected.bfloat16())
    assert torch.equal(specs[2].target, matrix()[0])
    assert specs[3].target.item() == 2.5
    assert report.counts == {"plain": 4}
    assert report.bytes_read == 2 * 4 * 16 * 4 + 32 * 4 + 4


def test_parameters_that_require_gradients_are_filled(write_checkpoint):
    parameter = torch.nn.Parameter(torch.zeros(8, 32))
    path = write_checkpoint({"a": matrix()})
    load_weights(CheckpointReader(path), [WeightSpec("a", (8, 32), parameter[2:4], rows=(2, 4))])
    assert torch.equal(parameter.data[2:4], matrix()[2:4])
    assert not parameter.data[4:].any()


@pytest.mark.parametrize("strip", [150, 1 << 22])
def test_fp8_strips_of_any_size_give_the_same_matrix(write_checkpoint, monkeypatch, strip):
    monkeypatch.setattr(loader_module, "STRIP_ELEMENTS", strip)
    path = write_checkpoint(fp8_matrix(), config=FP8_CONFIG)
    wanted = spec("q.weight", (200, 150), rows=(60, 190), cols=(5, 140), quantizable=True)
    report = load_weights(CheckpointReader(path), [wanted])
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat_interleave(128, 0)
    scale = scale.repeat_interleave(128, 1)[:200, :150]
    expected = (matrix(200, 150).to(FP8).float() * scale)[60:190, 5:140]
    assert torch.equal(wanted.target, expected)
    assert report.counts == {"fp8": 1}


def test_nvfp4_is_read_and_its_four_tensors_are_accounted_for(write_checkpoint):
    path = write_checkpoint(nvfp4_matrix(), config=NVFP4_CONFIG)
    wanted = spec("q.weight", (4, 32), cols=(16, 32), quantizable=True, dtype=torch.bfloat16)
    report = load_weights(CheckpointReader(path), [wanted])
    assert wanted.target.tolist() == [[1.0, 3.0] * 8] * 4
    assert report.counts == {"nvfp4": 1}


def test_every_problem_is_in_one_error(write_checkpoint):
    path = write_checkpoint(
        {
            "shape": matrix(),
            "type": torch.zeros(4, dtype=torch.int64),
            "bias": torch.zeros(4, dtype=torch.bfloat16),
            "extra.weight": matrix(),
        }
    )
    specs = [
        spec("shape", (8, 16)),
        spec("type", (4,)),
        spec("bias", (4,), exact_fp32=True),
        spec("gone.weight", (3, 5)),
    ]
    message = failure(path, specs)
    assert "5 problem(s)" in message
    assert "shape: found F32 [8, 32], expected F32|BF16|F16 [8, 16]" in message
    assert "type: found I64 [4], expected F32|BF16|F16 [4]" in message
    assert "bias: found BF16 [4], expected F32 [4]" in message
    assert "gone.weight: missing, expected F32|BF16|F16 [3, 5]" in message
    assert "extra.weight: found F32 [8, 32], but nothing in the model reads it" in message


def test_a_quantised_tensor_where_a_plain_one_is_needed(write_checkpoint):
    path = write_checkpoint(fp8_matrix(), config=FP8_CONFIG)
    message = failure(path, [spec("q.weight", (200, 150))])
    assert "q.weight: found as fp8, expected unquantised F32|BF16|F16" in message


@pytest.mark.parametrize("sidecar", ["weight_scale", "weight_scale_2", "input_scale"])
def test_each_nvfp4_sidecar_must_be_there(write_checkpoint, sidecar):
    tensors = nvfp4_matrix()
    del tensors[f"q.{sidecar}"]
    path = write_checkpoint(tensors, config=NVFP4_CONFIG)
    message = failure(path, [spec("q.weight", (4, 32), quantizable=True)])
    assert f"q.{sidecar}: missing, expected" in message
    assert "for the nvfp4 tensor q.weight" in message


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("q.weight_scale", torch.zeros(4, 2), "found F32 [4, 2], expected F8_E4M3 [4, 2]"),
        ("q.weight_scale_2", torch.zeros(1), "found F32 [1], expected F32 []"),
        (
            "q.weight",
            torch.zeros(4, 15, dtype=torch.uint8),
            "found U8 [4, 15], expected U8 [4, 16]",
        ),
    ],
)
def test_nvfp4_sidecars_are_checked(write_checkpoint, name, value, found):
    path = write_checkpoint(nvfp4_matrix() | {name: value}, config=NVFP4_CONFIG)
    message = failure(path, [spec("q.weight", (4, 32), quantizable=True)])
    assert f"{name}: {found}" in message


def test_fp8_scales_are_checked(write_checkpoint):
    path = write_checkpoint(
        fp8_matrix() | {"q.weight_scale_inv": torch.ones(2, 3)}, config=FP8_CONFIG
    )
    message = failure(path, [spec("q.weight", (200, 150), quantizable=True)])
    assert "q.weight_scale_inv: found F32 [2, 3], expected F32 [2, 2]" in message


def test_fp8_without_its_scales(write_checkpoint):
    path = write_checkpoint({"q.weight": matrix().to(FP8)}, config=FP8_CONFIG)
    message = failure(path, [spec("q.weight", (8, 32), quantizable=True)])
    assert "q.weight_scale_inv: missing, expected F32 [1, 1] for the fp8 tensor q.weight" in message


def test_nvfp4_columns_inside_a_group(write_checkpoint):
    path = write_checkpoint(nvfp4_matrix(), config=NVFP4_CONFIG)
    message = failure(path, [spec("q.weight", (4, 32), cols=(8, 32), quantizable=True)])
    assert "columns (8, 32) of an NVFP4 tensor must be cut at multiples of 16" in message


def test_declared_but_absent(write_checkpoint):
    path = write_checkpoint({"a": matrix()}, config=FP8_CONFIG)
    message = failure(path, [spec("a", (8, 32), quantizable=True)])
    assert "found none, but the checkpoint's config declares fp8" in message


def test_present_but_undeclared(write_checkpoint):
    path = write_checkpoint(fp8_matrix())
    message = failure(path, [spec("q.weight", (200, 150), quantizable=True)])
    assert "found fp8, but the checkpoint's config declares none" in message


def test_hf_quant_config_json_declares_too(write_checkpoint):
    path = write_checkpoint(nvfp4_matrix())
    quantization = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (path / "hf_quant_config.json").write_text(json.dumps(quantization))
    wanted = spec("q.weight", (4, 32), quantizable=True)
    assert load_weights(CheckpointReader(path), [wanted]).counts == {"nvfp4": 1}


def test_a_format_that_is_not_served_is_one_of_the_problems(write_checkpoint):
    path = write_checkpoint(
        {"a": matrix()}, config={"quantization_config": {"quant_method": "awq"}}
    )
    assert "awq" in failure(path, [spec("a", (8, 32))])


def test_tolerated_extras_are_left_alone_with_a_reason(write_checkpoint):
    extras = {
        "model.layers.2.embed_tokens.weight": "the MTP layer shares model.embed_tokens",
        "model.layers.2.shared_head.head.weight": "the MTP layer shares lm_head",
        "model.layers.0.self_attn.k_proj.k_scale": "the FP8 KV cache is stored at unit scale",
    }
    path = write_checkpoint({"a": matrix()} | {name: matrix(1, 1) for name in extras})
    report = load_weights(CheckpointReader(path), [spec("a", (8, 32))])
    assert report.tolerated == extras


def test_an_embedding_in_a_layer_that_is_not_the_mtp_layer_is_an_extra(write_checkpoint):
    name = "model.layers.1.embed_tokens.weight"
    path = write_checkpoint({"a": matrix(), name: matrix()})
    assert f"{name}: found F32" in failure(path, [spec("a", (8, 32))])


def test_the_model_can_tolerate_more(write_checkpoint):
    path = write_checkpoint({"a": matrix(), "model.layers.2.enorm.weight": matrix()[0]})
    wanted, reason = [spec("a", (8, 32))], "speculation is off"
    report = load_weights(CheckpointReader(path), wanted, tolerated={"model.layers.2.*": reason})
    assert report.tolerated == {"model.layers.2.enorm.weight": reason}


def test_a_needed_tensor_is_read_even_when_a_pattern_tolerates_it(write_checkpoint):
    path = write_checkpoint({"model.layers.2.enorm.weight": matrix()[0]})
    wanted = [spec("model.layers.2.enorm.weight", (32,))]
    report = load_weights(CheckpointReader(path), wanted, tolerated={"model.layers.2.*": "off"})
    assert torch.equal(wanted[0].target, matrix()[0])
    assert not report.tolerated


def test_a_target_of_another_shape_or_type_than_its_part(write_checkpoint):
    path = write_checkpoint({"a": matrix(), "bias": torch.zeros(4)})
    target = torch.full((8, 32), float("nan"))
    specs = [
        WeightSpec("a", (8, 32), target, rows=(0, 4)),
        spec("bias", (4,), exact_fp32=True, dtype=torch.bfloat16),
    ]
    message = failure(path, specs)
    assert "a: target has shape (8, 32), part (4, 32)" in message
    assert "bias: target is torch.bfloat16, expected torch.float32" in message


def test_a_part_outside_of_its_tensor(write_checkpoint):
    path = write_checkpoint({"a": matrix()})
    target = torch.full((4, 32), float("nan"))
    message = failure(path, [WeightSpec("a", (8, 32), target, rows=(6, 10))])
    assert "part (6, 10) of dimension 0 is outside of shape (8, 32)" in message


def test_shards_are_filled_in_the_order_of_the_files(write_checkpoint):
    shards = {"1.safetensors": {"b": matrix(), "z": matrix()}, "2.safetensors": {"a": matrix(4, 4)}}
    specs = [spec("a", (4, 4)), spec("z", (8, 32)), spec("b", (8, 32), rows=(0, 2))]
    report = load_weights(CheckpointReader(write_checkpoint(shards=shards)), specs)
    assert report.bytes_read == (16 + 256 + 64) * 4
    assert torch.equal(specs[0].target, matrix(4, 4))


def test_the_progress_bar_counts_bytes(write_checkpoint, capsys):
    path = write_checkpoint({"a": matrix()})
    load_weights(CheckpointReader(path), [spec("a", (8, 32))], progress=True)
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown and "B/s" in shown
    load_weights(CheckpointReader(path), [spec("a", (8, 32))])
    assert capsys.readouterr().err == ""


def test_the_report_reads_as_one_line(write_checkpoint):
    report = load_weights(CheckpointReader(write_checkpoint({"a": matrix()})), [spec("a", (8, 32))])
    assert str(report).startswith("loaded 1 plain tensors, 0.000 GB in")
    assert logging.getLogger("tensorrt_llm").handlers
