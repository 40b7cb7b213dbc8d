"""Finds the cheapest fleet that reaches given goals on a given workload.

Owns: the goals' syntax; whether a run reached the goals, or an unfinished run still can; the space of settings; the
order and list of trials. Does not: simulate, define the figures (summary), or compute bounds (bounds).
Assumed: if n replicas miss the goals, fewer miss them too. More replicas usually serve better, but not always: a router
may spread prefixes over more caches. The result is therefore checked: the number found reaches the goals, and so does
one more (within the limit); one less was simulated and does not. Invariant: a run is stopped early only when it can no
longer reach a goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product
from typing import Any

from octavo.config import SETTINGS
from octavo.config.setting import Number, Setting
from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.fleet.routing import ROUTERS
from octavo.plugins import find_policy
from octavo.simulator.arrival import Arrival
from octavo.simulator.bounds import Demand, Requirement, fewest_engines
from octavo.simulator.columns import METRICS, POINTS, Columns, Facts
from octavo.simulator.cost_model import floors_of
from octavo.simulator.costs.hardware import THIS, device_facts
from octavo.simulator.outcomes import NEVER, RequestTracker, SimulatedRequest, SimulatedRun
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.summary import summarise

STATISTICS = ("mean", *(f"p{point}" for point in POINTS), "max")
DEFAULT_SHARE = 0.99  # share of requests that must meet the per-request bounds, if no goodput is given
MAX_REPLICAS = 1024
MAX_CANDIDATES = 4096
NUM_REJECTED = 5  # rejected settings whose limits are described
_HELP = (
    "give STATISTIC=SECONDS such as ttft_p99=1.0,tpot_p95=0.05, bounds on each request such as ttft=1.0,tpot=0.05 with "
    "goodput=SHARE of requests that meet them all, from 0 to 1"
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A statistic of a latency that may be at most `bound` seconds."""

    metric: str
    statistic: str
    bound: float

    @property
    def name(self) -> str:
        """Return the goal's name as users write it."""
        return f"{self.metric}_{self.statistic}"


