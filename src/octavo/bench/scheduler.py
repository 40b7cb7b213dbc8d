"""Measures the scheduler alone: plan and commit of a step, and admission, under loads of uniform steps.

Owns: each load's limits, requests and steps; medians; targets; a bare Python loop over equally many rows as a baseline;
a profile; the tables of `octavo bench scheduler`. Sizes are those of the vLLM measurement: prompts of 120 tokens,
block size 16, 8,192 tokens per step.
Does not: run a model. Each sampling row gets a constant token id.
Invariants: schedulers under one load are stepped alternately. Only steps of the load's kind count (decode-only, or with
the load's prompt tokens); ConfigError if a policy makes too few.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from octavo.bench.report import Report, percentile, show_rows
from octavo.core.kv.prefix import prompt_keys
from octavo.core.limits import GroupKind, GroupSpec, Limits
from octavo.core.plan import ROW_SAMPLE, StepPlan, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.errors import ConfigError, InvariantError
from octavo.plugins import find_policy

RUNNING = (32, 256, 1024)
WAITING = (0, 100_000)
TARGET_US = {256: 300.0, 1024: 1000.0}  # decoding sequences -> target for plan and commit of a decode step
ADMIT_TARGET_US = 30.0  # without the computation of the prompt's block keys
WARM_UP = 4
PACKAGE = Path(__file__).resolve().parents[1]
_COLUMNS = ("running", "waiting", "plan", "commit", "step", "p99", "bare", "target", "admit")
_LEGEND = """Medians in microseconds. step = plan and commit; bare = times a bare loop over as many rows, in turn;
target = {}; admit = one request without the keys of its prompt, to be {:.0f} at most.
Peer: {}."""

BLOCK_SIZE = 16
NUM_PROMPT = 120
NUM_OUTPUT = 2000
MAX_STEPS = 1_000  # limit of measured steps, so that no sequence ends during the measurement
BATCH_TOKENS = 8192
CHUNK = 512
NUM_TENANTS = 4
MIN_BLOCKS = 40  # per sequence
MAX_FILL_STEPS = 10_000
SPARE_STEPS = 40  # steps beside the measured ones: warm-up, and steps of another kind
_IDS = array("i", range(40_000))


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """A load: what its steps contain besides plain decodes.

    `num_choices`: sequences per request. `num_lengths`: number of different prompt lengths. `window`: window in tokens
    of a second cache group; 0 = no second group. `num_fed`: prompt tokens of each extra request. Extra requests run one
    after another beside the decodes; each has the same first `num_shared` tokens and ends with its first output token.
    """

    name: str
    text: str
    num_choices: int = 1
    num_lengths: int = 1
    window: int = 0
    num_fed: int = 0
    num_shared: int = 0

    @property
    def num_fed_per_step(self) -> int:
        """Return the number of an extra request's prompt tokens that one step computes."""
        return min(CHUNK, self.num_fed - self.num_shared)


LOADS = {
    load.name: load
    for load in (
        SchedulerLoad("decode", "each sequence decodes; all reach the end of a block together, every 16th step"),
        SchedulerLoad(
            "edges", "each sequence decodes; in every step one of 16 is at the end of a block", num_lengths=BLOCK_SIZE
        ),
        SchedulerLoad("mixed", f"beside the decodes {CHUNK} tokens of a prompt of 4,096", num_fed=4096),
        SchedulerLoad(
            "prefix", "beside the decodes a prompt enters after 4,096 cached tokens", num_fed=4112, num_shared=4096
        ),
        SchedulerLoad("choices", "every four sequences are the choices of one request", num_choices=4),
        SchedulerLoad("windows", "two cache groups, one with a window of 128 tokens", window=128),
    )
}


