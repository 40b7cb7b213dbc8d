"""A simulation's report: tables for a terminal, and one self-contained HTML page with charts and tables.

Owns: the contents and layout, for one setting or several side by side. Does not: compute figures (summary) or write
files (cli). Invariants: the page has no script, needs no network and follows the light or dark setting; text from users
is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from octavo.simulator import charts, curves
from octavo.simulator.advice import advise_comparison
from octavo.simulator.charts import DARK, LIGHT, RULES, Chart, Line, Mark, palette
from octavo.simulator.columns import METRICS, Columns, Facts, Points, within
from octavo.simulator.goals import Goals
from octavo.simulator.outcomes import ReplicaTotals, SimulatedRun

MAX_TENANT_LINES = 8
MAX_TENANT_ROWS = 20
MAX_ROWS = 64
MAX_DETAILED = 4  # with more cases, the page has no charts of a single case
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
TITLES = {"ttft": "Time to first token", "tpot": "Time per token", "e2e": "End to end", "queue": "Time in the queue"}
LATENCY_CHARTS = (
    ("ttft p50", "Time to first token, median by arrival", "seconds"),
    ("ttft p99", "Time to first token, p99 by arrival", "seconds"),
)
TIME_CHARTS = (
    ("tpot p50", "Time per token, median by arrival", "seconds"),
    ("waiting", "Requests that wait for their first step", "requests"),
    ("running", "Running requests", "requests"),
    ("memory", "KV pool held by running requests", "%"),
    ("batch", "Tokens in a step", "tokens"),
    ("output", "Output tokens", "tokens/s"),
    ("prompt", "Prompt tokens", "tokens/s"),
    ("gap", "Service between the most and the least served tenant", "tokens"),
)


BOUNDS = ("compute", "memory bandwidth", "linear layers", "tokens and rows", "attention", "sampling", "device", "links",
          "copies of blocks", "fixed costs", "host")  # fmt: skip
BOUND_COLOURS = (0, 1, 0, 0, 1, 3, 0, 4, 6, 7, 2)
USES = ("device busy", "compute", "slots", "KV pool", "step tokens")
HEADLINES = ("goodput", "ttft p50", "ttft p99", "tpot p50", "tpot p99", "output tokens/s", "device busy",
             "$ per million output tokens")  # fmt: skip


class Objective(NamedTuple):
    """An objective and what a run reached: the `share` of requests within `bound` seconds, and the statistic's value.

    `statistic` is "" for a bound on each request; then there is no value.
    """

    metric: str
    statistic: str
    bound: float
    share: float
    value: float | None

    @property
    def reached(self) -> str:
        """Return what was reached as a text: the statistic, or the share of requests."""
        return seconds(self.value) if self.value is not None else percent(self.share)


@dataclass(slots=True)
class Case:
    """The figures and curves of one setting's run, for the report. `bands` has charts of this case alone."""

    label: str
    facts: Facts
    curves: dict[str, Points] = field(default_factory=dict)
    services: dict[str, Points] = field(default_factory=dict)
    replicas: list[ReplicaTotals] = field(default_factory=list)
    duration: float = 0.0
    bands: dict[str, dict[str, Points]] = field(default_factory=dict)
    objectives: list[Objective] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    @staticmethod
    def of(label: str, run: SimulatedRun, facts: Facts, goals: Goals | None = None) -> Case:
        """Reduce a run to its figures and curves, and what it reached of its goals."""
        columns, span = Columns.of(run.outcomes), run.duration
        drawn = {f"cdf {name}": curves.distribution(columns.latency(name)) for name in METRICS}
        drawn |= {
            "ttft p50": curves.over_time(columns, "ttft", 50, span),
            "ttft p99": curves.over_time(columns, "ttft", 99, span),
            "tpot p50": curves.over_time(columns, "tpot", 50, span),
            "waiting": curves.waiting(columns, span),
            "running": curves.running(columns, span),
            "memory": curves.memory(run, span),
            "batch": curves.batch(run, span),
            "output": curves.output_rate(columns, span),
            "prompt": curves.prompt_rate(columns, span),
        }
        names = run.outcomes.tenant_names
        listed = [names.index(name) for name in list(facts["tenants"]["by_name"])[:MAX_TENANT_LINES]]
        services: dict[str, Points] = {}
        if len(names) > 1:
            drawn["gap"] = curves.service_gap(columns, listed, span)
            services = {names[tenant]: curves.service_points(columns, tenant, span) for tenant in listed}
        bands = {
            "bounds": curves.bounds_over_time(run, span),
            "waits": curves.waits_over_time(run, span),
            "use": curves.use_over_time(run, span),
            "replicas": curves.replicas_over_time(run, span),
            "transfers": curves.transfers_over_time(run, span),
        }
        return Case(label, facts, drawn, services, run.replicas, span, bands, _objectives(columns, facts, goals))