@dataclass(frozen=True, slots=True)
class Goals:
    """Bounds on statistics, and per-request bounds that a `share` of all requests must meet. Refused requests fail."""

    goals: tuple[Goal, ...] = ()
    bounds: dict[str, float] = field(default_factory=dict)
    share: float = DEFAULT_SHARE

    def judge(self, run: SimulatedRun, price_per_hour: float = 0.0) -> Verdict:
        """Return the verdict on a run: whether the run reaches the goals, and its figures."""
        facts = summarise(run, self.bounds, price_per_hour)
        values = [(goal.name, facts[goal.metric][goal.statistic], goal.bound) for goal in self.goals]
        missed = [name for name, value, bound in values if value is None or value > bound]
        margins = [1 - value / bound for _, value, bound in values if value is not None]
        texts = [f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value, _ in values]
        if self.bounds:
            share = facts["goodput"]["share"]
            texts.append(f"goodput {share:.4g}")
            margins.append(share - self.share)
            if share < self.share:
                missed.append("goodput")
        if facts["requests"]["refused"]:
            missed.append("refused")
            texts.append(f"refused {facts['requests']['refused']}")
        return Verdict(not missed and not run.gave_up, min(margins, default=0.0), ", ".join(texts), facts)

    def requirements(self, num_requests: int) -> list[Requirement]:
        """Return, for each bound on a share of the requests, how many may be beyond it."""
        found: list[Requirement] = []
        for goal in self.goals:
            if goal.statistic.startswith("p"):
                rank = math.ceil(float(goal.statistic[1:]) / 100 * num_requests)
                found.append(({goal.metric: goal.bound}, num_requests - rank))
            elif goal.statistic == "max":
                found.append(({goal.metric: goal.bound}, 0))
        if self.bounds:
            found.append((self.bounds, math.floor((1 - self.share) * num_requests + 1e-9)))
        return found

    def unreachable(self, num_requests: int) -> Callable[[RequestTracker, float], bool]:
        """Return a check for a run of `num_requests` requests. It returns True once a goal can no longer be reached."""
        return _MissCounter(self, num_requests).is_over


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run reaches all goals, the smallest margin relative to its bound, a summary text, and all figures."""

    is_reached: bool
    margin: float
    text: str
    facts: Facts
    gave_up: bool = False


def read_goals(text: str) -> Goals:
    """Parse `ttft_p99=1.0,tpot_p95=0.05` or `ttft=1.0,tpot=0.05,goodput=0.95`. Raises ConfigError."""
    goals: list[Goal] = []
    bounds: dict[str, float] = {}
    share = None
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (part.strip() for part in word.partition("="))
        metric, _, statistic = name.partition("_")
        value = _number(number)
        if name == "goodput" and 0 < value <= 1 and share is None:
            share = value
        elif name in METRICS and value > 0 and name not in bounds:
            bounds[name] = value
        elif metric in METRICS and statistic in STATISTICS and value > 0:
            goals.append(Goal(metric, statistic, value))
        else:
            known = [*METRICS, "goodput", *(f"{one}_{other}" for one in METRICS for other in STATISTICS)]
            if name not in known:
                raise ConfigError(unknown("objective", name, known, _HELP))
            raise ConfigError(f"objective {word!r} has no such value, or is given twice; {_HELP}")
    if not goals and not bounds:
        raise ConfigError(f"a search has nothing to reach: {_HELP}")
    if share is not None and not bounds:
        raise ConfigError(f"goodput={share} says nothing without bounds on each request; {_HELP}")
    return Goals(tuple(goals), bounds, DEFAULT_SHARE if share is None else share)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


class _MissCounter:
    """Counts the requests beyond each bound, including open requests that are already beyond the bound."""

    def __init__(self, goals: Goals, num_requests: int) -> None:
        self._bounds = [  # metric, bound, requests allowed beyond the bound
            (metric, bound, spare)
            for bounds, spare in goals.requirements(num_requests)
            for metric, bound in bounds.items()
        ]
        self._counts = [0] * len(self._bounds)
        self._num_read = 0

    def is_over(self, tracker: RequestTracker, now: float) -> bool:
        """Return True if too many requests are beyond one of the bounds."""
        ended = Columns.of(tracker.outcomes, self._num_read)
        self._num_read = len(tracker.outcomes)
        for number, (metric, bound, spare) in enumerate(self._bounds):
            self._counts[number] += int((ended.latency(metric) > bound).sum())
            num_late = self._counts[number]
            if metric != "tpot":
                num_late += sum(now - entry.at > bound and _is_owed(entry, metric) for entry in tracker.open.values())
            if num_late > spare:
                return True
        return False


def _is_owed(entry: SimulatedRequest, metric: str) -> bool:
    if metric == "e2e":
        return True
    return (entry.first if metric == "ttft" else entry.start) == NEVER


# --- the space of settings

_SETTINGS = {
    one.name: one
    for one in SETTINGS
    if one.section == "scheduling" or one.name in ("tensor_parallel_size", "pipeline_parallel_size")
}
_OTHERS = ("device", "data_parallel_size", "enable_expert_parallel", "router")
_BY_KEY = {key.replace("-", "_"): one.name for one in _SETTINGS.values() for key in one.keys}
_BY_KEY |= {
    "tp": "tensor_parallel_size", "dp": "data_parallel_size", "pp": "pipeline_parallel_size",
    "ep": "enable_expert_parallel",
}  # fmt: skip
_EXPERTS = Setting(help="", flags=("--enable-expert-parallel",), kind=bool)
_RANKS = Number(int, 1, 1024)
_WORDS = {"True": "yes", "False": "no", "None": "auto"}


def read_space(text: str) -> dict[str, tuple[object, ...]]:
    """Parse `device=h100|l40s,max_sequences=64|256`. Raises ConfigError naming the known settings."""
    space: dict[str, tuple[object, ...]] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        spelled, _, rest = (part.strip() for part in word.partition("="))
        name = _BY_KEY.get(spelled.replace("-", "_"), spelled.replace("-", "_"))
        values = tuple(value.strip() for value in rest.split("|") if value.strip())
        known = (*_OTHERS, *_SETTINGS)
        if name not in known or not values or name in space:
            raise ConfigError(
                f"search space has {word!r}; give each of {', '.join(known)} once, with values split by |, "
                "as in device=h100|l40s,max_sequences=64|256"
            )
        space[name] = tuple(dict.fromkeys(_read_value(name, value) for value in values))
    return space


def _read_value(name: str, value: str) -> object:
    if name == "policy":
        find_policy(value)
    elif name == "device" and value.lower() not in (THIS, "cpu"):  # which would be measured here
        return device_facts(value).name
    elif name == "router" and value not in ROUTERS:
        raise ConfigError(unknown("router", value, ROUTERS, f"give one of {', '.join(sorted(ROUTERS))}"))
    elif name == "data_parallel_size":
        if not _RANKS.accepts(value):
            raise ConfigError(f"{name} is {value!r}; give {_RANKS}")
        return _RANKS(value)
    elif name == "enable_expert_parallel":
        return _EXPERTS.read(value, name)
    return _SETTINGS[name].read(value, name) if name in _SETTINGS else value


def combine(space: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the space's values, in order. Raises ConfigError for too many."""
    if (count := math.prod(map(len, space.values()))) > MAX_CANDIDATES:
        raise ConfigError(f"the search space has {count} settings; give at most {MAX_CANDIDATES}")
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def label_of(chosen: Mapping[str, Any]) -> str:
    """Return chosen settings as users write them."""
    return ", ".join(f"{name}={_WORDS.get(str(value), value)}" for name, value in chosen.items()) or "as set"


