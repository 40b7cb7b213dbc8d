"""Life cycle rows: S11, S17, S19, P05, L03, L05, L06, and rows 10 and 18 of the reliability scorecard."""

from __future__ import annotations

import random
from array import array

import pytest
from tests.core.harness import EOS, Record, Run, limits, prompt
from tests.fake_model import Faults, oracle
from tests.reliability.test_row_10_tiny_pool import serve

from octavo.core.plan import ROW_CARRY, EventKind, StepFailure, StepPlan, StepResult, WaitReason
from octavo.core.request import FinishReason, SamplingParams, Want
from octavo.errors import AdmissionError, DuplicateRequestError, InvalidRequestError, InvariantError, PromptTooLongError

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def prompt_ending_after(num_outputs: int, token_id: int = EOS, vocab_size: int = 97) -> list[int]:
    """A prompt whose `num_outputs`-th output is the first `token_id`."""
    for seed in range(10_000):
        outputs = oracle(prompt(6, seed), num_outputs, vocab_size, (token_id,))
        if len(outputs) == num_outputs and outputs[-1] == token_id:
            return prompt(6, seed)
    raise AssertionError("no such prompt")


# -- S11


@pytest.mark.parametrize(
    ("sizes", "length", "max_tokens", "numbers"),
    [
        ({"max_model_len": 16}, 16, 1, ("16",)),
        ({"max_model_len": 16}, 40, None, ("40", "16")),
        ({"num_blocks": 4}, 8, 10, ("17", "16")),
        ({"num_blocks": 4}, 17, None, ("17", "16")),
        ({"chunked_prefill": False, "max_batch_tokens": 8}, 9, 1, ("9", "8")),
    ],
)
def test_S11_the_impossible_is_refused_with_the_numbers(
    sizes: dict[str, object], length: int, max_tokens: int | None, numbers: tuple[str, ...]
) -> None:
    run = Run(limits(**sizes))
    with pytest.raises(AdmissionError) as refusal:
        run.admit(prompt(length), max_tokens)
    assert all(number in str(refusal.value) for number in numbers) and refusal.value.param
    assert not run.scheduler.has_work
    run.admit(prompt(4), 3)
    run.finish()


def test_S11_a_prompt_that_is_too_long_says_what_the_model_or_the_pool_holds() -> None:
    for sizes, max_tokens, held in (
        ({"max_model_len": 12}, None, 12),
        ({"max_model_len": 12}, 3, 12),
        ({"num_blocks": 4}, None, 16),
        ({"num_blocks": 4}, 3, 16),
    ):
        with pytest.raises(PromptTooLongError) as refusal:
            Run(limits(**sizes)).admit(prompt(17), max_tokens)
        told = str(refusal.value)
        assert told.startswith(f"This model's maximum context length is {held} tokens, and the prompt has 17")
        assert refusal.value.param == "prompt" and "--max-model-len" not in told and "max_tokens" not in told
    with pytest.raises(AdmissionError, match="max_tokens 30") as too_much:
        Run(limits(num_blocks=4)).admit(prompt(8), 30)
    assert too_much.value.param == "max_tokens"
    with pytest.raises(AdmissionError, match="lower n, or enlarge the KV pool") as too_many:
        Run(limits(num_blocks=4, block_sharing=False)).admit(prompt(14), None, n=2)
    assert too_many.value.param == "n"


def test_S11_more_choices_than_sequences_are_refused() -> None:
    run = Run(limits(max_sequences=2))
    with pytest.raises(AdmissionError, match=r"3.*2"):
        run.admit(prompt(4), 3, n=3)


def test_S11_what_just_fits_is_taken_and_served() -> None:
    run = Run(limits(num_blocks=4, max_model_len=18))
    for length, max_tokens in ((8, 9), (16, 1), (1, 16), (16, 100)):
        if length == 16 and max_tokens == 100:
            with pytest.raises(AdmissionError):
                run.admit(prompt(length), max_tokens)
            continue
        run.admit(prompt(length), max_tokens)
    run.finish()


@pytest.mark.parametrize(("sizes", "fitting"), [({"num_blocks": 4}, 9), ({"max_model_len": 12}, 4)])
def test_S11_an_unset_max_tokens_is_capped_at_what_fits(sizes: dict[str, object], fitting: int) -> None:
    run = Run(limits(**sizes))
    record = run.admit(prompt(8), None)
    run.finish()
    assert record.is_capped and record.max_tokens == len(record.token_ids) == fitting
    assert record.reason == FinishReason.LENGTH


