"""Low-rank adapters in the executor: rows of several adapters in one step against merged models, bits, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.artifacts.adapter import adapter_id, find_adapter
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import ROW_SAMPLE
from octavo.core.request import SamplingParams
from octavo.errors import ModelFileError
from octavo.executors.protocol import ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from octavo.ops import cpu
from tests.adapters import RandomAdapter
from tests.executors.driver import Driver, make_prompt
from tests.executors.emulated_device import OnEmulated, outside
from tests.models.zoo import DENSE, ModelType
from tests.models.zoo_checks import TinyModel, random_model
from tests.models.zoo_gguf import write_gguf
from tests.tiny_models import make_tiny_model

SPEC = ExecutorSpec(max_sequences=40, max_batch_tokens=512, block_size=4, num_blocks=600)
TOLERANCE = 1e-4
NUM_ADAPTERS, NUM_ROWS, NUM_TOKENS = 8, 32, 6


class Served:
    """An open executor, its driver, and the logits of each step's sampling rows."""

    def __init__(self, folder: Path, decoder: str = "auto", dtype: str = "float32", quantization: str = "auto") -> None:
        files = resolve_model(str(folder))
        model = ModelConfig(dtype=dtype, quantization=quantization)
        execution = ExecutionConfig(decoder=decoder, threads=1)
        self.executor = TorchExecutor(files, read_model_spec(files), execution, model)
        self.driver = Driver(self.executor, self.executor.open(SPEC))
        self.logits = torch.empty(0)
        decoder_: Any = self.executor._decoder
        compute, self.executor.keeps_logits = decoder_.logits, True

        def watched(hidden_NE: torch.Tensor) -> torch.Tensor:
            self.logits = compute(hidden_NE).clone()
            return self.logits

        decoder_.logits = watched

    def load(self, path: Path, max_rank: int = 64) -> int:
        """Load an adapter; return its id."""
        made = adapter_id(find_adapter(str(path)))
        self.executor.load_adapter(made, str(path), max_rank)
        return made

    def generate(self, adapters: Sequence[int], count: int = NUM_TOKENS, seeds: Sequence[int] = ()) -> list[Any]:
        """Greedy ids, and the logits of every token, of one row per adapter (0: none), all in each step."""
        known = {slot: make_prompt(3 + seed % 5, seed) for slot, seed in enumerate(seeds or range(len(adapters)))}
        for slot, adapter in enumerate(adapters):
            self.driver.add(slot, known[slot], adapter=adapter)
        rows: dict[int, list[torch.Tensor]] = {slot: [] for slot in known}
        for step in range(count):
            for slot, ids in known.items():
                start = 0 if step == 0 else len(ids) - 1
                self.driver.row(slot, start, len(ids) - start, ROW_SAMPLE)
            self.driver.run()
            for slot, logits_V in zip(known, self.logits, strict=True):
                rows[slot].append(logits_V)
                known[slot] = [*known[slot], int(logits_V.argmax())]
        return [(known[slot][-count:], torch.stack(rows[slot])) for slot in known]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model("llama3", tmp_path / "model")


def adapters_of(model: Path, folder: Path, count: int = NUM_ADAPTERS) -> list[RandomAdapter]:
    """Adapters of several ranks, some of few modules, one rank-stabilised; written to numbered folders."""
    made = []
    for index in range(count):
        modules = {} if index % 3 else {"modules": ("q_proj", "v_proj", "qkv_proj")}
        made.append(RandomAdapter.of(model, index, rank=(4, 8, 3, 17)[index % 4], use_rslora=index == 5, **modules))
        made[-1].write(folder / str(index))
    return made


