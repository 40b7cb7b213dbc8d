"""`timings` of an answer: the seconds of each phase add up to the total."""

from __future__ import annotations

import pytest

from octavo.frontend.outputs import Usage
from octavo.server.api.completions.answers import timings_json


@pytest.mark.parametrize(
    ("preempted", "prefill_s", "decode_s", "preempted_s"),
    [
        ((), 1.0, 6.0, 0.0),
        (((4.0, 6.5),), 1.0, 3.5, 2.5),  # while it decoded
        (((1.0, 1.5), (3.0, 4.0)), 0.5, 5.0, 1.5),  # once before its first token, once behind it
        (((1.5, 2.5),), 0.5, 5.5, 1.0),  # its first token came in between, of a row in flight
        (((7.0, 12.0),), 1.0, 5.0, 1.0),  # it ended while it was out
    ],
)
def test_T03_the_seconds_of_an_answer_add_up(
    preempted: tuple[tuple[float, float], ...], prefill_s: float, decode_s: float, preempted_s: float
) -> None:
    told = timings_json([Usage(100, 61, 0, 1.0, 2.0, 8.0, preempted)])
    expected = {"queue_s": 1.0, "prefill_s": prefill_s, "decode_s": decode_s, "preempted_s": preempted_s}
    assert {name: told[name] for name in expected} == expected
    assert sum(expected.values()) == told["total_s"] == 8.0
    assert told["prompt_tokens_per_s"] == round(100 / prefill_s, 2)
    assert told["tokens_per_s"] == round(60 / told["decode_s"], 2)
