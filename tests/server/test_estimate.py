"""The estimator: nothing is claimed before anything is known; then a steady load is predicted."""

import pytest

from octavo.server.estimate import DecayedMean, Estimator, Work


def taught(gap_s: float = 0.02, length: int = 50, prefill_s: float = 0.001) -> Estimator:
    estimator = Estimator()
    for _ in range(50):
        estimator.prompt_done(prefill_s * 100, 100)
        for _ in range(length - 1):
            estimator.tokens_came(gap_s, 1)
        estimator.sequences_ended(length, 1)
    return estimator


def test_a_decayed_mean_follows_and_weighs() -> None:
    mean = DecayedMean(half_life=10)
    assert mean.value is None
    mean.add(30, 3)
    assert mean.value == 10
    for _ in range(100):
        mean.add(2, 1)
    assert mean.value == pytest.approx(2, rel=0.02)


def test_nothing_is_claimed_before_anything_is_known() -> None:
    estimator = Estimator()
    assert estimator.wait_s(Work(5, 500, 0), 4) is None and estimator.slot_s(4) is None
    estimator.tokens_came(0.1, 1)
    assert estimator.busy_s(Work(1, 10, 10)) is None
    assert estimator.output_tokens(7) == 0 and estimator.tokens_of(100) == 30


def test_a_steady_queue_is_predicted() -> None:
    """8 sequences run at 20 ms a token, 50 tokens each: one ends every 125 ms."""
    estimator = taught()
    assert estimator.slot_s(8) == pytest.approx(50 * 0.02 / 8)
    ahead = Work()
    for _ in range(16):
        ahead.add(Work(1, 100, estimator.output_tokens(None)))
    service_s = 50 * 0.02 + 100 * 0.001
    assert estimator.wait_s(ahead, 8) == pytest.approx(16 * service_s / 8 + 50 * 0.02 / 8)


def test_short_answers_asked_for_count_as_short() -> None:
    estimator = taught()
    assert estimator.output_tokens(5) == 5 and estimator.output_tokens(500) == pytest.approx(50)


def test_tokens_of_a_text_follow_the_last_texts() -> None:
    estimator = Estimator()
    for _ in range(100):
        estimator.text_read(4000, 1000)
    assert estimator.tokens_of(8000) == pytest.approx(2000, rel=0.01)
    estimator.text_read(0, 12)  # ids only
    assert estimator.tokens_of(8000) == pytest.approx(2000, rel=0.01)
