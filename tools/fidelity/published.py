"""Published measurements of datacentre GPUs against the roofline.

Owns: choosing rows of ../shared/data/aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0) that facts describe, and the
closed loop that stands for how they were measured. Does not: tune.
A row is a number of clients that each send a prompt of one length and wait for an output of one length, ROUNDS times.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.core.limits import Limits
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.closeness import Times
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup

ROUNDS = 3
GROUP = ("model_path", "system", "gemm_quant_mode", "tp_size", "backend")
PER_GROUP = 4  # rows of each group
MAX_OUTPUT = 1024
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
DEVICES = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "gb200": "gb200", "b300_sxm": "b300"}
DTYPES = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Point:
    """One row and what facts say of it: seconds to the first token and for each behind it."""

    model: str
    device: str
    dtype: str
    tp: int
    backend: str
    clients: int
    prompt: int
    output: int
    measured: tuple[float, float]
    predicted: tuple[float, float]


def points(data: Path) -> list[Point]:
    """Predict a sample of the rows: of each group the same few, evenly from the file."""
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for name in ("silicon_sample.csv.gz", "silicon_refs.csv.gz"):
        with gzip.open(data / "aiconfigurator" / name, "rt", newline="") as stream:
            for row in csv.DictReader(stream):
                if _is_described(row):
                    key = tuple(
                        row[column] for column in ("model_path", "system", "gemm_quant_mode", "tp_size", "backend")
                    )
                    groups.setdefault(key, []).append(row)
    chosen = [
        row for key in sorted(groups) for row in groups[key][:: max(1, len(groups[key]) // PER_GROUP)][:PER_GROUP]
    ]
    found = (_predict(row) for row in chosen)
    return [point for point in found if point is not None]


def _is_described(row: Mapping[str, str]) -> bool:
    """One server, one way to share a layer, and a model and a device whose facts are known."""
    return (
        row["mode"] == "agg"
        and row["model_path"] in MODELS
        and row["system"] in DEVICES
        and row["gemm_quant_mode"] in DTYPES
        and row["attention_dp_size"] in ("", "0", "1")
        and row["pp_size"] == "1"
        and int(row["osl"]) <= MAX_OUTPUT
        and int(row["tp_size"]) <= 8
    )


def _predict(row: Mapping[str, str]) -> Point | None:
    """None where the weights do not fit by the facts (they did, with more of the memory)."""
    dtype, tp = DTYPES[row["gemm_quant_mode"]], int(row["tp_size"])
    hardware = Hardware.of(f"{MODELS[row['model_path']]}:{dtype}", DEVICES[row["system"]], tp)
    clients, prompt, output = int(row["batch_size"]), int(row["isl"]), int(row["osl"])
    try:
        blocks = hardware.pool_blocks(8192)
    except ConfigError:
        return None
    limits = Limits(16, (blocks,), 131072, hardware.model.vocab_size, 8192, clients, prefix_caching=False)
    arrivals = [
        Arrival(0.0, prompt, output, follows=None if place < clients else place - clients)
        for place in range(clients * ROUNDS)
    ]
    outcomes = simulate(arrivals, Setup(limits, cost_model("roofline", hardware), depth=2)).outcomes
    columns = (outcomes.arrivals, outcomes.first_tokens, outcomes.ends, outcomes.output_tokens)
    times = Times.of(*(np.array(column, float) for column in columns))
    return Point(
        hardware.model.name, hardware.device.name, dtype, tp, row["backend"], clients, prompt, output,
        (float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3),
        (float(times.ttft.mean()), float(times.tpot.mean())),
    )  # fmt: skip


def summary(found: list[Point]) -> str:
    """Predicted over measured, by model, device and dtype: the median, and where the middle 80 of 100 lie."""
    lines = [
        "| model | device | weights | rows | tpot: median | 10 to 90 % | ttft: median | 10 to 90 % |",
        "|---" * 8 + "|",
    ]
    groups: dict[tuple[str, str, str], list[Point]] = {}
    for point in found:
        groups.setdefault((point.model, point.device, point.dtype), []).append(point)
    for key, members in [*sorted(groups.items()), (("all", "", ""), found)]:
        cells = []
        for place in (1, 0):
            ratios = np.array([point.predicted[place] / point.measured[place] for point in members])
            low, middle, high = np.percentile(ratios, [10, 50, 90])
            cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        lines.append(f"| {' | '.join(key)} | {len(members)} | {' | '.join(cells)} |")
    return "\n".join(lines)