def _objectives(columns: Columns, facts: Facts, goals: Goals | None) -> list[Objective]:
    if goals is None:
        return []
    wanted = [(name, "", bound) for name, bound in goals.bounds.items()]
    wanted += [(goal.metric, goal.statistic, goal.bound) for goal in goals.goals]
    return [
        Objective(
            metric, statistic, bound, float(within(columns, metric, bound).mean()),
            facts[metric][statistic] if statistic else None,
        )
        for metric, statistic, bound in wanted
    ]  # fmt: skip


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
    peak = replicas["kv_use_most"] if replicas["num_blocks"] else None
    rows += [
        Figure("requests served", facts["requests"]["served"], whole, 0),
        Figure("requests refused", facts["requests"]["refused"], whole, -1),
        Figure("requests/s", through["requests_per_s"], plain, 0),
        Figure("output tokens/s", through["output_tokens_per_s"], plain, 0),
        Figure("prompt tokens/s", through["prompt_tokens_per_s"], plain, 0),
        Figure("device busy", replicas["busy_share"], percent, 0),
        Figure("tokens a step", replicas["tokens_per_step"], plain, 0),
        Figure("step", replicas["step_s"], seconds, 0),
        *_limit_figures(facts["limits"]),
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
    rows += _scaling_figures(facts["scaling"])
    rows += _transfer_figures(facts["transfers"])
    for name, group in facts["groups"].items():
        rows += _group_figures(name, group)
    return [row for row in rows if row.value is not None]


def _scaling_figures(scaling: Facts) -> Iterator[Figure]:
    """Yield the figures of groups that were scaled."""
    for name, group in scaling.get("groups", {}).items():
        of = f"{name}: " if name else ""
        yield Figure(f"{of}replicas ready, mean", group["ready_mean"], plain, 0)
        yield Figure(f"{of}replicas ready, most", group["ready_most"], whole, 0)
        yield Figure(f"{of}replicas started", group["starts"], whole, 0)
        yield Figure(f"{of}replica hours", group["hours"], plain, -1)
        yield Figure(f"{of}replica hours of start-ups", group["starting_hours"], plain, -1)
    if scaling:
        waits = scaling["start_waits"]
        yield Figure("requests queued during a start-up", waits["count"], whole, -1)
        yield Figure("queued during start-ups, mean", waits["mean"], seconds, -1)
        yield Figure("queued during start-ups, p99", waits["p99"], seconds, -1)


def _transfer_figures(transfers: Facts) -> Iterator[Figure]:
    """Yield the figures of KV transfers."""
    if transfers:
        yield Figure("KV transfers", transfers["count"], whole, 0)
        yield Figure("KV transferred, GB", transfers["bytes"] / 1e9, plain, 0)
        for name, title in (("time", "KV transfer"), ("block_wait", "KV waits for blocks"),
                            ("link_wait", "KV waits for the link"), ("gap", "first token to KV arrival")):  # fmt: skip
            yield Figure(f"{title}, mean", transfers[name]["mean"], seconds, -1)
            yield Figure(f"{title}, p99", transfers[name]["p99"], seconds, -1)
        yield Figure("KV ports sending", transfers["sending"], percent, 0)
        yield Figure("KV ports receiving", transfers["receiving"], percent, 0)


def _group_figures(name: str, group: Facts) -> Iterator[Figure]:
    """Yield the figures of one group of replicas."""
    yield Figure(f"{name}: requests", group["requests"], whole, 0)
    yield Figure(f"{name}: ttft p99", group["ttft"]["p99"], seconds, -1)
    yield Figure(f"{name}: tpot p99", group["tpot"]["p99"], seconds, -1)
    yield Figure(f"{name}: device busy", group["busy_share"], percent, 0)
    yield Figure(f"{name}: KV pool held, most", group["kv_use_most"], percent, 0)
    yield Figure(f"{name}: $", group["cost"], plain, 0)


def _limit_figures(limits: Facts) -> Iterator[Figure]:
    """Yield what bounds the time of the devices, and the use of limits."""
    yield Figure("compute used while busy", limits["compute"], percent, 0)
    for name, share in limits["time"].items():
        if share >= 0.0005 and len(limits["time"]) > 1:
            yield Figure(f"time bound by {name}" if name in BOUNDS[:2] else f"time of {name}", share, percent, 0)
    if limits["max_sequences"]:
        yield Figure("sequences a step", limits["sequences_per_step"], plain, 0)
        yield Figure("steps at max_sequences", limits["at_max_sequences"], percent, 0)
        yield Figure("steps at max_batch_tokens", limits["at_max_batch_tokens"], percent, 0)
    for name, count in limits["waiting"].items():
        yield Figure(f"waiting for {name.replace('_', ' ')}, mean", count, plain, 0)


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


def advice_lines(cases: Sequence[Case]) -> list[str]:
    """Return the advice on all cases, each line once; a line that is not of every case names its cases."""
    labels: dict[str, list[str]] = {}
    for case in cases:
        for line in case.advice:
            labels.setdefault(line, []).append(case.label)
    lines = [line if len(of) == len(cases) else f"{', '.join(of)}: {line}" for line, of in labels.items()]
    return [*lines, *advise_comparison({case.label: case.facts for case in cases})]


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


def page(
    title: str,
    cases: Sequence[Case],
    settings: Mapping[str, Sequence[str]],
    remarks: Sequence[str],
    advice: Sequence[str],
) -> str:
    """Return the HTML page. `settings` has one text for all cases, or one for each case."""
    heads = ["value"] if all(len(texts) == 1 for texts in settings.values()) else [case.label for case in cases]
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="remark">{escape(remark)}</p>' for remark in remarks),
        _headline(cases),
        *(['<ul class="advice">', *(f"<li>{escape(line)}</li>" for line in advice), "</ul>"] if advice else []),
        *_section("Latencies", _latency_charts(cases)),
        *_section("What limits", _limit_charts(cases)),
        *_section("Over time", _time_charts(cases)),
        '<div class="top"><section><h2>Figures</h2>',
        _figures(cases),
        "</section><section><h2>Settings</h2>",
        _table(("setting", *heads), [(name, *texts) for name, texts in settings.items()], style="words"),
        "</section></div>",
        *_tenants(cases),
        *_replicas(cases),
        _LEGEND,
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n' + "\n".join(
        [*body, "</body></html>\n"]
    )


