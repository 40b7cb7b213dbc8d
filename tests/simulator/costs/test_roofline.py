"""Facts of models and devices, the roofline over them, and the pool beside the weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_gguf import make_tiny_gguf

from octavo.errors import ConfigError
from octavo.simulator.cost_model import StepShape
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.costs.hardware import DEVICES, MODELS, DeviceFacts, ModelFacts, device_facts, model_facts
from octavo.simulator.costs.roofline import Efficiencies, Roofline

PERFECT = Efficiencies(1.0, 1.0, 1.0, 1.0, 1.0)
MODEL = ModelFacts("small", 2, 8, 2, 1, 4, 16, 32)
DEVICE = DeviceFacts("plain", 1e9, 1000.0, 1e6, kernel_s=0.0, step_s=0.0, link_bandwidth=100.0, link_s=1.0)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.135), ("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("llama-3.1-405b", 405.9),
        ("mistral-7b", 7.25), ("mixtral-8x7b", 46.7), ("qwen3-0.6b", 0.60), ("qwen3-8b", 8.19), ("qwen3-32b", 32.8),
        ("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235.1), ("gpt-oss-120b", 116.8), ("gemma-3-27b", 27.0),
    ],
)  # fmt: skip
def test_presets_have_as_many_weights_as_their_models(name: str, billions: float) -> None:
    facts = MODELS[name]
    weights = facts.num_layers * facts.layer_weights + facts.head_weights * (1 if facts.is_tied else 2)
    assert weights == pytest.approx(billions * 1e9, rel=0.02)


def test_a_routed_model_uses_what_its_name_says() -> None:
    facts = MODELS["qwen3-30b-a3b"]
    used = facts.num_layers * (facts.dense_weights + facts.active_experts * facts.expert_weights) + facts.head_weights
    assert used == pytest.approx(3.0e9, rel=0.1)


def test_names_of_models_and_devices_are_found_as_people_write_them() -> None:
    assert model_facts("meta-llama/Llama-3.1-8B-Instruct") is MODELS["llama-3.1-8b"]
    assert model_facts("llama-3.1-8b:fp8").linear_bytes == 1.0
    assert device_facts("H100_SXM") is DEVICES["h100"]
    assert device_facts("a100").memory_bytes > 80e9


@pytest.mark.parametrize("wrong", ["llama-9", "llama-3.1-8b:fp7"])
def test_an_unknown_model_is_refused_with_its_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        model_facts(wrong)


def test_an_unknown_device_is_refused_with_those_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown device 'h900'.*h200"):
        device_facts("h900")


def test_a_models_own_files_tell_its_facts(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf("llama2", path, "F32")
    facts = model_facts(str(path))
    assert facts.weight_file_bytes == path.stat().st_size
    assert facts.weight_bytes == path.stat().st_size
    assert facts.num_layers >= 1


def test_this_machine_is_measured() -> None:
    device = device_facts("this")
    assert device.is_measured
    assert device.flops16 > 1e8
    assert device.bandwidth > 1e8


def test_a_step_of_one_token_takes_the_time_of_reading_everything_once() -> None:
    costs = Roofline(Hardware(MODEL, DEVICE), PERFECT)
    weights = MODEL.num_layers * MODEL.layer_weights * 2 + MODEL.head_bytes
    activations = MODEL.num_layers * 2 * (6 * 8 + 3 * 16)
    kv = 10 * MODEL.kv_bytes_per_token
    assert costs.step_s(StepShape([10], [], 1)) == pytest.approx((weights + activations + kv) / 1000.0)


def test_a_long_chunk_takes_the_time_of_its_arithmetic() -> None:
    device = replace(DEVICE, flops16=1000.0)
    costs = Roofline(Hardware(MODEL, device), PERFECT)
    tokens = 50
    linear = 2 * tokens * MODEL.num_layers * MODEL.layer_weights + 2 * MODEL.head_weights
    pairs = 50 * 20 + 50 * 51 // 2
    attention = MODEL.num_layers * 4 * MODEL.num_heads * MODEL.head_dim * pairs
    assert costs.step_s(StepShape([], [(50, 20)], 1)) == pytest.approx((linear + attention) / 1000.0)


def test_devices_share_a_layer_and_tell_each_other() -> None:
    slow = Roofline(Hardware(MODEL, DEVICE), PERFECT).step_s(StepShape([10], [], 1))
    shared = Roofline(Hardware(MODEL, DEVICE, 2), PERFECT).step_s(StepShape([10], [], 1))
    kv = 10 * MODEL.kv_bytes_per_token / 1000.0  # one KV head cannot be shared
    reduces = 2 * MODEL.num_layers * (1.0 + 2 * 1 * 8 / 100.0)
    assert shared == pytest.approx((slow - kv) / 2 + kv + reduces)


@pytest.mark.parametrize("lengths", [[5], [5, 5, 6], [1, 900, 33]])
def test_the_fast_path_equals_the_slow_one(lengths: list[int]) -> None:
    costs = Roofline(Hardware(MODELS["llama-3.1-8b"], DEVICES["l4"]))
    assert costs.decode_s is not None
    shape = StepShape(list(lengths), [], len(lengths))
    assert costs.decode_s(len(lengths), sum(lengths)) == costs.step_s(shape)


def test_layers_with_a_window_read_no_more_than_it() -> None:
    windowed = replace(MODEL, windows=(4, 4))
    costs = Roofline(Hardware(windowed, DEVICE), PERFECT)
    assert costs.decode_s is None
    assert costs.step_s(StepShape([4], [], 1)) == costs.step_s(StepShape([4000], [], 1))


def test_a_rank_reads_its_own_experts_and_all_ranks_tokens_use_them() -> None:
    alone = Hardware(MODELS["qwen3-30b-a3b"], replace(DEVICES["h100"], link_s=0.0, kernel_s=0.0, step_s=0.0))
    pair = replace(alone, dp=2, is_expert_parallel=True)
    model, device = alone.model, alone.device
    shape, met = StepShape([1], [], 1), StepShape([1], [], 1, peer_tokens=(1,))
    expert_s = model.expert_weights * 2 / device.bandwidth
    one, two = Roofline(alone, PERFECT).step_s(shape), Roofline(pair, PERFECT).step_s(met)
    # One token reads 8 experts. Two tokens of two ranks use 15.5 of 128, half of them on each rank.
    used = 128 * (1 - (15 / 16) ** 2) / 2
    exchange_s = 2 * model.hidden_size * 2 / device.link_bandwidth
    assert two - one == pytest.approx(model.num_layers * ((used - 8) * expert_s + exchange_s))


def test_ranks_keep_their_own_dense_weights_and_a_share_of_the_experts() -> None:
    alone = Hardware.of("qwen3-30b-a3b", "h100")
    model = alone.model
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert alone.weight_bytes == model.weight_bytes
    assert replace(alone, dp=4).weight_bytes == pytest.approx(model.weight_bytes - 0.75 * experts)
    assert replace(alone, dp=4, is_expert_parallel=True).pool_blocks() == replace(alone, dp=4).pool_blocks()
    more = replace(alone, dp=2).pool_blocks() - alone.pool_blocks()
    assert more == pytest.approx(experts / 2 / (model.kv_bytes_per_token * 16), abs=1)
    halves = replace(alone, pp=2)  # two engines with a half each of what two devices leave
    assert 2 * halves.pool_blocks() > 2 * alone.pool_blocks() + model.weight_bytes / (model.kv_bytes_per_token * 17)


@pytest.mark.parametrize(
    ("model", "sizes", "told"),
    [
        ("llama-3.1-8b", {"pp": 33}, "pipeline_parallel_size is 33; llama-3.1-8b has 32 layers"),
        ("llama-3.1-8b", {"dp": 2}, "data_parallel_size is 2; llama-3.1-8b has no experts, give replicas"),
        ("llama-3.1-8b", {"is_expert_parallel": True}, "llama-3.1-8b has no experts, leave it out"),
        ("qwen3-30b-a3b", {"dp": 3, "is_expert_parallel": True}, "is 3; give sizes whose product divides the 128"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(model: str, sizes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(Hardware.of(model, "h100"), **sizes)


def test_a_larger_batch_reads_more_experts_but_not_more_than_there_are() -> None:
    costs = cost_model("roofline", Hardware.of("qwen3-30b-a3b", "h100"))
    times = [costs.step_s(StepShape([100] * rows, [], rows)) for rows in (1, 8, 64)]
    assert times == sorted(times)
    assert times[1] / times[0] > 2
    assert times[2] / times[0] < MODELS["qwen3-30b-a3b"].num_experts


def test_copies_and_swaps_take_time() -> None:
    costs = Roofline(Hardware(MODEL, DEVICE), PERFECT)
    still = costs.step_s(StepShape([10], [], 1))
    copied = costs.step_s(StepShape([10], [], 1, copied_blocks=2))
    assert copied - still == pytest.approx(2 * 2 * 16 * MODEL.kv_bytes_per_token / 1000.0)
    assert costs.step_s(StepShape([10], [], 1, swapped_out_blocks=1)) > still


def test_the_pool_is_what_the_weights_leave() -> None:
    hardware = Hardware.of("llama-3.1-8b", "rtx4090")
    assert hardware.pool_blocks(2048) == pytest.approx(2588, rel=0.05)  # vLLM 0.19 found 2,588 on such a card
    assert Hardware.of("llama-3.1-8b:fp8", "rtx4090").pool_blocks() > 2 * hardware.pool_blocks()


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"llama-3.1-70b has 141.1 GB of weights; 1 x h100 give 76.4 GB"):
        Hardware.of("llama-3.1-70b", "h100").pool_blocks()


@pytest.mark.parametrize(
    ("spec", "message"), [("magic", "give one of roofline"), ("roofline", "give a model and a device")]
)
def test_a_cost_model_that_cannot_be_made_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost_model(spec)


def test_tp_must_divide_the_heads() -> None:
    with pytest.raises(ConfigError, match="tp is 3"):
        cost_model("roofline", Hardware.of("llama-3.1-8b", "h100", 3))
