"""The screen and keyboard of `octavo top`: draws one snapshot of figures for any terminal size.

Owns: the layout; bars; sparklines; sort orders of running requests; the terminal's mode, which is always restored.
Does not: fetch figures (top does).
Names of requests, tenants and models are untrusted, so their control characters are removed.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.cli.terminal import duration_text

BAR_WIDTH = 24
NAME_WIDTHS = (16, 44)
NUM_WAITING = 5
_LEVELS = " ▁▂▃▄▅▆▇█"
_WIDE = 116  # minimum columns for sparklines beside the bars
_PAGE = 10
_MOVES = {"up": -1, "down": 1, "page up": -_PAGE, "page down": _PAGE, "home": -(1 << 30), "end": 1 << 30}
_KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[5~": "page up",
    b"\x1b[6~": "page down", b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[F": "end",
    b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b": "escape", b"\x03": "ctrl-c",
}  # fmt: skip
_ESCAPE_S = 0.05  # seconds to wait for the rest of an escape sequence
_REPLICA_COLUMNS = ("replica", "state", "running", "waiting", "KV", "hits", "tok/s", "restarts", "link")
Values = Mapping[str, Any]
# Name of an order of running requests -> sort key; the greatest comes first.
ORDERS: dict[str, Callable[[Values], float]] = {
    "age": lambda row: row["age_s"],
    "outputs": lambda row: row["outputs"],
    "tokens": lambda row: row["computed"],
    "progress": lambda row: row["outputs"] / row["max_tokens"] if row["max_tokens"] else 0.0,
}


@dataclass(slots=True)
class View:
    """The user's choices for the screen. `first` is the index of the first running request shown."""

    order: str = "age"
    first: int = 0
    is_paused: bool = False
    is_live: bool = True

    def press(self, key: str) -> None:
        """Change the view for a known key; ignore other keys."""
        if key in _MOVES:
            self.first = max(0, self.first + _MOVES[key])
        elif key == "s":
            names = list(ORDERS)
            self.order = names[(names.index(self.order) + 1) % len(names)]
        elif key in ("p", " "):
            self.is_paused = not self.is_paused


