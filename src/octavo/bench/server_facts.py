"""A server's facts beside its completions: the model's name, and an Octavo's steps.

Owns: reading /v1/models and the few lines of /metrics that are used. Does not: require /metrics of a server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.bench.completion_client import CompletionClient
from octavo.bench.event_parser import ProtocolError
from octavo.errors import EngineError

_STEPS = re.compile(r"^octavo_steps_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_PART = re.compile(r'^octavo_step_seconds_total\{[^}]*part="(\w+)"[^}]*\} (\S+)', re.MULTILINE)


async def first_model(client: CompletionClient) -> str:
    """Return the name of the first model served. Raises EngineError if there is no answer or no model."""
    try:
        status, body = await client.get("/v1/models")
        names = [entry["id"] for entry in msgspec.json.decode(body)["data"]] if status == 200 else []
    except (OSError, ProtocolError, TimeoutError) as error:
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number).lower() if number > 0 else str(error) or type(error).__name__
        raise EngineError(f"no server answers at {client.url} ({reason})") from None
    except (msgspec.MsgspecError, KeyError, TypeError):
        names = []
    if not names:
        raise EngineError(f"/v1/models names no model (status {status}); give it with --served-model")
    return str(names[0])


async def step_totals(client: CompletionClient) -> dict[str, float]:
    """Return steps and seconds by part since the server's start; empty if it reports none."""
    try:
        status, body = await client.get("/metrics")
    except (OSError, ProtocolError, TimeoutError):
        return {}
    return read_step_totals(body.decode("utf-8", "replace")) if status == 200 else {}


def read_step_totals(text: str) -> dict[str, float]:
    """Return steps and seconds by part from the text of /metrics."""
    steps = _STEPS.search(text)
    parts = {part: float(value) for part, value in _PART.findall(text)}
    return {"steps": float(steps[1]), **parts} if steps and parts else {}


def step_split(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Return mean milliseconds of a step's parts between two totals; empty if there were no steps."""
    steps = after.get("steps", 0.0) - before.get("steps", 0.0)
    if not before or not after or steps <= 0:
        return {}
    means = {part: (after[part] - before.get(part, 0.0)) / steps * 1e3 for part in after if part != "steps"}
    whole = means.pop("step", 0.0)
    split = {"total": whole, **means, "other": max(0.0, whole - sum(means.values()))}
    return {"steps": int(steps), "step_ms": {part: round(value, 4) for part, value in split.items()}}
