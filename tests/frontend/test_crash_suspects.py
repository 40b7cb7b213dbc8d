"""Requests that may kill engines: resumed, then alone, then failed; a token clears; none is forgotten."""

import random

from tests.engine.fakes import make_request
from tests.frontend.ledgers import begin, has_engine, is_holding
from tests.frontend.test_open_requests import tokens

from octavo.core.request import FinishReason, Request
from octavo.frontend.open_request import OpenRequest
from octavo.frontend.open_requests import MAX_CRASHES, OpenRequests


def opened(*names: str) -> OpenRequests:
    requests = OpenRequests()
    for name in names:
        requests.restore(OpenRequest(make_request(name, max_tokens=90)))
    return requests


def names_of(sent: list[Request]) -> list[str]:
    return [request.request_id for request in sent]


def give_token(requests: OpenRequests, name: str) -> None:
    state = requests.get_open(name)
    assert state is not None
    requests.accept(requests.epoch, tokens(name, len(state.pages[0].ids), 5))


def crashes_of(requests: OpenRequests, name: str) -> int:
    state = requests.get_open(name)
    assert state is not None
    return state.num_crashes


def test_a_request_comes_back_then_alone_then_not_at_all() -> None:
    requests = opened("a", "bad", "b")
    begin(requests, 1)
    requests.lose_engine(["bad", "a"])
    assert names_of(begin(requests, 2)) == ["a", "bad", "b"] and not is_holding(requests)
    give_token(requests, "a")
    requests.lose_engine(["bad", "a"])
    sent = begin(requests, 3)
    assert names_of(sent) == ["bad"] and is_holding(requests)
    requests.restore(OpenRequest(make_request("new")))
    assert names_of(sent) == ["bad"] and not has_engine(requests, "new") and not has_engine(requests, "a")
    requests.lose_engine(["bad"])
    bad = requests.get("bad")
    assert bad is not None and bad.end is not None and bad.end.finish_reason is FinishReason.ERROR
    sent = begin(requests, 4)
    assert names_of(sent) == ["a", "b", "new"] and not is_holding(requests)
    requests.restore(OpenRequest(make_request("later")))
    assert names_of(sent)[3:] == ["later"]


def test_a_token_clears_and_the_next_suspect_is_tried() -> None:
    requests = opened("c", "a", "b")
    for epoch in (1, 2):
        begin(requests, epoch)
        requests.lose_engine(["a", "b"])
    sent = begin(requests, 3)
    assert names_of(sent) == ["a"]
    give_token(requests, "a")
    assert names_of(sent) == ["a", "b"]
    give_token(requests, "b")
    assert names_of(sent) == ["a", "b", "c"] and not is_holding(requests)
    requests.lose_engine(["a"])
    assert crashes_of(requests, "a") == crashes_of(requests, "b") == 0


def test_a_request_that_ends_while_held_is_not_sent() -> None:
    requests = opened("a", "b", "c")
    for epoch in (1, 2):
        begin(requests, epoch)
        requests.lose_engine(["a", "b"])
    sent = begin(requests, 3)
    for name in ("b", "c", "a"):
        requests.end(name, FinishReason.CANCELLED)
    assert names_of(sent) == ["a"] and not is_holding(requests)


def test_one_killer_among_many_fails_within_three_crashes_and_no_other() -> None:
    """Whatever the others got done between two crashes: in a step that kills, no request gets a token."""
    for seed in range(200):
        rng, names = random.Random(seed), [f"r{i}" for i in range(32)]
        requests, bad, crashes = opened(*names), rng.choice(names), 0
        while requests.get_open(bad) is not None:
            sent = begin(requests, requests.epoch + 1)
            has_token: set[str] = set()
            while bad not in names_of(sent):
                for name in names_of(sent):
                    if name not in has_token:
                        has_token.add(name)
                        give_token(requests, name)
            crashes += 1
            requests.lose_engine(names_of(sent))
        assert crashes == MAX_CRASHES and requests.num_failed_suspects == 1 and len(requests) == 31
