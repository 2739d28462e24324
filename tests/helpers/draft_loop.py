"""One speculative step of the draft loop around a scripted draft model."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.dsa import StepSequence, make_manager, set_step
from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from tensorrt_llm._torch.attention.backends.sparse.dsa.params import DSAParams
from tensorrt_llm._torch.speculative.interface import SpecMetadata, SpecOutputs
from tensorrt_llm._torch.speculative.mtp import MTPEagleWorker
from tensorrt_llm._torch.speculative.mtp_tail_trim import mtp_tail_trim_enabled
from tensorrt_llm.mapping import Mapping

HIDDEN, VOCAB = 16, 40
LAYOUT = DSACacheLayout(8, 16, torch.float32, fp8=False)
CONTEXTS = [StepSequence(1, 0, 5), StepSequence(2, 4, 3)]
CACHED = (9, 6, 11)  # of the generations, the last of which has little room left


class ScriptedDraftModel:
    """Mixes all that a draft step is given into its hidden states, and remembers it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embeddings, self.head = torch.randn(2, VOCAB, HIDDEN, generator=generator)
        self.seen: list[tuple[torch.Tensor, ...]] = []

    @property
    def lm_head(self) -> "ScriptedDraftModel":
        return self

    def local_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.head.t()

    def __call__(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attn_metadata: DSAtrtllmAttentionMetadata,
    ) -> torch.Tensor:
        kv_lens = attn_metadata.kv_lens_cuda[: attn_metadata.num_seqs]
        given = (input_ids, hidden_states, position_ids, kv_lens)
        self.seen.append(tuple(tensor.clone() for tensor in given))
        mixed = F.embedding(input_ids, self.embeddings) + 0.1 * position_ids.unsqueeze(1)
        return torch.tanh(hidden_states + mixed)


class RecordedMetadata(DSAtrtllmAttentionMetadata):
    """Remembers each time that the loop moved its rows."""

    num_moves = 0

    def advance_draft_rows(self, positions: torch.Tensor) -> None:
        self.num_moves += 1
        super().advance_draft_rows(positions)


class HiddenGathers(TorchDispatchMode):
    """Counts the launches that pick rows of hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.index.Tensor:
            self.count += args[0].shape[1:] == (HIDDEN,)
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Loop:
    """What one speculative step gave, and how."""

    outputs: SpecOutputs
    draft_model: ScriptedDraftModel
    metadata: RecordedMetadata
    gathers: int


def step_metadata(draft_len: int) -> RecordedMetadata:
    """Two contexts, three generations and a padding row, on real pools."""
    manager = make_manager(LAYOUT)
    rows = 1 + draft_len
    generations = [StepSequence(3 + i, cached, rows) for i, cached in enumerate(CACHED)]
    for sequence in CONTEXTS + generations:
        manager.add_request(sequence.request_id)
        assert manager.resize(sequence.request_id, sequence.cached + sequence.new + draft_len)
    metadata = RecordedMetadata(
        6,
        128,
        manager,
        torch.device("cpu"),
        params=DSAParams(2, 16, 8),
        layout=LAYOUT,
        max_draft_len=draft_len,
        trim=mtp_tail_trim_enabled(),
    )
    set_step(metadata, CONTEXTS, generations)
    metadata.seq_lens.append(rows)
    metadata.kv_cache_params.num_cached_tokens_per_seq.append(-rows)
    metadata.kv_limits = [64, 64, 64, 64, CACHED[-1] + 2, 0]
    metadata.prepare()
    return metadata


def run_loop(draft_len: int, index_share: bool) -> Loop:
    """One step whose generations have 0, all and half of their drafts accepted."""
    metadata, draft_model = step_metadata(draft_len), ScriptedDraftModel()
    worker = MTPEagleWorker(draft_len, Mapping(), index_share)
    generator = torch.Generator().manual_seed(draft_len)
    contexts, generations = len(CONTEXTS), len(CACHED) + 1
    targets = torch.randint(VOCAB, (generations, 1 + draft_len), generator=generator)
    drafts = targets[:, :draft_len].clone()
    drafts[0, 0] += 1
    drafts[2, draft_len // 2] += 1
    inputs = torch.randint(VOCAB, (metadata.num_tokens,), generator=generator)
    hidden_states = torch.randn(metadata.num_tokens, HIDDEN, generator=generator)
    spec_metadata = SpecMetadata(
        max_draft_len=draft_len,
        num_contexts=contexts,
        num_generations=generations,
        draft_tokens=drafts,
        context_next_tokens=torch.tensor([-1, 7]),
        slot_ids=torch.arange(contexts + generations),
    )
    tokens = torch.cat([torch.tensor([3, 4]), targets.flatten()])
    with HiddenGathers() as gathers:
        outputs = worker.forward(
            inputs, hidden_states, tokens, metadata, spec_metadata, draft_model
        )
    return Loop(outputs, draft_model, metadata, gathers.count)
