"""Sizes of DeepSeek sparse attention, and which layers own an indexer."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DSAParams:
    """Names as in TensorRT-LLM's `DSAParams`.

    Args:
        index_n_heads, index_head_dim: shape of the index queries.
        index_topk: keys that attention reads per token, at most.
    """

    index_n_heads: int
    index_head_dim: int
    index_topk: int


def full_indexer_layers(
    num_layers: int,
    *,
    indexer_types: Sequence[str] | None = None,
    pattern: str | None = None,
    freq: int = 1,
    offset: int = 2,
) -> tuple[bool, ...]:
    """For each layer, whether it owns an indexer (True) or reuses the nearest earlier selection.

    Precedence as in transformers: `indexer_types`, then `index_topk_pattern` ("F" / "S" per
    layer), then layer i is full iff max(i - offset + 1, 0) % freq == 0.

    Raises:
        ValueError: a list of another length or an unknown mark, a frequency below 1, or a first
            layer that has nothing to reuse.
    """
    if indexer_types is not None:
        full = _marks(indexer_types, {"full": True, "shared": False}, "indexer_types", num_layers)
    elif pattern is not None:
        full = _marks(pattern, {"F": True, "S": False}, "index_topk_pattern", num_layers)
    elif freq < 1:
        raise ValueError(f"index_topk_freq is {freq}; it must be at least 1")
    else:
        full = tuple(max(i - offset + 1, 0) % freq == 0 for i in range(num_layers))
    if full and not full[0]:
        raise ValueError(
            "layer 0 is marked as a shared indexer layer, but no earlier layer has a selection"
        )
    return full


def _marks(
    values: Sequence[str], meaning: dict[str, bool], field: str, num_layers: int
) -> tuple[bool, ...]:
    if len(values) != num_layers:
        raise ValueError(f"{field} has {len(values)} entries; num_hidden_layers is {num_layers}")
    unknown = sorted(set(values) - set(meaning))
    if unknown:
        raise ValueError(f"{field} contains {unknown}; known marks are {sorted(meaning)}")
    return tuple(meaning[v] for v in values)
