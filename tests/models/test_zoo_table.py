"""Every causal model type of transformers has a row, or is refused with the reason, and the page of models has all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tools import models
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.artifacts.encoder_families import ENCODER_FAMILIES
from octavo.artifacts.read_spec import read_hf_spec, read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.artifacts.transformers_spec import OTHER_MODEL
from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import ConfigError, ModelFileError
from octavo.executors.torch_executor import TorchExecutor
from octavo.nn.parallel import Parallel, ShardSpec
from octavo.server.api.models import num_parameters
from tests.models import zoo_checks
from tests.models.zoo import ROWS, ModelType
from tests.models.zoo_transformers import REFUSED, TRANSFORMERS, UNTESTED

WRITTEN_FOR = "5.23.0"
SAME = {"gpt-sw3", "gemma3"}  # a configuration of GPT-2; a text part, which test_text_part.py compares


def open_folder(folder: Path, parallel: Parallel | None = None) -> None:
    """Open a model, as a rank if `parallel` is given."""
    files = resolve_model(str(folder))
    execution, model = ExecutionConfig(threads=1), ModelConfig(dtype="float32")
    TorchExecutor(files, read_model_spec(files), execution, model, parallel).open(zoo_checks.SPEC)


def reason_of(error: ModelFileError) -> str:
    """The reason alone, without the names of the file and the model."""
    reason = str(error).rpartition(".json: ")[2].removesuffix(OTHER_MODEL)
    return reason.rpartition("transformers: ")[2].rpartition("transformers either: ")[2]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_X01_attention_of_its_own_is_refused_with_the_reason(row: ModelType, tmp_path: Path) -> None:
    if row.model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {row.model_type}")
    zoo_checks.random_model(row, 0).save_pretrained(tmp_path)
    with pytest.raises(ModelFileError) as refused:
        open_folder(tmp_path)
    assert row.model_type in str(refused.value) and REFUSED[row] in str(refused.value)
    zoo_checks.record(row.name, {"refused": reason_of(refused.value)})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_number_of_weights_that_clients_are_told(row: ModelType, tmp_path: Path) -> None:
    model = zoo_checks.random_model(row, 0)
    model.save_pretrained(tmp_path)
    told = num_parameters(read_hf_spec(tmp_path))
    assert told == pytest.approx(model.num_parameters(), rel=0.02)  # biases and small norms are not counted


def test_X01_every_causal_type_has_a_row_or_is_refused_by_its_configuration(tmp_path: Path) -> None:
    covered = {row.model_type for row in (*ROWS, *TRANSFORMERS, *REFUSED)} | {*UNTESTED, *SAME, *ENCODER_FAMILIES}
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    loaded = []
    for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - covered):
        config = CONFIG_MAPPING[model_type]()
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
        config.save_pretrained(tmp_path)
        try:
            read_model_spec(resolve_model(str(tmp_path)))
        except ModelFileError as refused:
            zoo_checks.record(model_type, {"refused": reason_of(refused)})
        else:
            loaded.append(model_type)
    if loaded and transformers.__version__ != WRITTEN_FOR:
        pytest.skip(f"transformers {transformers.__version__} has types that this table lacks: {', '.join(loaded)}")
    assert not loaded, "add rows"


def test_the_page_of_models_is_current() -> None:
    assert models.main(["--check"]) == 0, "run `python -m tools.models`; new rows: see its docstring"


def test_X01_at_least_45_types_load() -> None:
    native, others = {row.model_type for row in ROWS}, {row.model_type for row in TRANSFORMERS}
    assert len(native | others) >= 45


def test_X01_X08_ranks_of_a_model_without_a_family_are_refused(tmp_path: Path) -> None:
    zoo_checks.random_model(TRANSFORMERS[0], 0).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="apertus"):
        open_folder(tmp_path, Parallel(ShardSpec.of(0, 2)))
