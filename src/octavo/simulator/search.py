"""Capacity search: the cheapest fleet that reaches given goals on a given workload.

Owns: the space of settings, the order of trials, the list of trials. Does not: judge a run (goals) or simulate.
More replicas mostly serve better, but not always (a router may spread prefixes thinner), so the answer is checked: the
number found reaches the goals, one less was tried and does not, one more was tried and does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product

from octavo.core.limits import Limits
from octavo.errors import ConfigError
from octavo.plugins import find_policy
from octavo.simulator.arrival import Arrival
from octavo.simulator.goals import Goals, Verdict
from octavo.simulator.routers import ROUTERS
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup

MAX_REPLICAS = 1024
MAX_CANDIDATES = 256
KNOBS = ("max_sequences", "max_batch_tokens", "policy", "router")


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One simulation: its settings as text, its replicas, and the verdict."""

    label: str
    replicas: int
    verdict: Verdict

    def line(self) -> str:
        """Return the trial as a line of text."""
        word = "reached" if self.verdict.is_reached else "missed"
        return f"{self.label}, {self.replicas} replica{'s' * (self.replicas > 1)}: {word}: {self.verdict.told}"


@dataclass(slots=True)
class Found:
    """The cheapest fleet (None: nothing reaches the goals), its cost in the price's unit, and all trials."""

    setup: Setup | None = None
    label: str = ""
    verdict: Verdict | None = None
    cost: float = 0.0
    trials: list[SearchTrial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Question:
    """A search: `workload` gives the same `num_requests` arrivals each time; `price` is one replica's for an hour.

    `setup.replicas` is the first number tried. `tell` gets a line for each trial.
    """

    workload: Callable[[], Iterable[Arrival]]
    num_requests: int
    setup: Setup
    goals: Goals
    space: dict[str, tuple[str, ...]] = field(default_factory=dict)
    price: float = 0.0
    max_replicas: int = MAX_REPLICAS
    tell: Callable[[str], object] = lambda _: None
    make_limits: Callable[[Limits, dict[str, str]], Limits] | None = None


def read_space(text: str) -> dict[str, tuple[str, ...]]:
    """Parse `max_sequences=64|256,router=least_loaded|prefix_affinity`. Raises ConfigError naming the knobs."""
    space: dict[str, tuple[str, ...]] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = (part.strip() for part in word.partition("="))
        values = tuple(value.strip() for value in rest.split("|") if value.strip())
        if name not in KNOBS or not values or name in space:
            raise ConfigError(
                f"search space has {word!r}; give each of {', '.join(KNOBS)} once, with values split by |, as in "
                "max_sequences=64|256,router=least_loaded|prefix_affinity"
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


def search(question: Question) -> Found:
    """Try the space, the settings in the given order; of fleets of equal cost choose the one with the widest margin."""
    return _Search(question).run()


class _Search:
    def __init__(self, question: Question) -> None:
        self._ask = question
        self._found = Found()
        self._most = question.max_replicas

    def run(self) -> Found:
        candidates = list(product(*(self._ask.space.get(name, ("",)) for name in KNOBS)))
        if len(candidates) > MAX_CANDIDATES:
            raise ConfigError(f"the search space has {len(candidates)} settings; give at most {MAX_CANDIDATES}")
        for values in candidates:
            chosen = {name: value for name, value in zip(KNOBS, values, strict=True) if value}
            self._try(chosen)
        return self._found

    def _try(self, chosen: dict[str, str]) -> None:
        """Find the fewest replicas of one setting, and keep it if it is better than the best so far."""
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
        cost, verdict, best = number * self._ask.price, tried[number], self._found
        if best.setup is None or best.verdict is None or self._is_better(number, verdict, best.setup.replicas):
            best.setup, best.label = replace(setup, replicas=number), label
            best.verdict, best.cost = verdict, cost
            self._most = number

    def _is_better(self, number: int, verdict: Verdict, fewest: int) -> bool:
        assert self._found.verdict is not None
        return number < fewest or (number == fewest and verdict.margin > self._found.verdict.margin)

    def _fewest(self, reaches: Callable[[int], bool], label: str) -> int | None:
        """Double or halve to a number that reaches the goals above one that does not; bisect; then try one more."""
        low, high = 0, min(self._ask.setup.replicas, self._most)  # low misses (0 surely), high is tried next
        if self._found.setup is not None:
            high = self._most  # more than that cannot be better
        while not reaches(high):
            if high >= self._most:
                return None
            low, high = high, min(2 * high, self._most)
        probe = high // 2
        while low < probe and reaches(probe):
            high, probe = probe, probe // 2
        low = max(low, probe)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        while high < self._ask.max_replicas and not reaches(high + 1):
            self._found.notes.append(
                f"{label}: {high} replicas reach the goals, {high + 1} do not; more is not always better here, so the "
                "number taken is the first that holds with one more, too"
            )
            high += 2
            while high <= self._ask.max_replicas and not reaches(high):
                high += 1
            if high > self._ask.max_replicas:
                return None
        return high

    def _trial(self, label: str, setup: Setup) -> Verdict:
        ask = self._ask
        check = ask.goals.giving_up(ask.num_requests)
        run = simulate(ask.workload(), replace(setup, give_up=check))
        verdict = ask.goals.judge(run, ask.price)
        if run.gave_up:
            verdict = replace(verdict, told=f"given up after {len(run.outcomes)} ends: {verdict.told}")
        trial = SearchTrial(label, setup.replicas, verdict)
        self._found.trials.append(trial)
        ask.tell(trial.line())
        return verdict

    def _with(self, chosen: dict[str, str]) -> Setup:
        setup = self._ask.setup
        limits = setup.limits
        if self._ask.make_limits is not None:
            limits = self._ask.make_limits(limits, chosen)
        else:
            limits = replace(
                limits,
                policy=chosen.get("policy", limits.policy),
                max_sequences=int(chosen.get("max_sequences", limits.max_sequences)),
                max_batch_tokens=int(chosen.get("max_batch_tokens", limits.max_batch_tokens)),
            )
        return replace(setup, limits=limits, router=chosen.get("router", setup.router), sample_s=0.0)
