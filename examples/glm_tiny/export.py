"""Writes the tiny GLM in the formats that GLM-5.2 is published in, or the config of a slice of it.

    python examples/glm_tiny/export.py --format fp8 --model examples/glm_tiny/checkpoint --out DIR
    python examples/glm_tiny/export.py --slice 1 --layers 8 --out DIR

`fp8` follows zai-org/GLM-5.2-FP8, `nvfp4` follows nvidia/GLM-5.2-NVFP4. A slice has no weights: it
is for `load_format: dummy`, and each of its ranks has the shapes of one rank of GLM-5.2 at tensor
parallel 16; `--format` beside it writes that format's declarations.
"""

import argparse
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
COPIED_FILES = (*TOKENIZER_FILES, "generation_config.json", "heldout.jsonl")
BLOCK, GROUP = 128, 16  # sides of an FP8 block, length of an NVFP4 group
FP8_MAX, E2M1_MAX = 448.0, 6.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_NAMES = re.compile(
    r"\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|indexer\.wq_b|indexer\.wk"
    r"|(gate|up|down)_proj)\.weight$"
)
MAX_LAYERS = 78


def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> e4m3 [out, in], fp32 scales [ceil(out/128), ceil(in/128)]; their product."""
    rows, columns = weight.shape
    shape = (-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
    padded = torch.zeros(shape[0] * BLOCK, shape[2] * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(shape)
    scale = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    quantized = (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    return quantized.to(torch.float8_e4m3fn).contiguous(), scale


def fp8_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every projection but router, head weights and eh_proj in FP8; all other tensors unchanged."""
    result = {}
    for name, tensor in tensors.items():
        if FP8_NAMES.search(name):
            result[name], result[name + "_scale_inv"] = fp8_blocks(tensor)
        else:
            result[name] = tensor
    return result


def fp8_config(config: dict) -> dict:
    """config.json of the FP8 export."""
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return config | {"quantization_config": quantization}


def e2m1_codes(values: Tensor) -> Tensor:
    """Nearest e2m1 codes of values within [-6, 6]; ties to the even code, bit 3 is the sign."""
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    upward = torch.bucketize(values.abs(), middles, right=True)
    downward = torch.bucketize(values.abs(), middles)
    code = torch.where(upward % 2 == 0, upward, downward)
    return (code + 8 * (values < 0)).to(torch.uint8)


def nvfp4_groups(weight: Tensor, scale_2: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> packed e2m1 U8 [out, in/2], low nibble first, and e4m3 scales [out, in/16].

    weight = e2m1 * scale * scale_2.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / (E2M1_MAX * scale_2)).to(torch.float8_e4m3fn)
    unit = scale.float()[..., None] * scale_2
    scaled = torch.where(unit > 0, groups / unit, torch.zeros_like(groups))
    codes = e2m1_codes(scaled.clamp(-E2M1_MAX, E2M1_MAX)).flatten(-2)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale


def global_scale(amax: Tensor) -> Tensor:
    """The fp32 scalar that maps a largest magnitude to the largest e2m1 times the largest e4m3."""
    return (amax.float() / (E2M1_MAX * FP8_MAX)).reshape(())


def expert_stems(tensors: dict[str, Tensor], config: dict) -> list[str]:
    """Name stems of the backbone's routed experts: the only tensors that NVFP4 quantizes."""
    sparse = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    stems = (
        f"model.layers.{i}.mlp.experts.{e}."
        for i in sparse
        for e in range(config["n_routed_experts"])
    )
    return [stem for stem in stems if stem + "gate_proj.weight" in tensors]


