"""Admission as clients meet it: 429 with its numbers and headers, priorities, keys' limits, metrics by key's name."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo.config import AdmissionConfig, Config, SchedulingConfig, ServingConfig
from octavo.core.request import FinishError, FinishReason
from octavo.errors import ErrorKind
from octavo.server.admission import AdmissionRequest
from tests.server.fakes import Harness, events

KEYS = """
keys:
  - {name: alice, key: sk-alice-1, requests_per_minute: 3, tokens_per_minute: 100, priority: 2, max_priority: -1}
  - {name: bob, key: sk-bob-11, max_concurrent: 1, metrics: true}
  - {name: carol, key: sk-carol-1, tenant: bob}
"""
ALICE, BOB, CAROL = ({"authorization": f"Bearer sk-{name}"} for name in ("alice-1", "bob-11", "carol-1"))


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return Harness(config=Config(serving=ServingConfig(api_key_file=str(path))))


def small(bound: int = 2, slots: int = 1, **admission: Any) -> Harness:
    scheduling = SchedulingConfig(max_sequences=slots)
    return Harness(config=Config(admission=AdmissionConfig(max_waiting=bound, **admission), scheduling=scheduling))


async def opened(harness: Harness, count: int, **fields: Any) -> list[asyncio.Task[Any]]:
    """Requests that wait in a held engine."""
    harness.engine.is_held = True
    before = len(harness.engine.requests)
    tasks = [asyncio.create_task(harness.complete(**fields)) for _ in range(count)]
    async with asyncio.timeout(60):
        while len(harness.engine.requests) < before + count:
            await asyncio.sleep(0.001)
    return tasks


async def answered(harness: Harness, tasks: list[asyncio.Task[Any]]) -> list[int]:
    for request in harness.engine.requests[-len(tasks) :]:
        harness.engine.answer(request)
    return [(await task).status_code for task in tasks]


async def test_a_full_queue_says_how_many_wait_and_when_to_come_again() -> None:
    harness = small()
    tasks = await opened(harness, 3)
    response = await harness.complete()
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
    assert "2 sequences wait, 2 may" in error["message"] and int(response.headers["retry-after"]) >= 1
    assert "x-should-retry" not in response.headers
    assert await answered(harness, tasks) == [200, 200, 200]
    harness.engine.is_held = False
    assert (await harness.complete()).status_code == 200
    assert harness.context.queue.num_pending == harness.context.queue.num_running == 0


async def test_every_end_gives_its_seat_back() -> None:
    harness = small(bound=100)
    bad = (FinishReason.ERROR, FinishError(ErrorKind.ENGINE, "bad"))
    late = (FinishReason.TIMEOUT, FinishError(ErrorKind.DEADLINE, "deadline"))
    for end in (None, bad, late):
        harness.engine.end = end
        for stream in (False, True):
            await harness.complete(prompt=["a", "b"], n=2, stream=stream)
    harness.engine.end, harness.engine.submit_error = None, RuntimeError("no")
    await harness.complete()
    harness.engine.submit_error = None
    await harness.complete(prompt=[9999])
    room = harness.context.queue
    assert (room.num_pending, room.num_running, room.num_tokens_held, len(harness.context.request_index)) == (
        0,
        0,
        0,
        0,
    )


async def test_what_is_measured_predicts_and_refuses_what_cannot_be_met() -> None:
    harness = small(bound=50)
    for _ in range(3):
        assert (await harness.complete(max_tokens=8)).status_code == 200
    harness.engine.forecast = {"new_request_s": 40.0, "model": None}
    tasks = await opened(harness, 5)
    async with asyncio.timeout(60):
        while harness.context.admission.wait_s() is None:  # asked for in the background
            await asyncio.sleep(0.01)
    response = await harness.complete(queue_timeout=0.5)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (429, "wait_too_long")
    assert "may wait 0.5 s: 4 sequences wait, 50 may" in error["message"] and int(response.headers["retry-after"]) > 1
    assert (await harness.complete(timeout=0.5)).json()["error"]["code"] == "wait_too_long"
    assert await answered(harness, tasks) == [200] * 5


async def test_the_queue_timeout_reaches_the_engine_bounded_by_the_servers() -> None:
    harness = small(max_queue_time_s=3.0)
    for given, expected in ((None, 3.0), (1.5, 1.5), (10.0, 3.0)):
        await harness.complete(queue_timeout=given)
        assert harness.engine.requests[-1].queue_timeout == expected
    await Harness().complete()
    late = FinishError(ErrorKind.QUEUE_TIMEOUT, "queue_timeout of 3.0 s passed before the request could start")
    harness.engine.end = (FinishReason.TIMEOUT, late)
    response = await harness.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (408, "queue_timeout")
    *_, error, _ = events((await harness.complete(stream=True)).text)
    assert error["error"]["code"] == "queue_timeout"


async def test_priorities_come_from_the_body_or_the_key_and_are_bounded_by_it(harness: Harness) -> None:
    assert (await harness.complete(headers=ALICE)).status_code == 200
    assert harness.engine.requests[-1].priority == 2
    assert (await harness.complete(headers=ALICE, priority=-1)).status_code == 200
    assert harness.engine.requests[-1].priority == -1
    response = await harness.complete(headers=ALICE, priority=-2)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (403, "priority_not_allowed", "priority")
    assert "alice" in error["message"] and response.headers["x-should-retry"] == "false"
    assert (await harness.complete(headers=BOB, priority=-999)).status_code == 200
    assert (harness.engine.requests[-1].priority, harness.engine.requests[-1].tenant) == (-999, "bob")


async def test_a_keys_limits_are_told_and_kept(harness: Harness) -> None:
    response = await harness.complete(headers=ALICE, prompt="x" * 20, max_tokens=5)
    assert response.headers["x-ratelimit-limit-requests"] == "3"
    assert response.headers["x-ratelimit-remaining-requests"] == "2"
    assert response.headers["x-ratelimit-limit-tokens"] == "100"
    assert response.headers["x-ratelimit-remaining-tokens"] in ("75", "80"), "outputs are charged as they come"
    response = await harness.complete(headers=ALICE, prompt="x" * 90)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert "'alice'" in error["message"] and "100 tokens a minute" in error["message"]
    assert 1 <= int(response.headers["retry-after"]) <= 10 and "sk-" not in response.text
    await harness.complete(headers=ALICE, max_tokens=1)
    response = await harness.complete(headers=ALICE)
    assert "3 requests a minute" in response.json()["error"]["message"]
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(response.headers["retry-after"]) <= 20
    assert "x-ratelimit-limit-requests" not in (await harness.complete(headers=CAROL)).headers


async def test_a_key_has_so_many_requests_at_once(harness: Harness) -> None:
    tasks = await opened(harness, 1, headers=BOB)
    response = await harness.complete(headers=BOB)
    assert response.json()["error"]["code"] == "rate_limit_exceeded" and response.headers["retry-after"]
    others = await opened(harness, 1, headers=CAROL)
    assert await answered(harness, [*tasks, *others]) == [200, 200]
    harness.engine.is_held = False
    assert (await harness.complete(headers=BOB)).status_code == 200


async def test_a_retry_of_what_runs_needs_no_room(harness: Harness) -> None:
    tasks = await opened(harness, 1, headers={**BOB, "Idempotency-Key": "once"})
    again = asyncio.create_task(harness.complete(headers={**BOB, "Idempotency-Key": "once"}))
    await asyncio.sleep(0.05)
    assert not again.done(), "it reads the one that runs, though this key may have only one"
    other = await harness.complete(headers={**BOB, "Idempotency-Key": "twice"})
    assert other.json()["error"]["code"] == "rate_limit_exceeded"
    assert await answered(harness, tasks) == [200] and (await again).status_code == 200
    await harness.context.runs.close()


async def test_tenants_do_not_meet_in_their_ids(harness: Harness) -> None:
    harness.engine.is_held = True
    both = [
        asyncio.create_task(harness.complete(headers={**who, "X-Request-Id": "job-1"})) for who in (ALICE, BOB, CAROL)
    ]
    async with asyncio.timeout(60):
        while len(harness.engine.requests) < 3:
            await asyncio.sleep(0.001)
    find = harness.context.request_index.find
    assert len(find("job-1", "alice")) == 1 and len(find("job-1", "bob")) == 2 and len(find("job-1")) == 3
    stolen = find("job-1", "alice")[0]
    assert find(stolen, "bob") == [] and find(stolen) == [stolen]
    stranger = await harness.get(f"/v1/requests/{stolen}/explain", headers=BOB)
    assert (stranger.status_code, stranger.json()["error"]["code"]) == (404, "request_not_found")
    own = (await harness.get("/v1/requests/job-1/explain", headers=ALICE)).json()
    assert own["id"] == "job-1" and [one["text"] for one in own["explanations"]] == ["waits at position 2 of 2: behind"]
    assert "~" not in str(own) and "nobody" not in str(own), "without the others' names"
    both_of_bobs = (await harness.get("/v1/requests/job-1/explain", headers=CAROL)).json()["explanations"]
    assert len(both_of_bobs) == 2 and "~" not in str(both_of_bobs)
    assert (await harness.request("POST", "/v1/requests/none/cancel", headers=ALICE)).status_code == 404
    assert not harness.engine.cancelled
    for request in harness.engine.requests:
        harness.engine.answer(request)
    assert {(await task).json()["id"] for task in both} == {"job-1"}


async def test_a_client_cancels_its_own(harness: Harness) -> None:
    tasks = await opened(harness, 1, headers={**ALICE, "X-Request-Id": "job-2"})
    assert (await harness.request("POST", "/v1/requests/job-2/cancel", headers=BOB)).status_code == 404
    response = await harness.request("POST", "/v1/requests/job-2/cancel", headers=ALICE)
    assert response.json() == {"id": "job-2", "cancelled": True}
    answer = await tasks[0]
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")


async def test_metrics_name_keys_and_never_show_them(harness: Harness) -> None:
    await harness.complete(headers=ALICE)
    await harness.complete(headers=BOB, prompt="secret words")
    ticket = harness.context.admission.admit(AdmissionRequest(num_prompts=256 + 512))
    text = (await harness.get("/metrics", headers=BOB)).text
    assert 'octavo_key_requests_total{key="alice",model_name="tiny"} 1.0' in text
    assert 'octavo_key_tokens_total{key="bob",model_name="tiny"} 22.0' in text
    assert 'octavo_load_level{model_name="tiny"} 1.0' in text
    assert 'octavo_queue_sequences{model_name="tiny"} 512.0' in text
    assert "octavo_queue_sequences_max" in text and "sk-" not in text and "secret" not in text
    ticket.leave()


async def test_the_log_of_a_failure_names_the_key_and_does_not_show_it(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.engine.submit_error = ZeroDivisionError("inside")
    response = await harness.complete(headers=ALICE)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "of key 'alice' failed" in caplog.text and "sk-" not in caplog.text


async def test_a_reload_takes_effect_at_once(harness: Harness) -> None:
    path = Path(harness.config.serving.api_key_file or "")
    path.write_text(KEYS.replace("sk-bob-11", "sk-bob-22").replace("requests_per_minute: 3", "requests_per_minute: 9"))
    assert (await harness.complete(headers=ALICE)).headers["x-ratelimit-limit-requests"] == "3"
    assert harness.context.keys.reload() == "3 keys: 1 added, 1 removed, 1 changed"
    assert (await harness.complete(headers=BOB)).status_code == 401
    response = await harness.complete(headers=ALICE)
    assert (response.headers["x-ratelimit-limit-requests"], response.headers["x-ratelimit-remaining-requests"]) == (
        "9",
        "7",
    ), "what was used stays used"
