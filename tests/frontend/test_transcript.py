"""P05: what stops a text, in order of position, however the ids are split."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.fakes import EOS, make_tokenizer

from octavo.core.request import FinishReason, SamplingParams
from octavo.frontend.sessions import Transcript

TOKENIZER = make_tokenizer()


def make(**options: Any) -> Transcript:
    return Transcript(TOKENIZER, SamplingParams(**options), (EOS,))


def ids_of(text: str) -> array[int]:
    return array("i", TOKENIZER.encode(text))


def test_P05_end_of_sequence_counts_but_gives_no_text() -> None:
    transcript = make()
    assert transcript.push(array("i", [*ids_of("ok"), EOS]), FinishReason.STOP) == ("ok", 3)
    assert transcript.num_tokens == 3 and transcript.stop_token_id is None and transcript.stop_string is None


def test_P05_a_stop_id_counts_is_reported_and_gives_no_text() -> None:
    stop = ids_of("!")[0]
    transcript = make(stop_token_ids=(stop,))
    assert transcript.push(ids_of("ok!"), FinishReason.STOP) == ("ok", 3)
    assert transcript.stop_token_id == stop


def test_P05_ignored_end_of_sequence_is_a_token_like_others() -> None:
    transcript = make(ignore_eos=True, skip_special_tokens=False)
    assert transcript.push(array("i", [*ids_of("a"), EOS]), FinishReason.LENGTH) == ("a</s>", 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=12))
def test_P05_a_stop_string_is_found_across_tokens_and_outputs(cuts: list[int]) -> None:
    ids, transcript, text, count = ids_of("one END two END"), make(stop=("END", "two")), "", 0
    while ids:
        cut = cuts.pop() if cuts else len(ids)
        part, ids = ids[:cut], ids[cut:]
        more, counted = transcript.push(part, None if ids else FinishReason.LENGTH)
        text += more
        count += counted
    assert (text, count, transcript.stop_string) == ("one ", len("one END"), "END")
    assert transcript.num_tokens == count


def test_L02_what_may_begin_a_stop_string_is_held_back_and_given_at_the_end() -> None:
    transcript = make(stop=("STOP",))
    assert transcript.push(ids_of("a ST"), None)[0] == "a "
    assert transcript.push(ids_of("A"), None)[0] == "STA"
    assert transcript.push(ids_of("STO"), FinishReason.LENGTH)[0] == "STO"


def test_P05_a_stop_string_completed_by_the_last_token_beats_length() -> None:
    transcript = make(stop=("ok",))
    transcript.push(ids_of("is o"), None)
    assert transcript.push(ids_of("k"), FinishReason.LENGTH) == ("", 1)
    assert transcript.stop_string == "ok"


def test_P05_include_stop_str_in_output() -> None:
    transcript = make(stop=("ok",), include_stop_str_in_output=True)
    assert transcript.push(ids_of("is ok now"), None) == ("is ok", 5)


def test_P05_stop_strings_are_ignored_before_min_tokens() -> None:
    transcript = make(stop=("a",), min_tokens=3)
    assert transcript.push(ids_of("aaab"), None)[0] == "aaab"
    assert transcript.push(ids_of("ca"), None) == ("c", 2)
    assert transcript.num_tokens == 6


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH])
def test_L02_never_half_a_character(finish: FinishReason | None) -> None:
    ids, transcript = ids_of("é中"), make()
    texts = [transcript.push(ids[i : i + 1], finish if i == 3 else None)[0] for i in range(4)]
    assert texts == ["", "é", "", "\ufffd" if finish is not None else ""]
