"""Goals: the objectives of a fleet, whether a run reached them, and whether an unfinished run still can.

Owns: their grammar and judgement. Does not: simulate, or define the figures (summary does).
Invariant: a run is given up only when it can no longer reach a goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.simulator.outcomes import NEVER, Outcomes, RequestTracker, SimulatedRequest, SimulatedRun
from octavo.simulator.summary import METRICS, OBJECTIVES, POINTS, Facts, summarise

STATISTICS = ("mean", *(f"p{point}" for point in POINTS), "max")
DEFAULT_SHARE = 0.99  # of requests that meet the bounds on each, if no goodput is given
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
    """Bounds on statistics, and on each request, which a `share` of all requests must meet (refused ones fail)."""

    goals: tuple[Goal, ...] = ()
    bounds: dict[str, float] = field(default_factory=dict)
    share: float = DEFAULT_SHARE

    def judge(self, run: SimulatedRun, price_per_hour: float = 0.0) -> Verdict:
        """Return whether a run reaches the goals, with its figures."""
        facts = summarise(run, self.bounds, price_per_hour)
        values: list[tuple[str, float | None, float]] = []
        for goal in self.goals:
            values.append((goal.name, facts[goal.metric][goal.statistic], goal.bound))
        missed = [name for name, value, bound in values if value is None or value > bound]
        margins = [1 - value / bound for _, value, bound in values if value is not None]
        told = [f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value, _ in values]
        if self.bounds:
            share = facts["goodput"]["share"]
            told.append(f"goodput {share:.4g}")
            margins.append(share - self.share)
            if share < self.share:
                missed.append("goodput")
        if facts["requests"]["refused"]:
            missed.append("refused")
            told.append(f"refused {facts['requests']['refused']}")
        return Verdict(not missed and not run.gave_up, min(margins, default=0.0), ", ".join(told), facts)

    def giving_up(self, num_requests: int) -> Callable[[RequestTracker, float], bool]:
        """Return a check for a run of `num_requests` requests: True once a goal cannot be reached any more."""
        return _Hopeless(self, num_requests).check


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether all goals are reached, the smallest margin relative to its bound, a text, and all figures."""

    is_reached: bool
    margin: float
    told: str
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
        elif name in OBJECTIVES and value > 0 and name not in bounds:
            bounds[name] = value
        elif metric in METRICS and statistic in STATISTICS and value > 0:
            goals.append(Goal(metric, statistic, value))
        else:
            known = [*OBJECTIVES, "goodput", *(f"{one}_{other}" for one in METRICS for other in STATISTICS)]
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


class _Hopeless:
    """Counts the requests beyond each bound, those included that have already waited longer than it."""

    def __init__(self, goals: Goals, num_requests: int) -> None:
        self._limits: list[tuple[str, float, float]] = []  # metric, bound, requests that may be beyond it
        for goal in goals.goals:
            if goal.statistic.startswith("p"):
                rank = math.ceil(float(goal.statistic[1:]) / 100 * num_requests)
                self._limits.append((goal.metric, goal.bound, num_requests - rank))
            elif goal.statistic == "max":
                self._limits.append((goal.metric, goal.bound, 0))
        if goals.bounds:
            spare = math.floor((1 - goals.share) * num_requests + 1e-9)
            self._limits += [(metric, bound, spare) for metric, bound in goals.bounds.items()]
        self._counts = [0] * len(self._limits)
        self._read = 0

    def check(self, tally: RequestTracker, now: float) -> bool:
        """Return True if too many requests are beyond some bound."""
        out = tally.outcomes
        for place in range(self._read, len(out)):
            for number, (metric, bound, _) in enumerate(self._limits):
                self._counts[number] += _latency(out, place, metric) > bound
        self._read = len(out)
        for number, (metric, bound, spare) in enumerate(self._limits):
            late = self._counts[number]
            if metric != "tpot":
                late += sum(now - entry.at > bound and _is_owed(entry, metric) for entry in tally.open.values())
            if late > spare:
                return True
        return False


def _is_owed(entry: SimulatedRequest, metric: str) -> bool:
    if metric == "e2e":
        return True
    return (entry.first if metric == "ttft" else entry.start) == NEVER


def _latency(out: Outcomes, place: int, metric: str) -> float:
    """Return a latency of an ended request; NEVER, which is below any bound, if it has none."""
    if metric == "ttft":
        return out.first_tokens[place] - out.arrivals[place] if out.first_tokens[place] != NEVER else NEVER
    if metric == "queue":
        return out.starts[place] - out.arrivals[place] if out.starts[place] != NEVER else NEVER
    if metric == "e2e":
        return out.ends[place] - out.arrivals[place] if out.served(place) else NEVER
    tokens = out.longest[place]
    return (out.ends[place] - out.first_tokens[place]) / (tokens - 1) if tokens > 1 and out.served(place) else NEVER
