"""glm_tiny: its data, tokenizer, checkpoint, exports and training, and that it really answers."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parents[2] / "examples" / "glm_tiny"
CHECKPOINT = FOLDER / "checkpoint"
sys.path.insert(0, str(FOLDER))

import data  # noqa: E402
import evaluate  # noqa: E402
import export  # noqa: E402
import model as glm  # noqa: E402
import tokenizer as tokenizers  # noqa: E402
import train  # noqa: E402
from transformers import AutoTokenizer, GlmMoeDsaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

CONFIG = json.loads((CHECKPOINT / "config.json").read_text())
FP8_ULP = 2.0**-4  # half a step of a 3-bit mantissa, relative
E2M1_HALF_GAP = 1.0  # half the widest e2m1 gap, 4 to 6


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(CHECKPOINT / "model.safetensors")


@pytest.fixture(scope="module")
def tiny() -> glm.TinyGlm:
    return glm.load(CHECKPOINT)


@pytest.fixture(scope="module")
def sample() -> evaluate.Batch:
    """Every twelfth held-out row: 30 of them, all tasks."""
    return evaluate.heldout_batch(CHECKPOINT).rows(slice(3, None, 12)).trimmed()


def test_data_is_deterministic() -> None:
    assert list(data.training_examples(80, 5)) == list(data.training_examples(80, 5))
    assert list(data.training_examples(80, 5)) != list(data.training_examples(80, 6))


def test_heldout_lines_are_those_of_the_script_and_never_trained() -> None:
    lines = [json.loads(line) for line in (CHECKPOINT / "heldout.jsonl").read_text().splitlines()]
    made = data.heldout_examples(train.HELDOUT_PER_TASK, train.SEED)
    assert [(x["messages"][0]["content"], x["answer"]) for x in lines] == [
        (e.prompt, e.answer) for e in made
    ]
    trained = {e.prompt for e in data.training_examples(20_000, train.SEED + 1)}
    assert not trained & {e.prompt for e in made}


def test_bench_asks_heldout_questions_of_every_task(tokenizer: PreTrainedTokenizerFast) -> None:
    """Every ninth of each task, the tasks in turn; as many tokens as the answer has."""
    per_task = train.HELDOUT_PER_TASK
    made = data.heldout_examples(per_task, train.SEED)
    asked = [made[i] for start in range(0, per_task, 9) for i in range(start, len(made), per_task)]
    encoded = zip(asked, tokenizers.encode(tokenizer, asked), strict=True)
    assert [json.loads(line) for line in (FOLDER / "bench.jsonl").read_text().splitlines()] == [
        {
            "task_id": i,
            "prompt": data.render(example.prompt),
            "output_tokens": len(ids) - prompt_tokens,
        }
        for i, (example, (ids, prompt_tokens)) in enumerate(encoded)
    ]


@pytest.mark.parametrize("text", ["Sort 3 1 2", "café, 日本 🙂\n", "  a\tb  ", "Привет 12345"])
def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_layout(tokenizer: PreTrainedTokenizerFast) -> None:
    special = tokenizer.convert_tokens_to_ids(tokenizers.SPECIAL)
    assert len(tokenizer) == CONFIG["vocab_size"] == 512
    assert special == list(range(502, 512))
    assert len(tokenizer("é")["input_ids"]) == 2 and len(tokenizer("🙂")["input_ids"]) == 4
    assert len(tokenizer("123")["input_ids"]) == 3
    assert tokenizer.convert_tokens_to_ids(list(tokenizers.STOPS)) == CONFIG["eos_token_id"]


def test_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Ho"},
        {"role": "tool", "content": "7"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\nHo<|observation|>\n7"
        "<|assistant|>\n"
    )
    user = [{"role": "user", "content": "Hi"}]
    assert data.render("Hi") == tokenizer.apply_chat_template(
        user, tokenize=False, add_generation_prompt=True
    )


def test_structure_is_glm_5_2s() -> None:
    assert CONFIG["indexer_types"] == ["full"] * 3 + ["shared"] * 3 + ["full", "shared"]
    assert CONFIG["mlp_layer_types"] == ["dense"] * 2 + ["sparse"] * 6
    assert CONFIG["index_n_heads"] >= 16 and CONFIG["index_share_for_mtp_iteration"]
    assert CONFIG["rope_interleave"] and CONFIG["indexer_rope_interleave"]
    assert CONFIG["num_attention_heads"] % 4 == CONFIG["n_routed_experts"] % 4 == 0
    assert CONFIG["num_nextn_predict_layers"] == 1 and len(CONFIG["eos_token_id"]) == 3
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert generation["eos_token_id"] == CONFIG["eos_token_id"]


def expected_shapes(layers: int, dense: int) -> dict[str, list[int]]:
    """Every tensor of the file, spelled out from the config alone."""
    c = CONFIG
    hidden, heads, q_lora = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"]
    key, value, index = c["qk_nope_head_dim"], c["v_head_dim"], c["index_head_dim"]
    rope, latent, moe = c["qk_rope_head_dim"], c["kv_lora_rank"], c["moe_intermediate_size"]
    shapes = {n: [c["vocab_size"], hidden] for n in ("model.embed_tokens.weight", "lm_head.weight")}
    shapes["model.norm.weight"] = [hidden]

    def swiglu(name: str, width: int) -> dict[str, list[int]]:
        up = {f"{name}.{p}_proj.weight": [width, hidden] for p in ("gate", "up")}
        return up | {f"{name}.down_proj.weight": [hidden, width]}

    for i in range(layers + 1):
        at, attn = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        shapes |= {
            at + n + ".weight": [hidden] for n in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {
            attn + "q_a_proj.weight": [q_lora, hidden],
            attn + "q_a_layernorm.weight": [q_lora],
            attn + "q_b_proj.weight": [heads * (key + rope), q_lora],
            attn + "kv_a_proj_with_mqa.weight": [latent + rope, hidden],
            attn + "kv_a_layernorm.weight": [latent],
            attn + "kv_b_proj.weight": [heads * (key + value), latent],
            attn + "o_proj.weight": [hidden, heads * value],
        }
        if i == layers or c["indexer_types"][i] == "full":
            shapes |= {
                attn + "indexer.wq_b.weight": [c["index_n_heads"] * index, q_lora],
                attn + "indexer.wk.weight": [index, hidden],
                attn + "indexer.k_norm.weight": [index],
                attn + "indexer.k_norm.bias": [index],
                attn + "indexer.weights_proj.weight": [c["index_n_heads"], hidden],
            }
        if i < dense:
            shapes |= swiglu(at + "mlp", c["intermediate_size"])
            continue
        experts = c["n_routed_experts"]
        shapes[at + "mlp.gate.weight"] = [experts, hidden]
        shapes[at + "mlp.gate.e_score_correction_bias"] = [experts]
        for name in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
            shapes |= swiglu(at + "mlp." + name, moe)
    mtp = f"model.layers.{layers}."
    shapes |= {mtp + n + ".weight": [hidden] for n in ("enorm", "hnorm", "shared_head.norm")}
    return shapes | {mtp + "eh_proj.weight": [hidden, 2 * hidden]}


def test_checkpoint_tensors_and_size(tensors: dict[str, torch.Tensor]) -> None:
    assert {n: list(t.shape) for n, t in tensors.items()} == expected_shapes(8, 2)
    for name, tensor in tensors.items():
        bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if bias else torch.bfloat16), name
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 8 * 10**6


def test_correction_biases_need_fp32(tensors: dict[str, torch.Tensor]) -> None:
    for name, bias in tensors.items():
        if name.endswith("e_score_correction_bias"):
            assert bias.min() > 6.8 and bias.max() < 7.1
            assert not torch.equal(bias.bfloat16().float(), bias), name


def chosen_experts(tiny: glm.TinyGlm, ids: torch.Tensor) -> torch.Tensor:
    """[layers, tokens, top] sorted expert numbers of one forward pass."""
    seen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in tiny.backbone.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [g.register_forward_hook(lambda *x: seen.append(x[2][2].sort().values)) for g in gates]
    with torch.no_grad():
        tiny(ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)


def test_a_bf16_bias_would_show(sample: evaluate.Batch) -> None:
    exact, rounded = glm.load(CHECKPOINT), glm.load(CHECKPOINT)
    for name, buffer in rounded.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(buffer.bfloat16())
    differ = chosen_experts(exact, sample.ids) != chosen_experts(rounded, sample.ids)
    moved = differ.any(-1).any(0).view(sample.ids.shape)[sample.valid()]
    assert moved.float().mean() > 0.05


def test_sparsity_bites(tiny: glm.TinyGlm, sample: evaluate.Batch) -> None:
    with torch.no_grad():
        sparse = tiny(sample.ids)
        tiny.set_topk(4096)
        dense = tiny(sample.ids)
        tiny.set_topk(CONFIG["index_topk"])
    change = (sparse - dense).abs().amax(-1)[sample.answers()]
    assert (change > 1e-2).float().mean() > 0.9
    assert sample.length.float().mean() > 2 * CONFIG["index_topk"]


def test_transformers_answers_heldout_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    lines = (CHECKPOINT / "heldout.jsonl").read_text().splitlines()[::12]
    rows = [json.loads(line) for line in lines]
    network = GlmMoeDsaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    prompts = [
        tokenizer.apply_chat_template(r["messages"], tokenize=False, add_generation_prompt=True)
        for r in rows
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    out = network.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=64,
        do_sample=False,
    )
    said = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(text == row["answer"] for text, row in zip(said, rows, strict=True))
    assert len(rows) >= 30 and right >= 0.9 * len(rows)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_drafts_are_accepted(tiny: glm.TinyGlm, sample: evaluate.Batch, eps: float) -> None:
    tiny.set_latent_eps(eps)
    result = evaluate.measure(tiny, sample)
    tiny.set_latent_eps(CONFIG["rms_norm_eps"])
    assert result["exact_match"] >= 0.9 and result["mtp_next_next"] >= 0.75
    assert result["acceptance_k3"] >= 2.5 and result["acceptance_k7"] >= 3.2


@torch.no_grad()
def test_draft_chain_is_a_cached_layer_with_one_selection(tiny: glm.TinyGlm) -> None:
    """The all-positions chain against transformers' own layer with a cache, row by row."""
    size, mtp, attn = 40, tiny.mtp, tiny.mtp.self_attn
    ids = torch.randint(0, 500, (1, size + 1), generator=torch.Generator().manual_seed(3))
    hidden = tiny(ids)
    drafts = evaluate.draft(tiny, ids, hidden, 5)[:, 0, size - 1].tolist()
    cache = DynamicCache(config=glm.transformers_config(tiny.hub, glm.LAYERS + 1))
    low = torch.finfo(torch.float32).min
    mask = torch.full((size, size), low).triu(1)[None, None]
    tokens, hidden, place, topk, said = (
        ids[:, 1:],
        hidden[:, :size],
        torch.arange(size)[None],
        None,
        [],
    )
    indexer = attn.indexer
    for step in range(5):
        x = mtp.merge(tiny.backbone.model.embed_tokens(tokens), hidden)
        rope = tiny.backbone.model.rotary_emb(x, place)
        y, topk = glm.hf.GlmMoeDsaDecoderLayer.forward(
            mtp, x, mask, place, cache, position_embeddings=rope, prev_topk_indices=topk
        )
        attn.indexer, topk = None, topk[:, -1:]  # later steps reuse the last row's selection
        hidden = mtp.shared_head.norm(y)[:, -1:]
        tokens = tiny.backbone.lm_head(hidden).argmax(-1)
        said.append(int(tokens))
        place, mask = torch.tensor([[size + step]]), torch.zeros(1, 1, 1, size + step + 1)
    attn.indexer = indexer
    assert said == drafts


