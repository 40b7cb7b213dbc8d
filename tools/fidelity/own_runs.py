"""Recorded runs of this engine, predicted from their own first third.

Owns: making the runs, the fit on a part of a recording, the comparison with the rest. Does not: serve (octavo does).
A run is `octavo bench online` with a server of its own that records. A fit sees the steps before two thirds of the
requests came; the whole run is simulated with it, from arrivals, lengths and block keys, and those two thirds are
compared. Runs of the same workload tell how far a run is from another one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tools.fidelity.closeness import Column, Times

from octavo.core.request import FinishReason
from octavo.observe.recording.reader import RecordedStep, Recording, open_recording, steps
from octavo.observe.recording.replaying import RecordedRequest, arrivals
from octavo.simulator.arrival import Arrival
from octavo.simulator.costs.fitted import Fit, Fitted, fit_steps
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup

LEARNT = 1 / 3
NAMES = ("ttft", "tpot", "e2e")
BOUND = 0.05


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run's requests behind the first third, as they went and as predicted; and the fit."""

    fit: Fit
    measured: Times
    predicted: Times


def record(folder: Path, number: int, options: Sequence[str]) -> Path:
    """Make one run, if its figures are not there; options are those of octavo bench online.

    Raises CalledProcessError.
    """
    path = folder / f"run-{number}"
    figures = folder / f"run-{number}.json"
    if not figures.is_file():
        command = [sys.executable, "-m", "octavo", "bench", "online", "--record", str(path), "--json", *options]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures.write_text(done.stdout, encoding="utf-8")
    return path


def predict(path: Path) -> Prediction:
    """Predict a run from its first third."""
    recording = open_recording(path)
    asked = [one for one in arrivals(recording) if one.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]
    start = asked[0].arrival
    learnt = int(LEARNT * len(asked))
    cut = asked[learnt].arrival
    fit = fit_steps(_before(recording, cut - start), path.name)
    times = _simulated(recording, asked, fit)
    rest = np.arange(len(asked)) >= learnt
    return Prediction(fit, _part(_measured(asked), rest), _part(times, rest))


def _before(recording: Recording, seconds: float) -> list[RecordedStep]:
    """Steps that ended within so many seconds of the first one."""
    found: list[RecordedStep] = []
    for step in steps(recording):
        if found and step.collected > found[0].plan.now + seconds:
            break
        found.append(step)
    return found


def _measured(asked: Sequence[RecordedRequest]) -> tuple[Column, ...]:
    columns = [(one.arrival, one.first_token or 0.0, one.end or 0.0, one.output_tokens[0]) for one in asked]
    return tuple(np.array(column, float) for column in zip(*columns, strict=True))


def _simulated(recording: Recording, asked: Sequence[RecordedRequest], fit: Fit) -> tuple[Column, ...]:
    """The same columns of a simulation of the whole run."""
    start = asked[0].arrival
    workload = [
        Arrival(
            one.arrival - start, one.prompt_tokens, one.output_tokens[0], keys=one.keys, key_tokens=one.key_tokens,
            output_keys=one.output_keys, tenant=one.tenant, priority=one.priority,
        )
        for one in asked
    ]  # fmt: skip
    header = recording.header
    outcomes = simulate(workload, Setup(header.limits, Fitted(fit), depth=header.depth)).outcomes
    order = np.argsort(np.array(outcomes.indices))
    columns = (outcomes.arrivals, outcomes.first_tokens, outcomes.ends, outcomes.output_tokens)
    return tuple(np.array(column, float)[order] for column in columns)


def _part(columns: tuple[Column, ...], chosen: npt.NDArray[np.bool_]) -> Times:
    return Times.of(*(column[chosen] for column in columns))


def spread(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Standard deviation over runs of each measured mean, as a share of their mean; 0 for one run."""
    found = {}
    for name in NAMES:
        means = np.array([np.mean(getattr(one.measured, name)) for one in predictions])
        found[name] = float(np.std(means, ddof=1) / np.mean(means)) if len(means) > 1 else 0.0
    return found


def verdict(predictions: Sequence[Prediction]) -> str:
    """Each run's errors of means, the spread of the runs, and whether the errors stay in 5 % or twice the spread."""
    between = spread(predictions)
    lines = ["| run | " + " | ".join(f"{name}: measured, error" for name in NAMES) + " |", "|---" * 4 + "|"]
    inside = dict.fromkeys(NAMES, 0)
    for number, one in enumerate(predictions):
        errors = one.predicted.errors(one.measured)
        cells = []
        for name in NAMES:
            error = errors[name]["mean"]
            inside[name] += abs(error) <= max(BOUND, 2 * between[name])
            cells.append(f"{np.mean(getattr(one.measured, name)):.4g} s, {100 * error:+.1f} %")
        lines.append(f"| {number} | {' | '.join(cells)} |")
    bounds = ", ".join(
        f"{name} {inside[name]} of {len(predictions)} within {100 * max(BOUND, 2 * between[name]):.1f} %"
        for name in NAMES
    )
    return "\n".join(lines) + f"\n\nruns differ by (standard deviation): {_shares(between)}; {bounds}"


def _shares(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * value:.1f} %" for name, value in values.items())
