"""The online benchmark: sends requests to a running server on a schedule, and times each from its scheduled arrival.

Owns: arrival times; concurrency and duration limits; goodput objectives; request times; the report of
`octavo bench online`. Does not: start servers or parse flags. Equal arguments give equal arrivals on every machine.
Invariant: every body has a result, or counts as not sent.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from rich.console import Console

from octavo.bench.completion_client import (
    CompletionClient,
    CompletionResult,
    Target,
    first_model,
    step_split,
    step_totals,
)
from octavo.bench.report import Report, show_facts, show_rows, spread_ms
from octavo.errors import ConfigError, EngineError

ARRIVAL_KINDS = ("poisson", "fixed", "bursty")
BURSTY_SHAPE = 0.25  # the gaps' coefficient of variation is 1 / sqrt(shape) = 2; Poisson's is 1
OBJECTIVES = ("ttft", "tpot", "e2e")
SPREADS = {
    "first token": "ttft_ms",
    "per token": "tpot_ms",
    "between chunks": "inter_token_ms",
    "whole request": "e2e_ms",
    "sent late": "late_ms",
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process: requests per second (inf: no gaps), and the shape of the gamma distribution of the gaps.

    Shape 1 is a Poisson process; a smaller shape is burstier.
    """

    rate: float = math.inf
    kind: str = "poisson"
    shape: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"--request-rate is {self.rate:g}; give requests a second above 0, or inf")
        if self.kind not in ARRIVAL_KINDS:
            raise ConfigError(f"--arrivals is {self.kind!r}; give one of {', '.join(ARRIVAL_KINDS)}")
        if self.shape is not None and not (0 < self.shape < math.inf):
            raise ConfigError(f"--burstiness is {self.shape:g}; give a number above 0 (1 = Poisson, less = burstier)")

    @property
    def is_open_loop(self) -> bool:
        """True if requests arrive independently of the server."""
        return self.rate < math.inf

    def times(self) -> Iterator[float]:
        """Yield arrival times in seconds, endlessly; the first is 0."""
        draw, now = random.Random(self.seed), 0.0
        shape = self.shape or (BURSTY_SHAPE if self.kind == "bursty" else 1.0)
        while True:
            yield now
            if self.is_open_loop:
                gap = 1.0 if self.kind == "fixed" else draw.gammavariate(shape, 1 / shape)
                now += gap / self.rate

    def describe(self) -> str:
        """Return a description for the report."""
        if not self.is_open_loop:
            return "as soon as there is room"
        shape = "" if self.shape is None else f", gamma shape {self.shape:g}"
        return f"{self.kind}, {self.rate:g} a second{shape}"


@dataclass(frozen=True, slots=True)
class OnlineLoad:
    """A schedule of requests: arrivals, a limit of open requests (0: no limit), and the time when sending ends."""

    arrivals: Arrivals
    max_concurrency: int = 0
    duration_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper bounds in seconds by the name of a time, such as ttft. Without bounds, every finished request is good."""

    bounds_s: Mapping[str, float]

    @classmethod
    def read(cls, words: Iterable[str]) -> Objectives:
        """Read NAME:MILLISECONDS pairs, such as ttft:500. Raises ConfigError."""
        bounds: dict[str, float] = {}
        for word in words:
            name, colon, text = word.partition(":")
            try:
                bound = float(text) if colon else 0.0
            except ValueError:
                bound = 0.0
            if name not in OBJECTIVES or not 0 < bound < math.inf:
                raise ConfigError(
                    f"--goodput is {word!r}; give {', '.join(OBJECTIVES)} with milliseconds, as in ttft:500"
                )
            if name in bounds:
                raise ConfigError(f"--goodput gives {name} twice; give it once")
            bounds[name] = bound / 1e3
        return cls(bounds)

    def are_met(self, seconds: Mapping[str, float]) -> bool:
        """Return True if a request's times are within every bound."""
        return all(seconds[name] <= bound for name, bound in self.bounds_s.items())


