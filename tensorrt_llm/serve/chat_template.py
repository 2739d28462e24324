"""From a conversation to the prompt text, by the model's own template."""

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensorrt_llm.serve.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTemplate:
    """The template of `tokenizer`, or `source` (Jinja) in its place."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", source: str | None) -> None:
        self._tokenizer = tokenizer
        self._source = source or tokenizer.chat_template
        own = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {"messages", *own}

    def render(
        self,
        messages: list[dict[str, str]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text.

        Raises:
            ApiError: 400; there is no template, it has no such variable, or it rejects the input.
        """
        if self._source is None:
            raise ApiError(400, "the model has no chat template; start with --chat_template")
        for name in variables:
            self._check_variable(name)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    chat_template=self._source,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **variables,
                )
            )
        except (
            Exception
        ) as error:  # Jinja runs on the client's values, so any failure is about those
            raise ApiError(
                400, f"the chat template does not accept the messages: {error}", param="messages"
            ) from None

    def _check_variable(self, name: str) -> None:
        used = re.search(rf"\b{re.escape(name)}\b", self._source or "") is not None
        if name in self._reserved or not name.isidentifier() or not used:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is no variable of the chat template",
                param=f"chat_template_kwargs.{name}",
            )
