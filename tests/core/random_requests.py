"""Random requests: shared prefixes, several choices, beams, media items, adapters, tenants, limits in time.

Owns: how random numbers become the arguments of Run.admit. Does not: admit.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

from tests.core.random_config import TENANTS, VOCAB_SIZE
from tests.hash_chain import HABIT, oracle

from octavo.core.limits import Limits
from octavo.core.request import SamplingParams, Span, Want

EOS = 2
ITEM_LENGTHS = {b"cat": 2, b"dog": 3, b"sun": 5, b"sea": 8}


class RequestMaker:
    """Makes requests for one engine."""

    def __init__(self, rng: random.Random, sizes: Limits, has_time_limits: bool) -> None:
        self.rng, self.sizes, self.has_time_limits = rng, sizes, has_time_limits
        self.prefixes = [[rng.randrange(3, VOCAB_SIZE) for _ in range(64)] for _ in range(3)]
        self.keys = [rng.randbytes(16) for _ in range(64)]
        self.several = rng.choice((0.0, 0.15, 0.5))
        self.beams = rng.choice((0.0, 0.1, 0.4))

    def make(self, now: float) -> tuple[Any, int | None, dict[str, Any]]:
        """A prompt (or its length), max_tokens, and the other fields."""
        rng, size = self.rng, self.sizes.block_size
        fields = self.fields(now)
        longest = self.sizes.max_model_len
        length = rng.randrange(1, longest + 2 if rng.random() < 0.3 else longest // 3)
        if rng.random() < 0.6:
            length = max(1, length // size * size)
        shared = rng.choice((0, length, length, rng.randrange(length + 1)))
        ids: Any = rng.choice(self.prefixes)[:shared]
        ids += [rng.randrange(3, VOCAB_SIZE) for _ in range(length - shared)]
        max_tokens = rng.choice((None, None, None, 1, 2, 5, 9, 20))
        kind = rng.random()
        if kind < 0.07:
            return length, max_tokens, {"block_keys": tuple(self.keys[: length // size])}
        if kind < 0.15:
            self.add_emitted(ids, fields)
        elif kind < 0.15 + self.several:
            self.add_choices(fields)
        elif kind < 0.15 + self.several + self.beams:
            self.add_beams(fields)
            max_tokens = rng.choice((1, 2, 5, 9, 14))
        elif kind > 0.93:
            fields["wants"] = rng.choice((Want.POOL, Want.SCORE, Want.SCORE | Want.SAMPLE))
            fields["score_from"] = rng.randrange(1, length + 1)
        if self.sizes.encoder_budget and rng.random() < 0.5 and "emitted_token_ids" not in fields:
            self.add_items(ids, fields)
        if max_tokens is not None and len(fields.get("emitted_token_ids", ())) >= max_tokens:
            max_tokens = None
        return ids, max_tokens, fields

    def fields(self, now: float) -> dict[str, Any]:
        """Sampling and request fields that change the text, the order, the end, or what may be shared."""
        rng = self.rng
        fields: dict[str, Any] = {"eos_token_ids": (EOS,), "seed": self.seed(), "tenant": rng.choice(TENANTS)}
        for chance, name, value in (
            (0.6, "ignore_eos", True),
            (0.2, "stop_token_ids", (rng.randrange(3, VOCAB_SIZE),)),
            (0.1, "cache_salt", b"salt"),
            (0.3, "priority", rng.randrange(-2, 3)),
            (0.2, "ttft_objective", rng.random()),
            (0.2, "tpot_objective", rng.random() / 10),
            (0.3 * self.has_time_limits, "deadline", now + rng.random()),
            (0.3 * self.has_time_limits, "queue_timeout", rng.random() / 2),
            (0.4 * bool(self.sizes.adapter_slots), "adapter_id", rng.randrange(1, 4)),
        ):
            if rng.random() < chance:
                fields[name] = value
        return fields

    def seed(self) -> int:
        """One of few; where there is speculation, mostly one whose ids can be foreseen."""
        has_habit = self.sizes.max_draft_tokens and self.rng.random() < 0.7
        return self.rng.randrange(3) + HABIT * bool(has_habit)

    def add_emitted(self, ids: list[int], fields: dict[str, Any]) -> None:
        """Make it a request of an earlier epoch that had some of its outputs."""
        params = SamplingParams(max_tokens=None, **{k: v for k, v in fields.items() if k in SamplingParams.__slots__})
        windows = tuple(group.window for group in self.sizes.groups)
        outputs = oracle(ids, 6, VOCAB_SIZE, (EOS,), params, fields.get("adapter_id", 0), windows=windows)
        fields["emitted_token_ids"] = array("i", outputs[: self.rng.randrange(len(outputs))])

    def add_choices(self, fields: dict[str, Any]) -> None:
        """Several choices."""
        fields["n"] = self.rng.choice((2, 2, 3, 4))
        if self.rng.random() < 0.3:
            fields["best_of"] = fields["n"] + self.rng.randrange(3)

    def add_beams(self, fields: dict[str, Any]) -> None:
        """Beam search."""
        rng = self.rng
        fields["beam_width"] = rng.choice((1, 2, 3, 4))
        fields["n"] = rng.randrange(1, fields["beam_width"] + 1)
        fields["length_penalty"] = rng.choice((1.0, 0.0, 2.0, -1.0))
        fields["early_stopping"] = rng.choice((True, False, "never"))

    def add_items(self, ids: list[int], fields: dict[str, Any]) -> None:
        """Put media items into the prompt; their positions hold a placeholder."""
        rng, spans, start = self.rng, [], self.rng.randrange(4)
        while True:
            key = rng.choice(sorted(ITEM_LENGTHS))
            if start + ITEM_LENGTHS[key] > len(ids) or len(spans) > 2:
                break
            spans.append(Span(start, ITEM_LENGTHS[key], key))
            ids[start : start + ITEM_LENGTHS[key]] = [1] * ITEM_LENGTHS[key]
            start += ITEM_LENGTHS[key] + rng.randrange(4)
        fields["spans"] = tuple(spans)
