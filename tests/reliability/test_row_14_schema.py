"""Row 14: what schemathesis makes of our own API description, right and wrong by it, is answered as it should be."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.reliability.scorecard import IS_WHOLE, Score
from tests.reliability.test_row_14_fuzz import faults_of
from tests.server.fakes import Harness

PARTS = {"method", "url", "json", "data", "params", "headers", "content"}


@pytest.mark.timeout(1500)
def test_row_14_the_api_description_tells_no_lies(score: Score) -> None:
    """Bodies that fit the description are served or refused by name, those that do not are refused."""
    schemathesis = pytest.importorskip("schemathesis")
    harness = Harness()
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    taken: list[str] = []  # against the description
    with asyncio.Runner() as runner:
        schema = schemathesis.openapi.from_dict(runner.run(harness.get("/openapi.json")).json())
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                if not operation.body and (not IS_WHOLE or mode is schemathesis.GenerationMode.NEGATIVE):
                    continue  # there is little that could be wrong

                name = f"{operation.label} {mode.name}"
                for case in _cases(operation.as_strategy(generation_mode=mode), score.dose(5, 400)):
                    response = _send(runner, harness, case)
                    if response is None:
                        continue
                    statuses[response.status_code] += 1
                    wrong.extend(f"{name}: {fault}" for fault in faults_of(response))
                    if mode is schemathesis.GenerationMode.NEGATIVE and response.status_code < 400:
                        taken.append(f"{name}: {response.request.content[:200]!r}")
        runner.run(harness.context.tool.close())
    print("\n".join([*wrong[:20], *taken[:20]]))
    score.tell("requests from the API description", sum(statuses.values()))
    score.tell("their statuses", " ".join(f"{status}: {number}" for status, number in sorted(statuses.items())))
    score.count("5xx to them", sum(number for status, number in statuses.items() if status >= 500))
    score.count("wrong answers to them", len(wrong))
    score.tell("taken though the description says otherwise", len(taken))
    assert statuses[400] and statuses[200]


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


def _send(runner: asyncio.Runner, harness: Harness, case: Any) -> httpx.Response | None:
    """The answer; None where the client cannot spell the request."""
    parts = {name: value for name, value in case.as_transport_kwargs(base_url="http://test").items() if name in PARTS}
    if isinstance(parts.get("data"), bytes | str):
        parts["content"] = parts.pop("data")
    try:
        return runner.run(harness.request(parts.pop("method"), parts.pop("url"), **parts))
    except (httpx.InvalidURL, UnicodeEncodeError, TypeError, ValueError):
        return None
