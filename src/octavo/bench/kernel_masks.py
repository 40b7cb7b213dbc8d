"""The cost of grammar masks in a step.

Owns: the grammars, the two halves of a batch (with and without a grammar) and their turns. Does not: sum up (the reader
of the table does). The default model decodes equally many constrained and free rows, alternately, with the engine's
scheduler, grammars and executor; so a ratio is that of whole steps, with the part of the masks' cost that the forward
pass does not hide.
"""

from __future__ import annotations

import json
import time
from array import array
from statistics import median

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.bench.kernel_table import KernelTable, Sizes
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.limits import Limits
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.grammars import MaskedTicket, submit_masked
from octavo.executors.openmp import limit_spinning
from octavo.executors.protocol import Capacity, Executor, ExecutorSpec
from octavo.grammar.bank import GrammarBank
from octavo.grammar.compile import compile_grammar
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary
from octavo.text.tokenizer import Tokenizer

STEPS = 200  # of each half
WARM = 20
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
ENDLESS = {"type": "array", "items": PERSON, "minItems": 1000}  # no output completes it


def tables(sizes: Sizes) -> list[KernelTable]:
    """Return milliseconds of a step, by rows."""
    limit_spinning()
    from octavo.executors.torch_executor import TorchExecutor  # at import torch reads what limit_spinning set

    files = resolve_model(None)
    vocabulary = Vocabulary(lambda: Tokenizer.from_files(files), read_model_spec(files).vocab_size)
    prompt = array("i", Tokenizer.from_files(files).encode(PROMPT))
    rows = []
    for count in sizes.rows:
        execution = ExecutionConfig(threads=sizes.threads)
        executor = TorchExecutor(files, read_model_spec(files), execution, ModelConfig())
        longest = len(prompt) + STEPS + WARM + 1
        blocks = 2 * count * (longest // 16 + 2)
        capacity = executor.open(ExecutorSpec(2 * count, 512, num_blocks=blocks, max_model_len=longest))
        free_s, held_s = _Halves(executor, capacity, vocabulary, prompt).run(count)
        executor.close()
        ratio = median(held / free for held, free in zip(held_s, free_s, strict=True))
        rows.append((count, median(free_s) * 1e3, median(held_s) * 1e3, ratio))
    return [KernelTable("a step held to a JSON schema", ("rows", "free ms", "held ms", "ratio"), rows)]


class _Halves:
    """Requests with and without a grammar in one scheduler, which plans the steps of one half at a time."""

    def __init__(self, executor: Executor, capacity: Capacity, vocabulary: Vocabulary, prompt: array[int]) -> None:
        limits = Limits(
            block_size=capacity.block_size,
            num_blocks=capacity.num_blocks,
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            groups=capacity.groups,
            max_sequences=capacity.num_slots,
            max_batch_tokens=512,
        )
        self._executor = executor
        self._scheduler = Scheduler(limits)
        self._bank = GrammarBank(vocabulary)
        self._vocabulary = vocabulary
        self._prompt = prompt

    def run(self, count: int) -> tuple[list[float], list[float]]:
        """Return seconds of each step of the free and of the constrained half, run in turn."""
        grammar = compile_grammar("json_schema", json.dumps(ENDLESS))
        free = frozenset(self._admit(f"free {index}", "", index) for index in range(count))
        held = frozenset(self._admit(f"held {index}", grammar, index) for index in range(count))
        try:
            times: dict[frozenset[str], list[float]] = {free: [], held: []}
            for _ in range(STEPS + WARM):
                for half, taken in times.items():
                    begun = time.perf_counter()
                    if self._step(half):
                        taken.append(time.perf_counter() - begun)
            return times[free][-STEPS:], times[held][-STEPS:]
        finally:
            self._bank.close()

    def _admit(self, name: str, grammar: str, seed: int) -> str:
        params = SamplingParams(
            temperature=0.8, seed=seed, max_tokens=STEPS + WARM, ignore_eos=not grammar, grammar=grammar
        )
        self._scheduler.admit(Request(name, self._prompt, params, eos_token_ids=(2,)), 0.0)
        if grammar:
            self._bank.open(name, Matcher.of(grammar, self._vocabulary, (2,)))
        return name

    def _step(self, half: frozenset[str]) -> bool:
        """Run one step of a half; return False if it computed prompts."""
        plan = self._scheduler.plan(0.0, half)
        ticket = submit_masked(self._executor, plan, self._bank)
        if isinstance(ticket, MaskedTicket):
            result = ticket.collect(self._executor)
        else:
            result = self._executor.collect(ticket)
        events = self._scheduler.commit(plan, result, 0.0)
        self._bank.committed(events)
        return plan.num_query_tokens == len(half)
