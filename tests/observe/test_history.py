"""Histories of requests, what is explained of them while they are open and for a while after, and the forecast."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

import pytest

from octavo.config import StatisticsConfig
from octavo.core.limits import Limits
from octavo.core.plan import Events, StepFailure, StepPlan, StepResult, StepTimings
from octavo.core.request import FinishReason, Request, SamplingParams, Want
from octavo.core.scheduler import Scheduler
from octavo.engine.observation import guarded
from octavo.errors import EngineError
from octavo.observe.explainer import Explainer, unknown
from octavo.observe.forecast import (
    LEAST_AGE_S,
    NEW_REQUEST,
    Forecast,
    StepTimeModel,
    WaitModel,
    forecast,
)
from octavo.observe.history import NUM_FIRST, NUM_LAST, PHASES, History, StepRecord, guarded_reader
from octavo.simulator.arrival import Arrival
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from tests.core.harness import limits
from tests.engine.fakes import GatedExecutor, Harness, make_limits, make_request
from tests.engine.manual_clock import ManualClock
from tests.simulator.fakes import ConstantCosts


class Bench:
    """A scheduler on a clock of its own: a step takes `base_s` and `token_s` for each of its tokens.

    An answer ends when its length, which nobody is told, is reached.
    """

    def __init__(self, sizes: Limits, *, base_s: float = 0.01, token_s: float = 0.0001, **kept: Any) -> None:
        self.now = 0.0
        self.base_s, self.token_s = base_s, token_s
        self.scheduler = Scheduler(sizes)
        self.history = History(self.scheduler, now=lambda: self.now, **kept)
        self.explainer = Explainer(self.history, lambda: self.now)
        self.lengths: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.first_at: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def admit(self, name: str, length: int, answer: int, most: int = 0, **fields: Any) -> Request:
        ends = fields.pop("ignore_eos", False)
        params = SamplingParams(max_tokens=most or answer, temperature=0.0, ignore_eos=ends)
        request = Request(name, None, params, self.now, num_prompt_tokens=length, **fields)
        self.scheduler.admit(request, self.now)
        self.history.admitted(request)
        self.lengths[name] = answer
        self.outputs.pop(name, None)
        return request

    def step(self, fails: bool = False) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        self.history.decided(plan.events)
        if plan.is_empty:
            self.now += self.base_s
            return plan
        self.now += self.base_s + self.token_s * plan.num_query_tokens
        outcome = StepFailure("injected") if fails else StepResult(None, timings=StepTimings())
        events = self.scheduler.commit(plan, outcome, self.now)
        self.history.decided(events.decisions)
        self.history.stepped(plan, outcome, events)
        self._count(events)
        return plan

    def _count(self, events: Events) -> None:
        for name in events.request_ids:
            self.first_at.setdefault(name, events.time)
            self.outputs[name] = self.outputs.get(name, 0) + 1
            if self.outputs[name] == self.lengths[name]:
                self.scheduler.end_choice(name, 0, self.now, FinishReason.STOP)
        self.history.decided(self.scheduler.take_events())
        for name in [name for name in self.outputs if name not in self.ended]:
            if name not in self.scheduler._state.requests:
                self.ended[name] = self.now

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def told(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.explainer.answer(name)
        json.dumps(answer)
        return answer


def num_kept(history: History) -> int:
    return len(history.open) + len(history.ended)


def sums_up(told: dict[str, Any]) -> None:
    seconds = told["seconds"]
    assert sum(seconds[phase] for phase in PHASES) == pytest.approx(seconds["total"])
    assert seconds["total"] == pytest.approx(told["end"]["total_s"] if told["state"] == "finished" else told["age_s"])


def test_S20_T03_a_request_from_the_queue_to_the_end() -> None:
    bench = Bench(limits(max_sequences=1, max_batch_tokens=8))
    bench.admit("a", 6, 4)
    bench.admit("b", 12, 3)
    bench.step()
    waits = bench.told("b")
    assert (waits["state"], waits["position"], waits["reason"]) == ("waiting", 1, "sequence_cap")
    assert waits["text"].startswith("b waits at position 1 of 1: sequence_cap: needs 1 of 1 sequences, 0 left; ")
    assert [event["event"] for event in waits["events"]] == ["deferred"]
    assert waits["seconds"]["queue"] == pytest.approx(waits["age_s"])
    bench.run()
    told = bench.told("b")
    assert (told["state"], told["end"]["finish_reason"], told["num_outputs"]) == ("finished", "length", 3)
    assert [event["event"] for event in told["events"]] == ["deferred", "admitted", "chunked", "finished"]
    assert told["events"][1]["time_s"] == pytest.approx(told["seconds"]["queue"])
    assert told["first_token_s"] == pytest.approx(told["seconds"]["queue"] + told["seconds"]["prefill"])
    assert told["seconds"]["preempted"] == told["seconds"]["recompute"] == 0.0
    sums_up(told)
    assert told["text"].startswith("b ended (length) after ") and "b " not in told["public_text"][:2]


def test_S20_T03_a_preempted_request_says_by_which_and_what_it_cost() -> None:
    bench = Bench(limits(num_blocks=9))
    bench.admit("a", 8, 25)
    bench.admit("b", 9, 12)
    while not bench.told("b")["num_preemptions"]:
        bench.step()
    waits = bench.told("b")
    assert waits["state"] == "preempted" and waits["num_recomputed_tokens"] > 9
    (told,) = [event for event in waits["events"] if event["event"] == "preempted"]
    assert (told["by"], told["reason"]) == ("a", "kv_blocks")
    bench.run()
    ended = bench.told("b")
    assert [event["event"] for event in ended["events"] if event["event"] != "deferred"] == [
        "admitted", "preempted", "resumed", "finished",
    ]  # fmt: skip
    assert ended["seconds"]["preempted"] > 0 and ended["seconds"]["recompute"] > 0
    assert "preempted once" in ended["text"]
    sums_up(ended)


@pytest.mark.parametrize("seed", range(6))
def test_T03_the_seconds_of_every_request_add_up(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(limits(num_blocks=14, max_sequences=5, preemption="swap", host_blocks=(rng.choice((0, 12)),)))
    for number in range(30):
        bench.admit(f"r{number}", rng.randrange(1, 20), rng.randrange(1, 24), most=30, deadline=rng.choice((None, 0.9)))
        for _ in range(rng.randrange(4)):
            bench.step(fails=rng.random() < 0.05)
        if rng.random() < 0.1:
            bench.scheduler.cancel([f"r{rng.randrange(number + 1)}"], bench.now)
            bench.history.decided(bench.scheduler.take_events())
        for one in range(number + 1):
            sums_up(bench.told(f"r{one}"))
    bench.run()
    for number in range(30):
        told = bench.told(f"r{number}")
        sums_up(told)
        assert told["state"] == "finished"
        if told["first_token_s"] is not None and not told["num_preemptions"]:
            assert told["first_token_s"] == pytest.approx(told["seconds"]["queue"] + told["seconds"]["prefill"])


def test_S20_histories_are_bounded() -> None:
    bench = Bench(limits())
    bench.admit("long", 4, 50)
    history = bench.history.open["long"]
    event = bench.scheduler.plan(0.0).events[0]
    for number in range(200):
        history.keep(type(event)(event.kind, "long", float(number), number))
    told = bench.told("long")
    assert len(told["events"]) == NUM_FIRST + NUM_LAST and told["num_events_left_out"] == 200 - NUM_FIRST - NUM_LAST
    assert [told["events"][0]["step"], told["events"][-1]["step"]] == [0, 199]

    bench = Bench(limits(), max_ended=3, max_age_s=60.0)
    for number in range(5):
        bench.admit(f"r{number}", 4, 2)
        bench.run()
    assert num_kept(bench.history) == 3
    assert bench.told("r1").items() >= unknown("r1").items() and bench.told("r2")["state"] == "finished"
    bench.now += 100.0
    assert bench.told("r4").items() >= unknown("r4").items() and num_kept(bench.history) == 0


def test_S20_an_id_that_is_used_again_has_a_new_history() -> None:
    bench = Bench(limits())
    for answer in (2, 5):
        bench.admit("same", 4, answer)
        assert bench.told("same")["state"] == "waiting"
        bench.run()
        assert bench.told("same")["num_outputs"] == answer
    assert num_kept(bench.history) == 1


def test_S20_what_an_engine_before_did_is_apart() -> None:
    bench = Bench(limits())
    bench.now = 5.0
    request = make_request("a", length=4, max_tokens=6)
    resumed = Request("a", request.prompt_token_ids, request.params, 2.0, emitted_token_ids=request.prompt_token_ids)
    bench.scheduler.admit(resumed, bench.now)
    bench.history.admitted(resumed)
    bench.lengths["a"] = 6
    bench.run()
    told = bench.told("a")
    assert told["seconds"]["earlier"] == pytest.approx(3.0) and told["seconds"]["recompute"] > 0
    sums_up(told)


def test_S20_every_open_request_is_listed_in_order() -> None:
    bench = Bench(limits(max_sequences=1))
    for name in ("a", "b", "c"):
        bench.admit(name, 4, 9, tenant=name.upper())
    for _ in range(5):
        bench.step()
    listed: Any = bench.explainer.answer("")["open"]
    assert [(one["id"], one["tenant"], one["state"], one["position"], one["reason"]) for one in listed] == [
        ("b", "B", "waiting", 1, "sequence_cap"),
        ("c", "C", "waiting", 2, "behind"),
        ("a", "A", "decode", 0, None),
    ]
    assert listed[0]["lacks"] == "needs 1 of 1 sequences, 0 left" and listed[1]["behind"] == "b"
    bench.run()
    idle = {"open": [], "num_waiting": 0, "num_running": 0, "num_ended_kept": 3, "new_request_s": 0.0}
    assert bench.explainer.answer("") == idle


def test_S20_the_verb_answers_over_a_live_loop() -> None:
    clock = ManualClock()
    executor = GatedExecutor()
    with Harness(executor, limits=make_limits(max_sequences=1), clock=clock) as harness:

        def ask(name: str) -> Any:
            return harness.ask(harness.loop.control, "explain", name)

        executor.gate.clear()
        harness.submit(make_request("a", max_tokens=3))
        harness.wait(lambda: executor.reached.is_set())
        executor.gate.set()
        harness.wait(lambda: bool(harness.inbox("a").ends))
        assert ask("a")["state"] == "finished"
        assert ask("nobody").items() >= unknown("nobody").items()
        assert ask("")["open"] == [] and ask("")["num_ended_kept"] == 1


def test_ended_requests_of_one_tenant_never_push_out_anothers() -> None:
    bench = Bench(
        Limits(block_size=4, num_blocks=(64,), max_model_len=64, max_batch_tokens=64, vocab_size=99), max_ended=6
    )
    names = [*(f"bob-{number}" for number in range(3)), *(f"alice-{number}" for number in range(20))]
    for name in names:
        bench.admit(name, 4, 1, tenant=name.partition("-")[0])
        while bench.scheduler.has_work:
            bench.step()
    kept = [name for name in names if bench.explainer.answer(name)["state"] == "finished"]
    assert kept == ["bob-0", "bob-1", "bob-2", "alice-17", "alice-18", "alice-19"] and num_kept(bench.history) == 6


def test_a_look_that_fails_is_told_and_ends_nothing() -> None:
    def fails(argument: str) -> object:
        raise ZeroDivisionError("of course")

    answer = guarded("explain", fails, EngineError)("x")
    assert isinstance(answer, EngineError) and "of course" in str(answer)


def test_a_reader_that_fails_is_switched_off_and_the_others_go_on() -> None:
    bench, steps, failed = Bench(limits()), list[int](), list[int]()

    def fails(record: StepRecord) -> None:
        failed.append(record.step)
        raise ZeroDivisionError("of course")

    bench.history.add_reader(guarded_reader("one", fails))
    bench.history.add_reader(guarded_reader("other", lambda record: steps.append(record.step)))
    bench.admit("a", 4, 5)
    bench.run()
    assert len(failed) == 1 < len(steps)


def test_the_settings_bound_what_is_kept() -> None:
    assert (StatisticsConfig().explain_kept, StatisticsConfig().explain_kept_s) == (1024, 600.0)


# --- the forecast


def played(seed: int, sizes: Limits, rate: float, every: int, is_told: bool) -> list[tuple[Forecast, float]]:
    """(foretold, actual) seconds to the first token of requests that waited, asked for now and then."""
    rng = random.Random(seed)
    bench = Bench(sizes)
    asked: list[tuple[str, Forecast, float]] = []
    number, next_at = 0, 0.0
    while number < 300 or bench.scheduler.has_work:
        while number < 300 and next_at <= bench.now:
            answer = min(200, 1 + int(rng.expovariate(1 / 40)))
            params = {"ignore_eos": True} if is_told else {}
            bench.admit(f"r{number}", rng.randrange(8, 120), answer, most=answer if is_told else 200, **params)
            number += 1
            next_at += rng.expovariate(rate)
        plan = bench.step()
        if number > 60 and plan.step % every == 0:
            state = bench.scheduler._state
            times = forecast(bench.scheduler, bench.history.step_times, bench.history.answer_lengths)
            new = times.pop(NEW_REQUEST, None)
            assert times.keys() <= state.requests.keys()
            assert is_told is False or new is not None, "where all lengths are known, a new request's wait is too"
            asked += [(name, told, bench.now) for name, told in times.items() if name not in bench.first_at]
    return [(told, bench.first_at[name] - now) for name, told, now in asked]


SLOTS = {"max_sequences": 8, "num_blocks": (512,), "block_size": 16, "max_model_len": 512, "max_batch_tokens": 128}
BLOCKS = {"max_sequences": 64, "num_blocks": (96,), "block_size": 16, "max_model_len": 512, "max_batch_tokens": 128}
LOADS = [(SLOTS, 16.0, 7), (BLOCKS, 30.0, 41)]


@pytest.mark.parametrize(("sizes", "rate", "every"), LOADS, ids=["short of slots", "short of blocks"])
def test_the_forecast_is_near_what_happens_where_lengths_are_known(
    sizes: dict[str, Any], rate: float, every: int
) -> None:
    """In the median within 10 %, nine of ten within 25 %."""
    pairs = [pair for seed in range(3) for pair in played(seed, limits(**sizes), rate, every, True) if pair[1] > 0.1]
    assert len(pairs) > 300
    errors = sorted(abs(told.seconds - actual) / actual for told, actual in pairs)
    median, most = errors[len(errors) // 2], errors[len(errors) * 9 // 10]
    print(f"{len(errors)} forecasts: median error {median:.1%}, nine of ten within {most:.1%}")
    assert median < 0.10 and most < 0.25


@pytest.mark.parametrize(("sizes", "rate", "every"), LOADS, ids=["short of slots", "short of blocks"])
def test_the_forecast_is_near_what_happens_where_lengths_are_not_known(
    sizes: dict[str, Any], rate: float, every: int
) -> None:
    """On the whole within 20 % of the sum; what happens lies within the band seven of ten times."""
    pairs = [pair for seed in range(3) for pair in played(seed, limits(**sizes), rate, every, False)]
    assert len(pairs) > 300
    within = sum(told.least <= actual <= told.most for told, actual in pairs) / len(pairs)
    ratio = sum(told.seconds for told, _ in pairs) / sum(actual for _, actual in pairs)
    errors = sorted(abs(told.seconds - actual) / actual for told, actual in pairs if actual > 0.5)
    print(f"{len(pairs)} forecasts: {within:.1%} within the band, {ratio:.2f} of the seconds; of waits over 0.5 s the "
          f"median error is {errors[len(errors) // 2]:.1%}")  # fmt: skip
    assert within > 0.65 and 0.8 < ratio < 1.25


def test_there_is_no_forecast_where_nothing_is_known() -> None:
    bench = Bench(limits(max_sequences=1))
    bench.admit("a", 4, 40)
    bench.admit("b", 4, 5)
    assert bench.told("b")["prediction"] == {
        "next_token_s": None, "least_s": None, "most_s": None, "why_not": "too few steps were made yet",
    }  # fmt: skip
    for _ in range(6):
        bench.step()
    why = "it has to wait for answers to end, and how long they get is not known yet"
    assert bench.told("b")["prediction"]["why_not"] == why
    assert bench.told("b")["public_text"].endswith(f"no prediction: {why}")
    assert bench.told("a")["prediction"] is None
    bench.scheduler.pause()
    assert bench.told("b")["prediction"]["why_not"] == "the engine is paused"
    bench.scheduler.resume()
    bench.run()


def test_many_questions_get_one_forecast_and_its_age_is_taken_off() -> None:
    bench = Bench(limits(max_sequences=1), base_s=0.01)
    for name in ("a", "b", "c"):
        bench.admit(name, 4, 20, ignore_eos=True)
    for _ in range(5):
        bench.step()
    first = bench.told("c")["prediction"]["next_token_s"]
    made = bench.explainer.forecaster._found
    bench.now += LEAST_AGE_S / 2
    assert bench.told("c")["prediction"]["next_token_s"] == pytest.approx(first - LEAST_AGE_S / 2)
    assert bench.explainer.forecaster._found is made
    bench.admit("d", 4, 2)
    assert "d" not in made and bench.told("d")["prediction"]["next_token_s"] is None
    bench.now += LEAST_AGE_S
    assert bench.told("d")["prediction"]["next_token_s"] > first
    bench.run()


def test_a_new_request_is_told_the_wait_that_it_then_has() -> None:
    bench = Bench(limits(max_sequences=2), base_s=0.01)
    for name in ("a", "b", "c", "d", "e"):
        bench.admit(name, 4, 20, ignore_eos=True)
    for _ in range(5):
        bench.step()
    waits = [bench.told(name)["prediction"]["next_token_s"] for name in ("c", "d", "e")]
    told, listed = bench.told("c")["new_request_s"], bench.explainer.answer("")["new_request_s"]
    assert told == listed, "one figure, whoever asks"
    step_s = 0.01 + 6 * 0.0001
    assert max(waits) <= told + step_s, "it is let in behind all that wait; they are told their first token"
    now = bench.now
    bench.admit("new", 4, 2)
    bench.now += LEAST_AGE_S  # for a forecast that knows of it
    assert bench.told("new")["prediction"]["next_token_s"] == pytest.approx(told, abs=0.15)
    bench.now = now
    bench.run()
    assert bench.first_at["new"] - now == pytest.approx(told, rel=0.1)


def test_an_engine_with_room_lets_a_new_request_in_at_once() -> None:
    bench = Bench(limits(max_sequences=2), base_s=0.01)
    bench.admit("a", 4, 20, ignore_eos=True)
    for _ in range(5):
        bench.step()
    assert bench.told("a")["new_request_s"] == 0.0
    bench.run()


def test_the_step_time_is_that_of_the_steps() -> None:
    bench = Bench(limits(max_batch_tokens=16, max_sequences=4), base_s=0.02, token_s=0.003)
    assert StepTimeModel().fit() is None
    for number in range(6):
        bench.admit(f"r{number}", 13, 9)
    bench.run()
    assert bench.history.step_times.fit() == pytest.approx((0.02, 0.003))
    assert list(bench.history.answer_lengths) == [9] * 6
    bench.admit("vector", 13, 0, most=1, wants=Want.POOL)
    bench.run()
    assert list(bench.history.answer_lengths) == [9] * 6, "a vector says nothing of how long answers are"


def test_the_wait_model_gives_the_wait_that_a_request_then_has() -> None:
    """Eight slots, answers of 10 to 30 tokens, 16 requests that wait: on the whole within 10 % of the waits."""
    bench, rng = Bench(limits(**SLOTS)), random.Random(0)
    assert bench.explainer.forecaster.wait_model() is None
    pairs, number = [], 0
    while number < 400:
        while len(bench.scheduler._state.waiting) < 17:
            model = bench.explainer.forecaster.wait_model()
            if model is not None and number > 40:
                pairs.append((f"r{number}", model.expected_wait_s(16 * 16, 16 * 20, num_running=8), bench.now))
            bench.admit(f"r{number}", 16, rng.randrange(10, 31), most=64)
            number += 1
        bench.step()
    bench.run()
    assert model is not None and model.answer_tokens == pytest.approx(20, rel=0.1)
    assert (model.step_s, model.token_s) == pytest.approx((0.01, 0.0001))
    assert sum(told for _, told, _ in pairs) == pytest.approx(
        sum(bench.first_at[name] - now for name, _, now in pairs), rel=0.1
    )
    assert model.expected_wait_s(0, 0, 8) < pairs[-1][1] < model.expected_wait_s(512, 320, 8)
    assert WaitModel(**json.loads(json.dumps(asdict(model)))) == model


def test_S20_a_simulation_tells_of_its_requests_as_a_live_engine_does() -> None:
    kept: list[History] = []

    def make_sink(scheduler: Scheduler) -> History:
        kept.append(History(scheduler, now=lambda: 0.0))
        return kept[-1]

    rng = random.Random(2)
    arrivals = [Arrival(0.01 * number, rng.randrange(4, 30), rng.randrange(1, 20)) for number in range(40)]
    run = simulate(arrivals, Setup(limits(num_blocks=24), ConstantCosts(), make_sink=make_sink))
    (history,) = kept
    explainer = Explainer(history, lambda: 0.0)
    outcomes = run.outcomes
    assert num_kept(history) == len(outcomes) == 40 and sum(outcomes.preemptions) > 0
    by_arrival = {request.arrival: explainer.answer(request.request_id) for request in list(history.ended.values())}
    for place in range(len(outcomes)):
        told: Any = by_arrival[outcomes.arrivals[place]]
        assert told["first_token_s"] == pytest.approx(outcomes.first_tokens[place] - outcomes.arrivals[place])
        assert told["end"]["total_s"] == pytest.approx(outcomes.ends[place] - outcomes.arrivals[place])
        assert told["num_preemptions"] == outcomes.preemptions[place]
        sums_up(told)
