"""Equal calls make equal plans: across runs, hash seeds, and versions (the golden digest)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from tests.core.harness import EOS, Run, limits, prompt
from tests.fake_model import Faults

from octavo.core.limits import GroupKind, GroupSpec
from octavo.core.request import Span

ROOT = Path(__file__).resolve().parents[2]

# Chained digest of every plan of each scenario. A change here is a change of scheduling:
# make it on purpose, say why in the commit, and print the new table with `python -m tests.core.test_determinism`.
GOLDEN = {
    "fcfs 1": "c10e4f7847694d9a",
    "fcfs 2": "996cbbb99e9c2cb1",
    "fcfs 3": "a08f1c50e5300956",
    "fifo 1": "5cca7bfa388d93ab",
    "fifo 2": "fed9f269b8d75c62",
    "fifo 3": "d7da7c21876cf4f6",
    "rich fcfs 1": "e94821ecf775e974",
    "rich fair 2": "0e25c76aba9debfd",
    "rich fifo 3": "9cb1ff2793236bfb",
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


def rich_scenario(policy: str, depth: int) -> Run:
    """Choices, beams, a window, the host tier, media, adapters, tenants and a read budget, all from one seed."""
    rng = random.Random(12)
    sizes = limits(
        policy=policy,
        groups=(GroupSpec(), GroupSpec(GroupKind.SLIDING, 9)),
        num_blocks=(22, 22),
        host_blocks=(60, 60),
        host_load_min_tokens=1,
        preemption="swap",
        max_batch_tokens=16,
        max_sequences=6,
        vocab_size=23,
        max_kv_read=90,
        encoder_budget=8,
        encoder_cache=8,
        adapter_slots=2,
        tenant_weights=(("b", 2.0),),
        find_shared_prefixes=True,
    )
    run = Run(sizes, depth=depth, faults=Faults(random.Random(5), collect_failure=0.02, row_error=0.005))
    run.is_ordered = False
    shapes: tuple[dict[str, int], ...] = ({}, {"n": 3}, {"beam_width": 3, "n": 2}, {"n": 2, "best_of": 3}, {})
    for index in range(60):
        if index < 40:
            ids = [*prompt(rng.choice((0, 4, 8)), index % 5, 23), *prompt(rng.randrange(3, 10), index, 23)]
            spans = (Span(1, 2 + index % 3, bytes((index,))),) if index % 4 == 3 else ()
            fields = {"tenant": "ab"[index % 2], "priority": index % 3, "adapter_id": index % 7 % 3, "spans": spans}
            run.admit(ids, rng.choice((2, 6, 12)), eos_token_ids=(EOS,), **shapes[index % 5], **fields)
        if index % 9 == 8:
            run.cancel(f"r{index - 3}")
        run.step()
    return run.finish()


SCENARIOS = {
    **{f"{policy} {depth}": (scenario, policy, depth) for policy in ("fcfs", "fifo") for depth in (1, 2, 3)},
    **{
        f"rich {policy} {depth}": (rich_scenario, policy, depth)
        for policy, depth in (("fcfs", 1), ("fair", 2), ("fifo", 3))
    },
}


def chained(run: Run) -> str:
    """Digest over what every plan asks for; not over parameters' spelling, which may gain fields."""
    state = blake2b(digest_size=8)
    for plan in run.plans:
        columns = [
            list(getattr(plan, name))
            for name in (
                "slots",
                "starts",
                "counts",
                "flags",
                "edits",
                "copies",
                "freed_slots",
                "id_edits",
                "swap_outs",
            )
        ]
        entered = [(new.slot, new.request_id, new.choice, list(new.token_ids or ())) for new in plan.new_sequences]
        jobs = [(job.slot, job.span, job.key) for job in plan.encode_jobs]
        ids = (plan.finished_ids, plan.preempted_ids, plan.encoder_frees, plan.shared_prefixes)
        state.update(repr((columns, list(plan.host_loads), entered, jobs, ids)).encode())
    return state.hexdigest()


def table() -> dict[str, str]:
    return {name: chained(make(policy, depth)) for name, (make, policy, depth) in SCENARIOS.items()}


def test_the_scenario_is_worth_comparing() -> None:
    run = scenario("fcfs", 2)
    statistics = run.scheduler.statistics()
    assert statistics.num_preemptions > 0 and statistics.num_preemptions + statistics.num_requeued > 3
    assert statistics.prefix_hit_tokens > 50 and run.num_failures > 0
    assert all(count > 0 for reason, count in statistics.finished.items() if reason != "error")


def test_the_rich_scenario_uses_what_it_is_there_for() -> None:
    run = rich_scenario("fifo", 3)
    for name in ("copies", "swap_outs", "host_loads", "id_edits", "encode_jobs", "encoder_frees"):
        assert any(getattr(plan, name) for plan in run.plans), name
    statistics = run.scheduler.statistics()
    assert statistics.num_preemptions > 0 and statistics.num_preemptions + statistics.num_requeued > 3
    assert run.num_failures > 0


def test_equal_calls_make_equal_plans() -> None:
    for make, policy, depth in SCENARIOS.values():
        runs = [make(policy, depth) for _ in range(2)]
        assert runs[0].digests == runs[1].digests


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


def test_a_digest_without_ids_tells_decisions_apart_and_nothing_else() -> None:
    def run(first: int, length: int = 9, **fields: Any) -> list[list[bytes]]:
        made = Run(limits(num_blocks=8))
        for number in range(3):
            made.admit(prompt(length, first + number), 6, ignore_eos=True, **fields)
        made.finish()
        return [[plan.digest(with_ids) for plan in made.plans] for with_ids in (True, False)]

    (whole, decisions), (other, same) = run(0), run(50, temperature=0.7, seed=3)
    assert decisions == same and whole != other and not {*whole} & {*decisions}
    assert run(0, 10)[1] != decisions
