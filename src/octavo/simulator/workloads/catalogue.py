"""Workloads by their specifications: the known kinds, opening one or several, and options that every kind takes.

Owns: the table of kinds, SimulatedWorkload. Does not: read a format or draw anything itself.
Invariant: a workload may be iterated again and gives the same arrivals; it keeps only its specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.workloads import agentic, public_traces, recorded, servegen, shaping, synthetic, token_files
from octavo.simulator.workloads.gaps import PROCESSES
from octavo.simulator.workloads.shaping import Shaping
from octavo.simulator.workloads.source import Notes, Source, Surroundings, Zipf
from octavo.simulator.workloads.spec import Spec

Build = Callable[[Spec, Surroundings], Source]


@dataclass(frozen=True, slots=True)
class Kind:
    """How a kind is built, its help, whether it reads a file, and whether its requests follow others."""

    build: Build
    text: str
    reads: bool = True
    has_followers: bool = False


_PROCESS_TEXTS = {
    "poisson": "rate=R",
    "constant": "rate=R, equal gaps",
    "bursty": "rate=R, cv=2: gamma gaps of that coefficient of variation",
    "weibull": "rate=R, shape=0.5",
    "onoff": "rate=R for on=10 seconds, nothing for off=10",
    "mmpp": "low=R, high=R, high_s=10, low_s=30: Poisson that changes its rate at random",
    "wave": "rate=R, swing=0.5, period=86400: Poisson with a day's tide",
    "all_at_once": "requests=N at the start",
}
KINDS: dict[str, Kind] = {
    **{name: Kind(synthetic.open_loop, _PROCESS_TEXTS[name], reads=False) for name in PROCESSES},
    "closed": Kind(synthetic.closed_loop, "users=8, think=2: each asks again after its answer", False, True),
    "chat": Kind(
        synthetic.conversations, "rate=R of conversations, turns=geometric(4), think=exponential(10)", False, True
    ),
    "azure": Kind(public_traces.azure, "Azure LLM inference trace, 2023 or 2024 (CSV)"),
    "burstgpt": Kind(public_traces.burstgpt, "BurstGPT, release 1 or 2 (CSV); model=, log="),
    "mooncake": Kind(public_traces.mooncake, "Mooncake trace (JSON lines); round=up"),
    "servegen": Kind(servegen.servegen, "ServeGen's clients (JSON lines)"),
    "agentic": Kind(agentic.agentic, "kv-cache-tester's agent sessions (JSON lines); every=S, or rate=R", True, True),
    "serving_sim": Kind(public_traces.serving_sim, "LLMServingSim's workload (JSON lines)"),
    "clients": Kind(public_traces.service_log, "CSV with client, req_time, prompt_len, output_len"),
    "requests": Kind(token_files.token_file, "a workload file of octavo bench (JSON); rate=R", True, True),
    "recording": Kind(recorded.recording, "a folder that octavo serve --record wrote"),
}  # fmt: skip


class SimulatedWorkload:
    """Arrivals that can be iterated repeatedly; `notes` count what the last iteration left out or changed."""

    def __init__(self, texts: Sequence[str], shape: Shaping) -> None:
        self.name = " + ".join(texts)
        self.shaping = shape
        self.notes = Notes()
        self._sources = []
        self._has_followers = False
        for place, text in enumerate(texts):
            kind, source = _open(text, shape.seed, place)
            self._sources.append(source)
            self._has_followers = self._has_followers or kind.has_followers

    def arrivals(self) -> Iterator[Arrival] | list[Arrival]:
        """Return a list if requests may follow others, as all of those must be known at the start; else a stream."""
        return list(self) if self._has_followers else iter(self)

    def __iter__(self) -> Iterator[Arrival]:
        self.notes = Notes()
        arrivals = shaping.merge(self._sources, self.notes)
        return shaping.shape(arrivals, self.shaping, self.notes, has_followers=self._has_followers)


def open_workload(texts: str | Sequence[str], shape: Shaping | None = None) -> SimulatedWorkload:
    """Return a workload from its specification, `KIND:...` or a recording's path; several are merged in time.

    Raises ConfigError for a wrong specification; faults in a file are raised when it is read.
    """
    words = [texts] if isinstance(texts, str) else list(texts)
    if not words:
        raise ConfigError("there is no workload; give one, such as poisson:rate=2")
    return SimulatedWorkload(words, shape or Shaping())


def _open(text: str, seed: int, place: int) -> tuple[Kind, Source]:
    """Return one workload's source with the options of all kinds: tenant, tenants, zipf, priority, ttft, tpot."""
    spec = Spec(text if text.partition(":")[0] in KINDS or not Path(text).is_dir() else f"recording:{text}")
    kind = KINDS.get(spec.kind)
    if kind is None:
        remedy = f"give one of {', '.join(sorted(KINDS))}, or a recording's folder"
        raise ConfigError(f"workload {text!r}: {unknown('kind', spec.kind, KINDS, remedy)}")
    if kind.reads and not spec.path:
        raise ConfigError(f"workload {text!r} names no file; write {spec.kind}:PATH")
    if kind.reads and not Path(spec.path).exists():
        raise ConfigError(f"workload {text!r}: there is no {spec.path}")
    if not kind.reads and spec.path:
        raise ConfigError(f"workload {text!r}: {spec.path!r} is no option; write name=value")
    around = Surroundings(seed, place, lambda words: _open(words, seed, place)[1])
    source = kind.build(spec, around)
    dressed = _dress(spec, around, source)
    is_sorting = spec.choice("sort", ("no", "yes")) == "yes"
    spec.close()
    return kind, _sorted(dressed) if is_sorting else dressed


def _sorted(source: Source) -> Source:
    def in_order(notes: Notes) -> Iterator[Arrival]:
        held = sorted(source(notes), key=lambda arrival: arrival.time)
        if any(arrival.follows is not None for arrival in held):
            raise ConfigError("sort=yes is for requests that come when they do; leave it out here")
        for arrival in held:
            yield replace(arrival, time=arrival.time - held[0].time)

    return in_order


def _dress(spec: Spec, around: Surroundings, source: Source) -> Source:
    """Return the source with a tenant, a priority and objectives for its requests."""
    tenant, priority = spec.text_of("tenant"), spec.count("priority", 0)
    ttft, tpot = (spec.number(name) if name in spec.options else None for name in ("ttft", "tpot"))
    for name in ("ttft", "tpot"):
        spec.text_of(name)
    count, exponent = spec.count("tenants", 0), spec.number("zipf", 0.0, least=0.0)
    if count > 100_000:
        raise ConfigError(f"workload {spec.text!r}: tenants is {count}; give at most 100000")
    if not (tenant or priority or ttft or tpot or count):
        return source
    zipf = Zipf(count, exponent) if count else None

    def dressed(notes: Notes) -> Iterator[Arrival]:
        rng, by_session = around.rng(spec, "tenants"), dict[str, str]()
        for arrival in source(notes):
            own = tenant or arrival.tenant
            if zipf is not None:
                own = f"tenant{zipf.draw(rng)}"
                own = by_session.setdefault(arrival.session, own) if arrival.session else own
            yield replace(
                arrival,
                tenant=own,
                priority=priority or arrival.priority,
                ttft_objective=ttft or arrival.ttft_objective,
                tpot_objective=tpot or arrival.tpot_objective,
            )

    return dressed
