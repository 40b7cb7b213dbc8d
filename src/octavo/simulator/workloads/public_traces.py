"""Readers of public traces with one record a line: Azure, BurstGPT, Mooncake, LLMServingSim, VTC's results.

Owns: their columns, units and quirks, one function each. Does not: check order or emptiness (Reader does).
Files are read on iteration; nothing of one is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from octavo.simulator.arrival import Arrival
from octavo.simulator.rows import FileRow, csv_rows, json_rows
from octavo.simulator.workloads.source import Notes, Reader, Source, Surroundings
from octavo.simulator.workloads.spec import Spec

MOONCAKE_BLOCK = 512
SERVING_SIM_BLOCK = 16
_EPOCH = 738_000  # days before the traces: a float then keeps microseconds


def azure(spec: Spec, around: Surroundings) -> Source:
    """Read Azure's LLM inference traces of 2023 and 2024 (Patel et al., ISCA 2024): one CSV row a request."""
    path, reader = Path(spec.path), Reader(spec)

    def source(notes: Notes) -> Iterator[Arrival]:
        reader.begin(notes)
        for row in csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
            time = reader.time(row, "TIMESTAMP", _seconds(row))
            if pair := reader.tokens(row.count("ContextTokens"), row.count("GeneratedTokens")):
                yield Arrival(time, *pair)

    return source


def burstgpt(spec: Spec, around: Surroundings) -> Source:
    """Read BurstGPT (Wang et al., 2024): release 1's six columns, or release 2's eight with a session id.

    A response of no token is a failure and is left out; `model=` keeps one model's requests, `log=` one log type's.
    """
    path, reader = Path(spec.path), Reader(spec)
    model, log = spec.text_of("model"), spec.text_of("log")
    columns = ["Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"]

    def source(notes: Notes) -> Iterator[Arrival]:
        reader.begin(notes)
        for row in csv_rows(path, columns, optional=("Session ID",)):
            time = reader.time(row, "Timestamp", row.number("Timestamp"))
            prompt, output = row.count("Request tokens"), row.count("Response tokens")
            if (model and row.text("Model") != model) or (log and row.text("Log Type") != log):
                notes.add("of another model or log, left out")
            elif not output:
                notes.add("failed (no response), left out")
            elif pair := reader.tokens(prompt, output):
                yield Arrival(time, *pair, session=row.text("Session ID"))

    return source


def mooncake(spec: Spec, around: Surroundings) -> Source:
    """Read Mooncake's traces (Qin et al., FAST 2025), conversation and tool-and-agent alike: a block id per 512 tokens.

    The id of a prompt's last block names a part of a block, which no cache keeps; it is dropped. With `round=up`
    prompts are lengthened to whole blocks instead, as in counts of hits by blocks.
    """
    path, reader = Path(spec.path), Reader(spec)
    is_rounding = spec.choice("round", ("no", "up")) == "up"

    def source(notes: Notes) -> Iterator[Arrival]:
        reader.begin(notes)
        for row in json_rows(path):
            time = reader.time(row, "timestamp", row.number("timestamp") / 1e3)
            keys = row.integers("hash_ids")
            prompt = len(keys) * MOONCAKE_BLOCK if is_rounding else row.count("input_length")
            if pair := reader.tokens(prompt, row.count("output_length")):
                full = keys[: prompt // MOONCAKE_BLOCK]
                yield Arrival(time, *pair, keys=full, key_tokens=MOONCAKE_BLOCK)

    return source


def serving_sim(spec: Spec, around: Surroundings) -> Source:
    """Read LLMServingSim's workloads: arrivals in nanoseconds, lengths, ids of 16-token prefix blocks."""
    path, reader = Path(spec.path), Reader(spec)

    def source(notes: Notes) -> Iterator[Arrival]:
        reader.begin(notes)
        for row in json_rows(path):
            # Times are from the trace's own zero, not from the first request, as in its measurements.
            time = row.number("arrival_time_ns") / 1e9
            reader.time(row, "arrival_time_ns", time)
            if pair := reader.tokens(row.count("input_toks"), row.count("output_toks")):
                keys = row.integers("hash_ids16") if "hash_ids16" in row.values else ()
                full = keys[: pair[0] // SERVING_SIM_BLOCK]
                yield Arrival(time, *pair, keys=full, key_tokens=SERVING_SIM_BLOCK if full else 0)

    return source


def service_log(spec: Spec, around: Surroundings) -> Source:
    """Read a CSV of client, req_time, prompt_len, output_len, as in VTC's results (Sheng et al., OSDI 2024)."""
    path, reader = Path(spec.path), Reader(spec)

    def source(notes: Notes) -> Iterator[Arrival]:
        reader.begin(notes)
        for row in csv_rows(path, ("client", "req_time", "prompt_len", "output_len")):
            time = reader.time(row, "req_time", row.number("req_time"))
            if pair := reader.tokens(row.count("prompt_len"), row.count("output_len")):
                yield Arrival(time, *pair, tenant=f"client{row.text('client')}")

    return source


def _seconds(row: FileRow) -> float:
    """Parse a time stamp of 2023 (seven digits, no zone) or 2024 (six digits, a zone)."""
    text = row.text("TIMESTAMP")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise row.fault("TIMESTAMP", "give a time such as 2023-11-16 18:15:46.680590") from None
    day = (moment.toordinal() - _EPOCH) * 86400.0
    return day + moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6
