"""Measures the cost of grammar masks in a step of the default model.

Owns: the grammar; two groups of requests of equal size, with the grammar and without.
The groups decode in alternate steps, with the engine's scheduler, grammars and executor. The ratio compares whole
steps, so it contains only the part of the masks' cost that does not overlap with the forward pass.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Sequence
from statistics import median
from typing import Any

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.limits import Limits
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.grammars import MaskedTicket, submit_masked
from octavo.executors import limit_spinning
from octavo.executors.protocol import Capacity, Executor, ExecutorSpec
from octavo.grammar.bank import GrammarBank
from octavo.grammar.compile import compile_grammar
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary
from octavo.text.tokenizer import Tokenizer

STEPS = 200  # measured steps of each group
WARM_UP = 20
BATCH_TOKENS = 512
EOS = (2,)
PROMPT = "A list of people as JSON, each with a name, an age, an address and what they like to do: "
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["guest", "member", "staff"]},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
                    "required": ["street", "number"], "additionalProperties": False},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
    },
    "required": ["name", "age", "kind", "address", "likes"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}  # longer than any output, so that no row finishes early


def measure_masks(row_counts: Sequence[int], threads: int, budget_s: float) -> list[dict[str, Any]]:
    """Return a table of milliseconds per step by number of rows: medians of STEPS steps. `budget_s` has no effect."""
    limit_spinning()
    from octavo.executors.torch_executor import TorchExecutor  # at import torch reads what limit_spinning set

    files = resolve_model(None)
    spec, tokenizer = read_model_spec(files), Tokenizer.from_files(files)
    prompt = array("i", tokenizer.encode(PROMPT))
    rows = []
    for count in row_counts:
        executor = TorchExecutor(files, spec, ExecutionConfig(threads=threads), ModelConfig())
        max_len = len(prompt) + STEPS + WARM_UP + 1
        blocks = 2 * count * (max_len // 16 + 2)
        capacity = executor.open(ExecutorSpec(2 * count, BATCH_TOKENS, num_blocks=blocks, max_model_len=max_len))
        batch = HalfConstrainedBatch(executor, capacity, Vocabulary(lambda: tokenizer, spec.vocab_size), prompt)
        free_s, constrained_s = batch.run(count)
        executor.close()
        ratio = median(masked / free for masked, free in zip(constrained_s, free_s, strict=True))
        free_ms, constrained_ms = median(free_s) * 1e3, median(constrained_s) * 1e3
        rows.append({"rows": count, "free ms": free_ms, "held ms": constrained_ms, "ratio": ratio})
    return [{"title": "a step held to a JSON schema", "rows": rows}]


class HalfConstrainedBatch:
    """One scheduler with `count` requests without a grammar and `count` with one; each step runs one of the halves."""

    def __init__(self, executor: Executor, capacity: Capacity, vocabulary: Vocabulary, prompt: array[int]) -> None:
        limits = Limits(
            block_size=capacity.block_size,
            num_blocks=capacity.num_blocks,
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            groups=capacity.groups,
            max_sequences=capacity.num_slots,
            max_batch_tokens=BATCH_TOKENS,
        )
        self._executor = executor
        self._scheduler = Scheduler(limits)
        self._bank = GrammarBank(vocabulary)
        self._vocabulary = vocabulary
        self._prompt = prompt

    def run(self, count: int) -> tuple[list[float], list[float]]:
        """Alternate steps of the two halves; return the seconds of each step without a grammar, and with one."""
        grammar = compile_grammar("json_schema", json.dumps(SCHEMA))
        free = frozenset(self._admit(f"free {index}", "", index) for index in range(count))
        constrained = frozenset(self._admit(f"constrained {index}", grammar, index) for index in range(count))
        try:
            times: dict[frozenset[str], list[float]] = {free: [], constrained: []}
            for _ in range(STEPS + WARM_UP):
                for half, half_times in times.items():
                    start = time.perf_counter()
                    if self._step(half):
                        half_times.append(time.perf_counter() - start)
            return times[free][-STEPS:], times[constrained][-STEPS:]
        finally:
            self._bank.close()

    def _admit(self, name: str, grammar: str, seed: int) -> str:
        params = SamplingParams(
            temperature=0.8, seed=seed, max_tokens=STEPS + WARM_UP, ignore_eos=not grammar, grammar=grammar
        )
        self._scheduler.admit(Request(name, self._prompt, params, eos_token_ids=EOS), 0.0)
        if grammar:
            self._bank.open(name, Matcher.of(grammar, self._vocabulary, EOS))
        return name

    def _step(self, half: frozenset[str]) -> bool:
        """Run one step of a half; return False if the step computed prompts."""
        plan = self._scheduler.plan(0.0, half)
        ticket = submit_masked(self._executor, plan, self._bank)
        if isinstance(ticket, MaskedTicket):
            result = ticket.collect(self._executor)
        else:
            result = self._executor.collect(ticket)
        events = self._scheduler.commit(plan, result, 0.0)
        self._bank.committed(events)
        return plan.num_query_tokens == len(half)
