"""`octavo top [NAME|PID|PORT]`: watch a running server in the terminal.

Owns: reading the engine's frames (docs/statistics.md); rates over the last seconds; a minute of history.
Does not: draw (top_screen does). Times are on the engine's clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import mul
from typing import Any

from rich.console import Console
from rich.live import Live

from octavo.cli.server_registry import ServerRecord, find_servers
from octavo.cli.servers import AdminError, add_server_arguments, call_admin, named_server
from octavo.cli.top_screen import Keyboard, View, screen
from octavo.config.setting import Number

INTERVAL_S = Number(float, 0.1, 60)
TIMEOUT_S = 5.0
MAX_POLLS = 50  # maximum queries per refresh, to catch up with the engine
WINDOW_S = 5.0  # seconds over which rates and the mean step are computed
HISTORY_S = 60
MAX_STEPS = 20_000  # maximum steps of the last minute that quantiles use
PARTS = ("schedule", "prepare", "forward", "sample", "emit")
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_WAITING = ("name", "tenant", "reason", "needed", "available", "waited_s", "tokens")  # fields of a queue frame's entry
# Name of a figure -> name in the scheduler's statistics.
_POOL = {
    "blocks": "num_blocks", "held": "num_blocks_used", "cached": "num_blocks_cached",
    "host_blocks": "num_host_blocks", "host_held": "num_host_blocks_used",
}  # fmt: skip
_REQUESTS = {
    "running": "num_running", "waiting": "num_waiting", "swapped": "num_swapped", "admitted": "num_admitted",
    "preemptions": "num_preemptions", "failed_steps": "num_failed_steps", "drafted_tokens": "num_drafted_tokens",
    "accepted_tokens": "num_accepted_tokens",
}  # fmt: skip
Json = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_server_arguments(parser, is_positional=True)
    parser.add_argument("--interval", type=INTERVAL_S, default=1.0, metavar="S", help="seconds between refreshes [1]")
    parser.add_argument("--once", action="store_true", help="print once, without taking the terminal over")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Show the server until the user presses q; return 1 if the server ended first."""
    server = WatchedServer.of(named_server(args))
    if args.json:
        print(json.dumps(server.poll()))
        return 0
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        console = Console(highlight=False)
        console.print(screen(server.poll(), View(is_live=False), console.width, console.height))
        return 0
    return _watch(server, args.interval)


def _watch(server: WatchedServer, interval_s: float) -> int:
    """Refresh the screen until the user quits (0) or the server has ended (1)."""
    figures, view, console = server.poll(), View(), Console(highlight=False)
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        next_poll = time.monotonic() + interval_s
        while True:
            live.update(screen(figures, view, console.width, console.height), refresh=True)
            key = keyboard.wait(max(0.0, next_poll - time.monotonic()))
            if key in ("q", "Q", "escape", "ctrl-c", "end of input"):
                return 0
            if key is not None:
                view.press(key)
                continue
            next_poll = time.monotonic() + interval_s
            if view.is_paused:
                continue
            try:
                figures = server.poll()
            except AdminError as error:
                if not server.is_running():
                    break
                figures = server.last_figures(str(error))
    print(f"{server.name} ended", file=sys.stderr)
    return 1


