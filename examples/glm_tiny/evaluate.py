"""Measures a tiny GLM checkpoint on its held-out set: exact match, MTP accuracy, acceptance length.

python examples/glm_tiny/evaluate.py --model examples/glm_tiny/checkpoint
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from data import Example
from model import DraftChain, TinyGlm, load
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerFast

HELDOUT = "heldout.jsonl"
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Batch:
    """Right-padded token rows: ids [B, S], and per row the prompt's and the whole length."""

    ids: Tensor
    prompt: Tensor
    length: Tensor

    def places(self) -> Tensor:
        """[1, S]: 0, 1, 2, ..."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)[None]

    def answers(self) -> Tensor:
        """[B, S], true on answer tokens and their stop token."""
        return (self.places() >= self.prompt[:, None]) & self.valid()

    def valid(self) -> Tensor:
        """[B, S], true on everything but padding."""
        return self.places() < self.length[:, None]

    def rows(self, index: Tensor | slice) -> "Batch":
        """Some of the rows."""
        return Batch(self.ids[index], self.prompt[index], self.length[index])

    def trimmed(self) -> "Batch":
        """Without the columns that are padding in every row."""
        return Batch(self.ids[:, : int(self.length.max())], self.prompt, self.length)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        return Batch(self.ids.to(device), self.prompt.to(device), self.length.to(device))


def pad(rows: list[tuple[list[int], int]], pad_id: int) -> Batch:
    """Token rows and their prompt lengths as one batch."""
    length = torch.tensor([len(ids) for ids, _ in rows])
    ids = torch.full((len(rows), int(length.max())), pad_id)
    for row, (tokens, _) in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return Batch(ids, torch.tensor([prompt for _, prompt in rows]), length)


def matches(model: TinyGlm, batch: Batch, hidden: Tensor) -> Tensor:
    """[B], true where greedy decoding gives the row's answer and stop token.

    One teacher-forced pass decides it: greedy decoding follows the row exactly as long as every
    argmax along it is the row's own next token.
    """
    right = model.backbone.lm_head(hidden[:, :-1]).argmax(-1) == batch.ids[:, 1:]
    return (right | ~batch.answers()[:, 1:]).all(-1)


def draft_accuracy(model: TinyGlm, batch: Batch, hidden: Tensor) -> tuple[int, int]:
    """How many next-next tokens the MTP layer predicts over answer positions, and of how many."""
    chain = DraftChain(model, hidden, model.hub["index_topk"])
    drafts = chain.step(model.embed(batch.ids, 1)).argmax(-1)
    counted = batch.answers()[:, 1:-1] & batch.valid()[:, 2:]
    right = (drafts[:, :-2] == batch.ids[:, 2:]) & counted
    return int(right.sum()), int(counted.sum())


def generate(model: TinyGlm, batch: Batch) -> Batch:
    """Greedy continuations of the rows' prompts up to a stop token, by plain full forwards."""
    stops = torch.tensor(model.hub["eos_token_id"], device=batch.ids.device)
    ids = F.pad(batch.ids, (0, MAX_NEW_TOKENS), value=model.hub["pad_token_id"])
    length, row = batch.prompt.clone(), torch.arange(len(ids), device=ids.device)
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(MAX_NEW_TOKENS):
        hidden = model(ids[:, : int(length.max())])
        token = model.backbone.lm_head(hidden[row, length - 1]).argmax(-1)
        ids[row, length] = torch.where(done, ids[row, length], token)
        length = length + (~done).long()
        done = done | torch.isin(token, stops)
        if done.all():
            break
    return Batch(ids[:, : int(length.max())], batch.prompt, length)


def draft(model: TinyGlm, ids: Tensor, hidden: Tensor, depth: int) -> Tensor:
    """Greedy drafts [depth, B, S] from every position; number s of position i is token i+2+s."""
    chain, drafts = DraftChain(model, hidden, model.hub["index_topk"]), []
    embedded = model.embed(ids, 1)
    for _ in range(depth):
        drafts.append(chain.step(embedded).argmax(-1))
        embedded = model.backbone.model.embed_tokens(drafts[-1])
    return torch.stack(drafts)


def target_steps(ids: list[int], drafts: list[list[int]], prompt: int) -> int:
    """Target steps of a row after its prefill; drafts: per depth the guess of every position."""
    last, place, steps = len(ids) - 1, prompt, 0  # place: the newest token that is known
    while place < last:
        accepted = 0
        while accepted < len(drafts) and place + accepted < last:
            if drafts[accepted][place - 1] != ids[place + 1 + accepted]:
                break
            accepted += 1
        place, steps = place + accepted + 1, steps + 1
    return steps


def acceptance(
    model: TinyGlm, batch: Batch, hidden: Tensor, depths: tuple[int, ...]
) -> dict[int, float]:
    """Tokens per target step, bonus token included, when these rows are decoded with drafts."""
    drafts = draft(model, batch.ids, hidden, max(depths)).permute(1, 0, 2).tolist()
    rows = list(zip(batch.ids.tolist(), batch.prompt.tolist(), batch.length.tolist(), strict=True))
    tokens = sum(length - prompt - 1 for _, prompt, length in rows)
    steps = {
        depth: sum(
            target_steps(ids[:length], drafts[i][:depth], prompt)
            for i, (ids, prompt, length) in enumerate(rows)
        )
        for depth in depths
    }
    return {depth: tokens / count for depth, count in steps.items()}


@torch.no_grad()
def quick(model: TinyGlm, batch: Batch) -> dict[str, float]:
    """Exact match and MTP next-next accuracy, both by one teacher-forced pass."""
    hidden = model(batch.ids)
    right, counted = draft_accuracy(model, batch, hidden)
    match = matches(model, batch, hidden).float().mean().item()
    return {"exact_match": match, "mtp_next_next": right / counted}


@torch.no_grad()
def measure(model: TinyGlm, batch: Batch) -> dict[str, float]:
    """`quick`, and the acceptance lengths at 3 and 7 drafts over what the model generates."""
    right = matches(model, batch, model(batch.ids))
    said = batch
    if not right.all():  # a right row's greedy output is the row itself
        wrong = generate(model, batch.rows(~right))
        width = max(batch.ids.shape[1], wrong.ids.shape[1])
        ids = F.pad(batch.ids, (0, width - batch.ids.shape[1]))
        ids[~right] = F.pad(wrong.ids, (0, width - wrong.ids.shape[1]))
        length = batch.length.clone()
        length[~right] = wrong.length
        said = Batch(ids, batch.prompt, length)
    lengths = acceptance(model, said, model(said.ids), (3, 7))
    return quick(model, batch) | {f"acceptance_k{k}": value for k, value in lengths.items()}


def read_heldout(folder: Path, stops: dict[str, str]) -> list[Example]:
    """The checkpoint's held-out lines; `stops` names each task's stop token."""
    lines = (folder / HELDOUT).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        Example(r["task"], r["messages"][0]["content"], r["answer"], stops[r["task"]]) for r in rows
    ]


def heldout_batch(folder: Path) -> Batch:
    """The held-out set of a checkpoint folder as one batch."""
    from data import TASKS
    from tokenizer import encode

    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    examples = read_heldout(folder, {task: stop for task, (_, stop) in TASKS.items()})
    return pad(encode(tokenizer, examples), tokenizer.pad_token_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    folder = parser.parse_args().model
    for name, value in measure(load(folder), heldout_batch(folder)).items():
        print(f"{name:16s} {value:.4f}")


if __name__ == "__main__":
    main()
