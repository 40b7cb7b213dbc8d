"""`octavo replay DIR`: repeat a recording's calls, compare the decisions, and simulate other settings.

For a fleet's recording, repeat its router's choices instead.

Owns: the flags, the settings of --what-if, the output. Does not: replay (observe), simulate or fit (simulator).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from octavo.cli.flags import UsageError, check_output, output_json
from octavo.cli.terminal import say
from octavo.cli.trace import ViewOptions, print_views, write_views
from octavo.config import SETTINGS, Setting
from octavo.config.spelling import unknown
from octavo.core.limits import Limits
from octavo.core.policy import find_policy
from octavo.errors import ConfigError
from octavo.fleet.routing import ROUTERS
from octavo.fleet.routing_log import replay_routing, routing_logs
from octavo.machine import usable_cores
from octavo.observe.recording import Recording, ReplayReport, open_recording, replay
from octavo.observe.recording.reader import CUT_OFF
from octavo.simulator.arrival import Arrival
from octavo.simulator.costs import cost_model
from octavo.simulator.costs.fitted import Fitted, fit_recording
from octavo.simulator.drafts import DraftSettings
from octavo.simulator.recorded import MeasuredRecording, check_policy, measure
from octavo.simulator.report import Case, comparison_table
from octavo.simulator.run import simulate
from octavo.simulator.search import process_pool
from octavo.simulator.setup import Setup
from octavo.simulator.summary import summarise
from octavo.simulator.workloads.spec import Notes
from octavo.simulator.workloads.traces import recorded_arrivals

MAX_COLUMNS = 8
MANY_BYTES = 8 << 20  # of a recording, about 2,600 requests: simulating it takes longer than starting a process
_SECTIONS = ("cache", "scheduling")
_ALIASES = {"max_num_seqs": "max_sequences", "max_num_batched_tokens": "max_batch_tokens"}
_OF_SETUP = {"depth": int, "pipeline_depth": int, "replicas": int, "router": str, "max_waiting": int}
# Limits that a simulation cannot change -> the reason.
_REFUSED = {
    "vocab_size": "it changes no decision",
    "groups": "they are the model's",
    "tenant_weights": "give octavo simulate --workload DIR --tenant-weight instead",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "recording", metavar="DIR", help="what octavo serve --record or octavo record wrote, or one segment of it"
    )
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
    logs = routing_logs(Path(args.recording))
    return _replay_routing(args, logs) if logs else _replay(args)


def _replay(args: argparse.Namespace) -> int:
    """Replay the recording of an engine."""
    recording = open_recording(args.recording)
    for segment in recording.segments:
        check_policy(segment.header.limits.policy)
    for text in args.what_if:  # report errors before the replay, which may take minutes
        read_what_if(text, recording.header.limits)
    options = ViewOptions(args.page, args.perfetto)
    views = write_views(recording, options) if options.page or options.perfetto else None
    whole = None if views is None else views.report
    cases: list[Case] = []
    remarks: list[str] = []
    if args.what_if and (whole is None or whole.is_equal):
        with _processes(recording, len(args.what_if)) as pool:
            measured = measure(recording, whole, pool)
            report = measured.report
            if report.is_equal:
                cases, remarks = compare(recording, measured, args.what_if, args.cost, pool)
    else:
        report = replay(recording) if whole is None else whole
    facts = _facts(recording, report, cases, remarks)
    if not output_json(args.json, json.dumps(facts, indent=1)):
        return 0 if report.is_equal else 1
    print("\n".join(_lines(recording, report)))
    if views is not None:
        print_views(views, options)
    elif args.what_if and not report.is_equal:
        say("the recording does not replay to the same decisions, so --what-if is left out")
    if cases:
        print()
        print("\n".join([*(f"note: {remark}" for remark in remarks), *_table(cases)]))
    return 0 if report.is_equal else 1


def _replay_routing(args: argparse.Namespace, logs: Sequence[Path]) -> int:
    """Let a new router make the choices of a fleet again; return 1 if one differs."""
    if args.what_if or args.page or args.perfetto:
        raise UsageError(
            f"{args.recording} is a fleet's: --what-if, --page and --perfetto are of one engine's recording; simulate "
            f"another fleet by octavo simulate -w {args.recording} --replicas N --router NAME"
        )
    replays = {str(path): replay_routing(path) for path in logs}
    facts = {path: asdict(one) | {"is_equal": one.is_equal} for path, one in replays.items()}
    if output_json(args.json, json.dumps(facts, indent=1)):
        for path, one in replays.items():
            print(f"{path}: router {one.router}, {one.num_requests:,} requests, {one.end_reason or CUT_OFF}")
            print(f"{one.num_equal:,} of {one.num_choices:,} choices equal")
            if one.difference:
                print(f"NOT EQUAL: {one.difference}")
    return 0 if all(one.is_equal for one in replays.values()) else 1


def _lines(recording: Recording, report: ReplayReport) -> Iterator[str]:
    """Yield a replay's report as lines of text."""
    header, segments = recording.header, recording.segments
    files = f"{len(segments)} file{'s' * (len(segments) > 1)}"
    yield (
        f"{recording.path}: {header.model}, policy {header.limits.policy}, {files}, "
        f"{sum(segment.num_bytes for segment in segments):,} bytes"
    )
    for segment, end in zip(segments, report.ends, strict=False):  # of the files up to a difference
        yield f"{segment.path.name} ended: {end}"
    yield (
        f"{report.num_requests:,} requests, {report.num_tokens:,} output tokens, {report.num_plans:,} plans, "
        f"{report.num_failed_steps:,} failed steps in {report.seconds:.1f} s"
    )
    if report.num_left:
        yield (
            f"equal: the first {report.num_equal:,} plans have the digests that they had; {report.num_left:,} were "
            f"read without a replay, which octavo replay {recording.path} makes"
        )
        return
    if report.difference is None:
        yield f"equal: all {report.num_equal:,} plans have the digests that they had"
        return
    difference = report.difference
    name = segments[difference.segment_index].path.name
    yield f"NOT EQUAL after {report.num_equal:,} equal plans: step {difference.step} of {name}"
    yield from (f"  {line}" for line in difference.lines)


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


