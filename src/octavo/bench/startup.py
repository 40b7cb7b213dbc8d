"""Measures the time from a process's start to its first token, beside the import of torch alone.

Owns: alternate runs with a warm and with an empty weight cache; medians; the report of `octavo bench startup`.
Does not: measure the parts inside a process (startup_child does), or drop the operating system's file cache.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from octavo.bench.report import Report, headline, show_facts, show_rows
from octavo.config import Config
from octavo.errors import EngineError

PARTS = {
    "interpreter": "interpreter",
    "imports": "imports",
    "torch": "import of torch",
    "tokenizer": "tokenizer (beside the rest)",
    "weights": "weights",
    "pool": "KV pool",
    "open": "engine open, torch to pool",
    "first_step": "first step",
    "first_token": "first token, from the start of the process",
}
SUBJECTS = ("python", "import torch", "warm weight cache", "cold weight cache")
TIMEOUT_S = 600.0
CHILD = (sys.executable, "-m", "octavo.bench.startup_child")
_BARE = {"python": "pass", "import torch": "import torch"}


@dataclass(slots=True)
class Startup:
    """The measurements of one subject: seconds of whole processes; for an engine also parts, facts and peak memory."""

    wall_s: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    peak_memory_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> Report:
        """Return median, minimum and maximum of the process and first-token times, and the medians of the parts."""
        report: Report = {"process_s": _spread(self.wall_s)}
        if self.parts:
            names = [name for name in PARTS if any(name in parts for parts in self.parts)]
            report["first_token_s"] = _spread(parts["first_token"] for parts in self.parts)
            report["parts_ms"] = {
                name: round(statistics.median(parts[name] for parts in self.parts if name in parts) * 1e3, 1)
                for name in names
            }
            report["peak_memory_bytes"] = self.peak_memory_bytes
        return report


def measure_startup(
    config: Config,
    num_prompt: int,
    runs: int,
    advance: Callable[[], object] = lambda: None,
    command: Sequence[str] = CHILD,
) -> dict[str, Startup]:
    """Fill the warm cache with one run, and run all subjects alternately, `runs` times each. Raises EngineError."""
    if getattr(config.model, "weight_cache_dir", None):
        config = replace(config, model=replace(config.model, weight_cache_dir=None))
    subjects = {name: Startup() for name in SUBJECTS}
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        warm = Path(folder) / "warm"
        warm.mkdir()
        _run_engine(Startup(), config, num_prompt, warm, command)
        advance()
        for number in range(runs):
            for name, code in _BARE.items():
                _run(subjects[name], [sys.executable, "-c", code])
            _run_engine(subjects["warm weight cache"], config, num_prompt, warm, command)
            advance()
            with tempfile.TemporaryDirectory(prefix=f"cold-{number}-", dir=folder) as cold:
                _run_engine(subjects["cold weight cache"], config, num_prompt, Path(cold), command)
            advance()
    return subjects


def make_startup_report(subjects: dict[str, Startup], runs: int) -> Report:
    """Return every subject's figures, and the time to the first token as a multiple of torch's import time."""
    by_name = {name.replace(" ", "_"): subjects[name].as_dict() for name in SUBJECTS}
    torch_s = by_name["import_torch"]["process_s"]["median"]
    first_s = by_name["warm_weight_cache"]["first_token_s"]["median"]
    return {
        "bench": "startup",
        **subjects["warm weight cache"].facts,
        "runs": runs,
        **by_name,
        "first_token_per_import_torch": round(first_s / torch_s, 3) if torch_s else 0.0,
    }


def show_startup(console: Console, report: Report) -> None:
    """Print the times of whole processes and of their parts."""
    warm, cold = report["warm_weight_cache"], report["cold_weight_cache"]
    facts = {
        "model": headline(report),
        "first token": f"{warm['first_token_s']['median']:.2f} s, "
        f"{report['first_token_per_import_torch']:.2f} times the import of torch",
        "peak memory": f"{warm['peak_memory_bytes'] / 2**30:.2f} GiB warm, "
        f"{cold['peak_memory_bytes'] / 2**30:.2f} cold ({report['weight_bytes'] / 2**30:.2f} weights)",
    }
    show_facts(console, "Start-up", facts)
    console.print()
    rows = [(name, *report[name.replace(" ", "_")]["process_s"].values()) for name in SUBJECTS]
    show_rows(console, "Whole processes, s", ("", "median", "min", "max"), rows)
    console.print()
    parts = [(PARTS[name], time_ms, cold["parts_ms"].get(name, "")) for name, time_ms in warm["parts_ms"].items()]
    show_rows(console, "Parts, median ms", ("", "warm weight cache", "cold"), parts)


def _run_engine(startup: Startup, config: Config, num_prompt: int, cache: Path, command: Sequence[str]) -> None:
    """Run one new process that opens an engine, and add the times that the process reports."""
    env = {**os.environ, "OCTAVO_CACHE_DIR": str(cache)}
    words = [*command, repr(time.monotonic()), str(num_prompt)]
    line = _run(startup, words, input=msgspec.json.encode(config).decode() + "\n", env=env).splitlines()[-1]
    answer = json.loads(line)
    startup.parts.append(answer["parts"])
    startup.facts = answer["facts"]
    startup.peak_memory_bytes = max(startup.peak_memory_bytes, answer["peak_memory_bytes"])


def _run(startup: Startup, words: Sequence[str], **options: Any) -> str:
    """Run a process, add its duration to `startup`, and return its output."""
    start = time.monotonic()
    done: subprocess.CompletedProcess[str] = subprocess.run(
        words, capture_output=True, text=True, timeout=TIMEOUT_S, **options
    )
    startup.wall_s.append(time.monotonic() - start)
    if done.returncode:
        last_lines = "\n".join(done.stderr.splitlines()[-3:]) or "it printed nothing"
        raise EngineError(f"{' '.join(words[:3])} failed with status {done.returncode}: {last_lines}")
    return done.stdout


def _spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
    }
