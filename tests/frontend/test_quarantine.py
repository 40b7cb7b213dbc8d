"""Quarantine: resumed, then alone, then convicted; a token clears; nobody is forgotten."""

import random

from octavo.frontend.quarantine import CONVICTED, Quarantine


def test_a_request_comes_back_then_alone_then_not_at_all() -> None:
    quarantine = Quarantine()
    assert quarantine.crashed(["bad", "a"]) == []
    quarantine.line_up(["a", "bad", "b"])
    assert quarantine.release() == ["a", "bad", "b"] and not quarantine.is_holding
    quarantine.settled("a")
    assert quarantine.crashed(["bad"]) == []
    quarantine.line_up(["a", "bad", "b"])
    assert quarantine.release() == ["bad"] and quarantine.on_trial == "bad"
    assert quarantine.release() == [] and not quarantine.may_go("new") and quarantine.is_held("new")
    assert quarantine.crashed(["bad"]) == ["bad"]
    quarantine.settled("bad")
    quarantine.line_up(["a", "b", "new"])
    assert quarantine.release() == ["a", "b", "new"] and quarantine.may_go("later")


def test_a_token_clears_and_the_next_suspect_is_tried() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.crashed(["a", "b"])
    quarantine.line_up(["c", "a", "b"])
    assert quarantine.release() == ["a"]
    quarantine.settled("a")
    assert quarantine.count("a") == 0 and quarantine.release() == ["b"]
    quarantine.settled("b")
    assert quarantine.release() == ["c"] and not quarantine.is_holding


def test_whoever_ends_while_held_is_not_sent() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.crashed(["a", "b"])
    quarantine.line_up(["a", "b", "c"])
    quarantine.release()
    quarantine.settled("b")
    quarantine.settled("c")
    quarantine.settled("a")
    assert quarantine.release() == [] and not quarantine.is_holding


def test_one_killer_among_many_is_convicted_within_three_crashes_and_nobody_else() -> None:
    """Whatever the others got done between two crashes: in a step that kills, nobody gets a token."""
    for seed in range(200):
        rng, quarantine = random.Random(seed), Quarantine()
        names = [f"r{i}" for i in range(32)]
        bad, crashes, convicted = rng.choice(names), 0, []
        sent: list[str] = []
        quarantine.line_up(names)
        has_token: set[str] = set()
        while not convicted:
            sent += quarantine.release()
            if bad in sent:
                assert sent.index(bad) >= 0
                crashes += 1
                convicted = quarantine.crashed([name for name in sent if name not in has_token])
                sent, has_token = [], set()
                quarantine.line_up(names)
                continue
            for name in sent:
                has_token.add(name)
                quarantine.settled(name)
        assert (convicted, crashes) == ([bad], CONVICTED)
