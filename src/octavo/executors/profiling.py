"""The memory of a device's largest step, measured before the pool is allocated, and the wait for memory to be freed.

Owns: the step that is run for this, and the reading of its memory. Does not: size the pool (memory), or keep anything.
The step has as many tokens and sampled rows as a plan may have. Its block tables name one block alone, so a pool of one
block per group is enough, and what it computes is dropped.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from octavo.core.plan import ROW_SAMPLE, NewSequence, StepPlan
from octavo.core.request import SamplingParams
from octavo.executors.device import Device, free_memory
from octavo.executors.protocol import ExecutorSpec

CONTEXT = 4096  # positions before a decoding row's token, if the model has so many
SETTLE_S = 20.0  # how long memory of an ended process may take to be free
POLL_S = 0.1

_PARAMS = SamplingParams(max_tokens=2, temperature=0.8, top_k=40, top_p=0.9, logprobs=2, seed=0)


def largest_step(spec: ExecutorSpec, max_model_len: int, num_groups: int = 1) -> StepPlan:
    """Return a plan of `max_batch_tokens` tokens: prompts, and decoding rows for up to half of the tokens."""
    longest = max_model_len - 1
    budget = min(spec.max_batch_tokens, spec.max_sequences * longest)
    num_decodes = max(0, min(budget // 2, spec.max_sequences - -(-budget // longest)))
    prompts = [longest] * ((budget - num_decodes) // longest)
    if rest := budget - num_decodes - sum(prompts):
        prompts.append(rest)
    rows = [(min(CONTEXT, longest - 1), 1)] * num_decodes + [(0, count) for count in prompts]
    rows.sort(key=lambda row: (row[1] > 1, sum(row)))  # as in every plan: rows of one token first, by context
    starts, counts = zip(*rows, strict=True)
    new = tuple(
        NewSequence(slot, f"profile-{slot}", 0, start + count, array("i", bytes(4 * (start + count))), _PARAMS)
        for slot, (start, count) in enumerate(rows)
    )
    return StepPlan(
        -1,
        0.0,
        slots=array("i", range(len(counts))),
        starts=array("i", starts),
        counts=array("i", counts),
        flags=array("i", [ROW_SAMPLE] * len(counts)),
        new_sequences=new,
        edits=array(
            "i",
            (
                number
                for slot, row in enumerate(rows)
                for group in range(num_groups)
                for index in range(-(-sum(row) // spec.block_size))
                for number in (slot, group, index, 0)
            ),
        ),
        num_query_tokens=sum(counts),
        num_kv_read=sum(starts) + sum(counts),
    )


def measure_step(device: Device, run: Callable[[], object]) -> int:
    """Return the bytes that `run` takes beside what is allocated; unused memory of the allocator is given back.

    It is the peak of tensors, or what the allocator took from the device for them if that is more.
    """
    device.wait()
    free_memory(device.torch_device)
    device.reset_peak()
    before = device.peak_bytes()
    run()
    device.wait()
    peak, held = device.peak_bytes(), device.memory()[1]
    free_memory(device.torch_device)
    return max(0, peak - before, device.memory()[1] - held)


def wait_for_memory(
    device: Device,
    needed: int,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Return the device's free bytes; while fewer than `needed` are free, wait up to SETTLE_S for more.

    A driver may free the memory of a killed process some time after the process has ended.
    """
    latest = now() + SETTLE_S
    free = device.memory()[1]
    while free < needed and now() < latest:
        sleep(POLL_S)
        free = device.memory()[1]
    return free
