"""One model type against transformers: a tiny random model, its logits, its greedy text, and its bits.

Owns: TinyModel (transformers' side), ServedModel (an opened executor), and the checks of every row.
Does not: list model types (zoo.py does).
Invariants: a model is a function of its row. Of several seeds the first is taken whose greedy text is no matter of
rounding: its two best logits differ by more than MARGIN everywhere, so logits within TOLERANCE give the same text.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.drafts import Drafter
from octavo.core.plan import ROW_SAMPLE, StepPlan
from octavo.core.request_state import Sequence as ScheduledSequence
from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import Statistics
from octavo.errors import ConfigError
from octavo.executors.protocol import ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from octavo.ops import cpu
from tests.exactness import Run, assert_equal, limits_of, requests_of, serve
from tests.executors.driver import GREEDY, Driver
from tests.models.sharded_decoders import logits_of_threads
from tests.models.sharded_decoders import prompt as ranks_prompt
from tests.models.zoo import VOCAB_SIZE, ModelType

TOLERANCE = 1e-4
MARGIN = 2 * TOLERANCE
LENGTHS = (1, 3, 8, 17, 31, 40, 53, 70)
NUM_TOKENS = 12
CHUNK = 7
BLOCK = 4
SPEC = ExecutorSpec(max_sequences=16, max_batch_tokens=512, block_size=BLOCK, num_blocks=400)
QUANTIZATION_ERROR = {"int8": 0.08, "int4": 0.7}  # of random models, whose errors are not averaged out
RESULTS = Path(__file__).parents[1] / "data" / "model_types.json"
_EMBEDDINGS = ("embed", "wte", "wpe")
_STRONG = (
    "lm_head",
    "embed_out",
    "o_proj",
    "out_proj",
    "c_proj",
    "down_proj",
    "dense_4h_to_h",
    "fc2",
    "attention.dense",
)

logging.disable_progress_bar()


def make_prompt(length: int, seed: int) -> list[int]:
    """Random ids without special ones."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


PROMPTS = tuple(make_prompt(length, length) for length in LENGTHS)


class TinyModel:
    """A random model of a row: its folder, and what transformers computes with it in float32, eagerly.

    Its greedy text is made only with `has_text`, since that takes longer than most tests of logits.
    """

    def __init__(self, row: ModelType, folder: Path, has_text: bool = True) -> None:
        self.row, self.folder = row, folder
        if row.model_type not in CONFIG_MAPPING:
            pytest.skip(f"transformers {transformers.__version__} has no {row.model_type}")
        self.greedy: list[list[int]] = []
        for seed in range(8):
            self.model = random_model(row, seed)
            if not has_text:
                break
            self.greedy, margin = self._generate()
            if margin > MARGIN:
                break
        else:
            raise AssertionError(f"no seed of {row.name} gives a clear greedy choice; the margin is {margin:.1e}")
        self.model.save_pretrained(folder)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits of every position."""
        logits: torch.Tensor = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def _generate(self) -> tuple[list[list[int]], float]:
        """The greedy text of each prompt, and the least difference between the two best logits."""
        texts, margin = [], float("inf")
        for prompt in PROMPTS:
            found = self.model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                max_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=0, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            texts.append(found.sequences[0, len(prompt) :].tolist())
            best = torch.cat(found.logits).topk(2).values
            margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        return texts, margin


def random_model(row: ModelType, seed: int) -> Any:
    """A model whose every parameter is random, with logits that spread enough for a clear choice."""
    config = CONFIG_MAPPING[row.model_type](**row.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())  # a tied head is not listed beside the embedding
    own = {tensor.data_ptr() for tensor in parameters.values()}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if tensor.data_ptr() not in own}
    with torch.no_grad():
        for name, tensor in {**parameters, **buffers}.items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 1 or name in buffers:
                tensor.add_(0.2 * noise)  # norms keep their 1 or 0, biases and other vectors their 0
            elif any(part in name for part in _STRONG):  # else the input token's embedding wins a tied model's logits
                tensor.copy_(3.0 * noise * tensor.shape[-1] ** -0.5)
            elif any(part in name for part in _EMBEDDINGS) or tensor is model.get_input_embeddings().weight:
                tensor.copy_(row.embedding * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    return model


class ServedModel:
    """An opened executor of a folder, whose decoder's hidden states of each step are kept."""

    def __init__(
        self,
        tiny: TinyModel,
        decoder: str = "auto",
        dtype: str = "float32",
        quantization: str = "auto",
        path: Path | None = None,
    ) -> None:
        self.tiny = tiny
        files = resolve_model(str(path or tiny.folder))
        config = ModelConfig(dtype=dtype, quantization=quantization)
        self.spec = read_model_spec(files)
        execution = ExecutionConfig(decoder=decoder, threads=1)
        self.executor = TorchExecutor(files, self.spec, execution, config)
        self.capacity = self.executor.open(SPEC)
        self.hidden = torch.empty(0)
        self._decoder: Any = self.executor._decoder
        forward = self._decoder.forward

        def watched(*arguments: Any) -> torch.Tensor:
            found: torch.Tensor = forward(*arguments)
            self.hidden = found.clone()
            return found

        self._decoder.forward = watched

    @torch.inference_mode()
    def logits(self, prompts: Sequence[Sequence[int]], cuts: Sequence[float] = ()) -> list[torch.Tensor]:
        """The logits of every position of each prompt, all prompts in one ragged batch, cut at these shares of each."""
        driver = Driver(self.executor, self.capacity)
        parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        for slot, ids in enumerate(prompts):
            driver.add(slot, ids)
        for first, last in pairwise((0.0, *cuts, 1.0)):
            ranges = [(slot, round(first * len(ids)), round(last * len(ids))) for slot, ids in enumerate(prompts)]
            rows = [(end - start > 1, end, start, slot) for slot, start, end in ranges if end > start]
            rows.sort(key=lambda row: row[:2])  # as the executor orders a step's tokens
            for _, end, start, slot in rows:
                driver.row(slot, start, end - start, 0)
            driver.run()
            logits_TV = self._decoder.logits(self.hidden).clone()
            for (_, _, _, slot), piece in zip(rows, logits_TV.split([row[1] - row[2] for row in rows]), strict=True):
                parts[slot].append(piece)
        return [torch.cat(pieces) for pieces in parts]

    def generate(self, rounds: int = 1, **limits: object) -> GreedyRun:
        """Greedy text of all prompts, scheduled together within these limits, `rounds` times on one prefix cache."""
        num_partial, schedulers = 0, set()

        def watch(scheduler: Scheduler, plan: StepPlan) -> None:
            nonlocal num_partial
            num_partial += sum(not flags & ROW_SAMPLE for flags in plan.flags)
            schedulers.add(scheduler)

        params = replace(GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True)
        requests = requests_of(PROMPTS, [params] * len(PROMPTS))
        found = serve(self.executor, limits_of(self.capacity, **limits), requests, rounds, watch=watch)
        (scheduler,) = schedulers
        return GreedyRun(found, num_partial, scheduler.statistics())

    def close(self) -> None:
        self.executor.close()