class WatchedServer:
    """A server queried over its admin socket. If the server does not answer, `is_running()` tests if it still runs."""

    def __init__(self, path: str, name: str = "", is_running: Callable[[], bool] = lambda: False) -> None:
        self.name = name or f"the server at {path}"
        self.is_running = is_running
        self._path = path
        self._engines: dict[int, Figures] = {0: Figures()}  # by replica
        self._last: Json = {"status": {}}

    @classmethod
    def of(cls, server: ServerRecord) -> WatchedServer:
        """Return the WatchedServer of a record, which may be another user's server."""
        if not server.pid:
            return cls(server.admin)
        name = f"{server.model} at {server.url} (process {server.pid})"
        return cls(server.admin, name, lambda: any(known.pid == server.pid for known in find_servers()))

    def poll(self) -> dict[str, Any]:
        """Fetch new frames and return the figures. Raises AdminError if the server does not answer."""
        cursors = {number: figures.cursor for number, figures in self._engines.items()}
        self._last = call_admin(self._path, "top", json.dumps(cursors), TIMEOUT_S)
        pages = {int(number): page for number, page in self._last.get("frames", {}).items()}
        self._engines = {number: self._engines.get(number) or Figures() for number in pages} or self._engines
        for number, page in pages.items():
            self._read_frames(number, page)
        return self._snapshot(self._last)

    def _read_frames(self, number: int, page: Json) -> None:
        """Update the figures of one replica's engine from a page of frames and the pages after it."""
        figures = self._engines[number]
        for _ in range(MAX_POLLS):
            figures.cursor = page["cursor"]
            figures.read(page["frames"])
            if not page.get("more"):
                return
            cursor = f"{number}/{figures.cursor}" if self._replicas() else figures.cursor
            page = call_admin(self._path, "frames", cursor, TIMEOUT_S)

    def last_figures(self, trouble: str) -> dict[str, Any]:
        """Return the last figures, with `trouble` as the reason why the server does not answer."""
        return self._snapshot({**self._last, "trouble": trouble})

    def _replicas(self) -> list[dict[str, Any]]:
        """Return the rows of replicas; none for a server with one engine of one rank."""
        return list((self._last.get("statistics") or {}).get("replicas", {}).values())

    def _snapshot(self, answer: Json) -> dict[str, Any]:
        parts = {number: figures.snapshot(answer) for number, figures in self._engines.items()}
        rates = {number: part["rates"]["output_tokens_per_s"] for number, part in parts.items()}
        rows = [{**row, "tokens_per_s": rates.get(row["number"])} for row in self._replicas()]
        return {**merge(list(parts.values())), "replicas": rows}


