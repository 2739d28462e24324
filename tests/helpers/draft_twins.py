"""Both draft loops from one state in every step of a running engine, and drafts by a script."""

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from helpers.engine import generate
from tensorrt_llm._torch.attention.backends.interface import KVCacheParams
from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import INDEX_KEY, KEY
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.speculative.interface import SpecOutputs
from tensorrt_llm._torch.speculative.mtp import MTPEagleWorker

ROLES = (KEY, INDEX_KEY)
PLAIN_STATE = (list, int, bool, KVCacheParams)


@dataclass(frozen=True)
class TwinStep:
    """A step that took the fast loop, and what the built-in one makes of the same state.

    Attributes:
        short: the step chose no keys.
        position: of the last accepted token's row, -1 past the request's end.
        limit: tokens that the request has room for.
    """

    short: bool
    position: int
    limit: int
    fast: SpecOutputs
    builtin: SpecOutputs

    @property
    def count(self) -> int:
        """Tokens that counted."""
        return int(self.builtin.new_tokens_lens)

    @property
    def usable(self) -> int:
        """Drafts that may still become tokens: the first follows the token after `position`."""
        room = self.limit - self.position - 2 if self.position >= 0 else 0
        return max(0, min(room, self.builtin.next_draft_tokens.shape[1]))


class Twins:
    """Hangs on an engine's worker: every fast step of one request runs the built-in loop too.

    The engine goes on with the fast loop's cache, and checks on the way that the loop leaves the
    metadata alone and writes only the verify rows of the MTP layer.

    Attributes:
        steps: all fast steps so far.
    """

    def __init__(self, executor: PyExecutor) -> None:
        self.executor, self.steps = executor, list[TwinStep]()
        self.worker = executor.model_engine.worker
        draft_len = self.worker.max_draft_len
        self.builtin = MTPEagleWorker(draft_len, executor.config.mapping, index_share=True)
        self._fast, self.worker.forward = self.worker.forward, self._forward
        self._script: list[int] | None = None

    def follow(
        self, prompt: list[int], answer: list[int], new_tokens: int, accepts: Iterable[int]
    ) -> list[int]:
        """Generate greedily with drafts of which the steps accept `accepts`, over and over.

        Args:
            answer: the right one, by two steps' rows longer than what is to come.
        """
        assert len(answer) >= new_tokens + 2 * (1 + self.worker.max_draft_len)
        self._script, self._accepts = prompt + answer, itertools.cycle(accepts)
        return generate(self.executor, [prompt], new_tokens)[0]

    def _forward(self, *args: Any) -> SpecOutputs:
        metadata = args[3]
        positions, before = metadata.position_ids.clone(), metadata_state(metadata)
        pools = self._pools()
        outputs = self._fast(*args)
        rows = metadata.last_accepted_rows(outputs.new_tokens_lens)
        position = int(positions[rows][-1])
        if self.worker.draft_path == "fast":
            assert_state(metadata_state(metadata), before)
            self._check_writes(metadata, pools)
            builtin = self._run_builtin(args, pools)
            limit, short = int(metadata.kv_limits_cuda[0]), metadata.skip_indexer_for_gen_reqs
            self.steps.append(TwinStep(short, position, limit, outputs, builtin))
        return outputs if self._script is None else self._scripted(outputs, position)

    def _run_builtin(self, args: tuple[Any, ...], pools: dict[str, torch.Tensor]) -> SpecOutputs:
        """From the pools as they were; afterwards they are as the fast loop has left them."""
        written = self._pools()
        self._set_pools(pools)
        outputs = self.builtin.forward(*args)
        self._set_pools(written)
        return outputs

    def _scripted(self, outputs: SpecOutputs, position: int) -> SpecOutputs:
        """The same with drafts of which exactly the script's next number is right."""
        script, first = self._script, position + 2
        if script is None or position < 0:  # past the end, where no draft counts
            return outputs
        right = next(self._accepts)
        drafts = [token ^ (i >= right) for i, token in enumerate(script[first:])]
        taken = torch.tensor([drafts[: self.worker.max_draft_len]])
        last = outputs.next_new_tokens[:, :1]
        return replace(
            outputs, next_draft_tokens=taken, next_new_tokens=torch.cat([last, taken], dim=1)
        )

    def _check_writes(self, metadata: Any, before: dict[str, torch.Tensor]) -> None:
        """Nothing but the verify rows of the MTP layer has changed since `before`."""
        manager = self.executor.kv_cache_manager
        layer, size = self.worker.loop.layer, manager.tokens_per_block
        inside = metadata.position_ids >= 0
        keys = metadata.slot_mapping[inside] + manager.layer_slot(KEY, layer) * size
        pages = metadata.index_block * manager.pool(INDEX_KEY).shape[1]
        pages += manager.layer_slot(INDEX_KEY, layer)
        index_keys = (pages * size + metadata.index_offset)[inside]
        for role, allowed in ((KEY, keys), (INDEX_KEY, index_keys)):
            changed = changed_rows(before[role], manager.pool(role), row_bytes(metadata, role))
            outside = changed - set(allowed.tolist())
            assert not outside, f"the draft loop wrote the {role} rows {sorted(outside)}"

    def _pools(self) -> dict[str, torch.Tensor]:
        return {role: self.executor.kv_cache_manager.pool(role).clone() for role in ROLES}

    def _set_pools(self, pools: dict[str, torch.Tensor]) -> None:
        for role, pool in pools.items():
            self.executor.kv_cache_manager.pool(role).copy_(pool)


def metadata_state(metadata: Any) -> dict[str, Any]:
    """A copy of all that the metadata says of its step."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in vars(metadata).items()
        if isinstance(value, (torch.Tensor, *PLAIN_STATE))
    }


def assert_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises AssertionError naming what differs."""
    assert state.keys() == expected.keys()
    differing = [
        name
        for name, value in expected.items()
        if not (
            torch.equal(state[name], value)
            if isinstance(value, torch.Tensor)
            else state[name] == value
        )
    ]
    assert not differing, differing


def row_bytes(metadata: Any, role: str) -> int:
    """Of one token of one layer."""
    return metadata.layout.key_bytes if role == KEY else metadata.layout.index_key_bytes


def changed_rows(before: torch.Tensor, after: torch.Tensor, width: int) -> set[int]:
    """Which rows of `width` bytes differ; a pool without scales is plain rows."""
    changed = (before.view(-1, width) != after.view(-1, width)).any(dim=1)
    return set(changed.nonzero().flatten().tolist())
