"""OpenRequests over engines of this thread: crash counts, holds, cancels and refusals between two engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.engine.fakes import GatedExecutor, expected, make_limits, make_request, open_fake
from tests.frontend.ledgers import is_holding
from tests.reliability.lives import Lives, Opened

from octavo.core.request import FinishReason
from octavo.errors import AdmissionError, ErrorKind


def open_engine() -> Opened:
    limits = make_limits()
    executor = GatedExecutor()
    open_fake(executor, limits)
    return executor, limits


def crash(lives: Lives, *batch: str) -> None:
    """The engine dies with these in its batch."""
    lives.life.is_alive = False
    lives.requests.lose_engine(batch)
    lives.epoch += 1
    lives.life = type(lives.life)(lives.epoch, open_engine(), lives.requests.accept, 1)
    lives.requests.begin_epoch(lives.life)


async def submit(lives: Lives, *names: str, **options: Any) -> None:
    tasks = [asyncio.create_task(lives.submit(make_request(name, **options))) for name in names]
    await asyncio.sleep(0)
    while not all(task.done() for task in tasks):
        lives.life.turn()
        await asyncio.sleep(0)


def ids(lives: Lives, name: str) -> list[int]:
    entry = lives.requests.get(name)
    assert entry is not None
    return list(entry.pages[0].ids)


async def test_a_token_between_two_crashes_clears() -> None:
    lives = Lives(open_engine)
    await submit(lives, "a", max_tokens=40)
    for _ in range(5):
        crash(lives, "a")
        await asyncio.sleep(0)
        assert not is_holding(lives.requests)
        before = len(ids(lives, "a"))
        while len(ids(lives, "a")) == before:
            lives.life.turn()
    await lives.run()
    assert ids(lives, "a") == expected(make_request("a", max_tokens=40)) and lives.requests.num_failed_suspects == 0


async def test_two_crashes_without_a_token_put_it_on_trial_a_third_ends_it() -> None:
    lives = Lives(open_engine)
    await submit(lives, "a", "b", max_tokens=40)
    for _ in range(3):  # at the first it has a token
        assert not is_holding(lives.requests)
        crash(lives, "a")
    assert is_holding(lives.requests) and len(lives.life.loop._inbox) == 1
    lives.life.turn()
    assert not is_holding(lives.requests), "and has a token: the others follow"
    for _ in range(3):
        crash(lives, "b")
    entry = lives.requests.get("b")
    assert entry is not None and entry.end is not None and entry.end.finish_reason is FinishReason.ERROR
    assert entry.end.error is not None and entry.end.error.kind is ErrorKind.STEP_FAILED
    await lives.run()
    assert ids(lives, "a") == expected(make_request("a", max_tokens=40))


async def test_an_id_used_again_has_no_record() -> None:
    lives = Lives(open_engine)
    await submit(lives, "a", max_tokens=20)
    for _ in range(3):
        crash(lives, "a")
    assert is_holding(lives.requests)
    lives.requests.cancel(["a"], FinishReason.CANCELLED)
    await lives.run()
    lives.requests.forget("a")
    await submit(lives, "a", max_tokens=20)
    crash(lives, "a")
    assert not is_holding(lives.requests)


async def test_whoever_is_held_can_be_cancelled_and_times_out() -> None:
    lives = Lives(open_engine)
    await submit(lives, "a", max_tokens=20)
    for _ in range(3):
        crash(lives, "a")
    late = make_request("late", max_tokens=9, deadline=5.0)
    tasks = [asyncio.create_task(lives.submit(each)) for each in (late, make_request("b"), make_request("c"))]
    await asyncio.sleep(0)
    assert is_holding(lives.requests)
    lives.requests.expire(6.0)
    lives.requests.cancel(["b"], FinishReason.CANCELLED)
    assert (await tasks[0]).request_id == "late" and (await tasks[1]).request_id == "b"
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await lives.run()
    assert ids(lives, "a") == expected(make_request("a", max_tokens=20))
    ends = {name: lives.requests.get(name) for name in ("late", "b", "c")}
    assert ends["late"].end.finish_reason is FinishReason.TIMEOUT  # type: ignore[union-attr]
    assert ends["b"].end.finish_reason is FinishReason.CANCELLED and ends["c"] is None  # type: ignore[union-attr]


async def test_a_resume_that_is_refused_ends_that_request_alone() -> None:
    lives = Lives(open_engine)
    await submit(lives, "a", "b", max_tokens=30)
    for _ in range(3):
        lives.life.turn()
    real, send = lives.life.send, []

    def refuse(request: Any, media: Any = ()) -> Any:
        if request.request_id != "a":
            return real(request)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(AdmissionError("it does not fit any more", "max_tokens"))
        send.append(request)
        return answer

    lives.life.is_alive = False
    lives.requests.lose_engine(())
    lives.epoch += 1
    lives.life = type(lives.life)(lives.epoch, open_engine(), lives.requests.accept, 1)
    real = lives.life.send
    lives.life.send = refuse  # type: ignore[method-assign]
    lives.requests.begin_epoch(lives.life)
    await lives.run()
    entry = lives.requests.get("a")
    assert send and entry is not None and entry.end is not None
    assert entry.end.finish_reason is FinishReason.ERROR and entry.end.error.kind is ErrorKind.ADMISSION
    assert ids(lives, "b") == expected(make_request("b", max_tokens=30))


async def test_a_refusal_of_a_new_request_goes_to_its_submitter() -> None:
    lives = Lives(open_engine)
    task = asyncio.create_task(lives.submit(make_request("long", length=400)))
    await asyncio.sleep(0)
    lives.life.turn()
    with pytest.raises(AdmissionError):
        await task
    assert not len(lives.requests)
