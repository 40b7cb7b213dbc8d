"""Loads under which the scheduler's own cost is measured, and a scheduler brought to a state of uniform steps.

Owns: limits, requests and steps of each load (prompts of 120, block size 16, 8,192 tokens a step: as vLLM's scheduler
is measured). Does not: run a model (results are made up, one id a sampling row) or sum up times.
Invariant: only steps of the load's own kind count; a load that has none under some policy is refused.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

from octavo.core.kv.prefix import prompt_keys
from octavo.core.limits import GroupKind, GroupSpec, Limits
from octavo.core.plan import ROW_SAMPLE, StepPlan, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.errors import InvariantError
from octavo.plugins import find_policy

BLOCK_SIZE = 16
NUM_PROMPT = 120
NUM_OUTPUT = 2000
MAX_STEPS = 1_000  # measured ones: no sequence ends during them
BATCH_TOKENS = 8192
CHUNK = 512
NUM_TENANTS = 4
MIN_BLOCKS = 40  # per sequence
MAX_FILL_STEPS = 10_000
SPARE_STEPS = 40  # besides those measured: warm-up, and steps of another kind


_IDS = array("i", range(40_000))


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """The contents of a load's steps besides plain decodes.

    `num_choices`: sequences per request. `num_lengths`: how many lengths prompts have. `window`: tokens of a second,
    sliding group; 0 = none. `num_fed`: prompt tokens of requests that run one after another during the measurement; the
    first `num_shared` of them are equal in all; each ends with its first token.
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
        """Return the tokens of such a request that a step computes."""
        return min(CHUNK, self.num_fed - self.num_shared)


LOADS = {
    load.name: load
    for load in (
        SchedulerLoad("decode", "each sequence decodes; all reach the edge of a block together, every 16th step"),
        SchedulerLoad(
            "edges", "each sequence decodes, in every step one of 16 at the edge of a block", num_lengths=BLOCK_SIZE
        ),
        SchedulerLoad("mixed", f"beside the decodes {CHUNK} tokens of a prompt of 4,096", num_fed=4096),
        SchedulerLoad(
            "prefix", "beside the decodes a prompt enters behind 4,096 cached tokens", num_fed=4112, num_shared=4096
        ),
        SchedulerLoad("choices", "each four decode the choices of one request", num_choices=4),
        SchedulerLoad("windows", "two cache groups, one with a window of 128 tokens", window=128),
    )
}


@dataclass(frozen=True, slots=True)
class LoadSetting:
    """A measurement: a load with `running` sequences and `waiting` requests, for `steps` steps."""

    load: SchedulerLoad
    running: int
    waiting: int
    steps: int
    policy: str = "fcfs"

    @property
    def num_requests(self) -> int:
        """Return the requests that always run; as many as give at least `running` sequences."""
        return -(-self.running // self.load.num_choices)

    @property
    def num_rows(self) -> int:
        """Return the sequences that decode in each step."""
        return self.num_requests * self.load.num_choices


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; `is_typical`: it was of the load's kind."""

    plan_s: float
    commit_s: float
    is_typical: bool


class Trial:
    """Octavo's scheduler under a load, filled."""

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
        made = time.perf_counter()
        self.scheduler.commit(plan, result, self.now)
        return plan, planned - start, time.perf_counter() - made

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
        """Queue the requests that run one after another, with keys as a front end gives them, before the others."""
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
    """Return a prompt that depends on its index from the first id on."""
    first = index * 131 % len(_IDS)
    return (_IDS + _IDS[:count])[first : first + count] if first + count > len(_IDS) else _IDS[first : first + count]


def num_blocks(setting: LoadSetting) -> int:
    """Return blocks for all positions that the load reaches, so that no request is preempted or refused."""
    load, rows, batch_tokens = setting.load, setting.num_rows, _batch_tokens(setting)
    fill_steps = rows * NUM_PROMPT // (batch_tokens - min(rows, batch_tokens // 2)) + SPARE_STEPS
    per_sequence = max(MIN_BLOCKS, (NUM_PROMPT + fill_steps + setting.steps + SPARE_STEPS) // BLOCK_SIZE + 1)
    worst = load.num_choices * (NUM_PROMPT + NUM_OUTPUT) // BLOCK_SIZE  # of one request, or it is refused
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
