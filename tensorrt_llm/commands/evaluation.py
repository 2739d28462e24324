"""Exact-match evaluation on a checkpoint's own held-out samples: by `LLM`, and by transformers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tensorrt_llm.commands import transformers_model
from tensorrt_llm.commands.output import table
from tensorrt_llm.llmapi import LLM, LlmArgs, SamplingParams

# Task -> the file of its samples inside of the checkpoint directory.
TASK_FILES = {"glm_tiny": "heldout.jsonl"}
MAX_OUTPUT_TOKENS = 128  # a longer answer is a wrong one

TokenIds = list[int]


@dataclass(frozen=True)
class Sample:
    """A conversation that waits for an answer, and the only right one."""

    messages: list[dict[str, str]]
    answer: str


@dataclass(frozen=True)
class Result:
    """Samples, and what each engine answered to each of them; ours comes first."""

    samples: Sequence[Sample]
    answers: Mapping[str, Sequence[str]]

    def correct(self, engine: str) -> int:
        """Exact matches, but for white space at the ends."""
        return sum(map(_is_right, self.answers[engine], self.samples))

    def same_answers(self) -> int:
        """Samples to which all engines gave the same answer."""
        return sum(len(set(given)) == 1 for given in zip(*self.answers.values(), strict=True))

    def as_text(self) -> str:
        """A table for people."""
        total = len(self.samples)
        rows = [["", "correct", "accuracy"]]
        for engine in self.answers:
            correct = self.correct(engine)
            rows.append([engine, f"{correct}/{total}", f"{correct / total:.1%}"])
        if len(self.answers) > 1:
            same = self.same_answers()
            rows.append(["same answers", f"{same}/{total}", f"{same / total:.1%}"])
        return table(rows)

    def as_dict(self) -> dict[str, Any]:
        """Correct answers of each engine, and every sample that one of them got wrong."""
        return {
            "num_samples": len(self.samples),
            **{engine: self._score(engine) for engine in self.answers},
            "same_answers": self.same_answers(),
            "mistakes": [
                m for i, sample in enumerate(self.samples) if (m := self._mistake(i, sample))
            ],
        }

    def _score(self, engine: str) -> dict[str, float]:
        correct = self.correct(engine)
        return {"correct": correct, "accuracy": correct / len(self.samples)}

    def _mistake(self, number: int, sample: Sample) -> dict[str, Any] | None:
        given = {engine: answers[number] for engine, answers in self.answers.items()}
        if all(_is_right(answer, sample) for answer in given.values()):
            return None
        return {"messages": sample.messages, "answer": sample.answer, **given}


def read_samples(task: str, model: Path, limit: int | None) -> list[Sample]:
    """All samples of a task, or `limit` of them, spread evenly over the file.

    Raises:
        ValueError: no such file, fewer samples than `limit`, or a bad line, which is named.
    """
    path = model / TASK_FILES[task]
    if not path.is_file():
        raise ValueError(f"{path} does not exist; task {task} takes its samples from there")
    with path.open(encoding="utf-8") as lines:
        samples = [_parse(line, f"{path}:{i}") for i, line in enumerate(lines, start=1)]
    if not samples or (limit is not None and limit > len(samples)):
        raise ValueError(f"{path} has {len(samples)} samples; {limit or 'some'} are wanted")
    wanted = limit or len(samples)
    return [samples[i * len(samples) // wanted] for i in range(wanted)]


def _is_right(answer: str, sample: Sample) -> bool:
    return answer.strip() == sample.answer.strip()


def _parse(line: str, where: str) -> Sample:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    match entry:
        case {"messages": [{"role": str(), "content": str()}, *_] as messages, "answer": str(text)}:
            return Sample(messages, text)
    raise ValueError(f"{where} must have messages (with role and content) and an answer (a text)")


def answers(args: LlmArgs, samples: Sequence[Sample]) -> list[str]:
    """What `LLM` says: greedy, all samples together.

    Raises:
        ValueError, EngineDeadError: the engine does not start, or a prompt does not fit.
    """
    if args.skip_tokenizer_init:
        raise ValueError("skip_tokenizer_init is True; an evaluation needs the tokenizer")
    with LLM.from_args(args) as llm:
        prompts: list[Any] = [_encode(llm.tokenizer, sample) for sample in samples]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_OUTPUT_TOKENS))
    return [output.outputs[0].text for output in outputs]


def peer_answers(args: LlmArgs, samples: Sequence[Sample]) -> list[str]:
    """What transformers' `generate` says: greedy, same model, device and dtype.

    Prompts of the same length run together; padding others would change what sparse attention sees.
    """
    from transformers import AutoTokenizer

    config = args.executor_config()
    model = transformers_model.load(config.model, config.device, config.dtype, config.num_threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.tokenizer_dir)
    found: list[str] = [""] * len(samples)
    batches = same_length_batches([_encode(tokenizer, sample) for sample in samples])
    for numbers, prompts in tqdm(list(batches), "transformers"):
        for number, token_ids in zip(numbers, _generate(model, prompts), strict=True):
            found[number] = tokenizer.decode(token_ids, skip_special_tokens=True)
    return found


def _encode(tokenizer: Any, sample: Sample) -> TokenIds:
    token_ids: TokenIds = tokenizer.apply_chat_template(
        sample.messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return token_ids


def same_length_batches(
    prompts: Sequence[TokenIds],
) -> Iterator[tuple[list[int], list[TokenIds]]]:
    """(numbers of the prompts, prompts) for each length that occurs."""
    numbers = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for _, group in groupby(numbers, key=lambda i: len(prompts[i])):
        batch = list(group)
        yield batch, [prompts[i] for i in batch]


def _generate(model: Any, prompts: list[TokenIds]) -> list[TokenIds]:
    """Greedy continuations; after their stop token they are padded with another special one."""
    import torch

    prompt = torch.tensor(prompts, device=model.device)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=MAX_OUTPUT_TOKENS,
        do_sample=False,
    )
    return [row[prompt.shape[1] :] for row in output.tolist()]
