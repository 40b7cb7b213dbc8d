"""How far coded weights are from float32 on the default model: measured, printed, and held to a loose bound.

Each golden continuation is scored in both (SCORE rows, so every position sees the same ids); then it is generated
freely and the first difference noted. A text of this project is scored for its perplexity: windows of 512 tokens, the
second half of each counted, as llama.cpp's llama-perplexity does. OCTAVO_WRITE_TABLES=1 writes the table of
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


def _open(model: ModelConfig) -> tuple[TorchExecutor, Capacity]:
    files = resolve_model(None)
    executor = TorchExecutor(files, read_model_spec(files), ExecutionConfig(threads=1), model)
    return executor, executor.open(
        ExecutorSpec(max_sequences=32, max_batch_tokens=1024, num_blocks=400, max_model_len=2048)
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


def _measure(model: ModelConfig) -> tuple[Scores, Scores, list[array[int]]]:
    """Scores of the golden continuations and of the prose, and free continuations of 64 tokens."""
    executor, capacity = _open(model)
    golden = _score(executor, capacity, ((entry["prompt"] + entry["output"], len(entry["prompt"])) for entry in GOLDEN))
    prose = _score(executor, capacity, _prose_windows())
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    free = run(executor, limits_of(capacity), [entry["prompt"] for entry in GOLDEN], params)
    executor.close()
    return golden, prose, list(free.token_ids)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_X07_coded_weights_diverge_little_from_float32(capsys: pytest.CaptureFixture[str]) -> None:
    count = len(GOLDEN)
    wanted, exact_prose, _ = _measure(EXACT)
    assert [len(entries) for entries in wanted] == [len(entry["output"]) for entry in GOLDEN]
    # The golden ids are float32's own best ones, so each must score as the best in float32.
    assert all(score.rank == 1 for entries in wanted for score in entries)
    head = ["", "float32"]
    num_scored, num_windows = sum(map(len, wanted)), len(exact_prose)
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
    for label, model in CODED.items():
        got, prose, free = _measure(model)
        pairs = [(a, b) for one, two in zip(wanted, got, strict=True) for a, b in zip(one, two, strict=True)]
        differences = sorted(abs(a.logprob - b.logprob) for a, b in pairs)
        agreeing = sum(b.rank == 1 for _, b in pairs) / len(pairs)
        same = [
            next((at for at, (a, b) in enumerate(zip(entry["output"], ids, strict=True)) if a != b), 64)
            for entry, ids in zip(GOLDEN, free, strict=True)
        ]
        tops = [
            a.top_ids[0] == b.top_ids[0]
            for x, y in zip(exact_prose, prose, strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        column = (
            f"{agreeing:.2%}",
            f"{differences[len(differences) // 2]:.4f}",
            f"{differences[len(differences) * 99 // 100]:.4f}",
            f"{sum(at == 64 for at in same)} of {count}",
            f"{sorted(same)[count // 2]}",
            f"{_perplexity(prose):.4f}",
            f"{sum(tops) / len(tops):.2%}",
        )
        head.append(label)
        for line, value in zip(table, column, strict=True):
            line.append(value)
        bounds.append((label, agreeing, differences[len(differences) // 2]))
    lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *table)]
    text = "\n".join(lines)
    with capsys.disabled():
        print(f"\n{text}")
    if os.environ.get("OCTAVO_WRITE_TABLES"):
        write_section(ROOT / "docs" / "performance.md", "divergence", text)
    for label, agreeing, difference in bounds:
        assert agreeing > 0.9, label
        assert difference < 0.1, label
