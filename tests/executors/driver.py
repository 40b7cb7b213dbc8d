"""Plans by hand, and the oracle they are compared with: for the tests of every executor.

Owns: Driver, Dense (transformers' forward), prompts and the comparison of log-probabilities.
Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from octavo.core.plan import (
    ROW_CARRY,
    ROW_FORK,
    ROW_SAMPLE,
    NewSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.core.request import SamplingParams
from octavo.executors.protocol import Capacity, Executor, ExecutorSpec
from tests.tiny_models import EOS_ID, VOCAB_SIZE

BLOCK = 4
GREEDY = SamplingParams(temperature=0.0, logprobs=5)
SPEC = ExecutorSpec(max_sequences=40, max_batch_tokens=256, block_size=BLOCK, num_blocks=600)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids without special ones."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


class Dense:
    """The oracle: transformers' own forward over whole sequences, float32, no cache."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def log_probs(self, ids: Sequence[int]) -> torch.Tensor:
        return self._model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        return self._model.model(torch.tensor([list(ids)])).last_hidden_state[0].float()

    def best_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the best id after each of these, by one forward pass."""
        return self.log_probs(ids).argmax(-1).tolist()

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        known = list(ids)
        for _ in range(count):
            known.append(int(self.log_probs(known)[-1].argmax()))
        return known[len(ids) :]


class Driver:
    """Writes plans by hand: keeps block tables of every cache group, collects one step's effects and rows, runs it.

    `tables` are those of the first group; `group_tables[group][slot]` has -1 where an entry was dropped.
    """

    def __init__(self, executor: Executor, capacity: Capacity) -> None:
        self.executor = executor
        self.capacity = capacity
        self.step = 0
        # scattered on purpose: consecutive blocks would hide a wrong table
        self.frees = [np.random.default_rng(7).permutation(count).tolist() for count in capacity.num_blocks]
        self.host_frees = [np.random.default_rng(8).permutation(count).tolist() for count in capacity.host_blocks]
        self.group_tables: list[dict[int, list[int]]] = [{} for _ in capacity.groups]
        self.ids: dict[int, list[int]] = {}
        self._plan: dict[str, Any] = {}
        self._reset()

    @property
    def tables(self) -> dict[int, list[int]]:
        return self.group_tables[0]

    @property
    def free(self) -> list[int]:
        return self.frees[0]

    def _reset(self) -> None:
        names = ("slots", "starts", "counts", "flags", "edits", "copies", "freed_slots", "id_edits")
        self._plan = {name: array("i") for name in (*names, "swap_outs", "host_loads")}
        self._new: list[NewSequence] = []

    def add(
        self,
        slot: int,
        ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        num_prompt: int | None = None,
        blocks: Sequence[int] = (),
        choice: int = 0,
        adapter: int = 0,
    ) -> None:
        """Enter a sequence; `blocks` are shared ones of the first group that its table begins with."""
        if slot in self.tables:
            self._release(slot)
        for tables in self.group_tables:
            tables[slot] = []
        prompt = len(ids) if num_prompt is None else num_prompt
        name = f"r{slot}-{self.step}"
        self._new.append(
            NewSequence(slot, name, choice, prompt, array("i", ids), params, (EOS_ID,), adapter_id=adapter)
        )
        for block in blocks:
            self.append(slot, block)

    def append(self, slot: int, block: int, group: int = 0) -> None:
        table = self.group_tables[group][slot]
        if block >= 0:  # an entry dropped long ago is never sent
            self._plan["edits"].extend((slot, group, len(table), block))
        table.append(block)

    def replace(self, slot: int, index: int, block: int, group: int = 0) -> None:
        self._plan["edits"].extend((slot, group, index, block))
        self.group_tables[group][slot][index] = block

    def free_slot(self, slot: int) -> None:
        self._plan["freed_slots"].append(slot)
        self._release(slot)

    def _release(self, slot: int) -> None:
        for tables, free in zip(self.group_tables, self.frees, strict=True):
            table = tables.pop(slot)
            free.extend(b for b in table if b >= 0 and all(b not in other for other in tables.values()))

    def copy(self, source: int, group: int = 0) -> int:
        destination = self.frees[group].pop()
        self._plan["copies"].extend((group, source, destination))
        return destination

    def fork(self, root: int, slot: int, ids: Sequence[int], params: SamplingParams, choice: int) -> None:
        """Enter a choice that shares all of the root's blocks, with a row that samples from the root's logits."""
        self.add(slot, ids, params, choice=choice)
        for group, tables in enumerate(self.group_tables):
            for block in tables[root]:
                self.append(slot, block, group)
        self._row(slot, len(ids), 0, ROW_SAMPLE | ROW_FORK)

    def own_tail(self, slot: int, position: int) -> None:
        """Before a write at `position`: copy the block there if another slot shares it."""
        index = position // self.capacity.block_size
        for group, tables in enumerate(self.group_tables):
            if index < len(tables[slot]) and any(
                other != slot and tables[slot][index] in table for other, table in tables.items()
            ):
                self.replace(slot, index, self.copy(tables[slot][index], group), group)

    def swap_out(self, slot: int) -> list[list[int]]:
        """Copy a slot's blocks to the host and free the slot; gives the host blocks as tables."""
        hosts: list[list[int]] = []
        for group, tables in enumerate(self.group_tables):
            hosts.append([self.host_frees[group].pop() if block >= 0 else -1 for block in tables[slot]])
            for block, host in zip(tables[slot], hosts[-1], strict=True):
                if block >= 0:
                    self._plan["swap_outs"].extend((group, block, host))
        self.free_slot(slot)
        return hosts

    def load(self, slot: int, hosts: list[list[int]]) -> None:
        """Give an entered sequence new blocks with the host's contents."""
        for group, table in enumerate(hosts):
            for host in table:
                block = self.frees[group].pop(0) if host >= 0 else -1
                self.append(slot, block, group)
                if host >= 0:
                    self._plan["host_loads"].extend((group, host, block))

    def choose(self, slot: int, position: int, token_id: int) -> None:
        """Make an id known that the host chose."""
        self._plan["id_edits"].extend((slot, position, token_id))

    def row(self, slot: int, start: int, count: int, flags: int = ROW_SAMPLE) -> None:
        """Grant positions, drop what left a window, and take the blocks that are missing."""
        size = self.capacity.block_size
        for group, spec in enumerate(self.capacity.groups):
            table = self.group_tables[group][slot]
            for index in range(min(spec.first_block(start, size), len(table))):
                if table[index] >= 0:
                    block = table[index]
                    self.replace(slot, index, -1, group)
                    if not any(block in other for other in self.group_tables[group].values()):
                        self.frees[group].append(block)
            while len(table) * size < start + count:
                self.append(slot, self.frees[group].pop(), group)
        self._row(slot, start, count, flags)

    def _row(self, slot: int, start: int, count: int, flags: int) -> None:
        for name, value in zip(("slots", "starts", "counts", "flags"), (slot, start, count, flags), strict=True):
            self._plan[name].append(value)

    def plan(self) -> StepPlan:
        plan = StepPlan(self.step, 0.0, **self._plan, new_sequences=tuple(self._new))
        self.step += 1
        self._reset()
        return plan

    def run(self) -> StepResult:
        return self.executor.collect(self.executor.submit(self.plan()))

    def prefill(self, slot: int, length: int, chunk: int | None = None, start: int = 0) -> StepResult:
        """Compute positions [start, length) in chunks, sampling at the end."""
        step = chunk or length
        for at in range(start, length, step):
            end = min(at + step, length)
            self.row(slot, at, end - at, ROW_SAMPLE if end == length else 0)
            result = self.run()
        return result

    def decode(self, slots: Sequence[int], lengths: list[int], count: int, flags: int = ROW_CARRY) -> list[list[int]]:
        """Decode `count` steps of these slots together; `lengths` known ids each, one of them not computed."""
        tokens: list[list[int]] = [[] for _ in slots]
        for _ in range(count):
            for index, slot in enumerate(slots):
                self.row(slot, lengths[index] - 1, 1, ROW_SAMPLE | flags)
                lengths[index] += 1
            for index, token in enumerate(self.run().token_ids or ()):
                tokens[index].append(token)
        return tokens


def assert_logprobs(entry: TokenLogprobs | None, log_probs_V: torch.Tensor, tolerance: float = 2e-4) -> None:
    assert entry is not None
    assert abs(entry.logprob - float(log_probs_V[entry.token_id])) < tolerance
    for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
        assert abs(value - float(log_probs_V[token])) < tolerance
    assert entry.rank == int((log_probs_V > log_probs_V[entry.token_id] + tolerance).sum()) + 1
