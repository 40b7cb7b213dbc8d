"""Readers of workload files: public traces, agent sessions, ServeGen's clients, token files, Octavo's recordings.

Owns: the formats' columns, units and quirks; one function per format. Does not: parse rows (rows) or recordings
(observe.recording). Files are read during iteration. Traces with one request per line are streamed.
"""

from __future__ import annotations

import gzip
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from hashlib import blake2b
from heapq import merge
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import msgspec

from octavo.errors import ConfigError
from octavo.fleet.routing_log import ChoiceRecord, EndRecord, PromptRecord, read_routing_log, routing_logs
from octavo.observe.recording.reader import open_recording
from octavo.observe.recording.requests import RecordedRequest, read_requests
from octavo.simulator.arrival import Arrival
from octavo.simulator.rows import FileRow, csv_rows, json_rows
from octavo.simulator.workloads.spec import BuildContext, Notes, Source, Spec
from octavo.simulator.workloads.synthetic import Draw, draw_tokens, quantiles

MOONCAKE_BLOCK, SERVING_SIM_BLOCK, AGENTIC_BLOCK, TOKEN_FILE_BLOCK = 512, 16, 64, 16  # tokens
MAX_CLIENTS = 10_000
MAX_BLOCKS = 1 << 24  # maximum blocks of one prompt
MAX_TOKEN_FILE = 1 << 30  # maximum bytes
_SESSION_STRIDE = 1 << 40  # number of keys reserved for one session: sessions share no block ids
_EPOCH = 738_000  # day number shortly before the traces, so that times fit a float with microseconds

# --- public traces with one request per line


class TraceReader:
    """Converts a trace's rows. Times count from the first row and never decrease; every request has tokens."""

    def __init__(self, spec: Spec, notes: Notes) -> None:
        self._is_sorting = spec.choice("sort", ("no", "yes")) == "yes"
        self._notes = notes
        self._first: float | None = None
        self._latest = 0.0

    def time(self, row: FileRow, name: str, seconds: float) -> float:
        """Return seconds since the first row. Raises ConfigError if times decrease, unless rows are sorted later."""
        if self._first is None:
            self._first = self._latest = seconds
        if seconds < self._latest and not self._is_sorting:
            raise row.fault(
                name, "this is earlier than the line before; give sort=yes, which reads the whole file first"
            )
        self._latest = seconds
        return seconds - self._first

    def tokens(self, prompt: int, output: int) -> tuple[int, int] | None:
        """Return both counts, each at least 1, or None if the request must be dropped."""
        if not prompt:
            self._notes.add("without a prompt, left out")
            return None
        if not output:
            self._notes.add("answers of no token, taken as one")
        return prompt, max(1, output)


