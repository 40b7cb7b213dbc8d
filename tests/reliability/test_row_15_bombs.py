"""Row 15: what is made to grow when compiled is refused or killed in time, and nobody beside it notices."""

import asyncio
import json
import random
import time
from collections.abc import Iterator

import pytest

from octavo.errors import InvalidRequestError, TooComplexError
from octavo.sandbox.pool import Sandbox, SandboxLimits
from octavo.sandbox.wire import CheckRegex, CompileGrammar, RenderChat
from tests.reliability.load import quantile
from tests.reliability.scorecard import Score
from tests.server.fakes import Harness

Bomb = tuple[str, CompileGrammar | RenderChat]
# Each of these patterns takes the engine a tenth of a second before it gives up: more of them than fit in the time.
_SLOW = [rf"(?i)[\w&&[^a]]{{{count}}}" for count in range(300, 364)]
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37)
_HUNGRY = "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' ~ a ~ b }}{% endfor %}{% endfor %}"


def _patterns(rng: random.Random) -> Iterator[str]:
    while True:
        count = rng.randrange(50, 2000)
        yield rng.choice((
            f"(a{{{count}}}){{{count}}}",
            f"((a|b){{{count}}}c?){{{count}}}",
            rf"\w{{{count + 800}}}",
            rf"(\p{{L}}{{{count}}}\d){{20}}",
            "(" * count + ")" * count,
            "(a*)*" * (count + 500),
            rf"(?:.{{1,{count}}}){{1,{count}}}",
            "|".join(f"(?:a{{{i}}}){{{count}}}" for i in range(1, 60)),
            "[" * count,
            "a{999999999}{999999999}",
            "x" * 4000,
        ))  # fmt: skip


def _schemas(rng: random.Random) -> Iterator[object]:
    while True:
        count = rng.randrange(20, 60)
        table = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(count)}
        deep: dict[str, object] = {}
        for _ in range(count + 20):
            deep = {"properties": {"a": deep}, "items": deep}
            deep.pop(rng.choice(("properties", "items")))
        yield rng.choice((
            {"$defs": {**table, f"a{count}": {}}, "$ref": "#/$defs/a0"},
            deep,
            {"patternProperties": {pattern: {} for pattern in _SLOW}},
            {"allOf": [{"pattern": pattern} for pattern in rng.sample(_SLOW, 60)]},
            {"minItems": 10**9, "maxItems": 10**12},
            {"enum": ["x" * 100] * 2000},
            {"$ref": "https://example.invalid/schema.json"},
            {"properties": {str(i): {"properties": {"x": {"pattern": f"a{{{i}}}"}}} for i in range(900)}},
            {"allOf": [{"type": "integer", "multipleOf": prime} for prime in rng.sample(_PRIMES, 7)]},
            {"type": "string", "allOf": [{"pattern": f"[a-c]{{{i}}}.*x"} for i in range(1, count)]},
            {"allOf": [{"anyOf": [{"required": [f"{j}.{i}"]} for i in range(count)]} for j in range(8)]},
            {"properties": {f"p{i}": {} for i in range(4000 + count)}},
        ))  # fmt: skip


def _grammars(rng: random.Random) -> Iterator[str]:
    while True:
        count = rng.randrange(50, 400)
        yield rng.choice((
            f"start: /((a{{{count}}}){{{count}}}){{{count}}}/",
            "start: X\nX: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(10, 10 + count // 10)),
            "start: " + "(" * (count * 100),
            "start: r0" + "".join(f"\nr{i}: r{i + 1} r{i + 1} | r{i + 2}" for i in range(1500)),
            "root ::= " + "(" * count + '"a"' + ")*" * count,
            'start: %json {"allOf": [' + ", ".join(f'{{"type": "integer", "multipleOf": {p}}}' for p in _PRIMES) + "]}",
        ))  # fmt: skip