@dataclass(frozen=True, slots=True)
class LoadSetting:
    """A measurement of `steps` steps of a load, with `running` decoding sequences and `waiting` queued requests."""

    load: SchedulerLoad
    running: int
    waiting: int
    steps: int
    policy: str = "fcfs"

    @property
    def num_requests(self) -> int:
        """Return the number of decoding requests: the fewest that have at least `running` sequences together."""
        return -(-self.running // self.load.num_choices)

    @property
    def num_rows(self) -> int:
        """Return the number of sequences that decode in each step."""
        return self.num_requests * self.load.num_choices


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; `is_typical` is True if the step is of the load's kind."""

    plan_s: float
    commit_s: float
    is_typical: bool


class LoadedScheduler:
    """Octavo's scheduler, filled with a load until every sequence decodes."""

    name = "octavo"

    def __init__(self, setting: LoadSetting) -> None:
        self.setting = setting
        self.now = 1.0
        self.scheduler = Scheduler(_limits(setting))
        self.admit_s: list[float] = []
        self._admit_many("r", setting.num_requests, setting.load.num_choices)
        for _ in range(MAX_FILL_STEPS):
            if self._is_decode(self._step()[0]):
                break
        else:
            raise InvariantError(f"{setting.num_rows} sequences are not all decoding after {MAX_FILL_STEPS} steps")
        self._feed()
        self._admit_many("w", setting.waiting, 1)

    def step(self) -> StepTime:
        """Plan and commit one step."""
        plan, plan_s, commit_s = self._step()
        return StepTime(plan_s, commit_s, self._is_typical(plan))

    def _step(self) -> tuple[StepPlan, float, float]:
        self.now += 0.01
        start = time.perf_counter()
        plan = self.scheduler.plan(self.now)
        planned = time.perf_counter()
        result = StepResult(array("i", [7]) * sum(flag & ROW_SAMPLE for flag in plan.flags))
        commit_start = time.perf_counter()
        self.scheduler.commit(plan, result, self.now)
        return plan, planned - start, time.perf_counter() - commit_start

    def _is_decode(self, plan: StepPlan) -> bool:
        return plan.num_rows == plan.num_query_tokens == self.setting.num_rows

    def _is_typical(self, plan: StepPlan) -> bool:
        load = self.setting.load
        if not load.num_fed:
            return self._is_decode(plan)
        if load.num_shared and not any(event.cached_tokens >= load.num_shared for event in plan.events):
            return False
        return plan.num_query_tokens == self.setting.num_rows + load.num_fed_per_step

    def _admit_many(self, tag: str, count: int, num_choices: int) -> None:
        params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True, seed=0, n=num_choices)
        for index in range(count):
            ids = make_ids(index, NUM_PROMPT + index % self.setting.load.num_lengths)
            self._admit(Request(f"{tag}{index}", ids, params, tenant=f"t{index % NUM_TENANTS}"))

    def _feed(self) -> None:
        """Queue the extra requests ahead of the waiting ones, with block keys, as a front end sends them."""
        load = self.setting.load
        if not load.num_fed:
            return
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
        per_request = -(-(load.num_fed - load.num_shared) // CHUNK)
        shared = make_ids(0, load.num_shared)
        for index in range((self.setting.steps + SPARE_STEPS) // per_request + 1):
            ids = shared + make_ids(index + 1, load.num_fed - load.num_shared)
            keys = prompt_keys(Request("", ids), BLOCK_SIZE)
            self._admit(Request(f"f{index}", ids, params, block_keys=keys))

    def _admit(self, request: Request) -> None:
        start = time.perf_counter()
        self.scheduler.admit(request, 0.0)
        self.admit_s.append(time.perf_counter() - start)


def make_ids(index: int, count: int) -> array[int]:
    """Return a prompt of `count` ids; prompts of different indices differ from the first id on."""
    first = index * 131 % len(_IDS)
    return (_IDS + _IDS[:count])[first : first + count] if first + count > len(_IDS) else _IDS[first : first + count]


def num_blocks(setting: LoadSetting) -> int:
    """Return enough blocks for every position of the load, so that no request is preempted or refused."""
    load, rows, batch_tokens = setting.load, setting.num_rows, _batch_tokens(setting)
    fill_steps = rows * NUM_PROMPT // (batch_tokens - min(rows, batch_tokens // 2)) + SPARE_STEPS
    per_sequence = max(MIN_BLOCKS, (NUM_PROMPT + fill_steps + setting.steps + SPARE_STEPS) // BLOCK_SIZE + 1)
    worst = load.num_choices * (NUM_PROMPT + NUM_OUTPUT) // BLOCK_SIZE  # per request; admission refuses more
    return max(rows * per_sequence, worst) + 4 * load.num_fed // BLOCK_SIZE + 100


def _batch_tokens(setting: LoadSetting) -> int:
    return setting.num_rows + CHUNK if setting.load.num_fed else BATCH_TOKENS


def _limits(setting: LoadSetting) -> Limits:
    load = setting.load
    groups = (GroupSpec(), GroupSpec(GroupKind.SLIDING, load.window)) if load.window else (GroupSpec(),)
    return Limits(
        block_size=BLOCK_SIZE,
        num_blocks=(num_blocks(setting),) * len(groups),
        max_model_len=load.num_fed + 4096,
        vocab_size=49152,
        max_batch_tokens=_batch_tokens(setting),
        max_sequences=setting.num_rows + bool(load.num_fed),
        groups=groups,
        policy=find_policy(setting.policy),
    )


class MeasuredScheduler(Protocol):
    """A scheduler under a load: this engine's, or another engine's."""

    name: str
    setting: LoadSetting
    admit_s: list[float]

    def step(self) -> StepTime:
        """Plan and commit one step."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """Medians in microseconds of a step's plan and commit, and of one admission.

    `bare_us` is the time of a bare loop over equally many rows in the same process. `target_us` is the target for the
    whole step, or None.
    """

    scheduler: str
    load: str
    policy: str
    running: int
    waiting: int
    plan_us: float
    commit_us: float
    step_us: float
    step_p99_us: float
    admit_us: float
    bare_us: float
    target_us: float | None

    @property
    def is_met(self) -> bool | None:
        """True if the step is within its target; None without a target."""
        return None if self.target_us is None else self.step_us <= self.target_us


def measure(schedulers: Sequence[MeasuredScheduler]) -> list[SchedulerCost]:
    """Step the schedulers alternately until each has enough steps of the load's kind. All have the same setting.

    Raises ConfigError if a scheduler makes too few steps of that kind.
    """
    setting = schedulers[0].setting
    times: list[list[StepTime]] = [[] for _ in schedulers]
    bare, bare_s = BareLoop(setting.num_rows), []
    for _ in range(setting.steps + SPARE_STEPS):
        bare_s.append(bare.time())
        for scheduler, own_times in zip(schedulers, times, strict=True):
            if len(own_times) < setting.steps + WARM_UP and (one := scheduler.step()).is_typical:
                own_times.append(one)
    for scheduler, own_times in zip(schedulers, times, strict=True):
        if len(own_times) < setting.steps + WARM_UP:
            raise ConfigError(
                f"{scheduler.name} under {setting.policy} made {len(own_times)} steps of load {setting.load.name}, not "
                f"{setting.steps + WARM_UP}; measure this load under fcfs"
            )
    bare_us = _us(statistics.median(bare_s))
    return [_cost(scheduler, own[WARM_UP:], bare_us) for scheduler, own in zip(schedulers, times, strict=True)]


def _cost(scheduler: MeasuredScheduler, times: list[StepTime], bare_us: float) -> SchedulerCost:
    setting = scheduler.setting
    totals = [one.plan_s + one.commit_s for one in times]
    return SchedulerCost(
        scheduler=scheduler.name,
        load=setting.load.name,
        policy=setting.policy,
        running=setting.num_rows,
        waiting=setting.waiting,
        plan_us=_us(statistics.median(one.plan_s for one in times)),
        commit_us=_us(statistics.median(one.commit_s for one in times)),
        step_us=_us(statistics.median(totals)),
        step_p99_us=_us(percentile(totals, 99)),
        admit_us=_us(statistics.median(scheduler.admit_s)),
        bare_us=bare_us,
        target_us=TARGET_US.get(setting.num_rows) if setting.load.name == "decode" else None,
    )


class _Counters:
    __slots__ = ("computed", "known", "scheduled")

    def __init__(self) -> None:
        self.computed = self.known = self.scheduled = 0


class BareLoop:
    """The minimal work of a plan and a commit: visit each row, fill four columns, count, take one id."""

    def __init__(self, num_rows: int) -> None:
        self._rows = [_Counters() for _ in range(num_rows)]

    def time(self) -> float:
        """Visit all rows once; return seconds."""
        start = time.perf_counter()
        slots, starts, counts, flags = [], [], [], []
        for index, row in enumerate(self._rows):
            slots.append(index)
            starts.append(row.scheduled)
            counts.append(1)
            flags.append(1)
            row.scheduled += 1
        columns = array("i", slots), array("i", starts), array("i", counts), array("i", flags)
        ids, positions = array("i"), array("i")
        for row, token in zip(self._rows, columns[2], strict=True):
            row.computed += 1
            row.known += 1
            ids.append(token)
            positions.append(row.known)
        return time.perf_counter() - start


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


# --- where the time goes ----------------------------------------------------------------------------


def profile(setting: LoadSetting) -> Report:
    """Profile a new scheduler under this setting; return the 12 most expensive functions, without their callees' time.

    The profiler slows calls down, so these steps are not timed.
    """
    scheduler = LoadedScheduler(setting)
    for _ in range(WARM_UP):
        scheduler.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(setting.steps):
        scheduler.step()
    profiler.disable()
    entries: dict[tuple[str, int, str], Any] = vars(pstats.Stats(profiler))["stats"]
    total = sum(entry[2] for entry in entries.values())
    most_expensive = sorted(entries.items(), key=lambda item: (-item[1][2], item[0]))[:12]
    functions = [
        {
            "function": _function_name(file, function),
            "calls": round(entry[1] / setting.steps, 1),
            "own_us": round(entry[2] / setting.steps * 1e6, 1),
            "share": round(entry[2] / total, 3),
        }
        for (file, _, function), entry in most_expensive
    ]
    return {
        "load": setting.load.name,
        "policy": setting.policy,
        "running": setting.num_rows,
        "waiting": setting.waiting,
        "functions": functions,
    }


def _function_name(file: str, function: str) -> str:
    if file == "~":  # built in
        return function.removeprefix("<").removesuffix(">")
    path = Path(file)
    return f"{path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name}:{function}"


# --- the tables -------------------------------------------------------------------------------------


def show_scheduler(console: Console, report: Report, tables: dict[str, list[SchedulerCost]]) -> None:
    """Print one table for each entry of `tables` (title -> costs), the legend, and the report's profiles."""
    for name, costs in tables.items():
        text = LOADS[name].text if name in LOADS else "decode under every policy"
        console.print(f"[bold]{name}[/]: {text}", soft_wrap=True, highlight=False)
        extra = [key for key in ("scheduler", "policy") if len({getattr(cost, key) for cost in costs}) > 1]
        rows = [(*(getattr(cost, key) for key in extra), *_row(cost)) for cost in costs]
        show_rows(console, "", (*extra, *_COLUMNS), rows)
        console.print()
    targets = ", ".join(f"{target:,.0f} with {rows:,} running" for rows, target in TARGET_US.items())
    console.print(_LEGEND.format(targets, ADMIT_TARGET_US, report["peer"]), soft_wrap=True, highlight=False)
    for one in report.get("profiles", ()):
        console.print(
            f"\nTime by function in a step of [bold]{one['load']}[/] under {one['policy']}, "
            f"{one['running']:,} running, {one['waiting']:,} waiting (profiled, which makes calls slower)",
            soft_wrap=True,
            highlight=False,
        )
        columns = ("function", "calls a step", "own us a step", "share")
        show_rows(console, "", columns, [tuple(function.values()) for function in one["functions"]])


def _row(cost: SchedulerCost) -> tuple[object, ...]:
    target = {None: "", True: "met", False: "over"}[cost.is_met]
    bare = f"x {cost.step_us / cost.bare_us:.1f}"
    times = cost.plan_us, cost.commit_us, cost.step_us, cost.step_p99_us
    return cost.running, cost.waiting, *times, bare, target, cost.admit_us
