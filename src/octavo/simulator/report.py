"""A simulation's report: tables for a terminal, and one self-contained HTML page with tables and charts.

Owns: the contents and layout, for one setting or several side by side. Does not: compute figures (summary) or write
files (cli). Invariants: the page has no script, needs no network and follows the light or dark setting; text from users
is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from octavo.simulator import charts, summary
from octavo.simulator.charts import DARK, LIGHT, RULES, Chart, Line, palette
from octavo.simulator.outcomes import ReplicaTotals, SimulatedRun
from octavo.simulator.summary import METRICS, Columns, Facts, Points

MAX_TENANT_LINES = 8
MAX_TENANT_ROWS = 20
MAX_ROWS = 64
MAX_CASES_BY_TENANT = 4  # with more cases, the page has no charts by tenant
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
TITLES = {"ttft": "Time to first token", "tpot": "Time per token", "e2e": "End to end", "queue": "Time in the queue"}
TIME_CHARTS = (
    ("ttft p50", "Time to first token, median by arrival", "seconds"),
    ("ttft p99", "Time to first token, p99 by arrival", "seconds"),
    ("tpot p50", "Time per token, median by arrival", "seconds"),
    ("waiting", "Requests that wait for their first step", "requests"),
    ("running", "Running requests", "requests"),
    ("memory", "KV pool held by running requests", "%"),
    ("batch", "Tokens in a step", "tokens"),
    ("output", "Output tokens", "tokens/s"),
    ("prompt", "Prompt tokens", "tokens/s"),
    ("gap", "Service between the most and the least served tenant", "tokens"),
)


@dataclass(slots=True)
class Case:
    """The figures and curves of one setting's run, for the report."""

    label: str
    facts: Facts
    curves: dict[str, Points] = field(default_factory=dict)
    services: dict[str, Points] = field(default_factory=dict)
    replicas: list[ReplicaTotals] = field(default_factory=list)
    duration: float = 0.0

    @staticmethod
    def of(label: str, run: SimulatedRun, facts: Facts) -> Case:
        """Reduce a run to its figures and curves."""
        columns, span = Columns.of(run.outcomes), run.duration
        curves = {f"cdf {name}": summary.distribution(columns.latency(name)) for name in METRICS}
        curves |= {
            "ttft p50": summary.over_time(columns, "ttft", 50, span),
            "ttft p99": summary.over_time(columns, "ttft", 99, span),
            "tpot p50": summary.over_time(columns, "tpot", 50, span),
            "waiting": summary.waiting(columns, span),
            "running": summary.running(columns, span),
            "memory": summary.memory(run, span),
            "batch": summary.batch(run, span),
            "output": summary.output_rate(columns, span),
            "prompt": summary.prompt_rate(columns, span),
        }
        names = run.outcomes.tenant_names
        listed = [names.index(name) for name in list(facts["tenants"]["by_name"])[:MAX_TENANT_LINES]]
        services: dict[str, Points] = {}
        if len(names) > 1:
            curves["gap"] = summary.service_gap(columns, listed, span)
            services = {names[tenant]: summary.service_points(columns, tenant, span) for tenant in listed}
        return Case(label, facts, curves, services, run.replicas, span)


class Figure(NamedTuple):
    """A figure to compare. `sign` is 1 if more is better, -1 if less is better, else 0."""

    name: str
    value: float | None
    format: Callable[[float], str]
    sign: int

    @property
    def text(self) -> str:
        """Return the value with its unit; "" if there is no value."""
        return "" if self.value is None else self.format(self.value)


