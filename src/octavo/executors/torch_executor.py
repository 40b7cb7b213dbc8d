"""The executor that runs a decoder with torch, on a CPU or one CUDA device.

Owns: the model, the pool, the slots, and the order of a step: effects, forward, sampling.
Does not: schedule. On a CPU submit computes the step; on CUDA submit only launches it, and collect is the only wait.
A step in which a row with a grammar samples stops before sampling, until supply passes the masks.
Invariants: plans run in submission order, on one stream. A plan's effects are idempotent, so the engine repairs a
failed step by sending the step's sequences again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import machine
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.config import ExecutionConfig, ModelConfig
from octavo.core.plan import StepPlan, StepResult, StepTimings
from octavo.core.request import Request
from octavo.errors import CapacityError, ConfigError, EngineError
from octavo.executors.cache import CacheGroups, CacheLayout, MakeAttention, Steps, make_resident
from octavo.executors.device import Device, device_of, free_memory, raise_typed
from octavo.executors.device_choice import device_notes
from octavo.executors.graphs import SIZES, DecodeGraphs, capture_sizes
from octavo.executors.loading import AnyDecoder, DecoderChoice, LoadedDecoder, cache_dtype
from octavo.executors.media_rows import MediaRows
from octavo.executors.memory import DeviceMemory, HostMemory, PoolSizing, describe_groups, step_bytes
from octavo.executors.profiling import largest_step, measure_step, wait_for_memory
from octavo.executors.protocol import Capacity, ExecutorSpec, PoolBlocks, Ticket, usable_len
from octavo.executors.slots import Slots
from octavo.executors.step_buffers import StepBuffers
from octavo.executors.step_inputs import DecodeInputs, StepInputs, build_inputs, device_inputs
from octavo.executors.step_outputs import Candidates, StepOutputs, are_finite, pool_rows, score_rows
from octavo.executors.thread_pace import ThreadPace
from octavo.grammar.matcher import Masks
from octavo.media.item import MediaItem
from octavo.models.decoder import Decoder
from octavo.models.native_decoder import NativeDecoder
from octavo.models.shards import ModelShard
from octavo.models.step_extras import StepExtras
from octavo.nn.lora import read_adapter
from octavo.nn.parallel import Parallel
from octavo.ops.attention import AttentionBackend, KVPool, LayerAttention, ReferenceAttention
from octavo.ops.attention_batched import BatchedAttention
from octavo.ops.attention_kernel import KernelAttention, has_kernel, is_faster
from octavo.ops.attention_triton import TritonAttention, fits_kernels
from octavo.sampling.columns import NO_IDS, upload
from octavo.sampling.processors import TokenMasks
from octavo.sampling.rejection import FindDistribution, Rejection
from octavo.sampling.sampler import Sampled, Sampler


def fastest_attention(pool: KVPool, layers: Sequence[LayerAttention]) -> AttentionBackend:
    """Return the fastest code that can read the pool: Triton's kernels, the C++ kernel, or torch's attention."""
    if pool.device.type != "cpu" and fits_kernels(pool.shape):
        return TritonAttention(pool, layers)
    backend = KernelAttention if has_kernel(pool, layers) and is_faster() else BatchedAttention
    return backend(pool, layers)


ATTENTION: dict[str, MakeAttention] = {
    "auto": fastest_attention,
    "batched": BatchedAttention,
    "reference": ReferenceAttention,
    "triton": TritonAttention,
}


class TorchExecutor:
    """See executors.protocol.Executor. Nothing is loaded before `open`.

    On an accelerator, decode steps of up to `max_captured_rows` rows are captured at open.
    With `parallel` it is one rank of the model. `open` is then two steps, between which the ranks agree on sizes:
    `load` returns how many blocks this rank can hold, and `allocate` gets the least of all ranks.
    """

    max_captured_rows = SIZES[-1]

    def __init__(
        self,
        files: ModelFiles,
        spec: ModelSpec,
        execution: ExecutionConfig,
        model: ModelConfig,
        parallel: Parallel | None = None,
    ) -> None:
        self._files = files
        self._spec = spec
        self._execution = execution
        self._parallel = parallel
        self.has_voted_failure = False  # the last step failed on every rank, before any of them began to compute
        self._shard = None if parallel is None else ModelShard(spec, parallel.shard)
        self._samples = parallel is None or parallel.shard.is_last_stage
        self._choice = DecoderChoice(files, spec, execution, model, parallel)
        self._device, self._dtype = device_of(self._choice.device), self._choice.dtype
        self._decoder: AnyDecoder | None = None
        self._buffers = None if self._device.is_host else StepBuffers(self._device)
        self._graphs: DecodeGraphs | None = None
        self.keeps_logits = False  # compute all logits even where only the best id of each row is wanted: the slow twin
        self._steps = Steps()
        self._pace: ThreadPace | None = None
        self._loaded: LoadedDecoder
        self._opening: ExecutorSpec
        self._cache: CacheGroups
        self._slots: Slots
        self._sampler: Sampler
        self._media: MediaRows

    def open(self, spec: ExecutorSpec) -> Capacity:
        """Load the weights; allocate the pool and the slots. A thread populates the pages of a large pool."""
        return self.allocate(self.load(spec))

    def load(self, spec: ExecutorSpec) -> PoolBlocks:
        """Load the weights; return how many blocks of each group this rank can hold. Raises CapacityError."""
        if self._device.is_host:
            torch.set_num_threads(self._execution.threads or machine.usable_cores())
            self._pace = ThreadPace()
        if self._execution.attention not in ATTENTION:
            raise ConfigError(f"attention is {self._execution.attention!r}; give one of {', '.join(ATTENTION)}")
        free = self._free_bytes(spec)
        self._loaded, self._opening = self._choice.load(spec.max_model_len), spec
        self._media = MediaRows.open(self._files, self._spec, self._choice)
        decoder = self._loaded.decoder
        sizing = PoolSizing(spec, self._layout(decoder, spec).groups, decoder.max_model_len)
        host_ranks = 1 if self._parallel is None else self._parallel.host_ranks
        host_bytes = machine.usable_memory()[1] // host_ranks
        host_blocks = sizing.host_blocks(host_bytes) if spec.host_bytes else ()
        media = self._media.cache_bytes(spec.max_batch_tokens, decoder.max_model_len)
        if self._device.is_host:
            return PoolBlocks(sizing.device_blocks(HostMemory(host_bytes - spec.host_bytes - media)), host_blocks)
        own, step = self._measure_step(spec, free, is_given=sizing.given_bytes > 0)
        total, left = self._device.memory()[0], wait_for_memory(self._device, sizing.given_bytes + step + media)
        return PoolBlocks(sizing.device_blocks(DeviceMemory(total, left - media, own + media, step)), host_blocks)

    def _free_bytes(self, spec: ExecutorSpec) -> int:
        """Return the device's free bytes. If another engine was here before, its memory may be freed late."""
        needed = 0
        if spec.num_blocks is not None and not self._device.is_host:  # a later engine has the first one's blocks
            needed = sum(path.stat().st_size for path in self._files.weights)
        return wait_for_memory(self._device, needed)

    def _measure_step(self, spec: ExecutorSpec, free: int, *, is_given: bool) -> tuple[int, int]:
        """Run the largest step with a pool of a block per group; return the bytes taken of `free`, and by the step.

        If the pool's size is given, the step is only estimated: later engines have the first one's, and open sooner.
        """
        if is_given:
            estimate = step_bytes(self._spec, self._dtype, spec.max_batch_tokens, spec.max_sequences)
            return max(0, free - self._device.memory()[1]), estimate
        loaded, num_groups = self._loaded, len(self._layout(self._loaded.decoder, spec).groups)
        self.allocate(PoolBlocks((1,) * num_groups), is_trial=True)
        step = largest_step(spec, loaded.decoder.max_model_len, num_groups)
        try:
            num_bytes = measure_step(self._device, lambda: self.collect(self.submit(step)))
        except MemoryError as error:
            raise CapacityError(
                f"a step of {step.num_query_tokens} tokens and {step.num_rows} sequences does not fit beside the "
                f"weights ({error}); give a smaller --max-num-batched-tokens or --max-num-seqs"
            ) from None
        taken = free - self._device.memory()[1]
        self.close()
        self._loaded = loaded
        return max(0, taken), num_bytes

    def allocate(self, blocks: PoolBlocks, *, is_trial: bool = False) -> Capacity:
        """Allocate the pool and the slots, after `load`; every rank gets the same numbers of blocks.

        A trial captures only the largest decode step, whose memory the others share.
        """
        loaded, spec = self._loaded, self._opening
        del self._loaded
        decoder = loaded.decoder
        layout = self._layout(decoder, spec)
        groups, num_blocks, host_blocks = layout.groups, blocks.device, blocks.host
        make_attention = KernelAttention if self._choice.is_packed else ATTENTION[self._execution.attention]
        self._cache = CacheGroups(layout, layout.allocate(num_blocks, self._choice.device), host_blocks, make_attention)
        null_blocks = [pool.null_block for pool in self._cache.pools]
        vocab_size = self._spec.vocab_size
        self._slots = Slots(
            spec.max_sequences, decoder.max_model_len, spec.block_size, null_blocks, vocab_size, self._choice.device
        )
        self._sampler = self._slots.sampler
        self._block_size = spec.block_size
        self._decoder = decoder
        notes = [*loaded.notes, *self._capture(decoder, 1 if is_trial else len(SIZES))]
        if self._shard is None or self._shard.kv_heads:
            make_resident(self._cache.pools, self._steps)
        return Capacity(
            groups=groups,
            num_blocks=num_blocks,
            block_size=spec.block_size,
            num_slots=spec.max_sequences,
            max_model_len=decoder.max_model_len,
            vocab_size=vocab_size,
            device=str(self._choice.device),
            dtype=str(self._dtype).removeprefix("torch."),
            num_threads=torch.get_num_threads() if self._device.is_host else 1,
            weight_bytes=decoder.weight_bytes,
            idle_expert_bytes=loaded.idle_expert_bytes,
            kv_bytes_per_token=sum(group.block_bytes for group in groups) // spec.block_size,
            linear_flops_per_token=decoder.linear_flops_per_token,
            notes=(
                *device_notes(self._execution.device),
                *notes,
                *self._media.notes,
                *describe_groups(groups, num_blocks, spec.block_size),
            ),
            host_blocks=host_blocks,
            quantization=loaded.quantization,
            has_masks=True,
            usable_len=usable_len(groups, num_blocks, spec, decoder.max_model_len),
            decoder=self._choice.decoder_name,
            **self._media.capacity(spec.max_batch_tokens, decoder.max_model_len),
        )

    @torch.inference_mode()
    def _capture(self, decoder: AnyDecoder, num_sizes: int) -> list[str]:
        """Capture the largest decode steps on a device whose kernels can all be captured; return notes for the user."""
        if self._execution.enforce_eager or self._device.is_host or self._parallel is not None:
            return []
        if None in self._cache.planners or not isinstance(decoder, Decoder) or decoder.waits_for_device:
            return []
        graphs = DecodeGraphs(self._device, self._slots, self._cache, decoder, self._block_size)
        note = graphs.capture(capture_sizes(min(self._opening.max_sequences, self.max_captured_rows))[:num_sizes])
        self._graphs = graphs if graphs.sizes else None
        return [note] if note else []

    def _layout(self, decoder: AnyDecoder, spec: ExecutorSpec) -> CacheLayout:
        """Return how this rank's layers are cached."""
        kv_dtype = cache_dtype(spec.kv_dtype, self._dtype)
        return CacheLayout.of(decoder.attention, decoder.max_model_len, spec.block_size, kv_dtype, self._own_layers)

    @property
    def _own_layers(self) -> range | None:
        """The layers of this rank's stage; None if it has all."""
        is_stage = self._shard is not None and self._shard.shard.num_stages > 1
        return self._shard.layers if is_stage and self._shard is not None else None

    def submit(self, plan: StepPlan) -> Ticket:
        """Run the plan (CPU) or launch it (CUDA). Raises the step's error; a step that fails here has no result."""
        self._steps.begin(plan.edits[3::4])
        if self._pace is not None:
            self._pace.begin()
        self.has_voted_failure = False
        try:
            return self._run(plan)
        except RuntimeError as error:
            raise_typed(error, self._choice.device)
            raise
        finally:
            if self._pace is not None:
                self._pace.end()
            self._steps.end()

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> Ticket:
        decoder = self._running()
        clock = _StepClock(self._device)
        self._apply_effects(plan)
        outputs = StepOutputs(faults=dict(self._slots.faults))
        if not plan.slots:
            return outputs, clock
        if self._graphs is not None and not self._media.has_rows(plan) and (size := self._graphs.size_of(plan)):
            self._replay(self._graphs, plan, size, (outputs, clock))
            return outputs, clock
        if self._buffers is None:
            inputs = build_inputs(plan, self._slots, self._block_size, self._cache.reads_unwritten)
            if self._cache.reads_unwritten:
                self._cache.clear(inputs.partial_blocks)
        else:
            outputs.pair, ahead = self._buffers.take(), self._media.see_ahead
            inputs = device_inputs(plan, self._slots, self._block_size, self._cache, outputs.pair, ahead)
        extras = self._media.extras(plan, inputs)
        self._cache.begin(inputs.attention)
        if self._parallel is not None and self._parallel.shard.tensor_size > 1:
            self._vote(self._parallel, inputs)
        clock.lap()
        if inputs.adapters_T is not None:
            extras = extras or StepExtras()
            extras.adapters_T = inputs.adapters_T
        more = () if extras is None else (extras,)
        hidden_TE = decoder.forward(inputs.token_ids_T, inputs.attention[0].positions_T, self._cache.attention, *more)
        clock.lap()
        if not self._samples:
            return outputs, clock
        self._finish(decoder, inputs, hidden_TE, outputs)
        if outputs.unsampled_RV is None:
            clock.lap()
        return outputs, clock

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan, size: int, ticket: tuple[StepOutputs, _StepClock]) -> None:
        """Launch a captured step of this size."""
        assert self._buffers is not None, "only accelerators have graphs"
        (outputs, clock), pair = ticket, self._buffers.take()
        clock.lap()
        outputs.inputs, outputs.sampled = graphs.launch(plan, size, pair)
        clock.lap()
        outputs.start_download(pair)

    def _vote(self, parallel: Parallel, inputs: StepInputs) -> None:
        """Raise MemoryError on every rank of the stage if one of them lacks memory for the step.

        A rank that fails later would leave the others waiting in a collective.
        """
        has_memory = self._has_memory(inputs)
        own = torch.tensor([has_memory], dtype=torch.uint8, device=self._choice.device)
        if not parallel.collective.all_gather(own).all():
            self.has_voted_failure = True
            free_memory(self._choice.device)
            raise MemoryError("a rank has not enough memory for the step" if has_memory else "too little for the step")

    def _has_memory(self, inputs: StepInputs) -> bool:
        """Allocate about the memory of the step's largest tensors, and free it again; return False if that fails."""
        num_tokens = int(inputs.attention[0].num_tokens)
        num_bytes = step_bytes(self._spec, self._dtype, num_tokens, len(inputs.sample_rows))
        try:
            torch.empty(num_bytes, dtype=torch.uint8, device=self._choice.device)
        except RuntimeError:
            return False
        return True

    def _apply_effects(self, plan: StepPlan) -> None:
        self._slots.change_sequences(plan)
        self._slots.write_ids(plan)
        self._slots.write_drafts(plan)
        self._cache.move_blocks(plan)
        self._slots.edit_tables(plan)
        self._media.apply(plan)

    def add_media(self, request: Request, items: tuple[MediaItem, ...]) -> None:
        """Keep the items of a request's spans until drop_media."""
        self._media.add(request, items)

    def drop_media(self, request_ids: Iterable[str]) -> None:
        """Drop the items of requests that ended."""
        self._media.drop(request_ids)

    def media_report(self) -> dict[str, float]:
        """Return the statistics of media (see MediaRows.report)."""
        return self._media.report()

    def _finish(self, decoder: AnyDecoder, inputs: StepInputs, hidden_TE: Tensor, outputs: StepOutputs) -> None:
        """Sample, score and pool. Logits are computed only for rows that sample or score."""
        outputs.inputs, logits = inputs, decoder.logits
        if len(inputs.score_rows):
            outputs.scores = score_rows(inputs, self._slots, hidden_TE, logits, self._sampler.distribution)
        if len(inputs.pool_rows):
            outputs.pooled_RE = pool_rows(inputs, hidden_TE)
        if len(silent := inputs.silent_rows):
            outputs.is_finite_R = are_finite(inputs, silent, hidden_TE)
        if len(inputs.sample_rows):  # last, since another call of logits() may overwrite this call's result
            last_R = inputs.sample_last_R
            last_RE = hidden_TE if last_R is None else hidden_TE.index_select(0, last_R)
            if isinstance(decoder, NativeDecoder) and not self.keeps_logits and self._wants_best(inputs):
                found = inputs.best if isinstance(inputs, DecodeInputs) else None
                self._keep(Sampled(*decoder.best(last_RE, found), NO_IDS, None), outputs)
            elif np.count_nonzero(self._sampler.columns.has_grammar[inputs.sampling.slots]):
                outputs.unsampled_RV = logits(last_RE)
            else:
                self._sample(logits(last_RE), outputs)
        if outputs.pair is not None and outputs.unsampled_RV is None:
            outputs.start_download(outputs.pair)

    def _wants_best(self, inputs: StepInputs) -> bool:
        return not len(inputs.beams) and self._sampler.wants_best(inputs.sampling)

    def _keep(self, sampled: Sampled, outputs: StepOutputs) -> None:
        """Write the sampled ids to the slots."""
        assert outputs.inputs is not None
        self._slots.write_sampled(outputs.inputs.sample_target_R, sampled.ids_R)
        outputs.sampled = sampled

    def _sample(self, logits_RV: Tensor, outputs: StepOutputs, masks: TokenMasks | None = None) -> None:
        """Sample, and write the sampled ids to the slots."""
        inputs = outputs.inputs
        assert inputs is not None
        if len(inputs.beams):
            self._sample_beside_beams(logits_RV, outputs, masks)
            return
        if inputs.packed_KR is None:
            sampled = self._sampler.sample(logits_RV, inputs.sampling, masks)
        else:
            sampled = Sampled(*self._sampler.sample_packed(logits_RV, inputs.packed_KR), NO_IDS, None)
        self._keep(sampled, outputs)

    def _sample_beside_beams(self, logits_RV: Tensor, outputs: StepOutputs, masks: TokenMasks | None) -> None:
        """Compute the candidates of beams without writing them to slots, and sample the other rows."""
        inputs = outputs.inputs
        assert inputs is not None
        beams, rows = inputs.beams, inputs.sampling
        others = np.delete(np.arange(len(inputs.sample_rows)), beams)
        beams_B, others_R = upload(self._choice.device, beams, others)
        beam_rows = rows.take(beams)
        counts = self._sampler.columns.num_candidates[beam_rows.slots]
        ids_BC, logprobs_BC = self._sampler.candidates(logits_RV.index_select(0, beams_B), beam_rows)
        outputs.candidates = Candidates(beams, counts, ids_BC, logprobs_BC)
        if len(others):
            masks = None if masks is None else masks.among(others)
            sampled = self._sampler.sample(logits_RV.index_select(0, others_R), rows.take(others), masks)
            targets_R = inputs.sample_target_R.index_select(0, others_R)
            self._slots.write_sampled(targets_R, sampled.ids_R)
            outputs.sampled, outputs.sampled_rows = sampled, others

    def supply(self, ticket: Ticket, masks: object) -> None:
        """Sample a step that waits for `masks` (grammar.matcher.Masks): one per sampled position with a grammar."""
        assert isinstance(ticket, tuple) and isinstance(masks, Masks), "a ticket of submit, and masks"
        outputs, clock = ticket
        if outputs.unsampled_RV is None:
            raise EngineError("masks were supplied for a step that needs none")
        try:
            self._sample_masked(outputs, masks)
        except RuntimeError as error:
            raise_typed(error, self._choice.device)
            raise
        clock.lap()

    @torch.inference_mode()
    def _sample_masked(self, outputs: StepOutputs, masks: Masks) -> None:
        assert outputs.inputs is not None and outputs.unsampled_RV is not None
        logits_RV, outputs.unsampled_RV = outputs.unsampled_RV, None
        needed = np.flatnonzero(self._sampler.columns.has_grammar[outputs.inputs.sampling.slots])
        if not np.array_equal(needed, masks.positions):
            raise EngineError(f"masks for positions {masks.positions.tolist()}, needed for {needed.tolist()}")
        self._sample(logits_RV, outputs, TokenMasks(masks.positions, masks.bits_MW))
        if outputs.pair is not None:
            outputs.start_download(outputs.pair)

    def collect(self, ticket: Ticket) -> StepResult:
        """Fetch the ticket's result, waiting for the device."""
        assert isinstance(ticket, tuple), "a ticket comes from submit"
        outputs, clock = ticket
        if outputs.unsampled_RV is not None:
            raise EngineError("the step got no masks for its rows with a grammar")
        try:
            download = outputs.download
            result: StepResult = outputs.result() if download is None else outputs.fetched(download)
        except RuntimeError as error:
            raise_typed(error, self._choice.device)
            raise
        if isinstance(outputs.inputs, DecodeInputs):
            self._slots.free_inputs.append(outputs.inputs)
            outputs.inputs = None  # a later step overwrites it
        result.timings = clock.timings
        return result

    def verify_by_rejection(self, find_distribution: FindDistribution | None) -> None:
        """Verify drafts by rejection sampling from now on; without `find_distribution`, no model drew them."""
        self._sampler.rejection = Rejection(find_distribution)

    def keep_distributions(self, num_ids: int) -> None:
        """Draw only ids below `num_ids` from now on, and keep the distributions that they are drawn from."""
        self._sampler.num_proposed = num_ids

    def distributions(self, ticket: Ticket) -> list[Tensor]:
        """Return the distributions that a collected step's ids were drawn from, one row for each sampling row."""
        assert isinstance(ticket, tuple), "a ticket comes from submit"
        sampled: Sampled | None = ticket[0].sampled
        assert sampled is not None and sampled.probs_RV is not None, "see keep_distributions"
        return list(sampled.probs_RV)

    def load_adapter(self, adapter_id: int, path: str, max_rank: int) -> None:
        """Load an adapter, between steps; sequences name it by its id. Raises ModelFileError, EngineError."""
        decoder, adapters = self._running(), self._slots.adapters
        if self._parallel is not None or not isinstance(decoder, (NativeDecoder, Decoder)):
            raise EngineError(f"the {self._choice.decoder_name} decoder has no adapters")
        if adapter_id in adapters:
            return
        adapter = read_adapter(path, self._spec, max_rank, adapter_id)
        number = next(number for number in itertools.count() if number not in adapters.values())
        decoder.put_adapter(number, adapter, self._dtype)
        adapters[adapter_id] = number

    def unload_adapter(self, adapter_id: int) -> None:
        """Free an adapter that no sequence uses. Idempotent."""
        number = self._slots.adapters.pop(adapter_id, None)
        decoder = self._running()
        if number is not None and isinstance(decoder, (NativeDecoder, Decoder)):
            decoder.drop_adapter(number)

    def close(self) -> None:
        """Drop the model and the pool; an accelerator gets its memory back, for the next engine or process."""
        if self._decoder is not None:
            self._decoder = self._graphs = None
            del self._cache, self._slots, self._sampler
            if not self._device.is_host:
                with suppress(RuntimeError):  # of a device that is lost
                    free_memory(self._choice.device)

    def _running(self) -> AnyDecoder:
        if self._decoder is None:
            raise EngineError("the executor is not open")
        return self._decoder


class _StepClock:
    """Timer of a step's three parts: prepare, forward, sample. On an accelerator it records events."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._is_host = device.is_host
        self._marks: list[Any] = []  # times of a host, events of a device
        self.lap()

    def lap(self) -> None:
        """Mark the end of a part."""
        self._marks.append(time.perf_counter() if self._is_host else self._device.event())

    @property
    def timings(self) -> StepTimings:
        """Seconds of the parts so far; waits for an accelerator."""
        pairs = itertools.pairwise(self._marks)
        return StepTimings(*(end - begin if self._is_host else end.seconds_since(begin) for begin, end in pairs))