def _bombs(count: int) -> list[Bomb]:
    rng = random.Random(15)
    patterns, schemas, grammars = _patterns(rng), _schemas(rng), _grammars(rng)
    chat = RenderChat(_HUNGRY, {}, [{"role": "user", "content": "x"}])
    made: list[Bomb] = []
    for index in range(count):
        if index % 10 == 9:
            made.append(("render_chat", chat))
        elif index % 4 == 0:
            made.append(("compile_grammar", CompileGrammar("json_schema", json.dumps(next(schemas)))))
        elif index % 4 == 1:
            made.append(("compile_grammar", CompileGrammar("regex", next(patterns))))
        elif index % 4 == 2:
            made.append(("compile_grammar", CompileGrammar("lark", next(grammars))))
        else:
            made.append(("compile_grammar", CompileGrammar("json_schema", json.dumps({"items": next(schemas)}))))
    return made


async def _good(tool: Sandbox, number: int) -> float:
    begun = time.perf_counter()
    assert await tool.run("check_regex", CheckRegex(f"a{{{number % 50 + 1}}}b")) == number % 50 + 2
    return time.perf_counter() - begun


async def _chat(harness: Harness) -> float:
    begun = time.perf_counter()
    assert (await harness.chat()).status_code == 200
    return time.perf_counter() - begun


async def _loop_lateness(late: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.002
        await asyncio.sleep(0.002)
        late.append(time.perf_counter() - due)


@pytest.mark.timeout(600)
async def test_row_15_bombs_are_refused_or_killed_in_time(score: Score) -> None:
    """One bomb after another; beside them small jobs, which have a second process, and the event loop itself.

    A third process is left for templates.
    """
    count = score.dose(12, 100)
    tool = Sandbox(SandboxLimits(num_processes=3))
    harness = Harness()
    late: list[float] = []
    watching = asyncio.create_task(_loop_lateness(late))
    try:
        await asyncio.gather(_good(tool, 0), _good(tool, 1))
        alone = [await _good(tool, number) for number in range(200)]
        late.clear()
        times, beside, refusals = [], [], 0
        chats_alone, chats_beside = [await _chat(harness)], [await _chat(harness)]
        for job, argument in _bombs(count):
            for number in range(5):  # with a small job and a pause before each, as beside the bomb
                await _good(tool, number)
                await asyncio.sleep(0.005)
                chats_alone.append(await _chat(harness))
            begun = time.perf_counter()
            bomb = asyncio.create_task(tool.run(job, argument))
            while not bomb.done():
                beside.append(await _good(tool, len(beside)))
                await asyncio.sleep(0.005)
                chats_beside.append(await _chat(harness))
            times.append(time.perf_counter() - begun)
            error = bomb.exception()
            refusals += isinstance(error, InvalidRequestError)
            assert error is None or isinstance(error, InvalidRequestError), (job, error)
        assert await _good(tool, 7) < 5
    finally:
        watching.cancel()
        await tool.close()
    score.share("bombs refused or killed", refusals, count)
    score.time("slowest bomb, s", max(times), 2.5)
    score.tell("sandbox processes killed", tool.counters.kills)
    score.tell("small jobs beside the bombs", len(beside))
    score.tell("a small job alone, p50 in ms", f"{1000 * quantile(alone, 0.5):.2f}")
    score.tell("a small job beside the bombs, p50 in ms", f"{1000 * quantile(beside, 0.5):.2f}")
    ratio = quantile(chats_beside, 0.5) / quantile(chats_alone, 0.5)
    score.time("a chat request's time beside the bombs by that without, p50", ratio, 1.2)
    score.tell("event loop late beside the bombs, p99 in ms", f"{1000 * quantile(late, 0.99):.1f}")


async def test_row_15_a_pattern_that_is_refused_is_never_compiled(score: Score) -> None:
    """Those that repeat repetitions are weighed, not compiled: that costs nothing."""
    tool = Sandbox(SandboxLimits(num_processes=1))
    try:
        await _good(tool, 0)
        begun = time.perf_counter()
        for size in (100, 300, 1000):
            with pytest.raises(TooComplexError):
                await tool.run("check_regex", CheckRegex(f"((a{{{size}}}){{{size}}}){{{size}}}"))
        score.time("three nested repetitions refused, s", time.perf_counter() - begun, 0.1)
        score.count("processes killed for them", tool.counters.kills)
    finally:
        await tool.close()