def test_S11_the_model_length_ends_a_request_that_asked_for_more() -> None:
    run = Run(limits(max_model_len=12))
    record = run.admit(prompt(8), 50)
    run.finish()
    assert len(record.token_ids) == 4 and record.reason == FinishReason.LENGTH


@pytest.mark.parametrize("bad", [[], [97], [-1], [5, 2**31 - 1]])
def test_S11_ids_outside_the_vocabulary_and_empty_prompts_are_invalid(bad: list[int]) -> None:
    run = Run()
    with pytest.raises(InvalidRequestError):
        run.admit(bad, 3)
    assert not run.scheduler.has_work


# -- P05, S17


@DEPTHS
def test_P05_stops_are_found_in_order_of_position(depth: int) -> None:
    ids = prompt_ending_after(4)
    outputs = oracle(ids, 8, 97)
    run = Run(depth=depth)
    cases: list[tuple[dict[str, object], FinishReason, int, int | None]] = [
        ({"max_tokens": 8, "eos_token_ids": (EOS,)}, FinishReason.STOP, 4, None),
        ({"max_tokens": 4, "eos_token_ids": (EOS,)}, FinishReason.STOP, 4, None),
        ({"max_tokens": 3, "eos_token_ids": (EOS,)}, FinishReason.LENGTH, 3, None),
        ({"max_tokens": 8, "eos_token_ids": (EOS,), "ignore_eos": True}, FinishReason.LENGTH, 8, None),
        ({"max_tokens": 8, "eos_token_ids": (EOS,), "stop_token_ids": (outputs[1],)}, FinishReason.STOP, 2, outputs[1]),
        ({"max_tokens": 2, "stop_token_ids": (outputs[1],)}, FinishReason.STOP, 2, outputs[1]),
        (
            {"max_tokens": 8, "ignore_eos": True, "eos_token_ids": (EOS,), "stop_token_ids": (EOS,)},
            FinishReason.STOP,
            4,
            EOS,
        ),
        ({"max_tokens": 8}, FinishReason.LENGTH, 8, None),
    ]
    records = [run.admit(ids, **fields) for fields, *_ in cases]
    run.finish()
    for record, (_, reason, count, stop_id) in zip(records, cases, strict=True):
        assert (record.reason, len(record.token_ids)) == (reason, count)
        assert record.finished is not None and record.finished.stop_token_id in {
            stop_id,
            EOS if stop_id is None else stop_id,
        }


@DEPTHS
def test_P05_nothing_ends_before_min_tokens(depth: int) -> None:
    ids = prompt_ending_after(2)
    run = Run(depth=depth)
    record = run.admit(ids, 9, eos_token_ids=(EOS,), min_tokens=5)
    run.finish()
    assert len(record.token_ids) >= 5


@DEPTHS
def test_P05_generated_tokens_count_across_preemption(depth: int) -> None:
    run = Run(limits(num_blocks=5), depth=depth)
    records = [run.admit(prompt(4, seed), 12) for seed in range(3)]
    run.finish()
    assert any(record.of_kind(EventKind.PREEMPTED) for record in records)
    assert [len(record.token_ids) for record in records] == [12, 12, 12]


@DEPTHS
def test_S17_stops_by_length_waste_nothing(depth: int) -> None:
    run = Run(limits(num_blocks=64, prefix_caching=False, max_model_len=20), depth=depth)
    for seed in range(8):
        run.admit(prompt(3 + seed, seed), None if seed % 3 == 0 else 1 + seed)
    run.finish()
    assert run.num_scheduled == sum(r.request.num_prompt_tokens + len(r.token_ids) - 1 for r in run.records.values())


@DEPTHS
def test_S17_an_end_of_sequence_wastes_at_most_one_token_per_plan_in_flight(depth: int) -> None:
    run = Run(limits(num_blocks=64, prefix_caching=False, vocab_size=5), depth=depth)
    for seed in range(8):
        run.admit(prompt(3 + seed, seed, 5), 30, eos_token_ids=(EOS,))
    run.finish()
    needed = sum(r.request.num_prompt_tokens + len(r.token_ids) - 1 for r in run.records.values())
    num_stopped = sum(record.reason == FinishReason.STOP for record in run.records.values())
    assert num_stopped == 8
    assert needed <= run.num_scheduled <= needed + (depth - 1) * num_stopped


