"""What `octavo top` shows, as numbers: made from a server's status, its engine's statistics and its frames.

Owns: following frames (docs/statistics.md), rates over the last seconds, a minute of history.
Does not: query the server (top) or draw (top_screen). Times are the engine's clock; nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW_S = 5.0  # for rates and for the split of steps
HISTORY_S = 60
MAX_STEPS = 20_000  # of the last minute, for percentiles
PARTS = ("schedule", "prepare", "forward", "sample", "emit")
Answer = Mapping[str, Any]
_WAITING = ("name", "tenant", "reason", "needed", "available", "waited_s", "tokens")


@dataclass(slots=True)
class Running:
    """One sequence with a slot: `computed` positions; `decodes` is True once the prompt is computed."""

    name: str
    choice: int
    prompt: int
    computed: int = 0
    decodes: bool = False


@dataclass(slots=True)
class Second:
    """Sums over the steps that ended in one second, and gauges at its last step."""

    number: int
    prompt: int = 0
    output: int = 0
    running: int = 0
    waiting: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The fields of a step from which rates are computed."""

    begin: float
    end: float
    prompt: int
    output: int
    tokens: int
    parts: tuple[float, ...]


@dataclass(slots=True)
class Figures:
    """The figures of one server, updated from its frames."""

    head: Answer = field(default_factory=dict)
    slots: dict[int, Running] = field(default_factory=dict)
    requests: dict[str, list[Any]] = field(default_factory=dict)
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    steps: deque[StepFigures] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    seconds: deque[Second] = field(default_factory=lambda: deque(maxlen=HISTORY_S))
    queue: Answer = field(default_factory=dict)
    gauges: Answer = field(default_factory=dict)
    now: float = 0.0
    since: float = 0.0  # no step is missing from here on

    def read(self, frames: Iterable[Answer]) -> None:
        """Update from frames."""
        for frame in frames:
            kind = frame["k"]
            self.now = max(self.now, frame.get("t", 0.0))
            if kind == "head":
                self._begin(frame)
            elif kind == "step":
                self._step(frame)
            elif kind == "note":
                self._news(frame)
            elif kind == "queue":
                self.queue = frame

    def _begin(self, frame: Answer) -> None:
        if frame["life"] != self.head.get("life"):
            self.steps.clear()
            self.gauges = {}
        self.now = frame["t"]
        self.head, self.rows, self.since = frame, [], frame["t"]
        self.slots = {slot: Running(name, choice, prompt) for slot, name, choice, prompt in frame["slots"]}
        self.requests = {entry[0]: entry for entry in frame["open"]}

    def _news(self, frame: Answer) -> None:
        for entry in frame.get("in", ()):
            self.requests[entry[0]] = entry
        for kind, name, _ in frame.get("ev", ()):
            if kind == "finished":
                self.requests.pop(name, None)

    def _step(self, frame: Answer) -> None:
        self._news(frame)
        for slot in frame.get("freed", ()):
            self.slots.pop(slot, None)
        for slot, name, choice, prompt in frame.get("new", ()):
            self.slots[slot] = Running(name, choice, prompt)
        flat = frame.get("rows")
        if flat is not None:
            self.rows = list(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))
        else:
            self.rows = [(slot, start + count, count) for slot, start, count in self.rows]
        for slot, start, count in self.rows:
            running = self.slots.get(slot)
            if running is not None:
                running.computed = start + count
                running.decodes = running.computed >= running.prompt
        begin, prompt, output = frame["t"], frame["tok"][0], frame["tok"][4]
        end = begin + frame["s"]
        self.now = max(self.now, end)
        parts = tuple(part or 0.0 for part in frame["parts"])
        self.steps.append(StepFigures(begin, end, prompt, output, sum(frame["tok"][:3]), parts))
        self.gauges = frame
        second = self._second(int(end))
        second.prompt += prompt
        second.output += output
        second.running, second.waiting, second.held = frame["run"], frame["wait"], sum(frame["used"])

    def _second(self, number: int) -> Second:
        """Return the entry of a second; seconds without steps are filled in."""
        last = self.seconds[-1] if self.seconds else None
        if last is not None and last.number >= number:
            return last
        first = number if last is None else max(last.number + 1, number - HISTORY_S)
        for missing in range(first, number + 1):
            self.seconds.append(Second(missing))
        return self.seconds[-1]

    # --- snapshots

    def snapshot(self, answer: Answer) -> dict[str, Any]:
        """Return everything shown, as plain JSON values; `answer` is the server's answer to the verb `top`."""
        status, statistics = answer["status"], answer.get("statistics") or {}
        scheduler, collected = statistics.get("scheduler", {}), statistics.get("collected", {})
        self._second(int(self.now))
        recent = [step for step in self.steps if step.end >= self.now - WINDOW_S]
        return {
            "server": self._server(status, answer.get("trouble")),
            "pool": self._pool(scheduler),
            "requests": _requests(scheduler),
            "rates": self._rates(recent),
            "steps": self._split(recent),
            "latency": {
                name: figures
                for name, figures in collected.get("requests", {}).items()
                if name.endswith("_s") and figures.get("count")
            },
            "history": self._history(),
            "waiting": [
                dict(
                    zip(("name", "tenant", "reason", "needed", "available", "waited_s", "tokens"), entry, strict=False)
                )
                for entry in self.queue.get("top", ())
            ],
            "running": [self._running(running) for running in self.slots.values() if running.name in self.requests],
        }

    def _server(self, status: Answer, trouble: object) -> dict[str, Any]:
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

    def _pool(self, scheduler: Answer) -> dict[str, int]:
        names = {"blocks": "num_blocks", "held": "num_blocks_used", "cached": "num_blocks_cached"}
        names |= {"host_blocks": "num_host_blocks", "host_held": "num_host_blocks_used"}
        return {name: scheduler.get(key, 0) for name, key in names.items()}

    def _rates(self, recent: list[StepFigures]) -> dict[str, float]:
        begin = max(self.now - WINDOW_S, self.since)
        window = max(self.now - begin, 1e-3)
        busy, last = 0.0, begin
        for step in recent:  # with several plans in flight they overlap
            busy += max(0.0, step.end - max(step.begin, last))
            last = max(last, step.end)
        return {
            "window_s": window,
            "prompt_tokens_per_s": sum(step.prompt for step in recent) / window,
            "output_tokens_per_s": sum(step.output for step in recent) / window,
            "steps_per_s": len(recent) / window,
            "busy": min(1.0, busy / window),
        }

    def _split(self, recent: list[StepFigures]) -> dict[str, Any]:
        count = max(1, len(recent))
        times = sorted(step.end - step.begin for step in self.steps if step.end >= self.now - HISTORY_S)
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {
            "mean_tokens": sum(step.tokens for step in recent) / count,
            "parts_s": {part: sum(step.parts[place] for step in recent) / count for place, part in enumerate(PARTS)},
            "step_s": {
                name: times[min(len(times) - 1, int(share * len(times)))] if times else None
                for name, share in shares.items()
            },
        }

    def _history(self) -> dict[str, list[int]]:
        kinds = ("prompt", "output", "running", "waiting", "held")
        whole = [second for second in self.seconds if second.number < int(self.now)]  # the last one is not over
        return {kind: [getattr(second, kind) for second in whole] for kind in kinds}

    def _running(self, running: Running) -> dict[str, Any]:
        _, arrival, tenant, _, _, most = self.requests[running.name][:6]
        return {
            "name": running.name,
            "choice": running.choice,
            "tenant": tenant,
            "age_s": max(0.0, self.now - arrival),
            "phase": "decode" if running.decodes else "prefill",
            "prompt": running.prompt,
            "computed": running.computed,
            "outputs": max(0, running.computed - running.prompt + 1) if running.decodes else 0,
            "max_tokens": most,
        }


def _requests(scheduler: Answer) -> dict[str, Any]:
    queried = scheduler.get("prefix_queried_tokens", 0)
    return {
        "running": scheduler.get("num_running", 0),
        "waiting": scheduler.get("num_waiting", 0),
        "swapped": scheduler.get("num_swapped", 0),
        "waiting_by_reason": scheduler.get("waiting_by_reason", {}),
        "admitted": scheduler.get("num_admitted", 0),
        "finished": {name: count for name, count in scheduler.get("finished", {}).items() if count},
        "preemptions": scheduler.get("num_preemptions", 0),
        "failed_steps": scheduler.get("num_failed_steps", 0),
        "hit_share": scheduler.get("prefix_hit_tokens", 0) / queried if queried else None,
        "drafted_tokens": scheduler.get("num_drafted_tokens", 0),
        "accepted_tokens": scheduler.get("num_accepted_tokens", 0),
    }
