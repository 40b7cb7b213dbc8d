"""This engine's own recordings: fitted, saved, and predicted from their first third by the tool that docs name."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny_models import make_tiny_model
from tools.fidelity import own_runs

from octavo import LLM, SamplingParams
from octavo.core.limits import GroupSpec
from octavo.observe.recording.reader import open_recording
from octavo.simulator.costs import cost_model
from octavo.simulator.costs.fitted import fit_recording, load_fit


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
    fit = fit_recording(recording)
    assert fit.num_steps >= 9 * 29
    assert sum(one.value for one in fit.device) > 0
    assert sum(one.value for one in fit.host) > 0
    assert cost_model(f"fitted:{recording}").name == "fitted:run-0"


def test_a_fit_knows_whose_steps_it_saw_also_from_its_file(recording: Path, tmp_path: Path) -> None:
    fit_recording(recording).save(tmp_path / "fit.json")
    fit = load_fit(tmp_path / "fit.json")
    limits = open_recording(recording).header.limits
    assert fit.limits == replace(limits, groups=(GroupSpec(),))
    assert fit.engine["device"] == "cpu"
    assert fit.engine["depth"] == 1


def test_the_rest_of_a_run_is_predicted_from_its_first_third(recording: Path) -> None:
    prediction = own_runs.predict(recording)
    assert len(prediction.measured.e2e) == 12
    assert len(prediction.predicted.e2e) == len(prediction.measured.e2e)
    assert (prediction.predicted.ttft > 0).all()
    assert (prediction.predicted.e2e >= prediction.predicted.ttft).all()
    text = own_runs.verdict([prediction, prediction])
    assert "runs differ by (standard deviation): ttft 0.0 %" in text
    assert "of 2 within 5.0 %" in text
