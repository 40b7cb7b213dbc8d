"""CrashSuspects: resumed, then alone, then convicted; a token clears; nobody is forgotten."""

import random

from octavo.frontend.crash_suspects import MAX_CRASHES, CrashSuspects


def test_a_request_comes_back_then_alone_then_not_at_all() -> None:
    suspects = CrashSuspects()
    assert suspects.crashed(["bad", "a"]) == []
    suspects.begin_epoch(["a", "bad", "b"])
    assert suspects.release() == ["a", "bad", "b"] and not suspects.is_holding
    suspects.clear("a")
    assert suspects.crashed(["bad"]) == []
    suspects.begin_epoch(["a", "bad", "b"])
    assert suspects.release() == ["bad"] and suspects.alone == "bad"
    assert suspects.release() == [] and suspects.hold("new") and suspects.is_held("new")
    assert suspects.crashed(["bad"]) == ["bad"]
    suspects.clear("bad")
    suspects.begin_epoch(["a", "b", "new"])
    assert suspects.release() == ["a", "b", "new"] and not suspects.hold("later")


def test_a_token_clears_and_the_next_suspect_is_tried() -> None:
    suspects = CrashSuspects()
    for _ in range(2):
        suspects.crashed(["a", "b"])
    suspects.begin_epoch(["c", "a", "b"])
    assert suspects.release() == ["a"]
    suspects.clear("a")
    assert suspects.count("a") == 0 and suspects.release() == ["b"]
    suspects.clear("b")
    assert suspects.release() == ["c"] and not suspects.is_holding


def test_whoever_ends_while_held_is_not_sent() -> None:
    suspects = CrashSuspects()
    for _ in range(2):
        suspects.crashed(["a", "b"])
    suspects.begin_epoch(["a", "b", "c"])
    suspects.release()
    suspects.clear("b")
    suspects.clear("c")
    suspects.clear("a")
    assert suspects.release() == [] and not suspects.is_holding


def test_one_killer_among_many_is_convicted_within_three_crashes_and_nobody_else() -> None:
    """Whatever the others got done between two crashes: in a step that kills, nobody gets a token."""
    for seed in range(200):
        rng, suspects = random.Random(seed), CrashSuspects()
        names = [f"r{i}" for i in range(32)]
        bad, crashes, convicted = rng.choice(names), 0, []
        sent: list[str] = []
        suspects.begin_epoch(names)
        has_token: set[str] = set()
        while not convicted:
            sent += suspects.release()
            if bad in sent:
                assert sent.index(bad) >= 0
                crashes += 1
                convicted = suspects.crashed([name for name in sent if name not in has_token])
                sent, has_token = [], set()
                suspects.begin_epoch(names)
                continue
            for name in sent:
                has_token.add(name)
                suspects.clear(name)
        assert (convicted, crashes) == ([bad], MAX_CRASHES)
