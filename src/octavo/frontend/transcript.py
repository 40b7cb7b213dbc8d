"""Convert one choice's ids to its text: detokenising, end ids, stop strings, in order of position.

Owns: which ids count, which text is returned, what stopped it, the sum of log-probabilities. Does not: cancel or wait.
Invariants: a stop string is found however the ids were split; text after it is never returned, the string itself only
if requested; ids after the match do not count; end ids count but have no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishReason, SamplingParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


class Transcript:
    """The growing text of one choice. `stop_string` is set once one matched; later ids are ignored."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
        eos = () if params.ignore_eos else tuple(eos_token_ids)
        self._end_ids = frozenset((*eos, *params.stop_token_ids))
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, params.shown_special_ids)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.num_tokens = 0
        self.stop_string: str | None = None
        self.stop_token_id: int | None = None
        self.logprob_sum: float | None = None if params.num_logprobs is None else 0.0  # None: not known

    def push(
        self, ids: array[int], finish: FinishReason | None, logprobs: Sequence[TokenLogprobs | None] | None = None
    ) -> tuple[str, int]:
        """Add the next ids; return their text and how many of the ids count.

        `finish` is the engine's reason if these are the last ids; a stop string in them still takes precedence.
        """
        if self.stop_string is not None:
            return "", 0
        shown = ids
        if finish is FinishReason.STOP and ids and ids[-1] in self._end_ids:
            shown = ids[:-1]
        text, num_counted = self._show(shown)
        if self.stop_string is None:
            num_counted = len(ids)
            if len(shown) < len(ids) and ids[-1] in self._stop_token_ids:
                self.stop_token_id = ids[-1]
            if finish is not None:
                text += self._flush()
        self.num_tokens += num_counted
        if self.logprob_sum is not None:
            known = [entry.logprob for entry in (logprobs or ())[:num_counted] if entry is not None]
            self.logprob_sum = self.logprob_sum + sum(known) if len(known) == num_counted else None
        return text, num_counted

    def _show(self, ids: array[int]) -> tuple[str, int]:
        stops = self._stops
        if stops is None:
            return self._detokenizer.push(ids), len(ids)
        texts: list[str] = []
        for count, token_id in enumerate(ids, 1):
            text = self._detokenizer.push((token_id,))
            if self.num_tokens + count > self._min_tokens:
                text, self.stop_string = stops.push(text)
            texts.append(text)
            if self.stop_string is not None:
                return "".join(texts), count
        return "".join(texts), len(ids)

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        safe, self.stop_string = self._stops.push(text)
        return safe if self.stop_string is not None else safe + self._stops.flush()
