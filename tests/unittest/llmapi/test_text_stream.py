"""Stop strings in a growing text: cut off at the end, and nothing of them shown before."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tensorrt_llm._torch.pyexecutor.stop_criteria import StopStringMatcher
from tensorrt_llm.llmapi.text_stream import TextStream
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.tokenizer import IncrementalDetokenizer


def make_tokenizer() -> Tokenizer:
    """One token per byte, and each pair of the letters a, b, c as a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(x, y) for x in "abc" for y in "abc"]
    vocab = {token: i for i, token in enumerate([*alphabet, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = make_tokenizer()


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def new_stream(params: SamplingParams) -> TextStream:
    return TextStream(IncrementalDetokenizer(TOKENIZER), params)


@given(
    tokens=st.lists(st.sampled_from([*"abc", "ab", "bc", "ca", "aa"]), min_size=1, max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_engines_stop_is_cut_off(tokens: list[str], stops: list[str]) -> None:
    """The engine's own matcher decides; what is shown is always the beginning of the final text."""
    matcher = StopStringMatcher(stops, IncrementalDetokenizer(TOKENIZER))
    stream = new_stream(SamplingParams(stop=stops))
    shown, text = [""], ""
    for i, token_id in enumerate(map(TOKENIZER.token_to_id, tokens)):
        text += tokens[i]
        stop = matcher.append(token_id)
        if stop is not None:
            last = stream.stop([token_id], stop)
            expected = text[: min(text.find(s) for s in stops if s in text)]
        elif i == len(tokens) - 1:
            last, expected = stream.finish([token_id]), text
        else:
            shown.append(shown[-1] + stream.append([token_id]))
            continue
        assert shown[-1] + last == expected
        assert all(expected.startswith(piece) for piece in shown)
        return


def test_only_what_may_be_a_stop_is_held_back() -> None:
    stream = new_stream(SamplingParams(stop=["xyz", "yy"]))
    shown = [stream.append(ids_of(letter)) for letter in "axybxyx"]
    assert shown == ["a", "", "", "xyb", "", "", "xy"]
    assert stream.finish([]) == "x"


def test_stop_string_is_kept_on_request() -> None:
    stream = new_stream(SamplingParams(stop="end", include_stop_str_in_output=True))
    assert [stream.append(ids_of(letter)) for letter in "xen"] == ["x", "e", "n"]
    assert stream.stop(ids_of("d"), "end") == "d"


@pytest.mark.parametrize(("keep", "expected"), [(False, "ab"), (True, "abQ")])
@pytest.mark.parametrize("stop_reason", [None, ord("Q")])
def test_stop_token_is_no_text(keep: bool, expected: str, stop_reason: int | None) -> None:
    stream = new_stream(SamplingParams(stop=["bc"], include_stop_str_in_output=keep))
    tokens = [TOKENIZER.token_to_id(letter) for letter in "abQ"]
    assert stream.append(tokens[:2]) + stream.stop(tokens[2:], stop_reason) == expected


def test_several_tokens_at_once() -> None:
    params = SamplingParams(stop=["stop"], min_tokens=5)
    text = "astop stop"  # the first one is too early: the engine passes it
    stream = new_stream(params)
    assert (
        stream.stop([TOKENIZER.token_to_id(c.replace(" ", "Ġ")) for c in text], "stop") == "astop "
    )


def test_half_a_character_is_never_shown() -> None:
    stream = new_stream(SamplingParams())
    first, *rest = ids_of("é")
    assert stream.append([first]) == "" and stream.append(rest) == "é"
    assert stream.finish([first]) == ""


def test_printable_text_is_shown_at_once_without_stops() -> None:
    stream = new_stream(SamplingParams())
    for letter in string.ascii_letters:
        assert stream.append([TOKENIZER.token_to_id(letter)]) == letter