# --- the search


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination of settings: what was `chosen`, and the fleet of it with the first number of replicas to try.

    `model` and `device` are names. `price` is of one replica and hour (0: unknown), `devices` their number in it.
    """

    chosen: Mapping[str, Any]
    setup: Setup
    price: float = 0.0
    devices: int = 1
    model: str = ""
    device: str = ""

    @property
    def label(self) -> str:
        """Return the settings as users write them."""
        return label_of(self.chosen)


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One simulation: its candidate, its replicas, and the verdict."""

    candidate: Candidate
    replicas: int
    verdict: Verdict

    def __str__(self) -> str:
        result = "reached" if self.verdict.is_reached else "missed"
        return f"{self.candidate.label}, {count_replicas(self.replicas)}: {result}: {self.verdict.text}"


def count_replicas(count: int) -> str:
    """Return the number as text: 1 replica, 2 replicas."""
    return f"{count} replica{'s' * (count > 1)}"


class Fate(Enum):
    """What a search found of a candidate. The values are texts for users."""

    FOUND = "reaches the objectives"
    MISSED = "no number of replicas reaches the objectives"
    INFEASIBLE = "a lone request on an idle engine is too slow"
    BEATEN = "as many replicas as cost no more than the answer miss the objectives"
    BOUNDED = "its bound of the cost is above the answer's cost"


@dataclass(frozen=True, slots=True)
class CandidateOutcome:
    """A candidate's fate. `replicas` are the fewest that reach the goals if it is FOUND, else fewer than are needed.

    `bound` has the replicas below which no fleet can reach the goals.
    """

    candidate: Candidate
    fate: Fate
    replicas: int
    bound: float