class Keyboard:
    """A context manager that reads single keys from stdin, which must be a terminal, without echo."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._saved_mode: list[Any] = []

    def __enter__(self) -> Keyboard:
        self._saved_mode = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved_mode)

    def wait(self, timeout_s: float) -> str | None:
        """Return the name or letter of the next key; None if no key is pressed within the time.

        Returns "end of input" if the input is closed.
        """
        end = time.monotonic() + timeout_s
        if not self._is_ready(max(0.0, timeout_s)):
            return None
        data = os.read(self._fd, 1)
        if not data:
            return "end of input"
        while data[:1] == b"\x1b" and len(data) < 8 and (data == b"\x1b" or data not in _KEYS):
            if not self._is_ready(_ESCAPE_S):
                break
            data += os.read(self._fd, 1)
        if data in _KEYS:
            return _KEYS[data]
        text = data.decode(errors="replace")
        return text if len(text) == 1 else self.wait(end - time.monotonic())

    def _is_ready(self, timeout_s: float) -> bool:
        return bool(select.select([self._fd], [], [], timeout_s)[0])


def screen(figures: Values, view: View, width: int, height: int) -> RenderableType:
    """Return the whole screen; a live view is truncated to `height` lines."""
    requests = _requests_line(figures["requests"], figures["draft_model"])
    lines = [requests, _steps_line(figures), _latency_line(figures["latency"])]
    text = [part for line in lines for part in wrap(line, width, subsequent_indent=" " * 11)]
    bars, num_bar_lines = _bars(figures, width)
    parts: list[RenderableType] = [_headline(figures["server"], view), bars, Text("\n".join(text))]
    rows_left = height - num_bar_lines - len(text) - 4 if view.is_live else len(figures["running"]) + NUM_WAITING + 1
    replicas = _replica_rows(figures.get("replicas", ()))
    if len(replicas) > 1:
        shown = replicas[: max(1, rows_left // 2)] if view.is_live else replicas
        parts.append(_table(_REPLICA_COLUMNS, shown, width))
        rows_left -= (len(shown) + 1) * view.is_live
    waiting = figures["waiting"][: max(0, min(NUM_WAITING, rows_left // 2))]
    if waiting:
        parts.append(_waiting_table(waiting, figures["requests"]["waiting"], width))
        rows_left -= len(waiting) + 1
    parts.append(_running_table(figures["running"], view, max(1, rows_left), width))
    if view.is_live:
        pause = "go on" if view.is_paused else "pause"
        keys = f"q quit  p {pause}  s sort ({view.order})  ↑ ↓ PgUp PgDn scroll"
        parts.append(Text(keys, style="dim", no_wrap=True))
    return Group(*parts)


def _headline(server: Values, view: View) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(plain(server["model"]), style="bold")
    line.append(f"  {server['url']}  ")
    line.append(plain(server["state"]), style="green" if server["state"] == "ready" else "bold red")
    line.append(f"  up {duration_text(server['uptime_s'])}")
    details = [server["device"], server["policy"], f"epoch {server['epoch']}"]
    if server["restarts"] or server["api_restarts"]:
        details.append(f"restarts: engine {server['restarts']}, api {server['api_restarts']}")
    line.append("  " + "  ".join(word for word in details if word), style="dim")
    if view.is_paused:
        line.append("  PAUSED", style="bold yellow")
    return line


def _bars(figures: Values, width: int) -> tuple[RenderableType, int]:
    """Return bars with the last minute's sparklines (beside the bars if there is room), and the number of lines."""
    is_wide = width >= _WIDE
    levels = _levels(figures)
    trends = _trends(figures, width - _WIDE + 12 if is_wide else width - 26)
    grid = Table.grid(padding=(0, 1))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    for index, (name, used, limit, detail) in enumerate(levels):
        share = used / limit if limit else 0.0
        color = "red" if share >= 0.9 else "yellow" if share >= 0.7 else "green"
        level = Text(bar(share, BAR_WIDTH if is_wide else BAR_WIDTH // 2), style=color)
        trend = trends[index] if is_wide and index < len(trends) else ""
        grid.add_row(name, level, f"{100 * share:3.0f}% {detail}", trend)
    if is_wide:
        return grid, len(levels)
    return Group(grid, Text("\n").join(trends)), len(levels) + len(trends)


def _levels(figures: Values) -> list[tuple[str, float, float, str]]:
    """Return (name, use, limit, text) for each bar."""
    pool, requests, server, steps = (figures[name] for name in ("pool", "requests", "server", "steps"))
    slots, tokens = server["max_sequences"], server["max_batch_tokens"]
    held = f"{pool['held']:,} of {pool['blocks']:,} blocks, {pool['cached']:,} cached"
    levels = [
        ("KV", pool["held"], pool["blocks"], held),
        ("sequences", requests["running"], slots, f"{requests['running']:,} of {slots:,}"),
        ("step", steps["mean_tokens"], tokens, f"{steps['mean_tokens']:,.0f} of {tokens:,} tokens"),
    ]
    if pool["host_blocks"]:
        held = f"{pool['host_held']:,} of {pool['host_blocks']:,} blocks"
        levels.append(("host KV", pool["host_held"], pool["host_blocks"], held))
    return levels


def _trends(figures: Values, width: int) -> list[Text]:
    """Return one text per figure: name, current value and sparkline of the last minute."""
    rates, history, width = figures["rates"], figures["history"], max(8, min(60, width))
    trends = (
        ("prompt tok/s", rates["prompt_tokens_per_s"], history["prompt"]),
        ("output tok/s", rates["output_tokens_per_s"], history["output"]),
        ("waiting", figures["requests"]["waiting"], history["waiting"]),
    )
    return [
        Text.assemble(f"{name:>12} {value:>9,.0f} ", (sparkline(values, width), "cyan"))
        for name, value, values in trends
    ]


def _by_source(draft_model: Values) -> str:
    """Return the share of accepted drafts of each source, and whether the draft model is paused."""
    shares = zip(draft_model["drafted_tokens"].items(), draft_model["accepted_tokens"].values(), strict=True)
    parts = [f"{source} {100 * accepted / drafted:.0f}%" for (source, drafted), accepted in shares if drafted]
    return f" ({', '.join(parts)}{'' if draft_model['is_drafting'] else ', draft model paused'})"


def _requests_line(requests: Values, draft_model: Values | None) -> str:
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
        line += _by_source(draft_model) if draft_model else ""
    if requests["images"]:
        line += f", images encoded {requests['images']:,.0f}"
    if requests["failed_steps"]:
        line += f", FAILED STEPS {requests['failed_steps']:,}"
    return line


def _steps_line(figures: Values) -> str:
    rates, steps = figures["rates"], figures["steps"]
    parts = "  ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in steps["parts_s"].items())
    line = f"steps      {rates['steps_per_s']:,.1f}/s, busy {100 * rates['busy']:.0f}%   mean ms: {parts}"
    return f"{line}   {_quantiles(steps['step_s'])} ms"


def _latency_line(latency: Values) -> str:
    names = {"ttft_s": "first token", "gap_s": "per token", "e2e_s": "end to end", "queue_s": "queue"}
    known = [f"{text} {_quantiles(latency[name])}" for name, text in names.items() if name in latency]
    return "latency    " + ("   ".join(known) + " ms" if known else "-")


def _quantiles(seconds: Values) -> str:
    known = [(name, 1e3 * seconds[name]) for name in ("p50", "p90", "p99") if seconds.get(name) is not None]
    digits = [0 if ms >= 100 else 1 if ms >= 1 else 2 for _, ms in known]
    return " ".join(f"{name} {ms:,.{num}f}" for (name, ms), num in zip(known, digits, strict=True)) or "-"


def _replica_rows(replicas: Sequence[Values]) -> list[tuple[str, ...]]:
    """Return a row for each replica, and one for each rank of a replica with several."""
    rows: list[tuple[str, ...]] = []
    for row in replicas:
        hit = percent(row["hit_tokens"] / row["queried_tokens"]) if row["queried_tokens"] else "-"
        rows.append(
            (
                f"{row['number']}  {plain(row['where'])}",
                plain(row["state"]),
                _number(row["running"]),
                _number(row["waiting"]),
                percent(row["kv_usage"]),
                hit,
                _number(row["tokens_per_s"]),
                _number(row["restarts"]),
                "-" if row.get("rtt_s") is None else f"{1e3 * row['rtt_s']:.1f} ms",
            )
        )
        rows += [
            (f"   rank {rank['rank']}  {plain(rank['where'])}", plain(rank["state"]), *[""] * (len(rows[-1]) - 2))
            for rank in row.get("ranks", ())
        ]
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Return a share from 0 to 1 as text, "-" if it is not known."""
    return "-" if share is None else f"{100 * share:.0f}%"


def _waiting_table(waiting: Sequence[Values], total: int, width: int) -> Table:
    rows = []
    for row in waiting:
        reason = row["reason"].replace("_", " ")
        if row["needed"] or row["available"]:
            reason += f": needs {row['needed']:,}, {row['available']:,} available"
        waited = duration_text(row["waited_s"])
        rows.append((plain(row["name"]), plain(row["tenant"]), waited, f"{row['tokens']:,}", reason))
    return _table((f"waiting, first of {total:,}", "tenant", "waited", "tokens", "reason"), rows, width)


def _running_table(running: Sequence[Values], view: View, num_rows: int, width: int) -> Table:
    ordered = sorted(running, key=ORDERS[view.order], reverse=True)
    view.first = max(0, min(view.first, len(ordered) - num_rows))
    rows = []
    for row in ordered[view.first : view.first + num_rows]:
        name = plain(row["name"]) + (f" #{row['choice']}" if row["choice"] else "")
        done, total = row["computed"], row["prompt"]
        if row["phase"] == "decode":
            done, total = row["outputs"], row["max_tokens"]
        tokens = f"{done:,}" + (f" of {total:,}" if total else "")
        progress = bar(done / total, BAR_WIDTH // 2) if total else ""
        rows.append((name, plain(row["tenant"]), duration_text(row["age_s"]), row["phase"], progress, tokens))
    return _table((f"running, by {view.order}", "tenant", "age", "phase", "progress", "tokens"), rows, width)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Return rows below a heading. The first column gets the remaining width; empty columns are omitted."""
    kept = [index for index in range(len(columns)) if index == 0 or not rows or any(row[index] for row in rows)]
    others = sum(max(len(columns[index]), *(len(row[index]) for row in rows), 0) + 2 for index in kept[1:])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="reverse")
    for index in kept:
        table.add_column(columns[index], no_wrap=True, overflow="ellipsis")
    table.columns[0].width = max(NAME_WIDTHS[0], min(NAME_WIDTHS[1], width - others - 2))
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """Return a share from 0 to 1 as a bar."""
    full = max(0, min(width, round(share * width)))
    return "█" * full + "░" * (width - full)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values as a line of small bars; one unit of height is an eighth of the greatest value."""
    shown = values[-width:]
    top = max(shown, default=0)
    return "".join(_LEVELS[min(8, int(8 * value / top) + (value > 0)) if top else 0] for value in shown).rjust(width)


def plain(text: object) -> str:
    """Return untrusted text without characters that would move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))