def test_target_steps_by_hand() -> None:
    ids = [9, 1, 2, 3, 4]  # one prompt token, four generated ones
    right = [[2, 3, 4, 0, 0], [3, 4, 0, 0, 0]]
    assert evaluate.target_steps(ids, right, 1) == 1
    assert evaluate.target_steps(ids, [[0] * 5, [0] * 5], 1) == 3
    assert evaluate.target_steps(ids, [[2, 3, 4, 0, 0], [0] * 5], 1) == 2


def test_fp8_export(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    export.export("fp8", CHECKPOINT, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    scales = {n.removesuffix("_scale_inv") for n in written if n.endswith("_scale_inv")}
    kept = ("embed", "lm_head", "norm", "mlp.gate.", "weights_proj", "eh_proj", "k_norm")
    assert scales == {n for n in tensors if not any(part in n for part in kept)}
    assert set(written) == set(tensors) | {n + "_scale_inv" for n in scales}
    for name, weight in tensors.items():
        if name not in scales:
            assert torch.equal(written[name], weight)
            continue
        scale, (rows, columns) = written[name + "_scale_inv"], weight.shape
        assert written[name].dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        assert list(scale.shape) == [-(-rows // 128), -(-columns // 128)]
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        back, weight = written[name].float() * wide, weight.float()
        smallest = wide * 2.0**-10  # half of e4m3's subnormal step
        assert ((back - weight).abs() <= torch.maximum(weight.abs() * FP8_ULP, smallest)).all()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[out, in/2] bytes, low nibble first -> [out, in] e2m1 values."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return values[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def test_nvfp4_export(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    export.export("nvfp4", CHECKPOINT, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert "moe_router_dtype" not in config and config["num_experts"] == config["n_routed_experts"]
    assert quantization["quant_algo"] == "NVFP4" and quantization["group_size"] == 16
    routed = {n for n in tensors if ".mlp.experts." in n and not n.startswith("model.layers.8.")}
    extra = {n + s for n in routed for s in ("_scale", "_scale_2")}
    extra |= {n.removesuffix("weight") + "input_scale" for n in routed}
    assert set(written) == set(tensors) | extra
    assert all(torch.equal(written[n], t) for n, t in tensors.items() if n not in routed)
    for name in routed:
        check_nvfp4(written, name, tensors[name].float())
        other = name.replace("gate_proj", "up_proj") + "_scale_2"
        assert torch.equal(written[name + "_scale_2"], written[other])


def check_nvfp4(written: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
    """Types, shapes, and the error of one expert projection against half an e2m1 step."""
    rows, columns = weight.shape
    packed, scale = written[name], written[name + "_scale"]
    scale_2 = written[name + "_scale_2"]
    entering = written[name.removesuffix("weight") + "input_scale"]
    assert packed.dtype == torch.uint8 and list(packed.shape) == [rows, columns // 2]
    assert scale.dtype == torch.float8_e4m3fn and list(scale.shape) == [rows, columns // 16]
    assert scale_2.dtype == entering.dtype == torch.float32 and scale_2.dim() == entering.dim() == 0
    assert entering > 0
    unit = (scale.float() * scale_2).repeat_interleave(16, 1)
    ratio = (weight / unit).abs()
    gap = torch.where(ratio < 2, 0.25, torch.where(ratio < 4, 0.5, E2M1_HALF_GAP))
    # a group's scale is itself rounded to e4m3: its peak may lie a half ulp above 6 units
    over = (ratio - 6).clamp_min(0)
    assert over.max() <= 6 * FP8_ULP
    assert ((unpack(packed) * unit - weight).abs() <= (gap + over) * unit * (1 + 1e-5)).all()


@pytest.mark.parametrize("tp", [1, 2, 16])
def test_slice_has_one_ranks_shapes(tmp_path: Path, tp: int) -> None:
    export.export_slice("nvfp4", tp, 8, CHECKPOINT, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    per_rank = {"num_attention_heads": 4, "moe_intermediate_size": 128, "intermediate_size": 768}
    for name, size in (per_rank | {"vocab_size": 9680}).items():
        assert config[name] == size * tp
    assert config["hidden_size"] == 6144 and config["n_routed_experts"] == 256
    assert len(config["indexer_types"]) == len(config["mlp_layer_types"]) == 8
    assert config["index_topk"] == 2048 and (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--slice", "1", "--layers", "79"], "--layers must be 1 to 78, not 79"),
        (["--slice", "0"], "--slice must be 1 to 16 ranks, not 0"),
        (["--format", "int3"], "invalid choice: 'int3'"),
        ([], "give --format, --slice or both"),
    ],
)
def test_export_refuses_bad_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        export.arguments([*args, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_two_training_steps_repeat_bit_for_bit(tmp_path: Path) -> None:
    train.write_data(tmp_path)
    options = train.Options(steps=2, batch=8, examples=64, lr=1e-3, draft_every=2)

    def weights() -> dict[str, torch.Tensor]:
        rows = train.training_batch(tmp_path, options)
        trainer = train.Trainer(train.new_model(tmp_path), options)
        for step, picked in zip(range(2), train.batches(rows.length, options), strict=False):
            trainer.step(step, rows.rows(picked).trimmed())
        return trainer.model.state_dict()

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("tokenizer.json", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (CHECKPOINT / name).read_bytes()