def _section(title: str, drawn: Iterable[Chart]) -> list[str]:
    parts = [charts.draw(chart) for chart in drawn]
    return [f'<h2>{title}</h2><div class="charts">', *parts, "</div>"] if parts else []


def _headline(cases: Sequence[Case]) -> str:
    """Return the most important figures, in large letters: one row of tiles per case."""
    rows = []
    for number, case in enumerate(cases):
        known = {figure.name: figure.text for figure in figures(case.facts)}
        bounds = {f"{one.metric} {one.statistic}": one for one in case.objectives}
        bounds |= {f"{one.metric} p99": one for one in case.objectives if not one.statistic}
        tiles = []
        for name in HEADLINES:
            if name in known:
                bound = bounds.get(name)
                note = f"{percent(bound.share)} ≤ {seconds(bound.bound)}" if bound is not None else ""
                short = name.replace("per million", "/ M")
                tiles.append(f"<div><dt>{short}</dt><dd>{known[name]}</dd><small>{note}</small></div>")
        head = f'<h3 style="color:var(--c{number % len(LIGHT)})">{escape(case.label)}</h3>' if len(cases) > 1 else ""
        rows.append(f'{head}<dl class="tiles">{"".join(tiles)}</dl>')
    return "".join(rows)


def _latency_charts(cases: Sequence[Case]) -> Iterator[Chart]:
    for name in METRICS:
        lines, marks = _lines(cases, f"cdf {name}"), _marks(cases, name)
        yield Chart(TITLES[name], "seconds", "% of requests", lines, is_log=True, top=100.0, marks=marks)
    for name, title, unit in LATENCY_CHARTS:
        yield _time_chart(cases, name, title, unit)


