"""Goals of a search: bounds on latencies; whether a run reached them, or an unfinished run still can.

Owns: the goals' syntax, verdicts, the count of requests beyond a bound. Does not: define the figures (summary), or
search (search). Invariant: a run is stopped early only when it can no longer reach a goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.simulator.bounds import Requirement
from octavo.simulator.columns import METRICS, POINTS, Columns, Facts
from octavo.simulator.outcomes import NEVER, RequestTracker, SimulatedRequest, SimulatedRun
from octavo.simulator.summary import summarise

STATISTICS = ("mean", *(f"p{point}" for point in POINTS), "max")
DEFAULT_SHARE = 0.99  # share of requests that must meet the per-request bounds, if no goodput is given
_ROUNDING = 1e-9
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

    def narrowed(self, margin: float) -> Goals:
        """Return goals that every run with a wider margin than this one reaches, and some runs with as wide a one."""
        factor, share = (1 - margin) * (1 + _ROUNDING), min(1.0, self.share + margin - _ROUNDING)
        return replace(self, goals=tuple(replace(goal, bound=goal.bound * factor) for goal in self.goals), share=share)

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
    """Counts the requests beyond each bound, including open requests that are beyond it whenever they end."""

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
            late = sum(_least_latency(entry, metric, now) > bound for entry in tracker.open.values())
            if self._counts[number] + late > spare:
                return True
        return False


def _least_latency(entry: SimulatedRequest, metric: str, now: float) -> float:
    """Return the seconds that a latency of an open request has at least. Rounded as the latency at its end is."""
    if metric == "tpot":
        longest = max(entry.arrival.choices or (entry.arrival.output_tokens,))
        return (now - entry.first) / (longest - 1) if entry.first != NEVER and longest > 1 else 0.0
    at = {"ttft": entry.first, "queue": entry.start, "e2e": NEVER}[metric]
    return (now if at == NEVER else at) - entry.at
