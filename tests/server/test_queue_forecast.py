"""QueueForecast: nothing is claimed before the engine answers; then its answer, and what changed since by its model."""

import asyncio
from dataclasses import asdict

import pytest

from octavo.errors import EngineDeadError
from octavo.observe.forecast import WaitModel
from octavo.server import admission
from octavo.server.admission import MAX_AGE_S, DecayedMean, QueuedWork, QueueForecast


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def taught(gap_s: float = 0.02, length: int = 50, prefill_s: float = 0.001) -> QueueForecast:
    """A forecast by the model alone: `gap_s` a step, answers of `length` tokens, `prefill_s` for a prompt's token."""
    forecast = QueueForecast()
    model = WaitModel(gap_s, prefill_s, length)
    forecast.update({"new_request_s": None, "model": asdict(model)}, None)
    return forecast


def test_a_decayed_mean_follows_and_weighs() -> None:
    mean = DecayedMean(half_life=10)
    assert mean.value is None
    mean.add(30, 3)
    assert mean.value == 10
    for _ in range(100):
        mean.add(2, 1)
    assert mean.value == pytest.approx(2, rel=0.02)


def test_nothing_is_claimed_before_anything_is_known() -> None:
    forecast = QueueForecast()
    assert forecast.wait_s(QueuedWork(5, 500, 0), 4) is None and forecast.answer_s(4) is None
    assert forecast.prefill_s(10) is None and forecast.output_tokens(7) == 0
    forecast.update({"new_request_s": None, "model": None}, (QueuedWork(), 4))
    assert forecast.wait_s(QueuedWork(5, 500, 0), 4) is None


def test_a_steady_queue_is_predicted() -> None:
    """8 sequences run at 20 ms a token, 50 tokens each: one ends every 125 ms."""
    forecast = taught(prefill_s=0.0)
    assert forecast.answer_s(8) == pytest.approx(50 * 0.02)
    ahead = QueuedWork()
    for _ in range(16):
        ahead.add(QueuedWork(1, 100, forecast.output_tokens(None)))
    assert forecast.wait_s(ahead, 8) == pytest.approx(17 * 50 * 0.02 / 8)


def test_the_engines_answer_counts_and_the_model_adds_what_came_since() -> None:
    forecast, clock = taught(), Clock()
    forecast._now = clock
    forecast.update({"new_request_s": 7.0}, (QueuedWork(4, 400, 200), 8))
    assert forecast.wait_s(QueuedWork(4, 400, 200), 8) == 7.0
    more_s = forecast.wait_s(QueuedWork(5, 500, 250), 8)
    assert more_s == pytest.approx(7.0 + 100 * 0.001 + 50 / 8 * 0.02 + 50 * 0.001)
    assert forecast.wait_s(QueuedWork(), 8) < 7.0
    clock.now = MAX_AGE_S + 1
    assert forecast.wait_s(QueuedWork(4, 400, 200), 8) == pytest.approx(forecast._model_s(QueuedWork(4, 400, 200), 8))


def test_a_model_that_is_known_later_does_not_count_twice() -> None:
    forecast = QueueForecast()
    forecast.update({"new_request_s": 7.0, "model": None}, (QueuedWork(4, 400, 200), 8))
    forecast._set_model({"model": asdict(WaitModel(0.02, 0.001, 50))})
    assert forecast.wait_s(QueuedWork(4, 400, 200), 8) == 7.0


def test_an_engine_that_has_not_seen_the_last_requests_is_not_believed() -> None:
    forecast = taught(prefill_s=0.0)
    forecast.update({"new_request_s": 0.0}, (QueuedWork(), 4))
    assert forecast.wait_s(QueuedWork(), 4) == pytest.approx(50 * 0.02 / 4), "by the model"
    forecast.update({"new_request_s": 3.0}, None)
    assert forecast.wait_s(QueuedWork(), 4) == pytest.approx(50 * 0.02 / 4)


async def test_the_engine_is_asked_when_its_answer_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MIN_AGE_S", 1.0)
    questions: list[str] = []
    queue: admission.Queue = None
    model = asdict(WaitModel(0.02, 0.0, 50))

    async def ask(argument: str) -> object:
        questions.append(argument)
        if len(questions) == 3:
            raise EngineDeadError("gone")
        return {"new_request_s": None if argument else 9.0, "model": model}

    forecast, clock = QueueForecast(ask), Clock()
    forecast._now = clock

    async def refresh() -> float | None:
        forecast.refresh(lambda: queue)
        forecast.refresh(lambda: queue)
        await asyncio.sleep(0.01)
        return forecast.wait_s(QueuedWork(), 4)

    assert await refresh() == pytest.approx(0.25) and questions == ["model"], "nobody waits: the model is enough"
    queue = (QueuedWork(), 4)
    clock.now = 0.5
    assert await refresh() == pytest.approx(0.25) and len(questions) == 1, "the answer is fresh"
    clock.now = 1.5
    assert await refresh() == 9.0 and questions == ["model", ""]
    clock.now = 3.0
    assert await refresh() == pytest.approx(0.25) and len(questions) == 3, "a dead engine's answer is dropped"


def test_short_answers_asked_for_count_as_short() -> None:
    assert taught().output_tokens(5) == 5 and taught().output_tokens(500) == pytest.approx(50)
