"""What every executor must do: hand-written plans against transformers' dense forward on a tiny model.

Subclass Conformance in a test module, define `make_executor`, and every test below runs on that executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.core.plan import ROW_CARRY, ROW_POOL, ROW_SAMPLE, ROW_SCORE, TokenLogprobs
from octavo.core.request import SamplingParams
from octavo.errors import EngineError
from octavo.executors.protocol import Executor
from octavo.grammar.matcher import Masks
from tests.executors.driver import BLOCK, GREEDY, SPEC, Dense, Driver, assert_logprobs, make_prompt
from tests.executors.effects_conformance import EffectsConformance
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny_model

__all__ = ["SPEC", "Conformance", "Dense", "Driver", "make_prompt", "open_files"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama3", tmp_path_factory.mktemp("conformance") / "llama3", head_dim=32)


@pytest.fixture(scope="session")
def dense(tiny_folder: Path) -> Dense:
    return Dense(tiny_folder)


class Conformance(EffectsConformance):
    """Tests of one executor. The executor of `make_executor` must compute in float32."""

    tolerance = 2e-4

    def make_executor(self, folder: Path) -> Executor:
        raise NotImplementedError

    @pytest.fixture
    def driver(self, tiny_folder: Path) -> Any:
        executor = self.make_executor(tiny_folder)
        yield Driver(executor, executor.open(SPEC))
        executor.close()

    def test_capacity_says_what_was_opened(self, driver: Driver) -> None:
        capacity = driver.capacity
        assert capacity.num_blocks == (600,) and capacity.block_size == BLOCK and capacity.num_slots == 40
        assert capacity.vocab_size == VOCAB_SIZE and capacity.max_model_len == 256
        assert capacity.kv_bytes_per_token * BLOCK == capacity.groups[0].block_bytes
        assert capacity.weight_bytes > 0 and capacity.linear_flops_per_token > 0

    @pytest.mark.parametrize("chunk", [None, 1, 7, 16])
    def test_prefill_in_chunks_equals_the_dense_forward(self, driver: Driver, dense: Dense, chunk: int | None) -> None:
        prompt = make_prompt(37)
        driver.add(0, prompt)
        result = driver.prefill(0, len(prompt), chunk)
        assert list(result.token_ids or ()) == dense.greedy(prompt, 1)
        assert result.logprobs is not None and not result.errors
        assert_logprobs(result.logprobs[0], dense.log_probs(prompt)[-1], self.tolerance)

    @pytest.mark.parametrize("flags", [ROW_CARRY, 0])
    def test_bug_28_decode_carried_or_known_continues_the_prompt(
        self, driver: Driver, dense: Dense, flags: int
    ) -> None:
        prompt = make_prompt(10, seed=1)
        driver.add(3, prompt)
        first = list(driver.prefill(3, len(prompt)).token_ids or ())
        rest = driver.decode([3], [len(prompt) + 1], 8, flags)[0]
        assert first + rest == dense.greedy(prompt, 9)

    def test_S01_prefill_and_decode_mix_in_one_step(self, driver: Driver, dense: Dense) -> None:
        lengths = [5, 12, 33, 21, 8]
        prompts = [make_prompt(n, seed=n) for n in lengths]
        for slot, prompt in enumerate(prompts[:3]):
            driver.add(slot, prompt)
        outputs: list[list[int]] = [[] for _ in prompts]
        for slot, prompt in enumerate(prompts[:3]):
            outputs[slot] += driver.prefill(slot, len(prompt)).token_ids or ()
        driver.add(3, prompts[3])
        driver.add(4, prompts[4])
        # rows in an order that is neither by kind nor by length
        driver.row(3, 0, 13, 0)
        driver.row(2, 33, 1, ROW_SAMPLE | ROW_CARRY)
        driver.row(0, 5, 1, ROW_SAMPLE | ROW_CARRY)
        driver.row(4, 0, 8, ROW_SAMPLE)
        driver.row(1, 12, 1, ROW_SAMPLE | ROW_CARRY)
        for slot, token in zip((2, 0, 4, 1), driver.run().token_ids or (), strict=True):
            outputs[slot].append(token)
        driver.row(0, 6, 1, ROW_SAMPLE | ROW_CARRY)
        driver.row(3, 13, 8, ROW_SAMPLE)
        for slot, token in zip((0, 3), driver.run().token_ids or (), strict=True):
            outputs[slot].append(token)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output == dense.greedy(prompt, len(output)) and output

    def test_many_rows_of_mixed_lengths_decode_together(self, driver: Driver, dense: Dense) -> None:
        lengths = [3, 200, 17, 64, 5, 90, 31, 32, 33, 150]
        prompts = [make_prompt(n, seed=n) for n in lengths]
        for slot, prompt in enumerate(prompts):
            driver.add(slot, prompt)
            driver.row(slot, 0, len(prompt), 0)
            driver.run()
        got = driver.decode(range(len(prompts)), lengths[:], 3, 0)
        # the step above recomputes each prompt's last position, which must change nothing
        for prompt, output in zip(prompts, got, strict=True):
            assert output == dense.greedy(prompt, 3)

    def test_shared_prefix_blocks_in_the_same_plan(self, driver: Driver, dense: Dense) -> None:
        prefix = make_prompt(2 * BLOCK, seed=2)
        first, second = prefix + make_prompt(5, seed=3), prefix + make_prompt(9, seed=4)
        driver.add(0, first)
        driver.row(0, 0, len(first))
        driver.add(1, second, blocks=driver.tables[0][:2])
        driver.row(1, len(prefix), 9)
        tokens = list(driver.run().token_ids or ())
        assert tokens == dense.greedy(first, 1) + dense.greedy(second, 1)

    def test_K05_copied_block_keeps_its_source(self, driver: Driver, dense: Dense) -> None:
        prompt = make_prompt(3 * BLOCK - 1, seed=5)
        driver.add(0, prompt)
        first = list(driver.prefill(0, len(prompt)).token_ids or ())
        other = [*prompt, (first[0] + 1) % VOCAB_SIZE]
        shared = driver.tables[0][:2]
        driver.add(1, other, blocks=[*shared, driver.copy(driver.tables[0][2])])
        driver.row(1, len(prompt), 1)
        forked = list(driver.run().token_ids or ())
        assert forked == dense.greedy(other, 1)
        assert first + driver.decode([0], [len(prompt) + 1], 3)[0] == dense.greedy(prompt, 4)

    def test_copies_read_before_any_is_written(self, driver: Driver, dense: Dense) -> None:
        prompts = [make_prompt(BLOCK, seed=6), make_prompt(BLOCK, seed=7)]
        for slot, prompt in enumerate(prompts):
            driver.add(slot, prompt)
            driver.row(slot, 0, BLOCK, 0)
        driver.run()
        a, b = driver.tables[0][0], driver.tables[1][0]
        driver._plan["copies"].extend((0, a, b, 0, b, a))  # swap two blocks
        for slot, block in ((2, b), (3, a)):
            driver.add(slot, [*prompts[slot - 2], 9], blocks=[block])
            driver.row(slot, BLOCK, 1)
        tokens = list(driver.run().token_ids or ())
        assert tokens == [dense.greedy([*prompt, 9], 1)[0] for prompt in prompts]

    def test_slots_are_reused_clean(self, driver: Driver, dense: Dense) -> None:
        biased = SamplingParams(temperature=0.0, logit_bias=((7, 100.0),), presence_penalty=1.0, min_tokens=3)
        driver.add(0, make_prompt(40, seed=8), biased)
        assert list(driver.prefill(0, 40).token_ids or ()) == [7]
        driver.free_slot(0)
        prompt = make_prompt(6, seed=9)
        driver.add(0, prompt)
        tokens = list(driver.prefill(0, 6).token_ids or ())
        assert tokens + driver.decode([0], [7], 4)[0] == dense.greedy(prompt, 5)

    def test_S15_plans_with_effects_only_and_without_anything(self, driver: Driver, dense: Dense) -> None:
        prompt = make_prompt(9, seed=10)
        driver.add(0, prompt)
        driver.row(0, 0, 8, 0)
        driver.run()
        copied = driver.copy(driver.tables[0][1])
        assert list(driver.run().token_ids or ()) == []
        driver.add(1, prompt, blocks=[driver.tables[0][0], copied])
        result = driver.run()
        assert list(result.token_ids or ()) == [] and not result.errors and not result.pooled
        driver.row(1, 8, 1)
        assert list(driver.run().token_ids or ()) == dense.greedy(prompt, 1)
        assert list(driver.run().token_ids or ()) == []

    def test_S16_two_plans_in_flight_carry_on_the_device(self, driver: Driver, dense: Dense) -> None:
        prompt = make_prompt(11, seed=11)
        driver.add(0, prompt)
        driver.row(0, 0, 11)
        tickets = [driver.executor.submit(driver.plan())]
        for position in range(11, 15):
            driver.row(0, position, 1, ROW_SAMPLE | ROW_CARRY)
            tickets.append(driver.executor.submit(driver.plan()))
        tokens = [token for ticket in tickets for token in driver.executor.collect(ticket).token_ids or ()]
        assert tokens == dense.greedy(prompt, 5)

    def test_edits_replace_and_drop(self, driver: Driver, dense: Dense) -> None:
        prompt = make_prompt(10, seed=12)
        for slot in (0, 1):
            driver.add(slot, prompt)
            driver.row(slot, 0, 10, 0)
        driver.run()
        twin = driver.tables[1][0]
        driver._plan["edits"].extend((0, 0, 0, twin, 1, 0, 2, -1))  # adopt an equal block; drop one
        driver.tables[1][2:] = []
        driver.row(0, 9, 1)
        driver.row(1, 8, 2)
        assert list(driver.run().token_ids or ()) == dense.greedy(prompt, 1) * 2

    def test_S07_penalties_after_a_resume_count_the_outputs_so_far(self, driver: Driver) -> None:
        params = SamplingParams(
            temperature=0.0, presence_penalty=0.7, frequency_penalty=0.9, repetition_penalty=1.3, min_tokens=4
        )
        prompt = make_prompt(8, seed=13)
        driver.add(0, prompt, params)
        straight = list(driver.prefill(0, 8).token_ids or ())
        straight += driver.decode([0], [9], 9)[0]
        driver.add(5, prompt + straight[:4], params, num_prompt=8)
        resumed = list(driver.prefill(5, 12, 5).token_ids or ())
        resumed += driver.decode([5], [13], 5)[0]
        assert resumed == straight[4:]

    def test_P02_draws_survive_resume_and_company(self, driver: Driver) -> None:
        params = SamplingParams(temperature=1.3, top_p=0.95, seed=1234)
        prompt = make_prompt(8, seed=14)
        driver.add(0, prompt, params)
        straight = list(driver.prefill(0, 8).token_ids or ()) + driver.decode([0], [9], 7)[0]
        for slot in range(1, 6):
            driver.add(slot, make_prompt(5 + slot, seed=slot), SamplingParams(temperature=0.8, seed=slot))
            driver.row(slot, 0, 5 + slot)
            driver.run()
        driver.add(6, prompt + straight[:3], params, num_prompt=8)
        resumed = list(driver.prefill(6, 11).token_ids or ())
        lengths = [6 + slot + 1 for slot in range(1, 6)] + [12]
        resumed += driver.decode([1, 2, 3, 4, 5, 6], lengths, 4)[-1]
        assert resumed == straight[3:]

    @pytest.mark.parametrize("chunk", [None, 5])
    def test_S24_scores_of_the_prompt(self, driver: Driver, dense: Dense, chunk: int | None) -> None:
        prompt = make_prompt(14, seed=15)
        driver.add(0, prompt, SamplingParams(temperature=0.0, prompt_logprobs=3))
        entries: list[TokenLogprobs] = []
        for at in range(0, 14, chunk or 14):
            count = min(chunk or 14, 14 - at)
            driver.row(0, at, count, ROW_SCORE | (ROW_SAMPLE if at + count == 14 else 0))
            result = driver.run()
            if result.scores:
                row, first, part = result.scores[0]
                assert row == 0 and first == at + 1
                entries.extend(part)
        expected_TV = dense.log_probs(prompt)
        assert [entry.token_id for entry in entries] == prompt[1:]
        for position, entry in enumerate(entries):
            assert len(entry.top_ids) == 3
            assert_logprobs(entry, expected_TV[position], self.tolerance)

    def test_S24_pooled_rows_beside_others(self, driver: Driver, dense: Dense) -> None:
        prompts = [make_prompt(6, seed=16), make_prompt(19, seed=17)]
        for slot, prompt in enumerate(prompts):
            driver.add(slot, prompt)
        driver.row(0, 0, 6)
        driver.row(1, 0, 19, ROW_POOL)
        result = driver.run()
        ((row, data),) = result.pooled
        vector = torch.frombuffer(bytearray(data), dtype=torch.float32)
        expected = torch.nn.functional.normalize(dense.hidden(prompts[1])[-1], dim=0)
        assert row == 1 and torch.allclose(vector, expected, atol=1e-4)
        assert list(result.token_ids or ()) == dense.greedy(prompts[0], 1)

    def test_L05_a_request_this_model_cannot_run_fails_alone(self, driver: Driver, dense: Dense) -> None:
        good = make_prompt(7, seed=18)
        driver.add(0, [5, VOCAB_SIZE + 3, 6])
        driver.add(1, good)
        driver.add(2, good, SamplingParams(temperature=0.0, logit_bias=((VOCAB_SIZE, 1.0),)))
        for slot, count in ((0, 3), (1, 7), (2, 7)):
            driver.row(slot, 0, count)
        result = driver.run()
        assert [row for row, _ in result.errors] == [0, 2]
        assert str(VOCAB_SIZE + 3) in result.errors[0][1] and "logit_bias" in result.errors[1][1]
        assert list(result.token_ids or ())[1:2] == dense.greedy(good, 1)

    def test_max_model_len_is_reached_and_not_passed(self, driver: Driver, dense: Dense) -> None:
        prompt = make_prompt(255, seed=19)
        driver.add(0, prompt)
        tokens = list(driver.prefill(0, 255, 100).token_ids or ())
        tokens += driver.decode([0], [256], 1)[0]
        assert tokens == dense.greedy(prompt, 1) + dense.greedy([*prompt, tokens[0]], 1)

    def test_P06_rows_held_to_a_grammar_sample_what_their_masks_allow(self, driver: Driver, dense: Dense) -> None:
        prompts = [make_prompt(n, seed=n) for n in (5, 9, 12, 7)]
        allowed = {1: [7, 60, 123], 2: [EOS_ID]}
        for slot, prompt in enumerate(prompts):
            driver.add(slot, prompt, replace(GREEDY, grammar="held") if slot in allowed else GREEDY)
            driver.row(slot, 0, len(prompt), ROW_SAMPLE if slot < 3 else 0)
        ticket = driver.executor.submit(driver.plan())
        driver.executor.supply(ticket, masks_of(allowed))
        ids = list(driver.executor.collect(ticket).token_ids or ())
        best = [dense.log_probs(prompt)[-1] for prompt in prompts]
        assert ids == [int(best[0].argmax()), max(allowed[1], key=lambda token: float(best[1][token])), EOS_ID]
        # what was sampled is what the next row reads
        driver.row(1, len(prompts[1]), 1, ROW_SAMPLE | ROW_CARRY)
        ticket = driver.executor.submit(driver.plan())
        driver.executor.supply(ticket, masks_of({0: list(range(VOCAB_SIZE))}))
        assert list(driver.executor.collect(ticket).token_ids or ()) == dense.greedy([*prompts[1], ids[1]], 1)

    def test_P06_a_row_that_nothing_is_left_for_hurts_nobody(self, driver: Driver, dense: Dense) -> None:
        prompts = [make_prompt(n, seed=n) for n in (5, 9)]
        for slot, prompt in enumerate(prompts):
            driver.add(slot, prompt, replace(GREEDY, grammar="held") if slot == 0 else GREEDY)
            driver.row(slot, 0, len(prompt))
        ticket = driver.executor.submit(driver.plan())
        driver.executor.supply(ticket, masks_of({0: []}))
        result = driver.executor.collect(ticket)
        assert [row for row, _ in result.dead_ends] == [0] and "no token may follow" in result.dead_ends[0][1].message
        assert result.errors == ()
        assert (result.token_ids or ())[1] == dense.greedy(prompts[1], 1)[0]

    def test_P06_no_row_samples_without_its_mask(self, driver: Driver) -> None:
        driver.add(0, make_prompt(5), replace(GREEDY, grammar="held"))
        driver.row(0, 0, 3, 0)
        driver.run()  # a chunk samples nothing, so it needs none
        driver.row(0, 3, 2)
        ticket = driver.executor.submit(driver.plan())
        with pytest.raises(EngineError, match="masks"):
            driver.executor.collect(ticket)
        driver.row(0, 4, 1)
        ticket = driver.executor.submit(driver.plan())
        with pytest.raises(EngineError, match="masks"):
            driver.executor.supply(ticket, masks_of({3: [1]}))
        driver.add(1, make_prompt(4))
        driver.row(1, 0, 4)
        ticket = driver.executor.submit(driver.plan())
        with pytest.raises(EngineError, match="needs none"):
            driver.executor.supply(ticket, masks_of({0: [1]}))
        assert len(driver.executor.collect(ticket).token_ids or ()) == 1


def open_files(folder: Path) -> tuple[Any, Any]:
    """The model's files and specification."""
    files = resolve_model(str(folder))
    return files, read_model_spec(files)


def masks_of(allowed: Mapping[int, Sequence[int]]) -> Masks:
    """Masks of positions that sample, by the ids that each allows."""
    bits = np.zeros((len(allowed), -(-VOCAB_SIZE // 32)), dtype=np.uint32)
    for line, ids in zip(bits, allowed.values(), strict=True):
        for token in ids:
            line[token // 32] |= np.uint32(1 << token % 32)
    return Masks(np.asarray(list(allowed), dtype=np.int64), bits.view(np.int32))
