"""tools.model_folder: a random model's folder and its GGUF file are the same model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools import model_folder

from octavo import LLM, SamplingParams
from tests.quick import one_in

TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 49_200,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("name", one_in(3, model_folder.SHAPES))
def test_a_folder_and_its_gguf_file_are_the_same_model(monkeypatch, tmp_path: Path, name: str) -> None:
    shape = {**model_folder.SHAPES[name], **TINY}
    shape |= {key: value for key, value in TINY_EXPERTS.items() if key in shape}
    monkeypatch.setitem(model_folder.SHAPES, name, shape)
    folder = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["model_folder", name, str(folder), "--gguf", "BF16", "Q4_0"])
    model_folder.main()
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    outputs = {}
    for path in (folder, folder / "BF16.gguf", folder / "Q4_0.gguf"):
        with LLM(str(path), dtype="float32", max_model_len=64, kv_cache_memory_bytes="4M") as llm:
            (result,) = llm.generate([{"prompt_token_ids": [49_199, 5, 700, 48_000]}], params)
            outputs[path.name] = (result.outputs[0].token_ids, result.outputs[0].text)
    assert outputs["model"] == outputs["BF16.gguf"]
    assert len(outputs["Q4_0.gguf"][0]) == 8
    before = (folder / "Q4_0.gguf").stat().st_mtime_ns
    model_folder.main()
    assert (folder / "Q4_0.gguf").stat().st_mtime_ns == before, "what exists is kept"


def test_gguf_files_are_only_written_of_shapes(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["model_folder", "smollm2", str(tmp_path), "--gguf", "Q4_0"])
    with pytest.raises(SystemExit):
        model_folder.main()
    assert "smollm2 is a GGUF model; --gguf is for the shapes qwen3-0.6b" in capsys.readouterr().err
