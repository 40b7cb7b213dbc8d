"""GET /v1/requests/{id}/explain: a client's own requests, while open and for a while after, and nobody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import Config, ServingConfig, StatisticsConfig
from octavo.observe.explainer import unknown
from octavo.server.api.requests import MAX_EXPLANATIONS, explain_any
from octavo.server.http.lifecycle import RequestIndex
from tests.server.fakes import Harness, ended
from tests.server.test_admission_http import ALICE, BOB, CAROL, answered, opened, small

KEYS = """
keys:
  - {name: alice, key: sk-alice-1}
  - {name: bob, key: sk-bob-11}
  - {name: carol, key: sk-carol-1, tenant: bob}
"""


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return Harness(config=Config(serving=ServingConfig(api_key_file=str(path))))


async def told(harness: Harness, name: str, **fields: Any) -> dict[str, Any]:
    response = await harness.get(f"/v1/requests/{name}/explain", **fields)
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    body: dict[str, Any] = response.json()
    return body


async def test_I04_an_ended_request_is_explained_for_a_while_and_only_to_its_own_tenant(harness: Harness) -> None:
    await harness.complete(headers={**BOB, "X-Request-Id": "job-1"})
    for who in (BOB, CAROL):
        assert [one["state"] for one in (await told(harness, "job-1", headers=who))["explanations"]] == ["finished"]
    stranger = await harness.get("/v1/requests/job-1/explain", headers=ALICE)
    error = stranger.json()["error"]
    assert (stranger.status_code, error["code"]) == (404, "request_not_found")
    assert "the last 1024, for 600 s" in error["message"]
    cancelled = await harness.request("POST", "/v1/requests/job-1/cancel", headers=BOB)
    assert cancelled.status_code == 404, "it has ended"


async def test_I04_ids_made_by_the_server_are_known_too() -> None:
    harness = Harness()
    answer = (await harness.complete()).json()
    assert answer["id"].startswith("cmpl-")
    assert (await told(harness, answer["id"]))["explanations"][0]["text"] == "ended (stop)"
    answer = (await harness.chat()).json()
    assert (await told(harness, answer["id"]))["explanations"][0]["state"] == "finished"


async def test_I04_others_are_the_reason_without_a_name(harness: Harness) -> None:
    tasks = await opened(harness, 1, headers={**ALICE, "X-Request-Id": "first"})
    tasks += await opened(harness, 1, headers={**BOB, "X-Request-Id": "second"})
    tasks += await opened(harness, 1, headers={**CAROL, "X-Request-Id": "third"})
    (second,) = (await told(harness, "second", headers=BOB))["explanations"]
    assert second["behind"] is None and second["num_ahead"] == 2
    assert second["ahead"] == [{"id": "third", "why": "arrival 1"}], "of its own tenant"
    assert second["events"][0]["by"] is None and second["events"][0]["num_tokens"] == 4
    everything = str(await told(harness, "second", headers=BOB))
    assert "first" not in everything and "~" not in everything and "tenant" not in everything
    operator = await explain_any(harness.context, "second")
    assert "first~" in str(operator), "whoever runs the server sees all"
    assert await answered(harness, tasks) == [200, 200, 200]


async def test_I04_each_prompt_has_an_explanation_up_to_a_bound() -> None:
    harness = Harness()
    await harness.complete(prompt=["a", "b", "c"], headers={"X-Request-Id": "three"})
    answer = await told(harness, "three")
    assert len(answer["explanations"]) == 3 and answer["num_left_out"] == 0
    await harness.complete(prompt=["a"] * (MAX_EXPLANATIONS + 3), headers={"X-Request-Id": "many"})
    answer = await told(harness, "many")
    assert len(answer["explanations"]) == MAX_EXPLANATIONS and answer["num_left_out"] == 3


async def test_I04_what_the_engine_has_forgotten_is_404() -> None:
    harness = Harness(config=Config(statistics=StatisticsConfig(explain_kept=1)))
    for name in ("one", "two"):
        await harness.complete(headers={"X-Request-Id": name})
    assert (await harness.get("/v1/requests/one/explain")).status_code == 404
    harness.engine.requests.clear()
    response = await harness.get("/v1/requests/two/explain")
    assert response.status_code == 404 and "the last 1, for 600 s" in response.json()["error"]["message"]


async def test_a_full_queue_and_an_explanation_tell_the_same_numbers() -> None:
    harness = small()
    tasks = await opened(harness, 3, headers={"X-Request-Id": "mine"})
    refused = (await harness.complete()).json()["error"]["message"]
    queue = (await told(harness, "mine"))["queue"]
    assert f"{queue['num_waiting']} sequences wait, {queue['max_waiting']} may" in refused
    assert await answered(harness, tasks) == [200, 200, 200]


def test_the_directory_keeps_so_many_that_ended() -> None:
    directory = RequestIndex(2)
    for number in range(3):
        directory.add("t", f"r{number}", [f"r{number}~x", f"r{number}~x-1"])()
    assert directory.find("r2", "t") == [] and len(directory) == 0
    assert directory.find_ended("r0", "t") == [] and directory.find_ended("r1", "t") == ["r1~x", "r1~x-1"]
    assert directory.find_ended("r1", "u") == [] and directory.find_ended("r2~x-1") == ["r2~x-1"]
    assert directory.names("t") == {"r1~x": "r1", "r1~x-1": "r1", "r2~x": "r2", "r2~x-1": "r2"}
    again = directory.add("t", "r2", ["r2~y"])
    assert directory.find("r2", "t") == ["r2~y"]
    again()
    assert directory.find_ended("r2", "t") == ["r2~y"], "the last of that name"


def test_the_fakes_say_what_the_engine_says() -> None:
    assert unknown("x").keys() == ended("x").keys()
