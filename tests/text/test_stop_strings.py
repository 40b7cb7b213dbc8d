import random
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.tiny_tokenizers import tiny_tokenizer

from octavo.text.detokenizer import Detokenizer, StopStrings


def run(stops, pieces, include=False):
    """Push pieces one by one: (text given out, match)."""
    finder = StopStrings(tuple(stops), include)
    out = []
    for piece in pieces:
        text, match = finder.push(piece)
        out.append(text)
        if match is not None:
            return out, match
    return [*out, finder.flush()], None


def expected(stops, text, include):
    """The slow twin: the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


letters = st.text("ab", max_size=30)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    text=letters,
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_P05_equal_to_the_slow_twin_however_the_text_is_split(stops, text, cuts, include):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    out, match = run(stops, pieces, include)
    assert ("".join(out), match) == expected(stops, text, include)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4), text=letters)
@settings(max_examples=300, deadline=None)
def test_P05_only_what_may_begin_a_stop_string_is_held_back(stops, text):
    finder, sent = StopStrings(tuple(stops)), ""
    for index, character in enumerate(text, 1):
        safe, match = finder.push(character)
        sent += safe
        if match is not None:
            return
        held = text[len(sent) : index]
        assert len(finder._held) == len(held)
        assert not held or any(stop.startswith(held) for stop in stops)
        longest = max(
            (k for k in range(index + 1) if any(s.startswith(text[index - k : index]) for s in stops)), default=0
        )
        assert len(held) == longest


def test_P05_a_stop_string_across_tokens_is_never_streamed():
    tokenizer = tiny_tokenizer("byte_level")
    ids = tokenizer.encode("the cat 猫 END of it")
    stream, finder = Detokenizer(tokenizer), StopStrings(("猫 END",))
    shown = ""
    for token_id in ids:
        text, match = finder.push(stream.push([token_id]))
        shown += text
        if match:
            break
    assert (shown, match) == ("the cat ", "猫 END")


def test_P05_nothing_follows_a_match():
    finder = StopStrings(("x",))
    assert finder.push("axb") == ("a", "x")
    assert finder.push("more") == ("", "x")
    assert finder.flush() == ""


def test_P05_include_gives_the_stop_string_and_holds_nothing():
    finder = StopStrings(("END",), include=True)
    assert finder.push("a E") == ("a E", None)
    assert finder.push("N") == ("N", None)
    assert finder.push("D tail") == ("D", "END")


@pytest.mark.parametrize("include, text", [(False, "ab"), (True, "abcd")])
def test_P05_of_two_stop_strings_the_first_to_be_complete_wins(include, text):
    for pieces in (["abcdef"], list("abcdef"), ["abc", "def"]):
        out, match = run(("abcdef", "cd"), pieces, include)
        assert ("".join(out), match) == (text, "cd")


def test_without_stop_strings_text_passes():
    assert run((), ["a", "", "b"]) == (["a", "", "b", ""], None)
    with pytest.raises(AssertionError):
        StopStrings(("",))


def test_P05_the_cost_of_a_character_does_not_grow():
    """Steps of the search, counted as lines run: constant per character, for the worst text for its stop string."""
    stop, text = "a" * 1000 + "b", "a" * 20_000
    finder = StopStrings((stop,))
    finder.push("a" * 2000)
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if "stop_strings" in frame.f_code.co_filename:
            lines += event == "line"
            return trace
        return None

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for start in range(0, len(text), 1000):
            finder.push(text[start : start + 1000])
    finally:
        sys.settrace(previous)
    assert len(finder._held) == 1000
    assert lines < 20 * len(text)


def test_P05_random_unicode():
    rng = random.Random(5)
    for _ in range(300):
        text = "".join(rng.choice("猫é🙂 \n") for _ in range(30))
        stops = tuple("".join(rng.choice("猫é🙂 \n") for _ in range(rng.randint(1, 4))) for _ in range(3))
        out, match = run(stops, list(text))
        assert ("".join(out), match) == expected(stops, text, False)
