"""Row 14: what schemathesis makes of our own API description, right and wrong by it, is answered as it should be."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.server.api.pages import openapi
from octavo.server.http.endpoints import Endpoint, Endpoints
from tests.reliability.scorecard import IS_WHOLE, Score
from tests.reliability.test_row_14_fuzz import faults_of
from tests.server.fakes import Harness

PARTS = {"method", "url", "json", "data", "params", "headers", "content"}
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@dataclass
class Answers:
    """What came back: the statuses, wrong answers, and bodies taken against the description."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def add(self, name: str, mode: Any, response: httpx.Response) -> None:
        self.statuses[response.status_code] += 1
        self.wrong += [f"{name}: {fault}" for fault in faults_of(response)]
        if mode is schemathesis.GenerationMode.NEGATIVE and response.status_code < 400:
            self.taken.append(f"{name}: {response.request.content[:200]!r}")

    def judge(self, score: Score) -> None:
        """Note all figures, then fail for each that misses."""
        print("\n".join([*self.wrong[:20], *self.taken[:20]]))
        score.tell("requests from the API description", sum(self.statuses.values()))
        told = " ".join(f"{status}: {number}" for status, number in sorted(self.statuses.items()))
        score.tell("their statuses", told)
        score.count("5xx to them", sum(number for status, number in self.statuses.items() if status >= 500))
        score.count("wrong answers to them", len(self.wrong))
        score.tell("accepted against the description", len(self.taken))
        assert self.statuses[400] and self.statuses[200]


@pytest.mark.timeout(1500)
def test_row_14_the_api_description_tells_no_lies(score: Score) -> None:
    """Bodies that fit the description are served or refused by name, those that do not are refused."""
    harness = Harness()
    with asyncio.Runner() as runner:
        answers = answers_of(harness.app, runner, score.dose(5, 100))
        runner.run(harness.context.sandbox.close())
    answers.judge(score)


def test_a_route_that_breaks_or_takes_anything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.reliability.scorecard._FILE", None)
    body = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}

    async def breaks(request: Request) -> Response:
        raise ValueError("as a client library would")

    async def takes_all(request: Request) -> Response:
        return JSONResponse({})

    with asyncio.Runner() as runner:
        found = []
        for path, endpoint in (("/breaks", breaks), ("/all", takes_all)):
            described = Endpoints([Endpoint("POST", path, endpoint, body=body)])
            app = Starlette(routes=[Route("/openapi.json", openapi), Route(path, endpoint, methods=["POST"])])
            app.state.endpoints, app.state.root_path = described, ""
            found.append(answers_of(app, runner, 5))
    with pytest.raises(AssertionError, match="5xx to them"):
        found[0].judge(Score(["R14"], "here"))
    assert len(found[1].taken) == 5 and not found[0].taken


def answers_of(app: Starlette, runner: asyncio.Runner, count: int) -> Answers:
    """Ask `count` right and wrong requests of each operation. An exception in the application is a 500."""
    answers = Answers()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def send(request: httpx.Request) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.send(request)

    description = runner.run(send(httpx.Request("GET", "http://localhost/openapi.json"))).json()
    for result in schemathesis.openapi.from_dict(description).get_all_operations():
        operation = result.ok()
        for mode in MODES:
            if not operation.body and (not IS_WHOLE or mode is schemathesis.GenerationMode.NEGATIVE):
                continue  # there is little that could be wrong
            for case in _cases(operation.as_strategy(generation_mode=mode), count):
                if (request := _spelled(case)) is not None:
                    answers.add(f"{operation.label} {mode.name}", mode, runner.run(send(request)))
    return answers


def _cases(strategy: Any, count: int) -> list[Any]:
    """So many, the same in each run."""
    found: list[Any] = []

    @seed(14)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def collect(case: Any) -> None:
        found.append(case)

    collect()
    return found


def _spelled(case: Any) -> httpx.Request | None:
    """The request; None where the client cannot spell it."""
    parts = {
        name: value for name, value in case.as_transport_kwargs(base_url="http://localhost").items() if name in PARTS
    }
    if isinstance(parts.get("data"), bytes | str):
        parts["content"] = parts.pop("data")
    try:
        return httpx.Request(parts.pop("method"), parts.pop("url"), **parts)
    except (httpx.InvalidURL, UnicodeEncodeError, TypeError, ValueError):
        return None
