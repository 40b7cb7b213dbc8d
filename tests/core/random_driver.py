"""A seeded random driver: every verb of the scheduler in random order, with faults, then quiescence.

Owns: how a seed becomes a configuration, requests and actions. A seed replays bit for bit.
Does not: check anything itself (the harness, the fake executor and octavo.core.invariants do).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from tests.core.harness import EOS, Run, limits
from tests.fake_model import Faults, oracle

from octavo.core.limits import Limits
from octavo.core.request import FinishReason, SamplingParams
from octavo.errors import AdmissionError, DuplicateRequestError

VOCAB_SIZE = 23


def random_limits(rng: random.Random) -> Limits:
    """A small engine in which blocks, slots and tokens are scarce."""
    block_size = rng.choice((1, 2, 3, 4, 4, 8))
    max_model_len = rng.randrange(12, 49)
    longest = -(-max_model_len // block_size)
    return limits(
        block_size=block_size,
        num_blocks=max(1, int(longest * rng.uniform(0.8, rng.choice((1.3, 2.5))))),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        max_batch_tokens=rng.choice((1, 3, 8, 16, 16, 32, 64, 64)),
        max_sequences=rng.choice((1, 2, 3, 4, 4, 6, 6, 8)),
        policy=rng.choice(("fcfs", "fcfs", "fifo")),
        headroom=rng.choice((None, 0.0, 0.0, 0.1, 0.3)),
        chunked_prefill=rng.random() < 0.75,
        max_partial_prefills=rng.choice((0, 0, 0, 1, 2)),
        long_prefill_threshold=rng.choice((0, 0, 0, 2, 5)),
        prefix_caching=rng.random() < 0.75,
        max_blocks_per_sequence=rng.choice((0, 0, 2, longest)),
    )


def random_faults(rng: random.Random) -> Faults:
    """None at all in half of the seeds; else each kind now and then."""
    if rng.random() < 0.5:
        return Faults(random.Random(rng.random()))
    chances = [rng.choice((0.0, 0.01, 0.05, 0.15)) for _ in range(4)]
    return Faults(random.Random(rng.random()), *chances)


class Driver:
    """Random actions on one Run."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        rng = self.rng
        self.depth = rng.choice((1, 2, 2, 3, 3))
        self.faults = random_faults(rng)
        lazy = self.depth > 1 or rng.random() < 0.5
        self.run = Run(random_limits(rng), depth=self.depth, faults=self.faults, lazy=lazy)
        self.has_time_limits = rng.random() < 0.3
        self.prefixes = [[rng.randrange(3, VOCAB_SIZE) for _ in range(64)] for _ in range(3)]
        self.keys = [rng.randbytes(16) for _ in range(64)]
        self.num_steps = 0
        busy = rng.choice((0.1, 0.3, 1.0))
        self.actions: list[tuple[float, Callable[[], object]]] = [
            (busy, self.admit),
            (1.0, self.plan),
            (0.8, self.commit),
            (0.04, self.cancel),
            (rng.choice((0.0, 0.02)), self.fail),
            (rng.choice((0.0, 0.1)), self.plan_some),
            (0.02, self.reset),
            (0.02, self.repeat_id),
            (0.02, self.explain),
            (0.3, self.pass_time),
        ]

    def drive(self, num_steps: int) -> int:
        """`num_steps` plans and commits among other actions, then the end; give the steps taken."""
        weights = [weight for weight, _ in self.actions]
        while self.num_steps < num_steps:
            self.rng.choices(self.actions, weights)[0][1]()
        self.settle()
        return self.num_steps

    def settle(self) -> None:
        """Faults stop; then everything must end within a bound."""
        self.run.executor.faults = Faults(random.Random(0))
        work = sum(r.request.num_prompt_tokens + r.max_tokens for r in self.run.records.values() if r.finished is None)
        for _ in range(50 + 6 * work):
            if not self.run.scheduler.has_work and not self.run.flight:
                break
            self.run.step()
            self.num_steps += 1
        self.run.check_end()

    # -- actions

    def open_ids(self) -> list[str]:
        return [name for name, record in self.run.records.items() if record.finished is None]

    def admit(self) -> None:
        if len(self.open_ids()) >= 14:
            return
        rng = self.rng
        fields = self.random_fields()
        length = rng.randrange(1, self.run.limits.max_model_len + 2)
        if rng.random() < 0.6:
            length = max(1, length // self.run.limits.block_size * self.run.limits.block_size)
        shared = rng.choice((0, length, length, rng.randrange(length + 1)))
        ids: Any = rng.choice(self.prefixes)[:shared]
        ids += [rng.randrange(3, VOCAB_SIZE) for _ in range(length - shared)]
        max_tokens = rng.choice((None, None, 1, 2, 5, 9, 20))
        if rng.random() < 0.08:
            ids, fields = length, {"block_keys": tuple(self.keys[: length // self.run.limits.block_size])}
        elif rng.random() < 0.1:
            self.add_emitted(ids, fields)
        if max_tokens is not None and len(fields.get("emitted_token_ids", ())) >= max_tokens:
            max_tokens = None
        try:
            self.run.admit(ids, max_tokens, **fields)
        except AdmissionError as error:
            assert any(character.isdigit() for character in str(error)), f"a refusal without numbers: {error}"

    def random_fields(self) -> dict[str, Any]:
        """Sampling and request fields that change the text, the end, or what may be shared."""
        rng = self.rng
        fields: dict[str, Any] = {"eos_token_ids": (EOS,), "seed": rng.randrange(3)}
        if rng.random() < 0.4:
            fields["ignore_eos"] = True
        if rng.random() < 0.2:
            fields["stop_token_ids"] = (rng.randrange(3, VOCAB_SIZE),)
        if rng.random() < 0.1:
            fields["cache_salt"] = b"tenant"
        if self.has_time_limits and rng.random() < 0.3:
            fields["deadline"] = self.run.now + rng.random()
        if self.has_time_limits and rng.random() < 0.3:
            fields["queue_timeout"] = rng.random() / 2
        return fields

    def add_emitted(self, ids: list[int], fields: dict[str, Any]) -> None:
        """Make it a request of an earlier epoch that had some of its outputs."""
        params = SamplingParams(max_tokens=None, **{k: v for k, v in fields.items() if k in SamplingParams.__slots__})
        outputs = oracle(ids, 6, VOCAB_SIZE, (EOS,), params, fields.get("adapter_id", 0))
        fields["emitted_token_ids"] = array("i", outputs[: self.rng.randrange(len(outputs))])

    def plan(self) -> None:
        run = self.run
        if len(run.flight) >= self.depth:
            return
        plan = run.plan()
        self.num_steps += 1
        if not plan.is_empty:
            run.submit(plan)

    def plan_some(self) -> None:
        run, names = self.run, self.open_ids()
        if len(run.flight) >= self.depth or not names:
            return
        only = self.rng.sample(names, self.rng.randrange(1, len(names) + 1))
        plan = run.plan(only)
        assert set(run.rows(plan)) <= set(only)
        self.num_steps += 1
        if not plan.is_empty:
            run.submit(plan)

    def commit(self) -> None:
        if self.run.flight:
            self.run.commit()
            self.num_steps += 1

    def fail(self) -> None:
        if self.run.flight:
            self.run.fail_oldest()
            self.num_steps += 1

    def cancel(self) -> None:
        names = [*self.rng.sample(self.open_ids(), min(len(self.open_ids()), self.rng.randrange(1, 4))), "nobody"]
        names += list(self.run.records)[:1]
        self.run.cancel(*names, reason=self.rng.choice((FinishReason.CANCELLED, FinishReason.STOP)))

    def reset(self) -> None:
        self.run.scheduler.reset_prefix_cache()

    def repeat_id(self) -> None:
        for name in self.open_ids()[:1]:
            record = self.run.records[name]
            if record.is_cancelled:
                continue
            with pytest.raises(DuplicateRequestError):
                self.run.scheduler.admit(record.request, self.run.now)

    def explain(self) -> None:
        for name in self.open_ids()[:3]:
            assert self.run.scheduler.explain(name)

    def pass_time(self) -> None:
        self.run.now += self.rng.random() * 0.1
