"""Scheduler and executor together: choices and beams over windows, several plans in flight, preempted and swapped."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from octavo.core.limits import Limits
from octavo.core.plan import ROW_CARRY, ROW_FORK, ROW_SAMPLE, StepPlan
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.executors.protocol import Capacity, Executor
from tests.core.invariants import check_no_leaks
from tests.exactness import limits_of
from tests.executors.driver import SPEC, Dense, Driver, make_prompt
from tests.executors.test_torch_executor import make_any
from tests.quick import one_in
from tests.tiny_models import EOS_ID, make_tiny_model

Opened = tuple[Executor, Capacity, Dense]
SAMPLED = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=10, ignore_eos=True)
BEAMS = SamplingParams(temperature=0.0, beam_width=4, n=4, max_tokens=10)
PROMPTS = [make_prompt(30, seed=1), make_prompt(41, seed=2), make_prompt(7, seed=3)]
TIGHT = {"headroom": 0.0, "max_batch_tokens": 16}


@pytest.fixture(scope="module", params=["auto", "emulated"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A tiny gemma3 with a full and a windowed group, and transformers' view of it."""
    folder = make_tiny_model("gemma3", tmp_path_factory.mktemp("choices") / "gemma3", sliding_window=10)
    executor = make_any(folder, request.param)
    yield executor, executor.open(replace(SPEC, num_blocks=200, host_bytes=1 << 20)), Dense(folder)
    executor.close()


class Served:
    """What a run gave: ids by (request id, choice), and how often each thing was in a plan."""

    def __init__(self, executor: Executor, limits: Limits, requests: Sequence[Request], depth: int) -> None:
        scheduler = Scheduler(limits)
        for request in requests:
            scheduler.admit(request, 0.0)
        self.ids: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.num_forks = 0
        flight: deque[tuple[StepPlan, object]] = deque()
        while True:
            while len(flight) < depth and not (plan := scheduler.plan(0.0)).is_empty:
                self.num_forks += sum(bool(flags & ROW_FORK) for flags in plan.flags)
                flight.append((plan, executor.submit(plan)))
            if not flight:
                break
            plan, ticket = flight.popleft()
            events = scheduler.commit(plan, executor.collect(ticket), 0.0)
            for name, choice, token in zip(events.request_ids, events.choices, events.token_ids, strict=True):
                self.ids[name, choice].append(token)
        assert not scheduler.has_work
        check_no_leaks(scheduler)
        self.num_preemptions = scheduler.statistics().num_preemptions


def tight(capacity: Capacity, num_blocks: int, preemption: str) -> Limits:
    blocks = (num_blocks,) * len(capacity.groups)
    return limits_of(capacity, host_blocks=capacity.host_blocks, num_blocks=blocks, preemption=preemption, **TIGHT)


def alone(opened: Opened, prompt: list[int], choice: int) -> list[int]:
    """The choice as a sequence of its own, by hand-written plans."""
    driver = Driver(opened[0], opened[1])
    driver.add(0, prompt, SAMPLED, choice=choice)
    tokens = list(driver.prefill(0, len(prompt)).token_ids or ())
    for step in range(9):
        driver.row(0, len(prompt) + step, 1, ROW_SAMPLE | ROW_CARRY)
        tokens += driver.run().token_ids or ()
    return tokens


@pytest.mark.parametrize("depth", one_in(2, [1, 2, 3]))
def test_P03_K06_S17_choices_equal_sequences_of_their_own(opened: Opened, depth: int) -> None:
    executor, capacity, _ = opened
    expected = {
        (f"r{index}", choice): alone(opened, prompt, choice)
        for index, prompt in enumerate(PROMPTS)
        for choice in range(3)
    }
    requests = [Request(f"r{index}", array("i", prompt), SAMPLED) for index, prompt in enumerate(PROMPTS)]
    roomy = Served(executor, limits_of(capacity), requests, depth)
    assert dict(roomy.ids) == expected and roomy.num_forks == 6
    for preemption in ("recompute", "swap"):
        got = Served(executor, tight(capacity, 30, preemption), requests, depth)
        assert dict(got.ids) == expected and got.num_preemptions > 0


@pytest.mark.parametrize("depth", one_in(2, [3, 1]))
@pytest.mark.parametrize("preemption", [None, "recompute", "swap"])
def test_P04_beams_equal_those_of_transformers(opened: Opened, depth: int, preemption: str | None) -> None:
    executor, capacity, dense = opened
    requests = [
        Request(f"r{index}", array("i", prompt), BEAMS, eos_token_ids=(EOS_ID,))
        for index, prompt in enumerate(PROMPTS[:2])
    ]
    requests.append(Request("other", array("i", PROMPTS[2]), SAMPLED))
    limits = limits_of(capacity) if preemption is None else tight(capacity, 34, preemption)
    got = Served(executor, limits, requests, depth)
    for index, prompt in enumerate(PROMPTS[:2]):
        expected = dense._model.generate(
            torch.tensor([prompt]), num_beams=4, num_return_sequences=4, max_new_tokens=10, do_sample=False,
            eos_token_id=EOS_ID, pad_token_id=EOS_ID,
        )  # fmt: skip
        for choice, ids in enumerate(expected[:, len(prompt) :].tolist()):
            mine = got.ids[f"r{index}", choice]
            assert mine == ids[: len(mine)] and (len(mine) == 10 or ids[len(mine)] == EOS_ID)
    assert got.ids["other", 1] == alone(opened, PROMPTS[2], 1)
    assert preemption is None or got.num_preemptions > 0
