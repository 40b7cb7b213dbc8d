"""Adapters by name: LLM against merged models, the prefix cache, replaced engines, unloading after the last request."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters import RandomAdapter
from tests.models.zoo import ROWS
from tests.models.zoo_checks import random_model
from tests.reliability.deaths import follow, keeping, until
from tests.tiny_models import make_tiny_model, write_tiny_tokenizer

from octavo import LLM, LoRARequest
from octavo.config import AdapterConfig, Config, ExecutionConfig, ModelConfig
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.frontend import adapters as registry_module
from octavo.frontend.adapters import AdapterRegistry

PROMPT = list(range(20, 60))
GREEDY = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, two adapters a and b, and the models into which they are merged."""
    folder = tmp_path_factory.mktemp("adapters")
    model = make_tiny_model("llama3", folder / "base", eos_token_id=None, max_position_embeddings=1024)
    for seed, name in enumerate("ab"):
        adapter = RandomAdapter.of(model, seed, rank=8)
        adapter.write(folder / name)
        adapter.merge(model, folder / f"merged-{name}")
    return folder


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str | None, list[int]]:
    """The greedy ids of the model and of the merged ones."""
    found = {}
    for name in (None, "a", "b"):
        with LLM(str(folder / ("base" if name is None else f"merged-{name}")), dtype="float32", threads=1) as llm:
            (answer,) = llm.generate([PROMPT], GREEDY)
            found[name] = list(answer.outputs[0].token_ids)
    assert len({tuple(ids) for ids in found.values()}) == 3
    return found


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(
        str(folder / "base"), dtype="float32", threads=1, lora_modules={"a": folder / "a"}, enable_lora=True
    ) as llm:
        yield llm


def ids_of(answers: list[Any]) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in answers]


def test_answers_over_adapters_equal_the_merged_models_also_from_the_cache(
    llm: LLM, folder: Path, texts: dict[str | None, list[int]]
) -> None:
    b = LoRARequest("b", 1, str(folder / "b"))
    wanted = [None, "a", b, "a", None, b]
    expected = [texts[None if one is None else getattr(one, "lora_name", one)] for one in wanted]
    for _ in range(2):  # equal prompts of different adapters share no cached block
        assert ids_of(llm.generate([PROMPT] * len(wanted), GREEDY, lora_request=wanted)) == expected
    assert ids_of(llm.generate([PROMPT] * 2, GREEDY, lora_request="b")) == [texts["b"]] * 2


