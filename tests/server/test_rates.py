"""Token buckets: exact times, overdrafts, changed limits; the headers that tell of them."""

import random

import pytest

from octavo.errors import RateLimitError
from octavo.server.http.keys import KeyInfo
from octavo.server.http.limits import Bucket, Meter


def test_the_time_told_is_exact() -> None:
    bucket = Bucket(60, now=0.0)
    for _ in range(60):
        assert bucket.wait_s(1, 0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.wait_s(1, 0.0) == 1.0 and bucket.wait_s(5, 0.25) == 4.75
    assert bucket.wait_s(1, 0.999) > 0 and bucket.wait_s(1, 1.0) == 0


def test_it_is_exact_for_any_history() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        per_minute = rng.choice((1, 7, 60, 1000, 40_000))
        bucket, now = Bucket(per_minute, 0.0), 0.0
        for _ in range(40):
            now += rng.expovariate(1)
            amount = rng.randint(1, 2 * per_minute)
            wait_s = bucket.wait_s(amount, now)
            if wait_s:
                assert bucket.wait_s(amount, now + wait_s * 0.999) > 0
                now += wait_s
                assert bucket.wait_s(amount, now) < 1e-6
            bucket.take(amount, now)


def test_more_than_it_can_hold_waits_until_it_is_full_and_overdraws() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.take(30, 0.0)
    assert bucket.wait_s(1000, 0.0) == 30
    bucket.take(1000, 30.0)
    assert bucket.level(30.0) == -940 and bucket.wait_s(1, 30.0) == 941
    assert bucket.level(10_000.0) == 60


def test_a_changed_limit_keeps_what_was_used() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.take(40, 0.0)
    bucket.resize(100, 0.0)
    assert bucket.level(0.0) == 60
    bucket.resize(10, 0.0)
    assert bucket.level(0.0) == -30


def test_a_clock_that_stands_still_or_goes_back_refills_nothing() -> None:
    bucket = Bucket(60, now=5.0)
    bucket.take(60, 5.0)
    assert bucket.level(5.0) == 0 and bucket.level(1.0) == 0 and bucket.level(6.0) == 1


def test_a_meter_refuses_and_tells() -> None:
    meter = Meter(KeyInfo("a", "a", requests_per_minute=2, tokens_per_minute=100), now=0.0)
    meter.begin(0.0)
    meter.check_tokens(0.0, 100)
    meter.use_tokens(130, 0.0)
    with pytest.raises(RateLimitError, match="100 tokens a minute") as refused:
        meter.begin(0.0)
    assert refused.value.retry_after_s == pytest.approx(31 * 60 / 100) and meter.num_requests == 1
    assert dict(meter.headers(0.0)) == {
        b"x-ratelimit-limit-requests": b"2",
        b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"30.000s",
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"78.000s",
    }
    meter.update(KeyInfo("a", "a", requests_per_minute=1), now=0.0)
    assert meter.tokens is None
    with pytest.raises(RateLimitError, match="1 requests a minute") as refused:
        meter.begin(0.0)
    assert refused.value.retry_after_s == 60
