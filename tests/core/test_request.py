"""What a request may say: every field's range is checked where the object is made."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from octavo.core.request import Request, SamplingParams
from octavo.errors import InvalidRequestError

NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**31), ("max_tokens", 2**70), ("max_tokens", 1.5),
        ("max_tokens", True), ("min_tokens", -1), ("min_tokens", 2**64), ("top_k", -2), ("top_k", 2**64),
        ("temperature", NAN), ("temperature", -0.1), ("temperature", float("inf")), ("temperature", "1"),
        ("top_p", -0.1), ("top_p", 1.1), ("top_p", NAN), ("min_p", -0.1), ("min_p", NAN),
        ("presence_penalty", 2.5), ("frequency_penalty", NAN), ("repetition_penalty", 0.0),
        ("logit_bias", ((1, NAN),)), ("logit_bias", ((-1, 1.0),)), ("logprobs", 21), ("prompt_logprobs", -1),
        ("seed", 2**64), ("seed", 0.5), ("n", 0), ("n", 2**31), ("stop", ("",)), ("stop_token_ids", (-1,)),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


def test_min_tokens_is_at_most_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match=r"at most max_tokens \(3\)"):
        SamplingParams(min_tokens=4, max_tokens=3)


@pytest.mark.parametrize("field", ["arrival", "deadline", "queue_timeout"])
def test_a_time_that_is_no_number_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} is nan; give a time in seconds"):
        Request("a", array("i", [1]), **{field: NAN})


@pytest.mark.parametrize("ids", [["a"], [2**40], 5, [1.5]])
def test_ids_that_are_none_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_token_ids must be a list of 32-bit token ids"):
        Request("a", ids)
