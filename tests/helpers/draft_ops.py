"""What the tests of the ops at a draft step's end share: a small draft model that splits over
ranks, logits that a careless argmax gets wrong, and the plain formulas."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from helpers.numerics import UNIT_ROUNDOFF, Float64, gamma, nearest_bf16, to_numpy
from tensorrt_llm._torch.distributed import Payload, lamport_workspace
from tensorrt_llm.mapping import Mapping

VOCAB, HIDDEN, DRAFTS, EPS = 40, 48, 7, 1e-5
NAN, INF = math.nan, math.inf

# Of one row: places over a row of one value. 40 ids are 10 on each of 4 ranks.
ROWS: dict[str, tuple[float, dict[int, float]]] = {
    "all equal": (1.5, {}),
    "ties across ranks": (0.0, {13: 5.0, 27: 5.0, 33: 5.0}),
    "ties within a rank": (0.0, {38: 5.0, 31: 5.0}),
    "all -inf": (-INF, {}),
    "one finite": (-INF, {39: -3.0}),
    "inf": (0.0, {25: INF, 39: INF}),
    "NaN on one rank": (0.0, {3: INF, 35: NAN, 38: NAN}),
    "NaN on all ranks": (-INF, {9: NAN, 11: NAN, 21: -NAN, 30: NAN}),
    "negative NaN": (0.0, {0: INF, 12: math.copysign(NAN, -1.0), 20: 7.0}),
    "zeros of both signs": (-1.0, {14: -0.0, 22: 0.0, 36: 0.0}),
}
# (position, limit, next position)
POSITIONS = (
    (5, 100, 6),
    (98, 100, 99),
    (99, 100, -1),
    (100, 100, -1),
    (0, 1, -1),
    (-1, 100, -1),
    (-7, 100, -1),
    (-1, 0, -1),
)


def special_rows(dtype: torch.dtype) -> torch.Tensor:
    """[len(ROWS), VOCAB]."""
    x = torch.empty(len(ROWS), VOCAB)
    for row, (fill, places) in zip(x, ROWS.values(), strict=True):
        row.fill_(fill)
        for place, value in places.items():
            row[place] = value
    return x.to(dtype)


def first_largest(row: list[float]) -> int:
    """torch.argmax's order by a loop: NaN above all, the first of equals."""
    best = 0
    for i, value in enumerate(row):
        nan, best_is_nan = math.isnan(value), math.isnan(row[best])
        if (nan and not best_is_nan) or (not best_is_nan and value > row[best]):
            best = i
    return best


def shard(x: torch.Tensor, mapping: Mapping) -> torch.Tensor:
    """This rank's equal part of the last dimension."""
    return x.chunk(mapping.tp_size, dim=-1)[mapping.tp_rank].contiguous()


def exchange_workspace(mapping: Mapping, tag: str, size: int) -> torch.Tensor:
    return lamport_workspace(mapping, tag, Payload.EXCHANGE, size).descriptor


def rms_norm(x: Float64, weight: Float64) -> Float64:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + EPS) * weight


def norm_bounds(x: torch.Tensor, weight: torch.Tensor) -> tuple[Float64, Float64]:
    """Lowest and highest value of each element of a norm in fp32 that is rounded once: the mean of
    HIDDEN squares, root and two products are below gamma(HIDDEN)."""
    exact = rms_norm(to_numpy(x), to_numpy(weight))
    off = gamma(x.shape[-1]) * np.abs(exact)
    if x.dtype == torch.bfloat16:
        return nearest_bf16(exact - off), nearest_bf16(exact + off)
    return exact - off, exact + off