def assert_near(found: list[Any], expected: list[Any]) -> None:
    for (ids, logits), (other_ids, other_logits) in zip(found, expected, strict=True):
        assert ids == other_ids
        assert (logits - other_logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("decoder", ["auto", "torch"])
def test_X05_32_rows_over_8_adapters_and_none_equal_the_merged_models(tiny: Path, tmp_path: Path, decoder: str) -> None:
    adapters = adapters_of(tiny, tmp_path / "adapters")
    served = Served(tiny, decoder)
    ids = [0, *(served.load(tmp_path / "adapters" / str(index)) for index in range(NUM_ADAPTERS))]
    found = served.generate([ids[row % len(ids)] for row in range(NUM_ROWS)])
    for which in range(len(ids)):
        folder = tiny if which == 0 else adapters[which - 1].merge(tiny, tmp_path / f"merged{which}")
        rows = range(which, NUM_ROWS, len(ids))
        assert_near([found[row] for row in rows], Served(folder, decoder).generate([0] * len(rows), seeds=rows))


@pytest.mark.parametrize(
    ("decoder", "dtype", "quantization"),
    [("auto", "float32", "auto"), ("auto", "bfloat16", "int8")],
)
def test_the_bits_of_a_row_are_equal_alone_and_in_any_mix(
    tiny: Path, tmp_path: Path, decoder: str, dtype: str, quantization: str
) -> None:
    adapters_of(tiny, tmp_path / "adapters", 4)
    served = Served(tiny, decoder, dtype, quantization)
    ids = [0, *(served.load(tmp_path / "adapters" / str(index)) for index in range(4))]
    mixed = served.generate([ids[row * 7 % 5] for row in range(20)])
    other = served.generate([ids[row * 7 % 5] for row in reversed(range(20))], seeds=[*reversed(range(20))])[::-1]
    for row in range(20):
        (alone,) = served.generate([ids[row * 7 % 5]], seeds=[row])
        for found in (mixed[row], other[row]):
            assert found[0] == alone[0]
            assert torch.equal(found[1], alone[1])
    plain = Served(tiny, decoder, dtype, quantization).generate([0], seeds=[5])  # an engine without adapters
    assert torch.equal(plain[0][1], mixed[5][1])


@pytest.mark.skipif(not cpu.status().is_loaded, reason="the kernels are not built")
def test_bits_do_not_depend_on_threads_or_the_instruction_set(tiny: Path, tmp_path: Path) -> None:
    adapters_of(tiny, tmp_path / "adapters", 3)
    found = []
    for isa, threads in (("portable", 1), ("avx2", 1), ("avx512", 1), ("avx512", 2), ("amx", 1), ("amx", 2)):
        best = cpu.use_isa(isa)
        served = Served(tiny, "native", "bfloat16", "int8")
        torch.set_num_threads(threads)
        ids = [served.load(tmp_path / "adapters" / str(index)) for index in range(3)]
        found.append((best, [logits for _, logits in served.generate([*ids, 0, *ids])]))
    torch.set_num_threads(1)
    cpu.use_isa(cpu.ISA_NAMES[-1])
    for (isa, logits), (other_isa, other) in pairwise(found):
        assert isa != other_isa or all(map(torch.equal, logits, other))


@pytest.mark.parametrize("row", DENSE, ids=lambda row: row.name)
def test_adapted_logits_of_each_family_equal_the_merged_model(row: ModelType, tmp_path: Path) -> None:
    random_model(row, 0).save_pretrained(tmp_path / "model")
    adapter = RandomAdapter.of(tmp_path / "model", 1)
    served = Served(tmp_path / "model")
    number = served.load(adapter.write(tmp_path / "adapter"))
    (_, plain), (_, adapted) = served.generate([0, number], 1, seeds=[5, 5])
    merged = Served(adapter.merge(tmp_path / "model", tmp_path / "merged"))
    ((_, expected),) = merged.generate([0], 1, seeds=[5])
    assert (adapted - expected).abs().max() < TOLERANCE
    assert (plain - adapted).abs().max() > 0.01


def test_an_adapter_on_quantised_weights(tiny: Path, tmp_path: Path) -> None:
    adapter = RandomAdapter.of(tiny, 3, rank=8)
    served = Served(tiny, dtype="bfloat16", quantization="int8")
    number = served.load(adapter.write(tmp_path / "adapter"))
    (_, plain), (_, adapted) = served.generate([0, number], 1, seeds=[2, 2])
    ((_, expected),) = Served(adapter.merge(tiny, tmp_path / "merged")).generate([0], 1, seeds=[2])
    change = (expected - plain).abs().max()
    assert (adapted - expected).abs().max() < 0.1 * change


def test_adapters_of_llama_cpp_with_either_kind_of_base(tmp_path: Path) -> None:
    row = next(each for each in DENSE if each.name == "llama")
    base = TinyModel(row, tmp_path / "model", has_text=False)
    write_gguf(base, tmp_path / "base.gguf")
    adapter = RandomAdapter.of(base.folder, 1)
    names = {
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
        "up_proj": "ffn_up", "down_proj": "ffn_down",
    }  # fmt: skip
    made = adapter.write_gguf(tmp_path / "adapter.gguf", names, (4, 2))
    folder = adapter.write(tmp_path / "adapter")
    ((_, expected),) = Served(adapter.merge(base.folder, tmp_path / "merged")).generate([0], seeds=[2])
    for model in (base.folder, tmp_path / "base.gguf"):
        for path in (made, folder):
            served = Served(model)
            ((_, logits),) = served.generate([served.load(path)], seeds=[2])
            assert (logits - expected).abs().max() < TOLERANCE


def test_an_adapter_is_unloaded_and_its_number_taken_by_the_next(tiny: Path, tmp_path: Path) -> None:
    adapters_of(tiny, tmp_path / "adapters", 3)
    served = Served(tiny)
    first, second = (served.load(tmp_path / "adapters" / str(index)) for index in (1, 2))
    ((_, before),) = served.generate([second], seeds=[1])
    served.executor.unload_adapter(first)
    served.executor.unload_adapter(first)
    third = served.load(tmp_path / "adapters" / "0")
    found = served.generate([second, third], seeds=[1, 1])
    assert torch.equal(found[0][1], before)
    assert not torch.equal(found[1][1], before)
    served.driver.add(0, [5, 6], adapter=first)
    served.driver.row(0, 0, 2, ROW_SAMPLE)
    assert "is not loaded" in repr(served.driver.run())


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of an adapter's file; None removes one."""
    file = folder / "adapter_model.safetensors"
    kept = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({f"{Q}.lora_A.weight": None}, f"{Q}.lora_B.weight': has no lora_A"),
        ({f"{Q}.lora_B.weight": torch.zeros(5, 4)}, f"{Q}.lora_B.weight': has shape"),
        ({f"{Q}.lora_A.weight": torch.full((4, 64), float("nan"))}, f"{Q}.lora_A.weight': has values"),
        ({f"{Q}.lora_magnitude_vector": torch.zeros(64)}, "lora_magnitude_vector': is no lora_A"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, "lm_head.lora_A.weight': adapts lm_head"),
        ({f"{Q}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int32)}, f"{Q}.lora_A.weight': has type I32"),
    ],
    ids=["no A", "shape", "not finite", "DoRA", "head", "type"],
)
def test_a_damaged_adapter_is_refused_with_file_tensor_and_reason(
    tiny: Path, tmp_path: Path, tensors: dict[str, torch.Tensor | None], reason: str
) -> None:
    folder = RandomAdapter.of(tiny, 1).write(tmp_path / "adapter")
    changed(folder, **tensors)
    served = Served(tiny)
    with pytest.raises(ModelFileError) as raised:
        served.load(folder)
    assert reason in str(raised.value)
    assert "adapter_model.safetensors" in str(raised.value)
    assert len(served.generate([0])) == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, r"DoRA \(use_dora\)"),
        ({"bias": "all"}, r"trained biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 5}, "rank 5; its weights have rank 4"),
        ({"lora_alpha": "x"}, "is 'x'; a number"),
        ({"alpha_pattern": {"(": 3}}, "has the pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(
    tiny: Path, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    folder = RandomAdapter.of(tiny, 1, **config).write(tmp_path / "adapter")
    with pytest.raises(ModelFileError, match=reason):
        Served(tiny).load(folder)


def test_patterns_of_ranks_and_alphas(tiny: Path, tmp_path: Path) -> None:
    adapter = RandomAdapter.of(tiny, 1, alpha_pattern={"layers.0.self_attn.q_proj": 4, r".*up_proj": 2})
    number = (served := Served(tiny)).load(adapter.write(tmp_path / "adapter"))
    for module, (a, b) in adapter.halves.items():
        factor = 4 / 8 if module.endswith("0.self_attn.q_proj") else 2 / 8 if module.endswith("up_proj") else 1.0
        adapter.halves[module] = a, b * factor
    assert_near(
        served.generate([number], seeds=[1]),
        Served(adapter.merge(tiny, tmp_path / "merged")).generate([0], seeds=[1]),
    )


def test_an_adapter_whose_file_has_changed_or_whose_rank_is_too_large_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = RandomAdapter.of(tiny, 1).write(tmp_path / "adapter")
    served = Served(tiny)
    with pytest.raises(ModelFileError, match="rank 4; --max-lora-rank is 2"):
        served.load(folder, max_rank=2)
    with pytest.raises(ModelFileError, match="has changed"):
        served.executor.load_adapter(12, str(folder), 64)
    with pytest.raises(ModelFileError, match="is no adapter"):
        served.load(tmp_path / "nothing")


def test_on_a_device_rows_with_adapters_wait_for_nothing(tiny: Path, tmp_path: Path) -> None:
    """Rows of two adapters and of none: the ids of a CPU, one more copy for all layers, and no wait."""
    paths = [RandomAdapter.of(tiny, seed).write(tmp_path / str(seed)) for seed in (1, 2)]
    files, found = resolve_model(str(tiny)), list[list[list[int]]]()
    spec, execution = read_model_spec(files), ExecutionConfig(device="cpu", decoder="torch", threads=1)

    def make() -> TorchExecutor:
        return TorchExecutor(files, spec, execution, ModelConfig(dtype="float32"))

    for executor in (make(), OnEmulated(make)):
        driver: Any = Driver(executor, executor.open(SPEC))
        numbers = [adapter_id(find_adapter(str(path))) for path in paths]
        with outside(executor):
            for number, path in zip(numbers, paths, strict=True):
                executor.load_adapter(number, str(path), 64)
        for slot, adapter in enumerate([numbers[1], 0, numbers[0], numbers[1]]):
            driver.add(slot, make_prompt(5 + slot, slot), SamplingParams(temperature=0.0), adapter=adapter)
            driver.row(slot, 0, 5 + slot)
        if isinstance(executor, OnEmulated):
            executor.emulator.clear()
        firsts = list(driver.run().token_ids or ())
        found.append([firsts, *driver.decode(range(4), [6, 7, 8, 9], 3)])
    assert found[0] == found[1]
    submit = executor.emulator.phases["submit"]
    assert not submit.waits and submit.uploads == 2 * 4
