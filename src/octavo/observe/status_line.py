"""StatusLine: one line about an engine's load, made from two snapshots of its statistics.

Owns: the text and the rates. Does not: query the engine, read a clock, or print.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATUS_LINE_S = 5.0  # between two lines while the engine is busy


@dataclass(slots=True)
class StatusLine:
    """Maker of a line from two snapshots of the scheduler's statistics; no line while the engine is idle."""

    last: Mapping[str, Any] | None = None
    at: float = 0.0

    def line(self, statistics: Mapping[str, Any], now: float) -> str | None:
        """Return the line for the time since the last snapshot; None if nothing was computed, or at the first one."""
        new, old, seconds = statistics["scheduler"], self.last, now - self.at
        self.last, self.at = new, now
        if old is None or seconds <= 0:
            return None
        computed = new["num_computed_tokens"] - old["num_computed_tokens"]
        if computed < 0 or new["num_output_tokens"] < old["num_output_tokens"]:
            return None  # another engine, which counts from 0
        if computed == 0 and new["num_running"] == 0:
            return None
        produced = new["num_output_tokens"] - old["num_output_tokens"]
        queried = new["prefix_queried_tokens"] - old["prefix_queried_tokens"]
        hits = new["prefix_hit_tokens"] - old["prefix_hit_tokens"]
        used = new["num_blocks_used"] / max(1, new["num_blocks"])
        prompt = max(0, computed - produced)
        hit = f", prefix hits {hits / queried:.0%}" if queried else ""
        drafted = new.get("num_drafted_tokens", 0) - old.get("num_drafted_tokens", 0)
        accepted = new.get("num_accepted_tokens", 0) - old.get("num_accepted_tokens", 0)
        guessed = f", {accepted / drafted:.0%} of {drafted} drafts accepted" if drafted else ""
        swapped = f", {new['num_swapped']} swapped" if new.get("num_swapped") else ""
        load = f"{new['num_running']} running, {new['num_waiting']} waiting{swapped}, KV {used:.0%}"
        rates = f"{prompt / seconds:,.0f} prompt + {produced / seconds:,.0f} output tokens/s"
        return f"{rates}, {load}{hit}{guessed}"
