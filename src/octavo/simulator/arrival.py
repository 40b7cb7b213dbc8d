"""Arrival: one request of a workload, described by its lengths and block keys; its conversion to a core Request.

Owns: the fields; the conversion of a trace's keys to the scheduler's block keys. Does not: read traces (workloads).
Invariant: equal keys at equal positions of a trace give equal block keys; different keys give different block keys.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from octavo.core.limits import Limits
from octavo.core.request import Request, SamplingParams, Span

_KEY = struct.Struct("<qI")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload. `time` is in seconds from the workload's start.

    `output_tokens` is the number of tokens that the request generates. `choices` has the number for each choice, if
    there are several; `output_tokens` is the largest. `keys` has one key for each full `key_tokens` tokens of the
    prompt: equal keys at equal positions mean equal prefixes (a public trace's block ids, or a recording's block keys).
    `output_keys` continue `keys` over the output. `follows` is the index of an earlier request in the workload: this
    one arrives `time` seconds after that one's end, as a conversation's next turn. None: it arrives at `time`.
    `spans` are its media items and `adapter_id` its adapter (0: none), for engines that have room for them.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    session: str = ""
    priority: int = 0
    keys: Sequence[int] | Sequence[bytes] = ()
    key_tokens: int = 0
    output_keys: Sequence[int] | Sequence[bytes] = ()
    choices: tuple[int, ...] = ()
    follows: int | None = None
    ttft_objective: float | None = None
    tpot_objective: float | None = None
    spans: tuple[Span, ...] = ()
    adapter_id: int = 0


@lru_cache(maxsize=65536)
def _params(max_tokens: int, n: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, temperature=0.0, seed=0)


def make_request(name: str, arrival: Arrival, at: float, emitted: int, limits: Limits, max_tokens: int = 0) -> Request:
    """Return the core's Request for an arrival at `at`; `emitted` is the number of tokens emitted before a restart.

    `max_tokens` is the number of tokens that this engine generates up to; 0 means all.
    """
    max_tokens = max_tokens or arrival.output_tokens
    has_keys = limits.prefix_caching and arrival.keys
    return Request(
        name,
        None,
        _params(max_tokens, len(arrival.choices) or 1),
        at,
        num_prompt_tokens=arrival.prompt_tokens,
        block_keys=_all_keys(name, arrival, max_tokens, limits.block_size) if has_keys else None,
        emitted_token_ids=array("i", bytes(4 * emitted)) if emitted else None,
        priority=arrival.priority,
        tenant=arrival.tenant,
        ttft_objective=arrival.ttft_objective,
        tpot_objective=arrival.tpot_objective,
        spans=tuple(span for span in arrival.spans if span.start + span.length <= arrival.prompt_tokens)
        if limits.encoder_budget
        else (),
        adapter_id=arrival.adapter_id if limits.adapter_slots else 0,
    )


def _all_keys(name: str, arrival: Arrival, max_tokens: int, block_size: int) -> tuple[bytes, ...]:
    """Return the keys of all blocks. Those that the arrival has no keys for are the request's own.

    Engines cache such blocks too: the rest of a prompt whose last trace block is partial, and the outputs.
    """
    own, count = name.encode() + b"/", (arrival.prompt_tokens + max_tokens) // block_size
    keys = block_keys(arrival, block_size)[:count]
    return (*keys, *(own + index.to_bytes(4, "little") for index in range(len(keys), count)))


def block_keys(arrival: Arrival, block_size: int) -> tuple[bytes, ...]:
    """Return the keys of the prompt's full blocks, and with `output_keys` of the output's full blocks that have keys.

    An arrival's key covers `key_tokens` tokens and all tokens before them. A block's key is therefore made of the
    arrival's key that covers the block's end, and the position. If both sizes are equal, byte keys are unchanged.
    """
    keys, size, tokens = (*arrival.keys, *arrival.output_keys), arrival.key_tokens, arrival.prompt_tokens
    if not keys or size < 1:
        return ()
    if arrival.output_keys:
        tokens += arrival.output_tokens
    count = min(tokens, len(keys) * size) // block_size
    if isinstance(keys[0], bytes):
        names = cast("tuple[bytes, ...]", keys)
        if size == block_size:
            return names[:count]
        ends = range(block_size - 1, count * block_size, block_size)
        return tuple(names[end // size] + (end + 1).to_bytes(4, "little") for end in ends)
    numbers = [key for key in keys if isinstance(key, int)]
    pack = _KEY.pack
    if size % block_size == 0:
        per_key = size // block_size
        return tuple(
            pack(key, position)
            for index, key in enumerate(numbers)
            for position in range(index * per_key, min(index * per_key + per_key, count))
        )
    return tuple(pack(numbers[(position * block_size + block_size - 1) // size], position) for position in range(count))
