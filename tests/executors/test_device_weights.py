"""Weights and numerics of a device: codes stay codes, and invariant linear layers are not refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.artifacts.resolve import find_wheel_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.executors import loading, memory
from octavo.executors.loading import DecoderChoice
from octavo.executors.torch_executor import TorchExecutor
from octavo.models.decoder import Decoder
from octavo.models.loader import Loader
from octavo.models.native_weights import wanted_tensors
from octavo.nn.parallel import Parallel, ShardSpec
from octavo.nn.weights import open_weights
from octavo.ops.triton import available
from tests.executors.conformance import open_files
from tests.executors.driver import SPEC, Driver, make_prompt
from tests.executors.emulated_device import OnEmulated
from tests.tiny_gguf import make_tiny_gguf
from tests.tiny_models import make_tiny_model

needs_triton = pytest.mark.skipif(not available.is_available(), reason="no triton")


def choose(execution: ExecutionConfig, model: ModelConfig) -> DecoderChoice:
    files, spec = open_files(find_wheel_model().root)
    return DecoderChoice(files, spec, execution, model)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "choose_device", lambda name: torch.device("cuda"))


@needs_triton
@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("quantization", ["auto", "int8", "int4", "none"])
def test_fault_13_a_device_with_kernels_keeps_codes_and_may_be_invariant(quantization: str) -> None:
    choice = choose(ExecutionConfig(numerics="invariant"), ModelConfig(quantization=quantization))
    assert (choice.has_device_kernels, choice.is_invariant, choice.is_packed) == (True, True, False)
    expected = quantization if quantization != "auto" else "auto" if choice._spec.quantization else "none"
    assert choice.quantization == expected


@pytest.mark.usefixtures("on_cuda")
def test_fault_13_without_kernels_it_refuses_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"numerics is 'invariant', but .* the device is cuda"):
        choose(ExecutionConfig(numerics="invariant"), ModelConfig())
    with pytest.raises(ConfigError, match="quantization is 'int4'"):
        choose(ExecutionConfig(), ModelConfig(quantization="int4"))
    assert choose(ExecutionConfig(), ModelConfig()).quantization == "none"


@needs_triton
@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(("numerics", "quantization"), [("invariant", "none"), ("fast", "int4"), ("invariant", "int8")])
def test_ranks_of_a_device_keep_codes_and_may_be_invariant(numerics: str, quantization: str) -> None:
    files, spec = open_files(find_wheel_model().root)
    settings = ExecutionConfig(numerics=numerics), ModelConfig(quantization=quantization)
    choice = DecoderChoice(files, spec, *settings, Parallel(ShardSpec.of(1, 2)))
    assert (choice.decoder_name, choice.is_packed) == ("sharded", False)
    assert (choice.is_invariant, choice.quantization) == (numerics == "invariant", quantization)
    assert choice.keeps_codes == (quantization != "none")


@needs_triton
@pytest.mark.usefixtures("on_cuda")
def test_a_plan_counts_the_codes_that_a_device_keeps(tmp_path: Path) -> None:
    """Before anything is loaded, and near what is loaded then."""
    files, spec = open_files(make_tiny_model("llama3", tmp_path, hidden_size=256, intermediate_size=1024))
    found = []
    for quantization in ("none", "int8", "int4"):
        choice = DecoderChoice(files, spec, ExecutionConfig(), ModelConfig(quantization=quantization))
        found.append(memory._weight_bytes(files, spec, choice))
    assert found[2] < 0.7 * found[1] < 0.5 * found[0]
    coded = wanted_tensors("int4", choice.dtype)
    loader = Loader(spec, choice.dtype, torch.device("cpu"), open_weights(files, spec), None, coded)
    assert 0.8 < Decoder(loader).weight_bytes / found[2] < 1.2


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(("setting", "value"), [("numerics", "invariant"), ("quantization", "int4")])
def test_models_through_transformers_say_why_they_cannot(setting: str, value: str, tmp_path: Path) -> None:
    execution = ExecutionConfig(decoder="transformers", numerics=value if setting == "numerics" else "auto")
    model = ModelConfig(quantization=value if setting == "quantization" else "auto")
    why = f"{setting} is '{value}'.* runs through transformers, whose own operations compute it on a device"
    with pytest.raises(ConfigError, match=why):
        DecoderChoice(*open_files(make_tiny_model("llama3", tmp_path)), execution, model)


def test_the_native_decoder_is_still_of_cpus(on_cuda: None) -> None:
    with pytest.raises(ConfigError, match=r"decoder is 'native', but .* the device is cuda"):
        choose(ExecutionConfig(decoder="native"), ModelConfig())


def executor(path: Path, numerics: str, quantization: str) -> TorchExecutor:
    execution = ExecutionConfig(device="cpu", threads=1, attention="batched", numerics=numerics)
    return TorchExecutor(*open_files(path), execution, ModelConfig(dtype="float32", quantization=quantization))


@needs_triton
@pytest.mark.usefixtures("patched_once")
def test_coded_weights_on_a_device_generate_what_their_floats_do(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf("llama2", path, "Q4_0")
    prompt, found = make_prompt(12), []
    for made in (
        executor(path, "auto", "none"),
        OnEmulated(
            lambda: executor(path, "invariant", "int8"), has_kernels=True
        ),  # 4-bit codes of the files are fewer bits than 8
    ):
        driver = Driver(made, made.open(SPEC))
        driver.add(0, prompt)
        first = (driver.prefill(0, len(prompt)).token_ids or ())[0]
        found.append([first, *driver.decode([0], [len(prompt) + 1], 6)[0]])
        made.close()
    assert found[0] == found[1]
    assert made.emulator.phases["submit"].launches["octavo.coded_linear.default"] > 0
