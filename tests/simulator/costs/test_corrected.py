"""A correction of a cost model: its terms, its file, and whose steps it corrects."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.simulator.fakes import ConstantCosts, LinearCosts

from octavo.errors import ConfigError
from octavo.simulator.cost_model import StepShape
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.costs.corrected import NUM_KINDS, CorrectedCosts, Correction, features, load_correction

MADE = Correction("linear", "a.csv", 50, "any", "why", (2.0, 3.0, 4.0, 5.0, 6.0, 7.0), 0.25, 1.5, large_tokens=512)
# Shapes, and the factor and constants that MADE has for them.
SHAPES = [
    (StepShape([10] * 16, []), 2.0, 0.25),
    (StepShape([10] * 15, [(40, 0)]), 3.0, 0.25),
    (StepShape([10] * 17, []), 4.0, 0.25),
    (StepShape([10] * 63, [(40, 0)]), 5.0, 0.25),
    (StepShape([10] * 65, []), 6.0, 0.25),
    (StepShape([10] * 65, [(448, 0)]), 7.0, 1.75),
    (StepShape([10], [], peer_tokens=(513, 2)), 2.0, 1.75),
]


@pytest.mark.parametrize(("shape", "factor", "constant"), SHAPES)
def test_a_step_has_the_factor_of_its_kind_and_the_constants(shape: StepShape, factor: float, constant: float) -> None:
    plain, corrected = LinearCosts(), CorrectedCosts(LinearCosts(), MADE)
    assert corrected.step_s(shape) == pytest.approx(plain.step_s(shape) * factor + constant)
    assert corrected.host_s(shape) == plain.host_s(shape)
    row = features(shape, plain.step_s(shape), MADE.large_tokens)
    assert sum(a * b for a, b in zip(row, MADE.terms, strict=True)) == pytest.approx(corrected.step_s(shape))
    assert sum(corrected.parts(shape).seconds.values()) == pytest.approx(corrected.step_s(shape))


def test_decode_steps_have_the_same_time_by_their_sums() -> None:
    corrected = CorrectedCosts(LinearCosts(), replace(MADE, large_tokens=80))
    assert corrected.decode_s is not None
    for rows in (1, 16, 17, 64, 65, 81):
        assert corrected.decode_s(rows, 10 * rows) == pytest.approx(corrected.step_s(StepShape([10] * rows, [])))
    assert CorrectedCosts(ConstantCosts(), replace(MADE, costs="constant")).decode_s is None


def test_a_step_without_rows_is_not_corrected() -> None:
    empty = StepShape([], [], copied_blocks=3)
    assert CorrectedCosts(LinearCosts(), MADE).step_s(empty) == LinearCosts().step_s(empty)
    assert features(empty, 1.0, 512) == [0.0] * (NUM_KINDS + 2)


def test_a_correction_is_read_as_it_was_written_and_named_with_a_star(tmp_path: Path) -> None:
    hardware = Hardware.of("llama-3.1-8b", "l4")
    made = replace(MADE, costs="roofline:llama-3.1-8b:l4")
    (tmp_path / "fit.json").write_text(made.as_json())
    assert load_correction(tmp_path / "fit.json") == made
    costs, shape = cost_model(f"roofline*{tmp_path / 'fit.json'}", hardware), StepShape([10] * 16, [])
    assert costs.step_s(shape) == pytest.approx(cost_model("roofline", hardware).step_s(shape) * 2 + 0.25)
    assert costs.name == "roofline:llama-3.1-8b:l4 corrected by a.csv"
    (tmp_path / "unused.json").write_text(replace(made, form="none").as_json())
    assert "not corrected by a.csv" in cost_model(f"roofline*{tmp_path / 'unused.json'}", hardware).name


def test_another_cost_model_is_not_corrected() -> None:
    with pytest.raises(ConfigError, match="is of linear, and the cost model is constant"):
        CorrectedCosts(ConstantCosts(), MADE)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "holds no correction"),
        ('{"version": 0}', "another version"),
        (MADE.as_json().replace("2.0", "-2.0"), "no value below 0"),
        (MADE.as_json().replace("2.0,", ""), "give 6 factors"),
        (MADE.as_json().replace('"form"', '"shape"'), "holds no correction"),
    ],
)
def test_a_file_that_is_no_correction_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_correction(path)
