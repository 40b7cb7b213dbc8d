"""The torch executor on an emulated accelerator: conformance, and what the host waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, ROW_SCORE
from octavo.core.request import SamplingParams
from octavo.executors.protocol import Executor
from octavo.executors.step_buffers import BufferPair
from tests.executors.conformance import SPEC, Conformance, Dense, Driver, make_prompt, masks_of
from tests.executors.emulated_device import Emulator, Happened, OnEmulated
from tests.executors.test_torch_executor import make

PLAIN = SamplingParams(temperature=0.0)


class TestEmulated(Conformance):
    """With the kernels' twins in torch."""

    def make_executor(self, folder: Path) -> Executor:
        return OnEmulated(lambda: make(folder))


@pytest.fixture(params=[False, True], ids=["twins", "kernels"])
def driver(request: pytest.FixtureRequest, tiny_folder: Path, patched_once: None) -> Iterator[Driver]:
    """An executor whose steps all run eagerly."""
    executor = OnEmulated(lambda: make(tiny_folder, "auto"), has_kernels=request.param)
    executor.real.max_captured_rows = 0
    yield Driver(executor, executor.open(SPEC))
    executor.close()


def emulator_of(driver: Driver) -> Emulator:
    return driver.executor.emulator  # type: ignore[attr-defined]


def test_a_step_is_one_copy_up_and_one_down_and_nothing_waits(driver: Driver, dense: Dense) -> None:
    emulator = emulator_of(driver)
    prompts = [make_prompt(n, seed=n) for n in (5, 12, 33)]
    emulator.clear()
    for slot, prompt in enumerate(prompts):  # a chunk that samples nothing, and edits of all kinds
        driver.add(slot, prompt, PLAIN)
        driver.row(slot, 0, len(prompt) - 2, 0)
    driver.run()
    for slot, prompt in enumerate(prompts):
        driver.row(slot, len(prompt) - 2, 2)
    first = list(driver.run().token_ids or ())
    lengths = [len(prompt) + 1 for prompt in prompts]
    rest = driver.decode(range(3), lengths, 6)
    assert [[token, *more] for token, more in zip(first, rest, strict=True)] == [
        dense.greedy(prompt, 7) for prompt in prompts
    ]
    submit, collect = emulator.phases["submit"], emulator.phases.get("collect", Happened())
    assert not submit.waits and not collect.waits and not collect.launches
    assert submit.uploads == submit.downloads == 8 and not collect.uploads and not collect.downloads


def test_results_of_a_step_do_not_wait_for_the_next_step(driver: Driver, dense: Dense) -> None:
    """Depth 2: step N + 1 is submitted before step N is collected, which waits for nothing of step N + 1."""
    emulator, prompt = emulator_of(driver), make_prompt(10)
    driver.add(0, prompt, PLAIN)
    driver.row(0, 0, 10)
    tickets, ends, tokens = [driver.executor.submit(driver.plan())], [emulator.clock], list[int]()
    for position in range(10, 16):
        driver.row(0, position, 1, ROW_SAMPLE | ROW_CARRY)
        tickets.append(driver.executor.submit(driver.plan()))
        ends.append(emulator.clock)
        tokens += driver.executor.collect(tickets.pop(0)).token_ids or ()
        assert emulator.waited_until <= ends[-2] < ends[-1]
    tokens += driver.executor.collect(tickets.pop()).token_ids or ()
    assert tokens == dense.greedy(prompt, 7)


def test_faults_5_6_8_10_nothing_is_copied_with_the_context_or_sorted(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt whose positions are scored, and decodes after long and short contexts: launches, and words sent."""
    emulator, sent = emulator_of(driver), list[int]()
    send = BufferPair.send

    def watched(self: BufferPair, columns: Any, target: Any = None) -> Any:
        sent.append(sum(column.size for column in columns))
        return send(self, columns, target)

    monkeypatch.setattr(BufferPair, "send", watched)
    driver.add(0, make_prompt(90), replace(PLAIN, prompt_logprobs=3))
    driver.row(0, 0, 90, ROW_SCORE | ROW_SAMPLE)
    assert len(driver.run().scores[0][2]) == 89
    assert not [name for name in emulator.phases["submit"].launches if ".sort" in name]
    counts = []
    for slot, length in ((1, 6), (2, 102)):
        driver.add(slot, make_prompt(length), PLAIN)
        driver.prefill(slot, length)
        sent.clear()
        emulator.clear()
        driver.decode([slot], [length + 1], 1)
        counts.append((sent[0], sum(emulator.phases["submit"].launches.values())))
    assert not emulator.has_kernels or counts[0] == counts[1], "as many launches and words after any context"
    if emulator.has_kernels:
        launches = emulator.phases["submit"].launches
        layers = launches["octavo.paged_attention.default"]
        assert layers == 2 and launches["octavo.join_attention.default"] == 0 and "aten.bmm.default" not in launches


def test_grammars_penalties_and_log_probabilities_wait_for_nothing(driver: Driver) -> None:
    emulator = emulator_of(driver)
    held = replace(PLAIN, grammar="held")
    asks = SamplingParams(temperature=0.9, seed=3, logprobs=2, presence_penalty=0.5, top_p=0.8, min_tokens=3)
    for slot, params in enumerate((held, asks, PLAIN)):
        driver.add(slot, make_prompt(4 + slot, seed=slot), params)
        driver.row(slot, 0, 4 + slot, ROW_SAMPLE)
    emulator.clear()
    ticket = driver.executor.submit(driver.plan())
    driver.executor.supply(ticket, masks_of({0: [7, 60]}))
    result = driver.executor.collect(ticket)
    assert result.token_ids is not None and result.token_ids[0] in (7, 60) and result.logprobs is not None
    waits = {name: dict(happened.waits) for name, happened in emulator.phases.items() if happened.waits}
    assert not waits and "collect" not in emulator.phases
    assert emulator.phases["supply"].downloads == 1 and not emulator.phases["submit"].downloads
