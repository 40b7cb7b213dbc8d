"""Compute the number of KV blocks of each cache group, on the device and on the host.

Owns: the arithmetic from a spec and free memory to numbers of blocks, and its errors.
Does not: look at the machine (its callers do) or allocate.
Invariants: groups share one budget in bytes so that sequences of typical length fill all of them at the same time;
no group is too small for one longest sequence while the budget has room for one.
A user's number of blocks or tokens refers to the leading group: the first, which is the full group if there is one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from octavo.core.limits import GroupKind, GroupSpec
from octavo.errors import CapacityError
from octavo.executors.protocol import ExecutorSpec

HOST_FRACTION, DEVICE_FRACTION = 0.5, 0.9  # of the free memory, by default
TYPICAL_LEN = 2048  # tokens per sequence for which a pool on a CPU is sized by default


class PoolSizing:
    """The sizes of these groups' blocks and the blocks that sequences need."""

    def __init__(self, spec: ExecutorSpec, groups: Sequence[GroupSpec], max_model_len: int) -> None:
        self._spec = spec
        self._groups = tuple(groups)
        self._max_model_len = max_model_len
        self._typical = self._blocks_of(min(max_model_len, TYPICAL_LEN))

    def device_blocks(self, available_bytes: int, is_host: bool) -> tuple[int, ...]:
        """Return the number of blocks per group for the spec. Raises CapacityError for no block, or too many.

        Without a size: `memory_fraction` of the free memory. Without a fraction: the default one, on the host at most
        the blocks that max_sequences of typical length need, because other processes share that memory.
        """
        num_blocks, source = self._asked(available_bytes, is_host)
        fits = self._split(available_bytes)[0]
        size = self._spec.block_size
        would_hold = f"{_size(available_bytes)} free, which would hold {fits} blocks ({fits * size} tokens)"
        if min(num_blocks) < 1:
            cost = sum(group.block_bytes for group in self._groups)
            raise CapacityError(f"{source} holds no KV block of {size} tokens ({_size(cost)}); there are {would_hold}")
        if self._bytes(num_blocks) > available_bytes:
            needs = "" if self._spec.pool_bytes is not None else f" ({_size(self._bytes(num_blocks))})"
            raise CapacityError(f"{source}{needs} exceeds the {would_hold}")
        return num_blocks

    def host_blocks(self, available_bytes: int) -> tuple[int, ...]:
        """Return the number of host blocks per group for the spec's host_bytes, () for 0. Raises CapacityError."""
        size = self._spec.host_bytes
        if not size:
            return ()
        source = f"--host-cache-bytes {_size(size)}"
        if size > available_bytes:
            raise CapacityError(f"{source} exceeds the {_size(available_bytes)} of free host memory")
        # a swapped-out sequence holds only its window, not a chunk being computed
        resting = PoolSizing(replace(self._spec, max_batch_tokens=1), self._groups, self._max_model_len)
        num_blocks = resting._split(size)
        if min(num_blocks) < 1:
            cost = sum(group.block_bytes for group in self._groups)
            raise CapacityError(
                f"{source} holds no KV block of {self._spec.block_size} tokens ({_size(cost)}); "
                "give more, such as 4G, or 0 for none"
            )
        return num_blocks

    def _asked(self, available_bytes: int, is_host: bool) -> tuple[tuple[int, ...], str]:
        spec = self._spec
        asked = [size for size in (spec.num_blocks, spec.pool_bytes, spec.pool_tokens) if size is not None]
        if len(asked) > 1:
            raise CapacityError("give one of num_blocks, pool_bytes and pool_tokens, not several")
        if spec.num_blocks is not None:
            return self._beside(spec.num_blocks), f"--num-gpu-blocks-override {spec.num_blocks}"
        if spec.pool_bytes is not None:
            return self._split(spec.pool_bytes), f"--kv-cache-memory-bytes {_size(spec.pool_bytes)}"
        if spec.pool_tokens is not None:
            return self._beside(spec.pool_tokens // spec.block_size), f"--kv-cache-tokens {spec.pool_tokens}"
        fraction = spec.memory_fraction or (HOST_FRACTION if is_host else DEVICE_FRACTION)
        share = int(available_bytes * fraction)
        num_blocks = self._split(share)
        if is_host and spec.memory_fraction is None:
            num_blocks = tuple(map(min, num_blocks, self._usual()))
        return num_blocks, f"--gpu-memory-utilization {fraction:g} ({_size(share)})"

    def _usual(self) -> tuple[int, ...]:
        """Return the blocks that max_sequences of typical length need; of several groups, each holds a longest one."""
        most = tuple(self._spec.max_sequences * typical for typical in self._typical)
        return most if len(most) == 1 else tuple(map(max, most, self._blocks_of(self._max_model_len)))

    def _blocks_of(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of each group that one sequence of that length holds at once."""
        size = self._spec.block_size
        chunk = self._spec.max_batch_tokens
        return tuple(group.peak_blocks(num_tokens, chunk, size) for group in self._groups)

    def _bytes(self, num_blocks: Sequence[int]) -> int:
        return sum(count * group.block_bytes for count, group in zip(num_blocks, self._groups, strict=True))

    def _beside(self, leading: int) -> tuple[int, ...]:
        """Return all groups' blocks, given the leading group's: for as many sequences, and at least one longest."""
        if leading < 1:
            return (leading,) * len(self._groups)
        others = zip(self._blocks_of(self._max_model_len)[1:], self._typical[1:], strict=True)
        # for a longest sequence that the leading group cannot hold, the others need no more blocks than that group
        return leading, *(max(min(least, leading), -(-leading * need // self._typical[0])) for least, need in others)

    def _split(self, budget: int) -> tuple[int, ...]:
        """Divide bytes among the groups; return each group's blocks."""
        longest = self._blocks_of(self._max_model_len)
        if self._bytes(longest) > budget:
            return self._for_one_sequence(budget)
        fixed: dict[int, int] = {}
        while True:
            rest = budget - sum(count * self._groups[index].block_bytes for index, count in fixed.items())
            free = [index for index in range(len(self._groups)) if index not in fixed]
            cost = sum(self._typical[index] * self._groups[index].block_bytes for index in free)
            shares = {index: rest * self._typical[index] // cost for index in free}
            short = {index: longest[index] for index in free if shares[index] < longest[index]}
            if not short:
                return tuple(fixed.get(index, shares.get(index, 0)) for index in range(len(self._groups)))
            fixed |= short  # never all: the rest suffices for one longest sequence, so one group is not short

    def _for_one_sequence(self, budget: int) -> tuple[int, ...]:
        """Divide a budget too small for the longest sequence, so that the longest possible one fits."""
        if len(self._groups) == 1:
            return (budget // self._groups[0].block_bytes,)
        low, high = 0, self._max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._bytes(self._blocks_of(middle)) <= budget else (low, middle - 1)
        return self._blocks_of(low)


def usable_len(groups: Sequence[GroupSpec], num_blocks: Sequence[int], spec: ExecutorSpec, max_model_len: int) -> int:
    """Return how many tokens one sequence can have in a pool of these blocks, at most `max_model_len`."""

    def fits(num_tokens: int) -> bool:
        needs = (group.peak_blocks(num_tokens, spec.max_batch_tokens, spec.block_size) for group in groups)
        return all(need <= count for need, count in zip(needs, num_blocks, strict=True))

    return bisect_left(range(1, max_model_len + 1), True, key=lambda num_tokens: not fits(num_tokens))


def describe_groups(groups: Sequence[GroupSpec], num_blocks: Sequence[int], block_size: int) -> tuple[str, ...]:
    """Return the sizes of several groups as one note for the user, () for one group."""
    if len(groups) == 1:
        return ()
    parts = []
    for group, count in zip(groups, num_blocks, strict=True):
        kind = "full attention" if group.kind == GroupKind.FULL else f"a window of {group.window}"
        layers = f"{len(group.layers)} layer{'s' * (len(group.layers) != 1)}"
        parts.append(f"{layers} with {kind}: {count * block_size} tokens")
    return ("the KV pool is shared by " + "; ".join(parts),)


def _size(num_bytes: int) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
