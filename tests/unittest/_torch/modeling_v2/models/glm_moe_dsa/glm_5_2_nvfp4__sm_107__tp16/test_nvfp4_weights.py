"""NVFP4 experts: the checkpoint's codes as operands, and which layers get them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.glm_oracle import BASE
from helpers.glm_tiny import CHECKPOINT, export
from helpers.numerics import gamma, swiglu, to_numpy
from safetensors.torch import save_file

from tensorrt_llm._torch.custom_ops.fp4 import dequantize_nvfp4, quantize_nvfp4
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16 import weights
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.moe.routed_experts import (  # noqa: E501
    routed_experts,
)
from tensorrt_llm._torch.models.checkpoints.quantization import read_nvfp4
from tensorrt_llm._torch.models.checkpoints.reader import CheckpointReader
from tensorrt_llm._torch.models.loading import load_model
from tensorrt_llm._torch.models.model_config import ModelConfig, PretrainedConfig
from tensorrt_llm._torch.models.modeling_deepseekv3 import GlmMoeDsaForCausalLM
from tensorrt_llm._torch.modules.fused_moe import FusedMoE
from tensorrt_llm.mapping import Mapping

CPU = torch.device("cpu")
HIDDEN = BASE["hidden_size"]
EXPERTS, WIDE = 3, 64  # experts and their whole intermediate size


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def nvfp4_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointReader:
    generator = torch.Generator().manual_seed(8)
    stored = {}
    for e in range(EXPERTS):
        for projection, (out, columns) in {
            "gate": (WIDE, HIDDEN),
            "up": (WIDE, HIDDEN),
            "down": (HIDDEN, WIDE),
        }.items():
            matrix = torch.randn(out, columns, generator=generator)
            packed, scale = quantize_nvfp4(matrix, torch.tensor([512.0]))
            of = f"experts.{e}.{projection}_proj"
            stored[f"{of}.weight"], stored[f"{of}.weight_scale"] = packed, scale
            factors = 1 + torch.rand(2, generator=generator)
            stored[f"{of}.weight_scale_2"] = factors[0] / 512 * columns**-0.5
            stored[f"{of}.input_scale"] = factors[1] / 448
    directory = tmp_path_factory.mktemp("nvfp4")
    save_file(stored, directory / "model.safetensors")
    return CheckpointReader(directory)


def experts_module(reader: CheckpointReader, mapping: Mapping) -> FusedMoE:
    """The built-in module with the checkpoint's experts."""
    module = FusedMoE(EXPERTS, HIDDEN, WIDE, mapping, torch.float32, CPU)
    for spec in module.weight_specs("experts"):
        spec.target.copy_(read_nvfp4(reader, spec.name, spec.rows, spec.cols, CPU))
    return module


@pytest.mark.parametrize("rank", [0, 1])
def test_nvfp4_experts_are_the_checkpoints_codes(
    nvfp4_checkpoint: CheckpointReader, rank: int
) -> None:
    module = experts_module(nvfp4_checkpoint, Mapping(world_size=2, tp_size=2, rank=rank))
    own = weights.read_nvfp4_experts(nvfp4_checkpoint, "experts", module, CPU)
    input_scale, half = 1 / own.input_global_scale, WIDE // 2
    inner = torch.stack(
        [nvfp4_checkpoint.read(f"experts.{e}.down_proj.input_scale") for e in range(EXPERTS)]
    )
    one = torch.tensor(1.0)
    up, gate = dequantize_nvfp4(own.up_gate, own.up_gate_scale, one).chunk(2, dim=1)
    down = dequantize_nvfp4(own.down, own.down_scale, one)
    for got, expected in (
        (up * (own.output1_scale * inner / input_scale).view(-1, 1, 1), module.gate_up[:, half:]),
        (gate * (own.output1_gate_scale / input_scale).view(-1, 1, 1), module.gate_up[:, :half]),
        (down * (own.output2_scale / inner).view(-1, 1, 1), module.down),
    ):
        assert ((got - expected).abs() <= gamma(8) * expected.abs()).all()
    largest = max(
        float(nvfp4_checkpoint.read(f"experts.{e}.{p}_proj.input_scale"))
        for e in range(EXPERTS)
        for p in ("gate", "up")
    )
    assert float(own.input_global_scale) == pytest.approx(1 / largest, rel=2**-23)


