"""How `octavo top` looks: one snapshot of figures as lines for a terminal of any size.

Owns: the layout, bars, sparklines, orders of the running requests. Does not: know where the figures come from.
Names of requests, tenants and models are untrusted, so their control characters are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 24
NAME_WIDTHS = (16, 44)
NUM_WAITING = 5
_LEVELS = " ▁▂▃▄▅▆▇█"
_WIDE = 116  # columns from which the sparklines fit beside the bars
_Row = Mapping[str, Any]
# Order of the running requests -> its sort key, greatest first.
ORDERS: dict[str, Callable[[_Row], float]] = {
    "age": lambda row: row["age_s"],
    "outputs": lambda row: row["outputs"],
    "tokens": lambda row: row["computed"],
    "progress": lambda row: row["outputs"] / row["max_tokens"] if row["max_tokens"] else 0.0,
}


@dataclass(slots=True)
class View:
    """What the user chose."""

    order: str = "age"
    first: int = 0
    is_paused: bool = False
    is_live: bool = True

    def next_order(self) -> None:
        """Sort by the next figure."""
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]


def screen(figures: _Row, view: View, width: int, height: int) -> RenderableType:
    """Return the whole screen; a live view is cut to `height` lines."""
    lines = [_requests_line(figures["requests"]), _steps_line(figures), _latency_line(figures["latency"])]
    text = [part for line in lines for part in wrap(line, width, subsequent_indent=" " * 11)]
    bars, lines_of_bars = _bars(figures, width)
    parts: list[RenderableType] = [_headline(figures["server"], view), bars, Text("\n".join(text))]
    room = height - 1 - lines_of_bars - len(text) - 3 if view.is_live else len(figures["running"]) + NUM_WAITING + 1
    waiting = figures["waiting"][: max(0, min(NUM_WAITING, room // 2))]
    if waiting:
        parts.append(_waiting_table(waiting, figures["requests"]["waiting"], width))
        room -= len(waiting) + 1
    parts.append(_running_table(figures["running"], view, max(1, room), width))
    if view.is_live:
        parts.append(_keys_line(view))
    return Group(*parts)


def _headline(server: _Row, view: View) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(plain(server["model"]), style="bold")
    line.append(f"  {server['url']}  ")
    is_well = server["state"] == "ready"
    line.append(plain(server["state"]), style="green" if is_well else "bold red")
    line.append(f"  up {_duration(server['uptime_s'])}")
    about = [server["device"], server["policy"], f"epoch {server['epoch']}"]
    if server["restarts"] or server["api_restarts"]:
        about.append(f"restarts: engine {server['restarts']}, api {server['api_restarts']}")
    line.append("  " + "  ".join(word for word in about if word), style="dim")
    if view.is_paused:
        line.append("  PAUSED", style="bold yellow")
    return line


def _bars(figures: _Row, width: int) -> tuple[RenderableType, int]:
    """Return bars and sparklines of the last minute, beside them if there is room, else below; and their lines."""
    is_wide = width >= _WIDE
    levels, courses = _levels(figures), _courses(figures)
    grid = Table.grid(padding=(0, 1))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    beside = courses if is_wide else ()
    for place, (name, used, most, told) in enumerate(levels):
        share = used / most if most else 0.0
        course = _course(*beside[place], width - _WIDE + 12) if place < len(beside) else ""
        level = Text(bar(share, BAR_WIDTH if is_wide else BAR_WIDTH // 2), style=_heat(share))
        grid.add_row(name, level, f"{100 * share:3.0f}% {told}", course)
    if is_wide:
        return grid, len(levels)
    below = Text("\n").join([_course(*course, width - 26) for course in courses])
    return Group(grid, below), len(levels) + len(courses)


def _levels(figures: _Row) -> list[tuple[str, float, float, str]]:
    pool, requests, server, steps = (figures[name] for name in ("pool", "requests", "server", "steps"))
    slots, tokens = server["max_sequences"], server["max_batch_tokens"]
    held = f"{pool['held']:,} of {pool['blocks']:,} blocks, {pool['cached']:,} cached"
    levels = [
        ("KV", pool["held"], pool["blocks"], held),
        ("sequences", requests["running"], slots, f"{requests['running']:,} of {slots:,}"),
        ("step", steps["mean_tokens"], tokens, f"{steps['mean_tokens']:,.0f} of {tokens:,} tokens"),
    ]
    if pool["host_blocks"]:
        told = f"{pool['host_held']:,} of {pool['host_blocks']:,} blocks"
        levels.append(("host KV", pool["host_held"], pool["host_blocks"], told))
    return levels


def _courses(figures: _Row) -> list[tuple[str, float, Sequence[float]]]:
    rates, history = figures["rates"], figures["history"]
    return [
        ("prompt tok/s", rates["prompt_tokens_per_s"], history["prompt"]),
        ("output tok/s", rates["output_tokens_per_s"], history["output"]),
        ("waiting", figures["requests"]["waiting"], history["waiting"]),
    ]


def _course(name: str, value: float, values: Sequence[float], width: int) -> Text:
    return Text.assemble(f"{name:>12} {value:>9,.0f} ", (sparkline(values, max(8, min(60, width))), "cyan"))


def _requests_line(requests: _Row) -> str:
    reasons = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in requests["waiting_by_reason"].items())
    ended = ", ".join(f"{count:,} {name}" for name, count in requests["finished"].items()) or "none"
    line = f"requests   {requests['running']:,} running, {requests['waiting']:,} waiting"
    line += f" ({reasons})" if reasons else ""
    line += f", {requests['swapped']:,} swapped out" if requests["swapped"] else ""
    line += f"   since start: ended: {ended}, preemptions {requests['preemptions']:,}"
    if requests["hit_share"] is not None:
        line += f", cache hits {100 * requests['hit_share']:.0f}%"
    if requests["drafted_tokens"]:
        line += f", drafts accepted {100 * requests['accepted_tokens'] / requests['drafted_tokens']:.0f}%"
    if requests["failed_steps"]:
        line += f", FAILED STEPS {requests['failed_steps']:,}"
    return line


def _steps_line(figures: _Row) -> str:
    rates, steps = figures["rates"], figures["steps"]
    parts = "  ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in steps["parts_s"].items())
    line = f"steps      {rates['steps_per_s']:,.1f}/s, busy {100 * rates['busy']:.0f}%   mean ms: {parts}"
    return f"{line}   {_quantiles(steps['step_s'])} ms"


def _latency_line(latency: _Row) -> str:
    names = {"ttft_s": "first token", "gap_s": "per token", "e2e_s": "end to end", "queue_s": "queue"}
    known = [f"{said} {_quantiles(latency[name])}" for name, said in names.items() if name in latency]
    return "latency    " + ("   ".join(known) + " ms" if known else "-")


def _quantiles(figures: _Row) -> str:
    known = [(name, figures.get(name)) for name in ("p50", "p90", "p99")]
    return " ".join(f"{name} {_ms(value)}" for name, value in known if value is not None) or "-"


def _waiting_table(waiting: Sequence[_Row], total: int, width: int) -> Table:
    rows = []
    for row in waiting:
        why = row["reason"].replace("_", " ")
        if row["needed"] or row["available"]:
            why += f": needs {row['needed']:,}, {row['available']:,} there"
        cells = (plain(row["name"]), plain(row["tenant"]), _duration(row["waited_s"]), f"{row['tokens']:,}", why)
        rows.append(cells)
    return _table((f"waiting, first of {total:,}", "tenant", "waited", "tokens", "why"), rows, width)


def _running_table(running: Sequence[_Row], view: View, room: int, width: int) -> Table:
    ordered = sorted(running, key=ORDERS[view.order], reverse=True)
    view.first = max(0, min(view.first, len(ordered) - room))
    rows = []
    for row in ordered[view.first : view.first + room]:
        name = plain(row["name"]) + (f" #{row['choice']}" if row["choice"] else "")
        done, most = row["computed"], row["prompt"]
        if row["phase"] == "decode":
            done, most = row["outputs"], row["max_tokens"]
        told = f"{done:,}" + (f" of {most:,}" if most else "")
        progress = bar(done / most, BAR_WIDTH // 2) if most else ""
        rows.append((name, plain(row["tenant"]), _duration(row["age_s"]), row["phase"], progress, told))
    return _table((f"running, by {view.order}", "tenant", "age", "phase", "progress", "tokens"), rows, width)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Return rows below a heading. The first column gets the width that the others leave; empty ones are left out."""
    kept = [place for place in range(len(columns)) if place == 0 or not rows or any(row[place] for row in rows)]
    others = sum(max(len(columns[place]), *(len(row[place]) for row in rows), 0) + 2 for place in kept[1:])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="reverse")
    for place in kept:
        table.add_column(columns[place], no_wrap=True, overflow="ellipsis")
    table.columns[0].width = max(NAME_WIDTHS[0], min(NAME_WIDTHS[1], width - others - 2))
    for row in rows:
        table.add_row(*(row[place] for place in kept))
    return table


def _keys_line(view: View) -> Text:
    return Text(
        f"q quit  p {'go on' if view.is_paused else 'pause'}  s sort ({view.order})  ↑ ↓ PgUp PgDn scroll",
        style="dim",
        no_wrap=True,
    )


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """Return a share from 0 to 1 as a bar."""
    full = max(0, min(width, round(share * width)))
    return "█" * full + "░" * (width - full)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values as a line of small bars; each step of height is an eighth of the greatest."""
    shown = values[-width:]
    most = max(shown, default=0)
    return "".join(_LEVELS[min(8, int(8 * value / most) + (value > 0)) if most else 0] for value in shown).rjust(width)


def plain(text: object) -> str:
    """Return untrusted text without characters that would move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def _heat(share: float) -> str:
    return "red" if share >= 0.9 else "yellow" if share >= 0.7 else "green"


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} m"
