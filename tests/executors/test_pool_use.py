"""The use of the KV pool against tables counted by hand."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.kv.pool import BlockPool
from octavo.core.limits import GroupSpec
from octavo.core.plan import DROP_BLOCK
from octavo.core.scheduler import Scheduler
from octavo.executors.pool_use import pool_use
from tests.core.harness import Run, limits, prompt

SIZE = 4


def sequence(num_scheduled: int, *tables: list[int]) -> Any:
    first_live = [sum(1 for block in table if block == DROP_BLOCK) for table in tables]
    return SimpleNamespace(slot=0, num_scheduled=num_scheduled, first_live=first_live, tables=list(tables))


def named(use: dict[str, Any]) -> Any:
    """The same with counts as attributes."""
    groups = tuple(SimpleNamespace(**group) for group in use["groups"])
    return SimpleNamespace(**use | {"groups": groups, "total": SimpleNamespace(**use["total"])})


def use_of(sequences: list[Any], pools: list[BlockPool], host: list[BlockPool] | None = None) -> Any:
    """The use of pools by sequences, as of a scheduler that has just these."""
    sizes = limits(
        groups=(GroupSpec(),) * len(pools),
        num_blocks=tuple(pool.num_blocks for pool in pools),
        host_blocks=tuple(pool.num_blocks for pool in host or ()),
    )
    scheduler = Scheduler(sizes)
    state = scheduler._state
    state.cache.pools, state.cache.host.pools = pools, host or []
    state.slot_owner, state.step = sequences, 7
    return named(pool_use(scheduler))


def test_T02_logical_and_physical_blocks_of_a_shared_prefix() -> None:
    pool = BlockPool(10)
    first, second, tail_a, tail_b = (pool.allocate() for _ in range(4))
    pool.share(first)
    pool.share(second)
    found = use_of([sequence(11, [first, second, tail_a]), sequence(9, [first, second, tail_b])], [pool])
    group = found.total
    assert (group.num_blocks, group.referenced_blocks, group.cached_blocks, group.free_blocks) == (10, 4, 0, 6)
    assert (group.logical_blocks, group.physical_blocks, group.saved_blocks, group.shared_blocks) == (6, 4, 2, 2)
    assert (group.logical_tokens, group.physical_slots) == (20, 16)
    assert (group.filled_slots, group.reserved_slots) == (12, 4), "the tails hold 3 and 1 of 4"
    assert group.wasted_share == 0.25
    assert (found.step, found.block_size, found.num_sequences) == (7, SIZE, 2)
    assert found.groups == (found.total,)


def test_T02_a_shared_tail_counts_as_filled_by_its_longest_reader() -> None:
    pool = BlockPool(4)
    tail = pool.allocate()
    pool.share(tail)
    group = use_of([sequence(1, [tail]), sequence(3, [tail])], [pool]).total
    assert (group.logical_tokens, group.filled_slots, group.reserved_slots) == (4, 3, 1)


def test_T02_blocks_reserved_ahead_are_wasted_and_empty_pools_are_not() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    group = use_of([sequence(2, blocks)], [pool]).total
    assert (group.filled_slots, group.reserved_slots, group.wasted_share) == (2, 10, 10 / 12)
    assert use_of([], [BlockPool(4)]).total.wasted_share == 0.0


def test_T02_dropped_entries_of_a_sliding_group_hold_nothing() -> None:
    full, sliding = BlockPool(8), BlockPool(8)
    kept = [sliding.allocate() for _ in range(2)]
    tables = [full.allocate() for _ in range(4)], [DROP_BLOCK, DROP_BLOCK, *kept]
    found = use_of([sequence(14, *tables)], [full, sliding])
    one, two = found.groups
    assert (one.logical_tokens, one.physical_blocks, one.reserved_slots) == (14, 4, 2)
    assert (two.logical_tokens, two.physical_blocks, two.reserved_slots) == (6, 2, 2)
    assert (found.total.logical_tokens, found.total.physical_slots) == (20, 24)
    assert found.total.wasted_share == 4 / 24


def test_T02_the_host_tier_is_counted_where_there_is_one() -> None:
    pool, host = BlockPool(4), BlockPool(6)
    held, cached = host.allocate(), host.allocate()
    host.publish([cached], [b"key"], None, None)
    host.release(cached)
    group = use_of([], [pool], [host]).total
    assert (group.host_blocks, group.host_blocks_used) == (6, 2), "held by a request, and by a prefix"
    host.release(held)
    assert use_of([], [pool], [host]).total.host_blocks_used == 1


@pytest.mark.parametrize("seed", range(20))
def test_T02_sums_hold_for_random_tables(seed: int) -> None:
    rng = random.Random(seed)
    pool, sequences = BlockPool(64), []
    for _ in range(8):
        table: list[int] = []
        if sequences and rng.random() < 0.5:
            table = rng.choice(sequences).tables[0][: rng.randrange(4)]
            for block in table:
                pool.share(block)
        table = [*table, *(pool.allocate() for _ in range(rng.randrange(1, 5)))]
        sequences.append(sequence(rng.randrange(len(table) * SIZE + 1), table))
    group = use_of(sequences, [pool]).total
    assert group.referenced_blocks + group.cached_blocks + group.free_blocks == group.num_blocks
    assert group.physical_blocks == group.referenced_blocks, "every reference is a table's"
    assert group.logical_blocks == sum(pool.references)
    assert group.filled_slots + group.reserved_slots == group.physical_slots
    assert group.saved_blocks == group.logical_blocks - group.physical_blocks
    assert group.logical_tokens == sum(each.num_scheduled for each in sequences)
    assert group.shared_blocks == sum(1 for count in pool.references if count > 1)


def test_T02_the_analysis_is_plain_json_and_sums_its_groups() -> None:
    pools = [BlockPool(3), BlockPool(5)]
    found = use_of([sequence(3, [pools[0].allocate()], [pools[1].allocate()])], pools)
    assert json.loads(json.dumps(found.total.__dict__)) == found.total.__dict__
    assert set(found.total.__dict__) == set(found.groups[0].__dict__) >= {"num_blocks", "wasted_share"}
    assert found.total.num_blocks == 8 == sum(group.num_blocks for group in found.groups)


def test_T02_a_running_scheduler_agrees_with_its_pool() -> None:
    run = Run(limits(num_blocks=24))
    for index in range(6):
        run.admit(prompt(9) + prompt(2 + index, seed=index), max_tokens=8)
    seen = []
    while run.scheduler.has_work:
        run.step()
        found = named(pool_use(run.scheduler))
        assert found.total.physical_blocks == found.total.referenced_blocks
        assert found.total.referenced_blocks == run.scheduler.statistics().num_blocks_used
        assert 0 <= found.total.reserved_slots < max(1, found.num_sequences) * found.block_size
        seen.append(found.total)
    assert max(group.saved_blocks for group in seen) >= 2, "two full blocks of nine tokens are shared"
    assert seen[-1].logical_blocks == 0 and seen[-1].cached_blocks > 0
