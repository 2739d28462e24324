"""Writes the timelines of docs/decode_step.md from a run: `python docs/generate_decode_step.py`.

A tiny GLM with NVFP4 experts and an FP8 cache runs one decode step with drafts, and every operator
that the step calls is noted with the stream that it is queued on. A test compares the document with
such a run.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from tensorrt_llm._torch.attention.backends.sparse.dsa.params import full_indexer_layers
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16 import (
    decode,
    draft,
    streams,
)
from tensorrt_llm._torch.pyexecutor.messages import NewRequest
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor
from tensorrt_llm.llmapi.llm_args import LlmArgs
from tensorrt_llm.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "glm_tiny"
DOCUMENT = Path(__file__).parent / "decode_step.md"
DRAFTS = 2
CONTEXT = 40  # tokens, more than the tiny model's index_topk, so that its layers choose

Entry = tuple[str, str]  # (lane, what)

# Parts of the step by the method that runs them; a part's name is its place in the document.
PARTS: dict[str, tuple[type, str]] = {
    "begin": (decode.DecodeTarget, "begin"),
    "layer": (decode.DecodeTarget, "layer"),
    "logits": (decode.DecodeTarget, "verify_logits"),
    "accept": (draft.MTPDraftWorker, "accept_draft_tokens"),
    "first draft": (draft.DraftLoop, "first_step"),
    "later draft": (draft.DraftLoop, "later_step"),
    "between drafts": (draft.DraftLoop, "score"),
    "drafts": (draft.DraftLoop, "run"),
}


# GLM-5.2: the first three layers are dense and full; after them every fourth is full.
GLM_5_2_LAYERS = 78
GLM_5_2_DRAFTS = 7
FULL = full_indexer_layers(GLM_5_2_LAYERS, indexer_types=None, pattern=None, freq=4, offset=3)
DENSE = 3
LAYER_COUNTS = {
    "full-indexer dense layer": DENSE,
    "full-indexer moe layer": sum(FULL) - DENSE,
    "shared moe layer": GLM_5_2_LAYERS - sum(FULL),
}


class Recorder(TorchDispatchMode):
    """Notes operators that compute, part by part; views and allocations are no work."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, list[Entry]] = {}
        self.running: list[list[Entry]] = [[]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_free(func):
            self.note(streams.current_lane(), _told(func))
        return func(*args, **(kwargs or {}))

    def note(self, lane: str, what: str) -> None:
        self.running[-1].append((lane, what))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs within it belongs to the part, and not to those around it."""
        self.running.append([])
        try:
            yield
        finally:
            entries = self.running.pop()
            self.parts.setdefault(name, entries)


def _is_free(func: Any) -> bool:
    return func.is_view or "empty" in func.__name__ or func.__name__.startswith(("detach", "lift"))


def _told(func: Any) -> str:
    namespace, name = func.name().split("::")
    return name.split(".")[0] if namespace == "trtllm" else f"torch {name.split('.')[0]}"


def recorded_step() -> dict[str, list[Entry]]:
    """Operators of the parts of one decode step, in the order in which they are queued."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "nvfp4"
        _export_nvfp4(checkpoint)
        engine = _engine(checkpoint)
        engine.add_requests([_request()])
        engine.step()  # the prompt
        engine.step()  # a decode step, so that buffers are there
        recorder = Recorder()
        with _parts_noted(recorder), recorder:
            engine.step()
    return recorder.parts


def _export_nvfp4(out: Path) -> None:
    script = [sys.executable, str(TINY / "export.py"), "--format", "nvfp4", "--out", str(out)]
    subprocess.run([*script, "--model", str(TINY / "checkpoint")], check=True)


def _engine(checkpoint: Path) -> PyExecutor:
    args = LlmArgs(
        model=checkpoint,
        device="cpu",
        modeling_v2="require",
        max_batch_size=1,
        disable_overlap_scheduler=True,
        kv_cache_config={"dtype": "fp8", "max_tokens": 256},
        speculative_config={"decoding_type": "MTP", "num_nextn_predict_layers": DRAFTS},
    )
    return create_py_executor(args.executor_config(), lambda _block: [], lambda _news: None)


def _request() -> NewRequest:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    return NewRequest(0, list(range(5, 5 + CONTEXT)), params)


@contextmanager
def _parts_noted(recorder: Recorder) -> Iterator[None]:
    """Every part's method enters its part; a join notes whom it waits for."""
    with ExitStack() as stack:
        joined = patch.object(
            streams.SideStream, "join", lambda s: recorder.note("main", f"wait: {s.name}")
        )
        stack.enter_context(joined)
        for name, (owner, method) in PARTS.items():
            noted = _noted(recorder, name, getattr(owner, method))
            stack.enter_context(patch.object(owner, method, noted))
        yield


def _noted(recorder: Recorder, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.part(_layer_kind(*args) if name == "layer" else name):
            return method(self, *args, **kwargs)

    return noted


def _layer_kind(_i: int, layer: Any, *_: Any) -> str:
    chooses = "shared" if layer.attention.indexer is None else "full-indexer"
    return f"{chooses} {'dense' if isinstance(layer.mlp, decode.DenseOperands) else 'moe'} layer"


def timeline(entries: list[Entry]) -> str:
    """A table with one column per stream and one row per operator, first come, first row."""
    lanes = list(dict.fromkeys(["main", *(lane for lane, _ in entries)]))
    rows = [["" if lane != own else f"`{what}`" for lane in lanes] for own, what in entries]
    lines = [lanes, ["---"] * len(lanes), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def calls(parts: dict[str, list[Entry]]) -> str:
    """How often GLM-5.2 calls each operator in one step with `GLM_5_2_DRAFTS` drafts."""
    counts: Counter[str] = Counter()
    for name, entries in parts.items():
        for _, what in entries:
            if not what.startswith("wait"):
                counts[what] += _repeats(name, what)
    rows = [f"| `{what}` | {count} |" for what, count in counts.most_common()]
    total = f"| all | {counts.total()} |"
    return "\n".join(["| operator | calls |", "| --- | --- |", *rows, total])


def _repeats(part: str, what: str) -> int:
    """Of a part of the recorded step, in GLM-5.2's."""
    if part in LAYER_COUNTS:
        return LAYER_COUNTS[part]
    later = GLM_5_2_DRAFTS - 1
    return later if part in ("later draft", "between drafts") or "ehproj_table" in what else 1


def filled(text: str, parts: dict[str, list[Entry]]) -> str:
    """`text` with every timeline brought up to date.

    Raises:
        ValueError: a part of the step has no place in the text.
    """
    tables = {name: timeline(entries) for name, entries in parts.items()}
    for name, table in {**tables, "calls": calls(parts)}.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"the document has {count} places for {name!r}; it must be 1")
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text(), recorded_step()))