@dataclass(slots=True)
class SearchResult:
    """The cheapest fleet (None: no fleet reaches the goals), what it costs, and all trials and outcomes.

    `cost` is in dollars per hour if all candidates have a price (`is_priced`), else in devices.
    """

    best: SearchTrial | None = None
    cost: float = 0.0
    is_priced: bool = True
    trials: list[SearchTrial] = field(default_factory=list)
    outcomes: list[CandidateOutcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cost_of(self, candidate: Candidate, replicas: int = 1) -> float:
        """Return what a fleet costs."""
        return replicas * (candidate.price if self.is_priced else candidate.devices)

    def one_less(self) -> SearchTrial | None:
        """Return the trial of the answer with one replica less."""
        best = self.best
        found = (one for one in self.trials if best is not None and one.candidate is best.candidate)
        return next((one for one in found if best is not None and one.replicas == best.replicas - 1), None)

    def nearest(self) -> list[SearchTrial]:
        """Return the best trials of other settings that cost no more than the answer, the nearest to it first."""
        found: dict[str, SearchTrial] = {}
        for trial in self.trials:
            is_cheap = self.best is None or self.cost_of(trial.candidate, trial.replicas) <= self.cost * (1 + _SAME)
            if is_cheap and (self.best is None or trial.candidate is not self.best.candidate):
                known = found.get(trial.candidate.label)
                found[trial.candidate.label] = trial if known is None else max(known, trial, key=_nearness)
        return sorted(found.values(), key=_nearness, reverse=True)[:NUM_REJECTED]


_SAME = 1e-9  # relative difference of equal costs


def _nearness(trial: SearchTrial) -> tuple[bool, bool, float]:
    """Return the order of trials: what reached the goals, what missed them by its margin, what was given up latest."""
    verdict = trial.verdict
    size = verdict.facts["requests"]["came"] if verdict.gave_up else verdict.margin
    return verdict.is_reached, not verdict.gave_up, size


@dataclass(frozen=True, slots=True)
class CapacitySearch:
    """A search among candidates. `workload()` returns the same `num_requests` arrivals each time.

    `report` is called with each trial.
    """

    workload: Callable[[], Iterable[Arrival]]
    num_requests: int
    candidates: Sequence[Candidate]
    goals: Goals
    max_replicas: int = MAX_REPLICAS
    report: Callable[[SearchTrial], object] = lambda _: None

    def run(self) -> SearchResult:
        """Find the cheapest fleet. Of equal costs, choose the one with most margin, then the first candidate.

        The next trial is of the candidate that can be the cheapest, by a bound and by its trials so far. It has the
        most replicas that cost no more than the best fleet so far, or twice as many as the last trial if there is no
        such fleet yet; if these reach the goals, the fewest are found by bisection. The search ends when no candidate
        can cost as little as the best fleet.
        """
        return _SearchRun(self).run()


@dataclass(slots=True)
class _Bracket:
    """A candidate's range: `low` replicas miss the goals, by a bound or a trial; `high` reach them (0: unknown)."""

    candidate: Candidate
    number: int
    unit: float  # cost of a replica
    bound: float
    low: int
    high: int = 0
    is_confirmed: bool = False
    tried: dict[int, SearchTrial] = field(default_factory=dict)

    @property
    def is_settled(self) -> bool:
        """True if `high` is the fewest that reach the goals."""
        return self.high == self.low + 1

    @property
    def least(self) -> tuple[float, int]:
        """Return the order of trials: by the least that the fleet can cost."""
        return self.unit * (self.low + 1), self.number

    @property
    def rank(self) -> tuple[float, float, int]:
        """Return the order of fleets that reach the goals: by cost, less margin, number."""
        if not self.high:
            return math.inf, 0.0, self.number
        return round(self.unit * self.high, 9), -self.tried[self.high].verdict.margin, self.number


class _SearchRun:
    def __init__(self, search: CapacitySearch) -> None:
        self._search = search
        self._result = SearchResult(is_priced=all(one.price > 0 for one in search.candidates))
        self._brackets = [
            _Bracket(candidate, number, self._result.cost_of(candidate), bound, self._low(bound))
            for number, (candidate, bound) in enumerate(zip(search.candidates, self._bounds(), strict=True))
        ]

    def run(self) -> SearchResult:
        while (bracket := self._next()) is not None:
            self._narrow(bracket)
        best = min(self._brackets, key=lambda one: one.rank)
        if best.high:
            self._check_one_less(best)
            self._result.best, self._result.cost = best.tried[best.high], best.rank[0]
        self._result.outcomes = [
            CandidateOutcome(one.candidate, self._fate(one), one.high if one.is_settled else one.low, one.bound)
            for one in self._brackets
        ]
        return self._result

    def _low(self, bound: float) -> int:
        return int(min(bound - 1, self._search.max_replicas))

    def _bounds(self) -> Iterator[float]:
        """Yield the replicas below which no fleet of a candidate reaches the goals."""
        search, demands, known = self._search, dict[object, Demand](), dict[object, float]()
        requirements = search.goals.requirements(search.num_requests)
        for candidate in search.candidates:
            setup, limits = candidate.setup, candidate.setup.limits
            floors = floors_of(setup.costs, limits.max_batch_tokens)
            caches = limits.block_size, limits.prefix_caching, limits.max_model_len
            key = (*caches, limits.max_sequences, limits.max_batch_tokens, limits.max_draft_tokens, floors)
            if key not in known and floors:
                if caches not in demands:
                    demands[caches] = Demand.of(search.workload(), limits)
                known[key] = fewest_engines(demands[caches], requirements, floors, limits)
            engines = known.get(key, 1)
            yield engines if math.isinf(engines) else math.ceil(engines / setup.fleet[0].replica.num_engines)

    def _next(self) -> _Bracket | None:
        """Return the candidate to simulate next; None if none that is open can cost as little as the best fleet.

        It is the best one so far until it has the fewest replicas that it can: then others are given up sooner.
        """
        best = min(self._brackets, key=lambda one: one.rank)
        if best.high and not best.is_settled:
            return best
        confirmed = min((one.rank for one in self._brackets if one.is_confirmed), default=(math.inf, 0.0, 0))
        still_open = [
            one
            for one in self._brackets
            if one.low < self._search.max_replicas
            and not (one.is_settled and (one.is_confirmed or one.rank > confirmed))
        ]
        bracket = min(still_open, key=lambda one: one.least, default=None)
        return None if bracket is None or bracket.least[0] > best.rank[0] * (1 + _SAME) else bracket

    def _best_cost(self) -> float:
        return min(one.rank[0] for one in self._brackets)

    def _narrow(self, one: _Bracket) -> None:
        """Simulate a candidate once: with the most replicas that cost no more than the best fleet, or by bisection."""
        if one.is_settled:
            self._confirm(one)
            return
        most, cost = self._search.max_replicas, self._best_cost()
        if not math.isinf(cost):
            most = min(most, int(cost / one.unit * (1 + _SAME)))
        if one.high and most >= one.high:
            replicas = (one.low + one.high) // 2
        elif not math.isinf(cost):
            replicas = most
        else:
            replicas = min(most, 2 * one.low if one.tried else max(one.candidate.setup.replicas, int(one.bound)))
        if self._reaches(one, replicas):
            one.high = replicas
        else:
            one.low = replicas

    def _confirm(self, one: _Bracket) -> None:
        """Move to the first number that reaches the goals, as one more replica does."""
        most, high = self._search.max_replicas, one.high
        while high < most and not self._reaches(one, high + 1):
            self._result.notes.append(
                f"{one.candidate.label}: {high} replicas reach the goals, {high + 1} do not; more is not always better "
                "here, so the number taken is the first that holds with one more, too"
            )
            high += 2
            while high <= most and not self._reaches(one, high):
                high += 1
        one.is_confirmed = high <= most
        one.low, one.high = (high - 1, high) if one.is_confirmed else (most, 0)

    def _check_one_less(self, best: _Bracket) -> None:
        """Simulate one replica less than the answer, where only a bound says that it misses the goals."""
        if best.low and self._reaches(best, best.low):
            raise AssertionError(f"{best.candidate.label}: {best.low} replicas reach the goals, against a bound")

    def _fate(self, one: _Bracket) -> Fate:
        if one.is_settled:
            return Fate.FOUND
        if math.isinf(one.bound):
            return Fate.INFEASIBLE
        if one.low >= self._search.max_replicas:
            return Fate.MISSED
        return Fate.BEATEN if one.tried else Fate.BOUNDED

    def _reaches(self, one: _Bracket, replicas: int) -> bool:
        if replicas not in one.tried:
            one.tried[replicas] = self._trial(one.candidate, replicas)
        return one.tried[replicas].verdict.is_reached

    def _trial(self, candidate: Candidate, replicas: int) -> SearchTrial:
        search = self._search
        check = search.goals.unreachable(search.num_requests)
        run = simulate(search.workload(), replace(candidate.setup, replicas=replicas, give_up=check))
        verdict = search.goals.judge(run, candidate.price / candidate.setup.fleet[0].replica.num_engines)
        if run.gave_up:
            verdict = replace(verdict, text=f"given up after {len(run.outcomes)} ends: {verdict.text}", gave_up=True)
        trial = SearchTrial(candidate, replicas, verdict)
        self._result.trials.append(trial)
        search.report(trial)
        return trial