def azure(spec: Spec, context: BuildContext) -> Source:
    """Read Azure's LLM inference traces of 2023 and 2024 (Patel et al., ISCA 2024): one CSV row per request."""

    def source(notes: Notes) -> Iterator[Arrival]:
        reader = TraceReader(spec, notes)
        for row in csv_rows(Path(spec.path), ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
            time = reader.time(row, "TIMESTAMP", _seconds(row))
            if pair := reader.tokens(row.count("ContextTokens"), row.count("GeneratedTokens")):
                yield Arrival(time, *pair)

    return source


def burstgpt(spec: Spec, context: BuildContext) -> Source:
    """Read BurstGPT (Wang et al., 2024): release 1's six columns, or release 2's eight with a session id.

    A row without response tokens is a failure and is dropped. `model=` selects one model, `log=` one log type.
    """
    model, log = spec.text_of("model"), spec.text_of("log")
    columns = ["Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"]

    def source(notes: Notes) -> Iterator[Arrival]:
        reader = TraceReader(spec, notes)
        for row in csv_rows(Path(spec.path), columns, optional=("Session ID",)):
            time = reader.time(row, "Timestamp", row.number("Timestamp"))
            prompt, output = row.count("Request tokens"), row.count("Response tokens")
            if (model and row.text("Model") != model) or (log and row.text("Log Type") != log):
                notes.add("of another model or log, left out")
            elif not output:
                notes.add("failed (no response), left out")
            elif pair := reader.tokens(prompt, output):
                yield Arrival(time, *pair, session=row.text("Session ID"))

    return source


def mooncake(spec: Spec, context: BuildContext) -> Source:
    """Read Mooncake's conversation and tool-and-agent traces (Qin et al., FAST 2025), with one block id per 512 tokens.

    A prompt's last block is usually partial, and caches hold full blocks only, so the last id is dropped. With
    `round=up`, prompts are lengthened to whole blocks instead.
    """
    is_rounding = spec.choice("round", ("no", "up")) == "up"

    def source(notes: Notes) -> Iterator[Arrival]:
        reader = TraceReader(spec, notes)
        for row in json_rows(Path(spec.path)):
            time = reader.time(row, "timestamp", row.number("timestamp") / 1e3)
            keys = row.integers("hash_ids")
            prompt = len(keys) * MOONCAKE_BLOCK if is_rounding else row.count("input_length")
            if pair := reader.tokens(prompt, row.count("output_length")):
                full = keys[: prompt // MOONCAKE_BLOCK]
                yield Arrival(time, *pair, keys=full, key_tokens=MOONCAKE_BLOCK)

    return source


def serving_sim(spec: Spec, context: BuildContext) -> Source:
    """Read LLMServingSim's workloads: arrivals in nanoseconds, lengths, ids of 16-token prefix blocks."""

    def source(notes: Notes) -> Iterator[Arrival]:
        reader = TraceReader(spec, notes)
        for row in json_rows(Path(spec.path)):
            # Times count from the trace's zero, not from the first request, as in the trace's measurements.
            time = row.number("arrival_time_ns") / 1e9
            reader.time(row, "arrival_time_ns", time)
            if pair := reader.tokens(row.count("input_toks"), row.count("output_toks")):
                keys = row.integers("hash_ids16") if "hash_ids16" in row.values else ()
                full = keys[: pair[0] // SERVING_SIM_BLOCK]
                yield Arrival(time, *pair, keys=full, key_tokens=SERVING_SIM_BLOCK if full else 0)

    return source


def service_log(spec: Spec, context: BuildContext) -> Source:
    """Read a CSV of client, req_time, prompt_len, output_len, as in VTC's results (Sheng et al., OSDI 2024)."""

    def source(notes: Notes) -> Iterator[Arrival]:
        reader = TraceReader(spec, notes)
        for row in csv_rows(Path(spec.path), ("client", "req_time", "prompt_len", "output_len")):
            time = reader.time(row, "req_time", row.number("req_time"))
            if pair := reader.tokens(row.count("prompt_len"), row.count("output_len")):
                yield Arrival(time, *pair, tenant=f"client{row.text('client')}")

    return source


def _seconds(row: FileRow) -> float:
    """Parse a time stamp of the 2023 trace (seven decimals, no zone) or the 2024 trace (six decimals, a zone)."""
    text = row.text("TIMESTAMP")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise row.fault("TIMESTAMP", "give a time such as 2023-11-16 18:15:46.680590") from None
    day = (moment.toordinal() - _EPOCH) * 86400.0
    return day + moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6


# --- sessions of coding agents


def agentic(spec: Spec, context: BuildContext) -> Source:
    """Read kv-cache-tester's sessions: one JSON line each; requests have t, in, out, api_time, hash_runs (block ids).

    Sessions start `every` seconds apart, or at a `rate`, by default all at time 0. The loop is closed: a request
    arrives after the simulated end of the request that it waited for, plus the recorded pause.
    """
    every, rate = spec.number("every", 0.0, min_value=0.0), spec.optional_number("rate")

    def source(notes: Notes) -> Iterator[Arrival]:
        clock, start = context.rng(spec, "times"), 0.0
        sessions: list[list[tuple[Arrival, int | None]]] = []
        for row in json_rows(Path(spec.path)):
            sessions.append(_read_session(row, len(sessions), start, notes))
            start += clock.expovariate(rate) if rate else every
        yield from _by_earliest(sessions)

    return source


def _by_earliest(sessions: list[list[tuple[Arrival, int | None]]]) -> Iterator[Arrival]:
    """Yield all requests by earliest possible arrival (as if answers took no time), so that parents come first."""
    order: list[tuple[float, int, int]] = []
    for number, turns in enumerate(sessions):
        times: list[float] = []
        for turn, (arrival, parent) in enumerate(turns):
            times.append(arrival.time + (0.0 if parent is None else times[parent]))
            order.append((times[turn], number, turn))
    index_of: dict[tuple[int, int], int] = {}
    for index, (_, number, turn) in enumerate(sorted(order)):
        arrival, parent = sessions[number][turn]
        index_of[number, turn] = index
        yield arrival if parent is None else replace(arrival, follows=index_of[number, parent])


def _read_session(row: FileRow, number: int, start: float, notes: Notes) -> list[tuple[Arrival, int | None]]:
    """Return a session's requests. Each has the index of its parent: the last request to end before it was sent."""
    block = row.count("block_size") if "block_size" in row.values else AGENTIC_BLOCK
    if not block:
        raise row.fault("block_size", "give at least 1")
    name = row.text("id") or f"session{number}"
    turns: list[tuple[Arrival, int | None]] = []
    ends: list[float] = []
    for request in row.rows("requests"):
        time, prompt, output = request.number("t"), request.count("in"), request.count("out")
        if not prompt:
            notes.add("without a prompt, left out")
            continue
        notes.add("answers of no token, taken as one", 0 if output else 1)
        parent = max((turn for turn, end in enumerate(ends) if end <= time + 1.0), key=ends.__getitem__, default=None)
        pause = max(0.0, time - ends[parent]) if parent is not None else start + time
        keys = _session_keys(request, number * _SESSION_STRIDE)[: prompt // block]
        arrival = Arrival(pause, prompt, max(1, output), session=name, keys=keys, key_tokens=block)
        turns.append((arrival, parent))
        ends.append(time + request.number("api_time", 0.0))
    return turns


def _session_keys(row: FileRow, base: int) -> Sequence[int]:
    """Return the block ids of runs, which are (first id, count) pairs."""
    runs = row.values.get("hash_runs", [])
    is_list = isinstance(runs, list) and all(isinstance(run, list) and len(run) == 2 for run in runs)
    if not is_list or not all(type(one) is int and 0 <= one < _SESSION_STRIDE for run in runs for one in run):
        raise row.fault("hash_runs", "give a list of [first id, how many]")
    if sum(count for _, count in runs) > MAX_BLOCKS:
        raise row.fault("hash_runs", f"give at most {MAX_BLOCKS} blocks")
    if len(runs) == 1:
        return range(base + runs[0][0], base + runs[0][0] + runs[0][1])
    return tuple(base + one for first, count in runs for one in range(first, first + count))


# --- ServeGen's client pools


@dataclass(frozen=True, slots=True)
class _Window:
    """A time window from `start` on, with `rate` requests per second. `gap` draws gaps with mean 1."""

    start: float
    rate: float
    gap: Callable[[random.Random], float]


@dataclass(frozen=True, slots=True)
class _Client:
    name: str
    windows: list[_Window]
    end: float
    prompt: Draw
    output: Draw

    def times(self, rng: random.Random) -> Iterator[float]:
        """Yield the times of a renewal process: each gap (mean 1) is converted to seconds by the windows' rates."""
        starts = [window.start for window in self.windows]
        now, index = self.windows[0].start, 0
        while True:
            left = self.windows[index].gap(rng)
            while True:
                window = self.windows[index]
                end = self.windows[index + 1].start if index + 1 < len(self.windows) else self.end
                room = (end - now) * window.rate
                if left < room:
                    now += left / window.rate
                    break
                left -= room
                now, index = end, index + 1
                if index == len(self.windows):
                    return
            yield now
            index = max(index, bisect_right(starts, now) - 1)


def servegen(spec: Spec, context: BuildContext) -> Source:
    """Read ServeGen's clients (Xiang et al., 2025): rates and burstiness by time window, and lengths.

    Each client is a tenant. A window's mean rate is the measured one for every shape of the gaps.
    """
    path = Path(spec.path)

    def source(notes: Notes) -> Iterator[Arrival]:
        clients: list[_Client] = []
        for row in json_rows(path):
            if len(clients) == MAX_CLIENTS:
                raise ConfigError(f"{path} has more than {MAX_CLIENTS} clients; split it")
            clients.append(_read_client(row))
        if not clients:
            raise ConfigError(f"{path} has no client; give ServeGen's clients as JSON lines")
        yield from merge(*(_requests(one, spec, context) for one in clients), key=lambda arrival: arrival.time)

    return source


def _requests(client: _Client, spec: Spec, context: BuildContext) -> Iterator[Arrival]:
    clock, chance = (context.rng(spec, f"{purpose} of {client.name}") for purpose in ("times", "lengths"))
    for time in client.times(clock):
        yield Arrival(time, draw_tokens(client.prompt, chance), draw_tokens(client.output, chance), tenant=client.name)


def _read_client(row: FileRow) -> _Client:
    windows, last = [], -math.inf
    raw = row.values.get("windows")
    if not isinstance(raw, list) or not raw:
        raise row.fault("windows", "give a list of [start, rate, variation, family, shape, scale]")
    for index, values in enumerate(raw):
        window = _read_window(values)
        if window is None or window.start <= last:
            raise ConfigError(
                f"{row.path}, line {row.line}, column windows[{index}]: {values!r}; give rising starts, as in "
                "[600, 93.5, 1.04, 'Gamma', 0.93, 0.0115]"
            )
        windows.append(window)
        last = window.start
    span = windows[1].start - windows[0].start if len(windows) > 1 else 600.0
    lengths = [_read_lengths(row, name) for name in ("input_tokens", "output_tokens")]
    return _Client(f"client{row.text('client') or row.line}", windows, last + span, *lengths)


def _read_window(values: object) -> _Window | None:
    if not isinstance(values, list) or len(values) not in (3, 6):
        return None
    numbers = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    if len(numbers) != len(values) - (len(values) == 6) or min(numbers[:2]) < 0:
        return None
    if len(values) == 3:
        return _Window(values[0], values[1], lambda rng: rng.expovariate(1.0))
    family, shape = values[3], float(values[4])
    if shape <= 0.01 or shape > 1e4 or family not in ("Gamma", "Weibull"):
        return None
    if family == "Gamma":
        return _Window(values[0], values[1], lambda rng: rng.gammavariate(shape, 1 / shape))
    scale = 1 / math.gamma(1 + 1 / shape)
    return _Window(values[0], values[1], lambda rng: rng.weibullvariate(scale, shape))


def _read_lengths(row: FileRow, name: str) -> Draw:
    shares, table = row.values.get("quantile_pcts"), row.values.get("quantiles")
    values = table.get(name) if isinstance(table, dict) else None
    if not isinstance(shares, list) or not isinstance(values, list) or len(shares) != len(values) or not shares:
        raise row.fault("quantiles", f"give quantile_pcts, and as many numbers in quantiles.{name}")
    if not all(isinstance(value, (int, float)) and 0 <= value < 1e9 for value in (*shares, *values)):
        raise row.fault("quantiles", f"give numbers of at least 0 in quantiles.{name}")
    if sorted(shares) != shares or sorted(values) != values:
        raise row.fault("quantiles", f"give rising quantile_pcts and quantiles.{name}")
    return quantiles(list(zip(shares, values, strict=True)))


# --- workload files of octavo bench offline


def token_file(spec: Spec, context: BuildContext) -> Source:
    """Return a file's requests, all at time 0 or at a `rate`. A group follows the previous group's longest answer."""
    path, rate = Path(spec.path), spec.optional_number("rate")

    def source(notes: Notes) -> Iterator[Arrival]:
        clock, now, index = context.rng(spec, "times"), 0.0, 0
        parent: int | None = None
        for group in read_token_file(path):
            longest: tuple[int, int | None] = (-1, None)
            for request in group:
                ids, output = request.prompt_token_ids, request.max_tokens
                time = now if parent is None else 0.0
                keys = _block_keys(ids)
                yield Arrival(time, len(ids), output, keys=keys, key_tokens=TOKEN_FILE_BLOCK, follows=parent)
                longest = max(longest, (output, index), key=lambda one: one[0])
                index += 1
                now += clock.expovariate(rate) if rate else 0.0
            parent = longest[1]

    return source


class TokenFileRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a workload file."""

    prompt_token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]


_TokenFileGroup = Annotated[list[TokenFileRequest], msgspec.Meta(min_length=1)]


def read_token_file(path: Path) -> list[list[TokenFileRequest]]:
    """Read a JSON list of requests, or of groups of requests; .gz files are decompressed. Raises ConfigError."""
    try:
        if path.stat().st_size > MAX_TOKEN_FILE:
            raise ConfigError(f"workload {path} is larger than {MAX_TOKEN_FILE} bytes; split it")
        data = path.read_bytes()
        content = msgspec.json.decode(gzip.decompress(data) if path.suffix == ".gz" else data)
        groups = content if isinstance(content, list) and content and isinstance(content[0], list) else [content]
        read: list[list[TokenFileRequest]] = msgspec.convert(groups, list[_TokenFileGroup])
    except gzip.BadGzipFile:
        raise ConfigError(f"workload {path} is not a gzip file; give JSON, or compress it") from None
    except OSError as error:
        raise ConfigError(f"workload {path} cannot be read ({error.strerror}); give a JSON file") from None
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"workload {path} is not a list of {{prompt_token_ids, max_tokens}}, or of such lists: {error}"
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"workload {path} is not JSON: {error}") from None
    return read


def _block_keys(ids: Sequence[int]) -> tuple[int, ...]:
    """Return a key for each full block. A key identifies the block and all blocks before it."""
    keys, running = [], blake2b(digest_size=8)
    for start in range(0, len(ids) - TOKEN_FILE_BLOCK + 1, TOKEN_FILE_BLOCK):
        running.update(b"".join(one.to_bytes(4, "little") for one in ids[start : start + TOKEN_FILE_BLOCK]))
        keys.append(int.from_bytes(running.digest(), "little") >> 1)
    return tuple(keys)


# --- Octavo's recordings


def recording(spec: Spec, context: BuildContext) -> Source:
    """Return the requests of a folder that `octavo serve --record` wrote, as an open loop with recorded lengths."""
    path = Path(spec.path)
    if logs := routing_logs(path):
        return partial(_routed, logs)

    @cache
    def read() -> tuple[bool, list[RecordedRequest]]:
        """Read the recording, once for all policies."""
        opened = open_recording(path)
        return opened.header.has_state, read_requests(opened)

    return lambda notes: recorded_arrivals(*read(), notes)


def recorded_arrivals(has_state: bool, requests: Sequence[RecordedRequest], notes: Notes) -> Iterator[Arrival]:
    """Yield recorded requests, in order, as arrivals. `has_state`: as in the recording's header."""
    counts: dict[str, tuple[int, ...]] = {}
    for one in requests:  # after a crash, a request's last record has the whole answer
        before = counts.get(one.name, ())
        counts[one.name] = tuple(map(max, zip_longest(before, one.output_tokens, fillvalue=0)))
    first = 0.0 if has_state or not requests else requests[0].arrival
    seen: set[str] = set()
    for one in requests:
        if one.is_resumed and one.name in seen:
            continue
        seen.add(one.name)
        notes.add("not ended when the recording was, taken as far as they came", one.end is None)
        notes.add("answers of no token, taken as one", not max(counts[one.name]))
        if one.was_open:
            notes.add("were open when the recording began, taken as new at time 0, with their tokens as prompt")
        yield recorded_arrival(one, counts[one.name], max(0.0, one.arrival - first))


def recorded_arrival(one: RecordedRequest, counts: Sequence[int], time: float) -> Arrival:
    """Return a recorded request as an Arrival; `counts` has the tokens of each choice.

    The outputs of a request before the recording began are part of its prompt, as far as all its choices have them.
    """
    before = one.earlier_tokens
    counts = [count - before for count in counts]
    return Arrival(
        time, one.prompt_tokens + before, max(1, *counts), tenant=one.tenant, priority=one.priority, keys=one.keys,
        key_tokens=one.key_tokens, output_keys=one.output_keys,
        choices=tuple(max(1, count) for count in counts) if len(counts) > 1 else (),
        ttft_objective=one.ttft_objective, tpot_objective=one.tpot_objective, spans=one.spans,
        adapter_id=one.adapter_id,
    )  # fmt: skip


def _routed(logs: Sequence[Path], notes: Notes) -> Iterator[Arrival]:
    """Yield the requests of a fleet's routing logs, as its router saw them: keys, sessions and tenants are digests."""
    first: float | None = None
    for path in logs:
        header, records = read_routing_log(path)
        counts = {one.request: one.output_tokens for one in records if isinstance(one, EndRecord)}
        for one in read_routing_log(path)[1]:
            if not isinstance(one, ChoiceRecord) or one.prompt is None:
                continue  # an end, or a request that was routed again
            first = header.began + one.time if first is None else first
            notes.add("not ended when the recording was, taken as one token", one.request not in counts)
            time = max(0.0, header.began + one.time - first)
            yield routed_arrival(one.prompt, counts.get(one.request, 1), time, header.key_tokens)


def routed_arrival(record: PromptRecord, output_tokens: int, time: float, key_tokens: int) -> Arrival:
    """Return a request of a routing log as an Arrival; `output_tokens` are those of all its choices."""
    prompt, output = record.prompt(), max(1, output_tokens // record.num_choices)
    return Arrival(
        time, prompt.prompt_tokens, output, prompt.tenant, prompt.session, keys=prompt.keys, key_tokens=key_tokens,
        choices=(output,) * record.num_choices if record.num_choices > 1 else (),
    )  # fmt: skip
