"""The native decoder against its torch twin and against itself, through the executor that both share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import ROW_SAMPLE
from octavo.errors import ConfigError
from octavo.executors.protocol import ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from octavo.models.native_decoder import NativeDecoder
from octavo.ops import cpu
from tests.executors.driver import Driver, make_prompt
from tests.tiny_models import FAMILIES, make_tiny_model

pytestmark = pytest.mark.skipif(not cpu.LIBRARY_PATH.exists(), reason="the kernels are not built")

SPEC = ExecutorSpec(max_sequences=40, max_batch_tokens=512, num_blocks=600, block_size=16, max_model_len=224)
QUANTIZATIONS = ("none", "int8", "int4")


class Probe(Driver):
    """A driver that sees the logits of the rows that sample."""

    def __init__(self, folder: Path, decoder: str, spec: ExecutorSpec = SPEC, **model: str) -> None:
        files = resolve_model(str(folder))
        config = ModelConfig(model=str(folder), **model)  # type: ignore[arg-type]
        executor = TorchExecutor(files, read_model_spec(files), ExecutionConfig(decoder=decoder, threads=1), config)
        super().__init__(executor, executor.open(spec))
        self.logits = torch.empty(0)
        self.decoder = executor._decoder
        assert self.decoder is not None
        executor.keeps_logits = True
        compute: Callable[[torch.Tensor], torch.Tensor] = self.decoder.logits

        def watched(hidden_NE: torch.Tensor) -> torch.Tensor:
            found = compute(hidden_NE)
            self.logits = found.clone()
            return found

        self.decoder.logits = watched  # type: ignore[method-assign]

    def all_logits(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The logits behind each prompt, computed in one step."""
        for slot, ids in enumerate(prompts):
            self.add(slot, ids)
            self.row(slot, 0, len(ids), ROW_SAMPLE)
        self.run()
        return list(self.logits)


def prompts() -> list[list[int]]:
    return [make_prompt(length, length) for length in (150, 1, 17, 33, 2)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_equal_the_torch_twin(family: str, dtype: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path, head_dim=16)
    native, twin = Probe(folder, "native", dtype=dtype), Probe(folder, "torch", dtype=dtype)
    assert isinstance(native.decoder, NativeDecoder) and not isinstance(twin.decoder, NativeDecoder)
    exact = Probe(folder, "torch", dtype="float32").all_logits(prompts())
    ours, theirs, true = map(torch.stack, (native.all_logits(prompts()), twin.all_logits(prompts()), exact))
    if dtype == "float32":
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    else:  # the stream is not rounded natively, nor are most activations: all in all it is nearer to the truth
        assert (ours - true).square().mean() < (theirs - true).square().mean()


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3", "qwen2"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_logits_are_near(family: str, quantization: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path, head_dim=32)
    native = Probe(folder, "native", quantization=quantization).all_logits(prompts())
    exact = Probe(folder, "torch", dtype="float32").all_logits(prompts())
    for ours, true in zip(native, exact, strict=True):
        bound = {"int8": 0.08, "int4": 0.7}[quantization]  # a random model: errors are not averaged out
        assert (ours - true).norm() < bound * (true - true.mean()).norm()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["smollm2", "gemma3", "qwen2_window"])
def test_bits_do_not_depend_on_company_or_chunks(family: str, quantization: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path, head_dim=16)
    ids = make_prompt(101, 5)
    alone = Probe(folder, "native", quantization=quantization).all_logits([ids])[0]
    for number in (1, 3, 6, 30):
        others = [make_prompt(1 + 7 * i % 90, i) for i in range(number)]
        company = Probe(folder, "native", quantization=quantization).all_logits([*others, ids])
        assert torch.equal(company[-1], alone), number
    for chunk in (1, 3, 5, 16, 64):
        probe = Probe(folder, "native", quantization=quantization)
        probe.add(0, ids)
        probe.prefill(0, len(ids), chunk)
        assert torch.equal(probe.logits[-1], alone), chunk


