"""GGUF copies of native model types against transformers: the logits of every position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import zoo_checks
from tests.models.zoo import ROWS, ModelType
from tests.models.zoo_checks import ServedModel, TinyModel
from tests.models.zoo_gguf import ARCHITECTURES, write_gguf


def copied() -> Iterator[ModelType]:
    """Rows, as a GGUF copy can say them.

    It has no windows of Mistral and Qwen2, no scale of Gemma's scores, no dense layers among Qwen's mixtures, no
    activation, and the weights of Qwen2's experts do not sum to 1. `write_gguf` writes no rope scaling but Llama 3's.
    """
    for row in ROWS:
        unsaid = {"mlp_only_layers", *(("norm_topk_prob",) if row.model_type == "qwen2_moe" else ())}
        settings = {key: value for key, value in row.settings.items() if key not in unsaid}
        if "query_pre_attn_scalar" in settings:
            settings["query_pre_attn_scalar"] = settings["head_dim"]
        rope = settings.get("rope_parameters", {}).get("rope_type", "llama3")
        is_said = rope == "llama3" and not {"decoder_sparse_step", "hidden_act"} & settings.keys()
        if row.model_type in ARCHITECTURES and is_said and not (row.model_type in {"mistral", "qwen2"} and row.windows):
            yield replace(row, settings=settings)


@pytest.mark.parametrize("row", list(copied()), ids=lambda row: row.name)
def test_X01_X04_logits_of_a_gguf_copy_equal_transformers(row: ModelType, tmp_path: Path) -> None:
    tiny = TinyModel(row, tmp_path, has_text=False)
    write_gguf(tiny, tmp_path / "copy.gguf")
    served = ServedModel(tiny, path=tmp_path / "copy.gguf")
    assert served.capacity.decoder == "native"
    zoo_checks.check_logits(served)
    served.close()
    zoo_checks.record(row.name, {"gguf": "yes"})