@dataclass
class GreedyRun:
    """A run of all prompts, and how many rows computed only a part of a prompt."""

    run: Run
    num_partial: int
    totals: Statistics


def check_logits(served: ServedModel) -> float:
    """Assert that every position's logits are transformers' in a ragged batch; return the difference."""
    expected = [served.tiny.logits(ids) for ids in PROMPTS]
    whole = _max_difference(served.logits(PROMPTS), expected)
    parts = _max_difference(served.logits(PROMPTS, (0.3, 0.35, 0.8)), expected)
    assert whole < TOLERANCE and parts < TOLERANCE, f"logits differ by {whole:.1e} whole, {parts:.1e} in parts"
    return max(whole, parts)


def check_chunks_and_prefix_hits(served: ServedModel) -> None:
    """Assert that greedy text is that of `generate` in one batch, prompts in chunks, the second time from the cache."""
    found = served.generate(rounds=2, long_prefill_threshold=CHUNK)
    assert_equal(served.tiny.greedy, found.run)
    assert found.run.max_rows == len(PROMPTS), "all requests in one batch"
    assert found.num_partial > len(PROMPTS), "prompts were cut"
    assert found.run.hit_tokens > max(LENGTHS), "the second round had prefix hits"
    assert len({token for text in served.tiny.greedy for token in text}) > 20, (
        "the text is not one token again and again"
    )


def check_preemption(served: ServedModel) -> None:
    """Assert that greedy text is that of `generate` if the pool is too small for all requests at once."""
    longest, budget = max(LENGTHS) + NUM_TOKENS, 32
    blocks = tuple(group.peak_blocks(longest, budget, BLOCK) + 2 for group in served.capacity.groups)
    found = served.generate(num_blocks=blocks, headroom=0.0, preemption="recompute", max_batch_tokens=budget)
    assert_equal(served.tiny.greedy, found.run)
    assert found.run.num_preemptions > 0 and found.num_partial > 0