def nvfp4_tensors(
    tensors: dict[str, Tensor], config: dict, amax: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Routed experts of the backbone in NVFP4, all other tensors unchanged.

    amax: per expert stem the largest magnitudes of the inputs of gate/up and of down.
    """
    result = dict(tensors)
    for stem in expert_stems(tensors, config):
        weights = {p: tensors[f"{stem}{p}.weight"] for p in ("gate_proj", "up_proj", "down_proj")}
        peak = {p: weight.abs().amax() for p, weight in weights.items()}
        # gate and up run as one matrix, so they share their global scale
        peak["gate_proj"] = peak["up_proj"] = torch.maximum(peak["gate_proj"], peak["up_proj"])
        for projection, weight in weights.items():
            name, scale_2 = stem + projection, global_scale(peak[projection])
            packed, scale = nvfp4_groups(weight, scale_2)
            entering = amax[stem][1 if projection == "down_proj" else 0]
            result |= {
                name + ".weight": packed,
                name + ".weight_scale": scale,
                name + ".weight_scale_2": scale_2,
                name + ".input_scale": global_scale(entering),
            }
    return result


def excluded_modules(config: dict) -> list[str]:
    """What the NVFP4 export leaves in bf16, in the pattern style of its hf_quant_config.json."""
    dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
    names = [f"model.layers.{i}.*" for i in range(dense)]
    for i in range(dense, layers):
        names += [f"model.layers.{i}.self_attn*", f"model.layers.{i}.mlp.shared_experts*"]
    return [*names, f"model.layers.{layers}*", "lm_head", "model.embed_tokens"]


def nvfp4_quantization(config: dict) -> dict:
    """hf_quant_config.json: who made it and what is quantized how."""
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": GROUP,
        "exclude_modules": excluded_modules(config),
    }
    producer = {"name": "examples/glm_tiny/export.py", "version": "1"}
    return {"producer": producer, "quantization": quantization}


def nvfp4_config(config: dict) -> dict:
    """config.json of the NVFP4 export: no router dtype (still fp32), some defaults spelled out."""
    kept = {name: value for name, value in config.items() if name != "moe_router_dtype"}
    return kept | {
        "bos_token_id": 0,
        "mlp_bias": False,
        "num_experts": config["n_routed_experts"],
    }


@contextmanager
def expert_peaks(model: torch.nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inside: one forward pass leaves, per expert stem, the peaks of gate/up's and down's inputs.

    An expert is judged by the tokens routed to it; one that got none, by all tokens.
    """
    peaks: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(prefix: str) -> Callable:
        def record(experts: torch.nn.Module, args: tuple) -> None:
            for e, merged in enumerate(experts.gate_up_proj):
                routed = (args[1] == e).any(-1)
                x = args[0][routed] if routed.any() else args[0]
                gate, up = (x @ merged.T).chunk(2, -1)
                inner = experts.act_fn(gate) * up
                peaks[f"{prefix}{e}."] = x.abs().amax(), inner.abs().amax()

        return record

    handles = [
        layer.mlp.experts.register_forward_pre_hook(hook(f"model.layers.{i}.mlp.experts."))
        for i, layer in enumerate(model.backbone.model.layers)
        if hasattr(layer.mlp, "experts")
    ]
    yield peaks
    for handle in handles:
        handle.remove()


@torch.no_grad()
def calibrate(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Activation peaks of every backbone expert over every fourth held-out line."""
    from evaluate import heldout_batch
    from model import load

    model, batch = load(folder), heldout_batch(folder)
    with expert_peaks(model) as peaks:
        model(batch.rows(slice(None, None, 4)).trimmed().ids)
    return peaks


def write_configs(kind: str | None, config: dict, out: Path) -> None:
    """config.json of a format (None: bf16), and NVFP4's hf_quant_config.json."""
    if kind == "nvfp4":
        write_json(out / "hf_quant_config.json", nvfp4_quantization(config))
    by_kind = {None: dict, "fp8": fp8_config, "nvfp4": nvfp4_config}
    write_json(out / "config.json", by_kind[kind](config))


def export(kind: str, source: Path, out: Path) -> None:
    """Writes the whole folder of one format."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    if kind == "fp8":
        tensors = fp8_tensors(tensors)
    else:
        tensors = nvfp4_tensors(tensors, config, calibrate(source))
    write_configs(kind, config, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    copy(COPIED_FILES, source, out)


def slice_config(tp: int, layers: int, stops: list[int]) -> dict:
    """GLM-5.2's config.json, cut so that each of `tp` ranks has the shapes of one of sixteen."""
    from model import hub_config, indexer_types

    dense = min(3, layers)
    return hub_config(stops, 9680 * tp) | {
        "first_k_dense_replace": 3,
        "head_dim": 192,
        "hidden_size": 6144,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "indexer_types": indexer_types(layers),
        "intermediate_size": 768 * tp,
        "kv_lora_rank": 512,
        "layer_types": ["deepseek_sparse_attention"] * layers,
        "max_position_embeddings": 1048576,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "moe_intermediate_size": 128 * tp,
        "n_routed_experts": 256,
        "num_attention_heads": 4 * tp,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4 * tp,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    }


def export_slice(kind: str | None, tp: int, layers: int, source: Path, out: Path) -> None:
    """Writes config and tokenizer of a slice; the tiny tokenizer's ids all fit its vocabulary."""
    stops = json.loads((source / "config.json").read_text())["eos_token_id"]
    write_configs(kind, slice_config(tp, layers, stops), out)
    copy((*TOKENIZER_FILES, "generation_config.json"), source, out)


def write_json(path: Path, value: dict) -> None:
    """Indented JSON with a final newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def copy(names: tuple[str, ...], source: Path, out: Path) -> None:
    """Copies files that stay as they are."""
    for name in names:
        shutil.copyfile(source / name, out / name)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=("fp8", "nvfp4"), help="how to quantize")
    parser.add_argument(
        "--slice", type=int, metavar="TP", help="only a config, for TP ranks, 1 to 16"
    )
    parser.add_argument("--layers", type=int, default=MAX_LAYERS, help="layers of the slice")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args(argv)
    if args.slice is None and args.format is None:
        parser.error("give --format, --slice or both")
    if args.slice is not None and not 1 <= args.slice <= 16:
        parser.error(f"--slice must be 1 to 16 ranks, not {args.slice}")
    if not 1 <= args.layers <= MAX_LAYERS:
        parser.error(f"--layers must be 1 to {MAX_LAYERS}, not {args.layers}")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json")
    if args.out.resolve() == args.model.resolve():
        parser.error("--out must not be the checkpoint that is read")
    return args


def main() -> None:
    args = arguments()
    if args.slice is None:
        export(args.format, args.model, args.out)
    else:
        export_slice(args.format, args.slice, args.layers, args.model, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