# --- --what-if


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Settings to try: the user's text, new limits, fields of Setup, and a factor on the arrival rate."""

    label: str
    limits: Limits
    setup: dict[str, Any] = field(default_factory=dict)
    rate_scale: float = 1.0


def read_what_if(text: str, recorded: Limits) -> WhatIf:
    """Parse `policy=fair,max_sequences=64`. Raises ConfigError naming the wrong word and the remedy."""
    values: dict[str, Any] = {}
    setup: dict[str, Any] = {}
    rate_scale = 1.0
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = word.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not value.strip():
            raise ConfigError(f"--what-if has {word!r}; give NAME=VALUE, as in policy=fair,max_sequences=64")
        if name == "rate_scale":
            rate_scale = _number(word, value)
        elif name in _OF_SETUP:
            setup[name.removeprefix("pipeline_")] = _setup_value(name, word, value.strip())
        else:
            values.update(_limit_value(name, word, value.strip(), recorded))
    if not (values or setup or rate_scale != 1.0):
        raise ConfigError(f"--what-if is {text!r}; give at least one NAME=VALUE, as in policy=fair")
    return WhatIf(text, _change_limits(recorded, values), setup, rate_scale)


def _setup_value(name: str, word: str, value: str) -> Any:
    if name == "router":
        if value not in ROUTERS:
            raise ConfigError(f"--what-if has {word!r}: {unknown('router', value, ROUTERS)}")
        return value
    return int(_number(word, value))


