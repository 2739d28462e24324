"""The FP8 and NVFP4 exports of glm_tiny against the same model with weights dequantised here."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.engine import executor_config, generate, make_engine, run_ranks
from helpers.glm_tiny import CHECKPOINT, export
from helpers.numerics import decode_e4m3
from safetensors.torch import load_file, save_file

from tensorrt_llm.mapping import Mapping

PROMPT = [
    505,
    508,
    510,
    10,
    70,
    71,
    72,
    73,
    74,
    75,
    76,
    77,
    78,
    79,
    80,
    81,
    82,
    83,
    84,
    85,
    511,
    10,
]
FORMATS = ("fp8", "nvfp4")
NEW_TOKENS = 24
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.array([decode_e4m3(code) for code in range(256)])


@pytest.fixture(scope="module", params=FORMATS)
def exports(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, Path]:
    """(the export, the same as a plain fp32 checkpoint)."""
    root = tmp_path_factory.mktemp(request.param)
    export(request.param, root / "export")
    stored = load_file(root / "export" / "model.safetensors")
    (root / "plain").mkdir()
    save_file(dequantised(stored), root / "plain" / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        (root / "plain" / name).write_bytes((CHECKPOINT / name).read_bytes())
    return root / "export", root / "plain"


def dequantised(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Plain tensors: scaled weights in fp32, everything else as it is, the scales gone."""
    plain = {}
    for name, tensor in stored.items():
        stem = name.removesuffix(".weight")
        if name.endswith(("weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale")):
            continue
        if f"{stem}.weight_scale_inv" in stored:
            plain[name] = from_fp8(tensor, stored[f"{stem}.weight_scale_inv"])
        elif f"{stem}.weight_scale" in stored:
            plain[name] = from_nvfp4(
                tensor, stored[f"{stem}.weight_scale"], stored[f"{stem}.weight_scale_2"]
            )
        else:
            plain[name] = tensor
    return plain


def from_fp8(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """W = e4m3 * scale_inv of its 128 x 128 block; one product, rounded to fp32."""
    values = E4M3[weight.view(torch.uint8).numpy()]
    rows, cols = (np.arange(n) // 128 for n in values.shape)
    scales = scale_inv.numpy().astype(np.float64)[np.ix_(rows, cols)]
    return torch.from_numpy((values * scales).astype(np.float32))


def from_nvfp4(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """W = e2m1 * e4m3 of its group of 16 * scale_2. The first product is exact, so that a rounded
    second one does not depend on how it is grouped with it."""
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).reshape(len(packed), -1)
    values = E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    groups = np.repeat(E4M3[scale.view(torch.uint8).numpy()], 16, axis=1)
    return torch.from_numpy((values * groups * float(scale_2)).astype(np.float32))


def logits_of(directory: Path) -> torch.Tensor:
    """fp32 logits of every prompt token."""
    engine = make_engine(executor_config(directory, max_seq_len=128)).model_engine
    metadata, cache = engine.attn_metadata, engine.kv_cache_manager
    cache.add_request(0)
    cache.resize(0, len(PROMPT))
    metadata.request_ids, metadata.seq_lens, metadata.num_contexts = [0], [len(PROMPT)], 1
    metadata.kv_cache_params.num_cached_tokens_per_seq = [0]
    metadata.prepare()
    return engine.model(metadata, torch.tensor(PROMPT), metadata.position_ids)


def test_logits_equal_the_dequantised_model(exports) -> None:
    """The weights are the same fp32 numbers, so the logits are the same bits."""
    quantised, plain = exports
    assert torch.equal(logits_of(quantised), logits_of(plain))


def test_drafting_layer_is_read_too(exports) -> None:
    quantised, plain = exports
    tokens = [
        generate(
            make_engine(executor_config(directory, max_seq_len=128, max_draft_len=3)),
            [PROMPT],
            NEW_TOKENS,
        )
        for directory in (quantised, plain)
    ]
    assert tokens[0] == tokens[1]


def test_ranks_read_their_slices(exports) -> None:
    """Slices begin inside of 128-wide blocks; tokens are those of one rank."""
    quantised, _ = exports
    [expected] = generate(
        make_engine(executor_config(quantised, max_seq_len=128)), [PROMPT], NEW_TOKENS
    )
    for tokens in run_ranks(4, _generate_on_rank, quantised):
        assert tokens == expected


def _generate_on_rank(mapping: Mapping, directory: Path) -> list[int]:
    engine = make_engine(executor_config(directory, mapping=mapping, max_seq_len=128))
    return generate(engine, [PROMPT], NEW_TOKENS)[0]
