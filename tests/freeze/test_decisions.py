"""The scheduler decides as it did when the runs were frozen, and the frozen runs meet all that it can do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.freeze import core_names, decisions

QUICK = decisions.SEEDS[::5]
# What each of the frozen runs must meet in at least LEAST of them; see `--coverage` for how often each does.
LEAST = 3
REQUIRED = (
    [f"policy {name}" for name in core_names.ALL_POLICIES]
    + [f"depth {count}" for count in (1, 2, 3)]
    + [f"in flight {count}" for count in (1, 2, 3)]
    + [f"{switch} {value}" for switch in ("chunked prefill", "prefix caching") for value in (True, False)]
    + [f"block sharing {value}" for value in (True, False)]
    + [f"preemption {name}" for name in ("auto", "recompute", "swap")]
    + [f"composition {name}" for name in ("mixed", "separate")]
    + [f"groups {count}" for count in (1, 2, 3)]
    + [f"flag {name}" for name in core_names.ROW]
    + [f"event {kind.name}" for kind in core_names.EventKind]
    + [f"FINISHED {reason.name}" for reason in core_names.FinishReason]
    + [f"DEFERRED {reason}" for reason in (
        "ADAPTER_SLOTS", "COMPOSITION", "ENCODER_BUDGET", "FORK_BLOCKS", "HEADROOM", "HOST_LOAD", "KV_BLOCKS",
        "KV_READ_BUDGET", "MODALITY", "PARTIAL_PREFILL_CAP", "PREEMPTED_THIS_STEP", "SEQUENCE_CAP", "SWAP_SPACE",
        "TOKEN_BUDGET", "UNCOMMITTED",
    )]
    + [f"wait {reason}" for reason in (
        "ADAPTER_SLOTS", "BARRIER", "BEHIND", "COMPOSITION", "DRAINING", "ENCODER_BUDGET", "EXCLUDED", "HEADROOM",
        "IDLE", "KV_BLOCKS", "MODALITY", "PARTIAL_PREFILL_CAP", "PAUSED", "SEQUENCE_CAP", "SWAP_SPACE", "UNCOMMITTED",
    )]
    + [f"PREEMPTED {reason}" for reason in ("BARRIER", "HEADROOM", "KV_BLOCKS", "SEQUENCE_CAP", "SWAP_SPACE")]
    + [f"limit {name}" for name in (
        "adapter_slots", "encoder_budget", "find_shared_prefixes", "host_blocks", "long_prefill_threshold",
        "max_blocks_per_sequence", "max_draft_tokens", "max_kv_read", "max_partial_prefills", "separate_modalities",
        "tenant_weights",
    )]
    + [f"plan {name}" for name in (
        "copies", "drafts", "encode", "encoder_frees", "host_loads", "id_edits", "is_fast_path", "num_common_blocks",
        "only", "preempted", "rows", "shared_prefixes", "swap_outs", "wake_at",
    )]
    + [f"request {name}" for name in (
        "adapter", "beam search", "best_of", "cache_salt", "deadline", "given block keys", "grammar",
        "known by length", "min_tokens", "n", "objectives", "penalty", "pooled", "priority", "queue_timeout",
        "resumed", "scored", "spans", "tenant",
    )]
    + [f"result {name}" for name in ("dead_ends", "errors", "pooled", "scores")]
    + [f"refused {name}" for name in ("AdmissionError", "DuplicateRequestError", "PromptTooLongError")]
    + ["clock jump", "drain", "durations only", "early result refused", "failed step", "late result refused",
       "limit_step", "pause", "reset False", "reset True", "restart", "result without ids",
       "several choices give tokens", "sliding window", "taken events"]
)  # fmt: skip


def differences(seeds: list[int]) -> str:
    """Each run that differs and where, with how to see what."""
    found = decisions.check(seeds)
    return "\n".join(
        ["", *found, "see python -m tests.freeze.decisions --show SEED RECORD, here and before"] * bool(found)
    )


def test_every_fifth_frozen_run_decides_as_before() -> None:
    assert not differences(list(QUICK))


@pytest.mark.slow
def test_all_other_frozen_runs_decide_as_before() -> None:
    assert not differences([seed for seed in decisions.SEEDS if seed not in QUICK])


def test_the_frozen_runs_meet_every_feature() -> None:
    frozen = decisions.read()
    assert len(frozen) == len(set(decisions.SEEDS)) == 300
    counts = decisions.coverage(frozen)
    assert not {name: counts.get(name, 0) for name in REQUIRED if counts.get(name, 0) < LEAST}


def test_a_changed_record_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plans are hashed with: other positions in one plan of a run, and that plan is named."""
    seed = decisions.SEEDS[0]
    original, changed_at = core_names.rows, []

    def changed(plan: core_names.StepPlan) -> list[tuple[Any, ...]]:
        made = list(original(plan))
        if made and plan.step >= 3 and not changed_at:
            changed_at.append(plan.step)
            return [(slot, start + 1, *rest) for slot, start, *rest in made]
        return made

    monkeypatch.setattr(core_names, "rows", changed)
    found = decisions.check([seed])
    assert len(found) == 1 and f"seed {seed}: record " in found[0] and f"(plan, step {changed_at[0]})" in found[0], (
        found
    )
