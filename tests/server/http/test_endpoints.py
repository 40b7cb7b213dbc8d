"""An endpoint is one file: the module that declares it is found, served, checked, limited and described."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.config import AdmissionConfig, Config, SchedulingConfig, ServingConfig
from octavo.server import api
from octavo.server.http.endpoints import find_endpoints
from tests.server.fakes import Harness
from tests.source_tree import ROOT

PATH = "/v1/words/count"
KEYS = """
keys:
  - {name: alice, key: sk-alice-1, requests_per_minute: 3}
  - {name: bob, key: sk-bob-11, metrics: true}
"""
ALICE, BOB = ({"authorization": f"Bearer sk-{name}"} for name in ("alice-1", "bob-11"))


def example() -> str:
    """The module that docs/extending.md shows."""
    page = (ROOT / "docs/extending.md").read_text()
    section = page.partition("## An endpoint\n")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """A server of two keys and a queue of one, with the example beside the modules of octavo.server.api."""
    (tmp_path / "word_count.py").write_text(example())
    monkeypatch.setattr(api, "__path__", [*api.__path__, str(tmp_path)])
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    admission, scheduling = AdmissionConfig(max_waiting=1), SchedulingConfig(max_sequences=1)
    serving = ServingConfig(api_key_file=str(keys))
    yield Harness(config=Config(serving=serving, admission=admission, scheduling=scheduling))


async def test_it_is_served(harness: Harness) -> None:
    response = await harness.request("POST", PATH, json={"text": "four words and more"}, headers=ALICE)
    assert (response.status_code, response.json()) == (200, {"words": 4})
    refused = await harness.get(PATH, headers=ALICE)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    metrics = (await harness.get("/metrics", headers=BOB)).text
    assert f'http_requests_total{{handler="{PATH}",method="POST",status="2xx"}} 1.0' in metrics


async def test_it_needs_a_key(harness: Harness) -> None:
    for headers in ({}, {"authorization": "Bearer sk-wrong"}):
        assert (await harness.request("POST", PATH, json={"text": "a"}, headers=headers)).status_code == 401


async def test_it_waits_its_turn_at_a_full_queue_and_is_refused_while_the_server_drains(harness: Harness) -> None:
    harness.engine.is_held = True
    tasks = [asyncio.create_task(harness.complete(headers=BOB)) for _ in range(2)]
    async with asyncio.timeout(5):
        while len(harness.engine.requests) < 2:
            await asyncio.sleep(0.001)
    refused = await harness.request("POST", PATH, json={"text": "a"}, headers=ALICE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    for request in harness.engine.requests:
        harness.engine.answer(request)
    assert [(await task).status_code for task in tasks] == [200, 200]
    harness.context.lifecycle.refuse()
    refused = await harness.request("POST", PATH, json={"text": "a"}, headers=ALICE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


async def test_it_counts_in_its_keys_rate_and_its_body_is_bounded(harness: Harness) -> None:
    large = await harness.request("POST", PATH, json={"text": "a" * 70_000}, headers=ALICE)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    answers = [await harness.request("POST", PATH, json={"text": "a"}, headers=ALICE) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"


async def test_it_is_described(harness: Harness) -> None:
    document = (await harness.get("/openapi.json", headers=ALICE)).json()
    operation = document["paths"][PATH]["post"]
    assert operation["description"] == "Count the words of a text."
    assert [*operation["requestBody"]["content"]["application/json"]["schema"]["properties"]] == ["text"]
    assert PATH in (await harness.get("/docs", headers=ALICE)).text


def test_without_the_file_there_is_no_endpoint() -> None:
    assert PATH not in find_endpoints().access
