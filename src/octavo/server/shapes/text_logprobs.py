"""Log-probabilities of texts: an answer's and an echoed prompt's as OpenAI has them, and vLLM's prompt_logprobs.

Owns: these forms. Does not: know whether they travel whole or in a stream.
Two ids may have the same text (parts of characters mostly): the token's own log-probability stays under its text, any
other of that text is under "token_id:ID".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.server.answer import Json, Pieces, entries_of, finite

if TYPE_CHECKING:
    from octavo.core.plan import TokenLogprobs
    from octavo.frontend.outputs import TextDelta


@dataclass(slots=True)
class LogprobColumns:
    """OpenAI's `logprobs` of a text, as columns that grow."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token_id: int, entry: TokenLogprobs | None, offset: int, pieces: Pieces) -> None:
        """Add a token; the first of a prompt has no entry."""
        self.tokens.append(token_text(token_id, pieces))
        self.token_logprobs.append(None if entry is None else finite(entry.logprob))
        self.top_logprobs.append(None if entry is None else top_logprobs(entry, pieces))
        self.text_offset.append(offset)

    def json(self) -> Json:
        """As an object."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


class EchoedPrompt:
    """One prompt's part of `logprobs`, piece by piece; `first_id` has no log-probability, nothing being before it."""

    def __init__(self, text: str, first_id: int, num_top: int, pieces: Pieces) -> None:
        self._text = text
        self._first_id: int | None = first_id
        self._num_top = num_top
        self._pieces = pieces
        self._offset = 0

    @property
    def has_begun(self) -> bool:
        """Whether something was given."""
        return self._first_id is None

    def add(self, entries: Iterable[TokenLogprobs], columns: LogprobColumns) -> None:
        """Add the next tokens of the prompt; the first one goes before all."""
        if self._first_id is not None:
            columns.add(self._first_id, None, 0, self._pieces)
            self._pass(self._first_id)
            self._first_id = None
        for entry in entries:
            columns.add(entry.token_id, shortened(entry, self._num_top), self._offset, self._pieces)
            self._pass(entry.token_id)

    def _pass(self, token_id: int) -> None:
        """Move behind a token. One that the text does not show, such as what a tokenizer puts first, has no width."""
        raw = self._pieces.token_bytes(token_id)
        shown = raw.decode(errors="replace")
        if "\ufffd" in shown or self._text.startswith(shown, self._offset):
            self._offset += num_characters(raw)


def prompt_logprobs(first: int, entries: Sequence[TokenLogprobs], num_top: int, pieces: Pieces) -> list[Json | None]:
    """vLLM's `prompt_logprobs` of positions from `first` on: id -> log-probability, rank, text; null for the first."""
    found: list[Json | None] = [None] if first == 1 else []
    for entry in entries:
        entry = shortened(entry, num_top)
        shown = [(entry.token_id, entry.logprob, entry.rank)]
        ranked = zip(entry.top_ids, entry.top_logprobs, range(1, num_top + 1), strict=False)
        shown += [one for one in ranked if one[0] != entry.token_id]
        found.append(
            {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": token_text(token_id, pieces),
                }
                for token_id, logprob, rank in shown
            }
        )
    return found


def top_logprobs(entry: TokenLogprobs, pieces: Pieces) -> dict[str, float]:
    """The best tokens and the token itself: text -> log-probability, the best first."""
    own = token_text(entry.token_id, pieces)
    tops: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        text = token_text(token_id, pieces)
        is_taken = text in tops or (text == own and token_id != entry.token_id)
        tops[f"token_id:{token_id}" if is_taken else text] = finite(logprob)
    tops.setdefault(own, finite(entry.logprob))
    return tops


def shortened(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """The entry with so many of its best."""
    if len(entry.top_ids) <= num_top:
        return entry
    kind = type(entry)
    return kind(entry.token_id, entry.logprob, entry.rank, entry.top_ids[:num_top], entry.top_logprobs[:num_top])


def token_text(token_id: int, pieces: Pieces) -> str:
    """What a token looks like by itself."""
    return pieces.token_bytes(token_id).decode(errors="replace")


def num_characters(raw: bytes) -> int:
    """Characters that begin in these bytes: one split over several tokens counts with its first."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def add_logprobs(columns: LogprobColumns, deltas: Iterable[TextDelta], pieces: Pieces, offset: int) -> int:
    """Add the tokens of deltas to a text's columns, the first one `offset` characters in; give the offset behind."""
    for entry in entries_of(deltas):
        columns.add(entry.token_id, entry, offset, pieces)
        offset += num_characters(pieces.token_bytes(entry.token_id))
    return offset
