"""K11 on the executor's side: blocks from a count, bytes, tokens, a share of memory, or what suits the device."""

from __future__ import annotations

import pytest

from octavo.core.kv.group import GroupSpec
from octavo.errors import CapacityError
from octavo.executors.pool_sizing import PoolSizing
from octavo.executors.protocol import ExecutorSpec

MIB = 2**20


def choose(available_bytes: int = 1000 * MIB, is_host: bool = True, max_model_len: int = 8192, **size: float) -> int:
    spec = ExecutorSpec(max_sequences=4, max_batch_tokens=64, **size)  # type: ignore[arg-type]
    sizing = PoolSizing(spec, (GroupSpec(block_bytes=MIB),), max_model_len)
    (num_blocks,) = sizing.device_blocks(available_bytes, is_host)
    return num_blocks


def test_K11_each_way_of_giving_a_size() -> None:
    assert choose(num_blocks=7) == 7
    assert choose(pool_bytes=9 * MIB + 5) == 9
    assert choose(pool_tokens=16 * 3 + 15) == 3
    assert choose(memory_fraction=0.25) == 250
    assert choose(memory_fraction=0.25, is_host=False) == 250


def test_K11_without_a_size_a_device_gives_most_and_a_host_what_is_typical() -> None:
    assert choose(is_host=False) == 900
    assert choose(available_bytes=100 * MIB) == 50  # half of the free memory
    assert choose(available_bytes=100_000 * MIB) == 4 * 2048 // 16  # sequences of typical length
    assert choose(available_bytes=100_000 * MIB, max_model_len=256) == 4 * 256 // 16


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"num_blocks": 0}, r"num_blocks is 0, which holds no KV block of 16 tokens.*would hold 1000 blocks \(16000"),
        ({"pool_bytes": 5}, r"the pool was given 0\.0 MiB, which holds no KV block"),
        ({"pool_tokens": 15}, r"the pool was given 15 tokens, which holds no KV block"),
        ({"memory_fraction": 0.0001}, r"0\.0001 of the free memory is 0\.1 MiB, which holds no KV block"),
        ({"num_blocks": 1001}, r"1001 KV blocks need 1001\.0 MiB; 1000\.0 MiB are free, which would hold 1000"),
        ({"num_blocks": 5, "pool_tokens": 16}, "not several"),
    ],
)
def test_K11_a_pool_that_cannot_be_says_what_would_fit(size: dict[str, float], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        choose(**size)
