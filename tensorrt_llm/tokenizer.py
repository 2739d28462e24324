"""Token ids to text, one token at a time, on the bare `tokenizers` library."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 5
_MAX_CHAR_BYTES = 4
_MAX_CONTEXT = _CONTEXT_TOKENS + 2 * _MAX_CHAR_BYTES
_MAX_HELD_TOKENS = 2 * _MAX_CHAR_BYTES
_MAX_WINDOW = 32  # tokens without text (skipped special ones) do not pile up beyond this


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    Raises:
        FileNotFoundError: when the directory has no `tokenizer.json`.
        ValueError: when that file is not a tokenizer.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer.json in {directory}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


class IncrementalDetokenizer:
    """Text of a growing token sequence; never emits a part of a UTF-8 character.

    What a token adds to the text depends on its neighbours (a byte of a longer character, a leading
    space that the first word lacks), so a short window of past tokens is decoded with every new one
    and the text that was there before is cut off. Text that ends in a broken character is held back
    until the character is complete, or until more tokens follow than the bytes of two characters
    could explain. (The library's own `DecodeStream` raises where a run of byte tokens turns out to
    be no character, and cannot give what it holds back at the end.)

    Args:
        tokenizer: its decoder may be ByteLevel, byte fallback, Metaspace or WordPiece.
        prompt_token_ids: tokens before the first appended one; only the last few are looked at.
        skip_special_tokens: special tokens give no text.
        spaces_between_special_tokens: False writes a special token that follows another one without
            the space that some decoders put between words. No effect when they are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._glued = (
            {} if skip_special_tokens or spaces_between_special_tokens else _specials(tokenizer)
        )
        self._window, self._sent = self._context(list(prompt_token_ids[-_MAX_CONTEXT:]))
        self._held = 0  # tokens in a row that gave no text because of a broken character

    def append(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty, and may hold text of earlier tokens."""
        if token_id in self._glued and self._window and self._window[-1] in self._glued:
            return self.flush() + self._restart(token_id)
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = text.rstrip(_BROKEN)
        if self._held == _MAX_HELD_TOKENS:
            whole = text
        new = whole[self._sent :]
        self._sent += len(new)
        self._held = 0 if new or whole == text else self._held + 1
        if whole == text and (new or len(self._window) > _MAX_WINDOW):
            self._slide()
        return new

    def flush(self) -> str:
        """The text held back so far, with U+FFFD for broken characters. To be called at the end."""
        text = self._decode(self._window)
        held = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return held

    def _slide(self) -> None:
        """Everything is sent: keep the last few tokens as context of the next one."""
        self._window, self._sent = self._context(self._window[-_MAX_CONTEXT:])

    def _restart(self, token_id: int) -> str:
        self._window = [token_id]
        self._sent = len(self._decode(self._window))
        return self._glued[token_id]

    def _context(self, token_ids: list[int]) -> tuple[list[int], int]:
        """The last few tokens, starting at a whole character, and the length of their whole text.

        Both ends matter: byte fallback breaks a whole run of bytes for one unfinished character.
        """
        total = len(token_ids)
        for end in range(total, max(-1, total - _MAX_CHAR_BYTES), -1):
            first = max(0, end - _CONTEXT_TOKENS)
            for start in range(first, max(-1, first - _MAX_CHAR_BYTES), -1):
                text = self._decode(token_ids[start:end])
                if not text.startswith(_BROKEN) and not text.endswith(_BROKEN):
                    window = token_ids[start:]
                    return window, max(len(text), len(self._decode(window).rstrip(_BROKEN)))
        window = token_ids[-_CONTEXT_TOKENS:]
        return window, len(self._decode(window))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)


def _specials(tokenizer: Tokenizer) -> dict[int, str]:
    added = tokenizer.get_added_tokens_decoder()
    return {token_id: token.content for token_id, token in added.items() if token.special}
