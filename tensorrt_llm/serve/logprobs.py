"""Log probabilities of tokens in OpenAI's two forms."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.pyexecutor.messages import TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """What each token of a vocabulary looks like on its own."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.bytes = lru_cache(maxsize=65536)(self._bytes)

    def text(self, token: int) -> str:
        """The token as text, or OpenAI's `bytes:\\xe2\\x82` when it is not whole characters."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes(self, token: int) -> bytes:
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        known = _byte_of_letter()
        if piece is None or not all(letter in known for letter in piece):
            return text.encode()
        return bytes(known[letter] for letter in piece)


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the rest from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_IMPOSSIBLE = -9999.0  # what OpenAI's API says for a probability of 0; JSON has no infinity


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offset: int,
) -> dict[str, Any]:
    """The legacy form: parallel lists over `tokens`.

    Args:
        texts: the vocabulary.
        tokens: ids, in order.
        logprobs: one entry per token; None for a prompt's first token.
        offset: characters of the answer before the first of these tokens.
    """
    pieces = [texts.text(token) for token in tokens]
    ends = [offset]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    return {
        "tokens": pieces,
        "token_logprobs": [
            _finite(entry[token].logprob) if entry else None
            for token, entry in zip(tokens, logprobs, strict=True)
        ],
        "top_logprobs": [
            {texts.text(t): _finite(one.logprob) for t, one in entry.items()} if entry else None
            for entry in logprobs
        ],
        "text_offset": ends[:-1],
    }


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> dict[str, Any]:
    """The chat form: one object per token with its `top` most likely alternatives, best first."""
    content = []
    for token, entry in zip(tokens, logprobs, strict=True):
        best = sorted((one.rank, t) for t, one in entry.items() if one.rank <= top)
        alternatives = [_chat_entry(texts, t, entry[t].logprob) for _, t in best]
        content.append(
            _chat_entry(texts, token, entry[token].logprob) | {"top_logprobs": alternatives}
        )
    return {"content": content, "refusal": None}


def _chat_entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    raw = list(texts.bytes(token))
    return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
