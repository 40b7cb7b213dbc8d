"""An endpoint is one file: the module that declares it is found, served, checked, limited and described."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.config import AdmissionConfig, BatchConfig, Config, SchedulingConfig, ServingConfig
from octavo.server import api
from octavo.server.http.endpoints import Limit, find_endpoints
from octavo.server.http.limits import HttpLimits
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
    async with asyncio.timeout(60):
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


def concrete(path: str) -> str:
    return re.sub(r"{[^}]+}", "x", path)


async def test_every_endpoint_checks_what_its_limit_says(harness: Harness) -> None:
    for _ in range(3):
        assert (await harness.complete(headers=ALICE)).status_code == 200
    for each in find_endpoints():
        url = concrete(each.path)
        counted = [await harness.request(each.method, f"{url}{query}", headers=ALICE) for query in ("", "?stream=true")]
        is_refused = [answer.status_code == 429 for answer in counted]
        expected = {Limit.NONE: [False, False], Limit.RATE_WITH_QUERY: [False, True]}.get(each.limit, [True, True])
        assert is_refused == expected, (each.method, each.path)
    harness.context.lifecycle.refuse()
    for each in find_endpoints():
        if each.limit is Limit.QUEUE:
            answer = await harness.request(each.method, concrete(each.path), headers=BOB)
            assert answer.status_code == 503, each.path


async def test_every_body_is_bounded(tmp_path: Path) -> None:
    small = Harness(limits=HttpLimits(max_body_bytes=1000), config=Config(batch=BatchConfig(batch_dir=str(tmp_path))))
    bounded = [each for each in find_endpoints() if each.body is not None and not each.takes_file]
    assert len(bounded) >= 15
    for each in bounded:
        answer = await small.request(each.method, concrete(each.path), content=b'{"a": "' + b"x" * 1000 + b'"}')
        assert answer.status_code == 413, each.path