@dataclass(slots=True)
class OnlineRun:
    """The result of one run. `arrived` holds scheduled arrivals in perf_counter seconds; times count from them."""

    answers: list[CompletionResult] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    num_not_sent: int = 0
    duration_s: float = 0.0
    client_cpu_s: float = 0.0
    max_open: int = 0

    @property
    def done(self) -> list[tuple[float, CompletionResult]]:
        """Return the arrival and the result of each request that finished with at least one token."""
        pairs = zip(self.arrived, self.answers, strict=True)
        return [(at, answer) for at, answer in pairs if not answer.has_failed and answer.chunk_times]

    @property
    def num_output_tokens(self) -> int:
        """Return the output tokens of the finished requests."""
        return sum(answer.num_tokens for _, answer in self.done)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the server's count of the finished requests' prompt tokens."""
        return sum(answer.num_prompt_tokens for _, answer in self.done)

    def failures(self) -> dict[str, int]:
        """Return the number of failed requests by kind; `no_tokens` counts requests that ended without a token."""
        counts: dict[str, int] = {}
        for answer in self.answers:
            kind = answer.kind or ("" if answer.chunk_times else "no_tokens")
            if kind:
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    def first_errors(self) -> dict[str, str]:
        """Return the first error of each kind."""
        errors: dict[str, str] = {}
        for answer in self.answers:
            if answer.has_failed:
                errors.setdefault(answer.kind, answer.error)
        return errors

    def times_s(self, name: str) -> list[float]:
        """Return one time (a name in OBJECTIVES) of each finished request. A request with one token has no tpot."""
        return [_times(at, answer)[name] for at, answer in self.done if name != "tpot" or answer.num_tokens > 1]

    def between_chunks_s(self) -> list[float]:
        """Return the gaps between chunks with tokens. Most servers send one token per chunk."""
        return [after - before for _, answer in self.done for before, after in pairwise(answer.chunk_times)]

    def late_s(self) -> list[float]:
        """Return the seconds from arrival to sending: the client's delay, plus the wait for the open-request limit."""
        return [answer.sent - at for at, answer in zip(self.arrived, self.answers, strict=True)]

    def num_good(self, objectives: Objectives) -> int:
        """Return the number of finished requests that met every objective."""
        return sum(objectives.are_met(_times(at, answer)) for at, answer in self.done)


