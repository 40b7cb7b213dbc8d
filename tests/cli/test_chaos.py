"""A drill's judgement of answers; what it does to a server is shown in tests/reliability."""

from __future__ import annotations

import time
from array import array

import pytest

from octavo.bench.completion_client import CompletionResult
from octavo.cli.chaos import DrillResult, ReferenceAnswer, join_answers


def answer(*texts: str, usage_tokens: int | None = None) -> CompletionResult:
    given = CompletionResult(time.perf_counter(), texts=list(texts))
    given.chunk_times = array("d", range(len(texts)))
    given.usage_tokens = usage_tokens
    return given


WHOLE = ("the", " cat", " sat", " on")


@pytest.mark.parametrize(
    ("got", "lost", "extra"),
    [
        (answer(*WHOLE, usage_tokens=4), 0, 0),
        (answer("the cat", " sat on", usage_tokens=4), 0, 0),  # several tokens at once
        (answer("the", " cat"), 2, 0),
        (answer(), 4, 0),
        (answer(*WHOLE, " on", usage_tokens=4), 0, 1),
        (answer("the", " cat", " cat", " sat", " on"), 2, 3),  # judged by length, once it differs
        (answer("the", " sat", " on"), 3, 2),
        (answer(*WHOLE, "", usage_tokens=5), 0, 1),  # a token without text too many
    ],
)
def test_what_is_lost_and_what_is_too_much(got: CompletionResult, lost: int, extra: int) -> None:
    expected = ReferenceAnswer.of(answer(*WHOLE, usage_tokens=4))
    assert expected.compare(got) == (lost, extra)


def test_chunks_of_several_tokens_count_for_as_many() -> None:
    expected = ReferenceAnswer.of(answer("the cat", " sat on", usage_tokens=4))
    assert expected.compare(answer("the cat")) == (2, 0)


def test_an_answer_over_two_connections_is_one() -> None:
    first, second = answer("the", " cat"), answer(" sat", " on", usage_tokens=4)
    first.kind, first.last_id = "lost", "2"
    whole = join_answers(first, second)
    assert ReferenceAnswer.of(answer(*WHOLE, usage_tokens=4)).compare(whole) == (0, 0)
    assert (whole.kind, whole.last_id, len(whole.chunk_times)) == ("", "2", 4)


def test_an_outcome_is_clean_when_nothing_was_lost_doubled_or_changed() -> None:
    assert DrillResult().is_clean and DrillResult(num_refused=3).is_clean
    assert not DrillResult(num_lost=1).is_clean and not DrillResult(num_duplicated=1).is_clean
