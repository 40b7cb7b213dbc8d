"""This engine's own recordings: fitted, saved, and predicted from their first third by the tool that docs name."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiny_models import make_tiny_model
from tools.fidelity import own_runs
from tools.fidelity.neighbours import Neighbours, NeighbourSampler

from octavo import LLM, SamplingParams
from octavo.core.limits import GroupSpec
from octavo.observe.recording.reader import open_recording, steps
from octavo.simulator.cost_model import shape_of
from octavo.simulator.costs import cost_model
from octavo.simulator.costs.fitted import Fitted, fit_recording, load_fit


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_tiny_model("smollm2", tmp_path_factory.mktemp("tiny"))
    folder = tmp_path_factory.mktemp("runs") / "run-0"
    small = {"max_model_len": 64, "num_blocks": 32, "threads": 1, "dtype": "float32", "speculate": "none"}
    with LLM(str(model), **small, record=str(folder)) as llm:
        for text in ("a", "bc", "def", "a b", "g", "hi", "jk", "lm", "n"):
            llm.generate([text, text + "x"], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    return folder


def test_a_recording_of_a_real_engine_is_fitted(recording: Path) -> None:
    fit = fit_recording(open_recording(recording))
    assert fit.num_steps >= 9 * 29
    assert sum(one.value for one in fit.device) > 0
    assert sum(one.value for one in fit.host) > 0
    assert cost_model(f"fitted:{recording}").name == "fitted:run-0"


def test_a_fit_knows_whose_steps_it_saw_also_from_its_file(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "fit.json").write_text(fit_recording(open_recording(recording)).as_json())
    fit = load_fit(tmp_path / "fit.json")
    limits = open_recording(recording).header.limits
    assert fit.limits == replace(limits, groups=(GroupSpec(),))
    assert fit.engine["device"] == "cpu"
    assert fit.engine["depth"] == 1


def test_the_rest_of_a_run_is_predicted_from_its_first_third(recording: Path) -> None:
    prediction = own_runs.predict(recording, warm_up_s=0.0)
    assert len(prediction.measured.e2e) == 12
    assert len(prediction.predicted.e2e) == len(prediction.measured.e2e)
    assert (prediction.predicted.ttft > 0).all()
    assert (prediction.predicted.e2e >= prediction.predicted.ttft).all()
    text = own_runs.verdict([prediction, prediction])
    assert "runs differ by (standard deviation): ttft 0.0 %" in text
    assert "within 5 % of the mean and 10 % of the p99" in text
    assert "not measured" in text


@pytest.mark.parametrize("cause", ["processes", "read_s", "loop_s"])
def test_what_slows_the_machine_explains_the_steps_that_it_slows(recording: Path, cause: str) -> None:
    opened = open_recording(recording)
    recorded = list(steps(opened))
    offset = opened.header.began - opened.header.clock
    ends = np.array([step.collected for step in recorded]) + offset
    cut = len(recorded) // 2
    fit = Fitted(own_runs.fit_steps(recorded[:cut], "steps"))
    slowed, busy = recorded[:cut], np.linspace(ends[0] - 1e-3, ends[-1] + 1e-3, 24)
    late = busy > ends[cut]
    for step in recorded[cut:]:  # the second half takes twice as long as predicted
        seconds = 2 * fit.step_s(shape_of(step.plan))
        begin = step.collected - seconds
        slowed.append(replace(step, free_from=begin, plan=replace(step.plan, now=begin)))
    samples = replace(
        Neighbours(busy, *np.zeros((3, len(busy))), *np.ones((2, len(busy)))),
        **{cause: np.where(late, 1.0 if cause == "processes" else 1.5, 0.0 if cause == "processes" else 1.0)},
    )
    meter = own_runs.NoiseMeter(samples, opened.header, fit, slowed)
    noise = meter.noise(recorded[:cut], slowed[cut:])
    assert noise.is_quiet == (cause != "processes")
    assert (noise.quiet if noise.is_quiet else noise.noisy) == pytest.approx(2.0, rel=0.1)
    assert noise.slower == pytest.approx((1.5 if cause == "read_s" else 1.0, 1.5 if cause == "loop_s" else 1.0), 0.1)
    assert noise.stretch == pytest.approx(2.0, rel=0.35)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_s_own_processes_are_no_neighbours(tmp_path: Path) -> None:
    spin = [sys.executable, "-c", "import time\nend = time.time() + 2.5\nwhile time.time() < end: pass"]
    sampler = NeighbourSampler()
    sampler.start()
    subprocess.run(spin, check=True)
    samples = sampler.finish()
    samples.save(tmp_path / "samples.json")
    read = Neighbours.load(tmp_path / "samples.json")
    assert len(read.times) >= 2
    assert read.own.sum() > 0.05  # cores of the child, which may get few on a busy machine
    assert (read.read_s > 1e-4).all()  # 320 GB/s would be faster than a core reads
    assert (read.loop_s > 1e-5).all()
    assert (read.processes + read.steal + read.own < 1.1 * (os.cpu_count() or 1)).all()
