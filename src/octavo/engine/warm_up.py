"""Steps that an engine runs before it is ready: a decode, a prompt, and sampled and masked rows.

Owns: which steps are run, and their times. The heartbeat's time limits for the first request's steps are predicted
from these times. The first request does not wait for weights to be paged in, threads to start or kernels to be chosen.
Does not: touch the engine's own scheduler; the warm-up's scheduler ends with no sequence and no block.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from octavo.core.limits import Limits
from octavo.core.plan import ROW_SAMPLE, StepPlan
from octavo.core.request import Request, SamplingParams, Want
from octavo.core.scheduler import Scheduler
from octavo.errors import AdmissionError
from octavo.executors.protocol import Executor
from octavo.grammar.matcher import Masks

MAX_PROMPT = 64  # most tokens of the prompt
MIN_PROMPT = 16  # tokens of the prompt if a token takes long
PROMPT_S = 2.0  # the prompt has as many tokens as single-token steps would compute in this time

_GREEDY = SamplingParams(max_tokens=2, temperature=0.0, seed=0)
_SAMPLED = SamplingParams(
    max_tokens=2,
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logprobs=2,
    prompt_logprobs=1,
    seed=0,
)


def warm_up(
    limits: Limits, executor: Executor, has_masks: bool, now: Callable[[], float], wants: Want = Want.SAMPLE
) -> dict[int, float]:
    """Run a decode, a prompt, and sampled and masked rows; return the seconds of the last step of each size.

    An encoder's requests `want` pooled prompts only.

    Steps that do not fit into a small pool are left out, and so are all steps after one that ran out of memory.
    """
    trial = _Trial(limits, executor, now, wants)
    kinds = [_SAMPLED] if limits.max_sequences > 1 or not has_masks else []
    if has_masks:
        kinds.insert(0, replace(_SAMPLED, grammar="any"))
    try:
        trial.run(1, _GREEDY)
        one_s = trial.seconds.get(1, 0.0)
        trial.run(int(min(max(PROMPT_S / max(one_s, 1e-9), MIN_PROMPT), MAX_PROMPT)), _GREEDY)
        trial.run(2, *kinds)
    except MemoryError:  # the step loop makes steps smaller if this happens to a request
        trial.abandon()
    return trial.seconds


class _Trial:
    """Runs requests through a scheduler of its own; `seconds` has the time of the last step of each size."""

    def __init__(self, limits: Limits, executor: Executor, now: Callable[[], float], wants: Want) -> None:
        self._wants = wants
        self.seconds: dict[int, float] = {}
        self._limits = replace(
            limits, prefix_caching=False, host_blocks=(), max_draft_tokens=0, policy="fcfs", num_stages=1
        )
        self._scheduler = Scheduler(self._limits)
        self._executor = executor
        self._now = now
        words = -(-limits.vocab_size // 32)
        self._anything = Masks(np.zeros(1, dtype=np.int64), np.full((1, words), -1, dtype=np.int32))

    def run(self, num_tokens: int, *kinds: SamplingParams) -> None:
        """Run a prompt of `num_tokens` for each of `kinds`. Only the first may have a grammar; its mask allows all."""
        ids = array("i", [index % self._limits.vocab_size for index in range(num_tokens)])
        with contextlib.suppress(AdmissionError):
            for number, params in enumerate(kinds):
                self._scheduler.admit(Request(f"warm-up-{number}", ids, params, wants=self._wants), 0.0)
        while not (plan := self._scheduler.plan(0.0)).is_empty:
            started_at = self._now()
            ticket = self._executor.submit(plan)
            if kinds[0].grammar and any(flags & ROW_SAMPLE for flags in plan.flags):
                self._executor.supply(ticket, self._anything)
            result = self._executor.collect(ticket)
            self._scheduler.commit(plan, result, 0.0)
            if plan.num_query_tokens:
                self.seconds[plan.num_query_tokens] = self._now() - started_at

    def abandon(self) -> None:
        """Free the executor's slots after a step that failed."""
        slots = array("i", range(self._limits.max_sequences))
        self._executor.collect(self._executor.submit(StepPlan(0, 0.0, freed_slots=slots)))
