"""Incremental detokenization equals decoding at once, and never shows half a character."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tensorrt_llm.tokenizer import IncrementalDetokenizer, load_tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
WHOLE_TEXT = st.text(st.characters(exclude_characters=BROKEN, codec="utf-8"), max_size=12)


def byte_level() -> Tokenizer:
    """256 byte tokens, a few merges (one ends inside a character) and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("你好")[0][0]
    merges = [("a", "b"), (encoded[2], encoded[3]), ("Ġ", "a")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>", "<|end|>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama's kind: words with a leading space (the first is stripped), else <0xNN> bytes."""
    words = ["<unk>", "▁", "▁hello", "▁world", "lo", "x"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["[UNK]", "play", "##ing", "un", "##do", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[A]", "[B]"])
    return tokenizer


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per UTF-8 byte of `text` (byte fallback)."""
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


def stream(
    tokenizer: Tokenizer, token_ids: list[int], prompt: list[int], **options: bool
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    pieces = [detokenizer.append(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.flush()]


@given(prompt=WHOLE_TEXT, text=st.text(min_size=1, max_size=30))
def test_byte_level_text_round_trips(prompt: str, text: str) -> None:
    tokenizer = byte_level()
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids, prompt_ids)
    assert "".join(pieces) == text
    assert BROKEN in text or not any(BROKEN in piece for piece in pieces)


@given(text=st.text(min_size=1, max_size=20), cut=st.integers(0, 20))
def test_byte_fallback_text_round_trips(text: str, cut: int) -> None:
    """Also when the prompt ends inside a character: the character then belongs to the output."""
    tokenizer = byte_fallback()
    token_ids = [tokenizer.token_to_id("▁hello"), *byte_ids(tokenizer, text)]
    cut = min(1 + cut, len(token_ids))
    whole_chars = bytes(text.encode()[: cut - 1]).decode(errors="ignore")
    pieces = stream(tokenizer, token_ids[cut:], token_ids[:cut])
    assert "".join(pieces) == text[len(whole_chars) :]


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_piece])
@given(data=st.data())
def test_any_ids_stream_without_error(make, data: st.DataObject) -> None:
    tokenizer = make()
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40)
    pieces = stream(
        tokenizer, data.draw(ids), data.draw(ids), skip_special_tokens=data.draw(st.booleans())
    )
    assert all(isinstance(piece, str) for piece in pieces)


def test_character_arrives_with_its_last_byte() -> None:
    tokenizer = byte_level()
    pieces = stream(tokenizer, tokenizer.encode("😀!", add_special_tokens=False).ids, [])
    assert pieces == ["", "", "", "😀", "!", ""]


def test_token_that_ends_inside_a_character_gives_the_whole_ones() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("你好", add_special_tokens=False).ids
    assert stream(tokenizer, ids, []) == ["", "", "你", "", "好", ""]


def test_flush_shows_what_never_became_a_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a😀", add_special_tokens=False).ids[:3]
    assert stream(tokenizer, ids, []) == ["a", "", "", BROKEN]


def test_endless_broken_bytes_are_not_held_forever() -> None:
    tokenizer = byte_fallback()
    detokenizer = IncrementalDetokenizer(tokenizer)
    broken = tokenizer.token_to_id("<0xFF>")
    text = "".join(detokenizer.append(broken) for _ in range(40))
    assert len(text) >= 30 and set(text) == {BROKEN}
    assert len(detokenizer._window) < 20


def test_skipped_tokens_do_not_pile_up_or_eat_the_space() -> None:
    tokenizer = byte_fallback()
    hello, world, end = (tokenizer.token_to_id(t) for t in ("▁hello", "▁world", "</s>"))
    detokenizer = IncrementalDetokenizer(tokenizer, [hello])
    assert [detokenizer.append(t) for t in (end, end, world)] == ["", "", " world"]
    for _ in range(100):
        detokenizer.append(end)
    assert len(detokenizer._window) < 40


def test_leading_space_depends_on_the_prompt() -> None:
    tokenizer = byte_fallback()
    hello, world = tokenizer.token_to_id("▁hello"), tokenizer.token_to_id("▁world")
    assert stream(tokenizer, [world], [hello]) == [" world", ""]
    assert stream(tokenizer, [hello, world], []) == ["hello", " world", ""]


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id("a"), tokenizer.token_to_id("<|end|>")]
    assert stream(tokenizer, ids, []) == ["a", "", ""]
    assert stream(tokenizer, ids, [], skip_special_tokens=False) == ["a", "<|end|>", ""]


@pytest.mark.parametrize(("spaces", "expected"), [(True, " [B] play"), (False, "[B] play")])
def test_spaces_between_special_tokens(spaces: bool, expected: str) -> None:
    tokenizer = word_piece()
    ids = [tokenizer.token_to_id(t) for t in ("[A]", "[B]", "play", "##ing")]
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
    assert "".join(stream(tokenizer, ids, [], **options)) == "[A]" + expected + "ing"


def test_load_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).token_to_id("<|end|>") == byte_level().token_to_id(
        "<|end|>"
    )
