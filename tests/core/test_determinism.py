"""Equal calls make equal plans: across runs, hash seeds, and versions (the golden digest)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pytest
from tests.core.harness import EOS, Run, limits, prompt
from tests.fake_model import Faults

ROOT = Path(__file__).resolve().parents[2]

# Chained digest of every plan of `scenario`, by policy and depth. A change here is a change of scheduling:
# make it on purpose, say why in the commit, and print the new table with `python -m tests.core.test_determinism`.
GOLDEN = {
    "fcfs 1": "115a11e3f1daaed2",
    "fcfs 2": "c1bebeaa10e80e5c",
    "fcfs 3": "a29a19351ce6323e",
    "fifo 1": "1e0ee535a6a25461",
    "fifo 2": "25bc05a0d329e3d7",
    "fifo 3": "eb95abac4a9ff005",
}


def scenario(policy: str, depth: int) -> Run:
    """Arrivals, shared prefixes, chunks, preemptions, cancels, failures and deadlines, all from one seed."""
    rng = random.Random(11)
    sizes = limits(policy=policy, num_blocks=14, max_batch_tokens=16, max_sequences=5, headroom=None, vocab_size=23)
    run = Run(sizes, depth=depth, faults=Faults(random.Random(5), collect_failure=0.02, row_error=0.005))
    for index in range(60):
        if index < 40:
            ids = [*prompt(rng.choice((0, 4, 8, 12)), index % 3, 23), *prompt(rng.randrange(1, 12), index, 23)]
            deadline = run.now + 0.2 if index % 13 == 12 else None
            run.admit(ids, rng.choice((2, 6, 14)), deadline=deadline, eos_token_ids=(EOS,))
        if index % 9 == 8:
            run.cancel(f"r{index - 3}")
        run.step()
    return run.finish()


def chained(run: Run) -> str:
    """Digest over what every plan asks for; not over parameters' spelling, which may gain fields."""
    state = blake2b(digest_size=8)
    for plan in run.plans:
        columns = (plan.slots, plan.starts, plan.counts, plan.flags, plan.edits, plan.copies, plan.freed_slots)
        entered = [(new.slot, new.request_id, list(new.token_ids or ())) for new in plan.new_sequences]
        state.update(
            repr(([list(column) for column in columns], entered, plan.finished_ids, plan.preempted_ids)).encode()
        )
    return state.hexdigest()


def table() -> dict[str, str]:
    return {f"{policy} {depth}": chained(scenario(policy, depth)) for policy in ("fcfs", "fifo") for depth in (1, 2, 3)}


def test_the_scenario_is_worth_comparing() -> None:
    run = scenario("fcfs", 2)
    statistics = run.scheduler.statistics()
    assert statistics.num_preemptions > 3 and statistics.prefix_hit_tokens > 50 and run.num_failures > 0
    assert all(count > 0 for reason, count in statistics.finished.items() if reason != "error")


def test_equal_calls_make_equal_plans() -> None:
    for policy in ("fcfs", "fifo"):
        runs = [scenario(policy, 2) for _ in range(2)]
        assert runs[0].digests == runs[1].digests and table() == table()


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_plans_do_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.core.test_determinism"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.rstrip() == show(table())


def test_plans_are_those_of_the_golden_table() -> None:
    assert table() == GOLDEN, show(table())


def show(digests: dict[str, str]) -> str:
    return "\n".join(f"    {name!r}: {digest!r}," for name, digest in digests.items()).replace("'", '"')


if __name__ == "__main__":
    print(show(table()))
