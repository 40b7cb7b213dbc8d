"""Estimator: how long a request would wait, from what was measured of the last ones.

Owns: decayed means of prefill time per token, time between a sequence's tokens, output lengths, tokens per character.
Does not: read a clock, know who waits (waiting does), or decide anything.
The model: `running` sequences share the engine, each at the speed that sequences had lately; one that waits takes its
prompt and an output of the usual length. Speeds are those of sequences under the present load, so that what a fuller
batch costs each of them is in them. Until something has ended nothing is known, and nothing is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_TOKENS_PER_CHARACTER = 0.3


class DecayedMean:
    """A weighted mean in which what came `half_life` of weight ago counts half."""

    __slots__ = ("_half_life", "_sum", "_weight")

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._sum = 0.0
        self._weight = 0.0

    def add(self, total: float, weight: float) -> None:
        """Count `weight` things that measured `total` together."""
        kept = 0.5 ** (weight / self._half_life)
        self._sum = self._sum * kept + total
        self._weight = self._weight * kept + weight

    @property
    def value(self) -> float | None:
        """The mean; None before anything came."""
        return self._sum / self._weight if self._weight else None


@dataclass(slots=True)
class Work:
    """What waits: sequences, the tokens of their prompts, the tokens that they will likely generate."""

    num_sequences: float = 0
    prompt_tokens: float = 0
    output_tokens: float = 0

    def add(self, other: Work, times: float = 1) -> None:
        """Add another's, so many times."""
        self.num_sequences += times * other.num_sequences
        self.prompt_tokens += times * other.prompt_tokens
        self.output_tokens += times * other.output_tokens

    def scaled(self, share: float) -> Work:
        """A share of it."""
        return Work(self.num_sequences * share, self.prompt_tokens * share, self.output_tokens * share)


class Estimator:
    """Measures and predicts."""

    def __init__(self) -> None:
        self._prefill_s = DecayedMean(16_384)  # per prompt token, cached or not
        self._new_share = DecayedMean(16_384)  # of prompt tokens, those that were not cached
        self._gap_s = DecayedMean(512)  # between two tokens of one sequence
        self._output_tokens = DecayedMean(32)  # of a sequence
        self._tokens_per_character = DecayedMean(65_536)

    def tokens_came(self, gap_s: float, num_tokens: int) -> None:
        """A sequence got so many tokens, so long after those before."""
        self._gap_s.add(gap_s, num_tokens)

    def prompt_done(self, prefill_s: float, num_tokens: int, num_cached: int = 0) -> None:
        """A prompt of so many tokens took so long; some were in the prefix cache."""
        if num_tokens > 0:
            self._prefill_s.add(prefill_s, num_tokens)
            self._new_share.add(num_tokens - num_cached, num_tokens)

    @property
    def new_share(self) -> float:
        """The share of prompt tokens that were not in the prefix cache lately."""
        mean = self._new_share.value
        return 1.0 if mean is None else mean

    def sequences_ended(self, output_tokens: int, num_sequences: int) -> None:
        """Sequences ended with so many tokens together."""
        self._output_tokens.add(output_tokens, num_sequences)

    def text_read(self, num_characters: int, num_tokens: int) -> None:
        """So many characters made so many tokens."""
        if num_characters > 0:
            self._tokens_per_character.add(num_tokens, num_characters)

    def tokens_of(self, num_characters: int) -> int:
        """About how many tokens a text has."""
        mean = self._tokens_per_character.value
        return round(num_characters * (FIRST_TOKENS_PER_CHARACTER if mean is None else mean))

    def output_tokens(self, max_tokens: int | None) -> float:
        """About how many tokens a sequence will generate; 0 while nothing is known."""
        mean = self._output_tokens.value
        if mean is None:
            return 0.0
        return mean if max_tokens is None else min(mean, max_tokens)

    def busy_s(self, work: Work) -> float | None:
        """Seconds of one sequence's time that the work takes; None while nothing is known."""
        gap_s, prefill_s = self._gap_s.value, self._prefill_s.value
        if gap_s is None or prefill_s is None or self._output_tokens.value is None:
            return None
        return work.prompt_tokens * prefill_s + work.output_tokens * gap_s

    def slot_s(self, num_running: int) -> float | None:
        """Seconds until the next of the running sequences ends, on average."""
        mean = self._output_tokens.value
        taken_s = None if mean is None else self.busy_s(Work(1, 0, mean))
        return None if taken_s is None else taken_s / max(1, num_running)

    def wait_s(self, ahead: Work, num_running: int) -> float | None:
        """Seconds until a request starts that waits behind `ahead`, all slots being taken; None = unknown."""
        ahead_s, slot_s = self.busy_s(ahead), self.slot_s(num_running)
        return None if ahead_s is None or slot_s is None else ahead_s / max(1, num_running) + slot_s