def test_S17_the_next_plan_carries_the_id_that_is_still_on_the_device() -> None:
    run = Run(depth=2)
    run.admit(prompt(4), 3)
    plans = [run.plan()]
    run.submit(plans[0])
    plans.append(run.plan())
    run.submit(plans[1])
    assert [list(plan.starts) for plan in plans] == [[0], [4]]
    assert not plans[0].flags[0] & ROW_CARRY and plans[1].flags[0] & ROW_CARRY
    run.finish()


@pytest.mark.parametrize("depth", [2, 3])
def test_S17_a_request_preempted_in_flight_keeps_its_late_token_once(depth: int) -> None:
    run = Run(limits(num_blocks=5, prefix_caching=False), depth=depth)
    run.admit(prompt(8, 1), 12)
    victim = run.admit(prompt(8, 2), 12)
    num_late = 0
    for _ in range(200):
        run.now += 0.01
        while len(run.flight) < depth and not (plan := run.plan()).is_empty:
            if "r1" in [new.request_id for new in plan.new_sequences]:
                assert not any("r1" in run.rows(queued) for queued, _ in run.flight)
            run.submit(plan)
        if not run.flight:
            break
        num_tokens = len(victim.token_ids)
        run.commit()
        num_late += len(victim.token_ids) > num_tokens and not victim.is_running and victim.finished is None
    assert victim.of_kind(EventKind.PREEMPTED) and num_late >= 1
    run.finish()


# -- S19, L03, L05, L06


def test_S19_pause_admits_nobody_and_drain_takes_no_new_requests() -> None:
    run = Run()
    run.admit(prompt(4, 1), 4)
    run.step()
    run.scheduler.pause()
    second = run.admit(prompt(4, 2), 4)
    run.check = False  # while paused, work waits on purpose
    run.steps(6)
    assert not second.is_running and run.plans[-1].is_empty
    assert WaitReason.PAUSED in [reason for reason, _ in run.plans[-1].waits]
    run.scheduler.resume()
    run.scheduler.drain()
    with pytest.raises(AdmissionError, match="drain"):
        run.admit(prompt(4, 3), 4)
    run.finish()


@DEPTHS
def test_L03_cancel_answers_once_in_every_state(depth: int) -> None:
    for num_steps in range(8):
        run = Run(limits(max_sequences=2, max_batch_tokens=6), depth=depth)
        records = [run.admit(prompt(9, seed), 9) for seed in range(4)]
        for _ in range(num_steps):
            run.step()
        run.fill()
        num_open = sum(record.finished is None for record in records)
        assert run.cancel("nobody", *run.records, "r0") == num_open
        assert run.scheduler.statistics().num_blocks_used == 0
        run.finish()


def test_L05_a_failure_puts_everyone_back_and_the_text_stays_right() -> None:
    for depth in (1, 2, 3):
        run = Run(depth=depth)
        records = [run.admit(prompt(6, seed), 8) for seed in range(3)]
        for _ in range(4):
            run.fill()
            run.fail_oldest()
            assert run.scheduler.num_running == 0 and run.scheduler.num_waiting == 3
            run.steps(2)
        run.finish()
        assert all(len(record.of_kind(EventKind.PREEMPTED)) >= 4 for record in records)


def test_L05_plans_after_a_failed_one_must_not_be_committed() -> None:
    run = Run(depth=2)
    run.admit(prompt(6), 8)
    plans = [run.plan(), run.plan()]
    run.scheduler.commit(plans[0], StepFailure("injected"), run.now)
    with pytest.raises(InvariantError):
        run.scheduler.commit(plans[1], StepFailure("injected"), run.now)


def test_L05_plans_are_committed_once_and_in_order() -> None:
    run = Run(depth=2)
    run.admit(prompt(6), 8)
    plans = [run.plan(), run.plan()]
    results = [run.executor.collect(ticket) for ticket in [run.executor.submit(plan) for plan in plans]]
    with pytest.raises(InvariantError):
        run.scheduler.commit(plans[1], results[1], run.now)
    run.take(run.scheduler.commit(plans[0], results[0], run.now))
    with pytest.raises(InvariantError):
        run.scheduler.commit(plans[0], results[0], run.now)
    run.take(run.scheduler.commit(plans[1], results[1], run.now))
    run.finish()


