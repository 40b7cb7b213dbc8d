"""Random configurations of a scheduler: small, scarce in everything, with every switch.

Owns: how random numbers become Limits and Faults; the hostile policy. Does not: run anything.
"""

from __future__ import annotations

import random
from typing import Any

from tests.core.harness import limits
from tests.fake_model import Faults

from octavo.core.limits import GroupKind, GroupSpec, Limits
from octavo.core.policy import POLICIES, Policy, register_policy
from octavo.core.request_state import RequestState

VOCAB_SIZE = 23
TENANTS = ("", "acme", "zeta")
BUILT_IN = tuple(sorted(name for name, policy in POLICIES.items() if policy.__module__.startswith("octavo.core.")))
GROUPS = (
    (0,), (0,), (0,), (0,), (0, 5), (0, 3), (0, 9), (4,), (7,), (3, 8), (0, 4, 11),
)  # fmt: skip


class Hostile(Policy):
    """Answers anything, another thing each time, and sometimes nothing at all. The same in every replay."""

    name = "hostile_driver"
    headroom = 0.1
    is_sane = False  # for the checks: its order says nothing

    def configure(self, limits: Limits) -> None:
        rng = random.Random(repr((limits.num_blocks, limits.max_model_len, limits.max_sequences)))
        self.rng = rng
        self.skip_ahead, self.preempt_on_arrival = rng.random() < 0.5, rng.random() < 0.3
        self.lookahead, self.tracks_service = rng.choice((1, 1, 4)), rng.random() < 0.5

    def answer(self) -> Any:
        kind = self.rng.randrange(9)
        if kind == 0:
            raise RuntimeError("a policy's bug")
        wrong: tuple[Any, ...] = (None, "first", (float("nan"),), ("a",), (float("inf"),))
        return wrong[kind - 1] if kind <= 5 else (self.rng.random(), float(self.rng.randrange(3)))

    def key(self, request: RequestState) -> tuple[float, ...]:
        return self.answer()

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        return self.answer()

    def prefer(self, request: RequestState, cached_tokens: int) -> tuple[float, ...]:
        return self.answer()

    def lane(self, request: RequestState) -> str:
        return self.rng.choice(("a", "b"))

    def lane_key(self, lane: str) -> float:
        return self.rng.random()

    def served(self, request: RequestState, num_tokens: int) -> None:
        self.answer()


register_policy(Hostile)


def random_limits(rng: random.Random) -> Limits:
    """A small engine in which blocks, slots and tokens are scarce."""
    block_size = rng.choice((1, 2, 3, 4, 4, 8))
    max_model_len = rng.randrange(12, 49)
    longest = -(-max_model_len // block_size)
    max_batch_tokens = rng.choice((1, 3, 8, 16, 16, 32, 64, 64))
    groups = tuple(GroupSpec(GroupKind.SLIDING if window else GroupKind.FULL, window) for window in rng.choice(GROUPS))
    scarcity = rng.uniform(0.8, rng.choice((1.1, 1.3, 2.5)))
    num_blocks = tuple(
        max(1, int((group.peak_blocks(max_model_len, max_batch_tokens, block_size)) * scarcity)) for group in groups
    )
    return limits(
        block_size=block_size,
        num_blocks=num_blocks,
        groups=groups,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        max_batch_tokens=max_batch_tokens,
        max_sequences=rng.choice((1, 2, 3, 4, 6, 6, 8, 8)),
        policy=rng.choice(("fcfs", "fcfs", "fcfs", Hostile.name, *BUILT_IN)),
        headroom=rng.choice((None, 0.0, 0.0, 0.0, 0.0, 0.1, 0.3)),
        chunked_prefill=rng.random() < 0.75,
        max_partial_prefills=rng.choice((0, 0, 0, 1, 2)),
        long_prefill_threshold=rng.choice((0, 0, 0, 2, 5)),
        prefix_caching=rng.random() < 0.75,
        block_sharing=rng.random() < 0.8,
        max_blocks_per_sequence=rng.choice((0, 0, 2, longest)),
        **_random_extras(rng, num_blocks, max_model_len),
    )


def _random_extras(rng: random.Random, num_blocks: tuple[int, ...], max_model_len: int) -> dict[str, Any]:
    """What most engines leave off."""
    host = rng.choice((0.0, 0.5, 1.0, 2.0))
    has_encoder = rng.random() < 0.4
    return {
        "preemption": rng.choice(("auto", "recompute", "swap", "swap")),
        "host_blocks": tuple(int(count * host) for count in num_blocks) if host else (),
        "host_load_min_tokens": rng.choice((0, 1, 4, 16)),
        "max_kv_read": rng.choice((0, 0, 0, rng.randrange(4, 2 * max_model_len))),
        "max_bypass": rng.choice((1, 2, 5, 64)),
        "encoder_budget": rng.choice((5, 8, 8, 12)) if has_encoder else 0,
        "encoder_cache": rng.choice((5, 8, 8, 12)) if has_encoder else 0,
        "adapter_slots": rng.choice((0, 0, 1, 2)),
        "separate_modalities": rng.random() < 0.2,
        "composition": rng.choice(("mixed", "mixed", "mixed", "separate")),
        "max_prefill_run": rng.choice((1, 2, 4)),
        "tenant_weights": (("acme", 2.0),) if rng.random() < 0.5 else (),
        "find_shared_prefixes": rng.random() < 0.3,
        # drawn apart, so that a seed without drafts is the run that it was before there were any
        "max_draft_tokens": (apart := random.Random(hash(rng.getstate()[1]))).choice((0, 0, 1, 3, 7)),
        "max_draft_rows": apart.choice((1, 2, 4, 8)),
    }


def random_faults(rng: random.Random) -> Faults:
    """None at all in half of the seeds; else each kind now and then."""
    if rng.random() < 0.5:
        return Faults(random.Random(rng.random()))
    chances = [rng.choice((0.0, 0.01, 0.05, 0.15)) for _ in range(4)]
    return Faults(random.Random(rng.random()), *chances)
