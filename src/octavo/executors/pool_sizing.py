"""How many KV blocks to allocate.

Owns: the arithmetic from a spec and free memory to a number of blocks, and its errors.
Does not: look at the machine (its callers do) or allocate.
"""

from __future__ import annotations

from octavo.errors import CapacityError
from octavo.executors.protocol import ExecutorSpec

HOST_FRACTION, DEVICE_FRACTION = 0.5, 0.9  # of the free memory, when nobody says
TYPICAL_LEN = 2048  # tokens per sequence that a pool on a CPU is sized for when nobody says


def choose_num_blocks(
    spec: ExecutorSpec, *, block_bytes: int, max_model_len: int, available_bytes: int, is_host: bool
) -> int:
    """Give the number of blocks that the spec asks for. Raises CapacityError when that holds nothing.

    With no size given: `memory_fraction` of the free memory. With no fraction either: a usual one, on the host
    at most what max_sequences of typical length need, because there memory is shared with everything else.
    """
    asked = [size for size in (spec.num_blocks, spec.pool_bytes, spec.pool_tokens) if size is not None]
    if len(asked) > 1:
        raise CapacityError("give one of num_blocks, pool_bytes and pool_tokens, not several")
    if spec.num_blocks is not None:
        num_blocks, source = spec.num_blocks, f"num_blocks is {spec.num_blocks}"
    elif spec.pool_bytes is not None:
        num_blocks, source = spec.pool_bytes // block_bytes, f"the pool was given {_mib(spec.pool_bytes)}"
    elif spec.pool_tokens is not None:
        num_blocks, source = spec.pool_tokens // spec.block_size, f"the pool was given {spec.pool_tokens} tokens"
    else:
        fraction = spec.memory_fraction or (HOST_FRACTION if is_host else DEVICE_FRACTION)
        share = int(available_bytes * fraction)
        num_blocks, source = share // block_bytes, f"{fraction:g} of the free memory is {_mib(share)}"
        if is_host and spec.memory_fraction is None:
            num_blocks = min(num_blocks, spec.max_sequences * -(-min(max_model_len, TYPICAL_LEN) // spec.block_size))
    fits = available_bytes // block_bytes
    if num_blocks < 1:
        raise CapacityError(
            f"{source}, which holds no KV block of {spec.block_size} tokens ({_mib(block_bytes)}); "
            f"{_mib(available_bytes)} are free, which would hold {fits} blocks ({fits * spec.block_size} tokens)"
        )
    if num_blocks > fits:
        raise CapacityError(
            f"{source}, and {num_blocks} KV blocks need {_mib(num_blocks * block_bytes)}; "
            f"{_mib(available_bytes)} are free, which would hold {fits} blocks ({fits * spec.block_size} tokens)"
        )
    return num_blocks


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
