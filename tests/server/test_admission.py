"""Admission: exact bounds, load levels, shares, waits that cannot be met, limits of keys; tickets all come back."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from octavo.config import AdmissionConfig
from octavo.errors import LoadShedError, QueueFullError, RateLimitError, WaitTooLongError
from octavo.server.admission import AdmissionControl, AdmissionRequest, AdmissionTicket, EngineQueue, Load
from octavo.server.http.keys import KeyInfo
from tests.server.test_queue_forecast import taught


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made(slots: int = 4, bound: int = 8, tokens: int = 10_000, **options: Any) -> AdmissionControl:
    config = AdmissionConfig(
        max_waiting=bound, max_waiting_tokens=tokens, max_queue_time_s=options.pop("max_queue_time_s", None)
    )
    queue = EngineQueue(slots, options.pop("kv", 0), options.pop("forecast", None))
    return AdmissionControl(config, queue, now=Clock(), **options)


def running(admission: AdmissionControl, count: int, num_tokens: int = 10, **fields: Any) -> list[AdmissionTicket]:
    """Requests that have their first token."""
    tickets = [admission.admit(AdmissionRequest(num_ids=num_tokens, **fields)) for _ in range(count)]
    for ticket in tickets:
        admission.check_tokens(ticket, num_tokens)
        ticket.generated(1, is_first=True)
    return tickets


def fill(admission: AdmissionControl, **fields: Any) -> list[AdmissionTicket]:
    """Requests until one is refused for a full queue."""
    tickets: list[AdmissionTicket] = []
    with pytest.raises(QueueFullError):
        while True:
            admission.check_arrival(fields.get("key", KeyInfo("", "")))
            tickets.append(admission.admit(AdmissionRequest(num_ids=10, **fields)))
            admission.check_tokens(tickets[-1], 10)
    return tickets


def test_the_bound_is_what_waits_beside_what_runs() -> None:
    admission = made(slots=4, bound=8)
    assert len(fill(admission)) == 4 + 8, "an idle engine has four slots"
    assert admission.queue.num_waiting == 8 and admission.queue.num_busy == 4
    admission = made(slots=4, bound=8)
    busy = running(admission, 4)
    queued = fill(admission)
    assert len(queued) == 8 and admission.load is Load.FULL
    busy[0].ended(10, 0)
    assert admission.queue.num_waiting == 7, "the slot is the next one's before it has a token"
    queued[0].generated(0, is_first=True)
    assert (admission.queue.num_waiting, admission.queue.num_running) == (7, 4)
    admission.admit(AdmissionRequest())
    with pytest.raises(QueueFullError, match="8 sequences wait, 8 may"):
        admission.admit(AdmissionRequest())


def test_kv_room_bounds_what_counts_as_running() -> None:
    admission = made(slots=100, bound=8, kv=1000)
    running(admission, 3, num_tokens=300)
    tickets = fill(admission)
    assert 8 + 8 <= len(tickets) <= 8 + 10, "ten more prompts of ten tokens fit beside 3 x 301"


def test_prompts_that_are_cached_take_no_kv_room_of_their_own() -> None:
    admission = made(slots=100, bound=8, kv=1000, tokens=100_000)
    ticket = running(admission, 1, num_tokens=300)[0]
    for _ in range(200):
        ticket.ended(300, 298)
    running(admission, 50, num_tokens=300)
    assert admission.queue.num_free > 40 and admission.wait_s() == 0


def test_choices_and_prompts_count_each() -> None:
    admission = made(slots=4, bound=8)
    running(admission, 4)
    ticket = admission.admit(AdmissionRequest(num_prompts=2, width=3))
    assert admission.queue.num_waiting == 6
    with pytest.raises(QueueFullError, match="and this request has 3"):
        admission.admit(AdmissionRequest(width=3))
    admission.admit(AdmissionRequest(width=2))
    ticket.leave()
    ticket.leave()
    assert admission.queue.num_waiting == 2


def test_a_request_larger_than_the_queue_is_taken_when_nobody_waits() -> None:
    admission = made(slots=4, bound=2, tokens=100)
    running(admission, 4)
    ticket = admission.admit(AdmissionRequest(num_prompts=10, num_ids=5000))
    admission.check_tokens(ticket, 5000)
    with pytest.raises(QueueFullError):
        admission.admit(AdmissionRequest())


def test_tokens_are_bounded_by_a_guess_and_again_exactly() -> None:
    admission = made(tokens=1000)
    admission.check_tokens(admission.admit(AdmissionRequest(num_ids=600)), 600)
    with pytest.raises(QueueFullError, match=r"600 prompt tokens wait .* 1000 may, and this one has 600"):
        admission.admit(AdmissionRequest(num_characters=2000))
    ticket = admission.admit(AdmissionRequest(num_characters=1000))
    assert admission.queue.num_waiting_tokens == 900, "a guess of 0.3 tokens a character"
    with pytest.raises(QueueFullError, match="this one has 401"):
        admission.check_tokens(ticket, 401)
    ticket.leave()
    assert admission.queue.num_waiting_tokens == 600
    admission.check_tokens(admission.admit(AdmissionRequest(num_characters=10)), 400)
    known = made(tokens=1000, forecast=taught(prefill_s=0.1))
    known.check_tokens(known.admit(AdmissionRequest(num_ids=900)), 900)
    with pytest.raises(QueueFullError, match=r"room in about 20\.0 s") as refusal:
        known.admit(AdmissionRequest(num_ids=300))
    assert refusal.value.retry_after_s == pytest.approx(20)


def test_what_is_refused_first_under_load() -> None:
    admission = made(slots=4, bound=8)
    running(admission, 4)
    admission.admit(AdmissionRequest(num_prompts=4))
    assert admission.load is Load.BUSY
    with pytest.raises(LoadShedError, match="busy and requests of several choices of priority 1"):
        admission.admit(AdmissionRequest(priority=1, width=2))
    admission.admit(AdmissionRequest(priority=1)).leave()
    admission.admit(AdmissionRequest(width=2))
    assert admission.load is Load.CROWDED
    with pytest.raises(LoadShedError, match="crowded and requests of priority 1"):
        admission.admit(AdmissionRequest(priority=1))
    admission.admit(AdmissionRequest(priority=0))
    admission.admit(AdmissionRequest(priority=-1))
    assert admission.load is Load.FULL
    with pytest.raises(QueueFullError):
        admission.admit(AdmissionRequest(priority=-9))


def test_tokens_make_load_too() -> None:
    admission = made(slots=4, bound=8, tokens=1000)
    admission.check_tokens(admission.admit(AdmissionRequest(num_ids=800)), 800)
    assert admission.load is Load.CROWDED and admission.queue.num_waiting == 0
    with pytest.raises(LoadShedError):
        admission.admit(AdmissionRequest(priority=1))
    admission.check_tokens(admission.admit(AdmissionRequest(num_ids=150)), 150)


def test_a_key_keeps_to_its_share_while_others_wait() -> None:
    a, b = KeyInfo("a", "a"), KeyInfo("b", "b", weight=3.0)
    admission = made(slots=2, bound=16)
    running(admission, 2, key=a)
    for _ in range(8):
        admission.admit(AdmissionRequest(key=a))
    admission.admit(AdmissionRequest(key=a))
    admission.admit(AdmissionRequest(key=b))
    assert admission.meter(b) is not None
    with pytest.raises(QueueFullError, match=r"key 'a' has its share .* 9 of its sequences wait, 25% of the 16"):
        admission.admit(AdmissionRequest(key=a))
    for _ in range(4):
        admission.admit(AdmissionRequest(key=b))
    meter = admission.meter(a)
    assert meter is not None and meter.num_refused == 1


def test_a_key_that_fills_the_queue_leaves_room_for_the_next() -> None:
    a, b, c = (KeyInfo(name, name) for name in "abc")
    admission = made(slots=2, bound=16)
    running(admission, 2, key=a)
    assert len(fill(admission, key=a)) == 16, "nobody else was ever here"
    with pytest.raises(QueueFullError):
        admission.check_arrival(b)
    admission = made(slots=2, bound=16)
    admission.check_arrival(b)
    running(admission, 2, key=a)
    assert len(fill(admission, key=a)) == 14
    with pytest.raises(QueueFullError, match=r"14 sequences wait, 14 may .2 more places are for keys of which"):
        admission.check_arrival(a)
    for key in (b, c):
        admission.check_arrival(key)
        admission.admit(AdmissionRequest(key=key))
    with pytest.raises(QueueFullError, match=r"16 sequences wait, 14 may"):
        admission.check_arrival(b)
    with pytest.raises(QueueFullError, match="16 sequences wait, 16 may;"):
        admission.check_arrival(KeyInfo("d", "d"))


def test_a_wait_that_cannot_be_met_is_refused_with_the_numbers() -> None:
    admission = made(slots=4, bound=100, forecast=taught())
    assert admission.wait_s() == 0
    running(admission, 4)
    for _ in range(8):
        admission.check_tokens(admission.admit(AdmissionRequest(num_ids=100)), 100)
    steps = 9 * 50 / 4
    expected_s = steps * 0.02 + (steps * 4 + 8 * 100) * 0.001
    assert admission.wait_s() == pytest.approx(expected_s, rel=0.05)
    admission.admit(AdmissionRequest(max_wait_s=expected_s * 1.2)).leave()
    with pytest.raises(
        WaitTooLongError, match=r"about 3.\d s, and may wait 0.5 s: 8 sequences wait, 100 may"
    ) as refusal:
        admission.admit(AdmissionRequest(max_wait_s=0.5))
    assert refusal.value.retry_after_s == pytest.approx(expected_s - 0.5, rel=0.1)
    bounded = made(slots=4, bound=100, forecast=taught(), max_queue_time_s=0.5)
    running(bounded, 4)
    bounded.admit(AdmissionRequest(num_prompts=8, num_ids=800))
    with pytest.raises(WaitTooLongError):
        bounded.admit(AdmissionRequest())


def test_a_request_waits_for_a_full_engine_although_none_waits_before_it() -> None:
    admission = made(slots=4, bound=100, forecast=taught())
    running(admission, 4)
    assert admission.queue.num_waiting == 0
    with pytest.raises(WaitTooLongError):
        admission.admit(AdmissionRequest(max_wait_s=0.01))
    admission.admit(AdmissionRequest(max_wait_s=60.0))


def test_urgent_requests_wait_for_those_before_them_only() -> None:
    admission = made(slots=4, bound=100, forecast=taught(), is_by_priority=True)
    running(admission, 4)
    for _ in range(20):
        admission.check_tokens(admission.admit(AdmissionRequest(num_ids=100, priority=5)), 100)
    urgent, other = admission.wait_s(-1), admission.wait_s(5)
    assert urgent is not None and other is not None and other > 10 * urgent
    admission.admit(AdmissionRequest(priority=-1, max_wait_s=1.0))
    with pytest.raises(WaitTooLongError):
        admission.admit(AdmissionRequest(priority=6, max_wait_s=1.0))


def test_retry_after_is_when_there_will_be_room() -> None:
    admission = made(slots=4, bound=8, forecast=taught(gap_s=0.2))
    running(admission, 4)
    for _ in range(8):
        admission.admit(AdmissionRequest())
    with pytest.raises(QueueFullError) as one:
        admission.check_arrival(KeyInfo("", ""))
    wait_s = admission.wait_s()
    assert wait_s is not None and one.value.retry_after_s == pytest.approx(wait_s / 9), "one of nine"
    assert one.value.retry_after_s == pytest.approx(50 * (0.2 + 4 * 0.001) / 4, rel=0.05)
    with pytest.raises(QueueFullError) as many:
        admission.admit(AdmissionRequest(num_prompts=500))
    assert many.value.retry_after_s == 60, "never more than a minute"


def test_tokens_of_a_text_follow_the_last_texts() -> None:
    admission = made()
    assert admission.tokens_of(100) == 30
    for _ in range(100):
        ticket = admission.admit(AdmissionRequest(num_characters=4000))
        admission.check_tokens(ticket, 1000)
        ticket.leave()
    assert admission.tokens_of(8000) == pytest.approx(2000, rel=0.01)
    admission.check_tokens(admission.admit(AdmissionRequest(num_ids=12)), 12)
    assert admission.tokens_of(8000) == pytest.approx(2000, rel=0.01)


def test_limits_of_a_key_hold_and_its_refusals_are_counted() -> None:
    key = KeyInfo("a", "a", requests_per_minute=3, tokens_per_minute=1000, max_concurrent=2)
    admission = made()
    admission.check_arrival(key)
    first = admission.admit(AdmissionRequest(key=key, num_ids=100))
    admission.check_tokens(first, 100)
    first.generated(40)
    admission.check_arrival(key)
    second = admission.admit(AdmissionRequest(key=key, num_ids=100))
    with pytest.raises(RateLimitError, match="2 of its requests are open, 2 may be"):
        admission.check_arrival(key)
    second.leave()
    with pytest.raises(RateLimitError, match="1000 tokens a minute") as refusal:
        admission.admit(AdmissionRequest(key=key, num_ids=861))
    assert refusal.value.retry_after_s == pytest.approx(1 * 60 / 1000)
    admission.check_arrival(key)
    with pytest.raises(RateLimitError, match="3 requests a minute") as refusal:
        admission.check_arrival(key)
    assert refusal.value.retry_after_s == pytest.approx(20)
    meter = admission.meters["a"]
    assert (meter.num_requests, meter.num_tokens, meter.num_refused, meter.num_open) == (3, 140, 3, 1)
    admission.check_arrival(KeyInfo("b", "b"))


def test_whatever_happens_every_ticket_is_given_back() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        admission = made(slots=rng.randint(1, 6), bound=rng.randint(1, 20), tokens=rng.randint(100, 3000), kv=2000)
        keys = [KeyInfo(name, name, weight=rng.choice((1.0, 3.0))) for name in "abc"]
        open_tickets: list[tuple[AdmissionTicket, AdmissionRequest]] = []
        for _ in range(150):
            step(admission, rng, keys, open_tickets)
            room = admission.queue
            assert room.num_running == sum(ticket.num_started * request.width for ticket, request in open_tickets)
            assert room.num_pending == sum(ticket.num_waiting * request.width for ticket, request in open_tickets)
            assert sum(room.by_key.values()) == room.num_pending and room.num_waiting >= 0
            assert room.num_tokens_held >= 0
        for ticket, _ in open_tickets:
            ticket.leave()
        room = admission.queue
        assert (room.num_running, room.num_pending, room.num_tokens_held, room.num_waiting_tokens) == (0, 0, 0, 0)
        assert not room.by_key and not room.tokens_by_key and not room._by_priority
        assert all(meter.num_open == 0 for meter in admission.meters.values())


def step(
    admission: AdmissionControl,
    rng: random.Random,
    keys: list[KeyInfo],
    open_tickets: list[tuple[AdmissionTicket, AdmissionRequest]],
) -> None:
    """Something that may happen to requests."""
    if rng.random() < 0.4 or not open_tickets:
        tokens = rng.randint(1, 200)
        request = AdmissionRequest(
            rng.choice(keys), rng.randint(-2, 2), rng.randint(1, 3), rng.randint(1, 3), num_characters=tokens * 3
        )
        try:
            ticket = admission.admit(request)
        except (QueueFullError, LoadShedError):
            return
        open_tickets.append((ticket, request))
        try:
            admission.check_tokens(ticket, tokens)
        except QueueFullError:
            ticket.leave()
            open_tickets.pop()
        return
    ticket, _ = rng.choice(open_tickets)
    actions: list[Callable[[], None]] = [
        lambda: ticket.generated(0, is_first=True),
        lambda: ticket.generated(rng.randint(1, 20)),
        lambda: ticket.ended(10, 0),
        ticket.leave,
    ]
    index = rng.randrange(4)
    actions[index]()
    if index == 3:
        open_tickets[:] = [entry for entry in open_tickets if entry[0] is not ticket]
