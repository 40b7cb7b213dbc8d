"""Recorded programs of the transformers backend: which models have one, what is fused, and its bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.models.transformers_fusion import Multiple, Operation, fused
from octavo.models.transformers_program import NoProgramError, merged
from octavo.ops import cpu
from tests.models.zoo import ROWS
from tests.models.zoo_checks import PROMPTS, ServedModel, TinyModel
from tests.models.zoo_transformers import TRANSFORMERS

pytestmark = pytest.mark.skipif(not cpu.status().is_loaded, reason="the kernels are not built")


def _served(model_type: str, folder: Path) -> ServedModel:
    row = next(row for row in (*ROWS, *TRANSFORMERS) if row.model_type == model_type)
    return ServedModel(TinyModel(row, folder, has_text=False), "transformers")


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi", "deepseek_v3", "olmo3"])
def test_a_program_gives_the_bits_of_the_modules(model_type: str, tmp_path: Path) -> None:
    served = _served(model_type, tmp_path)
    assert served._decoder._program is not None, served._decoder.no_program
    replayed = served.logits(PROMPTS)
    served._decoder._program = None
    for ours, theirs in zip(replayed, served.logits(PROMPTS), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    served.close()


def test_a_llama_layer_is_nine_calls(tmp_path: Path) -> None:
    served = _served("llama", tmp_path)
    steps = [getattr(step[0], "__name__", "") for step in served._decoder._program.steps]
    assert steps.count("attend_product") == 2 and steps.count("add_norm") == 4 and steps.count("multiply") == 8
    assert not {"narrow", "silu", "cat"} & set(steps[20:])
    served.close()


def test_a_model_that_reads_values_runs_by_its_modules(tmp_path: Path) -> None:
    served = _served("jetmoe", tmp_path)
    assert served._decoder._program is None and "reads values" in served._decoder.no_program
    served.close()


def test_numbers_of_two_lengths_are_equal_or_multiples() -> None:
    assert merged((1, [13, slice(None, 26)]), (1, [17, slice(None, 34)])) == (
        1,
        [Multiple(1), slice(None, Multiple(2))],
    )
    for first, second in ((13, 18), (1.0, 2.0), ("a", "b"), (True, 1), (torch.ones(2), torch.ones(2))):
        with pytest.raises(NoProgramError):
            merged(first, second)


def test_nothing_is_fused_where_an_operation_writes() -> None:
    operations = [Operation(torch.Tensor.add_, (1, 2), {}, (0,)), Operation(torch.Tensor.neg, (), {}, (1,))]
    assert fused(operations, 2, 1) == (operations, 2)
    assert [one.name for one in fused(operations[1:], 2, 1)[0]] == ["neg"]
