"""Models with keys and values of 8 bits: a request's text does not depend on how it was served.

The expected text is that of each request alone; the scenarios are those of test_exactness_windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.executors.memory import plan_memory
from octavo.executors.protocol import Capacity, Executor
from octavo.executors.torch_executor import TorchExecutor
from octavo.ops import cpu
from tests.exactness import limits_of, requests_of, serve
from tests.executors.driver import GREEDY, SPEC, make_prompt
from tests.executors.test_invariance import Probe
from tests.executors.test_torch_executor import make, open_files
from tests.test_exactness_windows import FAMILIES, NUM_TOKENS, PROMPTS, SCENARIOS, WINDOW
from tests.tiny_models import make_tiny_model

FAMILY = FAMILIES["gemma3"]
PARAMS = replace(GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=None)
Opened = tuple[Executor, Capacity, list[list[int]]]
needs_kernels = pytest.mark.skipif(not cpu.status().is_loaded, reason="needs the kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kv_types") / "gemma3"
    make_tiny_model("gemma3", made, seed=FAMILY.seed, sliding_window=WINDOW, **FAMILY.changes)
    return made


def native(folder: Path, dtype: str = "float32") -> TorchExecutor:
    files, spec = open_files(folder)
    return TorchExecutor(files, spec, ExecutionConfig(device="cpu", threads=1), ModelConfig(dtype=dtype))


@pytest.fixture(scope="module", params=["native", "batched", "reference"])
def decoder(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and not cpu.status().is_loaded:
        pytest.skip("needs the kernels")
    return request.param


@pytest.fixture(scope="module", params=["int8", "fp8"])
def opened(request: pytest.FixtureRequest, decoder: str, folder: Path) -> Iterator[Opened]:
    executor = native(folder) if decoder == "native" else make(folder, decoder)
    capacity = executor.open(replace(SPEC, num_blocks=400, host_bytes=2 << 20, kv_dtype=request.param))
    limits = limits_of(capacity, max_sequences=1)
    alone = [serve(executor, limits, requests_of([prompt], [PARAMS])).token_ids[0] for prompt in PROMPTS]
    yield executor, capacity, alone
    executor.close()


@pytest.mark.parametrize("name", ["chunks of 7", "host hits, depth 3", "swapped, depth 3", "three choices, depth 3"])
def test_a_request_has_the_same_text_in_any_company(opened: Opened, name: str) -> None:
    """In chunks, from prefixes cached on the device and the host, preempted, swapped, forked, past windows."""
    executor, capacity, alone = opened
    scenario = SCENARIOS[name]
    params = replace(PARAMS, n=scenario.n)
    num_swaps = host_hit_tokens = 0
    for limits in scenario.limits(capacity, FAMILY):
        got = serve(executor, limits, requests_of(PROMPTS, [params] * len(PROMPTS)), scenario.rounds, scenario.depth)
        assert got.choices == [[ids] * scenario.n for ids in alone]
        num_swaps, host_hit_tokens = num_swaps + got.num_swaps, host_hit_tokens + got.host_hit_tokens
    assert (num_swaps > 0) == name.startswith("swapped")
    assert host_hit_tokens > 0 or not name.startswith("host")


@needs_kernels
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_the_native_decoder_stays_near_its_torch_twin_and_near_bfloat16(kv_dtype: str, folder: Path) -> None:
    prompt, found = make_prompt(60, seed=9), {}
    for name, dtype in (("native", kv_dtype), ("reference", kv_dtype), ("plain", "bfloat16")):
        executor = make(folder, "reference") if name == "reference" else native(folder)
        probe = Probe(executor, replace(SPEC, kv_dtype=dtype))
        probe.add(0, prompt)
        probe.prefill(0, 60, 16)
        found[name] = probe.logits.clone()
        executor.close()
    spread = found["plain"].std()
    assert (
        found["native"] - found["reference"]
    ).abs().max() < 0.02 * spread  # a number between codes may go up or down
    assert 0 < (found["native"] - found["plain"]).abs().max() < {"int8": 0.2, "fp8": 0.6}[kv_dtype] * spread


@pytest.mark.parametrize(("kv_dtype", "row_bytes"), [("bfloat16", 64), ("fp8", 32), ("int8", 34)])
def test_capacity_and_the_memory_plan_count_bytes_of_codes_and_scales(
    kv_dtype: str, row_bytes: int, folder: Path
) -> None:
    spec = replace(SPEC, num_blocks=None, pool_bytes=1 << 20, kv_dtype=kv_dtype)
    executor = make(folder, "batched")
    capacity = executor.open(spec)
    model = open_files(folder)[1]
    assert model.head_dim == 32
    assert capacity.kv_bytes_per_token == 2 * model.num_layers * model.num_kv_heads * row_bytes
    plan = plan_memory(open_files(folder)[0], ExecutionConfig(attention="batched"), ModelConfig(dtype="float32"), spec)
    assert plan.groups == capacity.groups and plan.num_blocks == capacity.num_blocks
    executor.close()


def test_other_types_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'int3'; give auto, .*bfloat16.*int8, fp8"):
        native(folder).open(replace(SPEC, kv_dtype="int3"))
