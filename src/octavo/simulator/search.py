"""Finds the cheapest fleet that reaches given goals on a given workload.

Owns: the space of settings; the order and list of trials. Does not: simulate, judge runs (goals), or compute bounds
(bounds).
Assumed: if n replicas miss the goals, fewer miss them too. More replicas usually serve better, but not always: a router
may spread prefixes over more caches. The result is therefore checked: the number found reaches the goals, and so does
one more (within the limit); one less was simulated and does not. Invariant: trials and result are the same with any
number of jobs.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice, product
from multiprocessing import get_context
from typing import Any, NamedTuple

from octavo.config import SETTINGS
from octavo.config.setting import Number, Setting
from octavo.config.spelling import unknown
from octavo.core.policy import POLICIES
from octavo.errors import ConfigError
from octavo.fleet.routing import ROUTERS
from octavo.plugins import find_policy
from octavo.simulator.arrival import Arrival
from octavo.simulator.bounds import Demand, fewest_engines
from octavo.simulator.costs.hardware import THIS, device_facts
from octavo.simulator.goals import Goals, Verdict
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup

MAX_REPLICAS = 1024
MAX_CANDIDATES = 4096
MAX_JOBS = 256
NUM_REJECTED = 5  # rejected settings whose limits are described

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
    BEATEN = "as many replicas as cost no more than the answer miss the objectives, or have no wider margin"
    BOUNDED = "its bound of the cost is above the answer's cost"


@dataclass(frozen=True, slots=True)
class CandidateOutcome:
    """A candidate's fate. `replicas` are the fewest that reach the goals if it is FOUND, else fewer than can be better.

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


class _Task(NamedTuple):
    """A trial: the candidate's number, its replicas, and the margin that the best fleet of the same cost has."""

    number: int
    replicas: int
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class CapacitySearch:
    """A search among candidates. `workload()` returns the same `num_requests` arrivals each time.

    With several `jobs`, as many processes simulate what is probably tried next. They change no result. `workload` must
    then be such that it can be pickled.
    """

    workload: Callable[[], Iterable[Arrival]]
    num_requests: int
    candidates: Sequence[Candidate]
    goals: Goals
    max_replicas: int = MAX_REPLICAS
    jobs: int = 1

    def run(self, report: Callable[[SearchTrial], object] = lambda _: None) -> SearchResult:
        """Find the cheapest fleet, and call `report` with each trial.

        Of equal costs, choose the fleet with the widest margin, then the first candidate. The next trial is of the
        candidate that can be the cheapest, by a bound and by its trials so far. It has the most replicas that cost less
        than the best fleet so far, or twice as many as the last trial if there is no such fleet yet; if these reach the
        goals, the fewest are found by bisection. If they do not, as many as cost the same are tried, and given up when
        they cannot have a wider margin. The search ends when no candidate can cost as little as the best fleet.
        """
        result = SearchResult(is_priced=all(one.price > 0 for one in self.candidates))
        bounds = zip(self.candidates, self._bounds(), strict=True)
        brackets = [
            _Bracket(candidate, number, result.cost_of(candidate), bound, int(min(bound - 1, self.max_replicas)))
            for number, (candidate, bound) in enumerate(bounds)
        ]
        state = _SearchState(brackets, self.max_replicas)
        with _Trials(self) as trials:
            while (task := state.next_task()) is not None:
                verdict = trials.verdict(state)
                state.record(task, verdict)
                result.trials.append(SearchTrial(self.candidates[task.number], task.replicas, verdict))
                report(result.trials[-1])
        best = state.best
        if best.high:
            result.best = SearchTrial(best.candidate, best.high, best.tried[best.high])
            result.cost = best.rank[0]
        result.notes, result.outcomes = state.notes, [one.outcome(self.max_replicas) for one in brackets]
        return result

    def judge(self, number: int, replicas: int, margin: float = 0.0, is_whole: bool = False) -> Verdict:
        """Simulate a candidate's fleet, until it can neither reach the goals nor exceed a margin, unless `is_whole`."""
        candidate = self.candidates[number]
        give_up = None if is_whole else self.goals.narrowed(margin).unreachable(self.num_requests)
        run = simulate(self.workload(), replace(candidate.setup, replicas=replicas, give_up=give_up))
        verdict = self.goals.judge(run, candidate.price / candidate.setup.fleet[0].replica.num_engines)
        if run.gave_up:
            verdict = replace(verdict, text=f"given up after {len(run.outcomes)} ends: {verdict.text}", gave_up=True)
        return verdict

    def _bounds(self) -> Iterator[float]:
        """Yield the replicas below which no fleet of a candidate reaches the goals."""
        demands, known = dict[object, Demand](), dict[object, float]()
        requirements = self.goals.requirements(self.num_requests)
        for candidate in self.candidates:
            setup, limits = candidate.setup, candidate.setup.limits
            floors = setup.costs.floors(limits.max_batch_tokens)
            caches = limits.block_size, limits.prefix_caching, limits.max_model_len
            key = (*caches, limits.max_sequences, limits.max_batch_tokens, limits.max_draft_tokens, floors)
            if key not in known and floors:
                if caches not in demands:
                    demands[caches] = Demand.of(self.workload(), limits)
                known[key] = fewest_engines(demands[caches], requirements, floors, limits)
            engines = known.get(key, 1)
            yield engines if math.isinf(engines) else math.ceil(engines / setup.fleet[0].replica.num_engines)


