"""How far coded weights are from float32 on the default model, and keys and values of 8 bits from bfloat16.

Measured, printed, and held to a loose bound.

Each golden continuation is scored in both (SCORE rows, so every position sees the same ids); then it is generated
freely and the first difference noted. A text of this project is scored for its perplexity: windows of 512 tokens, the
second half of each counted, as llama.cpp's llama-perplexity does. OCTAVO_WRITE_TABLES=1 writes the tables of
docs/performance.md.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest
from tools.sections import write_section

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import TokenLogprobs
from octavo.core.request import Request, SamplingParams, Want
from octavo.core.scheduler import Scheduler
from octavo.executors.protocol import Capacity, ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from octavo.text.text_model import TextModel
from tests.exactness import limits_of, run

ROOT = Path(__file__).parent.parent
GOLDEN = json.loads((ROOT / "tests" / "data" / "golden_smollm2.json").read_text())
PROSE = ROOT / "tests" / "data" / "prose.txt"
WINDOW = 512
EXACT = ModelConfig(dtype="float32", quantization="none")
CODED = {
    "bfloat16": ModelConfig(dtype="bfloat16", quantization="none"),
    "the file's 4 bits": ModelConfig(),
}

Scores = list[tuple[TokenLogprobs, ...]]
Measured = tuple[Scores, Scores, list[list[int]]]


KV_TYPES = ("int8", "fp8")


def _open(model: ModelConfig, kv_dtype: str) -> tuple[TorchExecutor, Capacity]:
    files = resolve_model(None)
    executor = TorchExecutor(files, read_model_spec(files), ExecutionConfig(threads=1), model)
    return executor, executor.open(
        ExecutorSpec(max_sequences=32, max_batch_tokens=1024, num_blocks=400, max_model_len=2048, kv_dtype=kv_dtype)
    )


def _score(executor: TorchExecutor, capacity: Capacity, texts: Iterable[tuple[list[int], int]]) -> Scores:
    """Log-probabilities of each text's tokens from a position on, given everything before each of them."""
    scheduler = Scheduler(limits_of(capacity, max_batch_tokens=1024))
    scores: dict[str, list[TokenLogprobs]] = {}
    for ids, first in texts:
        name = str(len(scores))
        scores[name] = []
        params = SamplingParams(prompt_logprobs=1)
        scheduler.admit(Request(name, array("i", ids), params, wants=Want.SCORE, score_from=first), 0.0)
    while not (plan := scheduler.plan(0.0)).is_empty:
        events = scheduler.commit(plan, executor.collect(executor.submit(plan)), 0.0)
        for name, _, entries in events.scores:
            scores[name].extend(entries)
    return [tuple(entries) for entries in scores.values()]


def _prose_windows() -> list[tuple[list[int], int]]:
    ids = TextModel.load(resolve_model(None)).tokenizer.encode(PROSE.read_text(encoding="utf-8"))
    return [(ids[at : at + WINDOW], WINDOW // 2) for at in range(0, len(ids) - WINDOW + 1, WINDOW)]


def _perplexity(scores: Scores) -> float:
    logprobs = [entry.logprob for window in scores for entry in window]
    return math.exp(-sum(logprobs) / len(logprobs))


def _measure(model: ModelConfig, kv_dtype: str = "auto") -> Measured:
    """Scores of the golden continuations and of the prose, and free continuations of 64 tokens."""
    executor, capacity = _open(model, kv_dtype)
    golden = _score(executor, capacity, ((entry["prompt"] + entry["output"], len(entry["prompt"])) for entry in GOLDEN))
    prose = _score(executor, capacity, _prose_windows())
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    free = run(executor, limits_of(capacity), [entry["prompt"] for entry in GOLDEN], params)
    executor.close()
    return golden, prose, list(free.token_ids)


def _best_same(one: Scores, two: Scores) -> float:
    """The share of positions at which both find the same token best."""
    same = [a.top_ids[0] == b.top_ids[0] for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(same) / len(same)


def _table(base: tuple[str, Measured], others: dict[str, Measured]) -> tuple[str, list[tuple[str, float, float]]]:
    """A column for each way to compute, beside the base; of each its share of best tokens and median difference."""
    wanted, exact_prose, exact_free = base[1]
    count, num_scored, num_windows = len(exact_free), sum(map(len, wanted)), len(exact_prose)
    head = ["", base[0]]
    table = [
        [f"best token the same, given the same context ({num_scored} positions)", "all"],
        ["difference of log-probability, median", "0"],
        ["difference of log-probability, 99th percentile", "0"],
        ["free-running continuations of 64 tokens wholly the same", f"{count} of {count}"],
        ["tokens before the first difference, median", "64"],
        [f"perplexity of a text ({num_windows} windows of {WINDOW} tokens)", f"{_perplexity(exact_prose):.4f}"],
        [f"its best tokens the same ({num_windows * WINDOW // 2} positions)", "all"],
    ]
    bounds = []
    for label, (got, prose, free) in others.items():
        pairs = [(a, b) for one, two in zip(wanted, got, strict=True) for a, b in zip(one, two, strict=True)]
        differences = sorted(abs(a.logprob - b.logprob) for a, b in pairs)
        same = [
            next((at for at, (a, b) in enumerate(zip(one, ids, strict=True)) if a != b), 64)
            for one, ids in zip(exact_free, free, strict=True)
        ]
        column = (
            f"{_best_same(wanted, got):.2%}",
            f"{differences[len(differences) // 2]:.4f}",
            f"{differences[len(differences) * 99 // 100]:.4f}",
            f"{sum(at == 64 for at in same)} of {count}",
            f"{sorted(same)[count // 2]}",
            f"{_perplexity(prose):.4f}",
            f"{_best_same(exact_prose, prose):.2%}",
        )
        head.append(label)
        for line, value in zip(table, column, strict=True):
            line.append(value)
        bounds.append((label, _best_same(wanted, got), differences[len(differences) // 2]))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *table)), bounds


def _show(text: str, section: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{text}")
    if os.environ.get("OCTAVO_WRITE_TABLES"):
        write_section(ROOT / "docs" / "performance.md", section, text)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_X07_coded_weights_diverge_little_from_float32(capsys: pytest.CaptureFixture[str]) -> None:
    exact = _measure(EXACT)
    assert [len(entries) for entries in exact[0]] == [len(entry["output"]) for entry in GOLDEN]
    # The golden ids are float32's own best ones, so each must score as the best in float32.
    assert all(score.rank == 1 for entries in exact[0] for score in entries)
    text, bounds = _table(("float32", exact), {label: _measure(model) for label, model in CODED.items()})
    _show(text, "divergence", capsys)
    for label, agreeing, difference in bounds:
        assert agreeing > 0.9, label
        assert difference < 0.1, label


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_keys_and_values_of_8_bits_diverge_little_from_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    base = _measure(EXACT, "bfloat16")
    others = {kv_dtype: _measure(EXACT, kv_dtype) for kv_dtype in KV_TYPES}
    text, bounds = _table(("bfloat16", base), others)
    _show(text, "kv divergence", capsys)
    for (label, agreeing, difference), (least, most) in zip(bounds, ((0.96, 0.02), (0.9, 0.1)), strict=True):
        assert agreeing > least, label
        assert difference < most, label
