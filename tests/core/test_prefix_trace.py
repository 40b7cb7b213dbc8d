"""K02, K03 on a public trace: the prefix cache alone reaches the hit rates that an LRU cache of its size must.

The trace is Mooncake's conversation trace (Qin et al., FAST '25; Apache-2.0), 12,031 requests with an id per block of
512 prompt tokens. It is not part of this repository: it is looked for in `shared/data`, in or beside it.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from octavo.core.kv.cache import KVCache
from octavo.core.limits import Limits
from octavo.core.request import Request
from octavo.core.request_state import RequestState, Sequence

BLOCK_SIZE = 512
TRACE = Path("shared/data/mooncake/conversation_trace.jsonl.gz")
NUM_BLOCKS = 182_790  # distinct ones in the trace: nothing is ever evicted


@cache
def read_trace() -> list[list[bytes]]:
    """Block keys of each request, in order of arrival."""
    repository = Path(__file__).resolve().parents[2]
    for folder in (repository, repository.parent):
        if (folder / TRACE).exists():
            with gzip.open(folder / TRACE, "rt") as lines:
                return [[number.to_bytes(16, "little") for number in json.loads(line)["hash_ids"]] for line in lines]
    pytest.skip(f"no {TRACE} in the repository or beside it")


def replay(trace: list[list[bytes]], num_blocks: int) -> tuple[int, int]:
    """Serve each request alone: blocks found, and blocks asked for."""
    sizes = Limits(
        block_size=BLOCK_SIZE, num_blocks=(num_blocks,), max_model_len=BLOCK_SIZE * num_blocks + 1, vocab_size=2
    )
    kv = KVCache(sizes)
    found = asked = 0
    for step, keys in enumerate(trace):
        effects = kv.begin_plan(step)
        end = len(keys) * BLOCK_SIZE
        # One token more than the blocks hold: the last token is always computed, so all blocks can be found.
        request = Request(f"r{step}", None, num_prompt_tokens=end + 1, block_keys=tuple(keys))
        sequence = Sequence(RequestState(request, step), 0, kv.num_groups)
        sequence.slot = 0
        sequence.keys = list(keys)
        match = kv.match(sequence, sequence.num_known)
        kv.adopt(sequence, match)
        assert kv.fits(sequence, end)
        kv.extend(sequence, end)
        effects.published += kv.publish(sequence, end, step)
        kv.confirm(effects)
        kv.release(sequence)
        kv.end_plan()
        found += match.num_tokens // BLOCK_SIZE
        asked += len(keys)
    assert kv.num_free() == num_blocks
    return found, asked


def slow_replay(trace: list[list[bytes]], num_blocks: int) -> int:
    """Blocks found by an LRU list of keys: those of a request are used last to first, so that its tail goes first."""
    kept: dict[bytes, None] = {}
    found = 0
    for keys in trace:
        hit = next((index for index, key in enumerate(keys) if key not in kept), len(keys))
        found += hit
        for key in keys[:hit]:
            del kept[key]  # held while the request runs
        while len(kept) + len(keys) > num_blocks:
            del kept[next(iter(kept))]
        for key in keys[hit:]:
            kept.pop(key, None)
        kept.update(dict.fromkeys(reversed(keys)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_blocks", "rate"),
    [(NUM_BLOCKS, 0.366), (50_000, 0.355), (30_000, 0.326), (10_000, 0.212), (5_859, 0.136), (1_000, 0.045)],
)
def test_K03_hit_rates_of_a_production_trace(num_blocks: int, rate: float) -> None:
    found, asked = replay(read_trace(), num_blocks)
    assert round(found / asked, 3) == rate


@pytest.mark.parametrize("num_blocks", [1_000, 3_000])
def test_K03_the_trace_hits_what_a_list_of_keys_hits(num_blocks: int) -> None:
    trace = read_trace()[:3000]
    assert replay(trace, num_blocks)[0] == slow_replay(trace, num_blocks)
