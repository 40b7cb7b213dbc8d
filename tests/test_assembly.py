"""The composition root: from settings to a running engine, on a tiny model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, ConfigError, SamplingParams, UnknownModelError
from octavo.artifacts.resolve import resolve_model
from octavo.assembly import build_local, executor_spec, limits, open_engine, plans_in_flight
from octavo.config import Config, ModelConfig
from octavo.config.sources import config_from_keywords
from octavo.core.limits import GroupSpec, Limits
from octavo.executors.protocol import Capacity
from octavo.frontend.sessions import Sessions
from octavo.simulator.costs import Hardware, cost_model
from octavo.text.text_model import TextModel
from tests.engine.direct_client import start_engine
from tests.quick import one_in
from tests.simulator.costs.steps_of import fit_steps, steps_of, workload
from tests.tiny_models import make_tiny_model

SMALL = {"max_model_len": 64, "num_blocks": 32, "threads": 1, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("smollm2", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), **SMALL) as engine:
        yield engine


def test_tenant_weights_are_read_or_refused() -> None:
    capacity = Capacity((GroupSpec(),), (8,), 16, 4, 64, 100)
    weights = limits(config_from_keywords("m", {"tenant_weight": ["a=b=2", "c=0.5"]}), capacity, "cpu").tenant_weights
    assert weights == (("a=b", 2.0), ("c", 0.5))
    for wrong in ("a", "=2", "a=x"):
        with pytest.raises(ConfigError, match="TENANT=WEIGHT"):
            limits(config_from_keywords("m", {"tenant_weight": [wrong]}), capacity, "cpu")
    with pytest.raises(ConfigError, match="above 0"):
        limits(config_from_keywords("m", {"tenant_weight": ["a=0"]}), capacity, "cpu")


def test_settings_are_known_by_field_and_by_flag() -> None:
    config = config_from_keywords("m", {"max_num_seqs": 4, "max_batch_tokens": "1K", "gpu_memory_utilization": 0.5})
    assert (config.model.model, config.scheduling.max_sequences, config.scheduling.max_batch_tokens) == ("m", 4, 1024)
    assert config.cache.memory_fraction == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_modellen": 5}, "unknown setting 'max_modellen'; did you mean 'max_model_len'"),
        ({"zzz": 5}, "unknown setting 'zzz'; octavo config show"),
        ({"max_model_len": "abc"}, "'abc'; give a whole number"),
        ({"max_num_seqs": 4, "max_sequences": 5}, "given twice"),
        ({"num_blocks": 4, "kv_cache_tokens": 5}, "both set"),
        (
            {"data_parallel_size": 2},
            "data_parallel_size=2 is not supported: octavo fleet --replicas N",
        ),
        ({"tensor_parallel_size": 3, "nnodes": 2}, "nnodes is 2; 3 ranks .* cannot be divided among them evenly"),
        ({"nnodes": 2, "tp": 2, "node_rank": 1}, "unknown setting 'tp'; did you mean 'tensor_parallel_size'"),
        ({"tensor_parallel_size": 2, "node_rank": 1}, "node-rank is 1; give less than nnodes, which is 1"),
        (
            {"trust_remote_code": True},
            "trust_remote_code=True is not supported: code from model repositories is never run",
        ),
        ({"speculative_config": {"method": "ngram"}}, "unknown setting 'speculative_config'; did you mean 'speculate'"),
        ({"quantization": "awq"}, "unknown --quantization 'awq'; give one of auto, none, int8, int4"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keywords("m", values)


def test_vllms_arguments_are_taken_where_they_mean_something() -> None:
    given = {
        "dtype": "half", "max_model_len": 2048, "gpu_memory_utilization": 0.9, "max_num_seqs": 16,
        "max_num_batched_tokens": 4096, "enable_prefix_caching": False, "seed": 7, "quantization": None,
        "kv_cache_dtype": "auto", "block_size": 32, "enable_chunked_prefill": True, "revision": "main",
        "enforce_eager": True,
    }  # fmt: skip
    ignored = {"tensor_parallel_size": 1, "disable_log_stats": True, "trust_remote_code": False, "tokenizer": None}
    config = config_from_keywords("m", {**given, **ignored})
    assert (config.model.dtype, config.model.max_model_len, config.model.quantization) == ("float16", 2048, "auto")
    assert (config.scheduling.max_sequences, config.scheduling.max_batch_tokens) == (16, 4096)
    assert (config.cache.enable_prefix_caching, config.cache.memory_fraction, config.cache.block_size) == (
        False,
        0.9,
        32,
    )
    assert (config.execution.seed, config.model.revision) == (7, "main") and config.execution.enforce_eager


def test_an_unknown_model_is_a_typed_error() -> None:
    with pytest.raises(UnknownModelError, match=r"no_such\.gguf"):
        LLM("no_such.gguf")


def test_defaults_depend_on_the_device_and_settings_win() -> None:
    assert executor_spec(Config(), "cpu").max_sequences == 32
    assert executor_spec(Config(), "cuda").max_batch_tokens == 8192
    config = config_from_keywords("m", {"max_sequences": 7, "max_batch_tokens": 99})
    capacity = Capacity((GroupSpec(),), num_blocks=(9,), block_size=16, num_slots=7, max_model_len=64, vocab_size=5)
    made = limits(config, capacity, "cpu")
    assert (made.max_sequences, made.max_batch_tokens, made.num_blocks) == (7, 99, (9,))


def test_every_limit_that_has_a_setting_takes_it() -> None:
    given = {
        "host_load_min_tokens": 7, "block_sharing": False, "preemption": "swap", "max_kv_read": 999, "max_bypass": 5,
        "composition": "separate", "max_prefill_run": 2, "separate_modalities": True,
    }  # fmt: skip
    config = config_from_keywords("m", {**given, "swap_space": "4G"})
    assert executor_spec(config, "cpu").host_bytes == 4 * 2**30
    capacity = Capacity((GroupSpec(),), (9,), 16, num_slots=7, max_model_len=64, vocab_size=5, host_blocks=(3,))
    made = limits(config, capacity, "cpu")
    assert {name: getattr(made, name) for name in given} == given and made.host_blocks == (3,)
    guessing = config_from_keywords("m", {"speculate": "ngram", "speculate_max_tokens": 3, "speculate_max_rows": 2})
    made = limits(guessing, capacity, "cpu")
    assert (made.max_draft_tokens, made.max_draft_rows, made.has_paced_lookup) == (3, 2, False)
    plain = limits(Config(), replace(capacity, host_blocks=()), "cpu")
    known = {"block_size": 16, "num_blocks": (9,), "max_model_len": 64, "vocab_size": 5, "max_sequences": 7}
    assert plain == Limits(**known), "a setting's default differs from the limit's"


@pytest.mark.parametrize(
    ("settings", "changes", "most"),
    [
        ({}, {}, 7),
        ({"speculate": "none"}, {}, 0),
        ({"speculate": "off"}, {}, 0),
        ({"pipeline_depth": 2}, {}, 0),
        ({}, {"decoder": ""}, 0),
        ({}, {"decoder": "torch"}, 0),
        ({}, {"decoder": "sharded"}, 0),
        ({}, {"decoder": "torch", "device": "cuda"}, 0),
    ],
)
def test_prompt_lookup_is_on_where_it_can_change_no_answer(
    settings: dict[str, Any], changes: dict[str, Any], most: int
) -> None:
    capacity = Capacity((GroupSpec(),), (9,), 16, num_slots=7, max_model_len=64, vocab_size=5, decoder="native")
    made = limits(config_from_keywords("m", settings), replace(capacity, **changes), "cpu")
    assert (made.max_draft_tokens, made.has_paced_lookup) == (most, most > 0)


@pytest.mark.parametrize(
    ("settings", "changes", "depth"),
    [
        ({}, {"device": "cpu", "decoder": "native"}, 1),
        ({}, {"device": "cpu", "decoder": "torch"}, 1),
        ({"pipeline_depth": 3}, {"device": "cpu"}, 3),
        ({}, {"device": "cuda", "decoder": "torch"}, 2),
        ({"pipeline_depth": 1}, {"device": "cuda", "decoder": "torch"}, 1),
        ({"speculate": "ngram"}, {"device": "cuda", "decoder": "torch"}, 1),
        ({"speculate": "small"}, {"device": "cuda:1", "decoder": "torch"}, 1),
        ({"pipeline_parallel_size": 4}, {"device": "cuda", "decoder": "sharded"}, 4),
    ],
)
def test_two_plans_are_in_flight_where_the_host_works_beside_the_device(
    settings: dict[str, Any], changes: dict[str, Any], depth: int
) -> None:
    capacity = Capacity((GroupSpec(),), (9,), 16, num_slots=7, max_model_len=64, vocab_size=5)
    assert plans_in_flight(config_from_keywords("m", settings), replace(capacity, **changes)) == depth


def test_L01_a_batch_gives_each_prompt_what_it_gets_alone(llm: LLM) -> None:
    prompts = ["a", "The quick brown fox", "one two three four", "x y"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert all(len(o.outputs[0].token_ids) == 8 for o in together)


def test_P01_each_request_of_a_batch_has_its_own_parameters(llm: LLM) -> None:
    (plain,) = llm.generate("hello", GREEDY)
    first = plain.outputs[0].token_ids[0]
    allowed = [id for id in (5, 9, 17) if id != first]
    params = [
        GREEDY,
        SamplingParams(temperature=1.0, top_k=1, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=1e-6, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.0, allowed_token_ids=tuple(allowed), max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.0, logit_bias=((first, -100.0),), max_tokens=1, ignore_eos=True),
        SamplingParams(temperature=0.0, logit_bias=((allowed[0], 100.0),), max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=1.0, min_p=1.0, max_tokens=8, ignore_eos=True),
    ]
    ids = [output.outputs[0].token_ids for output in llm.generate(["hello"] * len(params), params)]
    greedy = plain.outputs[0].token_ids
    assert ids[0] == ids[1] == ids[2] == ids[6] == greedy
    assert set(ids[3]) <= set(allowed) and len(ids[3]) == 8
    assert ids[4] != [first] and ids[5] == [allowed[0]] * 4


def test_P02_a_seed_repeats_itself_whatever_runs_beside_it(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, max_tokens=8, seed=11, ignore_eos=True)
    other = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    first = llm.generate("hello", seeded)[0].outputs[0].token_ids
    beside = llm.generate(["x", "hello", "y"], [other, seeded, other])[1].outputs[0].token_ids
    assert first == beside


def test_P03_choice_0_is_what_one_choice_would_be_and_best_of_keeps_the_likeliest(llm: LLM) -> None:
    def params(**options: Any) -> SamplingParams:
        return SamplingParams(max_tokens=8, seed=11, ignore_eos=True, **options)

    (one,) = llm.generate("hello", params())
    (four,) = llm.generate("hello", params(n=4, logprobs=0))
    ids = [choice.token_ids for choice in four.outputs]
    assert ids[0] == one.outputs[0].token_ids and len({tuple(each) for each in ids}) == 4
    assert four.metrics is not None and four.metrics.completion_tokens == 32
    (best,) = llm.generate("hello", params(n=2, best_of=4))
    ranked = sorted(four.outputs, key=lambda choice: -(choice.cumulative_logprob or 0.0))
    assert [choice.token_ids for choice in best.outputs] == [choice.token_ids for choice in ranked[:2]]


def test_P04_one_beam_is_greedy_and_several_come_best_first(llm: LLM) -> None:
    (greedy,) = llm.generate("hello", GREEDY)
    (one,) = llm.generate("hello", SamplingParams(max_tokens=8, beam_width=1, ignore_eos=True))
    assert one.outputs[0].token_ids == greedy.outputs[0].token_ids
    (beams,) = llm.generate("hello", SamplingParams(max_tokens=8, n=3, beam_width=4, ignore_eos=True))
    assert [choice.index for choice in beams.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in beams.outputs}) == 3


def test_I01_logprobs_and_chat(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True))
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and len(logprobs) == 3
    assert all(entry is not None and entry.rank == 1 and len(entry.top_ids) == 2 for entry in logprobs)
    assert output.outputs[0].cumulative_logprob is not None
    (answer,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert "user" in llm.text.tokenizer.decode(answer.prompt_token_ids, False)


def test_I01_async_llm_answers_several_at_once(tiny: Path) -> None:
    async def main() -> list[list[int]]:
        async with AsyncLLM(str(tiny), **SMALL) as llm:
            outputs = await asyncio.gather(*(llm.complete(text, GREEDY) for text in ("a", "b", "a")))
            deltas = [delta async for delta in llm.stream("a", GREEDY)]
            return [o.outputs[0].token_ids for o in outputs] + [[i for d in deltas for i in d.token_ids]]

    first, second, again, streamed = asyncio.run(main())
    assert first == again == streamed and first != second


async def test_the_engine_process_gives_the_same_ids(tiny: Path, llm: LLM) -> None:
    config = config_from_keywords(str(tiny), dict(SMALL))
    child = await start_engine(config)
    try:
        sessions = Sessions(child.client, TextModel.load(resolve_model(str(tiny))))
        session = await sessions.submit(sessions.prompt_ids("hello"), GREEDY)
        ids = [i for delta in await session.collect() for i in delta.token_ids]
    finally:
        await child.close()
    assert child.returncode == 0
    expected = await asyncio.to_thread(llm.generate, "hello", GREEDY)
    assert ids == expected[0].outputs[0].token_ids


async def test_steps_are_compared_with_a_fit_where_one_is_named(tiny: Path, tmp_path: Path) -> None:
    roofline = cost_model("roofline", Hardware.of("smollm2-135m", "l4"))
    (tmp_path / "fit.json").write_text(fit_steps(steps_of(roofline, workload())).as_json())
    engine = build_local(
        config_from_keywords(str(tiny), {**SMALL, "speculate": "none", "drift_baseline": str(tmp_path / "fit.json")})
    )
    try:
        session = await engine.sessions.submit(engine.sessions.prompt_ids("hello"), replace(GREEDY, max_tokens=40))
        await session.collect()
        drift = (await engine.client.statistics())["drift"]
    finally:
        await engine.client.close()
    assert isinstance(drift, dict)
    assert drift["steps"] >= 40
    assert drift["ratio"] > 0


def test_a_fit_that_is_none_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"none\.json holds no fit"):
        open_engine(config_from_keywords("smollm2", {"drift_baseline": "none.json"}))


async def test_reliability_6_a_missing_model_fails_the_start_with_its_own_error() -> None:
    with pytest.raises(UnknownModelError, match=r"no_such\.gguf"):
        await start_engine(Config(model=ModelConfig(model="no_such.gguf")))


@pytest.mark.parametrize(
    "ending", one_in(2, ["", "raise SystemExit(0)", "stream = llm.stream([5, 6, 7], p); next(stream)"])
)
def test_an_engine_left_open_ends_quietly_with_the_interpreter(tiny: Path, ending: str) -> None:
    script = "\n".join(
        [
            "from octavo import LLM, SamplingParams",
            "p = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)",
            f"llm = LLM({str(tiny)!r}, max_model_len=64, num_blocks=32, threads=1, dtype='float32')",
            "assert len(llm.generate({'prompt_token_ids': [5, 6, 7]}, p)[0].outputs[0].token_ids) == 8",
            ending,
        ]
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