def _marks(cases: Sequence[Case], metric: str) -> list[Mark]:
    """Return a mark for each objective on a latency: its bound, and what each case reached."""
    marks = []
    for first in dict.fromkeys(one[:3] for case in cases for one in case.objectives if one.metric == metric):
        reached = [
            (one.reached, number)
            for number, case in enumerate(cases[:MAX_DETAILED])
            for one in case.objectives
            if one[:3] == first
        ]
        marks.append(Mark(first[2], [(_bound_text(*first[1:]), None), *reached], is_upright=True))
    return marks


def _limit_charts(cases: Sequence[Case]) -> Iterator[Chart]:
    """Yield, for each case, its devices' time by what bounds it, what requests wait for, and how full it is."""
    for case in cases if len(cases) <= MAX_DETAILED else ():
        of = f", {case.label}" if len(cases) > 1 else ""
        known = case.bands.get("bounds", {})
        colours = dict(zip(BOUNDS, BOUND_COLOURS, strict=True))
        names = [*(name for name in BOUNDS if name in known), *(name for name in known if name not in colours)]
        lines = [Line(name, known[name], colours.get(name, index)) for index, name in enumerate(names)]
        if lines:
            yield Chart(f"Devices' time by what bounds it{of}", "time, s", "%", lines, top=100.0, is_stacked=True)
        waits = case.bands.get("waits", {})
        lines = [Line(name.replace("_", " "), points, index) for index, (name, points) in enumerate(waits.items())]
        if known:
            lines = lines or [Line("none", [(0.0, 0.0), (case.duration, 0.0)])]
            yield Chart(f"Requests that wait, by reason{of}", "time, s", "requests", lines, is_stacked=True)
        used = case.bands.get("use", {})
        lines = [Line(name, used[name], index) for index, name in enumerate(USES) if name in used]
        if lines:
            yield Chart(f"How full it is{of}", "time, s", "% of each limit", lines, top=100.0)


def _time_charts(cases: Sequence[Case]) -> Iterator[Chart]:
    detailed = cases if len(cases) <= MAX_DETAILED else ()
    for case in detailed:
        of = f", {case.label}" if len(cases) > 1 else ""
        for band, title, unit in (("replicas", "Replicas", "replicas"), ("transfers", "KV transfers", "requests")):
            named = enumerate(case.bands.get(band, {}).items())
            lines = [Line(name, points, index) for index, (name, points) in named]
            if lines:
                yield Chart(f"{title}{of}", "time, s", unit, lines)
    for name, title, unit in TIME_CHARTS:
        if name == "waiting" and len(cases) == 1 and cases[0].bands.get("bounds"):
            continue  # the chart by reason has it
        if any(case.curves.get(name) for case in cases):
            yield _time_chart(cases, name, title, unit)
    for case in detailed:
        if case.services:
            named = enumerate(case.services.items())
            lines = [Line(name or "(none)", points, number) for number, (name, points) in named]
            yield Chart(f"Service by tenant, {case.label}", "time, s", "tokens", lines)