class _Trials:
    """Returns verdicts of trials. With several jobs, simulates the trials that probably come next at the same time."""

    def __init__(self, search: CapacitySearch) -> None:
        self._search = search
        self._verdicts: dict[_Task, Future[Verdict]] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Trials:
        if self._search.jobs > 1:
            self._pool = process_pool(self._search.jobs)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def verdict(self, state: _SearchState) -> Verdict:
        """Return the verdict of a state's next task."""
        upcoming = list(islice(state.forecast(), 2 * self._search.jobs))
        if self._pool is None:
            return self._search.judge(*upcoming[0])
        for task, verdict in self._verdicts.items():
            if task not in upcoming:
                verdict.cancel()
        self._verdicts = {task: verdict for task, verdict in self._verdicts.items() if not verdict.cancelled()}
        for task in upcoming:
            if task not in self._verdicts:
                self._verdicts[task] = self._pool.submit(self._search.judge, *task)
        return self._verdicts[upcoming[0]].result()


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of processes that know the policies of this one, and that Ctrl-C ends without a message."""
    policies = [f"{policy.__module__}:{policy.__qualname__}" for policy in POLICIES.values()]
    return ProcessPoolExecutor(jobs, get_context("spawn"), _begin_process, (policies,))


def _begin_process(policies: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for path in policies:
        with suppress(ConfigError):  # it cannot be imported by its name; its use fails, and names it
            find_policy(path)


@dataclass(slots=True)
class _Bracket:
    """A candidate's range: `low` replicas miss the goals, by a bound or a trial; `high` reach them (0: unknown).

    If `is_outdone`, `low` replicas cost as much as the best fleet and have no wider margin. If `climbs`, more replicas
    than reached the goals missed them, and each further number is tried.
    """

    candidate: Candidate
    number: int
    unit: float  # cost of a replica
    bound: float
    low: int
    high: int = 0
    is_outdone: bool = False
    climbs: bool = False
    tried: dict[int, Verdict] = field(default_factory=dict)

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
        return round(self.unit * self.high, 9), -self.tried[self.high].margin, self.number

    def outcome(self, max_replicas: int) -> CandidateOutcome:
        """Return what was found of the candidate."""
        if self.is_settled:
            return CandidateOutcome(self.candidate, Fate.FOUND, self.high, self.bound)
        fate = Fate.BEATEN if self.tried else Fate.BOUNDED
        if math.isinf(self.bound):
            fate = Fate.INFEASIBLE
        elif self.low >= max_replicas and not self.is_outdone:
            fate = Fate.MISSED
        return CandidateOutcome(self.candidate, fate, self.low, self.bound)


class _SearchState:
    """The candidates' ranges; decides what is tried next."""

    def __init__(self, brackets: Sequence[_Bracket], max_replicas: int) -> None:
        self._brackets = brackets
        self._most = max_replicas
        self.notes: list[str] = []

    @property
    def best(self) -> _Bracket:
        """Return the best candidate so far; its `high` is 0 if none has reached the goals."""
        return min(self._brackets, key=lambda one: one.rank)

    def next_task(self) -> _Task | None:
        """Return the next trial; None if no candidate that is open can cost as little as the best fleet.

        It is of the best candidate until the fewest replicas of that are known and one more reaches the goals, too.
        Then others are given up sooner.
        """
        best = self.best
        if best.high and not (best.is_settled and self._is_confirmed(best)):
            return self._task_of(best, best)
        still_open = (one for one in self._brackets if one.low < self._most and not one.is_settled)
        bracket = min(still_open, key=lambda one: one.least, default=None)
        if bracket is not None and bracket.least[0] <= best.rank[0] * (1 + _SAME):
            return self._task_of(bracket, best)
        if best.high and best.low and best.low not in best.tried:  # only a bound says that it misses the goals
            return _Task(best.number, best.low)
        return None

    def _is_confirmed(self, one: _Bracket) -> bool:
        more = one.tried.get(one.high + 1)
        return one.high == self._most or (more is not None and more.is_reached)

    def _task_of(self, one: _Bracket, best: _Bracket) -> _Task:
        """Return the next trial of a candidate that is open, or of the best one."""
        if one.is_settled or one.climbs:
            return _Task(one.number, (one.high or one.low) + 1)
        if not best.high:
            first = max(one.candidate.setup.replicas, int(one.bound))
            return _Task(one.number, min(self._most, 2 * one.low if one.tried else first))
        cost = best.rank[0]
        most = min(self._most, int(cost / one.unit * (1 + _SAME)))
        if one.high and most >= one.high:
            return _Task(one.number, (one.low + one.high) // 2)
        if one.unit * most < cost * (1 - _SAME):
            return _Task(one.number, most)
        if one.low < most - 1:  # cheaper than the best fleet
            return _Task(one.number, most - 1)
        return _Task(one.number, most, best.tried[best.high].margin)

    def record(self, task: _Task, verdict: Verdict) -> None:
        """Add the verdict of a task."""
        one, replicas, is_reached = self._brackets[task.number], task.replicas, verdict.is_reached
        one.tried[replicas] = verdict
        if replicas <= one.low and is_reached:
            raise AssertionError(f"{one.candidate.label}: {replicas} replicas reach the goals, against a bound")
        if one.is_settled and replicas > one.high and not is_reached:
            self.notes.append(
                f"{one.candidate.label}: {one.high} replicas reach the goals, {replicas} do not; more is not always "
                "better here, so the number taken is the first that holds with one more, too"
            )
            one.low, one.high, one.climbs = replicas, 0, True
        elif not is_reached:
            one.low = replicas
            if task.margin:
                one.high, one.is_outdone = 0, True
        elif not one.is_settled:
            one.high = replicas

    def forecast(self) -> Iterator[_Task]:
        """Yield the next tasks, if only the trials with one replica more than the fewest reach the goals."""
        ahead = _SearchState([replace(one, tried=dict(one.tried)) for one in self._brackets], self._most)
        while (task := ahead.next_task()) is not None:
            yield task
            ahead.record(task, Verdict(0 < ahead._brackets[task.number].high < task.replicas, 0.0, "", {}))
