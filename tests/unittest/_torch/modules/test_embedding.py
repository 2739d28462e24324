"""Embedding, LM head and the rows that get logits, on one rank and on real ones."""

import torch
from helpers.engine import run_ranks
from helpers.weights import fill, random_weights

from tensorrt_llm._torch.modules.embedding import Embedding, LMHead
from tensorrt_llm._torch.modules.logits_processor import LogitsProcessor
from tensorrt_llm.mapping import Mapping

VOCAB, HIDDEN = 48, 16
CPU = torch.device("cpu")


def make_head(mapping: Mapping, dtype: torch.dtype = torch.float32) -> LMHead:
    head = LMHead(VOCAB, HIDDEN, mapping, dtype, CPU)
    fill(head.weight_specs("lm_head"), random_weights(head.weight_specs("lm_head")))
    return head


def some_rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)


def test_embedding_looks_rows_up_and_is_whole_on_every_rank() -> None:
    embedding = Embedding(VOCAB, HIDDEN, torch.float32, CPU)
    [spec] = embedding.weight_specs("embed")
    assert (spec.rows, spec.cols) == (None, None)
    fill([spec], {"embed.weight": torch.arange(VOCAB * HIDDEN).view(VOCAB, HIDDEN).float()})
    rows = embedding(torch.tensor([3, 0, 3]))
    assert rows[:, 0].tolist() == [3 * HIDDEN, 0, 3 * HIDDEN]


def test_ranks_gather_the_logits_of_one_rank() -> None:
    """Both ranks get all of the vocabulary, bit for bit the same, in fp32 also from bf16."""
    answers = run_ranks(2, _logits_on_rank)
    assert all(torch.equal(*pair) for pair in zip(*answers, strict=True))
    for dtype, logits in zip((torch.float32, torch.bfloat16), answers[0], strict=True):
        assert logits.dtype == torch.float32
        whole = make_head(Mapping(), dtype)(some_rows(dtype))
        # The two may sum in another order, never by more than a few roundings of the dtype.
        torch.testing.assert_close(logits.to(dtype), whole.to(dtype))


def _logits_on_rank(mapping: Mapping) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [make_head(mapping, d)(some_rows(d)) for d in (torch.float32, torch.bfloat16)]


def test_logits_of_the_asked_rows_or_of_all() -> None:
    head, hidden, choose = make_head(Mapping()), some_rows(), torch.tensor([4, 1])
    processor = LogitsProcessor()
    everything = head(hidden)
    torch.testing.assert_close(processor(hidden, head, choose), everything[choose])
    assert torch.equal(processor(hidden, head, None), everything)
    assert torch.equal(processor(hidden, head, choose, return_context_logits=True), everything)