def check_speculation(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that greedy text is that of `generate` with drafts, of which two are right and the third is wrong."""

    def draft(sequence: ScheduledSequence, count: int) -> array[int]:
        text = served.tiny.greedy[int(sequence.request.name.partition("-")[2])]
        right = text[sequence.num_outputs : sequence.num_outputs + 2]
        return array("i", [*right, (right[-1] + 1) % VOCAB_SIZE] if right else [])[:count]

    def propose(drafter: Drafter, rows: list[tuple[ScheduledSequence, int]], num_rows: int) -> list[array[int]]:
        return [draft(*row) for row in rows]

    monkeypatch.setattr(Drafter, "propose", propose)
    found = served.generate(max_draft_tokens=3, max_draft_rows=len(PROMPTS))
    assert_equal(served.tiny.greedy, found.run)
    assert 0 < found.totals.num_accepted_tokens < found.totals.num_drafted_tokens


def check_quantization(tiny: TinyModel, code: str, decoder: str = "auto") -> float:
    """Assert that quantised logits are near the exact ones, natively with equal bits in a batch; return the error.

    It is the median over positions, relative to the spread of the exact logits: a router may choose other experts.
    """
    served = ServedModel(tiny, decoder, "auto", code)
    assert served.capacity.quantization != "none"
    together = served.logits(PROMPTS)
    alone = served.logits(PROMPTS[-1:])
    served.close()
    assert tiny.row.path != "native" or torch.equal(together[-1], alone[0])
    ours, exact = torch.cat(together), torch.cat([tiny.logits(ids) for ids in PROMPTS])
    centred = exact - exact.mean(-1, keepdim=True)
    error = float(((ours - exact).norm(dim=-1) / centred.norm(dim=-1)).median())
    assert error < QUANTIZATION_ERROR[code], f"{code} logits differ by {error:.2f} of their spread"
    return error


def check_ranks(tiny: TinyModel) -> str:
    """Assert that two ranks give transformers' logits, or refuse the model as the row says; return the refusal."""
    try:
        found = logits_of_threads(2, str(tiny.folder), "float32" if cpu.status().is_loaded else "plain")
    except ConfigError as error:
        assert not tiny.row.has_ranks, error
        return str(error)
    expected = [tiny.logits(ranks_prompt(40, VOCAB_SIZE)), tiny.logits(ranks_prompt(9, VOCAB_SIZE, 2))]
    for logits in found:
        assert _max_difference([logits[-1]], [torch.cat(expected)]) < TOLERANCE
    assert tiny.row.has_ranks
    return ""


def check_facts(served: ServedModel) -> None:
    """Assert that the row's path and windows are those that the executor has, and that prompts exceed the windows."""
    row = served.tiny.row
    assert served.capacity.decoder == row.path
    windows = tuple(sorted(group.window for group in served.capacity.groups if group.window))
    assert windows == row.windows and max(windows, default=0) < max(LENGTHS)


def compare_bits(served: ServedModel) -> dict[str, float]:
    """Return how far one request's logits, alone and whole, are from those in other settings; 0.0: equal bits."""
    ids = PROMPTS[-2]
    whole = served.logits([ids])
    found = {
        "in a batch": served.logits(PROMPTS)[-2:-1],
        "in chunks": served.logits([ids], [CHUNK / len(ids), 1 / 3, 2 / 3]),
        "token by token": served.logits([ids], [count / len(ids) for count in range(40, len(ids))]),
    }
    differences = {setting: _max_difference(logits, whole) for setting, logits in found.items()}
    limit = 0.0 if served.capacity.decoder == "native" else TOLERANCE
    assert max(differences.values()) <= limit, differences
    return differences


def check_threads(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the native decoder's bits are those of one thread, with steps divided by columns and by rows."""
    cuts = (0.02, 0.3, 0.35, 0.8)
    one = served.logits(PROMPTS, cuts)
    for threads in (2, 3):
        monkeypatch.setattr(cpu, "team_size", lambda threads=threads: threads)
        assert _max_difference(served.logits(PROMPTS, cuts), one) == 0.0, threads


def record(name: str, facts: Mapping[str, Any]) -> None:
    """Enter a row's facts into RESULTS, if OCTAVO_WRITE_TABLES is set; docs/models.md is made from them."""
    if not os.environ.get("OCTAVO_WRITE_TABLES"):
        return
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    held[name] = {**held.get(name, {}), **_rounded(facts)}
    RESULTS.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _rounded(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with numbers of two digits."""
    return {
        name: _rounded(fact) if isinstance(fact, Mapping) else float(f"{fact:.1e}") if isinstance(fact, float) else fact
        for name, fact in facts.items()
    }


def _max_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    assert [len(part) for part in ours] == [len(part) for part in theirs]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
