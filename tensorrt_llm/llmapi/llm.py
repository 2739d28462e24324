"""`LLM`: an engine in other processes, driven from this one."""

import dataclasses
import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from tokenizers import Tokenizer

from tensorrt_llm._torch.pyexecutor.messages import EngineStats, LlmResponse, NewRequest
from tensorrt_llm.executor import EngineDeadError, GenerationExecutor
from tensorrt_llm.llmapi.errors import RequestError
from tensorrt_llm.llmapi.inbox import Inbox
from tensorrt_llm.llmapi.llm_args import LlmArgs
from tensorrt_llm.llmapi.prompts import Prompt, PromptInput, RequestChecker, is_token_ids
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
        self.model_name = config.model.name
