"""An engine loop over the real executor and a tiny model, with places to spoil things at: for rows 18 and 19.

Owns: the harness that keeps log-probabilities too, requests of every shape, and what equal means.
Does not: inject faults (the rows do, through `before_step` and by wrapping the executor's parts).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import Events, StepPlan
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.executors.protocol import Capacity, ExecutorSpec
from octavo.executors.torch_executor import TorchExecutor
from octavo.ops import cpu
from tests.engine.fakes import Harness, make_limits
from tests.executors.conformance import open_files
from tests.tiny_models import VOCAB_SIZE

DECODERS = ["torch", *(["native"] if cpu.LIBRARY_PATH.exists() else [])]
Said = dict[str, list[tuple[list[int], list[object]]]]  # per request and choice: ids and log-probabilities


class SpoiltExecutor(TorchExecutor):
    """The torch executor; `before_step` is called with each plan before anything of it is done."""

    before_step: Callable[[StepPlan], None] | None = None
    host_bytes = 0

    def open(self, spec: ExecutorSpec) -> Capacity:
        return super().open(replace(spec, host_bytes=self.host_bytes))

    def submit(self, plan: StepPlan) -> Any:
        if self.before_step is not None:
            self.before_step(plan)
        return super().submit(plan)

    def kv(self, block: int) -> torch.Tensor:
        """The keys and values of a block of the first group."""
        return self._cache.pools[0].read_blocks(torch.tensor([block]))

    def spoil(self, block: int) -> None:
        """Let the values of a block be NaN, as a broken memory or kernel would."""
        self._cache.pools[0].values[0][block] = float("nan")

    def blocks_of(self, slots: Sequence[int]) -> list[int]:
        """Blocks that the tables of these slots hold."""
        null = self._slots.null_blocks[0]
        return sorted({int(block) for slot in slots for block in self._slots.tables[0][slot] if block != null})


def open_executor(folder: Path, decoder: str = "torch") -> SpoiltExecutor:
    """Not opened yet: the harness does that."""
    files, spec = open_files(folder)
    attention = "batched" if decoder == "torch" else "auto"
    execution = ExecutionConfig(threads=1, decoder=decoder, attention=attention)
    return SpoiltExecutor(files, spec, execution, ModelConfig(dtype="float32"))


class RealHarness(Harness):
    """The engine tests' harness, which keeps log-probabilities too."""

    def __init__(self, executor: SpoiltExecutor, depth: int = 1, **limits: Any) -> None:
        self.real = executor
        self.logprobs: dict[tuple[str, int], list[object]] = {}
        fields = {"block_size": 8, "num_blocks": (96,), "vocab_size": VOCAB_SIZE, "max_sequences": 24}
        super().__init__(executor, limits=make_limits(**{**fields, **limits}), depth=depth)  # type: ignore[arg-type]

    def receive(self, events: Events) -> None:
        entries = events.logprobs or [None] * len(events.request_ids)
        for name, choice, entry in zip(events.request_ids, events.choices, entries, strict=True):
            self.logprobs.setdefault((name, choice), []).append(entry)
        super().receive(events)

    def serve(self, requests: Sequence[Request]) -> Said:
        """Serve all at once; what they said."""
        self.ask(self.loop.control, "pause", "")
        for request in requests:
            self.post(request)
        self.ask(self.loop.control, "resume", "")
        for request in requests:
            self.end(request.request_id)
        return self.said(requests)

    def said(self, requests: Sequence[Request]) -> Said:
        return {
            request.request_id: [
                (self.inbox(request.request_id, choice).ids, self.logprobs.get((request.request_id, choice), []))
                for choice in range(request.params.num_sequences)
            ]
            for request in requests
        }

    def reasons(self, requests: Sequence[Request]) -> list[FinishReason]:
        return [self.end(request.request_id).finish_reason for request in requests]


@dataclass
class FiniteCache:
    """An EventSink that looks after each step at every block that a request could find: is it finite?"""

    harness: RealHarness
    num_looks: int = 0
    num_poisoned: int = 0

    def admitted(self, request: Request) -> None: ...

    def decided(self, decisions: object) -> None: ...

    def stepped(self, plan: object, outcome: object, events: object) -> None:
        pool = self.harness.scheduler._state.cache.pools[0]
        for block in pool.block_of.values():
            if block not in pool.pending:
                self.num_looks += 1
                self.num_poisoned += not bool(self.harness.real.kv(block).isfinite().all())


def head(seed: int, length: int) -> list[int]:
    """Random ids without special ones."""
    ids: list[int] = np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()
    return ids


def make_requests(num_tokens: int = 16, prefix: str = "g") -> list[Request]:
    """Greedy and seeded, one and several choices, a beam search, shared heads, a text that repeats itself."""
    plain = {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": 2}
    shapes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 0.8, "seed": 6, "n": 2},
        {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    ]
    requests = []
    for index in range(10):
        ids = head(1 + index % 2, 24) + head(10 + index, 3 + 5 * index)
        if index % 3 == 2:
            ids = head(50 + index, 6) * 6
        params = SamplingParams(**{"seed": index, **plain, **shapes[index % len(shapes)]})
        requests.append(Request(f"{prefix}{index}", array("i", ids), params))
    beam = SamplingParams(max_tokens=num_tokens, ignore_eos=True, beam_width=3, n=2, temperature=0.0)
    requests.append(Request(f"{prefix}-beam", array("i", head(1, 24) + head(77, 9)), beam))
    return requests


def num_equal(want: Said, got: Said, with_bits: bool) -> int:
    """How many requests said the same: ids, and the bits of log-probabilities where these are promised."""
    same = 0
    for name, choices in want.items():
        same += [ids for ids, _ in choices] == [ids for ids, _ in got[name]] and (not with_bits or choices == got[name])
    return same
