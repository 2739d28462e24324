"""What draft steps after the first need of eh_proj, computed once after the weights are loaded.

eh_proj [enorm(embed(t)) | hnorm(h)] is a sum of a half that depends on the token alone and one that
depends on the hidden state alone. The first is a table over the vocabulary, which every rank holds
for its shard of the LM head; of the second each rank computes an equal part of the outputs
(glm_draft_hidden_half).
"""

import torch

from tensorrt_llm._torch.modeling_v2.catalog._op import true_fp32_matmul

from .draft_glue_rmsnorm_cat import draft_glue_rmsnorm_cat

CHUNK_TOKENS = 1024  # bounds the fp32 intermediates


@torch.no_grad()
def draft_token_table(
    embed_table: torch.Tensor,
    enorm_weight: torch.Tensor,
    eh_proj_weight: torch.Tensor,
    eps: float,
    tokens: range,
) -> torch.Tensor:
    """round(enorm(embed_table[t]) @ eh_proj_weight[:, :hidden].T) for the tokens of a shard.

    Args:
        embed_table: activation dtype [vocabulary, hidden].
        enorm_weight: activation dtype [hidden].
        eh_proj_weight: activation dtype [hidden, 2 * hidden], whole; its left half is the
            embedding's.
        eps: of enorm.
        tokens: those whose logits this rank computes.

    Returns:
        activation dtype [len(tokens), hidden]: the normed row is rounded (it is
        glm_draft_glue_rmsnorm_cat's), its products are summed in fp32 and rounded once.

    Raises:
        ValueError: tokens that the embedding table does not have.
    """
    vocabulary, hidden = embed_table.shape
    if not 0 <= tokens.start < tokens.stop <= vocabulary:
        raise ValueError(
            f"the shard is {tokens}; the embedding table has the ids [0, {vocabulary})"
        )
    half = eh_proj_weight[:, :hidden].float()
    table = embed_table.new_empty(len(tokens), hidden)
    for out, ids in zip(
        table.split(CHUNK_TOKENS),
        torch.arange(tokens.start, tokens.stop, device=table.device).split(CHUNK_TOKENS),
        strict=True,
    ):
        rows = embed_table[ids]  # stand in for the hidden half, which this window does not read
        normed = draft_glue_rmsnorm_cat(
            ids, embed_table, rows, enorm_weight, enorm_weight, eps, 0, hidden
        )
        with true_fp32_matmul():
            out.copy_(normed.float() @ half.T)
    return table


@torch.no_grad()
def draft_hidden_half_weight(eh_proj_weight: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows that glm_draft_hidden_half takes on this rank.

    Args:
        eh_proj_weight: [hidden, 2 * hidden], whole.

    Returns:
        [hidden / ranks, hidden], contiguous: rows [rank * hidden / ranks, ...) of the right half.

    Raises:
        ValueError: a hidden size that the ranks do not divide.
    """
    hidden = eh_proj_weight.shape[0]
    if hidden % ranks:
        raise ValueError(f"the hidden size is {hidden}, which {ranks} ranks do not divide")
    part = hidden // ranks
    return eh_proj_weight[rank * part : (rank + 1) * part, hidden:].contiguous()
