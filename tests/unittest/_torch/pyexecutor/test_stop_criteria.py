"""Stops and lengths, one token at a time, against a look at the whole text."""

import pytest
from helpers.byte_tokenizer import byte_chars, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm import SamplingParams
from tensorrt_llm._torch.pyexecutor.messages import FinishReason
from tensorrt_llm._torch.pyexecutor.stop_criteria import Finish, StopCriteria
from tensorrt_llm.tokenizer import IncrementalDetokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def single_bytes(text: str) -> list[int]:
    """The text with one token per byte, whatever could be merged."""
    chars = byte_chars()
    return [TOKENIZER.token_to_id(chars[byte]) for byte in text.encode()]


def run(tokens: list[int], max_new: int = 1000, eos: tuple[int, ...] = (), **params) -> tuple:
    """(number of tokens until the end, how it ended), or (all of them, None)."""
    sampling = SamplingParams(max_tokens=None, **params)
    detokenizer = IncrementalDetokenizer(TOKENIZER, [], sampling.skip_special_tokens)
    criteria = StopCriteria(sampling, max_new, eos, detokenizer)
    for count, token in enumerate(tokens, start=1):
        if finish := criteria.check(token, count):
            return count, finish
    return len(tokens), None


def test_eos_stop_ids_and_length() -> None:
    tokens = [4, 9, 6, 9]
    assert run(tokens, max_new=3) == (3, Finish(LENGTH))
    assert run(tokens, eos=(6, 7)) == (3, Finish(STOP))
    assert run(tokens, eos=(6,), ignore_eos=True) == (4, None)
    assert run(tokens, eos=(6,), ignore_eos=True, stop_token_ids=[6]) == (3, Finish(STOP, 6))
    assert run(tokens, eos=(9,), stop_token_ids=[9]) == (2, Finish(STOP))
    assert run(tokens, stop_token_ids=[9]) == (2, Finish(STOP, 9))


def test_stop_goes_before_length_on_one_token() -> None:
    assert run([4, 9], max_new=2, eos=(9,)) == (2, Finish(STOP))
    assert run(ids("xy"), max_new=2, stop="y") == (2, Finish(STOP, "y"))
    assert run([4, 9], max_new=2, eos=(9,), min_tokens=2) == (2, Finish(STOP))
    assert run([4, 9, 9], max_new=3, eos=(9,), min_tokens=3) == (3, Finish(STOP))


def test_min_tokens_holds_every_stop_back() -> None:
    assert run([9, 9, 9], eos=(9,), min_tokens=3) == (3, Finish(STOP))
    tokens = single_bytes("xx.xx.")
    assert run(tokens, stop=".", min_tokens=4) == (6, Finish(STOP, "."))
    assert run(tokens, stop=".", min_tokens=3) == (3, Finish(STOP, "."))
    # A string that begins before min_tokens and is complete after it ends the request.
    assert run(tokens, stop="x.x", min_tokens=4) == (4, Finish(STOP, "x.x"))


@pytest.mark.parametrize("stop", ["bcb", "cbc", "a\n\nb", "你好", "é!", "🙂"])
def test_stop_string_split_over_tokens(stop: str) -> None:
    text = f"xab{stop}tail"
    for tokens in (ids(text), single_bytes(text)):
        count, finish = run(tokens, stop=["never", stop])
        assert finish == Finish(STOP, stop)
        assert stop in TOKENIZER.decode(tokens[:count])
        assert stop not in TOKENIZER.decode(tokens[: count - 1])


def test_several_strings_on_one_token() -> None:
    assert run(ids("ab"), stop=["b", "ab"]) == (1, Finish(STOP, "ab")), "the one that begins first"
    assert run(single_bytes("ab"), stop=["ab", "b"]) == (2, Finish(STOP, "ab"))
    assert run(ids("bc"), stop=["b", "bc"]) == (1, Finish(STOP, "b")), "the first in the list"


def test_special_tokens_are_text_only_when_asked() -> None:
    end = TOKENIZER.token_to_id("<|end|>")
    tokens = [*ids("x"), end, *ids("y")]
    assert run(tokens, stop="|end|") == (3, None)
    assert run(tokens, stop="|end|", skip_special_tokens=False) == (2, Finish(STOP, "|end|"))
    assert run(tokens, stop="xy") == (3, Finish(STOP, "xy")), "a skipped token leaves no gap"


@given(
    text=st.text("abc.é你", max_size=25),
    stops=st.lists(st.text("abc.é你", min_size=1, max_size=4), min_size=1, max_size=3),
    merged=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_stops_exactly_where_the_whole_text_says(
    text: str, stops: list[str], merged: bool, min_tokens: int
) -> None:
    tokens = ids(text) if merged else single_bytes(text)

    def ends(count: int) -> set[int]:
        """Where matches end in the text of the first `count` tokens."""
        shown = TOKENIZER.decode(tokens[:count]).rstrip("\N{REPLACEMENT CHARACTER}")
        return {
            start + len(s)
            for s in stops
            for start in range(len(shown))
            if shown.startswith(s, start)
        }

    expected = next(
        (n for n in range(max(1, min_tokens), len(tokens) + 1) if ends(n) - ends(n - 1)), None
    )
    count, finish = run(tokens, stop=stops, min_tokens=min_tokens)
    assert (count if finish else None) == expected
    assert finish is None or finish.stop_reason in stops


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"stop \['x'\] needs a tokenizer"):
        StopCriteria(SamplingParams(stop="x"), 10)
