"""The request bodies of OpenAI's API, with TensorRT-LLM's extensions.

The models declare what is served. `UNSERVED` of each model accounts for every other field of
OpenAI's schema and TensorRT-LLM's extensions. docs/server.md is generated from both.
"""

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.serve.fields import Inert, Refused, RequestModel, Unserved, field_error

MAX_CHOICES = 128  # n, as in OpenAI's API
MAX_TOP_LOGPROBS = 20  # as in OpenAI's chat API
MAX_SEQUENCES = 1024  # prompts times n of one request
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's legacy default

_NO_BEAMS = "there is no beam search"
_NO_TOOLS = "tool calls are not parsed"
_TEXT_ONLY = "only text goes in and out"
_FOR_OPENAI = "it concerns OpenAI's own service"


def _text_to_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_text(value: object) -> bool:
    """True for text that is valid Unicode (JSON can smuggle in lone surrogates)."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode()


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _prompts(value: object) -> list[str | list[int]]:
    """The four forms of `prompt` as a list of prompts."""
    prompts: Any = [value] if _is_text(value) or _is_token_ids(value) else value
    if not isinstance(prompts, list) or not all(_is_text(p) or _is_token_ids(p) for p in prompts):
        raise ValueError("it must be text, a list of token ids, or a list of either")
    if not all(prompts):
        raise ValueError("a prompt must not be empty")
    return prompts


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stops = Annotated[list[str], BeforeValidator(_text_to_list, json_schema_input_type=str | list[str])]


def _token_id_keys(value: object) -> object:
    """JSON's keys are text."""
    if not isinstance(value, dict):
        return value
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in value):
        raise ValueError("its keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


Bias = Annotated[float, Field(ge=-100, le=100)]  # OpenAI's range
LogitBias = Annotated[
    dict[int, Bias], BeforeValidator(_token_id_keys, json_schema_input_type=dict[str, Bias])
]


class StreamOptions(RequestModel):
    """How a stream ends."""

    include_usage: bool | None = Field(None, description="send the token counts in a last chunk")
    UNSERVED: ClassVar[Unserved] = {
        "include_obfuscation": Inert("chunks are never padded"),
        "continuous_usage_stats": Refused("usage comes once, in the last chunk", (False,)),
    }


class SamplingRequest(RequestModel, ABC):
    """What both kinds of generation have in common."""

    model: str = Field(description="name of the served model; any other is a 404")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="choices per prompt; default 1")
    temperature: float | None = Field(None, description="0 is greedy; default 1")
    top_p: float | None = Field(None, description="nucleus of this probability; default 1")
    top_k: int | None = Field(None, description="only the k most likely tokens; default 0, all")
    min_p: float | None = Field(
        None, description="drop tokens below this share of the most likely one's probability"
    )
    seed: int | None = Field(None, description="same seed and prompt, same answer")
    presence_penalty: float | None = Field(None, description="-2 to 2; default 0")
    frequency_penalty: float | None = Field(None, description="-2 to 2; default 0")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="0.01 to 100; default 1"
    )
    logit_bias: LogitBias | None = Field(
        None, description="token id -> -100 to 100, added to its logit"
    )
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    min_tokens: int | None = Field(None, description="no end before this many tokens; default 0")
    stop: Stops | None = Field(None, description="text or list of texts that end the answer")
    stop_token_ids: list[int] | None = Field(None, description="token ids that end the answer")
    include_stop_str_in_output: bool | None = Field(
        None, description="keep the stop text in the answer; default false"
    )
    ignore_eos: bool | None = Field(
        None, description="the model's end tokens do not end the answer; default false"
    )
    skip_special_tokens: bool | None = Field(
        None, description="leave special tokens out of the text; default true"
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="separate special tokens by spaces in the text; default true"
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="keep only this many of the prompt's last tokens"
    )
    stream: bool | None = Field(None, description="answer as server-sent events; default false")
    stream_options: StreamOptions | None = Field(
        None, description="`{include_usage: true}` adds a last chunk with the usage"
    )

    # Fields above that are passed on under the same name.
    _SAMPLING: ClassVar[set[str]] = {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
    }

    UNSERVED: ClassVar[Unserved] = {
        "user": Inert(_FOR_OPENAI),
        "response_format": Refused("output is not constrained", ({"type": "text"},)),
        "use_beam_search": Refused(_NO_BEAMS, (False,)),
        "length_penalty": Refused(_NO_BEAMS, (1.0,)),
        "early_stopping": Refused(_NO_BEAMS, (False,)),
        "lora_request": Refused("there are no LoRA adapters"),
        "prompt_ignore_length": Refused("penalties look at the whole prompt", (0,)),
        "top_p_min": Refused("top_p does not decay", (0.0,)),
        "thinking_token_budget": Refused("thinking is not told apart from the answer"),
        "disaggregated_params": Refused("prefill and decode run in one server"),
        "conversation_params": Refused("requests do not share state"),
        "priority": Refused("requests are served first come, first served", (0,)),
    }

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            options = self.stream_options.model_dump()
            raise field_error("stream_options", options, "absent unless stream is true")
        return self

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for; raises ValueError naming a field out of its range."""
        given = self.model_dump(include=self._SAMPLING, exclude_none=True)
        return SamplingParams(**{"temperature": 1.0} | given | self._own_sampling())

    @abstractmethod
    def _own_sampling(self) -> dict[str, Any]:
        """The parameters that the two endpoints spell or default differently."""


class CompletionRequest(SamplingRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts = Field(description="text, token ids, or a list of either")
    echo: bool | None = Field(None, description="begin the answer with the prompt; default false")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="log probabilities of the chosen and this many most likely tokens",
    )
    best_of: int | None = Field(None, description="only equal to n, since all choices are returned")
    detokenize: bool | None = Field(
        None, description="false gives empty text and `token_ids` in each choice; default true"
    )
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add its special tokens to a text prompt; default true"
    )

    UNSERVED: ClassVar[Unserved] = {
        **SamplingRequest.UNSERVED,
        "suffix": Refused("text is only continued, not filled in"),
        "return_context_logits": Refused("logits do not leave the engine", (False,)),
    }

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.best_of not in (None, self.choices):
            raise field_error("best_of", self.best_of, f"equal to n ({self.choices})")
        if len(self.prompt) * self.choices > MAX_SEQUENCES:
            asked = f"{len(self.prompt)} prompts, n {self.choices}"
            raise field_error("prompt", asked, f"at most {MAX_SEQUENCES} sequences in all")
        if self.echo and self.detokenize is False:
            raise field_error("echo", self.echo, "absent when detokenize is false")
        return self

    def _own_sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens or DEFAULT_COMPLETION_TOKENS,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.logprobs if self.echo else None,
            "detokenize": self.detokenize is not False,
            "add_special_tokens": self.add_special_tokens is not False,
        }


class TextPart(RequestModel):
    """One part of a message's content."""

    type: Literal["text"] = Field(description="`text`")
    text: str = Field(description="the text")
    UNSERVED: ClassVar[Unserved] = {
        "image_url": Refused(_TEXT_ONLY),
        "input_audio": Refused(_TEXT_ONLY),
        "audio_url": Refused(_TEXT_ONLY),
        "video_url": Refused(_TEXT_ONLY),
        "file": Refused(_TEXT_ONLY),
        "refusal": Refused(_TEXT_ONLY),
        "prompt_cache_breakpoint": Inert(_FOR_OPENAI),
    }


