"""Arrival: one request of a workload, known by its lengths and the keys of its prompt's blocks; and the core's request.

Owns: the fields, and how a trace's keys become keys of the scheduler's blocks. Does not: read a trace (workloads do).
Invariant: equal keys at equal positions of a trace give equal block keys, different ones different block keys.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from octavo.core.limits import Limits
from octavo.core.request import Request, SamplingParams

_KEY = struct.Struct("<qI")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload. `time` is in seconds from the workload's start, tokens are counts.

    `output_tokens` is how many it will generate; with several `choices` (the tokens of each) the longest's. `keys` name
    the prompt's content, one for each full `key_tokens` tokens: equal keys at equal positions mean equal prefixes (a
    public trace's block ids, or a recording's block keys). `output_keys` continue them over prompt and output.
    `follows`: index in the workload of the request after whose end this one arrives, `time` seconds later (a
    conversation's next turn); None: it arrives at `time` itself.
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


@lru_cache(maxsize=65536)
def _params(max_tokens: int, n: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, temperature=0.0, seed=0)


def make_request(name: str, arrival: Arrival, at: float, emitted: int, limits: Limits) -> Request:
    """Return the core's request of an arrival at `at`, of which `emitted` tokens were emitted before a restart."""
    has_keys = limits.prefix_caching and arrival.keys
    return Request(
        name,
        None,
        _params(arrival.output_tokens, len(arrival.choices) or 1),
        at,
        num_prompt_tokens=arrival.prompt_tokens,
        block_keys=block_keys(arrival, limits.block_size) if has_keys else None,
        emitted_token_ids=array("i", bytes(4 * emitted)) if emitted else None,
        priority=arrival.priority,
        tenant=arrival.tenant,
        ttft_objective=arrival.ttft_objective,
        tpot_objective=arrival.tpot_objective,
    )


def block_keys(arrival: Arrival, block_size: int) -> tuple[bytes, ...]:
    """Return keys of the prompt's full blocks; with `output_keys` also of the outputs', as far as the keys reach.

    A key covers `key_tokens` tokens and all before them, so a block is named by the key that covers its end, and by its
    position. If both sizes are equal, bytes stay as they are.
    """
    keys, size, tokens = (*arrival.keys, *arrival.output_keys), arrival.key_tokens, arrival.prompt_tokens
    if not keys or size < 1:
        return ()
    if arrival.output_keys:
        tokens += arrival.output_tokens
    count = min(tokens, len(keys) * size) // block_size
    if isinstance(keys[0], bytes):
        names = [key for key in keys if isinstance(key, bytes)]
        if size == block_size:
            return tuple(names[:count])
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
