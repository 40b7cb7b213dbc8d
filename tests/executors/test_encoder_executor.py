"""The executor of encoders: capacity, plans, texts that fail alone, and the limits of an engine over it."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import LLM, InvalidRequestError, SamplingParams
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.assembly import executor_spec, limits
from octavo.cli.plan import lines
from octavo.config import Config, ExecutionConfig, ModelConfig
from octavo.config.sources import config_from_keywords
from octavo.core.plan import ROW_POOL, ROW_SAMPLE, NewSequence, StepPlan
from octavo.errors import CapacityError, ConfigError, EngineError
from octavo.executors.encoder_executor import EncoderExecutor
from octavo.executors.protocol import ExecutorSpec
from octavo.grammar.matcher import Masks
from octavo.planning import plan_memory
from tests.models.encoders import make_tiny_encoder

pytest.importorskip("transformers")
SPEC = ExecutorSpec(max_sequences=4, max_batch_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    make_tiny_encoder("bert", made)
    return made


def make_executor(folder: Path, **execution: object) -> EncoderExecutor:
    files = resolve_model(str(folder))
    settings = ExecutionConfig(device="cpu", threads=1, **execution)  # type: ignore[arg-type]
    return EncoderExecutor(files, read_model_spec(files), settings, ModelConfig())


def make_plan(*texts: list[int], flags: int = ROW_POOL, cut: int = 0) -> StepPlan:
    new = tuple(
        NewSequence(slot, f"r{slot}", 0, len(ids), array("i", ids), SamplingParams(seed=0))
        for slot, ids in enumerate(texts)
    )
    lengths = [len(ids) - cut for ids in texts]
    slots = array("i", range(len(texts)))
    zeros, counts = array("i", bytes(4 * len(texts))), array("i", lengths)
    return StepPlan(0, 0.0, slots, zeros, counts, array("i", [flags] * len(texts)), new_sequences=new)


def test_an_encoder_has_blocks_without_memory_for_every_sequence(folder: Path) -> None:
    executor = make_executor(folder)
    capacity = executor.open(SPEC)
    assert capacity.is_encoder and capacity.decoder == "encoder" and capacity.kv_bytes_per_token == 0
    assert capacity.num_blocks == (4 * 6,) and capacity.usable_len == capacity.max_model_len == 96
    sizes = limits(Config(), capacity, "cpu")
    assert not sizes.chunked_prefill and not sizes.prefix_caching and sizes.max_batch_tokens == 512
    with pytest.raises(ConfigError, match="host-cache-bytes"):
        make_executor(folder).open(
            executor_spec(config_from_keywords(str(folder), {"host_cache_bytes": 1 << 20}), "cpu")
        )


def test_a_plan_pools_whole_prompts_only(folder: Path) -> None:
    executor = make_executor(folder)
    with pytest.raises(EngineError, match="not open"):
        executor.submit(make_plan([2, 5, 3]))
    executor.open(SPEC)
    result = executor.collect(executor.submit(make_plan([2, 5, 3], [2, 6, 7, 8, 3])))
    assert [row for row, _ in result.pooled] == [0, 1] and not result.errors
    first = np.frombuffer(result.pooled[0][1], dtype=np.float32)
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-6)
    for wrong in (make_plan([2, 5, 3], flags=ROW_SAMPLE), make_plan([2, 5, 3], cut=1)):
        with pytest.raises(EngineError, match="whole prompts"):
            executor.submit(wrong)
    with pytest.raises(EngineError, match="samples nothing"):
        executor.supply(result, Masks(np.zeros(0, dtype=np.int64), np.zeros((0, 1), dtype=np.int32)))
    executor.close()
    executor.close()


def test_a_text_that_memory_does_not_suffice_for_ends_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(folder)
    executor.open(SPEC)
    texts = [[2, 5, 3], [2, *range(5, 45), 3], [2, 9, 3]]
    wanted = dict(executor.collect(executor.submit(make_plan(*texts))).pooled)
    encoder = executor._encoder
    assert encoder is not None
    run = encoder.run

    def limited(given: list[np.ndarray]) -> torch.Tensor:
        if sum(map(len, given)) > 20:
            raise torch.OutOfMemoryError("out of memory")
        return run(given)  # type: ignore[arg-type]

    monkeypatch.setattr(encoder, "run", limited)
    result = executor.collect(executor.submit(make_plan(*texts)))
    assert dict(result.pooled) == {0: wanted[0], 2: wanted[2]}
    assert [row for row, _ in result.errors] == [1] and "42 tokens" in result.errors[0][1]


def test_an_output_that_is_not_finite_is_an_error_of_its_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(folder)
    executor.open(SPEC)
    encoder = executor._encoder
    assert encoder is not None
    outputs = torch.tensor([[1.0, 0.0], [float("nan"), 0.0]])
    monkeypatch.setattr(encoder, "run", lambda texts: outputs)
    result = executor.collect(executor.submit(make_plan([2, 5, 3], [2, 6, 3])))
    assert [row for row, _ in result.pooled] == [0] and [row for row, _ in result.errors] == [1]


def test_a_plan_of_memory_counts_the_weights_and_no_pool(folder: Path) -> None:
    plan = plan_memory(config_from_keywords(str(folder), {"max_num_seqs": 8}))
    assert plan.pool_bytes == plan.kv_bytes_per_token == 0 and plan.shortfall is None
    assert plan.max_model_len == 96 and plan.num_full_length == 8
    smaller = plan_memory(config_from_keywords(str(folder), {"quantization": "int8"}))
    assert smaller.weight_bytes < plan.weight_bytes
    shown = "\n".join(lines("bert", plan, None))
    assert "decoder   encoder" in shown and "at most 96 tokens, 8 at once" in shown and "KV" not in shown
    with pytest.raises(ConfigError, match="2 and 1, but an encoder is not divided"):
        plan_memory(config_from_keywords(str(folder), {"tensor_parallel_size": 2}))


def test_settings_that_an_encoder_has_not_are_refused(folder: Path) -> None:
    for settings, named in (
        ({"tensor_parallel_size": 2}, "not divided among ranks"),
        ({"quantization": "int8", "decoder": "torch"}, r"quantization is 'int8'.*C\+\+ kernels.*decoder is 'torch'"),
        ({"decoder": "transformers"}, "decoder is 'transformers'"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens is 64.*up to 96"),
        ({"host_cache_bytes": 1 << 20}, "host-cache-bytes"),
    ):
        with pytest.raises((ConfigError, CapacityError), match=named):
            LLM(str(folder), threads=1, **settings)  # type: ignore[arg-type]


def test_the_library_scores_orders_and_classifies(tmp_path: Path) -> None:
    make_tiny_encoder("roberta", tmp_path, num_labels=1)
    with LLM(str(tmp_path), threads=1) as llm:
        scores = [output.score for output in llm.score("the cat", ["rain", "a mat", "music"])]
        ranked = llm.rerank("the cat", ["rain", "a mat", "music"], top_n=2)
        assert [output.score for output in ranked] == sorted(scores, reverse=True)[:2]
        assert all(output.text_1 == "the cat" and 0 < output.score < 1 for output in ranked)
        label = llm.classify("the cat")[0]
        assert label.label == "LABEL_0" and len(label.probs) == 1
        assert llm.score("a", []) == [] == llm.rerank("a", [])
        with pytest.raises(InvalidRequestError, match="gives no vectors"):
            llm.embed("the cat")
        with pytest.raises(InvalidRequestError, match="text_1 has 2 texts and text_2 has 3"):
            llm.score(["a", "b"], ["a", "b", "c"])
