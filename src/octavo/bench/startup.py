"""The time of a cold process to its first token, repeated, beside the import of torch alone.

Owns: starting the processes in turn, with a warm and with an empty weight cache, and their medians.
Does not: time inside them (startup_child does). The disk's own cache is as warm as the runs before left it.
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

from octavo.config import Config
from octavo.errors import EngineError

PARTS = ("interpreter", "imports", "torch", "tokenizer", "weights", "pool", "open", "first_step", "first_token")
SUBJECTS = ("python", "import torch", "warm weight cache", "cold weight cache")
TIMEOUT_S = 600.0
CHILD = (sys.executable, "-m", "octavo.bench.startup_child")
_BARE = {"python": "pass", "import torch": "import torch"}


@dataclass(slots=True)
class Startup:
    """The measurements of one subject: whole processes in seconds, and of engines the parts and peaks."""

    wall_s: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    peak_memory_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def median_parts_ms(self) -> dict[str, float]:
        """Return the medians of the parts that were measured."""
        names = [name for name in PARTS if any(name in parts for parts in self.parts)]
        return {
            name: round(statistics.median(parts[name] for parts in self.parts if name in parts) * 1e3, 1)
            for name in names
        }

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        walls = self.wall_s
        report: dict[str, Any] = {"process_s": _spread(walls)}
        if self.parts:
            report["first_token_s"] = _spread([parts["first_token"] for parts in self.parts])
            report |= {"parts_ms": self.median_parts_ms(), "peak_memory_bytes": self.peak_memory_bytes}
        return report


def measure_startup(
    config: Config,
    num_prompt: int,
    runs: int,
    advance: Callable[[], object] = lambda: None,
    command: Sequence[str] = CHILD,
) -> dict[str, Startup]:
    """Run every subject `runs` times in turn, after one run that fills the warm cache. Raises EngineError."""
    if getattr(config.model, "weight_cache_dir", None):
        config = replace(config, model=replace(config.model, weight_cache_dir=None))
    found = {name: Startup() for name in SUBJECTS}
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        warm = Path(folder) / "warm"
        warm.mkdir()
        _engine(Startup(), config, num_prompt, warm, command)
        advance()
        for number in range(runs):
            for name, code in _BARE.items():
                _bare(found[name], code)
            _engine(found["warm weight cache"], config, num_prompt, warm, command)
            advance()
            with tempfile.TemporaryDirectory(prefix=f"cold-{number}-", dir=folder) as cold:
                _engine(found["cold weight cache"], config, num_prompt, Path(cold), command)
            advance()
    return found


def _bare(startup: Startup, code: str) -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    startup.wall_s.append(time.monotonic() - begun)
    if done.returncode:
        raise EngineError(f"python -c {code!r} failed: {_tail(done.stderr)}")


def _engine(startup: Startup, config: Config, num_prompt: int, cache: Path, command: Sequence[str]) -> None:
    """Run one cold process, and add its times."""
    env = {**os.environ, "OCTAVO_CACHE_DIR": str(cache)}
    begun = time.monotonic()
    words = [*command, repr(begun), str(num_prompt)]
    line = msgspec.json.encode(config).decode() + "\n"
    done = subprocess.run(words, input=line, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    startup.wall_s.append(time.monotonic() - begun)
    if done.returncode:
        raise EngineError(f"the engine could not be opened: {_tail(done.stderr)}")
    told = json.loads(done.stdout.splitlines()[-1])
    startup.parts.append(told["parts"])
    startup.facts = told["facts"]
    startup.peak_memory_bytes = max(startup.peak_memory_bytes, told["peak_memory_bytes"])


def _spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
    }


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-3:]) or "it said nothing"
