"""Trains the tiny GLM and writes its checkpoint, metrics.json and training_curve.png.

    python examples/glm_tiny/train.py --steps 3600 --device cpu --out examples/glm_tiny/checkpoint

The backbone and the MTP layer learn together. Every indexer learns as in DeepSeek's sparse
attention: first all keys are visible and its scores follow the attention's distribution, then only
    its own
top-k are.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats bits only with it

import torch
from data import heldout_examples, training_examples
from evaluate import HELDOUT, Batch, heldout_batch, measure, pad, quick
from losses import MTP_WEIGHT, Balancer, Watch, total_loss
from model import TinyGlm, hub_config, initialise, load, save
from tokenizer import STOPS, VOCAB_SIZE, build, encode
from tokenizer import save as save_tokenizer
from torch import Tensor
from tqdm import tqdm

SEED, HELDOUT_PER_TASK, TOKENIZER_EXAMPLES = 52, 45, 9000
ALL_KEYS = 1 << 20
WARM_UP = 100
CHUNK = 16  # batches drawn and sorted together


@dataclass(frozen=True)
class Options:
    """What one training run depends on; the same options and device give the same bits."""

    steps: int
    batch: int
    examples: int
    lr: float
    draft_every: int


def topk_at(progress: float, final: int) -> int:
    """Keys per row at a fraction of the run: dense, then narrowing, then the real number."""
    if progress < 0.35:
        return ALL_KEYS
    return 3 * final if progress < 0.42 else 2 * final if progress < 0.5 else final


def lr_at(step: int, options: Options) -> float:
    """Linear warm-up, constant, then linear to zero over the last 60 % of the run."""
    left = (options.steps - step) / options.steps
    return options.lr * min(1.0, (step + 1) / WARM_UP, left / 0.6)


def write_data(folder: Path) -> None:
    """Tokenizer and held-out set of a fresh checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(build(list(training_examples(TOKENIZER_EXAMPLES, SEED)), 4096), folder)
    lines = (
        {"task": e.task, "messages": [{"role": "user", "content": e.prompt}], "answer": e.answer}
        for e in heldout_examples(HELDOUT_PER_TASK, SEED)
    )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / HELDOUT).write_text(text)


def training_batch(folder: Path, options: Options) -> Batch:
    """All training rows as one batch on the CPU."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    count = min(options.examples, options.steps * options.batch)
    rows = encode(tokenizer, list(training_examples(count, SEED + 1)))
    return pad(rows, tokenizer.pad_token_id)


def new_model(folder: Path) -> TinyGlm:
    """A freshly initialised model whose stop ids are those of the folder's tokenizer."""
    from transformers import AutoTokenizer

    eos = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(STOPS))
    model = TinyGlm(hub_config(eos, VOCAB_SIZE))
    initialise(model, SEED)
    return model


def optimizer_for(model: TinyGlm, options: Options) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98), fused=True)


class Trainer:
    """Model, optimizer and history of one run."""

    def __init__(self, model: TinyGlm, options: Options) -> None:
        self.model, self.options = model, options
        self.optimizer = optimizer_for(model, options)
        self.watch, self.balancer = Watch(model), Balancer(model)
        self.parts: dict[str, Tensor] = {}  # the latest value of each part of the loss
        self.history: list[dict[str, float]] = []

    def step(self, step: int, batch: Batch) -> None:
        """One update; the parts of its loss stay in `self.parts`, on the device."""
        topk = topk_at(step / self.options.steps, self.model.hub["index_topk"])
        lr = lr_at(step, self.options)
        self.model.set_topk(topk)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # the draft chain and the indexers cost as much as the rest and need fewer updates
        whole = (step + 1) % self.options.draft_every == 0
        losses = total_loss(self.model, batch, topk, self.watch, self.balancer, whole)
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.balancer.update(1e-3 * lr / self.options.lr)
        self.parts |= {name: loss.detach() for name, loss in losses.items()}

    def record(self, step: int, heldout: Batch) -> None:
        """Adds a point to the history, with the held-out scores at the keys of this moment."""
        point = {"step": step} | {name: value.item() for name, value in self.parts.items()}
        self.history.append(point | quick(self.model, heldout))
        tqdm.write(" ".join(f"{k} {v:.4g}" for k, v in self.history[-1].items()), file=sys.stdout)