def figures(facts: Facts) -> list[Figure]:
    """Return the figures of a run that are known."""
    rows = [Figure(f"{name} {point}", facts[name][point], seconds, -1) for name in METRICS for point in STATISTICS]
    through, replicas, cache = facts["throughput"], facts["replicas"], facts["cache"]
    if "goodput" in facts:
        rows.append(Figure("goodput", facts["goodput"]["share"], percent, 1))
        rows.append(Figure("goodput, requests/s", facts["goodput"]["requests_per_s"], plain, 1))
    peak = replicas["peak_blocks_used"] / replicas["num_blocks"] if replicas["num_blocks"] else None
    rows += [
        Figure("requests served", facts["requests"]["served"], whole, 0),
        Figure("requests refused", facts["requests"]["refused"], whole, -1),
        Figure("requests/s", through["requests_per_s"], plain, 0),
        Figure("output tokens/s", through["output_tokens_per_s"], plain, 0),
        Figure("prompt tokens/s", through["prompt_tokens_per_s"], plain, 0),
        Figure("device busy", replicas["busy_share"], percent, 0),
        Figure("tokens a step", replicas["tokens_per_step"], plain, 0),
        Figure("step", replicas["step_s"], seconds, 0),
        Figure("KV pool held, mean while busy", replicas["kv_use_mean"], percent, 0),
        Figure("KV pool held, most", peak, percent, 0),
        Figure("prefix cache hits", cache["hit_rate"], percent, 1),
        Figure("preemptions", facts["preemptions"]["count"], whole, -1),
        Figure("requests restarted", facts["preemptions"]["restarts"], whole, -1),
    ]
    if facts["tenants"]["count"] > 1:
        rows.append(Figure("Jain's index of service", facts["tenants"]["jain_service"], plain, 0))
    if facts["cost"]["price_per_hour"]:
        rows.append(Figure("$ per million output tokens", facts["cost"]["per_million_output_tokens"], plain, -1))
        rows.append(Figure("$ per thousand requests", facts["cost"]["per_thousand_requests"], plain, -1))
    return [row for row in rows if row.value is not None]


def seconds(value: float) -> str:
    """Return a duration in a fitting unit."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:,.4g} s" if abs(value) < 1e4 else f"{value:,.0f} s"


def percent(value: float) -> str:
    """Return a share in per cent."""
    return f"{100 * value:.1f} %"


def plain(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.4g}"


def whole(value: float) -> str:
    """Return a count."""
    return f"{value:,.0f}"


# --- for a terminal


def latency_table(facts: Facts) -> Iterator[str]:
    """Yield a table of one run's latencies."""
    points = (*STATISTICS, "max")
    yield f"{'':12}" + "".join(f"{point:>12}" for point in points) + "   mean within (95 %)"
    for name in METRICS:
        spread = facts[name]
        if spread["count"]:
            within = "" if spread["mean_within"] is None else f"   +- {seconds(spread['mean_within'])}"
            yield f"{name:12}" + "".join(f"{seconds(spread[point]):>12}" for point in points) + within


def comparison_table(
    cases: Sequence[Case], heads: Sequence[str] = (), width: int = 16, points: Collection[str] = STATISTICS
) -> Iterator[str]:
    """Yield the lines of a table with a column for each case; `points` names the statistics of latencies to show."""
    if heads:
        yield f"{'':28}" + "".join(f"{head:>{width}}" for head in heads)
    columns = [{figure.name: figure.text for figure in figures(case.facts)} for case in cases]
    for name in dict.fromkeys(name for column in columns for name in column):
        metric, _, point = name.partition(" ")
        if metric not in METRICS or point in points:
            yield f"{name:28}" + "".join(f"{column.get(name, '-'):>{width}}" for column in columns)


# --- the page


def page(title: str, cases: Sequence[Case], settings: Mapping[str, str], remarks: Sequence[str]) -> str:
    """Return the HTML page."""
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="remark">{escape(remark)}</p>' for remark in remarks),
        '<div class="top"><section><h2>Figures</h2>',
        _figures(cases),
        "</section><section><h2>Settings</h2>",
        _table(("setting", "value"), [(name, value) for name, value in settings.items()], style="words"),
        "</section></div><h2>Latencies</h2>",
        '<div class="charts">',
        *(charts.draw(chart) for chart in _latency_charts(cases)),
        "</div>",
        "<h2>Over time</h2>",
        '<div class="charts">',
        *(charts.draw(chart) for chart in _time_charts(cases)),
        "</div>",
        *_tenants(cases),
        *_replicas(cases),
        _LEGEND,
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n' + "\n".join(
        [*body, "</body></html>\n"]
    )


def _latency_charts(cases: Sequence[Case]) -> Iterator[Chart]:
    for name in METRICS:
        lines = _lines(cases, f"cdf {name}")
        yield Chart(TITLES[name], "seconds", "% of requests", lines, is_log=True, top=100.0)


def _time_charts(cases: Sequence[Case]) -> Iterator[Chart]:
    for name, title, unit in TIME_CHARTS:
        lines = _lines(cases, name)
        if any(line.points for line in lines):
            yield Chart(title, "time, s", unit, lines)
    for case in cases if len(cases) <= MAX_CASES_BY_TENANT else ():
        if case.services:
            named = enumerate(case.services.items())
            lines = [Line(name or "(none)", points, number) for number, (name, points) in named]
            yield Chart(f"Service by tenant, {case.label}", "time, s", "tokens", lines)


def _lines(cases: Sequence[Case], name: str) -> list[Line]:
    return [Line(case.label, case.curves.get(name, []), number) for number, case in enumerate(cases)]


