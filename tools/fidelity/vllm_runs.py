"""Three measured runs of vLLM, simulated from their arrivals, settings and operator profiles.

Owns: reading the runs (../shared/data/measured_vllm, from casys-kaist/LLMServingSim, MIT), the settings in our words.
Does not: tune. Stamps: a request's arrival is on the wall clock, all others on a monotonic one; the least distance of
arrival and queueing sets them together, so that a front's delays count as they did.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.limits import Limits
from octavo.simulator.arrival import Arrival
from octavo.simulator.closeness import KINDS, Column, Error, Times
from octavo.simulator.correction import CorrectionFit, MeasuredRequests, fit_correction
from octavo.simulator.cost_model import CostModel
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.costs.corrected import CorrectedCosts
from octavo.simulator.costs.table import CostTable, read_table
from octavo.simulator.outcomes import SimulatedRun
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
# vLLM's sizes of captured graphs, where a run does not list them: 1, 2, 4, then every 8 and, from 256, every 16.
CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
FITTED = 100  # requests that a fit uses
# Where in a step requests arrive changes their times to the first token by up to a step, and no table knows it. So what
# a correction predicts is the mean of several simulations, in which all but the first request arrive later by parts of
# a step. (Shifts of single requests would also take bursts apart.)
NUM_DRAWS, SHIFT_S = 8, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """One run: its folder, its workload, its profile's prefix, and what the facts call model and device."""

    folder: str
    workload: str
    model: str
    device: str
    tp: int

    @property
    def profile(self) -> str:
        """The prefix of its operator tables."""
        return f"{self.folder}__tp{self.tp}"


CASES = {
    "rtx4090": Case("RTX4090__Llama-3.1-8B", "sharegpt-llama-3.1-8b-300-sps10", "llama-3.1-8b", "rtx4090", 1),
    "rtxpro6000": Case(
        "RTXPRO6000__Qwen3-32B", "sharegpt-qwen3-32b-300-sps10", "qwen3-32b", "rtxpro6000-server", 2
    ),
    "experts": Case(
        "RTXPRO6000__Qwen3-30B-A3B", "sharegpt-qwen3-30b-a3b-300-sps10", "qwen3-30b-a3b", "rtxpro6000-server", 1
    ),
}  # fmt: skip