def _bound_text(statistic: str, bound: float) -> str:
    return f"{statistic} ≤ {seconds(bound)}".lstrip()


def _time_chart(cases: Sequence[Case], name: str, title: str, unit: str) -> Chart:
    """Return a chart of one curve of each case, with the objectives on this statistic, or on each request."""
    metric, _, statistic = name.partition(" ")
    known = [one for case in cases for one in case.objectives]
    bounds = {one.bound for one in known if one.metric == metric and one.statistic in ("", statistic)}
    marks = [Mark(bound, [(_bound_text("", bound), None)]) for bound in sorted(bounds)]
    return Chart(title, "time, s", unit, _lines(cases, name), marks=marks)


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
            (f"{number} {one.group}".rstrip(), whole(one.requests),
             percent(one.busy_s / up_s if (up_s := case.duration if one.up_s is None else one.up_s) else 0.0),
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
<p>ttft: from arrival to the first token. tpot: from the first token to the last, over the tokens after the first. e2e:
from arrival to the last token. queue: from arrival to the first step that computed any of it. Refused requests have
no latency and meet no objective. Service of a tenant: prompt tokens, and twice the output tokens. KV pool held:
blocks of running requests; those kept for their prefix alone are not counted. Devices' time: busy while a step runs,
divided by what bounds the parts of the step sampled each second; host is the time in which a device waits for the
scheduler; the rest is idle. Slots: sequences in a step, of max_sequences. Step tokens: tokens in a step, of
max_batch_tokens. Compute: the time that a step's operations alone would take at the rate that kernels reach. Times
come from a cost model: the scheduler's decisions are the real ones, the durations of its steps are predicted.</p>"""

_STYLE = (
    f":root{{color-scheme:light dark;--bg:#fff;--panel:#f6f7f8;--fg:#1c1e21;--muted:#5d636b;--grid:#e3e5e8;"
    f"--accent:#0072b2;--warn:#c8500a;{palette(LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{--bg:#17191c;--panel:#1f2226;--fg:#e8eaed;--muted:#a2a8b0;"
    f"--grid:#33373d;--accent:#56b4e9;--warn:#f08a4b;{palette(DARK)}}}}}"
    "body{margin:0 auto;max-width:1440px;padding:16px 24px 48px;background:var(--bg);color:var(--fg);"
    "font:14px/1.5 system-ui,sans-serif}h1{font-size:22px;margin:8px 0 4px}h2{font-size:16px;margin:28px 0 8px}"
    "h3{font-size:13px;margin:14px 0 4px;color:var(--muted)}p{max-width:90ch;color:var(--muted)}"
    ".top{display:flex;flex-wrap:wrap;gap:0 56px}.top section{min-width:0;max-width:100%}"
    ".words th,.words td{text-align:left;white-space:normal}"
    ".remark{margin:2px 0;overflow-wrap:anywhere}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}th{color:var(--muted);font-weight:500}b{color:var(--accent)}"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(150px,45%),1fr));gap:8px 14px;margin:8px 0}"
    "dt{color:var(--muted);font-size:12px}"
    "dd{margin:0;font-size:24px;font-weight:600;line-height:1.25;font-variant-numeric:tabular-nums}"
    "small{color:var(--muted)}.advice{margin:14px 0;padding:10px 16px 10px 34px;background:var(--panel);"
    "border-left:4px solid var(--warn);border-radius:4px;max-width:110ch}.advice li{margin:2px 0}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:14px}"
    ".charts svg{background:var(--panel);border-radius:8px;width:100%;height:auto;padding:6px;box-sizing:border-box}"
    "@media(max-width:600px){dd{font-size:17px}.tiles{grid-template-columns:repeat(3,1fr);gap:4px 10px}}"
    f"{RULES}"
)
