"""`octavo replay DIR`: repeat a recording's calls, compare the decisions, and simulate other settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo.cli.flags import check_output
from octavo.cli.terminal import say
from octavo.cli.trace import ViewOptions, print_views, write_views
from octavo.cli.what_if import compare, read_change, table
from octavo.errors import ConfigError
from octavo.observe.recording import Recording, ReplayReport, open_recording, replay
from octavo.simulator.recorded import check_policy
from octavo.simulator.report import Case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("recording", metavar="DIR", help="what octavo serve --record wrote, or one segment of it")
    parser.add_argument(
        "--what-if", action="append", default=[], metavar="K=V,...",
        help="simulate the same requests with other settings, as in policy=fair,max_sequences=64; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--cost", default="fitted", metavar="C",
        help="how long simulated steps take: fitted to this recording, fitted:FILE, table:DIR [fitted]",
    )  # fmt: skip
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print all of it as JSON, or write it to FILE"
    )
    parser.add_argument("--page", metavar="FILE", help="write the dashboard as one HTML file that plays the recording")
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    """Replay; return 1 if a decision differs from the recorded one."""
    for flag in ("json", "page", "perfetto"):
        check_output(f"--{flag}", getattr(args, flag))
    recording = open_recording(args.recording)
    for segment in recording.segments:
        check_policy(segment.header.limits.policy)
    for text in args.what_if:  # report errors before minutes of work
        read_change(text, recording.header.limits)
    options = ViewOptions(args.page, args.perfetto)
    if options.page is None and options.perfetto is None:
        report, views = replay(recording), None
    else:
        views = write_views(recording, options)
        report = views.report
    cases, remarks = compare(recording, args.what_if, args.cost) if args.what_if and report.is_equal else ([], [])
    facts = _facts(recording, report, cases, remarks)
    if args.json == "-":
        print(json.dumps(facts, indent=1))
        return 0 if report.is_equal else 1
    print("\n".join(_lines(recording, report)))
    if views is not None:
        print_views(views, options)
    elif args.what_if and not report.is_equal:
        say("no settings are tried on a recording that does not replay to the same decisions")
    if cases:
        print()
        print("\n".join([*(f"note: {remark}" for remark in remarks), *table(cases)]))
    if args.json:
        _write(args.json, json.dumps(facts, indent=1) + "\n")
    return 0 if report.is_equal else 1


def _lines(recording: Recording, report: ReplayReport) -> Iterator[str]:
    """Yield the lines that a terminal shows of a replay."""
    header = recording.header
    lives = f"{len(recording.segments)} lives" if len(recording.segments) > 1 else "1 life"
    yield (
        f"{recording.path}: {header.model}, policy {header.limits.policy}, {lives}, "
        f"{sum(segment.num_bytes for segment in recording.segments):,} bytes"
    )
    for number, end in enumerate(report.ends):
        yield f"life {number + 1} ended: {end}"
    yield (
        f"{report.num_requests:,} requests, {report.num_tokens:,} output tokens, {report.num_plans:,} plans, "
        f"{report.num_failed_steps:,} failed steps in {report.seconds:.1f} s"
    )
    if report.difference is None:
        yield f"equal: all {report.num_equal:,} plans have the digests that they had"
        return
    found = report.difference
    yield f"NOT EQUAL after {report.num_equal:,} plans that were: step {found.step} of life {found.segment_index + 1}"
    yield from (f"  {line}" for line in found.lines)


def _facts(recording: Recording, report: ReplayReport, cases: list[Case], remarks: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "recording": str(recording.path),
        "model": recording.header.model,
        "octavo": recording.header.octavo,
        "policy": recording.header.limits.policy,
        "is_equal": report.is_equal,
        "replay": asdict(report),
    }
    if cases:
        facts["runs"] = {case.label: case.facts for case in cases}
        facts["remarks"] = remarks
    return facts


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give a path in a folder that exists") from None
