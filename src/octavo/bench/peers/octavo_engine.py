"""This engine in a process of its own, under the same protocol as its peers: see host.py.

Options: model, at_once, settings (by field name, as a Config has them).
"""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any

from octavo.config.sources import config_from_keywords


class OctavoHost:
    """One local engine and an event loop that stays open."""

    def __init__(self, options: dict[str, Any]) -> None:
        from octavo.assembly import build_local
        from octavo.bench.engine_facts import engine_facts, memory_facts
        from octavo.bench.offline import OfflineBench
        from octavo.bench.steps import StepRecorder

        config = config_from_keywords(options["model"], {"max_sequences": options["at_once"], **options["settings"]})
        local = build_local(config)
        self._make_bench = OfflineBench
        self._client, self._steps = local.client, StepRecorder()
        self._loop = asyncio.new_event_loop()
        self.facts = {"engine": "octavo", **engine_facts(local.text.name, config, local.capacity)}
        self.facts |= memory_facts(local.capacity)

    def run(self, requests: list[dict[str, Any]], at_once: int) -> list[list[float]]:
        """Run one pass of the offline bench."""
        from octavo.bench.workload import BenchWorkload, Item

        items = (Item(array("i", request["prompt_token_ids"]), request["max_tokens"]) for request in requests)
        workload = BenchWorkload(f"run {time.monotonic()}", (tuple(items),))
        bench = self._make_bench(self._client, self._steps, at_once)
        record = self._loop.run_until_complete(bench.run(workload))
        return [list(times) for times in record.requests]


ENGINE = OctavoHost  # read by peers/host.py
