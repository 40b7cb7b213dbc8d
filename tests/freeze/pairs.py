"""Freeze what a server answers: `python -m tests.freeze.pairs --write | --check | --show NAME`.

Owns: the file of pairs (one a line), running all groups, and the differences. `--write` is for the commit that the
pairs are taken from, or for a difference that was decided on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.freeze.pair_calls import Group, Runner, Server
from tests.freeze.pair_cases import groups

FILE = Path(__file__).with_name("pairs.jsonl")

Pairs = dict[str, Any]
# Differences that were decided on: the place, as told below -> the reason.
DECIDED = {
    "open: admin/statistics: .action.ok.forecast": "statistics have the times that waits are forecast from",
    "journal: journal/health: .body.journal.standbys": "standby fronts may follow the journal",
    **dict.fromkeys(
        (
            "open: admin/status: .action.ok.engine.replicas",
            "open: admin/status: .action.ok.engine.moved_requests",
            "open: admin/status: .action.ok.engine.inexact_requests",
            "open: admin/status: .action.ok.engine.dropped_ids.moved",
        ),
        "a server may have several replicas, between which requests move",
    ),
    **dict.fromkeys(
        (
            "open: GET /openapi.json: .body.post /v1/embeddings.application/json",
            "web: web/openapi: .body.post /v1/embeddings.application/json",
        ),
        "prompt_name is added: encoders have prompts of their own",
    ),
    **dict.fromkeys(
        (
            f"{where}: .body.post /v1/{verb}_lora_adapter"
            for where in ("open: GET /openapi.json", "web: web/openapi")
            for verb in ("load", "unload")
        ),
        "adapters can be loaded and unloaded",
    ),
    **dict.fromkeys(
        ("open: GET /openapi.json: .body.post /classify", "web: web/openapi: .body.post /classify"),
        "classifiers are served",
    ),
    **dict.fromkeys(
        (
            "open: GET /openapi.json: .body.post /api/generate.application/json",
            "web: web/openapi: .body.post /api/generate.application/json",
        ),
        "images are added: models take them",
    ),
    **dict.fromkeys(
        (
            *(
                f"open: ollama_{call}/wrong_03_options: {place}"
                for call in ("chat", "generate")
                for place in (
                    ".body",
                    ".events",
                    ".headers.cache-control",
                    ".headers.content-length",
                    ".headers.content-type",
                    ".headers.transfer-encoding",
                    ".headers.x-accel-buffering",
                    ".headers.x-octavo-ignored",
                    ".headers.x-should-retry",
                    ".status",
                )
            ),
            *(
                f'open: after/metrics: .metrics.values.octavo_{counted},model_name="script"}}'
                for counted in (
                    'requests_failed_total{code="invalid_value"',
                    'ignored_fields_total{field="mirostat"',
                )
            ),
        ),
        "mirostat 1 is refused by name: version 2 is served",
    ),
    "open: admin/statistics: .action.ok.flight_recorder": "a server keeps its last minutes",
    **dict.fromkeys(
        (
            f"{where}: .metrics.{what}.octavo_flight_recorder_{unit}"
            for where in (
                "open: GET /metrics",
                "open: GET /metrics?x=1",
                "open: after/metrics",
                "keyed: alice GET /metrics",
                "keyed: keyed/metrics",
                "small: small/metrics",
            )
            for what in ("types", "labels")
            for unit in ("bytes", "seconds")
        ),
        "a server keeps its last minutes",
    ),
    **dict.fromkeys(
        (
            "open: GET /openapi.json: .body.post /v1/chat/completions.application/json",
            "open: GET /openapi.json: .body.post /v1/completions.application/json",
            "open: GET /openapi.json: .body.post /v1/responses.application/json",
            "open: GET /openapi.json: .body.post /v1/responses/input_tokens.application/json",
            "web: web/openapi: .body.post /v1/chat/completions.application/json",
            "web: web/openapi: .body.post /v1/completions.application/json",
            "web: web/openapi: .body.post /v1/responses.application/json",
            "web: web/openapi: .body.post /v1/responses/input_tokens.application/json",
        ),
        "rare samplers are added: XTC, top-n-sigma, mirostat and n-grams",
    ),
}
_MODELS = "open: anthropic GET /v1/models"
DECIDED |= dict.fromkeys(
    (
        *(f"{_MODELS}{rest}: .headers.request-id" for rest in ("", "/script", "/alias")),
        *(
            f"{where}: {place}"
            for where in (f"{_MODELS}/none", f"{_MODELS}/", "keyed: key/anthropic_refused")
            for place in (
                ".headers.request-id", ".body.error.param", ".body.error.code", ".body.type", ".body.request_id"
            )
        ),
    ),
    "Anthropic's clients get Anthropic's errors and request id on paths that OpenAI's API has too",
)  # fmt: skip
DECIDED |= dict.fromkeys(
    ("open: GET /openapi.json: .body.get /props", "web: web/openapi: .body.get /props"), "facts for UIs"
)
SLOW_S = 0.5  # what takes longer is named


def run_groups(wanted: Iterable[Group]) -> Pairs:
    """Ask everything; name -> what is frozen of the answer. All servers start at once."""
    found: Pairs = {}
    with tempfile.TemporaryDirectory(prefix="octavo-freeze-") as folder:
        begun: list[tuple[Group, Server]] = []
        try:
            for group in wanted:
                place = Path(folder, group.name)
                place.mkdir()
                begun.append((group, Server(group, place)))
            for group, server in begun:
                server.wait()
                found |= _run(group, Runner(server))
                server.stop()
        finally:
            for _, server in begun:
                server.stop()
    return found


def _run(group: Group, runner: Runner) -> Pairs:
    found: Pairs = {}
    for call in group.calls:
        name = f"{group.name}: {call.name}"
        while name in found:
            name += " again"
        begun = time.monotonic()
        found[name] = runner.run(call)
        if (took_s := time.monotonic() - begun) > SLOW_S:
            print(f"{name}: {took_s:.1f} s", file=sys.stderr)
    return found


def read_pairs() -> Pairs:
    """The pairs that are frozen."""
    return dict(json.loads(line) for line in FILE.read_text().splitlines())


def write_pairs(pairs: Pairs) -> None:
    """Freeze these."""
    lines = (json.dumps([name, pair], ensure_ascii=False, separators=(",", ":")) for name, pair in pairs.items())
    FILE.write_text("\n".join(lines) + "\n")


def differences(frozen: Pairs, found: Pairs) -> list[str]:
    """One line for each place where they differ."""
    told = [f"{name}: no longer asked" for name in frozen if name not in found]
    told += [f"{name}: not frozen yet; --write" for name in found if name not in frozen]
    for name, pair in frozen.items():
        if name in found:
            told += [f"{name}: {line}" for line in places(pair, json.loads(json.dumps(found[name])))]
    return [line for line in told if line.split(" was ")[0] not in DECIDED]


def places(one: Any, other: Any, place: str = "") -> list[str]:
    """One line for each place where two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        absent = "(absent)"
        return [line for key in keys for line in places(one.get(key, absent), other.get(key, absent), f"{place}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [line for i, (a, b) in enumerate(zip(one, other, strict=True)) for line in places(a, b, f"{place}[{i}]")]
    return [] if one == other else [f"{place or 'it'} was {_short(one)}, is {_short(other)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 500 else text[:500] + "..."


def main() -> int:
    """Write, check or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="freeze what this tree answers")
    parser.add_argument("--check", action="store_true", help="compare what this tree answers with what is frozen")
    parser.add_argument("--show", metavar="NAME", help="show the frozen pairs whose name holds this")
    args = parser.parse_args()
    if args.show:
        for name, pair in read_pairs().items():
            if args.show in name:
                print(name, json.dumps(pair, indent=2, ensure_ascii=False))
        return 0
    begun = time.monotonic()
    found = run_groups(groups())
    print(f"{len(found)} pairs in {time.monotonic() - begun:.1f} s", file=sys.stderr)
    if args.write:
        write_pairs(found)
        return 0
    told = differences(read_pairs(), found)
    print("\n".join(told) or "no differences")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