def batches(length: Tensor, options: Options) -> Iterator[Tensor]:
    """Row numbers of each step's batch: rows of like length together, in random order.

    length [rows]; CHUNK batches are drawn at once, sorted by length, and taken in a shuffled order.
    """
    order = torch.Generator().manual_seed(SEED)
    for _ in range(0, options.steps, CHUNK):
        drawn = torch.randint(len(length), (CHUNK * options.batch,), generator=order)
        drawn = drawn[length[drawn].argsort(stable=True)].view(CHUNK, options.batch)
        yield from drawn[torch.randperm(CHUNK, generator=order)]


def run(trainer: Trainer, rows: Batch, heldout: Batch, seconds: float) -> bool:
    """All steps; false when the time limit ended them early."""
    options, started = trainer.options, time.monotonic()
    every = max(1, options.steps // 20)
    picks = batches(rows.length, options)
    bar = tqdm(range(options.steps), mininterval=5)
    for step in bar:
        trainer.step(step, rows.rows(next(picks)).trimmed().to(heldout.ids.device))
        if (step + 1) % every == 0:
            trainer.record(step + 1, heldout)
            bar.set_postfix(loss=trainer.history[-1]["lm"])
            if time.monotonic() - started > seconds:
                return False
    return True


def plot(history: list[dict[str, float]], path: Path) -> None:
    """The curve for people: losses above, held-out scores below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, half = [point["step"] for point in history], f"draft chain x {MTP_WEIGHT}"
    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7))
    for name, label in (("lm", "next token"), ("mtp", half), ("index", "indexers (KL)")):
        upper.plot(steps, [point[name] for point in history], label=label)
    for name, label in (("exact_match", "exact match"), ("mtp_next_next", "MTP next-next token")):
        lower.plot(steps, [point[name] for point in history], label=label)
    upper.set(ylabel="loss (nats)", yscale="log", title="glm_tiny training")
    lower.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    for axis in (upper, lower):
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def finish(trainer: Trainer, folder: Path) -> dict[str, float]:
    """Writes the checkpoint and measures what was written, after its rounding to bf16."""
    save(trainer.model, folder)
    device = next(trainer.model.parameters()).device
    torch.set_float32_matmul_precision("highest")
    final = measure(load(folder).to(device), heldout_batch(folder).to(device))
    report = {"final": final, "options": asdict(trainer.options), "history": trainer.history}
    (folder.parent / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(trainer.history, folder.parent / "training_curve.png")
    return final


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--examples", type=int, default=100_000, help="different training rows")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--draft-every", type=int, default=3, help="steps per draft, indexer loss")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads: part of the bits")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds; then stop")
    args = parser.parse_args()
    counts = ("steps", "batch", "examples", "draft_every", "threads")
    for name in counts:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, not {getattr(args, name)}")
    return args


def main() -> None:
    args = arguments()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(args.threads)
    options = Options(args.steps, args.batch, args.examples, args.lr, args.draft_every)
    write_data(args.out)
    rows, heldout = training_batch(args.out, options), heldout_batch(args.out)
    model = new_model(args.out).to(args.device)
    trainer = Trainer(model, options)
    whole = run(trainer, rows, heldout.to(args.device), args.time_limit)
    for name, value in finish(trainer, args.out).items():
        print(f"{name:16s} {value:.4f}")
    if not whole:
        sys.exit(f"stopped by --time-limit {args.time_limit}: the state so far is in {args.out}")


if __name__ == "__main__":
    main()