async def run_online(
    client: CompletionClient,
    bodies: Sequence[bytes],
    load: OnlineLoad,
    advance: Callable[[int], object] = lambda tokens: None,
) -> OnlineRun:
    """Send the bodies and wait for all results; `advance` receives the number of new chunks with a token."""
    run, room = OnlineRun(), asyncio.Semaphore(load.max_concurrency or max(1, len(bodies)))
    tasks: list[asyncio.Task[CompletionResult]] = []
    num_open = 0

    async def send(body: bytes) -> CompletionResult:
        nonlocal num_open
        num_open += 1
        run.max_open = max(run.max_open, num_open)
        try:
            return await client.send(body, advance)
        finally:
            num_open -= 1
            room.release()

    start, cpu = time.perf_counter(), time.process_time()
    for body, planned_s in zip(bodies, load.arrivals.times(), strict=False):
        if planned_s > load.duration_s:
            break
        if (wait_s := start + planned_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        await room.acquire()
        now = time.perf_counter()
        if now - start > load.duration_s:
            room.release()
            break
        run.arrived.append(start + planned_s if load.arrivals.is_open_loop else now)
        tasks.append(asyncio.create_task(send(body)))
    run.num_not_sent = len(bodies) - len(tasks)
    run.answers = list(await asyncio.gather(*tasks))
    run.duration_s = time.perf_counter() - start
    run.client_cpu_s = time.process_time() - cpu
    return run


async def measure_server(
    target: Target,
    prompts: Sequence[tuple[array[int] | str, int]],
    load: OnlineLoad,
    num_warm_ups: int,
    advance: Callable[[int], object],
) -> tuple[OnlineRun, Report]:
    """Send (prompt, output tokens) pairs; return the run, and facts about the server and its steps.

    Raises EngineError if the server names no model, or if a warm-up request fails.
    """
    model = target.model or await first_model(CompletionClient(target))
    client = CompletionClient(replace(target, model=model))
    bodies = [client.body(prompt, count) for prompt, count in prompts]
    for _ in range(num_warm_ups):
        answer = await client.send(bodies[0])
        if answer.has_failed:
            raise EngineError(f"a request to warm up failed ({answer.kind}): {answer.error}")
    before = await step_totals(client)
    run = await run_online(client, bodies, load, advance)
    return run, {"model": model, **step_split(before, await step_totals(client))}


def make_online_report(facts: Report, load: OnlineLoad, objectives: Objectives, run: OnlineRun) -> Report:
    """Return the figures of one run, with the facts about the server and the workload."""
    num_done, num_good, num_output = len(run.done), run.num_good(objectives), run.num_output_tokens
    seconds, failures = run.duration_s, run.failures()
    return {
        "bench": "online",
        **facts,
        "arrivals": load.arrivals.describe(),
        "max_concurrency": load.max_concurrency or None,
        "max_open": run.max_open,
        "requests": len(run.answers),
        "requests_done": num_done,
        "requests_failed": sum(failures.values()),
        "failures": failures,
        "requests_not_sent": run.num_not_sent,
        "duration_s": round(seconds, 4),
        "prompt_tokens": run.num_prompt_tokens,
        "output_tokens": num_output,
        "requests_per_s": round(num_done / seconds, 4),
        "output_tokens_per_s": round(num_output / seconds, 2),
        "total_tokens_per_s": round((run.num_prompt_tokens + num_output) / seconds, 2),
        "ttft_ms": spread_ms(run.times_s("ttft")),
        "tpot_ms": spread_ms(run.times_s("tpot")),
        "inter_token_ms": spread_ms(run.between_chunks_s()),
        "e2e_ms": spread_ms(run.times_s("e2e")),
        "late_ms": spread_ms(run.late_s()),
        "objectives_ms": {name: bound * 1e3 for name, bound in objectives.bounds_s.items()},
        "goodput_requests_per_s": round(num_good / seconds, 4),
        "goodput_share": round(num_good / len(run.answers), 4) if run.answers else 0.0,
        "client_cpu_share": round(run.client_cpu_s / seconds, 4),
        "client_us_per_token": round(run.client_cpu_s / max(1, num_output) * 1e6, 1),
    }


def show_online(console: Console, report: Report) -> None:
    """Print the report as tables."""
    show_facts(console, "Online bench", _shown_facts(report))
    console.print()
    rows: list[tuple[Any, ...]] = [(name, *report[key].values()) for name, key in SPREADS.items()]
    show_rows(console, "Latency, ms", ("", *report["ttft_ms"]), rows)
    step = report.get("step_ms")
    if step:
        console.print()
        rows = [(part, value, f"{value / step['total']:.1%}") for part, value in step.items() if step["total"]]
        show_rows(console, f"Step, ms, mean of {report['steps']}", ("", "mean", "share"), rows)


def _shown_facts(report: Report) -> dict[str, object]:
    facts: dict[str, object] = {"server": report["server"]}
    if report.get("model"):
        known = [str(report[name]) for name in ("model", "dtype", "device") if report.get(name)]
        facts["model"] = ", ".join(known + ([f"{report['threads']} threads"] if report.get("threads") else []))
    facts |= {
        "workload": f"{report['workload']}: {report['requests']} requests, {report['arrivals']}, "
        f"at most {report['max_open']} open",
        "done": f"{report['requests_done']} of {report['requests']}"
        + "".join(f", {count} {kind}" for kind, count in report["failures"].items())
        + (f", {report['requests_not_sent']} not sent in time" if report["requests_not_sent"] else ""),
        "output tokens/s": f"{report['output_tokens_per_s']:,.1f}  ({report['requests_per_s']:.3g} requests/s)",
        "all tokens/s": f"{report['total_tokens_per_s']:,.1f}",
    }
    if report["objectives_ms"]:
        bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in report["objectives_ms"].items())
        share, rate = report["goodput_share"], report["goodput_requests_per_s"]
        facts["goodput"] = f"{share:.1%} of requests, {rate:.3g} a second ({bounds})"
    if report.get("startup_s") is not None:
        facts["start-up"] = f"{report['startup_s']:.2f} s"
        facts["peak memory"] = f"{report['peak_memory_bytes'] / 2**30:.2f} GiB, all its processes"
    cost, share = report["client_us_per_token"], report["client_cpu_share"]
    return facts | {"this client": f"{share:.1%} of one core, {cost:,.0f} us a token"}


def _times(arrived: float, answer: CompletionResult) -> dict[str, float]:
    """Return a finished request's times in seconds: to its first token, per later token, and to its last token."""
    times = answer.chunk_times
    tpot = (times[-1] - times[0]) / max(1, answer.num_tokens - 1)
    return {"ttft": times[0] - arrived, "tpot": tpot, "e2e": times[-1] - arrived}