@DEPTHS
def test_L05_the_culprit_is_found_by_bisection_and_fails_alone(depth: int) -> None:
    run = Run(depth=depth, faults=Faults(random.Random(1), poison=frozenset({"r5"})))
    records = [run.admit(prompt(6, seed), 5) for seed in range(8)]
    suspects = set(run.records)
    while len(suspects) > 1:
        half = sorted(suspects)[: len(suspects) // 2]
        num_failures = run.num_failures
        run.step(half)
        while run.flight:
            run.commit()
        suspects = set(half) if run.num_failures > num_failures else suspects - set(half)
    assert suspects == {"r5"}
    run.cancel("r5", reason=FinishReason.ERROR)
    run.finish()
    assert [record.reason for record in records].count(FinishReason.LENGTH) == 7


def test_L05_copies_of_a_failed_plan_are_safe_to_repeat() -> None:
    run = Run(depth=2)
    run.admit(prompt(8), 1)
    run.finish_all()
    record = run.admit(prompt(8), 4)
    for _ in range(3):
        run.fill()
        assert any(plan.copies for plan, _ in run.flight)
        run.fail_oldest()
    run.finish()
    assert record.reason == FinishReason.LENGTH


def test_L05_plan_only_leaves_the_others_alone() -> None:
    run = Run()
    for seed in range(3):
        run.admit(prompt(4, seed), 4)
    run.step()
    run.admit(prompt(4, 9), 4)
    assert set(run.counts(run.step({"r1", "r3"}))) == {"r1", "r3"}
    assert run.plan({"nobody"}).is_empty
    run.finish()


def late_reader(run: Run) -> tuple[Record, Record]:
    """Two equal prompts of one block, the second admitted on the first's block while that is in flight."""
    first = run.admit(prompt(4), 4)
    run.submit(run.plan())
    second = run.admit(prompt(4), 4)
    run.submit(run.plan())
    assert len(run.plans[-1].copies) == 3
    return first, second


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("cancels", [False, True])
def test_row_18_a_failed_row_is_tried_again_then_ends_alone_and_nothing_it_wrote_is_found(
    cancels: bool, lasts: bool
) -> None:
    run = Run(depth=2, faults=Faults(random.Random(1), row_error=1.0))
    first, second = late_reader(run)
    if cancels:
        run.cancel("r1")
    run.executor.run(run.flight[0][1])
    run.executor.faults = Faults(random.Random(1), bad=frozenset({"r0"} if lasts else ()))
    run.finish_all()
    assert first.reason == (FinishReason.ERROR if lasts else FinishReason.LENGTH)
    assert len(first.of_kind(EventKind.PREEMPTED)) == 1 and len(first.token_ids) == 4 * (not lasts)
    assert second.reason == (FinishReason.CANCELLED if cancels else FinishReason.LENGTH)
    third = run.admit(prompt(4), 4)
    run.finish()
    assert third.reason == FinishReason.LENGTH


@DEPTHS
def test_row_18_nothing_that_a_failed_row_found_or_wrote_is_found_again(depth: int) -> None:
    """Its prefix may be what spoilt it: a chunk before that nobody looked at, or a block that went bad since."""
    run = Run(limits(num_blocks=40, max_batch_tokens=8, host_blocks=(40,)), depth=depth)
    run.admit(prompt(16, 1), 1)
    run.finish_all()
    run.executor.faults = Faults(random.Random(1), bad=frozenset({"bad"}))
    bad = run.admit([*prompt(16, 1), *prompt(13, 2)], 4, "bad")
    run.finish_all()
    assert bad.reason == FinishReason.ERROR and bad.of_kind(EventKind.ADMITTED)[0].cached_tokens == 16
    good = run.admit([*prompt(16, 1), *prompt(13, 2)], 4)
    run.finish()
    assert good.of_kind(EventKind.ADMITTED)[0].cached_tokens == 0


@DEPTHS
def test_row_18_a_choice_that_fails_again_ends_its_request_though_its_sibling_goes_on(depth: int) -> None:
    run = Run(depth=depth)
    record, other = run.admit(prompt(6), 12, n=2), run.admit(prompt(7), 12)
    execute = run.executor.execute

    def fail_second(plan: StepPlan) -> StepResult:
        result = execute(plan)
        seats = [run.executor.slots[slot] for slot in plan.slots]
        rows = [i for i, seat in enumerate(seats) if seat.choice == 1 and len(seat.ids) > 9]
        result.errors = tuple((index, "bad") for index in rows)
        return result

    run.executor.execute = fail_second  # type: ignore[method-assign]
    run.finish()
    assert record.reason == FinishReason.ERROR and len(record.of_kind(EventKind.PREEMPTED)) == 1
    assert other.reason == FinishReason.LENGTH


@DEPTHS
def test_row_18_scores_of_a_failed_row_are_not_given(depth: int) -> None:
    run = Run(depth=depth, faults=Faults(random.Random(1), row_error=1.0))
    record = run.admit(prompt(6), 1, wants=Want.SCORE | Want.POOL)
    run.finish()
    assert record.reason == FinishReason.ERROR and record.scores == [] and record.pooled == []


@DEPTHS
def test_row_18_a_step_that_gives_no_token_for_a_row_is_made_up_for(depth: int) -> None:
    run = Run(depth=depth, faults=Faults(random.Random(3), zero_tokens=0.3))
    records = [run.admit(prompt(8, seed // 2), 8) for seed in range(4)]
    run.finish()
    assert all(record.reason == FinishReason.LENGTH for record in records)


def test_L06_duplicate_ids_are_refused_and_free_again_after_the_end() -> None:
    run = Run()
    record = run.admit(prompt(4), 3, "same")
    for _ in range(2):
        with pytest.raises(DuplicateRequestError, match="same"):
            run.scheduler.admit(record.request, 0.0)
        run.step()
    run.finish()
    run.admit(prompt(5), 3, "same")
    run.finish()


def test_L05_a_request_of_an_earlier_epoch_goes_on_behind_its_outputs() -> None:
    whole = oracle(prompt(5), 9, 97)
    for num_emitted in (0, 1, 4, 8):
        run = Run()
        record = run.admit(prompt(5), 9, emitted_token_ids=array("i", whole[:num_emitted]))
        run.finish()
        assert record.token_ids == whole and record.finished is not None and record.finished.num_tokens == 9


def test_S21_what_has_outputs_of_an_earlier_epoch_is_not_timed_out_in_the_queue() -> None:
    whole = oracle(prompt(5), 9, 97)
    run = Run()
    run.now = 50.0
    fresh = run.admit(prompt(5), 9, arrival=1.0, queue_timeout=2.0)
    resumed = run.admit(prompt(5), 9, arrival=1.0, queue_timeout=2.0, emitted_token_ids=array("i", whole[:3]))
    late = run.admit(prompt(5), 9, arrival=1.0, deadline=40.0, emitted_token_ids=array("i", whole[:3]))
    run.finish()
    assert [fresh.reason, resumed.reason, late.reason] == [
        FinishReason.TIMEOUT, FinishReason.LENGTH, FinishReason.TIMEOUT,
    ]  # fmt: skip


def test_row_10_whoever_was_put_back_three_times_comes_back_for_good() -> None:
    for policy in ("prefill_first", "deadline"):
        records = serve(policy, "recompute", 2).records.values()
        assert max(len(record.of_kind(EventKind.PREEMPTED)) for record in records) <= 3


def test_row_19_a_limit_on_steps_cuts_what_is_never_cut_otherwise() -> None:
    run = Run(limits(chunked_prefill=False, max_batch_tokens=32, num_blocks=40))
    records = [run.admit(prompt(20, seed), 4) for seed in range(3)]
    run.limit_step(6)
    run.finish()
    assert max(sum(plan.counts) for plan in run.plans) <= 6
    assert all(record.reason == FinishReason.LENGTH for record in records)
    run.limit_step(None)
    run.admit(prompt(30, 9), 2)
    assert list(run.step().counts) == [30]
    run.finish()


@DEPTHS
@pytest.mark.parametrize("policy", ["fcfs", "fifo"])
def test_row_10_a_pool_of_little_more_than_one_request_makes_progress(policy: str, depth: int) -> None:
    run = Run(limits(num_blocks=19, policy=policy, max_batch_tokens=64, headroom=None, max_sequences=16), depth=depth)
    rng = random.Random(7)
    for seed in range(64):
        length = rng.randrange(1, 50)
        run.admit(prompt(length, seed), rng.randrange(1, 64 - length), arrival=float(seed) / 1000)
    run.finish()
    most = max(len(record.of_kind(EventKind.PREEMPTED)) for record in run.records.values())
    assert most <= 3, f"a request was preempted {most} times"


def test_sampling_parameters_are_refused_by_field() -> None:
    for field, value in (("max_tokens", 0), ("max_tokens", -1), ("temperature", -0.1), ("n", 0), ("top_p", -0.1)):
        with pytest.raises(InvalidRequestError) as refusal:
            SamplingParams(**{field: value})
        assert refusal.value.param == field
