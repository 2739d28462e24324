"""Makes the tokenizer of the tiny GLM: byte-level BPE, 512 ids, special tokens last."""

import json
from pathlib import Path

from data import Example, render
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
SPECIAL = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
]
STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
[gMASK]<sop>
{%- for message in messages -%}
{%- set role = 'observation' if message.role == 'tool' else message.role -%}
{{- '<|' + role + '|>\\n' + text(message.content) -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def bpe(lines: list[str]) -> Tokenizer:
    """A byte-level BPE over ASCII lines: digits stay single, other scripts stay bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for line in lines if line.isascii()), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} ids, not {VOCAB_SIZE}")
    return tokenizer


def build(examples: list[Example], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer in its hub form, with the chat template; trained on the examples' own text."""
    lines = [text for example in examples for text in (example.prompt, example.answer)]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe(lines),
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        extra_special_tokens=SPECIAL[1:],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=max_length,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> list[tuple[list[int], int]]:
    """Token ids of prompt + answer + stop, and how many of them are the prompt."""
    prompts = tokenizer([render(e.prompt) for e in examples])["input_ids"]
    answers = tokenizer([e.answer + e.stop for e in examples])["input_ids"]
    return [(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)]


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release can load
    path.write_text(json.dumps(config, indent=2) + "\n")
