"""Row 14: whatever is sent, on whatever route: no answer is a fault of ours, every refusal is explained, we live on."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.reliability.nasty_requests import Nasty, nasty_request
from tests.reliability.scorecard import Score
from tests.server.fakes import Harness

AT_ONCE = 8
# Refusals of the whole body or request, which no one field is at fault for.
NAMELESS = {"invalid_json", "body_too_complex", "missing_idempotency_key", "invalid_event_id", "batches_off"}


def faults_of(response: httpx.Response) -> list[str]:
    """What is wrong with an answer, whatever was asked."""
    status, text = response.status_code, response.text
    if status < 400:  # a stream that has begun tells of its errors inside
        return [
            f"in a stream: {text[-200:]}" for code in ("internal_error", "engine_error") if f'"code":"{code}"' in text
        ]
    if status >= 500:
        return [f"status {status}: {text[:200]}"]
    if response.request.method == "HEAD":
        return []
    try:
        error = json.loads(text)["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):
        return [f"no error object: {text[:200]}"]
    faults = _faults_of_style(response.request.url.path, status, error)
    faults += [] if message else ["no message"]
    faults += ["422 is never given"] if status == 422 else []
    faults += ["the inside is told"] if "Traceback" in text or "site-packages" in text else []
    faults += ["the message is too long"] if len(message) > 2000 else []
    return faults


def _faults_of_style(path: str, status: int, error: Any) -> list[str]:
    """What is wrong with the form of an error: each interface has its own."""
    if path.startswith("/api/"):
        return [] if isinstance(error, str) else ["no text"]
    if path.startswith("/v1/messages"):
        return [] if set(error) == {"type", "message"} else [f"keys {sorted(error)}"]
    if set(error) != {"message", "type", "param", "code"} or not isinstance(error["code"], str):
        return [f"keys {sorted(error)}, or no code"]
    if status == 400 and error["param"] is None and error["code"] not in NAMELESS:
        return [f"400 names no field: {error}"]
    return []


async def ask(client: httpx.AsyncClient, nasty: Nasty) -> httpx.Response:
    async with asyncio.timeout(30):
        headers = {name: value.encode("latin-1") for name, value in nasty.headers.items()}
        return await client.request(nasty.method, nasty.path, content=nasty.body, headers=headers)


@pytest.mark.timeout(1200)
async def test_row_14_no_answer_is_a_fault_of_ours(score: Score) -> None:
    """The mutator and the corpus, against the whole application over a scripted engine."""
    count = score.dose(1000, 20_000)
    harness = Harness()
    rng = random.Random(14)
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    transport = httpx.ASGITransport(harness.app, raise_app_exceptions=True)

    async def work(client: httpx.AsyncClient, requests: list[Nasty]) -> None:
        for nasty in requests:
            try:
                response = await ask(client, nasty)
            except httpx.InvalidURL:
                continue
            except Exception as error:
                wrong.append(f"{nasty.shown}: raised {error!r}")
                continue
            statuses[response.status_code] += 1
            wrong.extend(f"{nasty.shown}: {fault}" for fault in faults_of(response))

    requests = [nasty_request(rng) for _ in range(count)]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await asyncio.gather(*(work(client, requests[i::AT_ONCE]) for i in range(AT_ONCE)))
        assert (await client.get("/livez")).status_code == 200
    await harness.context.sandbox.close()
    score.tell("requests", sum(statuses.values()))
    score.tell("statuses", " ".join(f"{status}: {number}" for status, number in sorted(statuses.items())))
    print("\n".join(wrong[:20]))
    score.count("5xx", sum(number for status, number in statuses.items() if status >= 500))
    score.count("refusals that name no field, and other wrong answers", len(wrong))
    assert statuses[200] > count // 50 and statuses[400] > count // 4, "the mutator asks for both"
    assert harness.context.lifecycle.num_open == 0
