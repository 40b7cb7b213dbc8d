"""The executor of an encoder: it pools whole prompts, and keeps no keys and values.

Owns: the ids of each slot's prompt, and one row's pass over them. Blocks, tables and copies of a plan are ignored:
a block takes no memory, so the scheduler's blocks only bound how many tokens run at once.
Does not: schedule, sample or score. A row is a whole prompt; the limits of an encoder never divide one.
Invariants: a text's vector depends on that text alone. A step that runs out of memory is computed again text by text,
and a text that fails alone ends with an error.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo import machine
from octavo.artifacts.encoder_families import ENCODER_FAMILIES
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.limits import GroupSpec
from octavo.core.plan import ROW_POOL, StepPlan, StepResult, StepTimings
from octavo.errors import ConfigError, EngineError
from octavo.executors.device import raise_typed
from octavo.executors.device_choice import choose_device, device_notes
from octavo.executors.loading import encoder_weights
from octavo.executors.protocol import Capacity, ExecutorSpec, Ticket
from octavo.models.encoder import Encoder, PoolingDecoder

NO_STATE = "the model's output is not finite"


class EncoderExecutor:
    """See executors.protocol.Executor. Nothing is loaded before `open`."""

    def __init__(self, files: ModelFiles, spec: ModelSpec, execution: ExecutionConfig, model: ModelConfig) -> None:
        self._files, self._spec, self._model, self._execution = files, spec, model, execution
        self._device = choose_device(execution.device)
        self._wanted, self._dtype, self._notes = encoder_weights(self._device, execution, model, spec)
        self._encoder: Encoder | PoolingDecoder | None = None
        self._prompts: dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}

    def open(self, spec: ExecutorSpec) -> Capacity:
        """Load the weights. Every sequence has blocks for a text of full length, which take no memory."""
        if spec.host_bytes:
            raise ConfigError("--host-cache-bytes is given, but an encoder caches nothing; leave it out")
        if self._device.type == "cpu":
            torch.set_num_threads(self._execution.threads or machine.usable_cores())
        kind = Encoder if self._spec.family in ENCODER_FAMILIES else PoolingDecoder
        encoder = kind(self._files, self._spec, self._dtype, self._device, self._wanted, spec.max_model_len)
        self._encoder = encoder
        num_blocks = spec.max_sequences * -(-encoder.max_model_len // spec.block_size)
        return Capacity(
            groups=(GroupSpec(layers=tuple(range(self._spec.num_layers))),),
            num_blocks=(num_blocks,),
            block_size=spec.block_size,
            num_slots=spec.max_sequences,
            max_model_len=encoder.max_model_len,
            vocab_size=self._spec.vocab_size,
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            num_threads=torch.get_num_threads() if self._device.type == "cpu" else 1,
            weight_bytes=encoder.weight_bytes,
            linear_flops_per_token=encoder.linear_flops_per_token,
            notes=(*device_notes(self._execution.device), *self._notes),
            quantization=encoder.quantization,
            usable_len=encoder.max_model_len,
            decoder="encoder",
            is_encoder=True,
        )

    def submit(self, plan: StepPlan) -> Ticket:
        """Pool the plan's rows."""
        started = time.perf_counter()
        if plan.encode_jobs or plan.encoder_frees or plan.swap_outs or plan.host_loads:
            raise EngineError("an encoder has no media and no host tier")
        for slot in plan.freed_slots:
            self._prompts.pop(slot, None)
        for new in plan.new_sequences:
            assert new.token_ids is not None, "a prompt has ids"
            self._prompts[new.slot] = np.frombuffer(new.token_ids[: new.num_prompt], dtype=np.int32)
        result = StepResult(array("i"))
        if plan.slots:
            self._pool(plan, result)
        result.timings = StepTimings(forward_s=time.perf_counter() - started)
        return result

    def _pool(self, plan: StepPlan, result: StepResult) -> None:
        texts = []
        for row in plan.rows():
            text = self._prompts[row.slot]
            if row.flags != ROW_POOL or row.start or row.count != len(text):
                raise EngineError("an encoder pools whole prompts, and a row of the plan is another")
            texts.append(text)
        outputs: Sequence[np.ndarray | str]
        try:
            outputs = list(self._run(texts).cpu().numpy())
        except MemoryError:
            outputs = [self._alone(text) for text in texts]
        pooled, errors = [], []
        for index, output in enumerate(outputs):
            if isinstance(output, str):
                errors.append((index, output))
            elif not np.isfinite(output).all():
                errors.append((index, NO_STATE))
            else:
                pooled.append((index, output.tobytes()))
        result.pooled, result.errors = tuple(pooled), tuple(errors)

    def _alone(self, text: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray | str:
        """Return one text's output, or the error."""
        try:
            output: np.ndarray = self._run([text])[0].cpu().numpy()
            return output
        except MemoryError as error:
            return f"a text of {len(text)} tokens needs more memory than there is ({error})"

    def _run(self, texts: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> Tensor:
        if self._encoder is None:
            raise EngineError("the executor is not open")
        try:
            return self._encoder.run(texts)
        except RuntimeError as error:
            raise_typed(error, self._device)
            raise

    def supply(self, ticket: Ticket, masks: object) -> None:
        """Raise EngineError: an encoder samples nothing."""
        raise EngineError("masks were supplied to an encoder, which samples nothing")

    def collect(self, ticket: Ticket) -> StepResult:
        """Return the ticket's result."""
        assert isinstance(ticket, StepResult), "a ticket comes from submit"
        return ticket

    def close(self) -> None:
        """Drop the model."""
        self._encoder = None
        self._prompts.clear()
