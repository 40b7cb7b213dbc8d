"""What `octavo simulate` prints and writes beside its report: tables, remarks, a line for each request.

Owns: the words. Does not: compute.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence

from octavo.core.request import FinishReason
from octavo.errors import ConfigError
from octavo.simulator.outcomes import NEVER, SimulatedRun
from octavo.simulator.report import Case, figures, seconds
from octavo.simulator.summary import METRICS
from octavo.simulator.workloads import KINDS

_POINTS = ("mean", "p50", "p90", "p95", "p99", "max")
_COMPARED = ("mean", "p99")
_COLUMNS = (
    "index", "tenant", "replica", "arrival", "start", "first_token", "end", "prompt_tokens", "output_tokens",
    "cached_tokens", "preemptions", "restarts", "reason",
)  # fmt: skip


def lines(settings: Mapping[str, str], remarks: Sequence[str], cases: Sequence[Case]) -> Iterator[str]:
    """Yield the lines that a terminal shows."""
    for name in ("workload", "model", "device", "KV pool", "cost model", "replicas"):
        yield f"{name:12}{settings[name]}"
    for remark in remarks:
        yield f"{'note':12}{remark}"
    yield ""
    if len(cases) == 1:
        yield from _spreads(cases[0])
        yield ""
    rows = [row for row in figures(cases[0].facts) if len(cases) > 1 or row[0].split()[0] not in METRICS]
    shown = [row for row in rows if row[0].split()[0] not in METRICS or row[0].split()[1] in _COMPARED]
    columns = [
        {name: write(value) for name, value, write, _ in figures(case.facts) if value is not None} for case in cases
    ]
    if len(cases) > 1:
        yield f"{'':28}" + "".join(f"{case.label[:14]:>16}" for case in cases)
    for name, *_ in shown:
        yield f"{name:28}" + "".join(f"{column.get(name, '-'):>16}" for column in columns)


def _spreads(case: Case) -> Iterator[str]:
    yield f"{'':12}" + "".join(f"{point:>12}" for point in _POINTS) + "   mean within (95 %)"
    for name in METRICS:
        spread = case.facts[name]
        if spread["count"]:
            within = spread["mean_within"]
            shown = "" if within is None else f"   +- {seconds(within)}"
            yield f"{name:12}" + "".join(f"{seconds(spread[point]):>12}" for point in _POINTS) + shown


def remarks(notes: Mapping[str, int], cases: Sequence[Case]) -> list[str]:
    """Return remarks on what was left out, changed or refused."""
    told = [f"{count:,} {words}" for words, count in notes.items()]
    for case in cases:
        requests = case.facts["requests"]
        if requests["refused"]:
            told.append(f"{case.label}: {requests['refused']:,} of {requests['came']:,} requests were refused")
    return told


def workload_help() -> Iterator[str]:
    """Yield lines about the kinds of workloads and their options."""
    yield "KIND:option=value,...            generated"
    yield "KIND:FILE,option=value,...       read, plain or gzipped"
    yield ""
    for name, kind in KINDS.items():
        yield f"  {name:13}{'FILE  ' if kind.is_file else ''}{kind.help}"
    yield ""
    yield "generated   requests=1000, duration=S; prompt= and output= with a number, fixed(n), uniform(a,b),"
    yield "            lognormal(median,sigma), normal(mean,sd), exponential(mean), geometric(mean),"
    yield "            pareto(least,alpha), quantiles(0:8,50:200,100:4K); or lengths=azure_conv, azure_code,"
    yield "            or the pairs of a trace, lengths=azure:FILE;"
    yield "            prefix=N tokens shared in each of groups=N, group_zipf=X, group_tenants=yes"
    yield "all         tenant=NAME, tenants=N, zipf=X, priority=N, ttft=S, tpot=S (objectives); traces: sort=yes"


def write_requests(path: str, run: SimulatedRun) -> None:
    """Write a CSV line for each request, in order of arrival; times in seconds, empty if not reached."""
    out = run.outcomes
    order = sorted(range(len(out)), key=lambda place: (out.arrivals[place], out.indices[place]))
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            for place in order:
                times = (out.arrivals[place], out.starts[place], out.first_tokens[place], out.ends[place])
                writer.writerow((
                    out.indices[place], out.tenant_names[out.tenants[place]], out.replicas[place],
                    *("" if time == NEVER else f"{time:.6f}" for time in times),
                    out.prompt_tokens[place], out.output_tokens[place], out.cached[place], out.preemptions[place],
                    out.restarts[place], FinishReason(out.reasons[place]).name.lower(),
                ))  # fmt: skip
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give a path in a folder that exists") from None
