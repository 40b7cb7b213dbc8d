"""Each family's logits against transformers, on tiny random models."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.dense_backend import DenseBackend, all_logits, load_decoder
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model

TOLERANCE = 1e-4
WINDOWED = ["mistral_window", "qwen2_window", "gemma3"]


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path)
    rows = [prompt(150), prompt(1, 2), prompt(17, 3)]
    model = reference_model(folder)
    for row, logits in zip(rows, all_logits(load_decoder(folder), rows), strict=True):
        torch.testing.assert_close(logits, reference_logits(model, row), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_as_near_to_float32_as_transformers_are(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path, dtype="bfloat16")
    ids = prompt(60)
    exact = reference_logits(reference_model(folder), ids)
    theirs = reference_logits(reference_model(folder, torch.bfloat16), ids)
    ours = all_logits(load_decoder(folder, torch.bfloat16), [ids])[0]
    assert ours.dtype == torch.float32
    assert (ours - exact).square().mean() < 1.25 * (theirs - exact).square().mean()
    assert (ours - theirs).abs().max() < 0.25


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_shards_saved_by_transformers(family: str, tmp_path: Path) -> None:
    model = reference_model(make_tiny_model(family, tmp_path / "single"))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    ids = prompt(40)
    logits = all_logits(load_decoder(tmp_path / "sharded"), [ids])[0]
    torch.testing.assert_close(logits, reference_logits(model, ids), atol=TOLERANCE, rtol=0)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path, rope_scaling={"rope_type": "linear", "factor": 3.0})
    ids = prompt(100)
    logits = all_logits(load_decoder(folder), [ids])[0]
    torch.testing.assert_close(logits, reference_logits(reference_model(folder), ids), atol=TOLERANCE, rtol=0)


def test_step_by_step_equals_one_step(tmp_path: Path) -> None:
    decoder = load_decoder(make_tiny_model("qwen3", tmp_path))
    ids = prompt(24)
    expected = all_logits(decoder, [ids])[0]
    backend, found = DenseBackend(decoder.attention), []
    with torch.inference_mode():
        for start, end in [(0, 9), (9, 10), (10, 11), (11, 24)]:
            backend.counts = [end - start]
            hidden = decoder.forward(torch.tensor(ids[start:end]), torch.arange(start, end), backend)
            found.append(decoder.logits(hidden))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype, family: str, tmp_path: Path) -> None:
    """The reason for fixing the arithmetic of each weight at load."""
    decoder = load_decoder(make_tiny_model(family, tmp_path), dtype)
    rows = [prompt(length, length) for length in (1, 5, 1, 33, 64)]
    together = all_logits(decoder, rows)
    for row, logits in zip(rows, together, strict=True):
        assert torch.equal(all_logits(decoder, [row])[0], logits)


@pytest.mark.parametrize("family", WINDOWED)
def test_K07_a_window_does_not_cap_the_context(family: str, tmp_path: Path) -> None:
    decoder = load_decoder(make_tiny_model(family, tmp_path))
    assert decoder.max_model_len == 256
    assert max(window for window in decoder.spec.layer_windows if window) < 32


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("cuts", [(0, 70), (0, 9, 10, 11, 40, 70), (0, 1, 2, 33, 70)])
def test_K07_greedy_tokens_far_past_the_window_equal_transformers(
    family: str, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    """The prompt in chunks, then a token at a time, to seven windows."""
    folder = make_tiny_model(family, tmp_path)
    decoder, ids = load_decoder(folder), prompt(70)
    reference = reference_model(folder)
    theirs = reference.generate(
        torch.tensor([ids]), max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    backend, tokens = DenseBackend(decoder.attention), list(ids)
    steps = [*itertools.pairwise(cuts), *((at, at + 1) for at in range(70, 120))]
    with torch.inference_mode():
        for start, end in steps:
            backend.counts = [end - start]
            hidden = decoder.forward(torch.tensor(tokens[start:end]), torch.arange(start, end), backend)
            if end == len(tokens):
                tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    assert tokens[:120] == theirs
    assert len(set(tokens[70:120])) > 5  # not one token over and over


def test_X01_gemma3_scales_and_divisors(tmp_path: Path) -> None:
    """Each of what only gemma3 has changes the logits of this tiny model, and all of it is as transformers has it."""
    ids, seen = prompt(60), []
    changes = [{}, {"query_pre_attn_scalar": 7}, {"rope_local_base_freq": 300.0}, {"rope_scaling": None},
               {"sliding_window": 5}, {"layer_types": ["full_attention", "sliding_attention"] * 3}]  # fmt: skip
    for index, change in enumerate(changes):
        folder = make_tiny_model("gemma3", tmp_path / str(index), **change)
        logits = all_logits(load_decoder(folder), [ids])[0]
        torch.testing.assert_close(logits, reference_logits(reference_model(folder), ids), atol=TOLERANCE, rtol=0)
        assert all((logits - other).abs().max() > 0.01 for other in seen)
        seen.append(logits)


def test_sizes_for_the_memory_floor(tmp_path: Path) -> None:
    decoder = load_decoder(make_tiny_model("llama2", tmp_path))
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 96) + VOCAB_SIZE * 64
    assert decoder.linear_flops_per_token == 2 * parameters
    assert decoder.weight_bytes == 4 * parameters
    assert decoder.max_model_len == 256