def test_the_nvfp4_op_gives_the_modules_experts_up_to_quantising_h(
    nvfp4_checkpoint: CheckpointReader,
) -> None:
    module = experts_module(nvfp4_checkpoint, Mapping())
    own = weights.read_nvfp4_experts(nvfp4_checkpoint, "experts", module, CPU)
    packed, scale = quantize_nvfp4(draw(4, HIDDEN, seed=3), own.input_global_scale)
    rows, _, places = routed_experts(
        routing_logits=draw(4, EXPERTS),
        routing_bias=torch.zeros(EXPERTS),
        router_hidden_states=None,
        router_weight=None,
        router_workspace=None,
        hidden_states=packed,
        hidden_states_scale=scale,
        gemm1_weights=own.up_gate,
        gemm1_weights_scale=own.up_gate_scale,
        gemm2_weights=own.down,
        gemm2_weights_scale=own.down_scale,
        output1_scale_scalar=own.output1_scale,
        output1_scale_gate_scalar=own.output1_gate_scale,
        output2_scale_scalar=own.output2_scale,
        top_k=EXPERTS,
        routed_scaling_factor=1.0,
        output_dtype=torch.float32,
        hidden_states_ready_event=None,
    )
    each = rows[places.long()].view(4, EXPERTS, HIDDEN)
    ids = draw(4, EXPERTS).sort(dim=1, descending=True).indices
    x = to_numpy(dequantize_nvfp4(packed, scale, 1 / own.input_global_scale))
    for (t, k), e in np.ndenumerate(ids.numpy()):
        gate, up = np.split(to_numpy(module.gate_up[e]), 2)
        down = to_numpy(module.down[e])
        expected, off = swiglu(x[t], gate, up, down, torch.float32)
        g = gate @ x[t]
        h = np.abs(g / (1 + np.exp(-g)) * (up @ x[t])).reshape(-1, 16)
        # Half of the widest step, 4 to 6, and half a step of the scale, of the group's largest.
        lost = np.repeat(h.max(axis=1) * (1 / 6 + 2**-4), 16)
        # The module's numbers are products of the same factors in another order.
        room = np.abs(down) @ lost + 4 * off
        assert (np.abs(to_numpy(each[t, k]) - expected) <= room).all()


def test_experts_that_are_not_nvfp4_are_refused(nvfp4_checkpoint: CheckpointReader) -> None:
    module = experts_module(nvfp4_checkpoint, Mapping())
    with pytest.raises(ValueError, match="no mlp.experts.0.* not stored in NVFP4"):
        weights.read_nvfp4_experts(nvfp4_checkpoint, "mlp.experts", module, CPU)
    eighth = FusedMoE(EXPERTS, HIDDEN, WIDE, Mapping(world_size=8, tp_size=8), torch.float32, CPU)
    with pytest.raises(ValueError, match="must be cut at multiples of 16"):
        weights.read_nvfp4_experts(nvfp4_checkpoint, "experts", eighth, CPU)


# --- of a whole model ---


@pytest.fixture(scope="module")
def nvfp4_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export("nvfp4", tmp_path_factory.mktemp("export") / "nvfp4")


def tiny_model(directory: Path) -> GlmMoeDsaForCausalLM:
    """In bf16, with its MTP layer."""
    config = ModelConfig(
        pretrained_config=PretrainedConfig.from_directory(directory),
        mapping=Mapping(),
        dtype=torch.bfloat16,
        device=CPU,
        max_draft_len=1,
    )
    return load_model(directory, config)


def moe_layers(operands: weights.ModelOperands) -> Iterator[tuple[str, weights.MoeOperands]]:
    """The decoder's, by name in the checkpoint."""
    for i, layer in enumerate(operands.layers):
        if isinstance(layer.mlp, weights.MoeOperands):
            yield f"model.layers.{i}.mlp.experts", layer.mlp


def draft_experts(operands: weights.ModelOperands) -> object:
    assert operands.draft is not None
    assert isinstance(operands.draft.layer.mlp, weights.MoeOperands)
    return operands.draft.layer.mlp.experts


def test_experts_come_from_the_reader_of_an_nvfp4_checkpoint(nvfp4_export: Path) -> None:
    """Bytes of the file, up before gate. The MTP layer is not quantised, so it has numbers."""
    reader = CheckpointReader(nvfp4_export)
    operands = weights.derive_operands(tiny_model(nvfp4_export), reader)
    found = list(moe_layers(operands))
    assert len(found) == 6
    for name, moe in found:
        assert isinstance(moe.experts, weights.Nvfp4Experts)
        for e in (0, 7):
            up, gate, down = (
                reader.read(f"{name}.{e}.{p}_proj.weight") for p in ("up", "gate", "down")
            )
            assert torch.equal(moe.experts.up_gate[e], torch.cat([up, gate]))
            assert torch.equal(moe.experts.down[e], down)
    assert isinstance(draft_experts(operands), weights.PlainExperts)


def test_without_a_reader_experts_are_the_modules_numbers(nvfp4_export: Path) -> None:
    model = tiny_model(nvfp4_export)
    operands = weights.derive_operands(model)
    for _, moe in moe_layers(operands):
        assert isinstance(moe.experts, weights.PlainExperts)
    assert isinstance(draft_experts(operands), weights.PlainExperts)


def test_a_checkpoint_in_bf16_has_plain_experts_with_its_reader_too() -> None:
    reader = CheckpointReader(CHECKPOINT)
    operands = weights.derive_operands(tiny_model(CHECKPOINT), reader)
    for _, moe in moe_layers(operands):
        assert isinstance(moe.experts, weights.PlainExperts)


def test_derived_bytes_count_the_codes(nvfp4_export: Path) -> None:
    """With codes and the bf16 numbers of the fallback both there, the codes are the target's."""
    model = tiny_model(nvfp4_export)
    plain = weights.derived_bytes(weights.derive_operands(model), model)
    operands = weights.derive_operands(model, CheckpointReader(nvfp4_export))
    change = 0
    for _, moe in moe_layers(operands):
        change += sum(t.nbytes for t in weights.tensors(moe.experts))
        # Instead of up and gate exchanged, two numbers per byte; `down` is the module's own.
        change -= moe.experts.up_gate.numel() * 2 * torch.bfloat16.itemsize
    assert weights.derived_bytes(operands, model) == plain + change
