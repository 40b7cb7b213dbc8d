"""What every executor must do with forks, beams, copies, the host tier and several plans in flight.

A mixin of Conformance: hand-written plans against transformers' dense forward, or against an undisturbed run.
Shapes: V vocabulary.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.plan import ROW_BEAM, ROW_CARRY, ROW_SAMPLE, NewSequence, StepPlan, StepResult, TokenLogprobs
from octavo.core.request import SamplingParams
from octavo.executors.protocol import Executor
from tests.executors.driver import BLOCK, GREEDY, SPEC, Dense, Driver, make_prompt
from tests.tiny_models import EOS_ID, VOCAB_SIZE

HOST_BLOCKS = 40
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 32 * 4  # keys and values, layers, tokens, KV heads, head size, float32
BEAMS = SamplingParams(beam_width=3, n=3, temperature=0.0)


def sampled(result: StepResult) -> list[tuple[int, float]]:
    """Ids and their log-probabilities."""
    assert result.logprobs is not None and not result.errors
    return [(entry.token_id, entry.logprob) for entry in result.logprobs if entry is not None]


def assert_same(got: list[tuple[int, float]], expected: list[tuple[int, float]], tolerance: float = 2e-4) -> None:
    assert [token for token, _ in got] == [token for token, _ in expected]
    assert [value for _, value in got] == pytest.approx([value for _, value in expected], abs=tolerance)


def assert_candidates(entry: TokenLogprobs | None, scores_V: torch.Tensor, count: int, tolerance: float) -> None:
    """The entry names the best `count` of these scores, best first."""
    assert entry is not None
    values, ids = scores_V.topk(count)
    assert entry.top_ids == tuple(ids.tolist()) and entry.token_id == entry.top_ids[0] and entry.rank == 1
    assert list(entry.top_logprobs) == pytest.approx(values.tolist(), abs=tolerance)
    assert entry.logprob == entry.top_logprobs[0]


class EffectsConformance:
    """Tests of one executor's effects; `hosted` is a driver of an executor with a host tier."""

    tolerance = 2e-4

    def make_executor(self, folder: Path) -> Executor:
        raise NotImplementedError

    @pytest.fixture
    def hosted(self, tiny_folder: Path) -> Any:
        executor = self.make_executor(tiny_folder)
        yield Driver(executor, executor.open(replace(SPEC, host_bytes=HOST_BLOCKS * BLOCK_BYTES)))
        executor.close()

    def test_K05_several_copies_of_one_source_that_is_written_in_the_same_step(
        self, driver: Driver, dense: Dense
    ) -> None:
        prompt = make_prompt(2 * BLOCK + 2, seed=20)
        driver.add(0, prompt)
        driver.row(0, 0, len(prompt), 0)
        driver.run()
        ends = [11, 12, 13, 14]
        driver.choose(0, len(prompt), ends[0])
        for slot in (1, 2, 3):
            driver.add(slot, [*prompt, ends[slot]], blocks=driver.tables[0])
        for slot in (1, 2, 3):
            driver.own_tail(slot, len(prompt))
        assert len(driver._plan["copies"]) == 9 and set(driver._plan["copies"][1::3]) == {driver.tables[0][2]}
        for slot in (3, 0, 1, 2):
            driver.row(slot, len(prompt), 1)
        first = dict(zip((3, 0, 1, 2), driver.run().token_ids or (), strict=True))
        rest = driver.decode(range(4), [len(prompt) + 2] * 4, 3)
        for slot in range(4):
            assert [first[slot], *rest[slot]] == dense.greedy([*prompt, ends[slot]], 4)

    def test_K06_forks_equal_as_many_separate_requests(self, driver: Driver) -> None:
        params = SamplingParams(
            temperature=1.2, seed=99, top_p=0.97, presence_penalty=0.5, repetition_penalty=1.2, n=3, logprobs=2
        )
        prompts = [make_prompt(2 * BLOCK + 3, seed=21), make_prompt(3 * BLOCK, seed=22)]
        expected = []
        for index, prompt in enumerate(prompts):
            for choice in range(3):
                slot = 10 + 3 * index + choice
                driver.add(slot, prompt, params, choice=choice)
                one = sampled(driver.prefill(slot, len(prompt)))
                for step in range(4):
                    driver.row(slot, len(prompt) + step, 1, ROW_SAMPLE | ROW_CARRY)
                    one += sampled(driver.run())
                expected.append(one)
        assert len({tuple(token for token, _ in one) for one in expected}) == 6, "equal choices would prove nothing"
        # two requests fork in one plan, with a stranger's row between; one's prompt ends in a chunk of its own
        driver.add(9, make_prompt(5, seed=23))
        driver.add(0, prompts[0], params)
        driver.row(0, 0, 6, 0)
        driver.run()
        driver.row(0, 6, len(prompts[0]) - 6)
        driver.fork(0, 1, prompts[0], params, 1)
        driver.fork(0, 2, prompts[0], params, 2)
        driver.row(9, 0, 5, 0)
        driver.add(3, prompts[1], params)
        driver.row(3, 0, len(prompts[1]))
        for choice in (1, 2):
            driver.fork(3, 3 + choice, prompts[1], params, choice)
        got = [[entry] for entry in sampled(driver.run())]
        for step in range(4):
            for slot in (5, 1, 0, 3, 2, 4):
                position = len(prompts[slot // 3]) + step
                driver.own_tail(slot, position)
                driver.row(slot, position, 1, ROW_SAMPLE | ROW_CARRY)
            for slot, entry in zip((5, 1, 0, 3, 2, 4), sampled(driver.run()), strict=True):
                got[slot].append(entry)
        for slot in range(6):
            assert_same(got[slot], expected[slot])

    def test_P04_candidates_are_the_best_log_probabilities_and_nothing_becomes_known(
        self, driver: Driver, dense: Dense
    ) -> None:
        prompts = [make_prompt(9, seed=24), make_prompt(7, seed=25)]
        driver.add(0, prompts[0], BEAMS)
        driver.add(1, prompts[1])
        driver.row(0, 0, 9, ROW_SAMPLE | ROW_BEAM)
        driver.row(1, 0, 7)
        result = driver.run()
        assert result.logprobs is not None and result.token_ids is not None and not result.errors
        assert_candidates(result.logprobs[0], dense.log_probs(prompts[0])[-1], 6, self.tolerance)
        assert result.token_ids[0] == result.logprobs[0].token_id  # type: ignore[union-attr]
        assert result.token_ids[1] == dense.greedy(prompts[1], 1)[0]
        assert result.logprobs[1] is not None and len(result.logprobs[1].top_ids) == 5
        chosen = result.logprobs[0].top_ids[1:3]  # type: ignore[union-attr]
        # the second best stays in its slot, the third moves to a slot of its own
        driver.choose(0, 9, chosen[0])
        driver.add(2, [*prompts[0], chosen[1]], BEAMS, num_prompt=9, blocks=driver.tables[0], choice=1)
        driver.own_tail(2, 9)
        for slot in (2, 0):
            driver.row(slot, 9, 1, ROW_SAMPLE | ROW_BEAM)
        driver.row(1, 7, 1, ROW_SAMPLE | ROW_CARRY)
        result = driver.run()
        assert result.logprobs is not None and result.token_ids is not None
        assert result.token_ids[2] == dense.greedy(prompts[1], 2)[1]
        del result.logprobs[2]
        for entry, token in zip(result.logprobs, (chosen[1], chosen[0]), strict=True):
            assert_candidates(entry, dense.log_probs([*prompts[0], token])[-1], 6, self.tolerance)

    def test_P04_chosen_ids_count_as_outputs_and_candidates_do_not(self, driver: Driver, dense: Dense) -> None:
        params = replace(BEAMS, frequency_penalty=-2.0, presence_penalty=-1.0)  # what counts comes to the top
        prompt = make_prompt(9, seed=26)

        def expected(known: list[int]) -> torch.Tensor:
            scores_V = dense.log_probs(known)[-1].clone()
            for token in set(known[9:]):
                scores_V[token] += known[9:].count(token) * 2.0 + 1.0
            return scores_V

        driver.add(0, prompt, params)
        driver.row(0, 0, 9, ROW_SAMPLE | ROW_BEAM)
        driver.run()
        known = list(prompt)
        for step in range(4):
            token = int(dense.log_probs(known)[-1].argmax()) if step < 3 else known[-1]
            known.append(token)
            driver.choose(0, len(known) - 1, token)
            driver.row(0, len(known) - 1, 1, ROW_SAMPLE | ROW_BEAM)
            result = driver.run()
            assert result.logprobs is not None
            assert_candidates(result.logprobs[0], expected(known), 6, self.tolerance)
        # a beam that enters in the plan that chooses its next id: what it brings counts, and the id once more
        driver.add(1, known[:-1], params, num_prompt=9, blocks=driver.tables[0])
        driver.choose(1, len(known) - 1, known[-1])
        driver.own_tail(1, len(known) - 1)
        driver.row(1, len(known) - 1, 1, ROW_SAMPLE | ROW_BEAM)
        result = driver.run()
        assert result.logprobs is not None
        assert_candidates(result.logprobs[0], expected(known), 6, self.tolerance)

    @pytest.mark.parametrize("name", ["S09", "K10"])
    def test_S09_K10_swapped_out_overwritten_and_loaded_back_is_undisturbed_by_bits(
        self, hosted: Driver, name: str
    ) -> None:
        driver, prompt = hosted, make_prompt(5 * BLOCK + 2, seed=27)
        outputs: dict[int, list[TokenLogprobs | None]] = {}
        for slot in (0, 1):
            driver.add(slot, prompt)
            outputs[slot] = list(driver.prefill(slot, len(prompt), 9).logprobs or ())
        length = len(prompt)
        for _ in range(3):
            for slot in (0, 1):
                driver.row(slot, length, 1, ROW_SAMPLE | ROW_CARRY)
                outputs[slot] += driver.run().logprobs or ()
            length += 1
        held = list(driver.tables[1])
        hosts = driver.swap_out(1)
        # the same plan's rows may write to the blocks given up: a swapped request's, or an evicted prefix's
        other = make_prompt(30, seed=28)
        driver.add(2, other, blocks=[] if name == "S09" else held[:1])
        driver.row(2, 0, 30, 0)
        driver.run()
        driver.add(3, other)
        driver.row(3, 0, 30, 0)
        driver.run()
        assert set(driver.tables[2]) & set(held), "nothing was overwritten"
        ids = prompt + [entry.token_id for entry in outputs[1] if entry is not None]
        driver.add(4, ids, num_prompt=len(prompt))
        driver.load(4, hosts)
        assert not set(driver.tables[4]) & set(held), "the blocks are the same ones: nothing was loaded"
        flags = ROW_SAMPLE
        for _ in range(4):
            driver.row(0, length, 1, ROW_SAMPLE | ROW_CARRY)
            outputs[0] += driver.run().logprobs or ()
            driver.row(4, length, 1, flags)
            outputs[1] += driver.run().logprobs or ()
            length, flags = length + 1, ROW_SAMPLE | ROW_CARRY
        assert len(outputs[0]) == 8 and outputs[0] == outputs[1]

    def test_S16_effects_run_in_the_order_of_the_plan(self, hosted: Driver, dense: Dense) -> None:
        driver = hosted
        ids = [make_prompt(BLOCK, seed=seed) for seed in (30, 31, 32)]
        for slot in (0, 1):
            driver.add(slot, ids[slot])
            driver.row(slot, 0, BLOCK, 0)
        driver.run()
        b, c, host = driver.tables[0][0], driver.tables[1][0], 5
        # swap out b, then copy c over b, then write over c: each reads what was there before
        driver._plan["swap_outs"].extend((0, b, host))
        driver._plan["copies"].extend((0, c, b))
        driver.free_slot(0)
        driver.free_slot(1)
        driver.frees[0] = [block for block in driver.free if block not in (b, c)]
        driver.add(0, [*ids[1], 9], blocks=[b])
        driver.add(1, ids[2], blocks=[c])
        driver.row(1, 0, BLOCK)
        driver.row(0, BLOCK, 1)
        tokens = list(driver.run().token_ids or ())
        assert tokens == dense.greedy(ids[2], 1) + dense.greedy([*ids[1], 9], 1)
        # a freed slot entered anew, an id chosen for it, a host load and a copy of what it loads
        driver.free_slot(1)
        d, e = driver.free.pop(), driver.free.pop()
        driver._plan["host_loads"].extend((0, host, d))
        driver._plan["copies"].extend((0, d, e))
        driver.add(1, ids[0], blocks=[e])
        driver.choose(1, BLOCK, 9)
        driver.row(1, BLOCK, 1)
        assert list(driver.run().token_ids or ()) == dense.greedy([*ids[0], 9], 1)

    @pytest.mark.parametrize("depth", [2, 3])
    def test_S17_carry_and_forks_with_several_plans_in_flight(self, driver: Driver, depth: int) -> None:
        params = [replace(GREEDY, logprobs=1), SamplingParams(temperature=1.1, seed=3, n=2, logprobs=1)]
        prompts = [make_prompt(13, seed=33), make_prompt(10, seed=34)]
        layouts = [(0, 0), (1, 0), (1, 1)]  # request and choice of each slot
        expected = []
        for slot, (request, choice) in enumerate(layouts, start=10):
            driver.add(slot, prompts[request], params[request], choice=choice)
            one = sampled(driver.prefill(slot, len(prompts[request])))
            for step in range(6):
                driver.row(slot, len(prompts[request]) + step, 1, ROW_SAMPLE | ROW_CARRY)
                one += sampled(driver.run())
            expected.append(one)
        driver.add(0, prompts[0], params[0])
        driver.add(1, prompts[1], params[1])
        driver.row(0, 0, 13)
        driver.row(1, 0, 10)
        driver.fork(1, 2, prompts[1], params[1], 1)
        flight = deque([driver.executor.submit(driver.plan())])
        got: list[list[tuple[int, float]]] = [[], [], []]
        for step in range(6 + depth):
            if step < 6:
                for slot, (request, _) in enumerate(layouts):
                    position = len(prompts[request]) + step
                    driver.own_tail(slot, position)
                    driver.row(slot, position, 1, ROW_SAMPLE | ROW_CARRY)
                flight.append(driver.executor.submit(driver.plan()))
            if flight and (len(flight) == depth or step >= 6):
                for slot, entry in enumerate(sampled(driver.executor.collect(flight.popleft()))):
                    got[slot].append(entry)
        assert not flight
        for slot in range(3):
            assert_same(got[slot], expected[slot])

    def test_S17_a_slot_freed_while_its_plan_is_in_flight_keeps_its_result(self, driver: Driver, dense: Dense) -> None:
        prompts = [make_prompt(9, seed=35), make_prompt(11, seed=36)]
        driver.add(0, prompts[0])
        driver.row(0, 0, 9)
        first = driver.executor.submit(driver.plan())
        driver.free_slot(0)
        driver.add(0, prompts[1])  # the same slot and, last in first out, the same blocks
        driver.row(0, 0, 11)
        second = driver.executor.submit(driver.plan())
        results = [driver.executor.collect(ticket) for ticket in (first, second)]
        for result, prompt in zip(results, prompts, strict=True):
            assert list(result.token_ids or ()) == dense.greedy(prompt, 1)

    def test_a_fork_of_a_request_this_model_cannot_run_fails_with_it(self, driver: Driver, dense: Dense) -> None:
        bad, good = [5, VOCAB_SIZE + 3, 6], make_prompt(6, seed=37)
        driver.add(0, bad)
        driver.row(0, 0, 3)
        driver.fork(0, 1, bad, GREEDY, 1)
        driver.add(2, good)
        driver.row(2, 0, 6)
        result = driver.run()
        assert [row for row, _ in result.errors] == [0, 1]
        assert (result.token_ids or array("i"))[2] == dense.greedy(good, 1)[0]

    def test_a_row_without_tokens_needs_one_before_it_to_fork_from(self, driver: Driver) -> None:
        new = NewSequence(0, "a", 0, 3, array("i", [5, 6, 7]), GREEDY, (EOS_ID,))
        columns = {name: array("i", [value]) for name, value in (("slots", 0), ("starts", 3), ("counts", 0))}
        for flags, message in ((ROW_SAMPLE, "does not fork"), (ROW_SAMPLE | 16, "no row before it")):
            plan = StepPlan(0, 0.0, **columns, flags=array("i", [flags]), new_sequences=(new,))
            with pytest.raises(AssertionError, match=message):
                driver.executor.submit(plan)
