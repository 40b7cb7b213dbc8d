"""Finds the cheapest fleet that reaches given goals on a given workload.

Owns: the goals' syntax; whether a run reached the goals, or an unfinished run still can; the space of settings; the
order and list of trials. Does not: simulate, or define the figures (summary).
More replicas usually serve better, but not always: a router may spread prefixes over more caches. The result is
therefore checked: the number found reaches the goals, and so does one more (within the limit); one less was tried and
does not. Invariant: a run is stopped early only when it can no longer reach a goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product

from octavo.config.spelling import unknown
from octavo.core.limits import Limits
from octavo.errors import ConfigError
from octavo.fleet.routing import ROUTERS
from octavo.plugins import find_policy
from octavo.simulator.arrival import Arrival
from octavo.simulator.columns import METRICS, POINTS, Columns, Facts
from octavo.simulator.outcomes import NEVER, RequestTracker, SimulatedRequest, SimulatedRun
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.summary import summarise

STATISTICS = ("mean", *(f"p{point}" for point in POINTS), "max")
DEFAULT_SHARE = 0.99  # share of requests that must meet the per-request bounds, if no goodput is given
MAX_REPLICAS = 1024
MAX_CANDIDATES = 256
SEARCHED_SETTINGS = ("max_sequences", "max_batch_tokens", "policy", "router")
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
        self._bounds: list[tuple[str, float, float]] = []  # metric, bound, requests allowed beyond the bound
        for goal in goals.goals:
            if goal.statistic.startswith("p"):
                rank = math.ceil(float(goal.statistic[1:]) / 100 * num_requests)
                self._bounds.append((goal.metric, goal.bound, num_requests - rank))
            elif goal.statistic == "max":
                self._bounds.append((goal.metric, goal.bound, 0))
        if goals.bounds:
            spare = math.floor((1 - goals.share) * num_requests + 1e-9)
            self._bounds += [(metric, bound, spare) for metric, bound in goals.bounds.items()]
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


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One simulation: its settings as text, its replicas, and the verdict."""

    label: str
    replicas: int
    verdict: Verdict

    def __str__(self) -> str:
        result = "reached" if self.verdict.is_reached else "missed"
        return f"{self.label}, {self.replicas} replica{'s' * (self.replicas > 1)}: {result}: {self.verdict.text}"


