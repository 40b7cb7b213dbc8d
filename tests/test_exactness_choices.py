"""Several choices and beams on real executors: reproducible, shared, and equal to transformers' beams.

Seeded choices are the same ids alone, batched, preempted, swapped and with plans in flight; a choice's draws depend
on (seed, choice, position) alone. Beams equal transformers' `num_beams` on the same float32 weights: on tiny models
directly, on the default model by the golden file that tools/golden.py --beams makes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.limits import Limits
from octavo.core.plan import StepPlan
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.executors.protocol import Capacity, Executor, ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from tests.exactness import Run, limits_of, requests_of, run, serve
from tests.executors.driver import SPEC, Dense, make_prompt
from tests.executors.test_torch_executor import make
from tests.tiny_models import EOS_ID, make_tiny_model

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "golden_smollm2.json").read_text())
BEAMS = json.loads((DATA / "golden_beams_smollm2.json").read_text())
Opened = tuple[Executor, Capacity]
PROMPTS = [make_prompt(length, seed=length) for length in (30, 41, 7, 18)]
PENALTIES = (1.0, 0.0, 2.0, -1.0)
EARLY: tuple[bool | str, ...] = (False, True, "never")
# Ways to be scheduled: way of preemption in a tight pool (None = in a roomy one), plans in flight.
WAYS = list(product((None, "recompute", "swap", "auto"), (1, 2, 3)))


def seeded(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "n": 3, "max_tokens": 12, "ignore_eos": True, **options})


@pytest.fixture(scope="module", params=["llama3", "gemma3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Opened, Dense]]:
    """A tiny model (one with full attention, one with windows) with a host tier, and transformers' view of it."""
    folder = make_tiny_model(request.param, tmp_path_factory.mktemp("choices") / request.param)
    executor = make(folder, "auto")
    yield (executor, executor.open(replace(SPEC, num_blocks=200, host_bytes=1 << 20))), Dense(folder)
    executor.close()


@pytest.fixture(scope="module")
def model() -> Iterator[Opened]:
    """The default model in float32 with a host tier."""
    files = resolve_model(None)
    executor = TorchExecutor(files, read_model_spec(files), ExecutionConfig(threads=1), ModelConfig(dtype="float32"))
    yield executor, executor.open(ExecutorSpec(32, 1024, num_blocks=400, max_model_len=2048, host_bytes=128 << 20))
    executor.close()


def serve_way(opened: Opened, requests: list[Request], way: tuple[str | None, int], num_blocks: int) -> Run:
    """Serve in a roomy pool, or in one so small that requests are preempted."""
    executor, limits = way_limits(opened, way, num_blocks)
    got = serve(executor, limits, requests, 1, way[1])
    assert (got.num_preemptions > 0) == (way[0] is not None)
    assert way[0] != "recompute" or got.num_swaps == 0
    return got


def way_limits(opened: Opened, way: tuple[str | None, int], num_blocks: int) -> tuple[Executor, Limits]:
    (executor, capacity), (preemption, _) = opened, way
    changes: dict[str, Any] = {"host_blocks": capacity.host_blocks, "max_batch_tokens": 24}
    if preemption is not None:
        blocks = (num_blocks, num_blocks + 16)[: len(capacity.groups)]  # windows share little, and need more
        changes |= {"num_blocks": blocks, "headroom": 0.0, "preemption": preemption}
    return executor, limits_of(capacity, **changes)


