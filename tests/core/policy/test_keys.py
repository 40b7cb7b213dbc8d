"""What each policy says of requests in each state, and its bounds; asked directly, without a scheduler."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from tests.core.harness import limits

from octavo.core.policy import POLICIES, PolicyGuard, create_policy
from octavo.core.policy.basic import PrefixAffinity, ShortestPrefill
from octavo.core.policy.fair import Fair
from octavo.core.request import Request
from octavo.core.request_state import RequestState, Sequence, Status

ALL = ("deadline", "fair", "fcfs", "fifo", "prefill_first", "prefix_affinity", "priority", "shortest_prefill")


def asked(order: int = 0, length: int = 10, num_outputs: int = 0, **fields: Any) -> RequestState:
    """A waiting request; fields of Request, arrival = order unless given."""
    fields.setdefault("arrival", float(order))
    state = RequestState(Request(f"r{order}", None, num_prompt_tokens=length, **fields), order)
    state.sequences = [Sequence(state, 0, 1)]
    state.sequences[0].num_committed += num_outputs
    return state


def running(state: RequestState, is_decoding: bool = True) -> RequestState:
    state.status, state.is_decoding = Status.RUNNING, is_decoding
    return state


def guard(name: str, **changes: Any) -> PolicyGuard:
    return PolicyGuard(create_policy(name, limits(policy=name, **changes)))


def order_of(policy: PolicyGuard, states: list[RequestState]) -> list[int]:
    """Arrival ranks in order of service."""
    return [state.order for state in sorted(states, key=policy.rank)]


def test_S06_every_policy_is_registered_under_its_name() -> None:
    built_in = {name for name, policy in POLICIES.items() if policy.__module__.startswith("octavo.")}
    assert built_in == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_S05_defaults_of_headroom(name: str) -> None:
    assert guard(name).headroom == {"fifo": 0.2, "prefill_first": 0.0}.get(name, 0.01)


@pytest.mark.parametrize("name", ALL)
def test_S23_who_skips_ahead_and_S06_who_preempts_on_arrival(name: str) -> None:
    policy = guard(name)
    assert policy.skip_ahead == (name in ("fifo", "prefill_first"))
    assert not policy.preempt_on_arrival


@pytest.mark.parametrize("name", ALL)
def test_S06_equal_requests_go_by_arrival_and_the_latest_is_the_victim(name: str) -> None:
    policy = guard(name)
    states = [asked(order, arrival=1.0) for order in range(5)]
    for state in states:
        policy.notify("arrived", state)
    assert order_of(policy, states[::-1]) == [0, 1, 2, 3, 4]
    assert max(states, key=policy.victim_rank).order == 4
    assert policy.num_errors == 0


@pytest.mark.parametrize("name", ALL)
def test_S08_a_preempted_request_is_ranked_where_it_was(name: str) -> None:
    policy = guard(name)
    state = asked(3, length=20, priority=2, ttft_objective=0.5)
    policy.notify("arrived", state)
    before, lane = policy.rank(state), policy.lane(state)
    policy.notify("admitted", state, 20)
    running(state)
    state.sequences[0].num_committed += 7
    policy.notify("served", state, 7)
    state.status, state.is_decoding = Status.WAITING, False
    state.num_preemptions += 1
    policy.notify("preempted", state)
    assert (policy.rank(state), policy.lane(state)) == (before, lane)


@pytest.mark.parametrize(("name", "expected"), [("fifo", [2, 1, 0]), ("prefill_first", [1, 2, 0]), ("fcfs", [0, 1, 2])])
def test_S06_fifo_and_prefill_first_order_by_phase(name: str, expected: list[int]) -> None:
    states = [asked(0), running(asked(1), is_decoding=False), running(asked(2))]
    policy = guard(name)
    assert order_of(policy, states) == expected
    assert max(states, key=policy.victim_rank).order == 2


# -- priority


def test_S06_priority_goes_by_number_then_arrival_and_the_last_is_the_victim() -> None:
    policy = guard("priority")
    states = [asked(0, priority=1), asked(1, priority=0), asked(2, priority=0), asked(3, priority=-1)]
    assert order_of(policy, states) == [3, 1, 2, 0]
    assert max(states, key=policy.victim_rank).order == 0


def test_S06_priority_ages_one_level_per_minute() -> None:
    policy = guard("priority")
    old = asked(0, priority=1, arrival=0.0)
    assert order_of(policy, [old, asked(1, priority=0, arrival=59.0)]) == [1, 0]
    assert order_of(policy, [old, asked(1, priority=0, arrival=60.0)]) == [0, 1]  # a tie: by arrival
    assert order_of(policy, [old, asked(1, priority=0, arrival=61.0)]) == [0, 1]


def test_S10_priority_bounds_how_long_better_numbers_pass() -> None:
    """With levels 0..9, a request of level 9 is passed only by arrivals of its first nine minutes."""
    policy, low = guard("priority"), asked(0, priority=9, arrival=0.0)
    passing = [t for t in range(0, 2000) if policy.rank(asked(1, arrival=float(t), priority=0)) < policy.rank(low)]
    assert max(passing) == 9 * 60 - 1


# -- deadline


def test_S06_deadline_goes_by_when_the_first_token_is_due() -> None:
    policy = guard("deadline")
    states = [
        asked(0, arrival=0.0, ttft_objective=5.0),
        asked(1, arrival=0.1),  # one second by default
        asked(2, arrival=0.2, ttft_objective=0.5),
        asked(3, arrival=0.3, ttft_objective=60.0, deadline=0.6),
    ]
    assert order_of(policy, states) == [3, 2, 1, 0]


def test_S06_deadline_goes_by_the_next_token_once_decoding_and_preempts_the_one_with_most_time() -> None:
    policy = guard("deadline")
    ahead = running(asked(0, num_outputs=100, arrival=0.0, tpot_objective=0.1))  # due at 1 + 10
    late = running(asked(1, num_outputs=2, arrival=0.5, tpot_objective=0.1))  # due at 1.7
    assert policy.rank(ahead)[0] == pytest.approx((11.0,))
    assert max([ahead, late], key=policy.victim_rank) is ahead
    fresh = running(asked(2, arrival=2.0), is_decoding=False)
    assert order_of(policy, [ahead, late, fresh]) == [1, 2, 0]


def test_S10_deadline_is_passed_only_by_arrivals_within_the_objective() -> None:
    policy, first = guard("deadline"), asked(0, arrival=0.0, ttft_objective=3.0)
    passing = [
        t for t in range(100) if policy.rank(asked(1, arrival=float(t), ttft_objective=0.0)) < policy.rank(first)
    ]
    assert passing == [0, 1, 2]


# -- shortest_prefill, prefix_affinity


def test_S06_shortest_prefill_goes_by_length_and_place() -> None:
    policy, weight = guard("shortest_prefill"), ShortestPrefill.weight
    assert order_of(policy, [asked(0, length=500), asked(1, length=20)]) == [1, 0]
    assert order_of(policy, [asked(0, length=20 + weight), asked(1, length=20)]) == [0, 1]  # a tie: by arrival
    assert order_of(policy, [asked(0, length=21 + weight), asked(1, length=20)]) == [1, 0]
    assert policy.victim_rank(asked(0, length=500)) < policy.victim_rank(asked(1, length=20))


@pytest.mark.parametrize("length", [1, 2, 33, 34, 400, 1000])
def test_S10_shortest_prefill_bounds_how_many_later_arrivals_pass(length: int) -> None:
    """Against the worst case, a stream of one-token prompts."""
    policy, mine = guard("shortest_prefill"), asked(7, length=length)
    later = [asked(7 + k, length=1) for k in range(1, 200)]
    num_passing = sum(policy.rank(state) < policy.rank(mine) for state in later)
    assert num_passing <= (length - 1) / ShortestPrefill.weight
    assert num_passing == max(0, math.ceil((length - 1) / ShortestPrefill.weight) - 1)  # and the bound is tight


@pytest.mark.parametrize("longest", [0, 16, 17, 160, 1000])
def test_S10_prefix_affinity_bounds_how_many_later_arrivals_pass(longest: int) -> None:
    policy, mine = guard("prefix_affinity"), asked(7)
    later = [asked(7 + k) for k in range(1, 200)]
    num_passing = sum(policy.preference(state, longest) < policy.preference(mine, 0) for state in later)
    assert num_passing == max(0, math.ceil(longest / PrefixAffinity.weight) - 1)
    assert policy.lookahead == 64


# -- fair


class Tenants:
    """The hooks of the fair policy, called as the scheduler does."""

    def __init__(self, **changes: Any) -> None:
        self.policy = Fair()
        self.policy.configure(limits(policy="fair", **changes))
        self.num_arrived = 0

    def arrive(self, tenant: str, length: int = 10) -> RequestState:
        state = asked(self.num_arrived, length=length, tenant=tenant)
        self.num_arrived += 1
        self.policy.arrived(state)
        return state

    def admit(self, state: RequestState, num_tokens: int | None = None) -> RequestState:
        self.policy.admitted(state, state.request.num_prompt_tokens if num_tokens is None else num_tokens)
        return running(state)

    def counter(self, tenant: str) -> float:
        return self.policy.lane_key(tenant)


def test_S06_fair_charges_prompts_once_and_outputs_as_they_come() -> None:
    tenants = Tenants()
    state = tenants.admit(tenants.arrive("a", 10))
    assert tenants.counter("a") == 10
    tenants.policy.served(state, 3)
    assert tenants.counter("a") == 16
    tenants.policy.preempted(state)
    tenants.admit(state, 13)
    assert tenants.counter("a") == 16
    tenants.policy.served(state, 1)
    assert tenants.counter("a") == 18


def test_S06_fair_charges_what_is_computed_not_what_is_cached() -> None:
    tenants = Tenants()
    tenants.admit(tenants.arrive("a", 100), 4)
    assert tenants.counter("a") == 4


def test_S06_fair_divides_by_the_weight_of_the_tenant() -> None:
    tenants = Tenants(tenant_weights=(("big", 4.0),))
    tenants.admit(tenants.arrive("big", 100))
    tenants.admit(tenants.arrive("small", 100))
    assert (tenants.counter("big"), tenants.counter("small")) == (25, 100 + 25)  # small began at 25, the last to leave


def test_S06_fair_lifts_a_tenant_that_comes_back_so_that_nobody_saves_up() -> None:
    tenants = Tenants()
    early = tenants.admit(tenants.arrive("idle", 1))
    tenants.policy.finished(early)
    tenants.arrive("busy")
    for _ in range(20):
        tenants.admit(tenants.arrive("busy", 50))
    assert tenants.counter("busy") >= 1000
    tenants.arrive("idle")
    assert tenants.counter("idle") == tenants.counter("busy")


def test_S06_fair_lifts_to_the_lowest_that_waits() -> None:
    tenants = Tenants()
    first, second = tenants.arrive("a", 30), tenants.arrive("b", 70)
    tenants.arrive("a"), tenants.arrive("b")
    tenants.admit(first), tenants.admit(second)
    assert (tenants.counter("a"), tenants.counter("b")) == (30, 70)
    tenants.arrive("c")
    assert tenants.counter("c") == 30


def test_S06_fair_lifts_to_the_last_to_leave_when_nobody_waits() -> None:
    tenants = Tenants()
    state = tenants.admit(tenants.arrive("a", 30))
    tenants.policy.served(state, 5)
    tenants.arrive("b")
    assert tenants.counter("b") == 40


def test_S06_fair_names_the_most_served_tenant_then_the_latest() -> None:
    tenants = Tenants()
    policy = PolicyGuard(tenants.policy)
    light = tenants.admit(tenants.arrive("light", 5))
    heavy = [tenants.admit(tenants.arrive("heavy", 50)) for _ in range(2)]
    assert max([light, *heavy], key=policy.victim_rank) is heavy[1]
    assert policy.lane(light) == "light"


def test_S06_fair_forgets_tenants_without_requests() -> None:
    tenants = Tenants()
    for index in range(1000):
        state = tenants.admit(tenants.arrive(f"t{index}"))
        tenants.policy.served(state, index % 7)
        tenants.policy.finished(state)
    assert len(tenants.policy._tenants) + len(tenants.policy._idle._heap) + len(tenants.policy._waiting._heap) < 20
    assert not tenants.policy._accounts


class PlainModel:
    """The paper's rule, written down plainly with nothing forgotten, beside the policy."""

    def __init__(self, seed: int) -> None:
        self.rng, self.tenants = random.Random(seed), Tenants(tenant_weights=(("t1", 3.0),))
        self.counters: dict[str, float] = {}
        self.waiting: list[RequestState] = []
        self.live: list[RequestState] = []
        self.last: str | None = None

    def charge(self, state: RequestState, service: float) -> None:
        self.counters[state.request.tenant] += service / (3.0 if state.request.tenant == "t1" else 1.0)

    def queued(self) -> list[str]:
        return sorted({state.request.tenant for state in self.waiting})

    def enter(self, name: str) -> None:
        if name not in self.queued():
            last = 0.0 if self.last is None else self.counters[self.last]
            floor = min((self.counters[other] for other in self.queued()), default=last)
            self.counters[name] = max(self.counters.get(name, 0.0), floor)

    def leave(self, state: RequestState) -> None:
        self.waiting.remove(state)
        if state.request.tenant not in self.queued():
            self.last = state.request.tenant

    def arrive(self) -> None:
        name = self.rng.choice([f"t{index}" for index in range(5)])
        self.enter(name)
        self.waiting.append(self.tenants.arrive(name, self.rng.randrange(1, 100)))

    def admit(self) -> None:
        state = self.rng.choice(self.waiting)
        self.leave(state)
        self.live.append(self.tenants.admit(state))
        if not state.num_preemptions:
            self.charge(state, state.request.num_prompt_tokens)

    def serve(self) -> None:
        state = self.rng.choice(self.live)
        self.tenants.policy.served(state, 2)
        self.charge(state, 4)

    def preempt(self) -> None:
        state = self.live.pop(self.rng.randrange(len(self.live)))
        state.num_preemptions += 1
        self.enter(state.request.tenant)
        self.waiting.append(state)
        self.tenants.policy.preempted(state)

    def finish(self) -> None:
        state = self.rng.choice(self.live + self.waiting)
        if state in self.waiting:
            self.leave(state)
        else:
            self.live.remove(state)
        self.tenants.policy.finished(state)

    def act(self) -> None:
        choices = [self.arrive] * 6 if len(self.waiting + self.live) < 12 else []
        choices += [self.admit] * 5 if self.waiting else []
        choices += [self.serve, self.serve, self.serve, self.preempt] if self.live else []
        choices += [self.finish, self.finish] if self.live or self.waiting else []
        self.rng.choice(choices)()


@pytest.mark.parametrize("seed", range(5))
def test_S06_fair_counters_only_grow_while_anybody_waits_and_match_a_plain_model(seed: int) -> None:
    model = PlainModel(seed)
    for _ in range(2000):
        before = {name: model.tenants.counter(name) for name in model.queued()}
        model.act()
        assert all(model.tenants.counter(name) >= counter for name, counter in before.items())
        for state in model.waiting + model.live:
            name = state.request.tenant
            assert model.tenants.counter(name) == pytest.approx(model.counters[name])