@dataclass(frozen=True)
class DraftModel:
    """What stands around the MTP layer, whole. Weights [outputs, inputs] in the activation dtype.

    Attributes:
        embed, head: [VOCAB, HIDDEN].
        eh_proj: [HIDDEN, 2 * HIDDEN].
        enorm, hnorm, input_norm: [HIDDEN].
    """

    embed: torch.Tensor
    head: torch.Tensor
    eh_proj: torch.Tensor
    enorm: torch.Tensor
    hnorm: torch.Tensor
    input_norm: torch.Tensor

    @classmethod
    def random(cls, dtype: torch.dtype) -> "DraftModel":
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        norms = (1 + 0.1 * draw(HIDDEN) for _ in range(3))
        return cls(draw(VOCAB, HIDDEN), draw(VOCAB, HIDDEN), draw(HIDDEN, 2 * HIDDEN), *norms)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, VOCAB], each formed from its own row of the head alone."""
        return (hidden.double() @ self.head.double().T).to(hidden.dtype)

    def eh_proj_input(self, token: int, hidden: torch.Tensor) -> Float64:
        """fp64 [1, 2 * HIDDEN], not rounded."""
        embedded = to_numpy(self.embed[token : token + 1])
        halves = ((embedded, self.enorm), (to_numpy(hidden), self.hnorm))
        return np.concatenate([rms_norm(x, to_numpy(w)) for x, w in halves], axis=1)

    def eh_proj_bounds(self, token: int, hidden: torch.Tensor) -> tuple[Float64, Float64]:
        """Lowest and highest value of eh_proj's outputs [1, HIDDEN] by table and hidden half.

        Either half is normed and summed in fp32, and the halves are added: below gamma(3 HIDDEN)
        of the sum of magnitudes. In bf16 each normed half is rounded before its products (one unit
        of roundoff of that sum), the table's row after them (another one, of a half at most), and
        the whole in the end.
        """
        row, matrix = self.eh_proj_input(token, hidden), to_numpy(self.eh_proj)
        exact, size = row @ matrix.T, np.abs(row) @ np.abs(matrix).T
        unit = UNIT_ROUNDOFF[self.embed.dtype]
        off = (gamma(3 * HIDDEN) + 2.01 * unit) * size
        off = off + unit * (np.abs(exact) + off)
        return exact - off, exact + off

    def layer(self, normed: torch.Tensor, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Stands in for attention, experts and norms: the next hidden states, which depend on all
        of its arguments and hardly magnify an error in them."""
        return torch.sin(normed + x / HIDDEN + positions.unsqueeze(1))

    def plain_loop(
        self, hidden: torch.Tensor, positions: torch.Tensor, limits: torch.Tensor
    ) -> tuple[list[list[int]], Float64, Float64]:
        """DRAFTS steps over the whole vocabulary and the whole eh_proj, in fp64.

        Args:
            hidden: [rows, HIDDEN], the first step's.
            positions, limits: int64 [rows].

        Returns:
            (tokens [rows][DRAFTS], hidden states [DRAFTS, rows, HIDDEN], how far the largest logit
            is above the next one [DRAFTS, rows]).
        """
        h, tokens, seen, gaps = hidden.double(), [], [], []
        for _ in range(DRAFTS):
            logits = to_numpy(h) @ to_numpy(self.head).T
            tokens.append([first_largest(row.tolist()) for row in logits])
            seen.append(to_numpy(h))
            gaps.append(np.diff(np.sort(logits, axis=1)[:, -2:], axis=1)[:, 0])
            rows = [
                self.eh_proj_input(t, row) for t, row in zip(tokens[-1], h.split(1), strict=True)
            ]
            x = np.concatenate(rows) @ to_numpy(self.eh_proj).T
            normed = rms_norm(x, to_numpy(self.input_norm))
            positions = torch.tensor(
                [
                    p + 1 if p >= 0 and p + 1 < limit else -1
                    for p, limit in zip(positions.tolist(), limits.tolist(), strict=True)
                ]
            )
            h = self.layer(torch.from_numpy(normed), torch.from_numpy(x), positions)
        by_row = [list(row) for row in zip(*tokens, strict=True)]
        return by_row, np.stack(seen), np.stack(gaps)