@pytest.mark.parametrize(
    ("family", "quantization"), [("gemma3", "none"), ("gemma3", "int8"), ("smollm2", "int4"), ("qwen2_window", "int8")]
)
def test_bits_do_not_depend_on_threads(
    family: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens are divided among threads by columns, many by rows: 203 in blocks of 64 and less, and in two of 102.

    Seven threads are more than the cores, so some lose theirs while others take their pieces.
    """
    folder = make_tiny_model(family, tmp_path, head_dim=16)
    one = Probe(folder, "native", quantization=quantization).all_logits(prompts())
    for threads in (2, 3, 7):
        monkeypatch.setattr(cpu, "team_size", lambda threads=threads: threads)
        probe = Probe(folder, "native", quantization=quantization)
        for _ in range(20 if threads == 7 else 1):
            assert all(torch.equal(a, b) for a, b in zip(one, probe.all_logits(prompts()), strict=True)), threads


@pytest.mark.parametrize("number", [1, 3, 5])
def test_decodes_cut_over_threads_have_the_same_bits(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few decodes are joined by each thread for itself, more of them together."""
    folder = make_tiny_model("smollm2", tmp_path, head_dim=32)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(cpu, "team_size", lambda threads=threads: threads)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        probe = Probe(folder, "native")
        for slot in range(number):
            probe.add(slot, make_prompt(190 + slot, slot))
            probe.prefill(slot, 190 + slot, 64)
        for slot in range(number):
            probe.row(slot, 189 + slot, 1, ROW_SAMPLE)
        probe.run()
        found.append(probe.logits)
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_bits_do_not_depend_on_the_block_size(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3", tmp_path)
    found = []
    for block_size in (8, 16, 64):
        spec = ExecutorSpec(8, 512, num_blocks=1000 // block_size, block_size=block_size, max_model_len=200)
        found.append(Probe(folder, "native", spec).all_logits(prompts()))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("family", ["llama2", "gemma3"])
def test_what_nobody_wrote_into_the_cache_is_not_read(family: str, tmp_path: Path) -> None:
    """Blocks are not cleared for the kernels: what a former owner left behind a context must not matter."""
    folder = make_tiny_model(family, tmp_path, head_dim=16)
    found = []
    for left in (0.0, float("nan")):
        probe = Probe(folder, "native")
        for pool in probe.executor._cache.pools:  # type: ignore[attr-defined]
            for part in (*pool.keys, *pool.values):
                part.fill_(left)
        first = probe.all_logits(prompts())
        lengths = [len(ids) for ids in prompts()]
        decoded = probe.decode(list(range(len(lengths))), lengths, 20)
        found.append((first, decoded, probe.logits))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == found[1][1] and torch.equal(found[0][2], found[1][2])


def test_a_row_that_is_not_finite_harms_no_other(tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path)
    probe = Probe(folder, "native", quantization="int8")
    good = probe.all_logits(prompts())
    other = Probe(folder, "native", quantization="int8")
    pools = other.executor._cache.pools  # type: ignore[attr-defined]
    ids = prompts()
    other.add(0, ids[0])
    other.prefill(0, 120)
    block = int(other.tables[0][0]) if isinstance(other.tables, dict) else 0
    pools[0].keys[0][block].fill_(float("nan"))
    other.row(0, 120, len(ids[0]) - 120, ROW_SAMPLE)
    for slot, row in enumerate(ids[1:], start=1):
        other.add(slot, row)
        other.row(slot, 0, len(row), ROW_SAMPLE)
    result = other.run()
    assert [row for row, _ in result.errors] == [0]
    assert all(torch.equal(a, b) for a, b in zip(other.logits[1:], good[1:], strict=True))


def test_what_cannot_be_native_is_said(tmp_path: Path) -> None:
    folder = make_tiny_model("llama2", tmp_path)
    files = resolve_model(str(folder))
    spec = read_model_spec(files)
    for execution, model, words in [
        (ExecutionConfig(decoder="native"), ModelConfig(dtype="float16"), "float16"),
        (ExecutionConfig(decoder="torch", numerics="invariant"), ModelConfig(), "decoder is 'torch'"),
        (ExecutionConfig(attention="batched"), ModelConfig(quantization="int4"), "attention is 'batched'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            TorchExecutor(files, spec, execution, model)