def _figures(cases: Sequence[Case]) -> str:
    """Return a table with a row per figure and a column per case. A row's best value is bold if the values differ."""
    columns = [{figure.name: figure for figure in figures(case.facts)} for case in cases]
    rows = []
    for name, first in columns[0].items():
        values = [column[name].value for column in columns if name in column]
        known = [value for value in values if value is not None]
        best = first.format(max(known) if first.sign > 0 else min(known))
        are_unlike = any(first.format(value) != best for value in known)
        texts = [column[name].text if name in column else "" for column in columns]
        rows.append((
            escape(name),
            *(f"<b>{text}</b>" if first.sign and text == best and are_unlike else text for text in texts),
        ))  # fmt: skip
    return _table(("", *(escape(case.label) for case in cases)), rows, is_escaped=True)


def _tenants(cases: Sequence[Case]) -> list[str]:
    if cases[0].facts["tenants"]["count"] < 2:
        return []
    parts = ["<h2>Tenants</h2>"]
    for case in cases:
        rows = [
            (name or "(none)", whole(one["requests"]), whole(one["service"]), _or_dash(one["ttft_mean"]),
             _or_dash(one["ttft_p99"]), _or_dash(one["e2e_mean"]))
            for name, one in list(case.facts["tenants"]["by_name"].items())[:MAX_TENANT_ROWS]
        ]  # fmt: skip
        parts.append(f"<h3>{escape(case.label)}</h3>")
        parts.append(_table(("tenant", "requests", "service", "ttft mean", "ttft p99", "e2e mean"), rows))
    return parts


def _replicas(cases: Sequence[Case]) -> list[str]:
    if len(cases[0].replicas) < 2:
        return []
    parts = ["<h2>Replicas</h2>"]
    for case in cases:
        rows = [
            (str(number), whole(one.requests), percent(one.busy_s / case.duration if case.duration else 0.0),
             whole(one.steps), whole(one.output_tokens), percent(one.hit_tokens / (one.queried_tokens or 1)),
             whole(one.preemptions), whole(one.failures))
            for number, one in enumerate(case.replicas[:MAX_ROWS])
        ]  # fmt: skip
        parts.append(f"<h3>{escape(case.label)}</h3>")
        heads = ("replica", "requests", "busy", "steps", "output tokens", "cache hits", "preemptions", "failures")
        parts.append(_table(heads, rows))
    return parts


def _or_dash(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], *, is_escaped: bool = False, style: str = "") -> str:
    def shown(cell: Any) -> str:
        return str(cell) if is_escaped else escape(str(cell))

    head = "".join(f"<th>{shown(cell)}</th>" for cell in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{shown(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide {style}"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


_LEGEND = """<h2>What the words mean</h2>
<p>ttft: from arrival to the first token. tpot: from the first token to the last, over the tokens after the first.
e2e: from arrival to the last token. queue: from arrival to the first step that computed any of it. Refused requests
have no latency and meet no objective. Service of a tenant: prompt tokens, and twice the output tokens. KV pool held:
blocks of running requests; those kept for their prefix alone are not counted. Times come from a cost model: the
scheduler's decisions are the real ones, the durations of its steps are predicted.</p>"""

_STYLE = (
    f":root{{color-scheme:light dark;--bg:#fff;--panel:#f6f7f8;--fg:#1c1e21;--muted:#5d636b;--grid:#e3e5e8;"
    f"--accent:#0072b2;{palette(LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{--bg:#17191c;--panel:#1f2226;--fg:#e8eaed;--muted:#a2a8b0;"
    f"--grid:#33373d;--accent:#56b4e9;{palette(DARK)}}}}}"
    "body{margin:0 auto;max-width:1440px;padding:16px 24px 48px;background:var(--bg);color:var(--fg);"
    "font:14px/1.5 system-ui,sans-serif}h1{font-size:22px;margin:8px 0 4px}h2{font-size:16px;margin:28px 0 8px}"
    "h3{font-size:13px;margin:14px 0 4px;color:var(--muted)}p{max-width:90ch;color:var(--muted)}"
    ".top{display:flex;flex-wrap:wrap;gap:0 56px}.top section{min-width:0;max-width:100%}"
    ".words th,.words td{text-align:left;white-space:normal}"
    ".remark{margin:2px 0}.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}th{color:var(--muted);font-weight:500}b{color:var(--accent)}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:14px}"
    ".charts svg{background:var(--panel);border-radius:8px;width:100%;height:auto;padding:6px;box-sizing:border-box}"
    f"{RULES}"
)
