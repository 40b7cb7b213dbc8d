"""A policy that returns nonsense breaks nothing: what PolicyGuard lets through, and whole random runs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.harness import Run, limits, prompt
from tests.core.policy.hostile import BadInt, BadText, BadTuple, Hostile
from tests.core.random_driver import Driver

from octavo.core.policy import Policy, PolicyGuard, create_policy, register_policy
from octavo.core.request import Request
from octavo.core.request_state import MAX_RETURNS, RequestState
from octavo.errors import ConfigError

NAN = float("nan")
NO_KEYS: list[Any] = [
    None, 1, "a", [1], (None,), ("a",), (NAN,), (1, NAN), (10**400,), (1j,), BadTuple((1,)), (BadInt(1),), object(),
    ((1,),),
]  # fmt: skip


class Saying(Policy):
    """Says what it is told to say."""

    name = "saying"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _say(self, *args: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    key = victim_key = lane = lane_key = prefer = arrived = _say


REQUEST = RequestState(Request("r", None, num_prompt_tokens=1), 5)


@pytest.mark.parametrize(
    "answer", [*NO_KEYS, ValueError("no"), StopIteration()], ids=lambda answer: type(answer).__name__
)
def test_S06_a_key_that_is_no_tuple_of_numbers_counts_as_none_and_is_counted(answer: Any) -> None:
    policy = PolicyGuard(Saying(answer))
    assert policy.rank(REQUEST) == policy.preference(REQUEST, 3) == ((), 5)
    assert policy.victim_rank(REQUEST) == ((1.0,), 5)
    assert policy.num_errors == 3
    assert policy.first_error.startswith("key")


def test_S06_who_was_preempted_often_is_the_last_to_be_named_again() -> None:
    """Victims that take turns would never end; and nobody should be put back again and again under any policy."""
    often = [RequestState(Request(f"r{order}", None, num_prompt_tokens=1), order) for order in range(3)]
    for request in often[1:]:
        request.num_preemptions = MAX_RETURNS
    policy = PolicyGuard(Saying((float("-inf"),)))
    assert sorted(often, key=policy.victim_rank) == [often[1], often[2], often[0]]
    policy = PolicyGuard(create_policy("fcfs", limits()))
    assert sorted(often, key=policy.victim_rank) == [often[1], often[2], often[0]]


@pytest.mark.parametrize(
    ("answer", "key"), [((), ()), ((1,), (1.0,)), ((True, 2.5), (1.0, 2.5)), ((float("inf"),), (float("inf"),))]
)
def test_S06_a_good_key_is_taken_as_floats(answer: Any, key: tuple[float, ...]) -> None:
    policy = PolicyGuard(Saying(answer))
    assert policy.rank(REQUEST) == (key, 5)
    assert all(type(part) is float for part in policy.rank(REQUEST)[0])
    assert policy.num_errors == 0


@pytest.mark.parametrize("answer", [None, 1, b"a", ["a"], ValueError("no")], ids=lambda answer: type(answer).__name__)
def test_S06_a_lane_that_is_no_string_is_the_common_one(answer: Any) -> None:
    policy = PolicyGuard(Saying(answer))
    assert policy.lane(REQUEST) == ""
    assert policy.num_errors == 1


def test_S06_a_strange_string_becomes_a_plain_one() -> None:
    lane = PolicyGuard(Saying(BadText("a"))).lane(REQUEST)
    assert type(lane) is str and lane == "a"


@pytest.mark.parametrize(
    "answer", [None, "x", NAN, (1,), 10**400, BadInt(1), ValueError("no")], ids=lambda answer: type(answer).__name__
)
def test_S06_a_lane_key_that_is_no_number_is_zero(answer: Any) -> None:
    policy = PolicyGuard(Saying(answer))
    assert policy.lane_key("a") == 0.0
    assert policy.num_errors == 1


def test_S06_a_hook_that_raises_is_counted_and_goes_no_further() -> None:
    policy = Saying(ValueError("my words"))
    policy.finished = None  # type: ignore[assignment,method-assign]
    guard = PolicyGuard(policy)
    guard.notify("arrived", REQUEST)
    guard.notify("finished", REQUEST)
    assert guard.num_errors == 2 and guard.first_error == "arrived: ValueError: my words"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("headroom", NAN, "headroom is nan; give a share"),
        ("headroom", 1.0, "headroom is 1.0; give a share"),
        ("headroom", "much", "headroom is 'much'; give a share"),
        ("lookahead", 0, "lookahead is 0; give a number"),
        ("lookahead", NAN, "lookahead is nan; give a number"),
        ("skip_ahead", property(lambda self: 1 / 0), "ZeroDivisionError"),
        ("configure", lambda self, limits: {}["x"], "KeyError"),
        ("__init__", lambda self, more: None, "TypeError"),
    ],
)
def test_S06_a_policy_that_cannot_start_is_named(registry: None, name: str, value: Any, message: str) -> None:
    register_policy(type("Broken", (Policy,), {"name": "broken", name: value}))
    with pytest.raises(ConfigError, match=f"policy 'broken' does not start: .*{message}"):
        create_policy("broken", limits())


def test_S06_attributes_are_read_once() -> None:
    policy = Saying(())
    guard = PolicyGuard(policy)
    policy.headroom = NAN
    policy.lookahead = -1
    assert (guard.headroom, guard.lookahead) == (0.01, 1)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (7, "is no policy; give a subclass"),
        (dict, "is no policy; give a subclass"),
        (type("A", (Policy,), {"name": ""}), "give it a name"),
        (type("A", (Policy,), {"name": "a b"}), "give it a name"),
        (type("A", (Policy,), {"name": None}), "give it a name"),
        (type("A", (Policy,), {"name": "fair"}), "registered already"),
    ],
)
def test_S06_what_is_no_policy_is_refused(registry: None, policy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_policy(policy)


def test_S06_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'best'; give one of deadline, fair, fcfs, fifo, "):
        create_policy("best", limits())


@pytest.mark.parametrize("seed", range(24))
def test_S06_a_hostile_policy_breaks_no_invariant(seed: int, registry: None) -> None:
    """Random verbs, faults and scarcity under random nonsense: every check of the harness holds, and all ends."""
    register_policy(type("Hostile", (Hostile,), {"seed": seed}))
    driver = Driver(seed, policy="hostile", max_draft_tokens=7 * (seed % 2))
    driver.drive(250)
    policy = driver.run.scheduler._state.policy
    assert driver.run.num_epochs > 1 or (policy.num_errors > 5 and policy.first_error)  # a new engine's policy is new


def test_S06_a_hostile_run_replays_bit_for_bit(registry: None) -> None:
    """Nonsense comes from a seed; what the scheduler makes of it has no other source."""
    register_policy(Hostile)
    digests = []
    for _ in range(2):
        driver = Driver(3, policy="hostile")
        driver.drive(150)
        digests.append(driver.run.digests)
    assert digests[0] == digests[1]


class Unservable(Policy):
    """Its hook cannot even be looked up."""

    name = "test_unservable"
    tracks_service = True

    def __getattribute__(self, name: str) -> Any:
        if name == "served":
            raise ValueError("no such thing")
        return super().__getattribute__(name)


register_policy(Unservable)


def test_S06_a_hook_that_cannot_be_looked_up_ends_nobody() -> None:
    run = Run(limits(policy="test_unservable"))
    record = run.admit(prompt(5), 4)
    run.finish()
    assert record.finished is not None and "no such thing" in run.scheduler.statistics().first_policy_error
