"""octavo plan: what it tells is what opening gives."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.models.encoders import make_tiny_encoder
from tests.tiny_models import make_tiny_model

from octavo import assembly, machine
from octavo.assembly import build_local
from octavo.cli import main
from octavo.config import Config
from octavo.config.sources import config_from_keywords
from octavo.executors.protocol import Capacity
from octavo.ops.triton import available
from octavo.planning import plan_memory
from octavo.simulator.costs.hardware import device_facts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("smollm2", tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "kv_cache_dtype": "bfloat16", "max_model_len": 96},
        {"quantization": "int8"},
        {"num_blocks": 33, "block_size": 8},
        {"kv_cache_tokens": 640},
    ],
)
def test_I05_the_plan_is_what_opening_gives(tiny: Path, settings: dict[str, Any]) -> None:
    config = config_from_keywords(
        str(tiny), {"num_blocks": 64, "threads": 1, **settings} if "kv_cache_tokens" not in settings else settings
    )
    plan, engine = plan_memory(config), build_local(config)
    has = engine.capacity
    asyncio.run(engine.client.close())
    assert (plan.weight_bytes, plan.groups, plan.num_blocks) == (has.weight_bytes, has.groups, has.num_blocks)
    assert (plan.max_model_len, plan.dtype, plan.kv_bytes_per_token) == (
        has.max_model_len,
        has.dtype,
        has.kv_bytes_per_token,
    )
    assert plan.num_slots == has.num_slots and plan.shortfall is None


def test_a_device_that_is_not_here_is_planned_with_its_data_sheet(
    tiny: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton here and without, as a machine without a GPU may be."""
    plans = []
    for has_triton in (True, False):
        monkeypatch.setattr(available, "is_available", lambda has_triton=has_triton: has_triton)
        assert main(["plan", str(tiny), "--device", "h100", "--quantization", "int4", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    plan, memory = plans[0], int(device_facts("h100").memory_bytes)
    assert plans[1] == plan and plan["free_bytes"] == memory and plan["step_bytes"] > 0
    assert (plan["device"], plan["decoder"], plan["quantization"]) == ("h100", "torch", "int4")
    left = int(0.9 * memory) - plan["weight_bytes"] - plan["step_bytes"] - plan["kv_pool_bytes"]
    assert 0 <= left < plan["block_size"] * plan["kv_bytes_per_token"]
    for name, why in (("t4", "7.5, and 8.0 is needed"), ("mi300x", "is no CUDA device")):
        assert main(["plan", str(tiny), "--device", name]) == 2
        assert why in capsys.readouterr().err


def test_windows_have_groups_of_their_own(tmp_path: Path) -> None:
    model = make_tiny_model("gemma3", tmp_path / "gemma3")
    config = config_from_keywords(str(model), {"num_blocks": 64, "threads": 1, "dtype": "float32"})
    plan, engine = plan_memory(config), build_local(config)
    asyncio.run(engine.client.close())
    assert plan.groups == engine.capacity.groups and plan.num_blocks == engine.capacity.num_blocks
    assert plan.weight_bytes == engine.capacity.weight_bytes


def test_it_is_told_in_words_and_as_json(tiny: Path, capsys: Any) -> None:
    assert main(["plan", str(tiny), "--kv-cache-tokens", "640", "--tokens", "64", "-np", "4", "-c", "128"]) == 0
    said = capsys.readouterr().out
    assert "640 tokens, 5.0 requests of full length, 4 running at most" in said
    assert "4 requests of 64 tokens at once" in said and "weights" in said and "bytes a token" in said
    assert main(["plan", str(tiny), "--kv-cache-tokens", "640", "--json", "--tokens", "100000"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_pool_tokens"] == 640 and plan["fits"] and plan["requests_of_tokens"] == {"100000": 0}
    assert plan["kv_pool_bytes"] == 640 * plan["kv_bytes_per_token"]


def test_a_pool_that_is_shorter_than_the_model_does_not_fit(tiny: Path, capsys: Any) -> None:
    words = ["plan", str(tiny), "--kv-cache-tokens", "100", "-c", "128"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "does not fit: it holds 96 tokens, and one request of full length has 128" in said
    assert "--max-model-len 96" in said
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main(["plan", str(tiny), "--kv-cache-tokens", "100", "-c", "96"]) == 0


def test_what_does_not_fit_is_told_with_the_numbers(tiny: Path, capsys: Any) -> None:
    assert main(["plan", str(tiny), "--kv-cache-memory-bytes", "900T"]) == 1
    assert "does not fit: --kv-cache-memory-bytes 921600.0 GiB exceeds the " in capsys.readouterr().out


def test_X01_an_encoder_is_named_in_the_place_of_a_decoder(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("transformers")
    make_tiny_encoder("bert", tmp_path)
    assert main(["plan", str(tmp_path)]) == 0
    assert "decoder   encoder\n" in capsys.readouterr().out


def test_mistakes(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("[]")
    assert main(["plan", f"scripted:{path}"]) == 2
    assert "has no weights" in capsys.readouterr().err
    assert main(["plan", "--tokens", "0"]) == 2
    assert "--tokens is 0" in capsys.readouterr().err


def opened_with(config: Config, free_bytes: int, patch: pytest.MonkeyPatch) -> tuple[Capacity, dict[str, Any]]:
    """What an engine has whose pool finds so much free memory: its capacity, and its statistics."""
    patch.setattr(machine, "usable_memory", lambda *_: (free_bytes, free_bytes))
    engine = build_local(config)
    statistics: Any = asyncio.run(engine.client.statistics())
    executor: Any = engine.loop._executor
    asyncio.run(engine.client.close())
    return engine.capacity, {**statistics, "tower_bytes": getattr(executor._media._tower, "weight_bytes", 0)}


def test_I05_a_draft_model_is_planned_as_it_is_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    draft = make_tiny_model("smollm2", tmp_path / "draft", seed=2)
    settings = {"speculate": str(draft), "dtype": "float32", "threads": 1, "gpu_memory_utilization": 0.5}
    config = config_from_keywords(str(tiny), settings)
    monkeypatch.setattr(machine, "usable_memory", lambda *_: (32 << 20, 32 << 20))
    plan = plan_memory(config)
    assert plan.draft is not None and plan.draft.pool_bytes > 0 and plan.draft.weight_bytes > 0
    opened: list[Capacity] = []
    real = assembly.DraftModel

    def noting(executor: Any, capacity: Capacity, *rest: Any) -> Any:
        opened.append(capacity)
        return real(executor, capacity, *rest)

    monkeypatch.setattr(assembly, "DraftModel", noting)
    loaded = plan.weight_bytes + plan.draft.total_bytes
    has, _ = opened_with(config, (32 << 20) - loaded, monkeypatch)
    [own] = opened
    assert (plan.draft.weight_bytes, plan.draft.num_blocks) == (own.weight_bytes, own.num_blocks)
    assert (plan.weight_bytes, plan.num_blocks) == (has.weight_bytes, has.num_blocks)
    assert plan.total_bytes < plan.free_bytes
    assert main(["plan", str(tiny), "--speculate", str(draft), "--num-gpu-blocks-override", "16"]) == 0
    assert re.search(
        r"^draft     \S+ MiB of weights \(int[48]\), \S+ MiB of KV$", capsys.readouterr().out, re.MULTILINE
    )
    assert main(["plan", str(tiny), "--speculate", str(draft), "--num-gpu-blocks-override", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["draft"]
    assert told["weight_bytes"] == plan.draft.weight_bytes and told["kv_pool_bytes"] == plan.draft.pool_bytes


def test_what_cannot_draft_is_told_before_anything_is_loaded(tiny: Path, capsys: Any) -> None:
    assert main(["plan", str(tiny), "--speculate", "/nowhere/model"]) == 2
    assert "/nowhere/model" in capsys.readouterr().err
