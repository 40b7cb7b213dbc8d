"""Row 36: a template that burns time inside C is cut in its own process; the api answers meanwhile."""

import asyncio
import time
from pathlib import Path

import pytest

from octavo.server.prompts import RENDER_LIMIT_S
from tests.reliability.lag_api import Api, watched_api
from tests.reliability.load import Outcome, ask, quantile
from tests.reliability.scorecard import Score
from tests.sandbox.test_jobs import STALLS

PATH = "/v1/chat/completions"
BODY = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
KEYS = """
keys:
  - {name: mallory, key: sk-mallory-0123456789abcdef}
  - {name: alice, key: sk-alice-0123456789abcdef}
"""


def _template() -> str:
    """A template that stalls in one of several ways where the last message asks for it."""
    branches = [
        f"{{% if messages[-1].content == 'stall {number}' %}}{stall}{{% endif %}}"
        for number, stall in enumerate(STALLS.values())
    ]
    return "".join(branches) + BODY


async def _ask(api: Api, words: str, name: str) -> Outcome:
    fields = {"messages": [{"role": "user", "content": words}], "max_tokens": 4}
    return await ask(api.port, fields, PATH, f"authorization: Bearer sk-{name}-0123456789abcdef\r\n")


async def _watch(api: Api, times: list[float]) -> None:
    while True:
        outcome = await ask(api.port, None, "/livez")
        assert outcome.status == 200
        times.append(outcome.total_s)
        await asyncio.sleep(0.005)


async def _attack(api: Api, count: int) -> tuple[list[Outcome], list[Outcome], list[float], list[float]]:
    """Outcomes of the stalling requests and of another tenant's; times of /livez without and beside them."""
    calm: list[float] = []
    beside: list[float] = []
    honest = [await _ask(api, "hello", "alice") for _ in range(10)]
    watching = asyncio.create_task(_watch(api, calm))
    await asyncio.sleep(1.0)
    watching.cancel()
    watching = asyncio.create_task(_watch(api, beside))
    bombs = [asyncio.create_task(_ask(api, f"stall {n % len(STALLS)}", "mallory")) for n in range(count)]
    while not all(bomb.done() for bomb in bombs):
        honest.append(await _ask(api, "hello", "alice"))
        await asyncio.sleep(0.02)
    watching.cancel()
    return [bomb.result() for bomb in bombs], honest, calm, beside


@pytest.mark.timeout(300)
def test_row_36_templates_that_burn_time_inside_c_are_cut(score: Score, tmp_path: Path) -> None:
    count = score.dose(3, 3 * len(STALLS))
    template, keys = tmp_path / "stalls.jinja", tmp_path / "keys.yaml"
    template.write_text(_template(), encoding="utf-8")
    keys.write_text(KEYS, encoding="utf-8")
    keys.chmod(0o600)
    with watched_api(chat_template=str(template), api_key_file=str(keys)) as api:
        bombs, honest, calm, beside = asyncio.run(_attack(api, count))
        loop = api.report()
        assert api.is_alive
    cut = sum(bomb.status == 400 and bomb.code == "too_complex" for bomb in bombs)
    score.share("stalling templates cut in the sandbox", cut, count)
    score.share("another tenant's requests served", sum(o.status == 200 for o in honest), len(honest))
    score.tell(
        "another tenant's requests beside them, p99 in ms", f"{1000 * quantile([o.total_s for o in honest], 0.99):.1f}"
    )
    score.tell("/livez without them, p99 in ms", f"{1000 * quantile(calm, 0.99):.1f}")
    score.tell("event loop late by work of its own process, p99.9 in ms", f"{1000 * loop['own_p999_s']:.1f}")
    score.time("/livez beside them, p99 in s", quantile(beside, 0.99), 0.05)
    score.time("longest of another tenant's requests, s", max(o.total_s for o in honest), RENDER_LIMIT_S / 2)


@pytest.mark.timeout(300)
def test_row_36_a_request_is_little_slower_than_with_a_trusted_template(score: Score) -> None:
    """Chat requests to two servers in turn, of which one renders in its own process."""
    count = score.dose(60, 2000)
    fields = {"messages": [{"role": "user", "content": "What is a sheet folded into sixteen pages?"}], "max_tokens": 4}

    async def in_turn(ports: list[int]) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in ports]
        for number in range(count + 10):
            for index, port in enumerate(ports):
                outcome = await ask(port, fields, PATH)
                assert outcome.status == 200
                if number >= 10:
                    times[index].append(outcome.total_s)
        return times

    with watched_api(trust_template=True) as here, watched_api() as sandboxed:
        begun = time.monotonic()
        trusted, cut = asyncio.run(in_turn([here.port, sandboxed.port]))
        score.tell("requests to each", f"{count} in {time.monotonic() - begun:.1f} s")
    p50 = [1000 * quantile(times, 0.5) for times in (trusted, cut)]
    p99 = [1000 * quantile(times, 0.99) for times in (trusted, cut)]
    score.tell("p50 with a trusted template and with one in the sandbox, ms", f"{p50[0]:.2f} and {p50[1]:.2f}")
    score.tell("p99 of the same, ms", f"{p99[0]:.2f} and {p99[1]:.2f}")
    score.time("a chat request's p50 grows by, ms", p50[1] - p50[0], 1.0)