def test_P02_P03_seeded_choices_are_reproducible_however_they_are_scheduled(tiny: tuple[Opened, Dense]) -> None:
    opened, _ = tiny
    params = [seeded(index) for index in range(len(PROMPTS))]
    alone = [
        serve(opened[0], limits_of(opened[1]), requests_of([prompt], [one])).choices[0]
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    assert all(len({tuple(ids) for ids in choices}) == 3 and len(choices[0]) == 12 for choices in alone)
    num_swaps = num_forks = 0
    for way in WAYS:
        got = serve_way(opened, requests_of(PROMPTS, params), way, 26)
        assert got.choices == alone, way
        assert (got.num_carried > 0) == (way[1] > 1)
        num_swaps, num_forks = num_swaps + got.num_swaps, num_forks + got.num_forks
    assert num_swaps > 0 and num_forks > 0


def test_P02_rare_draws_are_reproducible_however_they_are_scheduled(tiny: tuple[Opened, Dense]) -> None:
    """Mirostat's bound depends on all earlier draws; a preempted sequence resumes with its own."""
    opened, _ = tiny
    rare: list[dict[str, Any]] = [
        {"mirostat": 2, "mirostat_tau": 3.0},
        {"mirostat": 2, "n": 1},
        {"top_n_sigma": 1.5, "no_repeat_ngram_size": 2},
        {"xtc_probability": 0.5, "xtc_threshold": 0.01, "n": 1},
    ]
    params = [seeded(index, **options) for index, options in enumerate(rare)]
    alone = [
        serve(opened[0], limits_of(opened[1]), requests_of([prompt], [one])).choices[0]
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    for way in ((None, 1), (None, 3), ("recompute", 1), ("recompute", 3), ("swap", 2)):
        got = serve(*way_limits(opened, way, 22), requests_of(PROMPTS, params), 1, way[1])
        assert got.choices == alone, way
        assert (got.num_preemptions > 0) == (way[0] is not None), way


def test_P02_a_choice_does_not_depend_on_how_many_there_are(tiny: tuple[Opened, Dense]) -> None:
    (executor, capacity), _ = tiny
    by = {
        n: run(
            executor, limits_of(capacity), PROMPTS, [seeded(40 + index, n=n) for index in range(len(PROMPTS))]
        ).choices
        for n in (1, 2, 4)
    }
    for index in range(len(PROMPTS)):
        assert by[1][index] == by[4][index][:1] and by[2][index] == by[4][index][:2]


@pytest.mark.parametrize("length", [512, 520])
def test_P03_K06_eight_choices_hold_the_prompts_blocks_once(tmp_path: Path, length: int) -> None:
    """Blocks in use: those of the prompt, then each choice's own tail; tokens computed: the prompt's, then outputs."""
    executor = make(make_tiny_model("llama2", tmp_path, max_position_embeddings=1024), "auto")
    capacity = executor.open(ExecutorSpec(16, 512, block_size=16, num_blocks=400))
    used: list[int] = []
    computed: list[int] = []

    def watch(scheduler: Scheduler, plan: StepPlan) -> None:
        used.append(scheduler.statistics().num_blocks_used)
        computed.append(plan.num_query_tokens)

    requests = requests_of([make_prompt(length, seed=1)], [seeded(5, n=8, max_tokens=20)])
    got = serve(executor, limits_of(capacity, max_batch_tokens=512), requests, watch=watch)
    executor.close()
    assert got.num_forks == 7 and len({tuple(ids) for ids in got.choices[0]}) == 8
    assert sum(computed) == length + 8 * 19  # what an output's last token would write is never computed
    entered = -(-length // 512)  # plans until the choices are in
    assert used[:entered] == [32, 33][:entered]
    last = length + 18  # the last position written
    assert max(used) == length // 16 + 8 * (last // 16 - length // 16 + 1)
    assert used[entered] == length // 16 + 8


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_P03_best_of_through_the_engine_keeps_the_likeliest(tmp_path: Path, preemption: str) -> None:
    """Three requests at once, three plans in flight, in a pool too small for all."""
    folder = make_tiny_model("llama2", tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "threads": 1, "depth": 3, "block_size": 4}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    with LLM(str(folder), num_blocks=400, **settings) as llm:
        every = llm.generate(prompts, [seeded(i, n=5, logprobs=0) for i in range(3)])
    tight = {"num_blocks": 33, "preemption": preemption, "host_cache_bytes": 1 << 20, "headroom": 0.0}
    with LLM(str(folder), **settings, **tight) as llm:
        best = llm.generate(prompts, [seeded(i, n=2, best_of=5) for i in range(3)])
        statistics = llm.statistics()
    for whole, kept in zip(every, best, strict=True):
        ranked = sorted(whole.outputs, key=lambda choice: -(choice.cumulative_logprob or 0.0))
        assert [choice.token_ids for choice in kept.outputs] == [choice.token_ids for choice in ranked[:2]]
        assert [choice.index for choice in kept.outputs] == [0, 1]
    assert statistics["scheduler"]["num_preemptions"] > 0


def transformers_beams(dense: Dense, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """The best beams' ids, each up to its end id."""
    out = dense._model.generate(
        torch.tensor([prompt]), num_beams=params.beam_width, num_return_sequences=params.n, do_sample=False,
        max_new_tokens=params.max_tokens, length_penalty=params.length_penalty,
        early_stopping=params.early_stopping, eos_token_id=EOS_ID, pad_token_id=EOS_ID,
    )[:, len(prompt) :].tolist()  # fmt: skip
    return [ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids for ids in out]


def beam_requests(prompts: list[list[int]], params: SamplingParams, eos: int) -> list[Request]:
    return [replace(one, eos_token_ids=(eos,)) for one in requests_of(prompts, [params] * len(prompts))]


def _assert_tiny_beams(
    tiny: tuple[Opened, Dense], penalty: float, early: bool | str, ways: Iterable[tuple[str | None, int]]
) -> int:
    """Compare all four beams of every prompt with transformers; returns how often they were swapped."""
    opened, dense = tiny
    params = SamplingParams(
        temperature=0.0, beam_width=4, n=4, max_tokens=14, length_penalty=penalty, early_stopping=early
    )
    expected = [transformers_beams(dense, prompt, params) for prompt in PROMPTS]
    num_swaps = 0
    for way in ways:
        got = serve_way(opened, beam_requests(PROMPTS, params, EOS_ID), way, 30)
        assert got.choices == expected, (penalty, early, way)
        num_swaps += got.num_swaps
    return num_swaps


@pytest.mark.parametrize(
    ("penalty", "early", "way"),
    [(1.0, False, (None, 1)), (2.0, True, ("recompute", 2)), (-1.0, "never", ("swap", 3)), (0.0, False, ("auto", 1))],
)
def test_P04_beams_of_tiny_models_equal_transformers(
    tiny: tuple[Opened, Dense], penalty: float, early: bool | str, way: tuple[str | None, int]
) -> None:
    _assert_tiny_beams(tiny, penalty, early, [way])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("early", EARLY)
def test_P04_beams_of_tiny_models_equal_transformers_in_every_way(
    tiny: tuple[Opened, Dense], early: bool | str
) -> None:
    assert sum(_assert_tiny_beams(tiny, penalty, early, WAYS) for penalty in PENALTIES) > 0


def _assert_golden_beams(
    model: Opened, entries: list[dict[str, Any]], way: tuple[str | None, int], num_blocks: int
) -> None:
    """Serve the entries' prompts together, each with its own length penalty and way of stopping."""
    requests = []
    for entry in entries:
        params = SamplingParams(
            temperature=0.0, beam_width=4, n=2, max_tokens=32, length_penalty=entry["length_penalty"],
            early_stopping=entry["early_stopping"],
        )  # fmt: skip
        requests += beam_requests([entry["prompt"]], params, 2)
    got = serve_way(model, requests, way, num_blocks)
    wrong = [
        (entry["name"], entry["length_penalty"], entry["early_stopping"], choices[:2], entry["output"])
        for entry, choices in zip(entries, got.choices, strict=True)
        if choices[:2] != entry["output"]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_P04_beams_of_the_default_model_equal_transformers(model: Opened) -> None:
    """Two prompts, under different length penalties and ways of stopping, three plans in flight."""
    _assert_golden_beams(model, [BEAMS[0], BEAMS[-2]], (None, 3), 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", [(None, 1), ("recompute", 1), ("swap", 3), ("auto", 2)])
def test_P04_all_beams_of_the_default_model_equal_transformers(model: Opened, way: tuple[str | None, int]) -> None:
    for begin in range(0, len(BEAMS), 6):
        _assert_golden_beams(model, BEAMS[begin : begin + 6], way, 36)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_P04_golden_beams_are_what_transformers_gives() -> None:
    tool = Path(__file__).parent.parent / "tools" / "golden.py"
    command = [sys.executable, tool, "--beams", "--check", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("equal")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_P03_eight_choices_of_512_tokens_on_the_default_model(model: Opened) -> None:
    """The same ids as the request with one choice, and as itself swapped in and out beside another."""
    executor, capacity = model
    prompt = GOLDEN[30]["prompt"][:512]
    # Hot, as the prompt repeats itself; cut to 20 ids, as float32 logits move by 1e-5 with the batch, and a draw from
    # all 49152 ids at once then often lands on the neighbouring id.
    options = {"max_tokens": 24, "temperature": 2.0, "top_k": 20}
    eight, one = seeded(3, n=8, **options), seeded(3, n=1, **options)
    roomy = serve(executor, limits_of(capacity), requests_of([prompt], [eight]), 1, 3)
    assert roomy.max_blocks == 32 + 8 * 2 and roomy.num_forks == 7
    single = serve(executor, limits_of(capacity), requests_of([prompt], [one]))
    assert roomy.choices[0][0] == single.choices[0][0] and len({tuple(ids) for ids in roomy.choices[0]}) == 8
    others = [GOLDEN[index]["prompt"] for index in (31, 0)]
    pair = requests_of([*others, prompt], [replace(one, max_tokens=72)] * 2 + [eight])
    for preemption in ("recompute", "swap"):
        got = serve_way(model, pair, (preemption, 3), 56)
        assert got.choices[2] == roomy.choices[0], preemption
