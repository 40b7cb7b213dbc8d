"""K11 on the executor's side: blocks from a count, bytes, tokens, a share of memory, or what suits the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.core.limits import GroupKind, GroupSpec
from octavo.errors import CapacityError
from octavo.executors.memory import DeviceMemory, HostMemory, PoolSizing, describe_groups
from octavo.executors.protocol import ExecutorSpec, usable_len

MIB = 2**20


def choose(available_bytes: int = 1000 * MIB, max_model_len: int = 8192, **size: float) -> int:
    spec = ExecutorSpec(max_sequences=4, max_batch_tokens=64, **size)  # type: ignore[arg-type]
    sizing = PoolSizing(spec, (GroupSpec(block_bytes=MIB),), max_model_len)
    (num_blocks,) = sizing.device_blocks(HostMemory(available_bytes))
    return num_blocks


def on_device(memory: DeviceMemory, **size: float) -> int:
    spec = ExecutorSpec(max_sequences=4, max_batch_tokens=64, **size)  # type: ignore[arg-type]
    (num_blocks,) = PoolSizing(spec, (GroupSpec(block_bytes=MIB),), 8192).device_blocks(memory)
    return num_blocks


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.SLIDING])
def test_the_usable_length_is_the_longest_that_fits(kind: GroupKind) -> None:
    group = GroupSpec(kind, 8 if kind == GroupKind.SLIDING else 0)
    spec = ExecutorSpec(max_sequences=1, max_batch_tokens=6, block_size=4)
    for num_blocks in range(1, 12):
        fitting = [n for n in range(1, 33) if group.peak_blocks(n, 6, 4) <= num_blocks]
        assert usable_len((group,), (num_blocks,), spec, 32) == max(fitting)


def test_K11_each_way_of_giving_a_size() -> None:
    assert choose(num_blocks=7) == 7
    assert choose(pool_bytes=9 * MIB + 5) == 9
    assert choose(pool_tokens=16 * 3 + 15) == 3
    assert choose(memory_fraction=0.25) == 250


def test_K11_on_a_device_the_share_is_of_its_whole_memory_with_weights_and_a_step() -> None:
    alone = DeviceMemory(total=1000 * MIB, free=700 * MIB, own=250 * MIB, step=100 * MIB)  # 50 are the context's
    assert on_device(alone, memory_fraction=0.8) == 800 - 250 - 100
    assert on_device(alone, memory_fraction=0.5) == 500 - 250 - 100
    assert on_device(alone) == 700 - 100 - 100  # a tenth of the device stays free
    assert on_device(alone, num_blocks=600) == 600 and on_device(alone, pool_bytes=9 * MIB) == 9
    with pytest.raises(CapacityError, match=r"override 601 \(601.0 MiB\) exceeds the 600.0 MiB free beside 100.0 MiB"):
        on_device(alone, num_blocks=601)
    with pytest.raises(
        CapacityError,
        match=r"0.3 \(300.0 MiB of 1000.0 MiB: 250.0 MiB of weights.*100.0 MiB for a step\) leaves",
    ):
        on_device(alone, memory_fraction=0.3)


def test_K11_another_process_on_the_device_is_named_or_left_room() -> None:
    shared = DeviceMemory(total=1000 * MIB, free=300 * MIB, own=200 * MIB, step=50 * MIB)
    with pytest.raises(
        CapacityError, match=r"--gpu-memory-utilization 0.9 .*other processes use 500.0 MiB; end them, or give .* 0\.5$"
    ):
        on_device(shared, memory_fraction=0.9)
    assert on_device(shared, memory_fraction=0.5) == 500 - 200 - 50
    assert on_device(shared) == 300 - 50 - 100
    full = DeviceMemory(total=1000 * MIB, free=100 * MIB, own=200 * MIB, step=50 * MIB)
    with pytest.raises(CapacityError, match=r"0\.9 \(other processes use 700.0 MiB; .* a share each, .*no KV block"):
        on_device(full)


def test_K11_without_a_size_a_host_gives_what_is_typical() -> None:
    assert choose(available_bytes=100 * MIB) == 50  # half of the free memory
    assert choose(available_bytes=100_000 * MIB) == 4 * 2048 // 16  # sequences of typical length
    assert choose(available_bytes=100_000 * MIB, max_model_len=256) == 4 * 256 // 16


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            {"num_blocks": 0},
            r"--num-gpu-blocks-override 0 holds no KV block of 16 tokens.*would hold 1000 blocks \(16000",
        ),
        ({"pool_bytes": 5}, r"--kv-cache-memory-bytes 5 bytes holds no KV block of 16 tokens \(1\.0 MiB\)"),
        ({"pool_tokens": 15}, r"--kv-cache-tokens 15 holds no KV block"),
        ({"memory_fraction": 0.0001}, r"--gpu-memory-utilization 0\.0001 \(104857 bytes\) holds no KV block"),
        (
            {"num_blocks": 1001},
            r"--num-gpu-blocks-override 1001 \(1001\.0 MiB\) exceeds the 1000\.0 MiB free",
        ),
        (
            {"pool_bytes": 2000 * MIB},
            r"^--kv-cache-memory-bytes 2\.0 GiB exceeds the 1000\.0 MiB free, which would hold",
        ),
        ({"num_blocks": 5, "pool_tokens": 16}, "not several"),
    ],
)
def test_K11_a_pool_that_cannot_be_says_what_would_fit(size: dict[str, float], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        choose(**size)


# Two layers with full attention and six with a window of 512, as large models of this kind have them.
MIXED = (
    GroupSpec(GroupKind.FULL, 0, 2 * MIB, (2, 5)),
    GroupSpec(GroupKind.SLIDING, 512, 6 * MIB, (0, 1, 3, 4, 6, 7)),
)
BASE = ExecutorSpec(max_sequences=4, max_batch_tokens=64)
LONGEST = 8192


def mixed(available_bytes: int = 100_000 * MIB, **size: float) -> tuple[int, ...]:
    return PoolSizing(replace(BASE, **size), MIXED, LONGEST).device_blocks(HostMemory(available_bytes))  # type: ignore[arg-type]


def cost(num_blocks: tuple[int, ...]) -> int:
    return sum(count * group.block_bytes for count, group in zip(num_blocks, MIXED, strict=True))


def test_K07_a_budget_is_shared_so_that_typical_sequences_fill_all_groups_together() -> None:
    full, sliding = 2048 // 16, MIXED[1].peak_blocks(2048, 64, 16)
    assert sliding == -(-(512 - 1 + 64 - 1) // 16) + 1 == 37
    budget = 10 * (full * 2 + sliding * 6) * MIB
    for blocks in (mixed(pool_bytes=budget), mixed(budget * 2, memory_fraction=0.5)):
        assert blocks == (10 * full, 10 * sliding)
    for size in range(1300, 9000, 777):
        blocks = mixed(pool_bytes=size * MIB)
        assert size * MIB - 8 * MIB < cost(blocks) <= size * MIB
        assert abs(blocks[0] / full - blocks[1] / sliding) < 0.1 or blocks[0] == LONGEST // 16


def test_K07_explicit_sizes_mean_the_full_group_and_the_others_hold_as_many_sequences() -> None:
    assert mixed(num_blocks=1280) == (1280, 370)
    assert mixed(pool_tokens=20480 + 15) == (1280, 370)
    assert mixed(num_blocks=520) == (520, 151)  # 520 / 128 sequences of typical length
    assert mixed(num_blocks=100) == (100, 37)  # at least one longest sequence's window
    assert mixed(num_blocks=20) == (20, 20)  # where the full group holds less, no more than that
    windows = (replace(MIXED[1], window=1024), MIXED[1])
    assert PoolSizing(replace(BASE, num_blocks=100), windows, LONGEST).device_blocks(HostMemory(10**12)) == (100, 54)


def test_K07_every_group_holds_one_longest_sequence_while_the_budget_has_room_for_it() -> None:
    least = (LONGEST // 16, 37)
    assert mixed(pool_bytes=cost(least)) == least
    assert mixed(pool_bytes=cost(least) + 60 * MIB) == (512, 47)
    for size in (1, 7, 8, 60, 300, 700, 1245):
        if size < 8:
            with pytest.raises(CapacityError, match=r"holds no KV block of 16 tokens \(8.0 MiB\)"):
                mixed(pool_bytes=size * MIB)
            continue
        full, sliding = mixed(pool_bytes=size * MIB)
        assert cost((full, sliding)) <= size * MIB
        # neither group ends a sequence before the other does
        assert sliding == MIXED[1].peak_blocks(full * 16, 64, 16)
        assert cost((full + 1, MIXED[1].peak_blocks(full * 16 + 1, 64, 16))) > size * MIB


def test_K07_by_default_a_host_gives_what_is_typical_and_one_longest() -> None:
    assert mixed() == (512, 148)
    assert PoolSizing(replace(BASE, max_sequences=1), MIXED, LONGEST).device_blocks(HostMemory(10**12)) == (512, 37)
    with pytest.raises(CapacityError, match=r"override 2000 \(.* GiB\) exceeds the 4.9 GiB free, which would hold"):
        mixed(5000 * MIB, num_blocks=2000)


def test_K10_host_blocks_come_from_their_bytes() -> None:
    def host(size: int, available_bytes: int = 10_000 * MIB) -> tuple[int, ...]:
        return PoolSizing(replace(BASE, host_bytes=size, max_batch_tokens=8192), MIXED, LONGEST).host_blocks(
            available_bytes
        )

    assert host(0) == ()
    resting = MIXED[1].peak_blocks(2048, 1, 16)  # its window, without the tokens of a step
    assert host(10 * (128 * 2 + resting * 6) * MIB) == (1280, 10 * resting)
    with pytest.raises(CapacityError, match=r"--host-cache-bytes 4 bytes holds no .*such as 4G"):
        host(4)
    with pytest.raises(CapacityError, match=r"--host-cache-bytes 600.0 MiB exceeds the 500.0 MiB of free host memory"):
        host(600 * MIB, 500 * MIB)


def test_notes_describe_several_groups() -> None:
    assert describe_groups(MIXED[:1], (9,), 16) == ()
    assert describe_groups(MIXED, (9, 5), 16) == (
        "the KV pool is shared by 2 layers with full attention: 144 tokens; 6 layers with a window of 512: 80 tokens",
    )