class MeasuredRun:
    """A run as it was: `measured` times and `workload` in order of arrival, its settings in our words."""

    def __init__(self, case: Case, data: Path = DATA) -> None:
        root = data / "measured_vllm"
        self.case, self._root = case, root
        self._meta = _json(root / case.folder / "meta.json.gz")
        asked = self._meta["engine_kwargs"]
        self.hardware = replace(
            Hardware.of(case.model, case.device, case.tp),
            dp=asked.get("data_parallel_size", 1),
            is_expert_parallel=asked.get("enable_expert_parallel", False),
        )
        self._node = _json(root / case.folder / "config.json.gz")
        stamps = _lines(root / case.folder / "requests.jsonl.gz")
        shapes = _lines(root / "workloads" / f"{case.workload}.lengths.jsonl.gz")
        column = {name: np.array([row[name] for row in stamps], float) for name in stamps[0] if name != "request_id"}
        arrived = column["arrival_time"] + np.min(column["queued_ts"] - column["arrival_time"])
        order = np.argsort(arrived, kind="stable")
        self.arrived, first, last, self.outputs = (
            values[order]
            for values in (arrived, column["first_token_ts"], column["last_token_ts"], column["output_toks"])
        )
        self.is_known = ~np.isnan(last)  # some runs lack the stamps of their later requests
        self.measured = self._times(self.arrived, first, last)
        known = np.flatnonzero(self.is_known)
        stamps_of_known = (column[known] for column in (self.arrived, first, last))
        self.requests = MeasuredRequests(case.folder, known, *stamps_of_known)
        start = self.arrived[0]
        self.workload = [
            Arrival(
                float(arrived[index] - start), shapes[index]["input_toks"], shapes[index]["output_toks"],
                keys=tuple(shapes[index]["hash_ids16"]), key_tokens=16,
            )
            for index in order
        ]  # fmt: skip

    @property
    def limits(self) -> Limits:
        """vLLM's settings: no headroom, recompute on preemption; one of its blocks is never used."""
        asked, model = self._meta["engine_kwargs"], self.hardware.model
        pool = self._meta.get("kv_cache", {}).get("num_gpu_blocks") or self.hardware.pool_blocks()
        return Limits(
            16, (pool - 1,), asked["max_model_len"] or model.max_model_len, model.vocab_size,
            asked["max_num_batched_tokens"], asked["max_num_seqs"], headroom=0.0, preemption="recompute",
        )  # fmt: skip

    @property
    def depth(self) -> int:
        """2 with asynchronous scheduling, vLLM 0.19's default."""
        resolved = self._meta.get("resolved_config", {}).get("scheduler_config", {})
        return 2 if resolved.get("async_scheduling", True) else 1

    def table_costs(self) -> CostModel:
        """The operator profile, the captured sizes, and the run's own link: a ring of tp devices."""
        tp = self.case.tp
        resolved = self._meta.get("resolved_config", {}).get("compilation_config", {})
        captured = tuple(resolved.get("cudagraph_capture_sizes", CAPTURED))
        files = read_table(str(self._root / "profile" / self.case.profile)).completed(self.hardware)
        steps = 2 * (tp - 1)
        profile = replace(
            files.profile,
            padded_tokens=captured,
            all_reduce_s=steps * self._node["link_latency"] * 1e-9,
            all_reduce_bandwidth=self._node["link_bw"] * 1e9 / (steps / tp) if tp > 1 else 0.0,
            exchange_s=(self.hardware.dp - 1) * self._node["link_latency"] * 1e-9,
            exchange_bandwidth=self._node["link_bw"] * 1e9,
        )
        return CostTable(replace(files, profile=profile))

    def roofline_costs(self) -> CostModel:
        """Facts alone."""
        return cost_model("roofline", self.hardware)

    def setup(self, costs: CostModel) -> Setup:
        """Return the engines of the run."""
        ranks = self.hardware.dp
        router = "least_requests" if ranks > 1 else "round_robin"
        return Setup(self.limits, costs, depth=self.depth, router=router, ranks=ranks)

    def simulate(self, costs: CostModel, shift_s: float = 0.0) -> tuple[SimulatedRun, Times]:
        """Return the predicted run, and its times in the order of `workload`; `shift_s` delays all but the first."""
        workload = [self.workload[0], *(replace(one, time=one.time + shift_s) for one in self.workload[1:])]
        run = simulate(workload, self.setup(costs))
        order = np.argsort(np.array(run.outcomes.indices))
        first, ends = (np.array(values)[order] for values in (run.outcomes.first_tokens, run.outcomes.ends))
        return run, self._times(np.array([arrival.time for arrival in workload]), first, ends)

    def draws(self, costs: CostModel) -> list[Times]:
        """Return what several simulations predict, each in the order of `workload`."""
        return [self.simulate(costs, number * SHIFT_S / NUM_DRAWS)[1] for number in range(NUM_DRAWS)]

    def errors(self, draws: Sequence[Times], chosen: slice) -> dict[str, dict[str, Error]]:
        """Return the errors of some requests' times, and their intervals, each as its mean over the draws."""
        every = [part(draw, chosen).errors(part(self.measured, chosen)) for draw in draws]
        return {
            kind: {name: Error(*np.mean([one[kind][name] for one in every], 0).tolist()) for name in every[0][kind]}
            for kind in KINDS
        }

    def _times(self, arrivals: Column, first: Column, last: Column) -> Times:
        """The times of the requests whose stamps are known."""
        return Times.of(*(column[self.is_known] for column in (arrivals, first, last, self.outputs)))

    def fit(self, costs: CostModel, chosen: slice) -> CorrectionFit:
        """Correct a cost model by some of the measured requests."""
        return fit_correction(self.workload, self.setup(costs), self.requests.part(chosen))


def part(times: Times, chosen: slice) -> Times:
    """The times of some requests (all have several tokens)."""
    return Times(times.ttft[chosen], times.tpot[chosen], times.e2e[chosen])


def splits(count: int) -> dict[str, tuple[slice, slice]]:
    """What a fit sees and what it predicts, of so many requests in order of arrival."""
    half, last = count // 2, max(0, count - FITTED)
    return {
        f"first {FITTED}": (slice(FITTED), slice(FITTED, None)),
        "first half": (slice(half), slice(half, None)),
        "second half": (slice(half, None), slice(half)),
        f"last {FITTED}": (slice(last, None), slice(min(last, FITTED))),
    }


def fit_table(run: MeasuredRun, costs: CostModel) -> str:
    """Fit to parts of a run and predict others, with the fit and without it."""
    lines = [
        "| fit on, predicted | form | ttft | tpot | e2e | ttft p99 | tpot p99 | e2e p99 | e2e p50 |",
        "|---" * 9 + "|",
    ]
    plain = run.draws(costs)
    for name, (seen, others) in splits(len(run.measured.e2e)).items():
        fit = run.fit(costs, seen)
        corrected = run.draws(CorrectedCosts(costs, fit.correction))
        rows = [("no correction", plain)] + [(fit.correction.form, corrected)] * fit.correction.is_used
        for form, predicted in rows:
            errors = run.errors(predicted, others)
            cells = [errors[kind][word] for word in ("mean", "p99") for kind in KINDS] + [errors["e2e"]["p50"]]
            count = len(part(run.measured, others).e2e)
            lines.append(f"| {name}, {count} others | {form} | {' | '.join(map(str, cells))} |")
        if not fit.correction.is_used:
            lines.append(f"| | not used: {fit.correction.reason} |" + " |" * 7)
    return "\n".join(lines)


def _json(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as stream:
        values: dict[str, Any] = json.load(stream)
    return values


def _lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as stream:
        return [json.loads(line) for line in stream]