@dataclass(slots=True)
class SearchResult:
    """The cheapest fleet (None: no fleet reaches the goals), its cost in the price's unit, and all trials."""

    setup: Setup | None = None
    label: str = ""
    verdict: Verdict | None = None
    cost: float = 0.0
    trials: list[SearchTrial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CapacitySearch:
    """A search. `workload()` returns the same `num_requests` arrivals each time; `price` is per engine and hour.

    `setup.replicas` is the first number of replicas tried. `make_limits` returns the Limits for chosen settings.
    `report` is called with each trial.
    """

    workload: Callable[[], Iterable[Arrival]]
    num_requests: int
    setup: Setup
    goals: Goals
    make_limits: Callable[[dict[str, str]], Limits]
    space: dict[str, tuple[str, ...]] = field(default_factory=dict)
    price: float = 0.0
    max_replicas: int = MAX_REPLICAS
    report: Callable[[SearchTrial], object] = lambda _: None

    def run(self) -> SearchResult:
        """Try all combinations of settings, in order. Of fleets with equal cost, choose the one with most margin."""
        return _SearchRun(self).run()


def read_space(text: str) -> dict[str, tuple[str, ...]]:
    """Parse `max_sequences=64|256,router=least_loaded|random`. Raises ConfigError naming the known settings."""
    space: dict[str, tuple[str, ...]] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = (part.strip() for part in word.partition("="))
        values = tuple(value.strip() for value in rest.split("|") if value.strip())
        if name not in SEARCHED_SETTINGS or not values or name in space:
            raise ConfigError(
                f"search space has {word!r}; give each of {', '.join(SEARCHED_SETTINGS)} once, with values split by |, "
                "as in max_sequences=64|256,router=least_loaded|prefix_affinity"
            )
        for value in values:
            _check_value(name, value)
        space[name] = values
    return space


def _check_value(name: str, value: str) -> None:
    if name == "policy":
        find_policy(value)
    elif name == "router":
        if value not in ROUTERS:
            raise ConfigError(f"router is {value!r}; choose from {', '.join(sorted(ROUTERS))}")
    elif not value.isdecimal() or not int(value):
        raise ConfigError(f"{name} is {value!r}; give a whole number above 0")


class _SearchRun:
    def __init__(self, search: CapacitySearch) -> None:
        self._search = search
        self._best = SearchResult()
        self._max_replicas = search.max_replicas  # lowered to the best fleet's number so far

    def run(self) -> SearchResult:
        candidates = list(product(*(self._search.space.get(name, ("",)) for name in SEARCHED_SETTINGS)))
        if len(candidates) > MAX_CANDIDATES:
            raise ConfigError(f"the search space has {len(candidates)} settings; give at most {MAX_CANDIDATES}")
        for values in candidates:
            chosen = {name: value for name, value in zip(SEARCHED_SETTINGS, values, strict=True) if value}
            self._try(chosen)
        return self._best

    def _try(self, chosen: dict[str, str]) -> None:
        """Find the fewest replicas for one combination of settings; store the fleet if it beats the best so far."""
        label = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "as set"
        setup = self._with(chosen)
        tried: dict[int, Verdict] = {}

        def reaches(replicas: int) -> bool:
            if replicas not in tried:
                tried[replicas] = self._trial(label, replace(setup, replicas=replicas))
            return tried[replicas].is_reached

        number = self._fewest(reaches, label)
        if number is None:
            return
        best, verdict = self._best, tried[number]
        rank = number, -verdict.margin
        if best.setup is None or best.verdict is None or rank < (best.setup.replicas, -best.verdict.margin):
            best.setup, best.label = replace(setup, replicas=number), label
            best.verdict, best.cost = verdict, number * setup.fleet[0].replica.num_engines * self._search.price
            self._max_replicas = number

    def _fewest(self, reaches: Callable[[int], bool], label: str) -> int | None:
        """Return the fewest replicas that reach the goals: double or halve, bisect, and check one more replica."""
        low, high = 0, min(self._search.setup.replicas, self._max_replicas)  # low misses the goals, high is tried next
        if self._best.setup is not None:
            high = self._max_replicas  # more replicas cannot be cheaper
        while not reaches(high):
            if high >= self._max_replicas:
                return None
            low, high = high, min(2 * high, self._max_replicas)
        probe = high // 2
        while low < probe and reaches(probe):
            high, probe = probe, probe // 2
        low = max(low, probe)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        while high < self._search.max_replicas and not reaches(high + 1):
            self._best.notes.append(
                f"{label}: {high} replicas reach the goals, {high + 1} do not; more is not always better here, so the "
                "number taken is the first that holds with one more, too"
            )
            high += 2
            while high <= self._search.max_replicas and not reaches(high):
                high += 1
            if high > self._search.max_replicas:
                return None
        return high

    def _trial(self, label: str, setup: Setup) -> Verdict:
        search = self._search
        check = search.goals.unreachable(search.num_requests)
        run = simulate(search.workload(), replace(setup, give_up=check))
        verdict = search.goals.judge(run, search.price)
        if run.gave_up:
            verdict = replace(verdict, text=f"given up after {len(run.outcomes)} ends: {verdict.text}")
        trial = SearchTrial(label, setup.replicas, verdict)
        self._best.trials.append(trial)
        search.report(trial)
        return verdict

    def _with(self, chosen: dict[str, str]) -> Setup:
        setup = self._search.setup
        router = chosen.get("router", setup.router)
        return replace(setup, limits=self._search.make_limits(chosen), router=router, sample_s=0.0)