def test_wrong_adapters_of_requests_are_refused(llm: LLM, folder: Path) -> None:
    for wanted, reason in (
        ("nothing", "no adapter 'nothing' is loaded; there are: a"),
        (LoRARequest("a", 1, str(folder / "b")), "the adapter 'a' is that of"),
        (7, "lora_request is a int"),
        ([None, "a"], "2 lora_request for 1 prompts"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            llm.generate([PROMPT], GREEDY, lora_request=wanted)
    with pytest.raises(ModelFileError, match="is no adapter"):
        llm.generate([PROMPT], GREEDY, lora_request=LoRARequest("c", 1, str(folder / "c")))
    with pytest.raises(ConfigError, match="give NAME=PATH"):
        LLM(str(folder / "base"), lora_modules=["a"])


def test_an_engine_without_adapters_says_so(folder: Path) -> None:
    with (
        LLM(str(folder / "base"), dtype="float32", threads=1) as llm,
        pytest.raises(InvalidRequestError, match="enable_lora=True"),
    ):
        llm.generate([PROMPT], GREEDY, lora_request="a")


def test_a_decoder_without_adapters_refuses_them_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="this engine's is transformers: leave out --enable-lora"):
        LLM(str(folder / "base"), dtype="float32", threads=1, enable_lora=True, decoder="transformers")


def test_ranks_and_fleets_refuse_adapters(folder: Path) -> None:
    """In a process of its own: a rank group is one per process."""
    for words, reason in (
        (["serve", "--port", "0", "--tensor-parallel-size", "2"], "this engine's is sharded: leave out --enable-lora"),
        (["fleet", "--replicas", "2"], "adapters are for the one engine of octavo serve"),
    ):
        command = [sys.executable, "-m", "octavo", words[0], str(folder / "base"), *words[1:], "--enable-lora"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode != 0 and reason in done.stderr


def test_a_mixture_of_experts_has_adapters_of_its_attention_only(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "qwen3_moe")
    base = tmp_path / "base"
    random_model(row, 0).save_pretrained(base)
    write_tiny_tokenizer(base)
    adapter = RandomAdapter.of(base, 1, rank=8, modules=("q_proj", "v_proj", "o_proj"))
    adapter.merge(base, tmp_path / "merged")
    modules = {"a": adapter.write(tmp_path / "a")}
    ids = []
    for model, options in ((base, {"lora_modules": modules}), (tmp_path / "merged", {})):
        with LLM(str(model), dtype="float32", threads=1, **options) as llm:
            ids += ids_of(llm.generate([PROMPT], GREEDY, lora_request="a" if options else None))
            ids += ids_of(llm.generate([PROMPT], GREEDY))
    of_adapter, plain, merged, _ = ids
    assert of_adapter == merged != plain
    adapter.halves["model.layers.1.mlp.experts.0.down_proj"] = torch.zeros(8, 32), torch.zeros(64, 8)
    with pytest.raises(ModelFileError, match=r"experts\.0\.down_proj, which is no linear layer"):
        LLM(str(base), dtype="float32", threads=1, lora_modules={"a": adapter.write(tmp_path / "experts")})


def config_of(folder: Path, *modules: str) -> Config:
    return Config(
        model=ModelConfig(model=str(folder / "base"), dtype="float32"),
        execution=ExecutionConfig(threads=1),
        adapters=AdapterConfig(lora_modules=modules, enable_lora=True, max_loras=2),
    )


def request_of(name: str, adapter_id: int, max_tokens: int = 10) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=1)
    return Request(name, array("i", PROMPT), params, adapter_id=adapter_id)


async def test_requests_with_adapters_go_on_after_a_kill_of_the_engine(
    folder: Path, texts: dict[str | None, list[int]]
) -> None:
    config = config_of(folder, f"a={folder / 'a'}")
    async with keeping(config) as keeper:
        registry = AdapterRegistry(keeper, config.adapters)
        b = await registry.load("b", str(folder / "b"))
        a = registry.get("a")
        assert a is not None
        numbers = {"a": a.adapter_id, "b": b.adapter_id, None: 0}
        long = [(name, request_of(f"{name}{i}", numbers[name], 900)) for name in texts for i in range(2)]
        before = [await follow(keeper, request_of(f"before {name}", number, 900)) for name, number in numbers.items()]
        reading = [asyncio.create_task(follow(keeper, request)) for _, request in long]
        for _ in range(2):
            epoch = keeper.epoch
            await until(lambda: any(state.has_progress for state in keeper.requests))
            os.kill(keeper.processes["engine"], signal.SIGKILL)
            await until(lambda epoch=epoch: keeper.epoch > epoch)
        whole = dict(zip(numbers, (stream.ids for stream in before), strict=True))
        for (name, _), stream in zip(long, await asyncio.gather(*reading), strict=True):
            assert stream.reason is FinishReason.LENGTH, stream.error
            assert stream.ids == whole[name] and stream.ids[:10] == texts[name]
            assert stream.num_misplaced == 0


async def test_an_adapter_is_freed_after_its_last_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[str | None, list[int]]
) -> None:
    monkeypatch.setattr(registry_module, "IDLE_S", 0.02)
    config = config_of(folder)
    async with keeping(config) as keeper:
        registry = AdapterRegistry(keeper, config.adapters)
        a = await registry.load("a", str(folder / "a"))
        same = await registry.load("same", str(folder / "a"))
        assert same.adapter_id == a.adapter_id
        reading = asyncio.create_task(follow(keeper, request_of("r", a.adapter_id, 150)))
        await until(lambda: bool(len(keeper.requests)))
        registry.unload("same")
        registry.unload("a")
        assert registry.get("a") is None
        assert registry.unload("a") is None
        stream = await reading
        assert stream.reason is FinishReason.LENGTH and stream.ids[:10] == texts["a"]
        await until(lambda: not registry._freeing)
        assert not keeper.adapters
        with pytest.raises(InvalidRequestError, match="adapter is not loaded"):
            await keeper.submit(request_of("late", a.adapter_id))
        again = await registry.load("a", str(folder / "a"))
        assert (await follow(keeper, request_of("again", again.adapter_id))).ids == texts["a"]


async def test_loaded_adapters_are_restored_by_the_next_front_end(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, f"a={folder / 'a'}")
    store = tmp_path / "adapters.json"
    async with keeping(config) as keeper:
        registry = AdapterRegistry(keeper, config.adapters, store)
        await registry.load("b", str(folder / "b"))
        await registry.load("gone", str(folder / "b"))
        registry.unload("gone")
    async with keeping(config) as keeper:
        registry = AdapterRegistry(keeper, config.adapters, store)
        await registry.restore()
        assert [adapter.name for adapter in registry] == ["a", "b"]
        b = registry.get("b")
        assert b is not None
        assert (await follow(keeper, request_of("r", b.adapter_id))).reason is FinishReason.LENGTH
