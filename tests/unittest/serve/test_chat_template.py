"""Conversations become prompts by the model's template or the one given in its place."""

import pytest
from helpers.fake_llm import chat_tokenizer

from tensorrt_llm.serve.chat_template import ChatTemplate
from tensorrt_llm.serve.errors import ApiError

USER = [{"role": "user", "content": "hi"}]


def test_the_tokenizers_own_template() -> None:
    template = ChatTemplate(chat_tokenizer(), source=None)
    assert template.render(USER, True, {}) == "<|user|>hi<|assistant|>"
    assert template.render(USER, False, {}) == "<|user|>hi"


def test_another_template_and_its_variables() -> None:
    template = ChatTemplate(chat_tokenizer(), source="{{ messages[0].content }} {{ style }}")
    assert template.render(USER, True, {"style": "short"}) == "hi short"


def test_no_template_at_all() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ApiError, match="--chat_template"):
        ChatTemplate(tokenizer, source=None).render(USER, True, {})


@pytest.mark.parametrize("name", ["styl", "messages", "add_generation_prompt", "tokenize", "1"])
def test_only_free_variables_of_the_template_can_be_set(name: str) -> None:
    template = ChatTemplate(chat_tokenizer(), source="{{ messages }} {{ style }} {{ tokenize }} 1")
    with pytest.raises(ApiError, match=f"chat_template_kwargs.{name} is no variable"):
        template.render(USER, True, {name: True})


def test_what_the_template_rejects_is_the_clients_error() -> None:
    template = ChatTemplate(chat_tokenizer(), source="{{ raise_exception('no system role') }}")
    with pytest.raises(ApiError, match="no system role") as info:
        template.render(USER, True, {})
    assert info.value.status == 400