@dataclass(slots=True)
class RunningSequence:
    """One sequence with a slot. The sequence decodes after its prompt is computed."""

    name: str
    choice: int
    num_prompt: int
    num_computed: int = 0
    is_decoding: bool = False


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A step: its times, its tokens, and the gauges at its end."""

    begin: float
    end: float
    prompt: int
    output: int
    tokens: int
    parts: tuple[float, ...]
    running: int
    waiting: int
    held: int


@dataclass(slots=True)
class Figures:
    """The figures of one engine, updated from its frames."""

    cursor: str = ""
    head: Json = field(default_factory=dict)
    slots: dict[int, RunningSequence] = field(default_factory=dict)
    requests: dict[str, list[Any]] = field(default_factory=dict)
    rows: list[tuple[int, int, int]] = field(default_factory=list)  # last step's (slot, first position, count)
    steps: deque[StepFigures] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    queue: Json = field(default_factory=dict)
    now: float = 0.0
    complete_from: float = 0.0  # no step after this time is missing

    def read(self, frames: Iterable[Json]) -> None:
        """Update from frames."""
        for frame in frames:
            kind = frame["k"]
            self.now = max(self.now, frame.get("t", 0.0))
            if kind == "head":
                self._read_head(frame)
            elif kind == "step":
                self._read_step(frame)
            elif kind == "note":
                self._read_requests(frame)
            elif kind == "queue":
                self.queue = frame

    def _read_head(self, frame: Json) -> None:
        if frame["life"] != self.head.get("life"):
            self.steps.clear()
        self.now = self.complete_from = frame["t"]
        self.head, self.rows = frame, []
        self.slots = {slot: RunningSequence(name, choice, prompt) for slot, name, choice, prompt in frame["slots"]}
        self.requests = {entry[0]: entry for entry in frame["open"]}

    def _read_requests(self, frame: Json) -> None:
        for entry in frame.get("in", ()):
            self.requests[entry[0]] = entry
        for kind, name, _ in frame.get("ev", ()):
            if kind == "finished":
                self.requests.pop(name, None)

    def _read_step(self, frame: Json) -> None:
        self._read_requests(frame)
        for slot in frame.get("freed", ()):
            self.slots.pop(slot, None)
        for slot, name, choice, prompt in frame.get("new", ()):
            self.slots[slot] = RunningSequence(name, choice, prompt)
        flat = frame.get("rows")
        if flat is not None:
            self.rows = list(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))
        else:  # the last step's rows again, each advanced by its count
            self.rows = [(slot, start + count, count) for slot, start, count in self.rows]
        for slot, start, count in self.rows:
            if (sequence := self.slots.get(slot)) is not None:
                sequence.num_computed = start + count
                sequence.is_decoding = sequence.num_computed >= sequence.num_prompt
        begin, prompt, output = frame["t"], frame["tok"][0], frame["tok"][4]
        end = begin + frame["s"]
        self.now = max(self.now, end)
        parts = tuple(part or 0.0 for part in frame["parts"])
        gauges = frame["run"], frame["wait"], sum(frame["used"])
        self.steps.append(StepFigures(begin, end, prompt, output, sum(frame["tok"][:3]), parts, *gauges))

    def snapshot(self, answer: Json) -> dict[str, Any]:
        """Return everything shown, as plain JSON values; `answer` is the server's answer to the verb `top`."""
        statistics = answer.get("statistics") or {}
        scheduler, collected = statistics.get("scheduler", {}), statistics.get("collected", {})
        recent = [step for step in self.steps if step.end >= self.now - WINDOW_S]
        latency = collected.get("requests", {}).items()
        return {
            "server": self._server(answer["status"], answer.get("trouble")),
            "pool": {name: scheduler.get(key, 0) for name, key in _POOL.items()},
            "requests": {**_requests(scheduler), "images": statistics.get("media", {}).get("num_encoded", 0)},
            "draft_model": statistics.get("draft_model"),
            "rates": self._rates(recent),
            "steps": self._steps(recent),
            "latency": {name: values for name, values in latency if name.endswith("_s") and values.get("count")},
            "history": self._history(),
            "waiting": [dict(zip(_WAITING, entry, strict=False)) for entry in self.queue.get("top", ())],
            "running": [self._running(sequence) for sequence in self.slots.values() if sequence.name in self.requests],
        }

    def _server(self, status: Json, trouble: object) -> dict[str, Any]:
        engine, limits = status.get("engine", {}), self.head.get("limits", {})
        return {
            "model": status.get("model", ""),
            "url": status.get("url", ""),
            "state": trouble or status.get("trouble") or status.get("phase", ""),
            "uptime_s": status.get("uptime_s", 0.0),
            "epoch": engine.get("epoch", 1),
            "restarts": engine.get("restarts", 0),
            "api_restarts": status.get("api_restarts", 0),
            "device": self.head.get("device", ""),
            "policy": limits.get("policy", ""),
            "max_sequences": limits.get("max_sequences", 0),
            "max_batch_tokens": limits.get("max_batch_tokens", 0),
        }

    def _rates(self, recent: list[StepFigures]) -> dict[str, float]:
        begin = max(self.now - WINDOW_S, self.complete_from)
        window = max(self.now - begin, 1e-3)
        busy, busy_until = 0.0, begin
        for step in recent:  # with several plans in flight, steps overlap
            busy += max(0.0, step.end - max(step.begin, busy_until))
            busy_until = max(busy_until, step.end)
        return {
            "window_s": window,
            "prompt_tokens_per_s": sum(step.prompt for step in recent) / window,
            "output_tokens_per_s": sum(step.output for step in recent) / window,
            "steps_per_s": len(recent) / window,
            "busy": min(1.0, busy / window),
        }

    def _steps(self, recent: list[StepFigures]) -> dict[str, Any]:
        """Return the mean of the recent steps, and quantiles of the last minute's durations."""
        count = max(1, len(recent))
        times = sorted(step.end - step.begin for step in self.steps if step.end >= self.now - HISTORY_S)
        last = len(times) - 1
        return {
            "mean_tokens": sum(step.tokens for step in recent) / count,
            "parts_s": {part: sum(step.parts[index] for step in recent) / count for index, part in enumerate(PARTS)},
            "step_s": {
                name: times[min(last, int(share * len(times)))] if times else None for name, share in _QUANTILES.items()
            },
        }

    def _history(self) -> dict[str, list[int]]:
        """Return sums and gauges for each complete second of the last minute; zeros for a second without steps."""
        now = int(self.now)
        first = max(now - HISTORY_S, int(self.steps[0].end if self.steps else self.complete_from))
        history = {kind: [0] * (now - first) for kind in ("prompt", "output", "running", "waiting", "held")}
        for step in self.steps:
            index = int(step.end) - first
            if 0 <= index < now - first:
                history["prompt"][index] += step.prompt
                history["output"][index] += step.output
                history["running"][index] = step.running
                history["waiting"][index] = step.waiting
                history["held"][index] = step.held
        return history

    def _running(self, sequence: RunningSequence) -> dict[str, Any]:
        _, arrival, tenant, _, _, max_tokens = self.requests[sequence.name][:6]
        num_outputs = max(0, sequence.num_computed - sequence.num_prompt + 1) if sequence.is_decoding else 0
        return {
            "name": sequence.name,
            "choice": sequence.choice,
            "tenant": tenant,
            "age_s": max(0.0, self.now - arrival),
            "phase": "decode" if sequence.is_decoding else "prefill",
            "prompt": sequence.num_prompt,
            "computed": sequence.num_computed,
            "outputs": num_outputs,
            "max_tokens": max_tokens,
        }


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the figures of a fleet's engines: sums, means of shares and parts of steps, and the slowest quantiles."""
    whole = dict(parts[0])
    if len(parts) == 1:
        return whole
    rates, steps = [part["rates"] for part in parts], [part["steps"] for part in parts]
    whole["rates"] = {
        name: sum(rate[name] for rate in rates) / (len(rates) if name in ("window_s", "busy") else 1)
        for name in rates[0]
    }
    weights = [rate["steps_per_s"] / max(1e-9, whole["rates"]["steps_per_s"]) for rate in rates]
    times = {name: [one["step_s"][name] for one in steps if one["step_s"][name] is not None] for name in _QUANTILES}
    whole["steps"] = {
        "mean_tokens": sum(map(mul, weights, (one["mean_tokens"] for one in steps))),
        "parts_s": {part: sum(map(mul, weights, (one["parts_s"][part] for one in steps))) for part in PARTS},
        "step_s": {name: max(found, default=None) for name, found in times.items()},
    }
    whole["history"] = {  # the last second of each is now
        kind: [sum(each) for each in zip_longest(*(part["history"][kind][::-1] for part in parts), fillvalue=0)][::-1]
        for kind in parts[0]["history"]
    }
    whole["server"] = whole["server"] | {"max_sequences": sum(part["server"]["max_sequences"] for part in parts)}
    for name in ("waiting", "running"):
        whole[name] = [row for part in parts for row in part[name]]
    return whole


def _requests(scheduler: Json) -> dict[str, Any]:
    queried = scheduler.get("prefix_queried_tokens", 0)
    return {
        **{name: scheduler.get(key, 0) for name, key in _REQUESTS.items()},
        "waiting_by_reason": scheduler.get("waiting_by_reason", {}),
        "finished": {name: count for name, count in scheduler.get("finished", {}).items() if count},
        "hit_share": scheduler.get("prefix_hit_tokens", 0) / queried if queried else None,
    }
