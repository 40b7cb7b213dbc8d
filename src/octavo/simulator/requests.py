"""Arrivals as the core's requests, known by their lengths and the keys of their blocks.

Owns: how a trace's keys become keys of the scheduler's blocks. Does not: read traces (workloads).
Invariant: equal keys at equal places of a trace give equal block keys, different ones different block keys.
"""

from __future__ import annotations

import struct
from array import array
from functools import lru_cache

from octavo.core.limits import Limits
from octavo.core.request import Request, SamplingParams
from octavo.simulator.arrival import Arrival

_PLACE = struct.Struct("<qI")
_OWN = struct.Struct("<qIB")


@lru_cache(maxsize=65536)
def _params(max_tokens: int, n: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, temperature=0.0, seed=0)


def block_keys(arrival: Arrival, block_size: int) -> tuple[bytes, ...]:
    """Return keys of the prompt's full blocks; with `output_keys` also of the outputs', as far as the keys reach.

    A key covers `key_tokens` tokens and all before them, so a block is named by the key that covers its end, and by its
    place. If both sizes are equal, bytes stay as they are.
    """
    keys, size, tokens = (*arrival.keys, *arrival.output_keys), arrival.key_tokens, arrival.prompt_tokens
    if not keys or size < 1:
        return ()
    if arrival.output_keys:
        tokens += arrival.output_tokens
    reach = min(tokens, len(keys) * size) // block_size
    if isinstance(keys[0], bytes):
        names = [key for key in keys if isinstance(key, bytes)]
        if size == block_size:
            return tuple(names[:reach])
        ends = range(block_size - 1, reach * block_size, block_size)
        return tuple(names[end // size] + (end + 1).to_bytes(4, "little") for end in ends)
    numbers = [key for key in keys if isinstance(key, int)]
    pack = _PLACE.pack
    if size % block_size == 0:
        per = size // block_size
        return tuple(
            pack(key, place)
            for index, key in enumerate(numbers)
            for place in range(index * per, min(index * per + per, reach))
        )
    return tuple(pack(numbers[(place * block_size + block_size - 1) // size], place) for place in range(reach))


def own_keys(index: int, num_blocks: int) -> tuple[bytes, ...]:
    """Return block keys that no other request has."""
    return tuple(_OWN.pack(index, place, 1) for place in range(num_blocks))


def make_request(name: str, arrival: Arrival, at: float, emitted: int, limits: Limits, own: int | None) -> Request:
    """Return the core's request of an arrival at `at`, of which `emitted` tokens were given before a restart.

    `own`: the number from which its keys are made if the trace has none; None: no keys.
    """
    size, keys = limits.block_size, None
    if limits.prefix_caching and arrival.keys:
        keys = block_keys(arrival, size)
    elif limits.prefix_caching and own is not None:
        keys = own_keys(own, (arrival.prompt_tokens + arrival.output_tokens) // size)
    return Request(
        name,
        None,
        _params(arrival.output_tokens, len(arrival.choices) or 1),
        at,
        num_prompt_tokens=arrival.prompt_tokens,
        block_keys=keys,
        emitted_token_ids=array("i", bytes(4 * emitted)) if emitted else None,
        priority=arrival.priority,
        tenant=arrival.tenant,
        ttft_objective=arrival.ttft_objective,
        tpot_objective=arrival.tpot_objective,
    )