def _number(word: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(f"--what-if has {word!r}; give a number above 0")
    return number


def _limit_settings() -> dict[str, Setting]:
    """Return the settings that are fields of Limits, by every spelling."""
    names = {one.name for one in fields(Limits)}
    by_name = {}
    for setting in SETTINGS:
        name = "prefix_caching" if setting.name == "enable_prefix_caching" else setting.name
        if setting.section in _SECTIONS and name in names:
            by_name.update({key.replace("-", "_"): setting for key in (*setting.keys, name)})
    return by_name


def _limit_value(name: str, word: str, value: str, recorded: Limits) -> dict[str, Any]:
    name = _ALIASES.get(name, name)
    if name in _REFUSED:
        raise ConfigError(f"--what-if has {word!r}, which a replay cannot try: {_REFUSED[name]}")
    if name in ("num_blocks", "host_blocks", "max_model_len"):
        count = int(_number(word, value))
        return {name: count if name == "max_model_len" else (count,) * len(recorded.groups)}
    if name == "kv_cache_tokens":
        return {"num_blocks": (max(1, int(_number(word, value)) // recorded.block_size),) * len(recorded.groups)}
    known = _limit_settings()
    if name not in known:
        every = (*known, *_OF_SETUP, "rate_scale", "num_blocks", "host_blocks", "kv_cache_tokens", "max_model_len")
        remedy = f"give one of {', '.join(sorted(every))}"
        raise ConfigError(f"--what-if: {unknown('setting', name, every, remedy)}")
    setting = known[name]
    read = setting.read(value, f"{setting.key} of --what-if")
    if setting.name == "policy":
        find_policy(read)
    return {"prefix_caching" if setting.name == "enable_prefix_caching" else setting.name: read}


def _change_limits(recorded: Limits, values: dict[str, Any]) -> Limits:
    """Return the limits with these values. If only the block size changes, a pool keeps its tokens."""
    size = values.get("block_size", recorded.block_size)
    if size != recorded.block_size:
        for name in ("num_blocks", "host_blocks"):
            values.setdefault(name, tuple(count * recorded.block_size // size for count in getattr(recorded, name)))
    return replace(recorded, **values)


@contextmanager
def _processes(recording: Recording, count: int) -> Iterator[ProcessPoolExecutor | None]:
    """Yield up to `count` processes, at most one for each core; None for a short recording, or for a single core."""
    num_cores = usable_cores()
    if num_cores == 1 or sum(segment.num_bytes for segment in recording.segments) < MANY_BYTES:
        yield None
        return
    pool = process_pool(min(num_cores, count))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def compare(
    recording: Recording,
    measured: MeasuredRecording,
    texts: Sequence[str],
    cost: str,
    pool: ProcessPoolExecutor | None = None,
) -> tuple[list[Case], list[str]]:
    """Return the recorded run, its simulation and a simulation of each change, and remarks on what is not simulated.

    `cost` names a cost model; "fitted" fits one to this recording. With a `pool` the changes are simulated there, and
    at the same time the recorded settings here. Raises ConfigError, RecordingError.
    """
    if len(texts) > MAX_COLUMNS:
        raise ConfigError(f"--what-if is given {len(texts)} times; give at most {MAX_COLUMNS}")
    header = recording.header
    unchanged = WhatIf("simulated", header.limits)
    changes = [unchanged, *(read_what_if(text, header.limits) for text in texts)]
    fit = fit_recording(recording, measured.columns, has_errors=False) if cost == "fitted" else None
    costs = cost_model(cost) if fit is None else Fitted(fit)
    cases = [Case.of("recorded", measured.run, summarise(measured.run))]
    notes, drafts = Notes(), measured.drafts
    arrivals = list(recorded_arrivals(header.has_state, measured.requests, notes))
    runs: list[tuple[str, list[Arrival], Setup]] = []
    for change in changes:
        scale = change.rate_scale
        scaled = arrivals if scale == 1.0 else [replace(one, time=one.time / scale) for one in arrivals]
        # Their number and acceptance are the recorded ones, whatever the source of drafts was.
        limits = replace(change.limits, has_draft_model=drafts is not None, has_paced_lookup=False)
        limits = limits if drafts is not None else replace(limits, max_draft_tokens=0)
        kept = drafts if limits.max_draft_tokens else None
        setup = Setup(limits, costs, depth=min(header.depth, 2), sample_s=1.0, drafts=kept)
        runs.append((change.label, scaled, replace(setup, **change.setup)))
    others = [] if pool is None else [pool.submit(_simulate, *run) for run in runs[1:]]
    cases += [_simulate(*run) for run in (runs[:1] if others else runs)]
    cases += [other.result() for other in others]
    remarks = [f"{count:,} requests {description}" for description, count in notes.counts.items()]
    return cases, [*_remarks(recording, drafts, changes), *remarks]


def _simulate(label: str, workload: list[Arrival], setup: Setup) -> Case:
    result = simulate(workload, setup)
    return Case.of(label, result, summarise(result))


def _remarks(recording: Recording, drafts: DraftSettings | None, changes: Sequence[WhatIf]) -> Iterator[str]:
    recorded = recording.header.limits
    if recorded.max_draft_tokens and drafts is not None:
        yield (
            f"{100 * drafts.share:.0f} % of the decode rows had drafts, {drafts.length} on the mean, and "
            f"{100 * drafts.acceptance:.0f} % of those verified were accepted: simulations draw the same at random"
        )
    elif recorded.max_draft_tokens:
        yield "the engine could draft and never did, so simulations do not"
    if recorded.encoder_budget:
        yield "the time that media take to encode is in no cost model: simulations only keep the encoder's budgets"
    if recording.header.has_state:
        yield "recorded in the middle of an engine's life: simulations begin with an empty cache"
    if not recorded.prefix_caching and any(change.limits.prefix_caching for change in changes):
        yield "recorded without prefix caching, so there are no block keys: simulations find nothing cached"
    if len(recording.segments) > 1:
        yield f"the engine failed {len(recording.segments) - 1} times; simulations run without failures"


def _table(cases: Sequence[Case]) -> Iterator[str]:
    """Yield a table with one figure per line and one column per case. Changes have numbers, with a legend above."""
    heads = ["recorded", "simulated", *(f"what-if {number}" for number in range(1, len(cases) - 1))]
    for head, case in zip(heads[2:], cases[2:], strict=True):
        yield f"{head}: {case.label}"
    yield from comparison_table(cases, heads, 14)