def _text_to_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Content = Annotated[
    list[TextPart], BeforeValidator(_text_to_parts, json_schema_input_type=str | list[TextPart])
]


class Message(RequestModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="who speaks; `developer` is another word for `system`"
    )
    content: Content | None = Field(
        None, description="text or a list of `{type: text, text}`; null only for the assistant"
    )
    UNSERVED: ClassVar[Unserved] = {
        "name": Inert("chat templates know roles, not names"),
        "refusal": Refused(_TEXT_ONLY),
        "audio": Refused(_TEXT_ONLY),
        "annotations": Refused(_TEXT_ONLY, ([],)),
        "tool_calls": Refused(_NO_TOOLS, ([],)),
        "tool_call_id": Refused(_NO_TOOLS),
        "function_call": Refused(_NO_TOOLS),
        "reasoning_content": Refused("thinking is not told apart from the answer"),
    }

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise field_error("content", None, f"given for role {self.role!r}")
        return self

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content or [])}


class ChatCompletionRequest(SamplingRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, description="the conversation so far")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="OpenAI's newer name of max_tokens; wins when both are given"
    )
    logprobs: bool | None = Field(None, description="log probabilities of the answer's tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="and of this many most likely ones"
    )
    add_generation_prompt: bool | None = Field(
        None, description="end the prompt with the assistant's opening; default true"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template; unknown ones are a 400"
    )

    UNSERVED: ClassVar[Unserved] = {
        **SamplingRequest.UNSERVED,
        "metadata": Inert(_FOR_OPENAI),
        "store": Inert(_FOR_OPENAI),
        "service_tier": Inert(_FOR_OPENAI),
        "safety_identifier": Inert(_FOR_OPENAI),
        "prompt_cache_key": Inert(_FOR_OPENAI),
        "prompt_cache_retention": Inert(_FOR_OPENAI),
        "prompt_cache_options": Inert(_FOR_OPENAI),
        "parallel_tool_calls": Inert("there are no tool calls"),
        "tools": Refused(_NO_TOOLS, ([],)),
        "tool_choice": Refused(_NO_TOOLS, ("none",)),
        "functions": Refused(_NO_TOOLS, ([],)),
        "function_call": Refused(_NO_TOOLS, ("none",)),
        "modalities": Refused(_TEXT_ONLY, (["text"],)),
        "audio": Refused(_TEXT_ONLY),
        "web_search_options": Refused("the server reads nothing from the web"),
        "moderation": Refused("answers are not moderated"),
        "prediction": Refused("predicted outputs are not used"),
        "reasoning_effort": Refused("use chat_template_kwargs for what the template offers"),
        "verbosity": Refused("the model has no such setting"),
        "documents": Refused("put them into the messages", ([],)),
        "chat_template": Refused("start the server with --chat_template instead"),
        "prompt_token_ids": Refused("POST token ids to /v1/completions"),
        "prompt_token_ids_b64": Refused("POST token ids to /v1/completions"),
        "detokenize": Refused("a chat answer is text", (True,)),
        "add_special_tokens": Refused("the chat template writes them", (False,)),
    }

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", self.top_logprobs, "absent unless logprobs is true")
        return self

    def _own_sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "add_special_tokens": False,  # the template has written them already
        }
