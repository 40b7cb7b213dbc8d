"""Rope tables against transformers' own rules."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from octavo.artifacts.model_spec import ModelSpec, RopeScaling
from octavo.nn.layers import RopeTable
from octavo.ops.rope import apply_rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
FACTORS = {
    "short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [1.0 + i for i in range(32)], "factor": 8.0,
    "attention_factor": 1.25,
}  # fmt: skip
_LISTS = {"short_factors": tuple(FACTORS["short_factor"]), "long_factors": tuple(FACTORS["long_factor"])}
CASES = {
    "yarn": (
        RopeScaling("yarn", 4.0, original_max_len=1024, attention_factor=1 + 0.1 * math.log(4.0)),
        YARN,
    ),
    "yarn, own betas, not truncated": (
        RopeScaling(
            "yarn", 4.0, original_max_len=1024, attention_factor=0.5, beta_fast=20.0, beta_slow=2.0, truncate=False
        ),
        {**YARN, "attention_factor": 0.5, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    ),
    "dynamic": (RopeScaling("dynamic", 4.0), {"rope_type": "dynamic", "factor": 4.0}),
    "longrope, short": (
        RopeScaling("longrope", 8.0, original_max_len=4096, attention_factor=1.25, **_LISTS),
        {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS},
    ),
    "longrope, long": (
        RopeScaling("longrope", 8.0, original_max_len=4095, attention_factor=1.25, **_LISTS),
        {"rope_type": "longrope", "original_max_position_embeddings": 4095, **FACTORS},
    ),
    "default": (None, {"rope_type": "default"}),
    "linear": (RopeScaling("linear", 2.5), {"rope_type": "linear", "factor": 2.5}),
    "llama3": (RopeScaling("llama3", 8.0, 1.0, 4.0, 256), {"rope_type": "llama3", **LLAMA3}),
}


def make_spec(scaling: RopeScaling | None) -> ModelSpec:
    return ModelSpec("llama", 10, 128, 1, 2, 2, 64, 8, 1e-5, 50000.0, 4096, scaling)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(kind: str, dtype: torch.dtype) -> None:
    scaling, parameters = CASES[kind]
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=4096,
        rope_parameters={"rope_theta": 50000.0, **parameters},
    )  # fmt: skip
    positions = torch.tensor([0, 1, 2, 77, 1000, 4095])
    x_THD = torch.randn(len(positions), 2, 64).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(x_THD, positions[None])
    x_BHTD = x_THD.transpose(0, 1)[None]
    expected = apply_rotary_pos_emb(x_BHTD, x_BHTD, cos, sin)[0][0].transpose(0, 1)
    table = RopeTable(make_spec(scaling), 4096, dtype, torch.device("cpu"))
    found = apply_rope(x_THD, *table.lookup(positions))
    tolerance = 2e-5 if dtype == torch.float32 else 3.2e-2  # their bfloat16 rounds each of three steps, ours two
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def test_factors_divide_the_frequencies() -> None:
    table = RopeTable(make_spec(None), 64, torch.float32, torch.device("cpu"), torch.full((32,), 4.0))
    linear = RopeTable(make_spec(RopeScaling("linear", 4.0)), 64, torch.float32, torch.device("cpu"))
    positions = torch.arange(64)
    for ours, theirs in zip(table.lookup(positions), linear.lookup(positions), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert table.max_len == 64


def test_a_strided_input_and_a_contiguous_result() -> None:
    table = RopeTable(make_spec(None), 64, torch.float32, torch.device("cpu"))
    x = torch.randn(5, 3 * 64 + 10)
    heads = x[:, 10:].view(5, 3, 64)
    rotation = table.lookup(torch.arange(5))
    found = apply_rope(heads, *rotation)
    assert found.is_contiguous()
    assert torch.equal(found, apply_rope(heads.contiguous(), *rotation))
    assert torch.equal(found[0], heads[0])
