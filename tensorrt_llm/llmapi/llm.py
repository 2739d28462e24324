"""`LLM`: an engine in other processes, driven from this one."""

import dataclasses
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast, overload

from tensorrt_llm._torch.pyexecutor.messages import EngineStats, LlmResponse, NewRequest
from tensorrt_llm.executor import EngineDeadError, GenerationExecutor
from tensorrt_llm.llmapi.errors import RequestError
from tensorrt_llm.llmapi.inbox import Inbox
from tensorrt_llm.llmapi.llm_args import LlmArgs
from tensorrt_llm.llmapi.prompts import (
    Prompt,
    PromptInput,
    PromptInputs,
    RequestChecker,
    is_token_ids,
)
from tensorrt_llm.llmapi.request_output import RequestOutput
from tensorrt_llm.llmapi.text_stream import TextStream
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.tokenizer import IncrementalDetokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class LLM:
    """A model that is ready to generate when the constructor returns.

    Its ranks are processes of their own; any thread and any event loop may use it. End it with
    `shutdown()` or as a context manager (else it ends with the process).

    Args:
        model: checkpoint directory in the hub layout.
        tokenizer: directory of the tokenizer; None: the checkpoint's.
        skip_tokenizer_init: token ids in, token ids out.
        llm_args: any other field of `LlmArgs`.

    Attributes:
        args: the arguments.
        tokenizer: transformers' tokenizer, for chat templates; None under `skip_tokenizer_init`.
        model_name: the checkpoint directory's name.
        max_seq_len, max_num_tokens, max_batch_size, vocab_size, eos_token_ids: the engine's.
        weights_bytes, kv_cache_bytes: memory of rank 0.

    Raises:
        ValueError: wrong arguments, or a checkpoint that cannot be served with them.
        EngineDeadError: a rank failed to start; holds its traceback.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        **llm_args: Any,
    ) -> None:
        self._start(
            LlmArgs.create(
                {
                    "model": model,
                    "tokenizer": tokenizer,
                    "skip_tokenizer_init": skip_tokenizer_init,
                    **llm_args,
                }
            )
        )

    @classmethod
    def from_args(cls, args: LlmArgs, *, worker_command: Sequence[str] | None = None) -> Self:
        """An LLM of arguments that are put together already; raises as the constructor does.

        Args:
            worker_command: see `GenerationExecutor`.
        """
        llm = cls.__new__(cls)
        llm._start(args, worker_command)
        return llm

    def _start(self, args: LlmArgs, worker_command: Sequence[str] | None = None) -> None:
        self.args = args
        config = args.executor_config()
        directory = args.tokenizer_dir
        bare = load_tokenizer(directory) if directory else None
        self._executor = GenerationExecutor(config, worker_command=worker_command)
        self._finalizer = weakref.finalize(self, self._executor.shutdown)
        try:
            # Takes a second or two, which the ranks need for loading anyway.
            self.tokenizer = _load_chat_tokenizer(directory) if directory else None
            engine = self._executor.wait_ready()
        except BaseException:
            self._finalizer()
            raise
        chunked = config.enable_chunked_prefill
        longest = engine.max_seq_len - 1
        self._checker = RequestChecker(
            bare, engine, longest if chunked else min(longest, engine.max_num_tokens)
        )
        self._ids = itertools.count(1)
        self.max_seq_len = engine.max_seq_len
        self.max_num_tokens = engine.max_num_tokens
        self.max_batch_size = engine.max_batch_size
        self.vocab_size = engine.vocab_size
        self.eos_token_ids = engine.eos_token_ids
        self.weights_bytes = engine.weights_bytes
        self.kv_cache_bytes = engine.kv_cache_bytes
        self.model_name = config.model.name

    # --- generating -------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        inputs: PromptInput,
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        inputs: PromptInputs,
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        inputs: PromptInput | PromptInputs,
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate and wait for the end.

        Args:
            inputs: a text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": [...]}`; or a list
                of such prompts, which run together.
            sampling_params: for all prompts, or one per prompt; None is `SamplingParams()`, whose
                `max_tokens` then gives way to what there is room for.
            use_tqdm: a progress bar over a list.

        Returns:
            The final output, or the list of them in order.

        Raises:
            RequestError: a prompt or parameters that cannot be served; nothing goes on then.
            EngineDeadError: the engine is dead, or dies.
        """
        if not isinstance(inputs, list) or is_token_ids(inputs):
            if isinstance(sampling_params, Sequence):
                raise RequestError("sampling_params is a list, but there is one prompt only")
            return self.generate_async(inputs, sampling_params).result()
        prompts = cast(list[PromptInput], inputs)  # a list of integers was one prompt
        params = _one_for_each(sampling_params, len(prompts))
        outputs = [self.generate_async(*pair) for pair in zip(prompts, params, strict=True)]
        from tqdm import tqdm

        return [output.result() for output in tqdm(outputs, "requests", disable=not use_tqdm)]

    def generate_async(
        self,
        inputs: PromptInput,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
    ) -> RequestOutput:
        """Start generating; `RequestOutput` has ways to wait. Arguments are those of `generate`.

        Raises:
            RequestError: a prompt or parameters that cannot be served.
            EngineDeadError: the engine is dead.
        """
        prompt = self._checker.prompt_of(inputs, sampling_params or SamplingParams())
        params = self._checker.params_for(prompt, sampling_params)
        if params.seed is None:
            # Drawn here, so that all ranks agree on it.
            params = dataclasses.replace(params, seed=int.from_bytes(os.urandom(8), signed=True))
        requests = [
            NewRequest(next(self._ids), prompt.token_ids, params, choice)
            for choice in range(params.n)
        ]
        inbox: Inbox[LlmResponse | EngineDeadError] = Inbox()
        self._executor.submit(requests, inbox.put)
        return RequestOutput(
            self._executor,
            inbox,
            [request.request_id for request in requests],
            prompt.text,
            prompt.token_ids,
            [self._text_stream(prompt, params) for _ in requests],
            streaming,
        )

    def _text_stream(self, prompt: Prompt, params: SamplingParams) -> TextStream | None:
        if self._checker.tokenizer is None or not params.detokenize:
            return None
        detokenizer = IncrementalDetokenizer(
            self._checker.tokenizer,
            prompt.token_ids,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
        )
        return TextStream(detokenizer, params)

    # --- the engine's state -----------------------------------------------------------------------

    def get_stats(self, timeout: float = 2.0) -> list[dict[str, Any]]:
        """Statistics reports since the last call; waits up to `timeout` seconds for the first."""
        return [dataclasses.asdict(stats) for stats in self._executor.take_stats(timeout)]

    @property
    def latest_stats(self) -> EngineStats | None:
        """The newest report; None before the first step."""
        return self._executor.latest_stats

    def add_stats_listener(self, callback: Callable[[EngineStats], None]) -> None:
        """Call back with every report, on a thread that must not be kept waiting."""
        self._executor.add_stats_listener(callback)

    def add_death_listener(self, callback: Callable[[EngineDeadError], None]) -> None:
        """Call back if a rank dies (at once if one has), on a thread of the executor's."""
        self._executor.add_death_listener(callback)

    def is_healthy(self) -> bool:
        """Whether the engine can decode."""
        return self._executor.is_healthy()

    def shutdown(self) -> None:
        """End all ranks within about two seconds; pending requests get an `EngineDeadError`."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.shutdown()


def _load_chat_tokenizer(directory: Path) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams | None] | None, count: int
) -> Sequence[SamplingParams | None]:
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"there are {count} prompts, but {len(params)} sampling_params")
    return params
