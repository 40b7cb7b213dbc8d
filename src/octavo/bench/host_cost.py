"""The host's time around a forward pass: the real engine on a model whose forward pass computes nothing.

Owns: that model, and the split of a step by parts and by processor time. Does not: load weights, parse flags or print.
The forward pass sleeps, which frees the interpreter for other threads as the native decoder does; times are medians of
decode steps with every row. Processor seconds of the step thread and of all other threads (streaming) are valid on a
busy machine too.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from array import array
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.assembly import executor_spec, find_files, limits
from octavo.config import Config
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.executors.loading import DecoderChoice, LoadedDecoder
from octavo.executors.torch_executor import TorchExecutor
from octavo.frontend.local_client import LocalClient
from octavo.observe.live import observe_engine
from octavo.observe.series import PARTS
from octavo.ops.attention import AttentionBackend

PROMPT_TOKENS = 64
WARM_UP_STEPS = 16


@dataclass(frozen=True, slots=True)
class HostCost:
    """Microseconds of a decode step: medians by part, whose sum is `host_us`, and mean processor time by thread."""

    rows: int
    steps: int
    schedule_us: float
    prepare_us: float
    sample_us: float
    emit_us: float
    other_us: float
    host_us: float
    step_thread_us: float
    other_threads_us: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def measure(config: Config, rows: int, steps: int, params: SamplingParams, forward_s: float = 0.002) -> HostCost:
    """Run `rows` requests with these `params` for `steps` decode steps, each read by its own task."""
    executor = _HostOnly(config, forward_s)
    capacity = executor.open(executor_spec(config, "cpu"))
    scheduler = Scheduler(limits(config, capacity, "cpu"))
    loop = EngineLoop(scheduler, executor, depth=config.execution.depth)
    observe_engine(loop, scheduler, config.statistics)
    watch = _Watch(loop, rows)
    loop.watch(watch)
    asyncio.run(_run(LocalClient(loop), rows, steps + WARM_UP_STEPS, params))
    return watch.cost()


async def _run(client: LocalClient, rows: int, tokens: int, params: SamplingParams) -> None:
    async def one(number: int) -> None:
        wanted = SamplingParams(**{**asdict(params), "max_tokens": tokens, "ignore_eos": True, "seed": number})
        ids = array("i", [(number * 7919 + place) % 1000 for place in range(PROMPT_TOKENS)])
        request = Request(f"host-{number}", ids, wanted, arrival=time.monotonic())
        await client.submit(request)
        async for _ in client.outputs(request.request_id):
            pass

    await asyncio.gather(*(one(number) for number in range(rows)))
    await client.close()


class _Watch:
    """Records the times of steps in which every row decodes."""

    def __init__(self, loop: EngineLoop, rows: int) -> None:
        self._times = loop.step_times
        self._rows = rows
        self._numbers: list[int] = []
        self._marks: list[tuple[float, float]] = []  # processor seconds of this thread, of the process

    def admitted(self, request: Request) -> None:
        """Do nothing: there is no step to record."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Do nothing: there is no step to record."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Record the step; its times are added right after."""
        if plan.is_fast_path and len(plan.slots) == plan.num_query_tokens == self._rows:
            self._numbers.append(self._times.num_steps)
            self._marks.append((time.thread_time(), time.process_time()))

    def cost(self) -> HostCost:
        """Return the medians after the warm-up."""
        numbers, marks = self._numbers[WARM_UP_STEPS:-1], self._marks[WARM_UP_STEPS:-1]
        taken = [dict(zip(PARTS, times, strict=True)) for number in numbers if (times := self._times.get(number))]
        for one in taken:
            one["other"] = one["step"] - sum(one[part] for part in PARTS if part != "step")
        median = {part: statistics.median(one[part] for one in taken) * 1e6 for part in (*PARTS, "other")}
        host = {part: round(median[part], 1) for part in ("schedule", "prepare", "sample", "emit", "other")}
        own, whole = (marks[-1][which] - marks[0][which] for which in (0, 1))
        per_step = 1e6 / (len(marks) - 1)
        return HostCost(
            rows=self._rows,
            steps=len(taken),
            **{f"{part}_us": us for part, us in host.items()},
            host_us=round(sum(host.values()), 1),
            step_thread_us=round(own * per_step, 1),
            other_threads_us=round((whole - own) * per_step, 1),
        )


class _HostOnly(TorchExecutor):
    """The executor of the configured model with a decoder that has no weights."""

    def __init__(self, config: Config, forward_s: float) -> None:
        files = find_files(config)
        spec = read_model_spec(files)
        super().__init__(files, spec, config.execution, config.model)
        free = _NoWeights(self._choice, _FreeDecoder(spec, config, forward_s))
        self._choice = free  # type: ignore[assignment]


class _NoWeights:
    """A DecoderChoice that loads nothing."""

    def __init__(self, choice: DecoderChoice, decoder: _FreeDecoder) -> None:
        self.is_native = choice.is_native
        self._loaded = LoadedDecoder(decoder, "none")

    def load(self, max_model_len: int | None) -> LoadedDecoder:
        """Return the decoder."""
        return self._loaded


class _FreeDecoder:
    """A decoder that always returns the same hidden states and logits."""

    weight_bytes = 0
    linear_flops_per_token = 0

    def __init__(self, spec: ModelSpec, config: Config, forward_s: float) -> None:
        self.max_model_len = min(spec.max_model_len, config.model.max_model_len or spec.max_model_len)
        batch_tokens, sequences = (
            executor_spec(config, "cpu").max_batch_tokens,
            executor_spec(config, "cpu").max_sequences,
        )
        noise = torch.Generator().manual_seed(0)
        self._hidden_TE = torch.zeros((batch_tokens, spec.hidden_size))
        self._logits_RV = torch.randn((sequences, spec.vocab_size), generator=noise) * 4
        self._forward_s = forward_s

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, backend: AttentionBackend) -> Tensor:
        """Sleep as long as a forward pass would compute."""
        if self._forward_s:
            time.sleep(self._forward_s)
        return self._hidden_TE[: len(token_ids_T)]

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return the first rows."""
        return self._logits_RV[: len(hidden_NE)]
